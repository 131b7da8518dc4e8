//! Samples in canonical order become the grains of this worker's lanes.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tidemill_model::{Sample, Tokens};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::channels::pact::Pipeline;
use timely::dataflow::operators::generic::OutputBuilder;
use timely::dataflow::operators::generic::builder_rc::OperatorBuilder;
use timely::dataflow::{Scope, StreamVec};
use timely::progress::Antichain;

use super::error::GraphError;
use super::optimize::StepReport;
use super::plan::TrainingPlan;
use crate::cluster::progress;
use crate::cluster::{Abort, Actor, Failure};

/// Consecutive samples of one lane, over which gradients are formed. From where they are cut or given to the graph, grains stay on
/// their worker; a program that makes them elsewhere exchanges them before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grain<S = Tokens> {
    /// The step, from 0: updates done before it. For an evaluation, updates done.
    pub step: u64,
    /// The lane.
    pub lane: usize,
    /// The grain's index in its lane.
    pub grain: usize,
    /// The samples, in canonical order.
    pub samples: Vec<S>,
}

impl<S> Grain<S> {
    /// Takes the next sample of the grain, whose samples are at the positions `range`; answers whether it is the last.
    ///
    /// # Errors
    /// [`GraphError::Position`] if the sample is at another position than the next.
    pub(super) fn take(
        &mut self,
        (position, sample): (u64, S),
        range: &Range<u64>,
    ) -> Result<bool, GraphError> {
        let expected = range.start + self.samples.len() as u64;
        if position != expected {
            return Err(GraphError::Position { expected, found: position });
        }
        self.samples.push(sample);
        Ok(expected + 1 == range.end)
    }
}

/// The function that a [`SampleSource`] calls, from any thread, when it may have more samples.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// Samples by their position in the endless canonical order, decoded ahead by someone else.
pub trait SampleSource: 'static {
    /// The kind of sample that the model is trained on.
    type Sample: Sample;

    /// Asks for the samples at `positions` after those asked for before. Returns at once; the positions asked for
    /// bounds the source's memory.
    fn request(&mut self, positions: Range<u64>);

    /// The next of the samples that were asked for, in order, with its position; `None` where it is not decoded yet.
    /// Never blocks.
    ///
    /// # Errors
    /// Data that cannot be read; the run ends.
    fn poll(&mut self) -> Result<Option<(u64, Self::Sample)>, Failure>;

    /// `wake` is to be called whenever [`poll`](Self::poll) might answer a sample after it answered `None`.
    fn set_wake(&mut self, wake: Wake);
}

/// `None` is for workers that do not train; no sample is requested there.
impl<S: SampleSource> SampleSource for Option<S> {
    type Sample = S::Sample;

    fn request(&mut self, positions: Range<u64>) {
        if let Some(source) = self {
            source.request(positions);
        }
    }

    fn poll(&mut self) -> Result<Option<(u64, S::Sample)>, Failure> {
        match self {
            Some(source) => source.poll(),
            None => Err(GraphError::NotGiven { what: "a source of samples" }.into()),
        }
    }

    fn set_wake(&mut self, wake: Wake) {
        if let Some(source) = self {
            source.set_wake(wake);
        }
    }
}

impl<S: Sample> SampleSource for Box<dyn SampleSource<Sample = S>> {
    type Sample = S;

    fn request(&mut self, positions: Range<u64>) {
        (**self).request(positions);
    }

    fn poll(&mut self) -> Result<Option<(u64, S)>, Failure> {
        (**self).poll()
    }

    fn set_wake(&mut self, wake: Wake) {
        (**self).set_wake(wake);
    }
}

/// Which samples to ask for, and which grain each belongs to.
#[derive(Debug)]
pub(super) struct GrainCutter<S> {
    plan: Arc<TrainingPlan>,
    /// The worker's lanes, in order, at least one.
    lanes: Vec<usize>,
    /// Their samples, counted from the start of a step.
    samples: Vec<Range<usize>>,
    /// Updates done, as far as this worker knows.
    done: u64,
    /// The first step whose samples were not all asked for, and how many of its ranges were.
    unrequested: (u64, usize),
    /// The grain that the next sample belongs to.
    next: Grain<S>,
    ended: bool,
}

impl<S> GrainCutter<S> {
    pub(super) fn new(plan: Arc<TrainingPlan>, lanes: Vec<usize>) -> Self {
        let step = plan.first_step;
        let next = Grain { step, lane: lanes[0], grain: 0, samples: Vec::new() };
        let samples = plan.batch.samples_of(&lanes);
        let (ended, unrequested) = (step >= plan.steps, (step, 0));
        Self { ended, done: step, unrequested, plan, lanes, samples, next }
    }

    /// An update is done.
    pub(super) fn report(&mut self, report: &StepReport) {
        self.done = self.done.max(report.step);
        self.ended |= report.last;
    }

