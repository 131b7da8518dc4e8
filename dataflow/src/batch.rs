//! How a step's samples are cut: into lanes, grains and microbatches, and over workers.
//!
//! Lanes and grains are numerics: sums are formed along them, on any worker. Microbatches and the
//! cut over workers are not: they say how much is in flight and where.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use tidemill_collective::{CollectiveError, LaneSchedule};

use crate::error::{JobError, Result};
use crate::parallel::Sharding;

/// Samples of a step where a config does not say, and does not ask for more lanes.
const DEFAULT_SAMPLES_PER_STEP: usize = 32;
/// Lanes are at most this many unless a config says so.
const DEFAULT_LANES: usize = 8;
/// Beyond any batch that trains; below it no product of positions leaves 64 bits.
const MOST_SAMPLES_PER_STEP: usize = 1 << 24;

/// `[batch]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BatchSettings {
    /// Samples of one optimizer update, over all workers. By default 32, or one for each of `lanes` where there are more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samples_per_step: Option<usize>,
    /// Parts of the batch that are summed by the canonical tree: a power of two. By default the
    /// largest up to 8 and up to `samples_per_step`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lanes: Option<usize>,
    /// Samples whose parameter gradients are formed together; where a lane has fewer, those of a lane.
    pub grain_samples: usize,
    /// Grains in flight on a worker; memory, never numerics.
    pub microbatch_grains: MicrobatchGrains,
}

impl Default for BatchSettings {
    fn default() -> Self {
        Self {
            samples_per_step: None,
            lanes: None,
            grain_samples: 1,
            microbatch_grains: MicrobatchGrains::Grains(4),
        }
    }
}

/// `batch.microbatch_grains`: a number, or `"auto"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "MicrobatchText", into = "MicrobatchText")]
pub enum MicrobatchGrains {
    /// As many as a [`MicrobatchMemory`] has room for.
    Auto,
    /// This many, or as many as a lane has.
    Grains(usize),
}

#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "a number of grains or \"auto\"")]
enum MicrobatchText {
    Number(usize),
    Word(String),
}

impl TryFrom<MicrobatchText> for MicrobatchGrains {
    type Error = String;

    fn try_from(text: MicrobatchText) -> std::result::Result<Self, String> {
        match text {
            MicrobatchText::Number(grains) => Ok(Self::Grains(grains)),
            MicrobatchText::Word(word) if word == "auto" => Ok(Self::Auto),
            MicrobatchText::Word(word) => {
                Err(format!("microbatch_grains: expected a number or \"auto\", found {word:?}"))
            }
        }
    }
}

impl From<MicrobatchGrains> for MicrobatchText {
    fn from(grains: MicrobatchGrains) -> Self {
        match grains {
            MicrobatchGrains::Auto => Self::Word("auto".to_owned()),
            MicrobatchGrains::Grains(grains) => Self::Number(grains),
        }
    }
}

/// The memory by which `microbatch_grains = "auto"` is resolved: a microbatch has as many whole grains as fit, at least one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MicrobatchMemory {
    /// Bytes that one sample needs in a worker's workspace.
    pub sample_bytes: usize,
    /// Bytes that a worker's workspace may take.
    pub workspace_bytes: usize,
}

/// A checked cut of a step's samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchPlan {
    samples_per_step: usize,
    lanes: usize,
    grain_samples: usize,
    evaluation_grain_samples: usize,
    microbatch_grains: usize,
    sharding: Sharding,
}

impl BatchSettings {
    /// The samples of a step: those that are set, or the default.
    pub fn resolved_samples_per_step(&self) -> usize {
        let lanes = self.lanes.unwrap_or(1);
        self.samples_per_step.unwrap_or(DEFAULT_SAMPLES_PER_STEP.max(lanes))
    }

