//! The mean loss on other samples, with exactly the parameters after an update.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tidemill_evaluation::metrics::Answer;
use tidemill_kernels::FloatEnvironment;
use tidemill_model::{Sample, Tokens};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::channels::pact::{Exchange, Pipeline};
use timely::dataflow::operators::Operator;
use timely::dataflow::operators::generic::OutputBuilder;
use timely::dataflow::operators::generic::builder_rc::OperatorBuilder;
use timely::dataflow::{Scope, StreamVec};
use timely::progress::Antichain;

use super::forward_backward::EvaluationLoss;
use super::optimize::StepReport;
use super::plan::{EvaluationPlan, TrainingPlan};
use super::samples::{Grain, SampleSource};
use crate::cluster::progress;
use crate::cluster::{Abort, Actor, Failure};
use crate::error::JobError;

/// The result of an evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvaluationReport {
    /// Updates done.
    pub step: u64,
    /// The mean loss over counted tokens of the samples, in nats.
    pub loss: f64,
    /// Counted tokens of the samples.
    pub tokens: u64,
    /// The answers to the requests, in their order.
    #[serde(skip)]
    pub answers: Vec<Answer>,
    /// The scores that follow from the answers.
    #[serde(flatten)]
    pub scores: Scores,
}

/// Scores that follow from the answers to requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Scores {
    /// Metrics of tasks by their names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tasks: TaskScores,
    /// Averages of suites, by the names of suites and averages.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub suites: TaskScores,
}

impl Scores {
    /// The scores of tasks, then the scores of suites.
    pub fn all(&self) -> impl Iterator<Item = (&String, &BTreeMap<String, f64>)> {
        self.tasks.iter().chain(&self.suites)
    }
}

/// Metrics by their names, by the names of tasks.
pub type TaskScores = BTreeMap<String, BTreeMap<String, f64>>;

/// An evaluation of a run: when it is due, and the samples that it reads each time, from the first.
pub struct Evaluation<S = Tokens> {
    pub(super) plan: EvaluationPlan,
    pub(super) source: Box<dyn SampleSource<Sample = S>>,
}

impl<S: Sample> Evaluation<S> {
    /// The evaluation of `plan`, with samples from `source`, which is asked for the samples of one worker's grains.
    pub fn new(plan: EvaluationPlan, source: impl SampleSource<Sample = S>) -> Self {
        Self { plan, source: Box::new(source) }
    }

    /// The same on a worker that does not [train](TrainingPlan::trainers).
    pub fn elsewhere(plan: EvaluationPlan) -> Self {
        Self::new(plan, None::<Box<dyn SampleSource<Sample = S>>>)
    }
}

/// This worker's grains of each evaluation that is due; all of them will come: only
/// [`EvaluationSamples`] makes them.
pub struct EvaluationGrains<'scope, S = Tokens> {
    pub(super) plan: EvaluationPlan,
    pub(super) grains: StreamVec<'scope, u64, Grain<S>>,
}

/// Which grains of an evaluation to ask for and to give.
struct EvaluationCutter<S> {
    evaluation: EvaluationPlan,
    plan: Arc<TrainingPlan>,
    grains: Range<usize>,
    /// The evaluation that runs: updates done.
    running: Option<u64>,
    /// The first grain that was not asked for, the next one to give, and how many came back.
    requested: usize,
    next: Grain<S>,
    evaluated: usize,
    last: bool,
}

impl<S> EvaluationCutter<S> {
    fn new(evaluation: EvaluationPlan, plan: Arc<TrainingPlan>, grains: Range<usize>) -> Self {
        let next = Grain { step: 0, lane: 0, grain: grains.start, samples: Vec::new() };
        let last = plan.first_step >= plan.steps || grains.is_empty();
        let requested = grains.start;
        Self { evaluation, plan, grains, running: None, requested, next, evaluated: 0, last }
    }

    fn report(&mut self, report: &StepReport) {
        self.last |= report.last;
        if self.evaluation.is_due(report.step, self.plan.steps) && !self.grains.is_empty() {
            self.running = Some(report.step);
            self.requested = self.grains.start;
            self.evaluated = 0;
            let (step, grain) = (report.step, self.grains.start);
            self.next = Grain { step, lane: 0, grain, samples: Vec::new() };
        }
    }

