//! The order of the optimizer's work: a decision of losses, sums and squares that have arrived.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::rule::UpdatePace;
use super::tree_sum::tree_sum;
use super::{SquareSum, StepReport};
use crate::cluster::Failure;
use crate::error::JobError;
use crate::operators::error::GraphError;
use crate::operators::forward_backward::{LaneLoss, LaneTokens};
use crate::operators::owned::StateJob;
use crate::operators::plan::TrainingPlan;
use crate::operators::ticket::Ticket;

/// The arrivals of one step.
#[derive(Debug)]
struct Gathered {
    losses: Vec<Option<LaneLoss>>,
    /// Tokens that lanes will count, if they are known before.
    counted: Vec<Option<u64>>,
    /// Whether each bucket is summed.
    summed: Vec<bool>,
    squares: Vec<Option<f64>>,
}

/// The mean loss of a step.
#[derive(Clone, Copy, Debug)]
struct StepLoss {
    loss: f64,
    tokens: u64,
    last: bool,
}

/// The progress of a worker's optimizer.
pub(super) struct OptimizerSchedule {
    plan: Arc<TrainingPlan>,
    pace: UpdatePace,
    workers: usize,
    step: u64,
    /// Counted tokens of all steps so far.
    total_tokens: u64,
    gathered: BTreeMap<u64, Gathered>,
    loss: Option<StepLoss>,
    /// Buckets of the step that are summed and whose mean was not handed out.
    means: VecDeque<usize>,
    /// The clipping coefficient, once the norm is known.
    coefficient: Option<f32>,
    /// Buckets whose update was not handed out.
    updates: VecDeque<usize>,
    /// Updates of the step that are not done.
    outstanding: usize,
    /// For each bucket the step of the cut that has not taken its state yet; until then the bucket is not updated.
    untaken: Vec<Option<u64>>,
}

impl OptimizerSchedule {
    pub(super) fn new(plan: &Arc<TrainingPlan>, pace: UpdatePace, workers: usize) -> Self {
        Self {
            pace,
            workers,
            step: plan.first_step,
            total_tokens: plan.first_tokens,
            gathered: BTreeMap::new(),
            loss: None,
            means: VecDeque::new(),
            coefficient: None,
            updates: VecDeque::new(),
            outstanding: 0,
            untaken: vec![None; plan.buckets.buckets().len()],
            plan: Arc::clone(plan),
        }
    }

    fn gathered(&mut self, step: u64) -> Result<&mut Gathered, Failure> {
        if step < self.step {
            return Err(GraphError::Late { step: self.step + 1, found: step + 1 }.into());
        }
        Ok(self.gathered.entry(step).or_insert_with(|| Gathered {
            losses: vec![None; self.plan.batch.lanes()],
            counted: vec![None; self.plan.batch.lanes()],
            summed: vec![false; self.plan.buckets.buckets().len()],
            squares: vec![None; self.plan.chunks.chunks().len()],
        }))
    }

    /// Takes the loss of a lane.
    pub(super) fn loss(&mut self, loss: LaneLoss) -> Result<(), Failure> {
        let slot = self.gathered(loss.step)?.losses.get_mut(loss.lane as usize);
        fill(slot, loss, loss.step, || format!("the loss of lane {}", loss.lane))
    }

    /// Takes the tokens that a lane will count.
    pub(super) fn counted(&mut self, counted: LaneTokens) -> Result<(), Failure> {
        let LaneTokens { step, lane, tokens } = counted;
        if step < self.step {
            // The losses of the step came first; they have the counts too.
            return Ok(());
        }
        let slot = self.gathered(step)?.counted.get_mut(lane as usize);
        fill(slot, tokens, step, || format!("the counted tokens of lane {lane}"))
    }

    /// The counted tokens of the current step, once they are known.
    fn tokens(&self) -> Option<u64> {
        if let Some(loss) = self.loss {
            return Some(loss.tokens);
        }
        // A worker alone has its sums when the device gives them back, and has nothing to do before.
        let told = self.gathered.get(&self.step).filter(|_| self.workers > 1)?;
        told.counted.iter().copied().sum()
    }

    /// This worker's part of a bucket is summed.
    pub(super) fn summed(&mut self, ticket: Ticket) -> Result<(), Failure> {
        let Ticket { step, bucket } = ticket;
        let what = || format!("the sums of bucket {bucket}");
        match self.gathered(step)?.summed.get_mut(bucket as usize) {
            Some(summed @ false) => *summed = true,
            Some(true) => return Err(GraphError::Twice { step: step + 1, what: what() }.into()),
            None => return Err(GraphError::Unplanned { step: step + 1, what: what() }.into()),
        }
        if step == self.step {
            self.means.push_back(bucket as usize);
        }
        Ok(())
    }

