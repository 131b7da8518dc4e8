//! The order of the device's computations: a decision of grains, parameters and reports that have arrived.

use std::collections::VecDeque;
use std::collections::btree_map::{BTreeMap, Entry};
use std::ops::Range;
use std::sync::Arc;

use tidemill_model::Sample;

use crate::cluster::Failure;
use crate::cluster::progress::Phase;
use crate::operators::error::GraphError;
use crate::operators::optimize::StepReport;
use crate::operators::plan::{EvaluationPlan, TrainingPlan};
use crate::operators::samples::Grain;
use crate::operators::ticket::Ticket;

#[cfg(test)]
mod tests;

/// The next computation of the device.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Computation<S> {
    /// The grains `range` of a lane, in order: one microbatch of a step.
    Train { step: u64, lane: usize, range: Range<usize>, grains: Vec<Grain<S>> },
    /// Some grains of the evaluation after `updates` updates.
    Evaluate { updates: u64, grains: Vec<Grain<S>> },
}

/// A computation that the device was given and has not reported as done.
#[derive(Debug, PartialEq, Eq)]
enum Running {
    Nothing,
    /// So many microbatches.
    Training(usize),
    Evaluating,
}

/// The parameters that the device holds, the arrivals for them, and the running computation.
#[derive(Debug)]
pub(super) struct DeviceSchedule<S> {
    plan: Arc<TrainingPlan>,
    evaluation: Option<EvaluationPlan>,
    worker: usize,
    /// In order.
    lanes: Vec<usize>,
    /// The microbatches of a step, in the order in which they run: the lane, and the grains of the lane.
    microbatches: Vec<(usize, Range<usize>)>,
    /// Evaluation grains that this worker runs.
    evaluation_grains: usize,
    /// Updates in the device's parameters.
    updates: u64,
    /// The buckets of the following parameters that are present.
    arrived: Vec<bool>,
    /// The newest report.
    reported: u64,
    last: Option<u64>,
    steps: BTreeMap<u64, BTreeMap<(usize, usize), Grain<S>>>,
    evaluations: VecDeque<Grain<S>>,
    /// Evaluation grains that were handed out for the current parameters.
    evaluated: usize,
    evaluation_due: bool,
    /// Microbatches that were handed out for the current parameters.
    handed_out: usize,
    running: Running,
}

impl<S: Sample> DeviceSchedule<S> {
    pub(super) fn new(
        plan: &Arc<TrainingPlan>,
        evaluation: Option<EvaluationPlan>,
        (worker, workers): (usize, usize),
    ) -> Result<Self, Failure> {
        let lanes = plan.batch.worker_lanes(worker, workers)?;
        let microbatches = lanes.iter().flat_map(|&lane| {
            let of_lane = plan.batch.microbatches(lane);
            of_lane.map(move |range| (lane, range))
        });
        let evaluated =
            evaluation.map(|evaluation| evaluation.worker_grains(&plan.batch, worker, workers));
        Ok(Self {
            worker,
            microbatches: microbatches.collect(),
            evaluation_grains: evaluated.map_or(0, |grains| grains.len()),
            evaluation,
            lanes,
            updates: plan.first_step,
            arrived: vec![false; plan.buckets.buckets().len()],
            reported: plan.first_step,
            last: None,
            steps: BTreeMap::new(),
            evaluations: VecDeque::new(),
            evaluated: 0,
            evaluation_due: false,
            handed_out: 0,
            running: Running::Nothing,
            plan: Arc::clone(plan),
        })
    }

    /// The lanes of this worker.
    pub(super) fn lanes(&self) -> Vec<usize> {
        self.lanes.clone()
    }

