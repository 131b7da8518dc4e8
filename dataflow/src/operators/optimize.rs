//! Sums of gradients become updated parameters, at the worker that owns them.

mod rule;
mod schedule;
mod tree_sum;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tidemill_kernels::FloatEnvironment;
use timely::container::CapacityContainerBuilder;
use timely::dataflow::StreamVec;
use timely::dataflow::channels::pact::Pipeline;
use timely::dataflow::operators::generic::OutputBuilder;
use timely::dataflow::operators::generic::builder_rc::OperatorBuilder;
use timely::dataflow::operators::vec::Map;
use timely::dataflow::operators::{Capability, ConnectLoop, Feedback, InputCapability};
use timely::progress::Antichain;
use timely::progress::operate::FrontierInterest;

pub use self::rule::{LearningRate, ScheduledRule, UpdatePace};

use self::schedule::OptimizerSchedule;
use super::addressed::Addressed;
use super::error::GraphError;
use super::forward_backward::{LaneLoss, LaneTokens};
use super::job_thread::JobThread;
use super::keep_first;
use super::owned::{OptimizerThread, StateJob, UpdateReply};
use super::plan::TrainingPlan;
use super::ticket::Ticket;
use super::trainers::Place;
use crate::cluster::{Actor, Failure};

const NO_STEP: GraphError = GraphError::Order { what: "a report", missing: "its step" };

/// The figures of an update: the same on every worker that trains.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// Updates done, from 1.
    pub step: u64,
    /// The mean loss of the step's counted tokens before the update, in nats.
    pub loss: f64,
    /// The L2 norm of the mean gradient, before clipping.
    pub grad_norm: f64,
    /// The learning rate of the update.
    pub learning_rate: f64,
    /// Counted tokens of the step.
    pub tokens: u64,
    /// Counted tokens of all steps so far, those before this run included.
    pub total_tokens: u64,
    /// Whether it was the last: the run is complete, or a worker was asked to stop.
    pub last: bool,
}

/// The sum of squares of a chunk's mean gradient.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct SquareSum {
    step: u64,
    chunk: u32,
    sum: f64,
}

/// A copy of a record for each worker that trains.
fn to_trainers<D: Copy + 'static>(place: &Place) -> impl FnMut(D) -> Vec<Addressed<D>> + use<D> {
    let place = place.clone();
    move |record| place.trainers().iter().map(|&worker| Addressed::new(worker, record)).collect()
}

/// The inputs of [`Optimize`] besides the sums.
pub struct OptimizeInputs<'scope> {
    /// Tokens that this worker's lanes will count, if they are known before they are computed.
    pub counted: StreamVec<'scope, u64, LaneTokens>,
    /// The losses of this worker's lanes.
    pub losses: StreamVec<'scope, u64, LaneLoss>,
    /// The buckets whose state a cut has taken, through a feedback; empty where `plan.checkpoints` is
    /// [`Never`](super::plan::CheckpointCuts::Never).
    pub taken: StreamVec<'scope, u64, Ticket>,
}

/// The output streams of [`Optimize`].
pub struct OptimizeStreams<'scope> {
    /// The buckets whose part this worker has updated: for `gather` and `snapshot`.
    pub updated: StreamVec<'scope, u64, Ticket>,
    /// One report a step on every worker that [trains](TrainingPlan::trainers), all the same.
    pub reports: StreamVec<'scope, u64, StepReport>,
}