    /// A cut has taken the state of a bucket.
    pub(super) fn taken(&mut self, ticket: Ticket) -> Result<(), Failure> {
        let Ticket { step, bucket } = ticket;
        match self.untaken.get_mut(bucket as usize) {
            Some(untaken) if *untaken == Some(step) => {
                *untaken = None;
                Ok(())
            }
            _ => {
                let what = format!("a cut of bucket {bucket}");
                Err(GraphError::Unplanned { step: step + 1, what }.into())
            }
        }
    }

    /// Takes the sum of squares of any chunk.
    pub(super) fn squares(&mut self, squares: SquareSum) -> Result<(), Failure> {
        let SquareSum { step, chunk, sum } = squares;
        let slot = self.gathered(step)?.squares.get_mut(chunk as usize);
        fill(slot, sum, step, || format!("the squares of chunk {chunk}"))
    }

    /// An update is done.
    pub(super) fn updated(&mut self) {
        self.outstanding -= 1;
    }

    /// The report of the current step, once its loss and norm are known. Answers it once.
    ///
    /// # Errors
    /// No counted token, or a loss or a norm that is no number.
    pub(super) fn report(&mut self) -> Result<Option<StepReport>, Failure> {
        let step = self.step;
        if self.coefficient.is_some() {
            return Ok(None);
        }
        let Some(gathered) = self.gathered.get(&step) else { return Ok(None) };
        if self.loss.is_none() {
            let losses: Option<Vec<LaneLoss>> = gathered.losses.iter().copied().collect();
            let Some(losses) = losses else { return Ok(None) };
            for (loss, told) in losses.iter().zip(&gathered.counted) {
                let (Some(told), found) = (*told, loss.tokens) else { continue };
                if told != found {
                    let (lane, step) = (loss.lane, step + 1);
                    let expected = format!("{told} counted tokens in lane {lane} of step {step}");
                    let done = format!("counted {found}");
                    return Err(GraphError::Model { expected, done }.into());
                }
            }
            self.loss = Some(self.mean_loss(&losses)?);
        }
        let squares: Option<Vec<f64>> = gathered.squares.iter().copied().collect();
        let (Some(StepLoss { loss, tokens, last }), Some(squares)) = (self.loss, squares) else {
            return Ok(None);
        };
        // Buckets without a part of this worker are summed too: all workers go through their buckets in the same order.
        if !gathered.summed.iter().all(|&summed| summed) {
            return Ok(None);
        }
        let update = step + 1;
        let grad_norm = tree_sum(&squares).sqrt();
        if !grad_norm.is_finite() {
            let what = format!("the norm of the gradient is {grad_norm}");
            return Err(JobError::Step { step: update, what }.into());
        }
        self.coefficient = Some(self.pace.coefficient(grad_norm));
        // The next forward pass begins with the bucket that became final last.
        self.updates = (0..self.untaken.len()).rev().collect();
        self.outstanding = self.updates.len();
        let learning_rate = (self.pace.learning_rate)(update);
        self.total_tokens += tokens;
        let total_tokens = self.total_tokens;
        Ok(Some(StepReport {
            step: update,
            loss,
            grad_norm,
            learning_rate,
            tokens,
            total_tokens,
            last,
        }))
    }

    fn mean_loss(&self, losses: &[LaneLoss]) -> Result<StepLoss, Failure> {
        let step = self.step + 1;
        let wrong = |what: String| JobError::Step { step, what };
        let tokens: u64 = losses.iter().map(|loss| loss.tokens).sum();
        if tokens == 0 {
            return Err(wrong("the batch has no counted token".to_owned()).into());
        }
        let sums: Vec<f64> = losses.iter().map(|loss| loss.loss_sum).collect();
        let loss = tree_sum(&sums) / tokens as f64;
        if !loss.is_finite() {
            return Err(self.not_finite(loss, losses).into());
        }
        let last = step >= self.plan.steps || losses.iter().any(|loss| loss.stop_requested);
        Ok(StepLoss { loss, tokens, last })
    }

    /// Says of the mean `loss` of the current step which samples it comes from.
    fn not_finite(&self, loss: f64, losses: &[LaneLoss]) -> JobError {
        let bad = || losses.iter().filter(|lane| !lane.loss_sum.is_finite());
        let (lanes, of) = (bad().count(), losses.len());
        let batch = &self.plan.batch;
        let (lane, grain) = bad().next().map_or((0, 0), |lane| {
            (lane.lane as usize, lane.first_not_finite.unwrap_or_default() as usize)
        });
        let positions = batch.positions(self.step, &batch.grain_range(lane, grain));
        let samples = self.plan.sample_names.in_words(&positions);
        JobError::Loss { step: self.step + 1, loss, lanes, of, lane, grain, positions, samples }
    }

