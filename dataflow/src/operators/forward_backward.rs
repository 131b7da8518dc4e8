//! Grains become gradients and losses, computed by a device thread with the parameters that come back.

mod accumulators;
mod block_order;
mod bucket_sums;
mod counting;
mod device;
mod gathered;
mod lane_sink;
mod lane_sums;
mod outbox;
mod replica;
mod schedule;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde::{Deserialize, Serialize};
use tidemill_kernels::Backend;
use tidemill_model::{Sample, Tokens, Trainable};
use timely::PartialOrder;
use timely::container::CapacityContainerBuilder;
use timely::dataflow::StreamVec;
use timely::dataflow::channels::pact::Pipeline;
use timely::dataflow::operators::Capability;
use timely::dataflow::operators::generic::OutputBuilder;
use timely::dataflow::operators::generic::builder_rc::OperatorBuilder;
use timely::dataflow::operators::vec::ToStream;
use timely::progress::Antichain;
use timely::progress::operate::FrontierInterest;

use self::counting::Counting;
use self::device::{DeviceParts, DeviceReply};
use self::schedule::{Computation, DeviceSchedule};
use super::error::GraphError;
use super::evaluate::EvaluationGrains;
use super::job_thread::JobThread;
use super::keep_first;
use super::lending::Borrower;
use super::optimize::StepReport;
use super::plan::{EvaluationPlan, TrainingPlan};
use super::samples::Grain;
use super::ticket::{Ready, Ticket};
use crate::cluster::progress::{self, Phase};
use crate::cluster::{Abort, Actor, Failure};

/// The loss of one lane of one step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LaneLoss {
    /// The step, from 0.
    pub step: u64,
    /// The lane.
    pub lane: u32,
    /// The sum of the losses of counted tokens, in nats: grain by grain, in order.
    pub loss_sum: f64,
    /// The number of counted tokens.
    pub tokens: u64,
    /// Whether this worker was asked to stop: the step is then the last of all workers.
    pub stop_requested: bool,
    /// The first grain whose loss is not finite.
    pub first_not_finite: Option<u32>,
}

/// The counted tokens of one lane of one step, told before it is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneTokens {
    /// The step, from 0.
    pub step: u64,
    /// The lane.
    pub lane: u32,
    /// The number of counted tokens.
    pub tokens: u64,
}

/// The loss of one grain of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvaluationLoss {
    /// Updates in the parameters.
    pub updates: u64,
    /// The grain.
    pub grain: u64,
    /// The sum of the losses of counted tokens, in nats.
    pub loss_sum: f64,
    /// The number of counted tokens.
    pub tokens: u64,
    /// For a request, whether each counted token is the likeliest; none where the model does not tell.
    pub greedy: Option<bool>,
}

/// The device that computes, and its parameters.
pub struct Compute<B: Backend, M> {
    /// The device.
    pub backend: Arc<B>,
    /// The model that is trained.
    pub model: Arc<M>,
    /// Lends the parameters.
    pub borrower: Borrower<B>,
    /// Set to make the step that runs the last one, on every worker.
    pub stop: Arc<AtomicBool>,
}

/// The feedback of [`ForwardBackward`] from the optimizer, and grains to evaluate.
pub struct ForwardBackwardInputs<'scope, S = Tokens> {
    /// The buckets whose updated parameters are there: of `gather`.
    pub present: StreamVec<'scope, u64, Ticket>,
    /// This worker's reports.
    pub reports: StreamVec<'scope, u64, StepReport>,
    /// Grains to evaluate, where anything is.
    pub evaluations: Option<EvaluationGrains<'scope, S>>,
}

/// The output streams of [`ForwardBackward`].
pub struct ForwardBackwardStreams<'scope> {
    /// The buckets whose gradients this worker has summed over its lanes of a round: for `reduce`.
    pub ready: StreamVec<'scope, u64, Ready>,
    /// Tokens that this worker's lanes will count, if the model tells them before it computes.
    pub counted: StreamVec<'scope, u64, LaneTokens>,
    /// The losses of this worker's lanes.
    pub losses: StreamVec<'scope, u64, LaneLoss>,
    /// The losses of this worker's evaluation grains.
    pub evaluation_losses: StreamVec<'scope, u64, EvaluationLoss>,
}