    /// The positions to ask for next: two microbatches beyond those that were evaluated.
    fn request(&mut self) -> Option<Range<u64>> {
        let ahead = 2 * self.plan.batch.microbatch_grains();
        let limit = self.grains.end.min(self.grains.start + self.evaluated + ahead);
        if self.running.is_none() || self.requested >= limit {
            return None;
        }
        self.requested += 1;
        Some(self.evaluation.grain(&self.plan.batch, self.requested - 1))
    }

    fn expects_sample(&self) -> bool {
        self.running.is_some() && self.next.grain < self.requested
    }

    /// Adds the next sample; answers the grain that it completes.
    fn push(&mut self, position: u64, sample: S) -> Result<Option<Grain<S>>, Failure> {
        let range = self.evaluation.grain(&self.plan.batch, self.next.grain);
        if !self.next.take((position, sample), &range)? {
            return Ok(None);
        }
        let Grain { step, grain, .. } = self.next;
        let following = Grain { step, lane: 0, grain: grain + 1, samples: Vec::new() };
        if following.grain == self.grains.end {
            self.running = None;
        }
        Ok(Some(std::mem::replace(&mut self.next, following)))
    }
}

/// A source of grains to evaluate.
pub trait EvaluationSamples<'scope> {
    /// This worker's part of each evaluation that is due; nothing where it does not [train](TrainingPlan::trainers).
    ///
    /// # Contract
    /// - Output: at timestamp u, for each u after which an evaluation is due, this worker's grains of it, in order.
    /// - Input: `reports` says when an evaluation is due, `losses` has the evaluated losses; neither has a path to the output.
    /// - Memory: two microbatches of samples.
    /// - Failure: an error of the source, or a sample at another position than asked for, aborts the run.
    ///
    /// # Example
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/chain.rs"));
    /// # fn main() -> Result<(), Failure> {
    /// # static LOSSES: Mutex<Vec<f64>> = Mutex::new(Vec::new());
    /// # run(|scope, parts| {
    /// # let Started { grains, mut inputs, compute, evaluated, mut rest } = start(scope, parts);
    /// # let (plan, abort) = (Arc::clone(&rest.plan), rest.abort.clone());
    /// let (samples, every_steps) = (NonZeroU64::new(5), NonZeroU64::new(2));
    /// let due = EvaluationPlan {
    ///     samples: samples.expect("not 0"),
    ///     requests: 0,
    ///     every_steps: every_steps.expect("not 0"),
    /// };
    /// // The plan and the source are one argument: an evaluation that is due has samples.
    /// let evaluation = Evaluation::new(due, Points::default());
    /// let reports = inputs.reports.clone();
    /// let grains_to_evaluate =
    ///     scope.evaluation_samples(evaluation, reports, evaluated, &plan, &abort);
    /// inputs.evaluations = Some(grains_to_evaluate);
    /// # let streams = grains.forward_backward(inputs, compute, &plan, &abort);
    /// # let ForwardBackwardStreams { ready, counted, losses, evaluation_losses } = streams;
    /// # let inputs = rest.optimize_inputs(counted, losses);
    /// # let summed = ready.reduce(&rest.thread);
    /// # let updates = summed.optimize(inputs, &rest.pace, &rest.thread, &plan);
    /// # let reports = evaluation_losses.clone().evaluate(due, &plan, &abort);
    /// # reports.inspect(|report| LOSSES.lock().expect("no panic").push(report.loss));
    /// # rest.close(updates, evaluation_losses);
    /// # })?;
    /// # assert_eq!(LOSSES.lock().expect("no panic").len(), 2);
    /// # Ok(())
    /// # }
    /// ```
    fn evaluation_samples<S: Sample>(
        self,
        evaluation: Evaluation<S>,
        reports: StreamVec<'scope, u64, StepReport>,
        losses: StreamVec<'scope, u64, EvaluationLoss>,
        plan: &Arc<TrainingPlan>,
        abort: &Abort,
    ) -> EvaluationGrains<'scope, S>;
}