    /// Takes a grain of training, and answers it where it is wanted.
    pub(super) fn grain(&mut self, grain: Grain<S>) -> Result<Option<&Grain<S>>, Failure> {
        let Grain { step, lane, grain: index, .. } = grain;
        if self.is_past_last(step) {
            return Ok(None);
        }
        let range = self.plan.batch.grain_range(lane, index);
        if self.lanes.binary_search(&lane).is_err() || range.is_empty() || step < self.updates {
            let (worker, lanes, next) = (self.worker, &self.lanes, self.updates + 1);
            return Err(GraphError::Grain {
                step: step + 1,
                lane,
                grain: index,
                expected: format!("a grain of lanes {} from step {next} on", in_words(lanes)),
                found: format!("it at worker {worker}"),
            }
            .into());
        }
        self.check_samples(&grain, self.plan.batch.positions(step, &range))?;
        let was_handed_out = step == self.updates && {
            let mut before = self.microbatches[..self.handed_out].iter();
            before.any(|(of, range)| *of == lane && range.contains(&index))
        };
        match self.steps.entry(step).or_default().entry((lane, index)) {
            Entry::Vacant(place) if !was_handed_out => Ok(Some(place.insert(grain))),
            _ => {
                let what = format!("grain {index} of lane {lane}");
                Err(GraphError::Twice { step: step + 1, what }.into())
            }
        }
    }

    /// Whether all microbatches of the current step were handed out.
    fn is_handed_out(&self) -> bool {
        self.handed_out == self.microbatches.len()
    }

    /// Takes a grain of an evaluation.
    pub(super) fn evaluation_grain(&mut self, grain: Grain<S>) -> Result<(), Failure> {
        let step = grain.step;
        let evaluation = self.evaluation.ok_or_else(|| {
            let what = format!("grain {} of an evaluation", grain.grain);
            GraphError::Unplanned { step, what }
        })?;
        let range = evaluation.grain(&self.plan.batch, grain.grain);
        self.check_samples(&grain, range)?;
        self.evaluations.push_back(grain);
        Ok(())
    }

    /// Whether `grain` has the samples at these positions of the canonical order, as far as lengths tell.
    fn check_samples(&self, grain: &Grain<S>, at: Range<u64>) -> Result<(), Failure> {
        let expected = (at.end - at.start) as usize;
        if grain.samples.len() != expected {
            let Grain { step, lane, grain: index, ref samples } = *grain;
            return Err(GraphError::Grain {
                step: step + 1,
                lane,
                grain: index,
                expected: format!("{expected} samples"),
                found: samples.len().to_string(),
            }
            .into());
        }
        let expected = self.plan.positions;
        let lengths = at.zip(grain.samples.iter().map(Sample::positions));
        match lengths.into_iter().find(|&(_, found)| found != expected) {
            None => Ok(()),
            Some((position, found)) => {
                Err(GraphError::SampleLength { position, expected, found }.into())
            }
        }
    }

    /// Notes that the following parameters of a bucket are where the device reads them.
    pub(super) fn present(&mut self, ticket: Ticket) -> Result<(), Failure> {
        let is_due = ticket.step == self.updates && self.is_handed_out();
        match self.arrived.get_mut(ticket.bucket as usize).filter(|_| is_due) {
            Some(present @ false) => {
                *present = true;
                Ok(())
            }
            Some(true) => {
                let what = format!("the parameters of bucket {}", ticket.bucket);
                Err(GraphError::Twice { step: ticket.step + 1, what }.into())
            }
            None => {
                let what = format!("the update of bucket {}", ticket.bucket);
                Err(GraphError::Unplanned { step: ticket.step + 1, what }.into())
            }
        }
    }

    /// Takes a report of this worker's optimizer.
    pub(super) fn report(&mut self, report: &StepReport) {
        self.reported = self.reported.max(report.step);
        if report.last {
            self.last = Some(report.step);
            self.steps.retain(|&step, _| step < report.step);
        }
    }

    /// Whether step `step` comes after the last.
    pub(super) fn is_past_last(&self, step: u64) -> bool {
        self.last.is_some_and(|last| step >= last)
    }

    /// A computation that was handed out is done. Answers whether it was the last of the step, or an evaluation.
    pub(super) fn finished(&mut self) -> bool {
        let was_training = matches!(self.running, Running::Training(_));
        self.running = match self.running {
            Running::Training(count @ 2..) => Running::Training(count - 1),
            _ => Running::Nothing,
        };
        self.running == Running::Nothing && (!was_training || self.is_handed_out())
    }

    /// Whether every grain of the evaluation after `updates` updates was handed out.
    pub(super) fn is_evaluation_over(&self, updates: u64) -> bool {
        updates < self.updates || self.evaluated == self.evaluation_grains
    }