/// Trains on grains of samples `S`.
pub trait ForwardBackward<'scope, S> {
    /// Forward and backward over this worker's lanes. Where it does not [train](TrainingPlan::trainers), no thread is started, whatever
    /// `compute` is.
    ///
    /// # Contract
    /// - Input: every [`Grain`] of this worker's lanes, for every step from `plan.first_step`, in any order; a user's own
    ///   stream may produce them. `inputs` is the feedback (see [`TrainingLoop`](super::train::TrainingLoop)).
    /// - Output: at the timestamp of the step, for each round and bucket a [`Ready`] as soon as the gradients of this worker's lanes
    ///   of the round are final in it, or enqueued to be, in the order of a backward pass; a [`LaneLoss`] for each lane, and before
    ///   them a [`LaneTokens`], where the model tells its counted tokens.
    /// - Order: a microbatch of step s computes once its grains, all parameters after s updates and the report of update s are
    ///   there, the evaluation that is due after s updates is done, and so are the microbatches before it, lane by lane. Nothing
    ///   computes after the report that says `last`.
    /// - Memory: the device holds the parameters, which the optimizer thread lends, a workspace and the accumulators of its lanes, or
    ///   of the lane at hand where gradients are shared out; in the host's memory also copies that other workers have not read.
    /// - Never blocks: a device thread computes, and this operator keeps the capabilities.
    /// - Failure: an error or a panic of the device thread, a grain that does not belong here, or a stream of grains
    ///   that ends early, aborts the run.
    ///
    /// # Example
    /// The losses of lanes are tapped on their way.
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/chain.rs"));
    /// # fn main() -> Result<(), Failure> {
    /// # static LANES: AtomicU64 = AtomicU64::new(0);
    /// # run(|scope, parts| {
    /// # let Started { grains, inputs, compute, mut rest, .. } = start(scope, parts);
    /// # let (plan, abort) = (Arc::clone(&rest.plan), rest.abort.clone());
    /// let ForwardBackwardStreams { ready, counted, losses, evaluation_losses } =
    ///     grains.forward_backward(inputs, compute, &plan, &abort);
    /// let losses = losses.inspect(|lane| {
    ///     println!("step {}, lane {}: {}", lane.step, lane.lane, lane.loss_sum);
    ///     LANES.fetch_add(1, Ordering::Relaxed);
    /// });
    /// # let inputs = rest.optimize_inputs(counted, losses);
    /// # let summed = ready.reduce(&rest.thread);
    /// # let updates = summed.optimize(inputs, &rest.pace, &rest.thread, &plan);
    /// # rest.close(updates, evaluation_losses);
    /// # })?;
    /// // Two in each of four steps, one on each worker.
    /// assert_eq!(LANES.load(Ordering::Relaxed), 4 * 2);
    /// # Ok(())
    /// # }
    /// ```
    fn forward_backward<B: Backend, M: Trainable<B, Sample = S>>(
        self,
        inputs: ForwardBackwardInputs<'scope, S>,
        compute: impl Into<Option<Compute<B, M>>>,
        plan: &Arc<TrainingPlan>,
        abort: &Abort,
    ) -> ForwardBackwardStreams<'scope>;
}

/// The capabilities of one timestamp.
struct Held {
    ready: Capability<u64>,
    counted: Capability<u64>,
    losses: Capability<u64>,
}

/// Everything between the operator's ports.
struct State<S> {
    schedule: DeviceSchedule<S>,
    device: JobThread<Computation<S>, DeviceReply>,
    /// Counts the lanes' tokens: of several workers.
    counting: Option<Counting<S>>,
    steps: BTreeMap<u64, Held>,
    evaluations: BTreeMap<u64, Capability<u64>>,
    running: Option<Running>,
}

/// The computation that the device is doing.
enum Running {
    /// Microbatches of a step.
    Training(u64),
    /// Grains of the evaluation after so many updates.
    Evaluating(u64),
}