impl<'scope> EvaluationSamples<'scope> for Scope<'scope, u64> {
    fn evaluation_samples<S: Sample>(
        self,
        evaluation: Evaluation<S>,
        reports: StreamVec<'scope, u64, StepReport>,
        losses: StreamVec<'scope, u64, EvaluationLoss>,
        plan: &Arc<TrainingPlan>,
        abort: &Abort,
    ) -> EvaluationGrains<'scope, S> {
        let Evaluation { plan: evaluation, mut source } = evaluation;
        let mut builder = OperatorBuilder::new("EvaluationSamples".to_owned(), self);
        let (output, grains) = builder.new_output::<Vec<Grain<S>>>();
        let mut output = OutputBuilder::<_, CapacityContainerBuilder<Vec<_>>>::from(output);
        let no_path = [(0, Antichain::new())];
        let mut reports = builder.new_input_connection(reports, Pipeline, no_path.clone());
        let mut losses = builder.new_input_connection(losses, Pipeline, no_path);
        source.set_wake(super::wake(self, &builder.operator_info()));
        let (actor, abort) = (Actor::Worker(self.index()), abort.clone());
        let own = match plan.trainers.place_in(self, &abort).among() {
            Some((rank, ranks)) => evaluation.worker_grains(&plan.batch, rank, ranks),
            None => 0..0,
        };
        let mut cutter = Some(EvaluationCutter::new(evaluation, Arc::clone(plan), own));
        builder.build(move |mut capabilities| {
            let mut capability = capabilities.pop();
            move |_frontiers| {
                let mut turn = |cutter: &mut EvaluationCutter<S>| -> Result<(), Failure> {
                    losses.for_each(|_time, losses| cutter.evaluated += losses.len());
                    reports.for_each(|_time, reports| {
                        for report in reports.drain(..) {
                            cutter.report(&report);
                            if let Some(held) = capability.as_mut() {
                                held.downgrade(&report.step);
                            }
                        }
                    });
                    while let Some(positions) = cutter.request() {
                        source.request(positions);
                    }
                    let mut output = output.activate();
                    if let Some(held) = &capability {
                        let mut session = output.session(held);
                        while cutter.expects_sample() {
                            let Some((position, sample)) = source.poll()? else { break };
                            progress::moved();
                            let grain = cutter.push(position, sample)?;
                            grain.into_iter().for_each(|grain| session.give(grain));
                        }
                    }
                    if cutter.last && cutter.running.is_none() {
                        capability = None;
                    }
                    Ok(())
                };
                if let Some(Err(failure)) = cutter.as_mut().map(&mut turn) {
                    abort.fail(actor.clone(), failure);
                    cutter = None;
                }
            }
        });
        EvaluationGrains { plan: evaluation, grains }
    }
}

/// Sums the losses of an evaluation.
pub trait Evaluate<'scope> {
    /// The mean loss of each evaluation, on the first worker that [trains](TrainingPlan::trainers).
    ///
    /// # Contract
    /// - Input: the losses of all grains, exchanged to that worker.
    /// - Output: one [`EvaluationReport`] an evaluation: grains are summed in order of their index, on whichever worker they ran; the
    ///   grains of requests are kept apart, and each gives an answer, in order.
    /// - Failure: no counted token, or a loss that is no number, aborts the run.
    ///
    /// # Example
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/chain.rs"));
    /// # fn main() -> Result<(), Failure> {
    /// # static LOSSES: Mutex<Vec<f64>> = Mutex::new(Vec::new());
    /// # run(|scope, parts| {
    /// # let Started { grains, mut inputs, compute, evaluated, mut rest } = start(scope, parts);
    /// # let (plan, abort) = (Arc::clone(&rest.plan), rest.abort.clone());
    /// # let (samples, every_steps) = (NonZeroU64::new(5), NonZeroU64::new(2));
    /// # let due = EvaluationPlan {
    /// #     samples: samples.expect("not 0"),
    /// #     requests: 0,
    /// #     every_steps: every_steps.expect("not 0"),
    /// # };
    /// # let evaluation = Evaluation::new(due, Points::default());
    /// # let reports = inputs.reports.clone();
    /// # let to_evaluate = scope.evaluation_samples(evaluation, reports, evaluated, &plan, &abort);
    /// # inputs.evaluations = Some(to_evaluate);
    /// # let streams = grains.forward_backward(inputs, compute, &plan, &abort);
    /// # let ForwardBackwardStreams { ready, counted, losses, evaluation_losses } = streams;
    /// # let inputs = rest.optimize_inputs(counted, losses);
    /// # let summed = ready.reduce(&rest.thread);
    /// # let updates = summed.optimize(inputs, &rest.pace, &rest.thread, &plan);
    /// let evaluations = evaluation_losses.clone().evaluate(due, &plan, &abort);
    /// evaluations.inspect(|report| LOSSES.lock().expect("no panic").push(report.loss));
    /// # rest.close(updates, evaluation_losses);
    /// # })?;
    /// // After two of four steps, on worker 0.
    /// let losses = LOSSES.lock().expect("no panic");
    /// assert!(losses.len() == 2 && losses[1] < losses[0]);
    /// # Ok(())
    /// # }
    /// ```
    fn evaluate(
        self,
        evaluation: EvaluationPlan,
        plan: &Arc<TrainingPlan>,
        abort: &Abort,
    ) -> StreamVec<'scope, u64, EvaluationReport>;
}