    /// The next computation for the device, if any: microbatches line up there, so that it never waits for the next.
    pub(super) fn next(&mut self) -> Option<Computation<S>> {
        match self.running {
            Running::Evaluating => return None,
            Running::Training(_) => return self.next_microbatch(),
            Running::Nothing => {}
        }
        // A step's report can come after its parameters: only together do they decide the next computation.
        if self.reported > self.updates && self.arrived.iter().all(|&arrived| arrived) {
            self.updates += 1;
            self.handed_out = 0;
            self.arrived.fill(false);
            self.evaluated = 0;
            let is_due = |plan: EvaluationPlan| plan.is_due(self.updates, self.plan.steps);
            self.evaluation_due = self.evaluation.is_some_and(is_due);
        }
        if self.evaluation_due && self.evaluated < self.evaluation_grains {
            return self.next_evaluation();
        }
        self.next_microbatch()
    }

    fn next_microbatch(&mut self) -> Option<Computation<S>> {
        let step = self.updates;
        let (lane, range) = self.microbatches.get(self.handed_out)?.clone();
        let arrived = self.steps.get_mut(&step)?;
        if !range.clone().all(|grain| arrived.contains_key(&(lane, grain))) {
            return None;
        }
        let grains = range.clone().filter_map(|grain| arrived.remove(&(lane, grain))).collect();
        self.handed_out += 1;
        if self.is_handed_out() {
            self.steps.remove(&step);
        }
        self.running = match self.running {
            Running::Training(count) => Running::Training(count + 1),
            _ => Running::Training(1),
        };
        Some(Computation::Train { step, lane, range, grains })
    }

    fn next_evaluation(&mut self) -> Option<Computation<S>> {
        let updates = self.updates;
        let ready = self.evaluations.iter().take_while(|grain| grain.step == updates).count();
        let count = ready.min(self.plan.batch.microbatch_grains());
        if count == 0 {
            return None;
        }
        self.running = Running::Evaluating;
        self.evaluated += count;
        let grains = self.evaluations.drain(..count).collect();
        Some(Computation::Evaluate { updates, grains })
    }

    /// Names the grains that are missing when no more will come for the step that the device waits for.
    pub(super) fn check_ended(&self) -> Result<(), Failure> {
        let step = self.updates;
        let waiting = self.running != Running::Evaluating && !self.is_handed_out();
        if !waiting || self.last.is_some() || step >= self.plan.steps {
            return Ok(());
        }
        let grains = |microbatches: &[(usize, Range<usize>)]| -> usize {
            microbatches.iter().map(|(_, range)| range.len()).sum()
        };
        let arrived = self.steps.get(&step).map_or(0, BTreeMap::len);
        let found = arrived + grains(&self.microbatches[..self.handed_out]);
        let expected = grains(&self.microbatches);
        if found == expected {
            return Ok(());
        }
        let worker = self.worker;
        Err(GraphError::GrainsEnded { step: step + 1, worker, expected, found }.into())
    }

    /// The phase of this worker, and its step, counted from 1.
    pub(super) fn standing(&self) -> (Phase, u64) {
        let (updates, step) = (self.updates, self.updates + 1);
        match self.running {
            // The device thread says itself whether it computes or waits for others.
            Running::Training(_) => (Phase::WaitingForDevice, step),
            Running::Evaluating => (Phase::WaitingForDevice, updates),
            Running::Nothing if self.is_handed_out() => (Phase::WaitingForSums, step),
            _ if self.evaluation_due && self.evaluated < self.evaluation_grains => {
                (Phase::ReadingSamples, updates)
            }
            _ if self.is_past_last(updates) || updates >= self.plan.steps => {
                (Phase::WaitingForEnd, updates)
            }
            _ => (Phase::ReadingSamples, step),
        }
    }

    /// The step whose grains the device waits for.
    pub(super) fn awaited_step(&self) -> u64 {
        self.updates
    }
}

/// Lanes that are in order; of many that are no neighbours the first and the last.
fn in_words(lanes: &[usize]) -> String {
    let runs = lanes.chunk_by(|&lane, &next| lane + 1 == next);
    let run = |lanes: &[usize]| format!("{}..{}", lanes[0], lanes[lanes.len() - 1] + 1);
    let runs: Vec<String> = runs.map(run).collect();
    match &runs[..] {
        [first, .., last] if runs.len() > 4 => format!("{first} ... {last}"),
        runs => runs.join(", "),
    }
}