    /// The number of lanes: the one that is set, or the default.
    pub fn resolved_lanes(&self) -> usize {
        let most = self.resolved_samples_per_step().clamp(1, DEFAULT_LANES);
        self.lanes.unwrap_or(1 << most.ilog2())
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// No samples, lanes that are no power of two or more than the samples, no samples in a grain, or no grains in a
    /// microbatch; the error names the key.
    pub fn plan(&self, memory: MicrobatchMemory) -> Result<BatchPlan> {
        let samples_per_step = self.resolved_samples_per_step();
        let lanes = self.resolved_lanes();
        at_least_one("batch.samples_per_step", samples_per_step)?;
        if let Some(found) = self.samples_per_step.filter(|&found| found > MOST_SAMPLES_PER_STEP) {
            let expected = format!("at most {MOST_SAMPLES_PER_STEP}");
            return Err(JobError::value("batch.samples_per_step", expected, found));
        }
        at_least_one("batch.grain_samples", self.grain_samples)?;
        // Where nothing says how many samples a step has, it has one for each lane at least.
        let (most_lanes, why) = match self.samples_per_step {
            Some(samples) => (samples, format!("samples_per_step ({samples})")),
            None => (MOST_SAMPLES_PER_STEP, MOST_SAMPLES_PER_STEP.to_string()),
        };
        if !lanes.is_power_of_two() || lanes > most_lanes {
            let expected = format!("a power of two up to {why}");
            return Err(JobError::value("batch.lanes", expected, lanes));
        }
        let lane_samples = samples_per_step.div_ceil(lanes);
        let grain_samples = self.grain_samples.min(lane_samples);
        let microbatch_grains = match self.microbatch_grains {
            MicrobatchGrains::Grains(grains) => {
                at_least_one("batch.microbatch_grains", grains)?;
                grains
            }
            MicrobatchGrains::Auto => {
                let grain_bytes = memory.sample_bytes.saturating_mul(grain_samples);
                memory.workspace_bytes / grain_bytes.max(1)
            }
        };
        let microbatch_grains = microbatch_grains.clamp(1, lane_samples.div_ceil(grain_samples));
        Ok(BatchPlan {
            samples_per_step,
            lanes,
            grain_samples,
            evaluation_grain_samples: self.grain_samples,
            microbatch_grains,
            sharding: Sharding::default(),
        })
    }
}

fn at_least_one(key: &str, found: usize) -> Result<()> {
    if found == 0 { Err(JobError::value(key, "at least 1", found)) } else { Ok(()) }
}

impl BatchPlan {
    /// The same for workers that share out state as `sharding` says, which is the same on every worker, and never numerics.
    #[must_use]
    pub fn sharded(self, sharding: Sharding) -> Self {
        Self { sharding, ..self }
    }

    /// The state that workers share out.
    pub fn sharding(&self) -> Sharding {
        self.sharding
    }

    /// Samples of a step, over all workers.
    pub fn samples_per_step(&self) -> usize {
        self.samples_per_step
    }

    /// The number of lanes: a power of two.
    pub fn lanes(&self) -> usize {
        self.lanes
    }

    /// Samples of every grain but perhaps a lane's last: never more than the longest lane has.
    pub fn grain_samples(&self) -> usize {
        self.grain_samples
    }

    /// Samples of every grain of an evaluation, except perhaps its last; no lane bounds it. This is the setting as it was given.
    pub fn evaluation_grain_samples(&self) -> usize {
        self.evaluation_grain_samples
    }

    /// Grains of every microbatch but perhaps a lane's last: never more than the longest lane has.
    pub fn microbatch_grains(&self) -> usize {
        self.microbatch_grains
    }

    /// Samples of the largest microbatch.
    pub fn microbatch_samples(&self) -> usize {
        let lane_samples = self.samples_per_step.div_ceil(self.lanes);
        lane_samples.min(self.microbatch_grains * self.grain_samples)
    }

    /// The samples of `lane`, counted from the start of the step.
    pub fn lane_samples(&self, lane: usize) -> Range<usize> {
        let cut = |lane: usize| lane * self.samples_per_step / self.lanes;
        cut(lane)..cut(lane + 1)
    }

    /// The number of grains of `lane`.
    pub fn lane_grains(&self, lane: usize) -> usize {
        self.lane_samples(lane).len().div_ceil(self.grain_samples)
    }

    /// The samples of grain `grain` of `lane`, counted from the start of the step; empty past the lane's last.
    pub fn grain_range(&self, lane: usize, grain: usize) -> Range<usize> {
        let samples = self.lane_samples(lane);
        let cut = |grain: usize| {
            let before = grain.saturating_mul(self.grain_samples);
            samples.end.min(samples.start.saturating_add(before))
        };
        cut(grain)..cut(grain.saturating_add(1))
    }

    /// The microbatches of `lane`, each a range of its grains.
    pub fn microbatches(&self, lane: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let (grains, size) = (self.lane_grains(lane), self.microbatch_grains);
        (0..grains).step_by(size).map(move |first| first..grains.min(first + size))
    }

