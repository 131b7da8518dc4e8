//! How many grains fit: the rule of `batch.microbatch_grains = "auto"`.
//!
//! An estimate from sizes, made before anything is allocated. It leaves room, and a run that does not fit all the same
//! ends with an error that says which setting to lower.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use tidemill_collective::{
    BUCKET_ELEMENTS, BucketPlan, CHUNK_ELEMENTS, LaneSchedule, Tree, lane_cut,
};
use tidemill_kernels::Backend;
use tidemill_model::optimizer::{OptimizerSettings, StateArena, UpdateUnit};
use tidemill_model::{Blueprint, Layout, ModelError};

use crate::batch::{BatchSettings, MicrobatchGrains, MicrobatchMemory};
use crate::device::{Devices, WithBackend};
use crate::error::Result;
use crate::memory::available_bytes;
use crate::operators::bucket_memory::BucketMemory;
use crate::operators::gather_plan::GatherPlan;
use crate::operators::plan::cut;
use crate::parallel::Sharding;

/// The part of a device's free memory that plans use: allocators round up, and libraries take some.
const PLANNED_TENTHS: usize = 9;

/// Plans the memory of a worker.
pub(crate) struct PlanMemory<'a> {
    pub model: &'a Blueprint,
    pub batch: &'a BatchSettings,
    pub optimizer: &'a OptimizerSettings,
    pub sharding: Sharding,
    /// t
    pub positions: usize,
    /// Workers of all processes, or of those on this machine.
    pub workers: usize,
    /// The number of these workers that are in this process.
    pub workers_of_process: usize,
    /// The most of these workers that one device computes for.
    pub workers_per_device: usize,
}

impl WithBackend for PlanMemory<'_> {
    type Output = Result<MicrobatchMemory>;

    fn run<B: Backend>(self, devices: Devices<B>) -> Self::Output {
        let backend = devices.first().as_ref();
        let workspace_bytes = match least_free(&devices)? {
            None => available_bytes() / 2 / self.workers.max(1),
            Some(free) => {
                let state = self.state_bytes(backend, self.workers, self.sharding);
                self.share(free).saturating_sub(state)
            }
        };
        Ok(MicrobatchMemory {
            sample_bytes: self.model.build()?.sample_bytes(backend, self.positions)?,
            workspace_bytes,
        })
    }
}