impl<'scope> Evaluate<'scope> for StreamVec<'scope, u64, EvaluationLoss> {
    fn evaluate(
        self,
        evaluation: EvaluationPlan,
        plan: &Arc<TrainingPlan>,
        abort: &Abort,
    ) -> StreamVec<'scope, u64, EvaluationReport> {
        let actor = Actor::Worker(self.scope().index());
        let (expected, abort) = (evaluation.grains(&plan.batch), abort.clone());
        let of_samples = evaluation.sample_grains(&plan.batch) as u64;
        let plan = Arc::clone(plan);
        let first = plan.trainers.place_in(self.scope(), &abort).worker(0) as u64;
        let to_first = Exchange::new(move |_: &EvaluationLoss| first);
        self.unary::<CapacityContainerBuilder<Vec<_>>, _, _, _>(to_first, "Evaluate", |_, _| {
            let mut gathered = BTreeMap::<u64, BTreeMap<u64, EvaluationLoss>>::new();
            move |input, output| {
                // The worker's thread may be an embedder's.
                let _standard = FloatEnvironment::standard();
                input.for_each(|time, losses| {
                    let grains = gathered.entry(*time.time()).or_default();
                    grains.extend(losses.drain(..).map(|loss| (loss.grain, loss)));
                    if grains.len() < expected {
                        return;
                    }
                    let requests = grains.split_off(&of_samples);
                    let result = mean(*time.time(), grains.values(), |grain| {
                        let positions = evaluation.grain(&plan.batch, grain);
                        let samples = plan.evaluation_names.in_words(&positions);
                        (positions, samples)
                    });
                    gathered.remove(time.time());
                    let result = result.and_then(|report| with_requests(report, requests));
                    match result {
                        Ok(report) => output.session(&time).give(report),
                        Err(error) => abort.fail(actor.clone(), error),
                    }
                });
            }
        })
    }
}

/// `samples_of` says of a grain which samples it has.
fn mean<'a>(
    step: u64,
    losses: impl Iterator<Item = &'a EvaluationLoss>,
    samples_of: impl FnOnce(usize) -> (Range<u64>, String),
) -> Result<EvaluationReport, JobError> {
    let (mut loss_sum, mut tokens) = (0.0, 0);
    let mut first_not_finite = None;
    for loss in losses {
        loss_sum += loss.loss_sum;
        tokens += loss.tokens;
        if !loss.loss_sum.is_finite() {
            first_not_finite.get_or_insert(loss.grain);
        }
    }
    let loss = loss_sum / tokens as f64;
    match (tokens, loss.is_finite()) {
        (0, _) => {
            let what = "the evaluation has no counted token".to_owned();
            Err(JobError::Step { step, what })
        }
        (_, false) => {
            let (positions, samples) = samples_of(first_not_finite.unwrap_or_default() as usize);
            Err(JobError::EvaluationLoss { step, loss, positions, samples })
        }
        _ => Ok(EvaluationReport {
            step,
            loss,
            tokens,
            answers: Vec::new(),
            scores: Scores::default(),
        }),
    }
}