    /// Whether every update of the current step is done; the next step then begins.
    pub(super) fn advance(&mut self) -> bool {
        let done = self.coefficient.is_some() && self.outstanding == 0;
        if done {
            self.gathered.remove(&self.step);
            self.step += 1;
            self.loss = None;
            self.coefficient = None;
            let summed = self.gathered.get(&self.step).map(|gathered| &gathered.summed);
            let buckets = summed.into_iter().flatten().enumerate();
            self.means = buckets.filter(|(_, summed)| **summed).map(|(bucket, _)| bucket).collect();
        }
        done
    }

    /// The current step.
    pub(super) fn step(&self) -> u64 {
        self.step
    }

    /// The next job of the optimizer thread. A bucket whose state a cut has not taken is not updated, and neither are those behind
    /// it.
    pub(super) fn next(&mut self) -> Option<StateJob> {
        let Some(coefficient) = self.coefficient else {
            let tokens = self.tokens()?;
            return self.means.pop_front().map(|bucket| StateJob::Mean { bucket, tokens });
        };
        let &bucket = self.updates.front()?;
        if self.untaken[bucket].is_some() {
            return None;
        }
        self.updates.pop_front();
        let (step, last) = (self.step, self.loss.is_some_and(|loss| loss.last));
        self.untaken[bucket] = self.plan.is_cut(step + 1, last).then_some(step);
        Some(StateJob::Update { bucket, update: step + 1, coefficient })
    }
}