impl PlanMemory<'_> {
    /// The part of a device's `free` bytes that one worker may plan with. All processes on this machine plan before any of them
    /// allocates, so each finds the same free.
    fn share(&self, free: usize) -> usize {
        free / 10 * PLANNED_TENTHS / self.workers_per_device.max(1)
    }

    /// About the bytes that a worker holds beside its workspace, where it has a memory of its own: parameters as products read them;
    /// in bf16 the tensors that are read in fp32 once more, or two blocks of them and its own part; of its own part the bits that
    /// rounding took away, states of the optimizer and, of several workers, sums; sums of lanes, a chunk of logits, and the scratch
    /// memory of an update.
    fn state_bytes<B: Backend>(&self, backend: &B, workers: usize, sharding: Sharding) -> usize {
        const FP32: usize = size_of::<f32>();
        let layout = self.model.layout();
        let (parameters, gradients) = (layout.parameter_elements(), layout.gradient_elements());
        let activation = size_of::<B::Activation>();
        let grain_rows = self.positions * self.batch.grain_samples.max(1);
        let logit_rows = backend.logit_chunk_rows().min(grain_rows);
        let logits = logit_rows * self.model.vocab_size() * activation;
        let workers = workers.max(1);
        // A run of one process has all its workers in that one, however many.
        let has_others = self.workers > self.workers_of_process;
        let is_alone = workers == 1;
        let once_more = if activation == FP32 { 0 } else { FP32 * fp32_elements(layout) };
        let whole = parameters * activation + once_more;
        let members = if has_others { self.workers_of_process } else { workers };
        let held = match sharding {
            Sharding::Parameters if members > 1 => {
                let [fp32, rounded] = GatherPlan::new(layout, &[]).most_elements();
                whole.div_ceil(members) + 2 * (FP32 * fp32 + activation * rounded)
            }
            _ => whole,
        };
        let sums = if is_alone { 0 } else { self.owned_sums(workers, sharding) };
        let states =
            self.optimizer.states().iter().map(|spec| StateArena::new(layout, spec).elements());
        // A master is the value that products read and the rest of four bytes.
        let state = (FP32 - activation) * parameters + FP32 * states.sum::<usize>();
        let owned = (state + sums * FP32 * gradients).div_ceil(workers);
        let accumulators = match sharding {
            Sharding::Gradients | Sharding::Parameters if !is_alone => {
                let buckets = buckets(layout);
                FP32 * BucketMemory::new(layout, &buckets, self.lane_microbatches()).elements()
            }
            _ => FP32 * self.accumulators(workers) * gradients,
        };
        let exchanged = if has_others { self.exchanged_bytes() } else { 0 };
        let updating = self.optimizer.scratch_bytes::<B>(layout);
        held + owned + accumulators + exchanged + logits + updating
    }

    /// Microbatches of a lane: more than one where that is not known yet.
    fn lane_microbatches(&self) -> usize {
        let lane_samples =
            self.batch.resolved_samples_per_step().div_ceil(self.batch.resolved_lanes().max(1));
        let grains = lane_samples.div_ceil(self.batch.grain_samples.max(1));
        match self.batch.microbatch_grains {
            MicrobatchGrains::Grains(size) => grains.div_ceil(size.max(1)),
            MicrobatchGrains::Auto => grains.min(2),
        }
    }

    /// The most sums of its own part that a worker has, of the lanes so far and of a round.
    fn owned_sums(&self, workers: usize, sharding: Sharding) -> usize {
        let lanes = self.batch.resolved_lanes();
        let schedule = match sharding {
            Sharding::Optimizer => return 1,
            _ => LaneSchedule::one_by_one(lanes, workers),
        };
        let Ok(schedule) = schedule else { return 1 };
        if schedule.rounds() == 1 {
            return 1;
        }
        let tree = schedule.tree();
        let ends = (0..schedule.rounds()).map(|round| schedule.lanes(round, 0..workers).end);
        1 + ends.map(|end| tree.cover(&(0..end)).len()).max().unwrap_or(1)
    }

    /// About the bytes that exchanging gradients with other processes takes: a bucket's received values, and the library's own memory.
    fn exchanged_bytes(&self) -> usize {
        const LIBRARY_BYTES: usize = 512 << 20;
        let buckets = buckets(self.model.layout());
        let gradients = buckets.buckets().iter().map(|b| b.slots.len() * b.range.len());
        size_of::<f32>() * gradients.max().unwrap_or(0) + LIBRARY_BYTES
    }

    /// The fewest devices like these on which microbatches of `samples` samples fit, each with one worker, where they share out what
    /// `sharding` says; `None` where that is not known, or no number of them would do.
    ///
    /// # Errors
    /// A device that does not say how much memory it has, or a model that does not take such samples.
    fn fitting_devices<B: Backend>(
        &self,
        devices: &Devices<B>,
        samples: usize,
        sharding: Sharding,
    ) -> Result<Option<usize>> {
        let Some(free) = least_free(devices)? else { return Ok(None) };
        let backend = devices.first().as_ref();
        let sample = self.model.build()?.sample_bytes(backend, self.positions)?;
        let workspace = sample.saturating_mul(samples);
        let most = self.batch.resolved_lanes();
        let fits = |&workers: &usize| {
            self.state_bytes(backend, workers, sharding).saturating_add(workspace)
                <= free / 10 * PLANNED_TENTHS
        };
        Ok((1..=most).find(fits))
    }

    /// The most sums of lanes that a worker holds at once: those that wait for their right siblings, those that are finished
    /// before its last lane is, and the one at hand.
    fn accumulators(&self, workers: usize) -> usize {
        let lanes = self.batch.resolved_lanes();
        let (Ok(tree), Ok(cut)) = (Tree::new(lanes), lane_cut(lanes, workers)) else { return 1 };
        let held = |lanes: &Range<usize>| {
            let at_once = |lane: usize| tree.cover(&(lanes.start..lane + 1)).len();
            let before_joining = |lane: usize| tree.cover(&(lanes.start..lane)).len() + 1;
            lanes.clone().map(|lane| at_once(lane).max(before_joining(lane))).max().unwrap_or(1)
        };
        cut.iter().map(held).max().unwrap_or(1)
    }
}

/// The buckets of `layout`, which do not depend on the chunks that they are of.
fn buckets(layout: &Layout) -> BucketPlan {
    cut(layout, UpdateUnit::Element, CHUNK_ELEMENTS, BUCKET_ELEMENTS).1
}

/// Elements that blocks read in fp32.
fn fp32_elements(layout: &Layout) -> usize {
    let read = layout.tensors().iter().filter(|tensor| tensor.reading.is_fp32());
    read.map(|tensor| tensor.stored_elements).sum()
}

/// On how many devices a run would fit, which is known once its devices are open.
#[derive(Clone, Debug, Default)]
pub(crate) struct FittingDevices(Arc<OnceLock<Fitting>>);