/// Updates parameters.
pub trait Optimize<'scope> {
    /// Clips by the canonical norm and updates this worker's part.
    ///
    /// # Contract
    /// - Input: the buckets that are summed over all lanes, the losses of all lanes, and their counted tokens where these are told before
    ///   (both exchanged here; of several workers means are formed as soon as it is known), and after a cut the buckets
    ///   whose state was taken.
    /// - Output: at the timestamp of the step, one [`StepReport`] on every worker that trains, then a ticket for each bucket, in one order that
    ///   all workers have, the last that became final first.
    /// - Numbers: `g = (sum of uses) / counted tokens`; the norm is the root of a fixed tree over the chunks' sums of
    ///   squares in f64; the loss is a tree over lanes. None depends on the owners.
    /// - Memory: the optimizer thread holds masters, states and mean gradients of this worker's part.
    /// - After a cut a bucket is updated again only once its state was taken.
    /// - Failure: no counted token, a loss or a norm that is no number: the run is aborted with an
    ///   error that names the step, and nothing of it reaches a checkpoint.
    ///
    /// # Example
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/chain.rs"));
    /// # fn main() -> Result<(), Failure> {
    /// # static LOSSES: Mutex<Vec<f64>> = Mutex::new(Vec::new());
    /// # run(|scope, parts| {
    /// # let (computed, rest) = computed(scope, parts);
    /// # let ForwardBackwardStreams { ready, counted, losses, evaluation_losses } = computed;
    /// # let mut rest = rest;
    /// # let taken = rest.taken.take().expect("once");
    /// # let (thread, plan, pace) = (&rest.thread, &rest.plan, &rest.pace);
    /// let inputs = OptimizeInputs { counted, losses, taken };
    /// let OptimizeStreams { updated, reports } =
    ///     ready.reduce(thread).optimize(inputs, pace, thread, plan);
    /// let is_first = reports.scope().index() == 0;
    /// let reports = reports.inspect(move |report| {
    ///     if is_first {
    ///         LOSSES.lock().expect("no panic").push(report.loss);
    ///     }
    /// });
    /// # rest.close(OptimizeStreams { updated, reports }, evaluation_losses);
    /// # })?;
    /// let losses = LOSSES.lock().expect("no panic");
    /// assert!(losses.len() == 4 && losses[3] < losses[0]);
    /// # Ok(())
    /// # }
    /// ```
    fn optimize(
        self,
        inputs: OptimizeInputs<'scope>,
        pace: &UpdatePace,
        thread: &OptimizerThread,
        plan: &Arc<TrainingPlan>,
    ) -> OptimizeStreams<'scope>;
}

/// The capabilities of one step.
struct Held {
    updated: Capability<u64>,
    squares: Capability<u64>,
    reports: Capability<u64>,
}

impl Held {
    fn retain(time: &InputCapability<u64>) -> Self {
        Self { updated: time.retain(0), squares: time.retain(1), reports: time.retain(2) }
    }
}

struct State {
    schedule: OptimizerSchedule,
    thread: JobThread<StateJob, UpdateReply>,
    steps: BTreeMap<u64, Held>,
}

impl State {
    fn hold(&mut self, time: &InputCapability<u64>) {
        let step = *time.time();
        self.steps.entry(step).or_insert_with(|| Held::retain(time));
    }
}