    /// Which of `workers` workers has which lanes, and in which order they leave it.
    ///
    /// # Errors
    /// More workers than lanes, or none.
    pub fn lane_schedule(&self, workers: usize) -> Result<LaneSchedule> {
        let schedule = match self.sharding {
            Sharding::Optimizer => LaneSchedule::at_once(self.lanes, workers),
            Sharding::Gradients | Sharding::Parameters => {
                LaneSchedule::one_by_one(self.lanes, workers)
            }
        };
        schedule.map_err(|error| match error {
            CollectiveError::Workers { workers, lanes } => {
                let expected = match workers {
                    0 => "at least 1".to_owned(),
                    _ => format!("at most {lanes} over all processes, one for each of batch.lanes"),
                };
                JobError::value("workers", expected, workers)
            }
            _ => JobError::value("batch.lanes", "a power of two", self.lanes),
        })
    }

    /// The lanes of worker `worker` of `workers`, in order.
    ///
    /// # Errors
    /// More workers than lanes, or none.
    pub fn worker_lanes(&self, worker: usize, workers: usize) -> Result<Vec<usize>> {
        let schedule = self.lane_schedule(workers)?;
        if worker >= workers {
            return Err(JobError::value("worker", format!("below {workers}"), worker));
        }
        Ok(schedule.of_worker(worker))
    }

    /// The samples of `lanes`, which are in order, counted from the start of the step: the samples of neighbouring lanes as one range.
    pub fn samples_of(&self, lanes: &[usize]) -> Vec<Range<usize>> {
        let neighbours = lanes.chunk_by(|&lane, &next| lane + 1 == next);
        let samples = |lanes: &[usize]| {
            let (first, last) = (lanes[0], lanes[lanes.len() - 1]);
            self.lane_samples(first).start..self.lane_samples(last).end
        };
        neighbours.map(samples).collect()
    }