/// Fills a slot of step `step` that exists and is empty.
fn fill<T>(
    slot: Option<&mut Option<T>>,
    value: T,
    step: u64,
    what: impl FnOnce() -> String,
) -> Result<(), Failure> {
    let step = step + 1;
    match slot {
        Some(slot @ None) => {
            *slot = Some(value);
            Ok(())
        }
        Some(Some(_)) => Err(GraphError::Twice { step, what: what() }.into()),
        None => Err(GraphError::Unplanned { step, what: what() }.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;
    use crate::operators::plan::CheckpointCuts;
    use crate::operators::plan::tests::two_buckets;

    /// Two buckets of one chunk each, two lanes; every step is cut.
    fn schedule() -> OptimizerSchedule {
        schedule_of(1)
    }

    fn schedule_of(workers: usize) -> OptimizerSchedule {
        let (mut plan, _) = two_buckets();
        plan.checkpoints = CheckpointCuts::Every(NonZeroU64::MIN);
        let pace = UpdatePace { clip_norm: None, learning_rate: Arc::new(|_| 0.5) };
        OptimizerSchedule::new(&Arc::new(plan), pace, workers)
    }

    fn loss(step: u64, lane: u32) -> LaneLoss {
        LaneLoss {
            step,
            lane,
            loss_sum: 6.0,
            tokens: 4,
            stop_requested: false,
            first_not_finite: None,
        }
    }

    /// Losses, sums and squares of a step, and its report.
    fn feed(schedule: &mut OptimizerSchedule, step: u64) -> StepReport {
        for bucket in [0, 1] {
            schedule.summed(Ticket { step, bucket }).unwrap();
        }
        assert!(schedule.summed(Ticket { step, bucket: 1 }).is_err(), "twice");
        assert!(schedule.summed(Ticket { step, bucket: 2 }).is_err(), "no such bucket");
        for lane in [1, 0] {
            assert_eq!(schedule.report().unwrap(), None);
            schedule.loss(loss(step, lane)).unwrap();
        }
        assert_eq!(schedule.report().unwrap(), None, "no norm");
        for bucket in [0, 1] {
            match schedule.next() {
                Some(StateJob::Mean { bucket: found, tokens: 8 }) => assert_eq!(found, bucket),
                _ => panic!("a mean is due"),
            }
        }
        assert!(schedule.next().is_none(), "the norm is not known");
        for (chunk, sum) in [(1, 16.0), (0, 9.0)] {
            schedule.squares(SquareSum { step, chunk, sum }).unwrap();
        }
        let report = schedule.report().unwrap().unwrap();
        assert_eq!(schedule.report().unwrap(), None, "once");
        assert_eq!((report.step, report.loss, report.grad_norm), (step + 1, 1.5, 5.0));
        report
    }

    fn update(schedule: &mut OptimizerSchedule) -> Option<usize> {
        schedule.next().map(|job| match job {
            StateJob::Update { bucket, .. } => bucket,
            _ => panic!("only updates are due"),
        })
    }

    #[test]
    fn the_last_bucket_is_updated_first_and_the_next_step_begins_when_all_are() {
        let mut schedule = schedule();
        assert_eq!(feed(&mut schedule, 0).total_tokens, 8);
        assert_eq!([update(&mut schedule), update(&mut schedule)], [Some(1), Some(0)]);
        assert!(!schedule.advance());
        schedule.updated();
        assert!(!schedule.advance());
        schedule.updated();
        assert!(schedule.advance());
        assert_eq!(schedule.step(), 1);
        let late = schedule.loss(loss(0, 0)).unwrap_err().cause().to_string();
        assert_eq!(late, "step 2: something of step 1 came late");
    }

    #[test]
    fn a_bucket_whose_state_was_not_taken_is_not_updated_nor_are_those_behind_it() {
        let mut schedule = schedule();
        feed(&mut schedule, 0);
        while update(&mut schedule).is_some() {
            schedule.updated();
        }
        assert!(schedule.advance());
        assert_eq!(feed(&mut schedule, 1).total_tokens, 16);
        assert_eq!(update(&mut schedule), None, "no bucket was taken");
        assert!(schedule.taken(Ticket { step: 1, bucket: 1 }).is_err(), "of another cut");
        schedule.taken(Ticket { step: 0, bucket: 0 }).unwrap();
        assert!(schedule.taken(Ticket { step: 0, bucket: 0 }).is_err(), "twice");
        assert_eq!(update(&mut schedule), None, "the first in line was not");
        schedule.taken(Ticket { step: 0, bucket: 1 }).unwrap();
        assert_eq!([update(&mut schedule), update(&mut schedule)], [Some(1), Some(0)]);
    }

    /// The others' squares of a bucket without a part of this worker may be here before it is summed.
    #[test]
    fn the_norm_waits_for_sums_of_which_nothing_is_owned() {
        let mut schedule = schedule();
        (0..2).for_each(|lane| schedule.loss(loss(0, lane)).unwrap());
        schedule.summed(Ticket { step: 0, bucket: 0 }).unwrap();
        for chunk in [0, 1] {
            schedule.squares(SquareSum { step: 0, chunk, sum: 1.0 }).unwrap();
        }
        assert_eq!(schedule.report().unwrap(), None);
        schedule.summed(Ticket { step: 0, bucket: 1 }).unwrap();
        assert!(schedule.report().unwrap().is_some());
    }

    /// Means are formed before the losses are there.
    #[test]
    fn what_lanes_will_count_may_be_told_before() {
        let told = |step, lane, tokens| LaneTokens { step, lane, tokens };
        for workers in [1, 2] {
            let mut schedule = schedule_of(workers);
            schedule.counted(told(0, 0, 4)).unwrap();
            schedule.summed(Ticket { step: 0, bucket: 1 }).unwrap();
            assert!(schedule.next().is_none(), "one lane has not told");
            schedule.counted(told(0, 1, 4)).unwrap();
            assert!(schedule.counted(told(0, 1, 4)).is_err(), "twice");
            assert!(schedule.counted(told(0, 2, 4)).is_err(), "no such lane");
            let mean = schedule.next();
            let is_due = matches!(mean, Some(StateJob::Mean { bucket: 1, tokens: 8 }));
            assert_eq!(is_due, workers > 1, "a worker alone waits for its sums");
            assert_eq!(schedule.report().unwrap(), None);
        }
        let mut schedule = schedule();
        feed(&mut schedule, 0);
        while update(&mut schedule).is_some() {
            schedule.updated();
        }
        assert!(schedule.advance());
        schedule.counted(told(0, 1, 4)).expect("it is late, and nothing waits for it");
        let mut schedule = schedule_of(2);
        schedule.counted(told(0, 0, 5)).unwrap();
        (0..2).for_each(|lane| schedule.loss(loss(0, lane)).unwrap());
        let error = schedule.report().unwrap_err().cause().to_string();
        assert!(error.contains("5 counted tokens in lane 0 of step 1"), "{error}");
        assert!(error.contains("counted 4"), "{error}");
    }

    /// Messages that come early are kept until their step.
    #[test]
    fn sums_of_the_next_step_wait_for_it() {
        let mut schedule = schedule();
        schedule.summed(Ticket { step: 1, bucket: 1 }).unwrap();
        feed(&mut schedule, 0);
        while update(&mut schedule).is_some() {
            schedule.updated();
        }
        assert!(schedule.advance());
        (0..2).for_each(|lane| schedule.loss(loss(1, lane)).unwrap());
        assert_eq!(schedule.report().unwrap(), None);
        assert!(matches!(schedule.next(), Some(StateJob::Mean { bucket: 1, .. })));
        assert!(schedule.next().is_none());
    }
}