impl<'scope> Optimize<'scope> for StreamVec<'scope, u64, Ticket> {
    fn optimize(
        self,
        inputs: OptimizeInputs<'scope>,
        pace: &UpdatePace,
        thread: &OptimizerThread,
        plan: &Arc<TrainingPlan>,
    ) -> OptimizeStreams<'scope> {
        let scope = self.scope();
        let place = thread.place().clone();
        let losses = inputs.losses.flat_map(to_trainers(&place));
        let counted = inputs.counted.flat_map(to_trainers(&place));
        let (square_loop, all_squares) = scope.feedback::<Vec<Addressed<SquareSum>>>(1);

        let mut builder = OperatorBuilder::new("Optimize".to_owned(), scope);
        let (updated_output, updated) = builder.new_output::<Vec<Ticket>>();
        let (squares_output, squares) = builder.new_output::<Vec<Addressed<SquareSum>>>();
        let (reports_output, reports) = builder.new_output::<Vec<StepReport>>();
        let mut updated_output =
            OutputBuilder::<_, CapacityContainerBuilder<Vec<_>>>::from(updated_output);
        let mut squares_output =
            OutputBuilder::<_, CapacityContainerBuilder<Vec<_>>>::from(squares_output);
        let mut reports_output =
            OutputBuilder::<_, CapacityContainerBuilder<Vec<_>>>::from(reports_output);

        let no_path: [(usize, Antichain<u64>); 0] = [];
        let mut summed = builder.new_input(self, Pipeline);
        let mut losses = builder.new_input(losses, Addressed::by_destination());
        let mut all_squares =
            builder.new_input_connection(all_squares, Addressed::by_destination(), no_path.clone());
        let mut taken = builder.new_input_connection(inputs.taken, Pipeline, no_path.clone());
        let mut counted =
            builder.new_input_connection(counted, Addressed::by_destination(), no_path);
        for input in 0..5 {
            builder.set_notify_for(input, FrontierInterest::Never);
        }

        let actor = Actor::Worker(scope.index());
        let abort = thread.abort().clone();
        let wake = scope.worker().sync_activator_for(builder.operator_info().address.to_vec());
        let mut state = thread.end(wake, StateJob::AnswerUpdates).map(|thread| State {
            schedule: OptimizerSchedule::new(plan, pace.clone(), place.ranks()),
            thread,
            steps: BTreeMap::new(),
        });
        builder.build(move |capabilities| {
            drop(capabilities);
            move |_frontiers| {
                // The worker's thread may be an embedder's; the norm and the clipping are computed on it.
                let _standard = FloatEnvironment::standard();
                let mut turn = |state: &mut State| -> Result<(), Failure> {
                    let mut result = Ok(());
                    let mut keep = |taken| keep_first(&mut result, taken);
                    counted.for_each(|_time, counted| {
                        let records = counted.drain(..).map(Addressed::into_record);
                        records.for_each(|tokens| keep(state.schedule.counted(tokens)));
                    });
                    losses.for_each(|time, losses| {
                        state.hold(&time);
                        let records = losses.drain(..).map(Addressed::into_record);
                        records.for_each(|loss| keep(state.schedule.loss(loss)));
                    });
                    summed.for_each(|time, tickets| {
                        state.hold(&time);
                        tickets.drain(..).for_each(|ticket| keep(state.schedule.summed(ticket)));
                    });
                    all_squares.for_each(|_time, squares| {
                        let records = squares.drain(..).map(Addressed::into_record);
                        records.for_each(|squares| keep(state.schedule.squares(squares)));
                    });
                    taken.for_each(|_time, tickets| {
                        tickets.drain(..).for_each(|ticket| keep(state.schedule.taken(ticket)));
                    });
                    result?;
                    let mut updated_output = updated_output.activate();
                    let mut squares_output = squares_output.activate();
                    let mut reports_output = reports_output.activate();
                    // One message for all of them: a session ends its message.
                    let mut squares = Vec::new();
                    while let Some(reply) = state.thread.poll() {
                        let step = state.schedule.step();
                        match (reply, state.steps.get(&step)) {
                            (UpdateReply::Squares(sums), Some(_)) => {
                                let of_step = |(chunk, sum): (usize, f64)| SquareSum {
                                    step,
                                    chunk: chunk as u32,
                                    sum,
                                };
                                squares.extend(sums.into_iter().map(of_step));
                            }
                            (UpdateReply::Updated { bucket }, Some(held)) => {
                                let ticket = Ticket { step, bucket: bucket as u32 };
                                updated_output.session(&held.updated).give(ticket);
                                state.schedule.updated();
                            }
                            _ => {
                                return Err(GraphError::Unasked { thread: "the optimizer" }.into());
                            }
                        }
                    }
                    if let (Some(held), false) =
                        (state.steps.get(&state.schedule.step()), squares.is_empty())
                    {
                        let copies = squares.into_iter().flat_map(to_trainers(&place));
                        squares_output.session(&held.squares).give_iterator(copies);
                    }
                    loop {
                        if let Some(report) = state.schedule.report()? {
                            let step = state.schedule.step();
                            let held = state.steps.get(&step).ok_or(NO_STEP)?;
                            reports_output.session(&held.reports).give(report);
                        }
                        let step = state.schedule.step();
                        if !state.schedule.advance() {
                            break;
                        }
                        state.steps.remove(&step);
                    }
                    while let Some(job) = state.schedule.next() {
                        state.thread.send(job);
                    }
                    Ok(())
                };
                if let Some(Err(failure)) = state.as_mut().map(&mut turn) {
                    abort.fail(actor.clone(), failure);
                    state = None;
                }
            }
        });
        squares.connect_loop(square_loop);
        OptimizeStreams { updated, reports }
    }
}
