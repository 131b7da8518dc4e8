//! What the device computes next: a decision of grains, parameters and reports that have arrived.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::cluster::Failure;
use crate::cluster::progress::Phase;
use crate::operators::error::GraphError;
use crate::operators::optimize::StepReport;
use crate::operators::plan::{EvaluationPlan, TrainingPlan};
use crate::operators::samples::Grain;
use crate::operators::ticket::Ticket;

/// The next computation of the device.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Computation {
    /// All grains of this worker's lanes, in order.
    Train { step: u64, grains: Vec<Grain> },
    /// Some grains of the evaluation after `updates` updates.
    Evaluate { updates: u64, grains: Vec<Grain> },
}

/// Which parameters the device holds, what has arrived for them, and what is running.
#[derive(Debug)]
pub(super) struct DeviceSchedule {
    plan: Arc<TrainingPlan>,
    evaluation: Option<EvaluationPlan>,
    worker: usize,
    /// In order.
    lanes: Vec<usize>,
    /// Grains that a step of this worker has.
    grains_per_step: usize,
    /// Evaluation grains that this worker runs.
    evaluation_grains: usize,
    /// Updates in the device's parameters.
    updates: u64,
    /// Of the following parameters: which buckets are present.
    arrived: Vec<bool>,
    /// The newest report.
    reported: u64,
    last: Option<u64>,
    steps: BTreeMap<u64, BTreeMap<(usize, usize), Grain>>,
    evaluations: VecDeque<Grain>,
    /// Evaluation grains that were handed out for the current parameters.
    evaluated: usize,
    evaluation_due: bool,
    busy: bool,
    trained: Option<u64>,
}

impl DeviceSchedule {
    pub(super) fn new(
        plan: &Arc<TrainingPlan>,
        evaluation: Option<EvaluationPlan>,
        (worker, workers): (usize, usize),
    ) -> Result<Self, Failure> {
        let lanes = plan.batch.worker_lanes(worker, workers)?;
        let evaluated =
            evaluation.map(|evaluation| evaluation.worker_grains(&plan.batch, worker, workers));
        Ok(Self {
            worker,
            grains_per_step: lanes.iter().map(|&lane| plan.batch.lane_grains(lane)).sum(),
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
            busy: false,
            trained: None,
            plan: Arc::clone(plan),
        })
    }

    /// The lanes of this worker.
    pub(super) fn lanes(&self) -> Vec<usize> {
        self.lanes.clone()
    }