impl<'scope, S: Sample> ForwardBackward<'scope, S> for StreamVec<'scope, u64, Grain<S>> {
    fn forward_backward<B: Backend, M: Trainable<B, Sample = S>>(
        self,
        inputs: ForwardBackwardInputs<'scope, S>,
        compute: impl Into<Option<Compute<B, M>>>,
        plan: &Arc<TrainingPlan>,
        abort: &Abort,
    ) -> ForwardBackwardStreams<'scope> {
        let scope = self.scope();
        let mut builder = OperatorBuilder::new("ForwardBackward".to_owned(), scope);
        let (ready_output, ready) = builder.new_output::<Vec<Ready>>();
        let (losses_output, losses) = builder.new_output::<Vec<LaneLoss>>();
        let (evaluated_output, evaluation_losses) = builder.new_output::<Vec<EvaluationLoss>>();
        let (counted_output, counted) = builder.new_output::<Vec<LaneTokens>>();
        let mut ready_output =
            OutputBuilder::<_, CapacityContainerBuilder<Vec<_>>>::from(ready_output);
        let mut losses_output =
            OutputBuilder::<_, CapacityContainerBuilder<Vec<_>>>::from(losses_output);
        let mut evaluated_output =
            OutputBuilder::<_, CapacityContainerBuilder<Vec<_>>>::from(evaluated_output);
        let mut counted_output =
            OutputBuilder::<_, CapacityContainerBuilder<Vec<_>>>::from(counted_output);
        let path = |outputs: &[usize]| -> Vec<_> {
            outputs.iter().map(|&output| (output, Antichain::from_elem(0))).collect()
        };
        let mut grains = builder.new_input_connection(self, Pipeline, path(&[0, 1, 3]));
        let mut reports = builder.new_input_connection(inputs.reports, Pipeline, path(&[]));
        let (evaluation, to_evaluate) = match inputs.evaluations {
            Some(EvaluationGrains { plan, grains }) => (Some(plan), grains),
            None => (None, Vec::new().to_stream(scope)),
        };
        let mut to_evaluate = builder.new_input_connection(to_evaluate, Pipeline, path(&[2]));
        let mut present = builder.new_input_connection(inputs.present, Pipeline, path(&[]));
        for input in 1..4 {
            builder.set_notify_for(input, FrontierInterest::Never);
        }
        let actor = Actor::Worker(scope.index());
        let abort = abort.clone();
        let wake = scope.worker().sync_activator_for(builder.operator_info().address.to_vec());
        let place = plan.trainers.place_in(scope, &abort);
        let started = place.among().map(|among| {
            let compute = compute.into().ok_or(GraphError::NotGiven { what: "a device" })?;
            State::start(compute, plan, evaluation, &abort, (scope.index(), among), wake)
        });
        let mut state = started.transpose().unwrap_or_else(|failure| {
            abort.fail(actor.clone(), failure);
            None
        });
        builder.build(move |capabilities| {
            drop(capabilities);
            move |frontiers| {
                let mut turn = |state: &mut State<S>| -> Result<(), Failure> {
                    let (mut result, mut counted) = (Ok(()), Vec::new());
                    reports.for_each(|_time, reports| {
                        reports.drain(..).for_each(|report| state.report(&report));
                    });
                    grains.for_each(|time, grains| {
                        if !state.schedule.is_past_last(*time.time()) {
                            state.steps.entry(*time.time()).or_insert_with(|| Held {
                                ready: time.retain(0),
                                losses: time.retain(1),
                                counted: time.retain(3),
                            });
                        }
                        for grain in grains.drain(..) {
                            let taken =
                                check_time(&grain, *time.time()).and_then(|()| state.grain(grain));
                            keep_first(&mut result, taken.map(|told| counted.extend(told)));
                        }
                    });
                    to_evaluate.for_each(|time, grains| {
                        let held = || time.retain(2);
                        state.evaluations.entry(*time.time()).or_insert_with(held);
                        for grain in grains.drain(..) {
                            let taken = check_time(&grain, *time.time())
                                .and_then(|()| state.schedule.evaluation_grain(grain));
                            keep_first(&mut result, taken);
                        }
                    });
                    present.for_each(|_time, tickets| {
                        let tickets = tickets.drain(..);
                        tickets.for_each(|ticket| {
                            keep_first(&mut result, state.schedule.present(ticket));
                        });
                    });
                    result?;
                    let mut losses_output = losses_output.activate();
                    let mut evaluated_output = evaluated_output.activate();
                    let mut ready_output = ready_output.activate();
                    let mut counted_output = counted_output.activate();
                    for told in counted {
                        if let Some(held) = state.steps.get(&told.step) {
                            counted_output.session(&held.counted).give(told);
                        }
                    }
                    while let Some(reply) = state.device.poll() {
                        let held = match state.running {
                            Some(Running::Training(step)) => state.steps.get(&step),
                            _ => None,
                        };
                        match (reply, held, &state.running) {
                            (DeviceReply::Ready(ready), Some(held), _) => {
                                ready_output.session(&held.ready).give(ready);
                            }
                            (DeviceReply::Loss(loss), Some(held), _) => {
                                losses_output.session(&held.losses).give(loss);
                            }
                            (
                                DeviceReply::Evaluated(losses),
                                _,
                                Some(Running::Evaluating(updates)),
                            ) => {
                                if let Some(held) = state.evaluations.get(updates) {
                                    let mut session = evaluated_output.session(held);
                                    session.give_iterator(losses.into_iter());
                                }
                            }
                            (DeviceReply::Finished, ..) => state.finished(),
                            _ => return Err(GraphError::Unasked { thread: "the device" }.into()),
                        }
                    }
                    state.compute();
                    let (phase, step) = state.schedule.standing();
                    progress::enter(phase, step);
                    let awaited = state.schedule.awaited_step();
                    if frontiers[0].frontier().iter().all(|time| !time.less_equal(&awaited)) {
                        state.schedule.check_ended()?;
                    }
                    Ok(())
                };
                if place.rank().is_none() {
                    // No other worker takes what came here, and those that train would wait for it.
                    grains.for_each(|_time, grains| {
                        let found = grains.drain(..).next();
                        let stray = found.map(|Grain { step, lane, grain, .. }| {
                            let trainers = place.trainers().to_vec();
                            GraphError::NoTrainer { step: step + 1, lane, grain, trainers }
                        });
                        stray.into_iter().for_each(|error| abort.fail(actor.clone(), error));
                    });
                } else if let Some(Err(failure)) = state.as_mut().map(&mut turn) {
                    abort.fail(actor.clone(), failure);
                    state = None;
                }
            }
        });
        ForwardBackwardStreams { ready, counted, losses, evaluation_losses }
    }
}