    /// The positions of `samples` of step `step` (from 0) in the endless canonical order.
    pub fn positions(&self, step: u64, samples: &Range<usize>) -> Range<u64> {
        let start = step.saturating_mul(self.samples_per_step as u64);
        let at = |sample: usize| start.saturating_add(sample as u64);
        at(samples.start)..at(samples.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: MicrobatchMemory = MicrobatchMemory { sample_bytes: 10, workspace_bytes: 35 };

    fn settings(samples_per_step: usize, lanes: usize, grain_samples: usize) -> BatchSettings {
        let (samples_per_step, lanes) = (Some(samples_per_step), Some(lanes));
        BatchSettings { samples_per_step, lanes, grain_samples, ..Default::default() }
    }

    #[test]
    fn lanes_grains_and_microbatches_cover_the_step_in_order() {
        for (samples, lanes, grain_samples) in [(13, 4, 2), (8, 8, 3), (32, 8, 1), (7, 1, 3)] {
            for microbatch in [1, 2, 100] {
                let mut settings = settings(samples, lanes, grain_samples);
                settings.microbatch_grains = MicrobatchGrains::Grains(microbatch);
                let plan = settings.plan(MEMORY).unwrap();
                let mut next = 0;
                for lane in 0..lanes {
                    let mut grain = 0;
                    for microbatch in plan.microbatches(lane) {
                        assert_eq!(microbatch.start, grain, "a microbatch begins where one ended");
                        assert!(microbatch.len() <= plan.microbatch_grains());
                        let first = next;
                        for grain in microbatch.clone() {
                            let range = plan.grain_range(lane, grain);
                            assert_eq!(range.start, next);
                            assert!(!range.is_empty() && range.len() <= grain_samples);
                            next = range.end;
                        }
                        assert!(next - first <= plan.microbatch_samples());
                        grain = microbatch.end;
                    }
                    assert_eq!(grain, plan.lane_grains(lane));
                    assert_eq!(next, plan.lane_samples(lane).end, "no microbatch crosses a lane");
                    assert!(plan.grain_range(lane, grain).is_empty());
                }
                assert_eq!(next, samples);
            }
        }
    }

    #[test]
    fn workers_have_every_sample_once() {
        let plan = settings(13, 8, 1).plan(MEMORY).unwrap();
        for (workers, sharding) in (1..=8).flat_map(|w| Sharding::ALL.map(|s| (w, s))) {
            let plan = plan.clone().sharded(sharding);
            let lanes = |worker| plan.worker_lanes(worker, workers).unwrap();
            let ranges = |worker| plan.samples_of(&lanes(worker));
            if sharding == Sharding::Optimizer || workers == 1 {
                assert!((0..workers).all(|worker| ranges(worker).len() == 1), "neighbours");
            }
            let mut samples: Vec<_> = (0..workers).flat_map(ranges).flatten().collect();
            samples.sort_unstable();
            assert_eq!(samples, (0..13).collect::<Vec<_>>(), "{workers} workers, {sharding:?}");
        }
        assert_eq!(plan.positions(3, &(2..5)), 41..44);
        let error = plan.worker_lanes(0, 9).unwrap_err().to_string();
        let expected = "at most 8 over all processes, one for each of batch.lanes";
        assert_eq!(error, format!("workers: expected {expected}, found 9"));
    }

    #[test]
    fn grains_and_steps_beyond_all_numbers_are_empty_and_not_those_of_the_beginning() {
        let plan = settings(13, 4, 8).plan(MEMORY).unwrap();
        for grain in [1, usize::MAX / 4 + 1, usize::MAX - 1, usize::MAX] {
            assert!(plan.grain_range(1, grain).is_empty(), "{grain}");
        }
        for step in [u64::MAX / 13 + 1, u64::MAX] {
            assert!(plan.positions(step, &(2..5)).is_empty(), "{step}");
        }
    }

    #[test]
    fn defaults_and_auto_resolve() {
        for (samples, lanes) in [(1, 1), (3, 2), (7, 4), (8, 8), (100, 8)] {
            let samples_per_step = Some(samples);
            let settings = BatchSettings { samples_per_step, ..Default::default() };
            assert_eq!(settings.plan(MEMORY).unwrap().lanes(), lanes);
        }
        for (lanes, samples) in [(1, 32), (32, 32), (64, 64)] {
            let settings = BatchSettings { lanes: Some(lanes), ..Default::default() };
            assert_eq!(settings.plan(MEMORY).unwrap().samples_per_step(), samples);
        }
        let auto = |workspace_bytes| {
            let mut settings = settings(64, 1, 1);
            settings.microbatch_grains = MicrobatchGrains::Auto;
            let memory = MicrobatchMemory { workspace_bytes, ..MEMORY };
            settings.plan(memory).unwrap().microbatch_grains()
        };
        assert_eq!([auto(0), auto(35), auto(1 << 20)], [1, 3, 64]);
    }

    #[test]
    fn a_grain_is_never_longer_than_a_lane_but_in_an_evaluation() {
        let plan = |grain_samples| settings(45, 8, grain_samples).plan(MEMORY).unwrap();
        let whole = plan(6);
        for longer in [7, 1 << 20, usize::MAX] {
            let plan = plan(longer);
            assert_eq!((plan.grain_samples(), plan.evaluation_grain_samples()), (6, longer));
            for lane in 0..8 {
                assert_eq!(plan.grain_range(lane, 0), whole.grain_range(lane, 0));
                assert_eq!(plan.grain_range(lane, 0), plan.lane_samples(lane));
                assert!(plan.grain_range(lane, 1).is_empty());
            }
            assert_eq!((plan.microbatch_grains(), plan.microbatch_samples()), (1, 6));
        }
    }

    #[test]
    fn wrong_settings_name_their_key() {
        let message = |settings: &BatchSettings| settings.plan(MEMORY).unwrap_err().to_string();
        assert!(message(&settings(0, 1, 1)).starts_with("batch.samples_per_step: "));
        assert!(message(&settings(usize::MAX, 1, 1)).starts_with("batch.samples_per_step: "));
        assert!(message(&settings(8, 3, 1)).starts_with("batch.lanes: "));
        assert!(message(&settings(8, 0, 1)).starts_with("batch.lanes: "));
        assert!(message(&settings(8, 16, 1)).starts_with("batch.lanes: "));
        let lanes = BatchSettings { lanes: Some(1 << 40), ..Default::default() };
        assert!(message(&lanes).starts_with("batch.lanes: expected a power of two up to 16777216"));
        assert!(message(&settings(8, 8, 0)).starts_with("batch.grain_samples: "));
        let mut none = settings(8, 8, 1);
        none.microbatch_grains = MicrobatchGrains::Grains(0);
        assert!(message(&none).starts_with("batch.microbatch_grains: "));
    }

    #[test]
    fn the_table_reads_numbers_and_auto() {
        let parse = |text: &str| toml::from_str::<BatchSettings>(text);
        let settings = parse("lanes = 4\nmicrobatch_grains = \"auto\"").unwrap();
        assert_eq!(settings.microbatch_grains, MicrobatchGrains::Auto);
        assert_eq!(settings.resolved_samples_per_step(), 32);
        assert_eq!(parse(&toml::to_string(&settings).unwrap()).unwrap(), settings);
        assert_eq!(parse("").unwrap(), BatchSettings::default());
        for wrong in ["microbatch_grains = \"all\"", "microbatch_grains = -1", "lane = 4"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