    /// Takes a grain of training.
    pub(super) fn grain(&mut self, grain: Grain) -> Result<(), Failure> {
        let Grain { step, lane, grain: index, .. } = grain;
        if self.is_past_last(step) {
            return Ok(());
        }
        let expected = self.plan.batch.grain_range(lane, index).len();
        if self.lanes.binary_search(&lane).is_err() || expected == 0 || step < self.updates {
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
        self.check_samples(&grain, expected)?;
        match self.steps.entry(step).or_default().insert((lane, index), grain) {
            None => Ok(()),
            Some(_) => {
                let what = format!("grain {index} of lane {lane}");
                Err(GraphError::Twice { step: step + 1, what }.into())
            }
        }
    }

    /// Takes a grain of an evaluation.
    pub(super) fn evaluation_grain(&mut self, grain: Grain) -> Result<(), Failure> {
        let step = grain.step;
        let evaluation = self.evaluation.ok_or_else(|| {
            let what = format!("grain {} of an evaluation", grain.grain);
            GraphError::Unplanned { step, what }
        })?;
        let range = evaluation.grain(&self.plan.batch, grain.grain);
        self.check_samples(&grain, (range.end - range.start) as usize)?;
        self.evaluations.push_back(grain);
        Ok(())
    }

    fn check_samples(&self, grain: &Grain, expected: usize) -> Result<(), Failure> {
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
        let tokens = self.plan.positions + 1;
        match grain.samples.iter().find(|sample| sample.tokens.len() != tokens) {
            None => Ok(()),
            Some(sample) => {
                let (position, found) = (sample.position, sample.tokens.len());
                Err(GraphError::SampleLength { position, expected: tokens, found }.into())
            }
        }
    }

    /// Notes that the following parameters of a bucket are where the device reads them.
    pub(super) fn present(&mut self, ticket: Ticket) -> Result<(), Failure> {
        let is_due = ticket.step == self.updates && self.trained == Some(self.updates);
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

    /// The computation that was handed out is done.
    pub(super) fn finished(&mut self) {
        self.busy = false;
    }

    /// Whether every grain of the evaluation after `updates` updates was handed out.
    pub(super) fn is_evaluation_over(&self, updates: u64) -> bool {
        updates < self.updates || self.evaluated == self.evaluation_grains
    }

    /// What the device is to compute now, if anything.
    pub(super) fn next(&mut self) -> Option<Computation> {
        if self.busy {
            return None;
        }
        // A step's report can come after its parameters: only together do they say what follows.
        if self.reported > self.updates && self.arrived.iter().all(|&arrived| arrived) {
            self.updates += 1;
            self.arrived.fill(false);
            self.evaluated = 0;
            let last = self.last == Some(self.updates);
            self.evaluation_due =
                self.evaluation.is_some_and(|evaluation| evaluation.is_due(self.updates, last));
        }
        if self.evaluation_due && self.evaluated < self.evaluation_grains {
            return self.next_evaluation();
        }
        let step = self.updates;
        let complete = |grains: &BTreeMap<_, _>| grains.len() == self.grains_per_step;
        if self.trained == Some(step) || !self.steps.get(&step).is_some_and(complete) {
            return None;
        }
        let grains = self.steps.remove(&step).unwrap_or_default().into_values().collect();
        self.busy = true;
        self.trained = Some(step);
        Some(Computation::Train { step, grains })
    }

    fn next_evaluation(&mut self) -> Option<Computation> {
        let updates = self.updates;
        let ready = self.evaluations.iter().take_while(|grain| grain.step == updates).count();
        let count = ready.min(self.plan.batch.microbatch_grains());
        if count == 0 {
            return None;
        }
        self.busy = true;
        self.evaluated += count;
        let grains = self.evaluations.drain(..count).collect();
        Some(Computation::Evaluate { updates, grains })
    }

    /// Says what is missing when no more grains will come for the step that the device waits for.
    pub(super) fn check_ended(&self) -> Result<(), Failure> {
        let step = self.updates;
        let waiting = !self.busy && self.trained != Some(step) && self.last.is_none();
        if !waiting || step >= self.plan.steps {
            return Ok(());
        }
        let (found, expected) =
            (self.steps.get(&step).map_or(0, BTreeMap::len), self.grains_per_step);
        if found == expected {
            return Ok(());
        }
        let worker = self.worker;
        Err(GraphError::GrainsEnded { step: step + 1, worker, expected, found }.into())
    }

    /// What this worker does or waits for, and of which step, counted from 1.
    pub(super) fn standing(&self) -> (Phase, u64) {
        let (updates, step) = (self.updates, self.updates + 1);
        let is_evaluating = self.evaluation_due && self.evaluated > 0;
        match (self.busy, self.trained == Some(updates)) {
            // The device thread says itself whether it computes or waits for others.
            (true, true) => (Phase::WaitingForDevice, step),
            (true, false) if is_evaluating => (Phase::WaitingForDevice, updates),
            (_, true) => (Phase::WaitingForSums, step),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::{BatchSettings, MicrobatchMemory};
    use crate::cluster::ExitClass;
    use std::num::NonZeroU64;
    use tidemill_model::{Decay, Layout};
    use tidemill_streaming_data::Sample;

    fn schedule(evaluated: bool) -> DeviceSchedule {
        let mut layout = Layout::new();
        let table = layout.segment("table");
        layout.tensor("weight", &[16], Decay::Exempt, 1);
        layout.block("only", &[table]);
        let settings =
            BatchSettings { samples_per_step: Some(4), lanes: Some(2), ..Default::default() };
        let memory = MicrobatchMemory { sample_bytes: 1, workspace_bytes: 1 };
        let plan = TrainingPlan::new(settings.plan(memory).unwrap(), &layout, 2, 9);
        let (samples, every_steps) = (NonZeroU64::new(3).unwrap(), NonZeroU64::MIN);
        let evaluation = evaluated.then_some(EvaluationPlan { samples, every_steps });
        DeviceSchedule::new(&Arc::new(plan), evaluation, (0, 1)).unwrap()
    }

    fn grain(step: u64, lane: usize, grain: usize) -> Grain {
        let samples = vec![Sample { position: 0, tokens: vec![0; 3] }];
        Grain { step, lane, grain, samples }
    }

    fn feed(schedule: &mut DeviceSchedule, step: u64) {
        for (lane, index) in [(1, 1), (0, 0), (1, 0), (0, 1)] {
            schedule.grain(grain(step, lane, index)).unwrap();
        }
    }

    fn report(step: u64, last: bool) -> StepReport {
        StepReport {
            step,
            loss: 0.0,
            grad_norm: 0.0,
            learning_rate: 0.0,
            tokens: 0,
            total_tokens: 0,
            last,
        }
    }

    #[test]
    fn a_step_waits_for_grains_parameters_and_the_report() {
        let mut schedule = schedule(false);
        assert_eq!(schedule.next(), None);
        feed(&mut schedule, 1);
        assert_eq!(schedule.next(), None, "step 0 has no grains");
        feed(&mut schedule, 0);
        let ticket = |step, bucket| Ticket { step, bucket };
        assert!(schedule.present(ticket(0, 0)).is_err(), "nothing was trained");
        let Some(Computation::Train { step: 0, grains }) = schedule.next() else { panic!() };
        let order: Vec<_> = grains.iter().map(|grain| (grain.lane, grain.grain)).collect();
        assert_eq!(order, [(0, 0), (0, 1), (1, 0), (1, 1)]);
        assert!(schedule.present(ticket(1, 0)).is_err(), "of another step");
        assert!(schedule.present(ticket(0, 1)).is_err(), "no such bucket");
        schedule.present(ticket(0, 0)).unwrap();
        assert!(schedule.present(ticket(0, 0)).is_err(), "twice");
        assert_eq!(schedule.next(), None, "the device still computes");
        schedule.finished();
        assert_eq!(schedule.next(), None, "no report");
        schedule.report(&report(1, false));
        assert!(matches!(schedule.next(), Some(Computation::Train { step: 1, .. })));
    }

    #[test]
    fn nothing_follows_the_last_report() {
        let mut schedule = schedule(false);
        feed(&mut schedule, 0);
        feed(&mut schedule, 1);
        assert!(schedule.next().is_some());
        schedule.finished();
        schedule.present(Ticket { step: 0, bucket: 0 }).unwrap();
        schedule.report(&report(1, true));
        assert_eq!(schedule.next(), None);
        schedule.grain(grain(2, 0, 0)).unwrap();
        assert!(schedule.is_past_last(1) && !schedule.is_past_last(0));
        assert!(schedule.check_ended().is_ok());
    }

    #[test]
    fn an_evaluation_comes_between_two_steps() {
        let mut schedule = schedule(true);
        feed(&mut schedule, 0);
        feed(&mut schedule, 1);
        assert!(matches!(schedule.next(), Some(Computation::Train { step: 0, .. })));
        schedule.finished();
        schedule.present(Ticket { step: 0, bucket: 0 }).unwrap();
        schedule.report(&report(1, false));
        assert_eq!(schedule.next(), None, "the evaluation has no grains yet");
        let mut ran = Vec::new();
        for index in 0..3 {
            schedule.evaluation_grain(grain(1, 0, index)).unwrap();
            if index > 0 {
                let Some(Computation::Evaluate { updates: 1, grains }) = schedule.next() else {
                    panic!("an evaluation is due")
                };
                ran.extend(grains.iter().map(|grain| grain.grain));
                schedule.finished();
            }
        }
        assert_eq!(ran, [0, 1, 2]);
        assert!(matches!(schedule.next(), Some(Computation::Train { step: 1, .. })));
    }

    #[test]
    fn wrong_grains_are_named() {
        let mut schedule = schedule(false);
        let message = |result: Result<(), Failure>| {
            let failure = result.unwrap_err();
            assert_eq!(failure.exit_class(), ExitClass::Restart, "{failure:?}");
            failure.cause().to_string()
        };
        schedule.grain(grain(0, 0, 0)).unwrap();
        assert!(
            message(schedule.grain(grain(0, 0, 0)))
                .contains("step 1: grain 0 of lane 0 came twice")
        );
        assert!(message(schedule.grain(grain(0, 2, 0))).contains("a grain of lanes 0..2"));
        assert!(message(schedule.grain(grain(0, 0, 2))).contains("grain 2 of lane 0"));
        let mut short = grain(0, 1, 0);
        short.samples[0].tokens.pop();
        assert!(message(schedule.grain(short)).contains("has 2 tokens, expected 3"));
        let mut empty = grain(0, 1, 0);
        empty.samples.clear();
        assert!(message(schedule.grain(empty)).contains("expected 1 samples, found 0"));
        assert!(message(schedule.check_ended()).contains("step 1 has 1 of the 4 grains"));
    }
}