fn check_time<S>(grain: &Grain<S>, time: u64) -> Result<(), Failure> {
    if grain.step == time {
        return Ok(());
    }
    let Grain { step, lane, grain, .. } = *grain;
    let (expected, found) =
        (format!("the step of its timestamp, {}", time + 1), format!("step {}", step + 1));
    Err(GraphError::Grain { step: time + 1, lane, grain, expected, found }.into())
}

impl<S: Sample> State<S> {
    fn start<B: Backend, M: Trainable<B, Sample = S>>(
        compute: Compute<B, M>,
        plan: &Arc<TrainingPlan>,
        evaluation: Option<EvaluationPlan>,
        abort: &Abort,
        (worker, (rank, ranks)): (usize, (usize, usize)),
        wake: timely::scheduling::SyncActivator,
    ) -> Result<Self, Failure> {
        let schedule = DeviceSchedule::new(plan, evaluation, (rank, ranks))?;
        let parts = DeviceParts {
            backend: compute.backend,
            model: compute.model,
            stop: compute.stop,
            plan: Arc::clone(plan),
            lanes: schedule.lanes(),
            schedule: plan.batch.lane_schedule(ranks)?,
            first_request: evaluation
                .map_or(usize::MAX, |evaluation| evaluation.sample_grains(&plan.batch)),
        };
        let (name, borrower) = (format!("device-{worker}"), compute.borrower);
        let counting = (ranks > 1).then(|| Counting::new(&parts.model, plan));
        let device =
            JobThread::start(abort, name, Phase::ForwardBackward, wake, move |jobs, replies| {
                device::run(&parts, borrower, jobs, replies)
            })?;
        Ok(Self {
            schedule,
            device,
            counting,
            steps: BTreeMap::new(),
            evaluations: BTreeMap::new(),
            running: None,
        })
    }

    fn report(&mut self, report: &StepReport) {
        self.schedule.report(report);
        if report.last {
            self.steps.retain(|&step, _| step < report.step);
        }
    }

    /// Takes a grain of training; answers the counted tokens of its lane, once all its grains are there.
    fn grain(&mut self, grain: Grain<S>) -> Result<Option<LaneTokens>, Failure> {
        let grain = self.schedule.grain(grain)?;
        Ok(grain.and_then(|grain| self.counting.as_mut()?.grain(grain)))
    }

    fn finished(&mut self) {
        if !self.schedule.finished() {
            return;
        }
        match self.running.take() {
            Some(Running::Training(step)) => drop(self.steps.remove(&step)),
            Some(Running::Evaluating(updates)) if self.schedule.is_evaluation_over(updates) => {
                self.evaluations.remove(&updates);
            }
            _ => {}
        }
    }

    fn compute(&mut self) {
        while let Some(computation) = self.schedule.next() {
            self.running = Some(match computation {
                Computation::Train { step, .. } => Running::Training(step),
                Computation::Evaluate { updates, .. } => Running::Evaluating(updates),
            });
            self.device.send(computation);
        }
    }
}