    /// The positions to ask for next: a range of a step at a time, no further than read-ahead allows.
    pub(super) fn request(&mut self) -> Option<Range<u64>> {
        let limit = self.plan.steps.min(self.done + self.plan.read_ahead_steps.get());
        let (step, range) = self.unrequested;
        if self.ended || step >= limit {
            return None;
        }
        let is_last = range + 1 == self.samples.len();
        self.unrequested = if is_last { (step + 1, 0) } else { (step, range + 1) };
        Some(self.plan.batch.positions(step, &self.samples[range]))
    }

    /// The step of the next grain; `None` when there are no more.
    pub(super) fn step(&self) -> Option<u64> {
        (!self.ended).then_some(self.next.step)
    }

    /// Whether a sample was asked for that has not come.
    pub(super) fn expects_sample(&self) -> bool {
        !self.ended && self.next.step < self.unrequested.0
    }

    /// Adds the next sample; answers the grain that it completes.
    pub(super) fn push(&mut self, position: u64, sample: S) -> Result<Option<Grain<S>>, Failure> {
        let batch = &self.plan.batch;
        let Grain { step, lane, grain, .. } = self.next;
        let range = batch.positions(step, &batch.grain_range(lane, grain));
        if !self.next.take((position, sample), &range)? {
            return Ok(None);
        }
        let later = self.lanes.partition_point(|&before| before <= lane);
        let following = if grain + 1 < batch.lane_grains(lane) {
            Grain { step, lane, grain: grain + 1, samples: Vec::new() }
        } else if let Some(&lane) = self.lanes.get(later) {
            Grain { step, lane, grain: 0, samples: Vec::new() }
        } else {
            Grain { step: step + 1, lane: self.lanes[0], grain: 0, samples: Vec::new() }
        };
        self.ended |= following.step >= self.plan.steps;
        Ok(Some(std::mem::replace(&mut self.next, following)))
    }
}

/// A source of grains.
pub trait Samples<'scope> {
    /// The grains of this worker's lanes, step after step; none where it does not [train](TrainingPlan::trainers).
    ///
    /// # Contract
    /// - Output: this worker's [`Grain`]s at the timestamps of their steps, in order of step, lane and grain, from
    ///   `plan.first_step`; the stream ends after `plan.steps` steps, or when a report says that its step was the last.
    /// - Input: `reports` only moves the read-ahead on; it has no path to the output.
    /// - Memory: at most `plan.read_ahead_steps` steps beyond the last report are asked of `source`.
    /// - Never blocks: `source` decodes elsewhere and wakes this operator.
    /// - Failure: an error of `source`, or a sample at another position than asked for, aborts the run.
    ///
    /// # Example
    /// A source of points is cut into grains.
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/chain.rs"));
    /// # fn main() -> Result<(), Failure> {
    /// # static SAMPLES: AtomicU64 = AtomicU64::new(0);
    /// # run(|scope, Parts { plan, abort, .. }| {
    /// # // Nothing trains here, and no report comes back: all steps are read ahead.
    /// # let read_ahead_steps = NonZeroU64::new(STEPS).expect("steps");
    /// # let plan = Arc::new(TrainingPlan { read_ahead_steps, ..(*plan).clone() });
    /// # let reports = Vec::new().to_stream(scope);
    /// let grains = scope.samples(Points::default(), reports, &plan, &abort);
    /// grains.inspect(|grain: &Grain<Point>| {
    ///     SAMPLES.fetch_add(grain.samples.len() as u64, Ordering::Relaxed);
    /// });
    /// # })?;
    /// // Eight in each of four steps, those of both workers together.
    /// assert_eq!(SAMPLES.load(Ordering::Relaxed), 4 * 8);
    /// # Ok(())
    /// # }
    /// ```
    fn samples<S: SampleSource>(
        self,
        source: S,
        reports: StreamVec<'scope, u64, StepReport>,
        plan: &Arc<TrainingPlan>,
        abort: &Abort,
    ) -> StreamVec<'scope, u64, Grain<S::Sample>>;
}