/// The report with the answers to the requests, in the order of their grains.
fn with_requests(
    report: EvaluationReport,
    requests: BTreeMap<u64, EvaluationLoss>,
) -> Result<EvaluationReport, JobError> {
    let mut losses = requests.values().map(|request| request.loss_sum).enumerate();
    if let Some((number, loss)) = losses.find(|(_, loss)| !loss.is_finite()) {
        let step = report.step;
        let what = format!("the loss of request {} of the evaluation is {loss}", number + 1);
        return Err(JobError::Step { step, what });
    }
    let answer =
        |EvaluationLoss { loss_sum, greedy, .. }| Answer { log_likelihood: -loss_sum, greedy };
    Ok(EvaluationReport { answers: requests.into_values().map(answer).collect(), ..report })
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use tidemill_model::Layout;

    use super::*;
    use crate::batch::{BatchSettings, MicrobatchMemory};

    #[test]
    fn grains_of_an_evaluation_have_the_samples_that_were_asked_for() {
        let settings = BatchSettings {
            samples_per_step: Some(4),
            lanes: Some(2),
            grain_samples: 2,
            ..Default::default()
        };
        let memory = MicrobatchMemory { sample_bytes: 1, workspace_bytes: 1 };
        let plan = TrainingPlan::new(settings.plan(memory).unwrap(), &Layout::new(), 4, 8);
        let evaluation = EvaluationPlan {
            samples: NonZeroU64::new(3).unwrap(),
            requests: 0,
            every_steps: NonZeroU64::new(2).unwrap(),
        };
        let grains = evaluation.worker_grains(&plan.batch, 0, 1);
        let mut cutter = EvaluationCutter::new(evaluation, Arc::new(plan), grains);
        let (step, last) = (2, false);
        let (loss, grad_norm, learning_rate, tokens, total_tokens) = (0.0, 0.0, 0.0, 0, 0);
        let report =
            StepReport { step, loss, grad_norm, learning_rate, tokens, total_tokens, last };
        cutter.report(&report);
        let requests: Vec<_> = std::iter::from_fn(|| cutter.request()).collect();
        assert_eq!(requests, [0..2, 2..3]);
        assert_eq!(cutter.push(0, 'a').unwrap(), None);
        let error = cutter.push(2, 'c').unwrap_err().cause().to_string();
        assert_eq!(error, "expected the sample at position 1, found 2");
        let grain = |grain, samples| Some(Grain { step, lane: 0, grain, samples });
        assert_eq!(cutter.push(1, 'b').unwrap(), grain(0, vec!['a', 'b']));
        assert_eq!(cutter.push(2, 'c').unwrap(), grain(1, vec!['c']));
        assert!(!cutter.expects_sample());
    }

    #[test]
    fn an_evaluation_without_a_mean_is_an_error() {
        let mean = |losses: &[(f64, u64)]| {
            let loss = |(grain, &(loss_sum, tokens)): (usize, &(f64, u64))| EvaluationLoss {
                updates: 4,
                grain: grain as u64,
                loss_sum,
                tokens,
                greedy: None,
            };
            let losses: Vec<_> = losses.iter().enumerate().map(loss).collect();
            let samples_of = |grain: usize| (0..grain as u64, format!("those of grain {grain}"));
            mean(4, losses.iter(), samples_of).map_err(|error| error.to_string())
        };
        let (answers, scores) = (Vec::new(), Scores::default());
        let report = EvaluationReport { step: 4, loss: 1.0, tokens: 4, answers, scores };
        assert_eq!(mean(&[(3.0, 2), (1.0, 2)]), Ok(report.clone()));
        let greedy = Some(true);
        let request = |grain, loss_sum| {
            (grain, EvaluationLoss { updates: 4, grain, loss_sum, tokens: 1, greedy })
        };
        let answered =
            with_requests(report.clone(), [request(9, 2.5), request(8, 0.5)].into()).unwrap();
        let expected = [-0.5, -2.5].map(|log_likelihood| Answer { log_likelihood, greedy });
        assert_eq!(answered.answers, expected);
        let wrong = with_requests(report, [request(8, 1.0), request(9, f64::INFINITY)].into());
        let expected = "step 4: the loss of request 2 of the evaluation is inf";
        assert_eq!(wrong.unwrap_err().to_string(), expected);
        let error = mean(&[(0.0, 0)]).unwrap_err();
        assert_eq!(error, "step 4: the evaluation has no counted token");
        let error = mean(&[(1.0, 1), (f64::NAN, 1), (f64::NAN, 1)]).unwrap_err();
        let expected = "step 4: the loss of the evaluation is NaN, first at those of grain 1";
        assert_eq!(error, expected);
    }
}