/// The fewest devices: by the run's own sharing, and where all is shared out.
#[derive(Clone, Copy, Debug)]
struct Fitting {
    now: Option<usize>,
    with_parameters: Option<usize>,
}

impl FittingDevices {
    /// Finds it out for the run of `plan`, whose microbatches have `samples` samples at most.
    ///
    /// # Errors
    /// A device that does not say how much memory it has, or a model that does not take such samples.
    pub(crate) fn find<B: Backend>(
        &self,
        plan: &PlanMemory<'_>,
        devices: &Devices<B>,
        samples: usize,
    ) -> Result<()> {
        let fewest = |sharding| plan.fitting_devices(devices, samples, sharding);
        let (now, all) = (fewest(plan.sharding)?, fewest(Sharding::Parameters)?);
        let with_parameters = all.filter(|&all| now.is_none_or(|now| all < now));
        let _ = self.0.set(Fitting { now, with_parameters });
        Ok(())
    }

    /// Advice for a run that did not fit on `devices` devices, if more would do; `shard` is the flag that shares out its
    /// parameters too.
    pub(crate) fn way(&self, devices: usize, shard: &str) -> Option<String> {
        let Fitting { now, with_parameters } = *self.0.get()?;
        match (now, with_parameters) {
            (Some(now), _) if now <= devices => None,
            (_, Some(all)) if all <= devices => Some(format!("set {shard}")),
            (Some(now), Some(all)) => {
                Some(format!("train on {now} such GPUs, or on {all} with {shard}"))
            }
            (None, Some(all)) => Some(format!("train on {all} such GPUs with {shard}")),
            (Some(now), None) => Some(format!("train on {now} such GPUs")),
            (None, None) => None,
        }
    }
}