impl<'scope> Samples<'scope> for Scope<'scope, u64> {
    fn samples<S: SampleSource>(
        self,
        mut source: S,
        reports: StreamVec<'scope, u64, StepReport>,
        plan: &Arc<TrainingPlan>,
        abort: &Abort,
    ) -> StreamVec<'scope, u64, Grain<S::Sample>> {
        let mut builder = OperatorBuilder::new("Samples".to_owned(), self);
        let (output, grains) = builder.new_output::<Vec<Grain<S::Sample>>>();
        let mut output = OutputBuilder::<_, CapacityContainerBuilder<Vec<_>>>::from(output);
        let mut reports = builder.new_input_connection(reports, Pipeline, [(0, Antichain::new())]);
        source.set_wake(super::wake(self, &builder.operator_info()));
        let actor = Actor::Worker(self.index());
        let (plan, abort) = (Arc::clone(plan), abort.clone());
        let place = plan.trainers.place_in(self, &abort).among();
        let lanes = place.map(|(rank, ranks)| plan.batch.worker_lanes(rank, ranks));
        builder.build(move |mut capabilities| {
            let mut cutter = match lanes.transpose() {
                Ok(lanes) => lanes.map(|lanes| GrainCutter::new(plan, lanes)),
                Err(error) => {
                    abort.fail(actor.clone(), error);
                    None
                }
            };
            let mut capability = capabilities.pop().filter(|_| cutter.is_some());
            move |_frontiers| {
                let mut turn = |cutter: &mut GrainCutter<S::Sample>| -> Result<(), Failure> {
                    reports.for_each(|_time, reports| {
                        reports.drain(..).for_each(|report| cutter.report(&report));
                    });
                    while let Some(positions) = cutter.request() {
                        source.request(positions);
                    }
                    let mut output = output.activate();
                    while let (true, Some(held)) = (cutter.expects_sample(), capability.as_mut()) {
                        // A session ends its message, and a message has room for many grains.
                        let mut session = output.session(&*held);
                        let mut later = None;
                        while let (true, None) = (cutter.expects_sample(), &later) {
                            let Some((position, sample)) = source.poll()? else { break };
                            progress::moved();
                            match cutter.push(position, sample)? {
                                Some(grain) if grain.step > *held.time() => later = Some(grain),
                                Some(grain) => session.give(grain),
                                None => {}
                            }
                        }
                        drop(session);
                        let Some(grain) = later else { break };
                        held.downgrade(&grain.step);
                        output.session(&*held).give(grain);
                    }
                    match (cutter.step(), capability.as_mut()) {
                        (Some(step), Some(held)) if step > *held.time() => held.downgrade(&step),
                        (None, _) => capability = None,
                        _ => {}
                    }
                    Ok(())
                };
                if let Some(Err(failure)) = cutter.as_mut().map(&mut turn) {
                    abort.fail(actor.clone(), failure);
                    cutter = None;
                }
            }
        });
        grains
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::{BatchSettings, MicrobatchMemory};
    use tidemill_model::Layout;

    fn cutter(steps: u64, lanes: &[usize]) -> GrainCutter<Tokens> {
        let settings = BatchSettings {
            samples_per_step: Some(10),
            lanes: Some(4),
            grain_samples: 2,
            ..Default::default()
        };
        let memory = MicrobatchMemory { sample_bytes: 1, workspace_bytes: 1 };
        let mut plan = TrainingPlan::new(settings.plan(memory).unwrap(), &Layout::new(), 4, steps);
        plan.first_step = 5;
        GrainCutter::new(Arc::new(plan), lanes.to_vec())
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
    fn grains_follow_the_canonical_order_and_read_ahead_is_bounded() {
        let mut cutter = cutter(8, &[1, 2]);
        // Lanes of 10 samples in 4: 0..2, 2..5, 5..7, 7..10.
        assert_eq!(cutter.request(), Some(52..57));
        assert_eq!(cutter.request(), Some(62..67));
        assert_eq!(cutter.request(), None, "two steps ahead");
        let mut grains = Vec::new();
        for position in (52..57).chain(62..67) {
            assert!(cutter.expects_sample());
            let grain = cutter.push(position, vec![0; 5]).unwrap();
            grains.extend(grain.map(|g| (g.step, g.lane, g.grain, g.samples.len())));
        }
        assert_eq!(grains[..3], [(5, 1, 0, 2), (5, 1, 1, 1), (5, 2, 0, 2)]);
        assert_eq!(grains[3..], [(6, 1, 0, 2), (6, 1, 1, 1), (6, 2, 0, 2)]);
        assert!(!cutter.expects_sample());
        cutter.report(&report(6, false));
        assert_eq!(cutter.request(), Some(72..77));
        cutter.report(&report(7, false));
        assert_eq!(cutter.request(), None, "the run has three steps");
        for position in 72..77 {
            cutter.push(position, vec![0; 5]).unwrap();
        }
        assert_eq!(cutter.step(), None);
    }

    #[test]
    fn lanes_that_are_no_neighbours_are_asked_for_one_by_one() {
        let mut cutter = cutter(7, &[0, 2]);
        let requests: Vec<_> = std::iter::from_fn(|| cutter.request()).collect();
        assert_eq!(requests, [50..52, 55..57, 60..62, 65..67]);
        let mut grains = Vec::new();
        for position in requests.into_iter().flatten() {
            let grain = cutter.push(position, vec![0; 5]).unwrap();
            grains.extend(grain.map(|g| (g.step, g.lane, g.grain, g.samples.len())));
        }
        assert_eq!(grains, [(5, 0, 0, 2), (5, 2, 0, 2), (6, 0, 0, 2), (6, 2, 0, 2)]);
    }

    #[test]
    fn the_last_report_ends_the_samples() {
        let mut cutter = cutter(100, &[0, 1, 2, 3]);
        assert!(cutter.request().is_some());
        cutter.report(&report(6, true));
        assert_eq!((cutter.request(), cutter.step()), (None, None));
        assert!(!cutter.expects_sample());
    }

    #[test]
    fn a_sample_from_elsewhere_is_an_error() {
        let mut cutter = cutter(8, &[0]);
        assert!(cutter.request().is_some());
        assert!(cutter.push(51, vec![0; 5]).is_err());
    }
}