/// Free memory of the fullest of these devices; `None` if buffers lie in host memory.
fn least_free<B: Backend>(devices: &Devices<B>) -> Result<Option<usize>> {
    let mut least = None;
    for worker in devices.workers() {
        let free = worker.backend.free_memory_bytes().map_err(ModelError::from)?;
        least = free.min(least.or(free));
    }
    Ok(least)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, LazyLock};

    use tidemill_kernels::emulator::{Emulator, EmulatorSettings};
    use tidemill_kernels::{Cpu, Fp32, Gpu};
    use tidemill_model::layout::Tensor;
    use tidemill_model::optimizer::OptimizerName;
    use tidemill_model::{ModelSettings, ResolvedModel};

    use super::*;
    use crate::device::{Precision, WorkerDevice};

    fn model() -> Blueprint {
        let settings = ModelSettings {
            preset: Some("mamba-10m".to_owned()),
            vocab_size: Some(97),
            ..ModelSettings::default()
        };
        let ResolvedModel::New(config) = settings.resolve(None).unwrap() else { unreachable!() };
        Blueprint::new(&config).unwrap()
    }

    /// A device with so many bytes of memory.
    fn device((ordinal, &bytes): (usize, &usize)) -> WorkerDevice<Gpu<Emulator, Fp32>> {
        let emulator = Emulator::new(EmulatorSettings { warp: 32, seed: 1 }).unwrap();
        let backend = Arc::new(Gpu::<Emulator, Fp32>::new(emulator.with_memory_bytes(bytes)));
        WorkerDevice { backend, name: "emulator".to_owned(), ordinal }
    }

    /// The plan of one worker.
    fn planned<'a>(model: &'a Blueprint, batch: &'a BatchSettings) -> PlanMemory<'a> {
        static OPTIMIZER: LazyLock<OptimizerSettings> = LazyLock::new(OptimizerSettings::default);
        PlanMemory {
            model,
            batch,
            optimizer: &OPTIMIZER,
            sharding: Sharding::Optimizer,
            positions: 33,
            workers: 1,
            workers_of_process: 1,
            workers_per_device: 1,
        }
    }

    #[test]
    fn what_does_not_fit_on_one_device_says_how_many_would_do() {
        let model = model();
        let batch = BatchSettings { lanes: Some(8), ..BatchSettings::default() };
        let fitting = |bytes: usize, sharding| {
            let devices = Devices::new(vec![device((0, &bytes))], Precision::Fp32).unwrap();
            let plan = PlanMemory { workers_of_process: 8, ..planned(&model, &batch) };
            plan.fitting_devices(&devices, 1, sharding).unwrap()
        };
        let state = |parameters: usize| parameters * model.layout().parameter_elements();
        // On one: parameters, two states and, of eight lanes, four sums at once. On eight: of all but the parameters and one sum an
        // eighth, and an eighth of the sum of all.
        use Sharding::{Optimizer, Parameters};
        assert_eq!(fitting(state(4 + 8 + 16 + 12), Optimizer), Some(1));
        let of_state = fitting(state(18), Optimizer).unwrap();
        assert!((2..=8).contains(&of_state));
        assert_eq!(fitting(state(4 + 4 + 1), Optimizer), None);
        // This model is two buckets, which do not take turns; but of eight workers each has an eighth of it and two blocks.
        let least = |sharding| {
            let fits = |bytes: &usize| fitting(*bytes, sharding).is_some();
            (1..400).map(|tenths| state(tenths) / 10).find(fits).unwrap()
        };
        let [optimizer, gradients, parameters] = Sharding::ALL.map(least);
        assert!(parameters < gradients && gradients <= optimizer, "{:?}", Sharding::ALL.map(least));
        assert!(fitting(parameters, Parameters).is_some());
    }

    #[test]
    fn each_state_of_the_optimizer_takes_four_bytes_a_parameter() {
        let model = model();
        let batch = BatchSettings { lanes: Some(1), ..BatchSettings::default() };
        let workspace = |name| {
            let optimizer = &OptimizerSettings::of(name);
            let plan = PlanMemory { optimizer, ..planned(&model, &batch) };
            let devices = Devices::new(vec![device((0, &(10 << 30)))], Precision::Fp32).unwrap();
            plan.run(devices).unwrap().workspace_bytes
        };
        let saved = workspace(OptimizerName::Lion) - workspace(OptimizerName::Adamw);
        assert_eq!(saved, 4 * model.layout().parameter_elements());
        // Its momenta are fewer than two of each, but the update of the largest matrix takes room.
        let matrices = model.layout().tensors().iter().filter(|tensor| tensor.is_hidden_matrix());
        let largest = matrices.map(Tensor::elements).max().unwrap();
        let muon = OptimizerSettings::of(OptimizerName::Muon).scratch_bytes::<Cpu>(model.layout());
        assert!(muon > 12 * largest && muon < 20 * largest, "{muon} for {largest} elements");
        assert_ne!(workspace(OptimizerName::Muon), workspace(OptimizerName::Adamw));
    }

    /// A grain of fewer rows than a chunk of logits has no others.
    #[test]
    fn logits_take_the_rows_of_a_grain() {
        let model = model();
        let workspace = |grain_samples| {
            let batch = BatchSettings { grain_samples, lanes: Some(1), ..BatchSettings::default() };
            let devices = Devices::new(vec![device((0, &(10 << 30)))], Precision::Fp32).unwrap();
            planned(&model, &batch).run(devices).unwrap().workspace_bytes
        };
        assert_eq!(workspace(1) - workspace(2), 33 * 97 * 4);
    }

    #[test]
    fn what_would_do_is_said_in_words() {
        let way = |now, with_parameters, devices| {
            let fitting = FittingDevices::default();
            fitting.0.set(Fitting { now, with_parameters }).unwrap();
            fitting.way(devices, "that").unwrap_or_default()
        };
        assert_eq!(way(Some(4), Some(3), 2), "train on 4 such GPUs, or on 3 with that");
        assert_eq!(way(Some(4), Some(2), 2), "set that");
        assert_eq!(way(Some(4), None, 2), "train on 4 such GPUs");
        assert_eq!(way(None, Some(3), 1), "train on 3 such GPUs with that");
        assert_eq!(way(None, Some(2), 2), "set that");
        assert_eq!(way(None, None, 1), "");
        assert_eq!(way(Some(1), None, 1), "", "it should have fitted");
    }

    #[test]
    fn workers_of_a_device_share_its_memory_and_each_process_goes_by_its_fullest_device() {
        let model = model();
        let batch = BatchSettings { lanes: Some(1), ..BatchSettings::default() };
        let workspace = |device_bytes: &[usize], workers, workers_per_device| {
            let devices = device_bytes.iter().enumerate().map(device).collect();
            let plan = PlanMemory {
                workers,
                workers_of_process: workers,
                workers_per_device,
                ..planned(&model, &batch)
            };
            plan.run(Devices::new(devices, Precision::Fp32).unwrap()).unwrap().workspace_bytes
        };
        let bytes = 10 << 30;
        let [alone, shared] = [1, 4].map(|sharers| workspace(&[bytes], 4, sharers));
        assert_eq!(alone - shared, (9 << 30) / 4 * 3, "{alone} {shared}");
        assert_eq!(workspace(&[bytes, bytes / 2], 2, 1), workspace(&[bytes / 2], 2, 1));
    }
}
