//! Sums of gradients become updated parameters, at the worker that owns them.

mod on_device;
mod rule;
mod schedule;
mod shard;
mod staging;
mod tree_sum;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tidemill_collective::{Chunk, ChunkHeader, Credit, Part, StatePart, Tree};
use tidemill_kernels::{Backend, FloatEnvironment, MemoryPlace};
use tidemill_model::Layout;
use timely::container::CapacityContainerBuilder;
use timely::dataflow::channels::pact::{Exchange, Pipeline};
use timely::dataflow::operators::generic::OutputBuilder;
use timely::dataflow::operators::generic::builder_rc::OperatorBuilder;
use timely::dataflow::operators::vec::Map;
use timely::dataflow::operators::{Capability, ConnectLoop, Feedback, InputCapability};
use timely::dataflow::{Stream, StreamVec};
use timely::progress::Antichain;
use timely::progress::operate::FrontierInterest;

pub use self::rule::{AdamW, LearningRate, UpdateRule};
pub use self::shard::InitialState;

use self::on_device::DeviceShard;
use self::schedule::{OptimizerSchedule, ShardJob, Staging};
use self::shard::{ShardParts, ShardReply};
use super::companion::Companion;
use super::error::GraphError;
use super::forward_backward::LaneLoss;
use super::keep_first;
use super::lending::Lender;
use super::plan::TrainingPlan;
use super::ticket::Ticket;
use crate::cluster::progress::Phase;
use crate::cluster::{Abort, Actor, Failure};

const NO_CUT: GraphError = GraphError::Order { what: "a snapshot", missing: "its cut" };
const NO_STEP: GraphError = GraphError::Order { what: "a report", missing: "its step" };

/// What an update did: the same on every worker.
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

/// A record on its way to one worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Addressed<D> {
    destination: u32,
    record: D,
}

impl<D: 'static> Addressed<D> {
    fn by_destination() -> Exchange<Self, impl FnMut(&Self) -> u64> {
        Exchange::new(|addressed: &Self| u64::from(addressed.destination))
    }
}

/// What updates, and from which state.
pub struct Optimizer<'a, B: Backend> {
    /// The device.
    pub backend: Arc<B>,
    /// The layout of the model.
    pub layout: &'a Layout,
    /// Parameters and moments after `plan.first_step` updates.
    pub state: InitialState,
    /// Lends the parameters to the device thread, where state stays on the device.
    pub lender: Option<Lender<B>>,
    /// The optimizer and its schedule.
    pub rule: UpdateRule,
}

/// What [`Optimize`] needs besides the sums.
pub struct OptimizeInputs<'scope> {
    /// Where state stays on the device: the buckets whose gradients this worker has summed.
    pub summed: StreamVec<'scope, u64, Ticket>,
    /// The losses of this worker's lanes.
    pub losses: StreamVec<'scope, u64, LaneLoss>,
    /// Credit for parameters, through a feedback.
    pub parameter_credits: StreamVec<'scope, u64, Credit>,
    /// Credit for state, through a feedback; empty where `plan.checkpoints` is
    /// [`Never`](super::plan::CheckpointCuts::Never).
    pub state_credits: StreamVec<'scope, u64, Credit>,
}

/// What [`Optimize`] gives.
pub struct OptimizeStreams<'scope> {
    /// The parameters of owned chunks after the update, one copy addressed to each worker: for the feedback.
    pub parameters: Stream<'scope, u64, Chunk>,
    /// Where state stays on the device: the buckets whose updated parameters are there, for the feedback.
    pub present: StreamVec<'scope, u64, Ticket>,
    /// One report a step on every worker, all the same.
    pub reports: StreamVec<'scope, u64, StepReport>,
    /// Where a checkpoint is due, the state of owned chunks, addressed to worker 0.
    pub state: Stream<'scope, u64, Chunk>,
}

/// Updates parameters.
pub trait Optimize<'scope> {
    /// Clips by the canonical norm and updates the chunks that this worker owns.
    ///
    /// # Contract
    /// - Input: the sums of each use of the owned chunks, and the losses of all lanes (exchanged here).
    /// - Output: at the timestamp of the step, one [`StepReport`] on every worker, then the updated parameters
    ///   for every worker (with a [`Lender`] a ticket for each bucket that is here), then (where `plan.is_cut`) the state of the owned chunks for worker 0.
    /// - Numbers: `g = (sum of uses) / counted tokens`; the norm is the root of a fixed tree over the chunks' sums of
    ///   squares in f64; the loss is a tree over lanes. None depends on who owns what.
    /// - Memory: an optimizer thread holds masters, moments and mean gradients of the owned chunks. With a [`Lender`] the
    ///   masters are those that the device thread computes with, sums come and updates go between devices, and tickets take
    ///   no credit. Parameters and state leave as credit allows, at most `plan.window_bytes` of each on their way to a worker;
    ///   a chunk's next update waits until its state was copied.
    /// - What a cut costs: with a [`Lender`] the state is copied to memory of the host while the next step computes, where the host
    ///   has the room, and snapshots are taken from there; so a cut delays nothing, unless it comes before the last one is
    ///   written. Elsewhere snapshots are taken while the next step computes, at the pace of whoever gives credit back, and before
    ///   that step's update, which a cut delays by about the time that writing takes longer than a step.
    /// - Failure: no counted token, a loss or a norm that is no number: the run is aborted with an
    ///   error that names the step, and nothing of it reaches a checkpoint.
    fn optimize<B: Backend>(
        self,
        inputs: OptimizeInputs<'scope>,
        optimizer: Optimizer<'_, B>,
        plan: &Arc<TrainingPlan>,
        abort: &Abort,
    ) -> OptimizeStreams<'scope>;
}

/// The capabilities of one step.
struct Held {
    parameters: Capability<u64>,
    present: Capability<u64>,
    squares: Capability<u64>,
    reports: Capability<u64>,
    state: Capability<u64>,
}

impl Held {
    fn retain(time: &InputCapability<u64>) -> Self {
        Self {
            parameters: time.retain(0),
            squares: time.retain(1),
            reports: time.retain(2),
            state: time.retain(3),
            present: time.retain(4),
        }
    }
}

struct State {
    schedule: OptimizerSchedule,
    shard: Companion<Vec<ShardJob>, Vec<ShardReply>>,
    /// Replies that were polled and not looked at.
    replies: std::vec::IntoIter<ShardReply>,
    steps: BTreeMap<u64, Held>,
    /// Chunk parts of each cut that have not left.
    cuts: BTreeMap<u64, (Capability<u64>, usize)>,
}

impl<'scope> Optimize<'scope> for Stream<'scope, u64, Chunk> {
    fn optimize<B: Backend>(
        self,
        inputs: OptimizeInputs<'scope>,
        optimizer: Optimizer<'_, B>,
        plan: &Arc<TrainingPlan>,
        abort: &Abort,
    ) -> OptimizeStreams<'scope> {
        let scope = self.scope();
        let (worker, workers) = (scope.index() as u32, scope.peers() as u32);
        let to_all = move |record: LaneLoss| {
            (0..workers).map(move |destination| Addressed { destination, record })
        };
        let losses = inputs.losses.flat_map(to_all);
        let (square_loop, all_squares) = scope.feedback::<Vec<Addressed<SquareSum>>>(1);

        let mut builder = OperatorBuilder::new("Optimize".to_owned(), scope);
        let (parameters_output, parameters) = builder.new_output::<Chunk>();
        let (squares_output, squares) = builder.new_output::<Vec<Addressed<SquareSum>>>();
        let (reports_output, reports) = builder.new_output::<Vec<StepReport>>();
        let (state_output, state_chunks) = builder.new_output::<Chunk>();
        let (present_output, present) = builder.new_output::<Vec<Ticket>>();
        let mut parameters_output =
            OutputBuilder::<_, CapacityContainerBuilder<Chunk>>::from(parameters_output);
        let mut squares_output =
            OutputBuilder::<_, CapacityContainerBuilder<Vec<_>>>::from(squares_output);
        let mut reports_output =
            OutputBuilder::<_, CapacityContainerBuilder<Vec<_>>>::from(reports_output);
        let mut state_output =
            OutputBuilder::<_, CapacityContainerBuilder<Chunk>>::from(state_output);

        let mut present_output =
            OutputBuilder::<_, CapacityContainerBuilder<Vec<_>>>::from(present_output);

        let no_path: [(usize, Antichain<u64>); 0] = [];
        let by_worker = || Exchange::new(|credit: &Credit| u64::from(credit.to));
        let mut sums = builder.new_input(self, Pipeline);
        let mut losses = builder.new_input(losses, Addressed::by_destination());
        let mut all_squares =
            builder.new_input_connection(all_squares, Addressed::by_destination(), no_path.clone());
        let mut parameter_credits =
            builder.new_input_connection(inputs.parameter_credits, by_worker(), no_path.clone());
        let mut state_credits =
            builder.new_input_connection(inputs.state_credits, by_worker(), no_path);
        let mut summed = builder.new_input(inputs.summed, Pipeline);
        for input in 0..6 {
            builder.set_notify_for(input, FrontierInterest::Never);
        }

        let who = Actor::Worker(scope.index());
        let abort = abort.clone();
        let wake = scope.worker().sync_activator_for(builder.operator_info().address.to_vec());
        let mut state =
            match State::start(optimizer, plan, &abort, scope.index(), scope.peers(), wake) {
                Ok(state) => Some(state),
                Err(failure) => {
                    abort.fail(who.clone(), failure);
                    None
                }
            };
        let root = Tree::new(plan.batch.lanes()).map(Tree::root);
        builder.build(move |capabilities| {
            drop(capabilities);
            move |_frontiers| {
                // The worker's thread may be an embedder's; the norm and the clipping are computed on it.
                let _standard = FloatEnvironment::standard();
                let mut turn = |state: &mut State| -> Result<(), Failure> {
                    let mut result = Ok(());
                    let mut keep = |taken| keep_first(&mut result, taken);
                    losses.for_each(|time, losses| {
                        state.hold(&time);
                        let records = losses.drain(..).map(|addressed| addressed.record);
                        records.for_each(|loss| keep(state.schedule.loss(loss)));
                    });
                    sums.for_each(|time, sum| {
                        state.hold(&time);
                        keep(state.schedule.sum(std::mem::take(sum)));
                    });
                    summed.for_each(|time, tickets| {
                        state.hold(&time);
                        tickets.drain(..).for_each(|ticket| keep(state.schedule.summed(ticket)));
                    });
                    all_squares.for_each(|_time, squares| {
                        let records = squares.drain(..).map(|addressed| addressed.record);
                        records.for_each(|squares| keep(state.schedule.squares(squares)));
                    });
                    parameter_credits.for_each(|_time, credits| {
                        let credits = credits.drain(..);
                        credits.for_each(|c| state.schedule.parameter_credit(c.bytes));
                    });
                    state_credits.for_each(|_time, credits| {
                        let credits = credits.drain(..);
                        credits.for_each(|c| state.schedule.state_credit(c.bytes));
                    });
                    result?;
                    let header = |part, destination, chunk: usize, step| -> Result<_, Failure> {
                        let part = Part::State(part);
                        let (chunk, node) = (chunk as u32, root.clone()?);
                        Ok(ChunkHeader { destination, source: worker, part, chunk, node, step })
                    };
                    let mut parameters_output = parameters_output.activate();
                    let mut squares_output = squares_output.activate();
                    let mut reports_output = reports_output.activate();
                    let mut state_output = state_output.activate();
                    let mut present_output = present_output.activate();
                    // One message for all of them: a session ends its message.
                    let mut squares = Vec::new();
                    while let Some(reply) = state.next_reply() {
                        let step = state.schedule.step();
                        let held = state.steps.get(&step);
                        match (reply, held) {
                            (ShardReply::SumOfSquares { chunk, sum }, Some(_)) => {
                                squares.push(SquareSum { step, chunk: chunk as u32, sum });
                            }
                            (ShardReply::Updated { unit, values: None }, Some(_)) => {
                                state.schedule.updated(unit);
                            }
                            (ShardReply::Updated { unit, values: Some(values) }, Some(held)) => {
                                let values = Arc::new(values);
                                let mut session = parameters_output.session(&held.parameters);
                                for destination in 0..workers {
                                    let part = StatePart::Parameter;
                                    let header = header(part, destination, unit, step + 1)?;
                                    session.give_container(&mut Chunk::shared(
                                        header,
                                        Arc::clone(&values),
                                    ));
                                }
                                drop(session);
                                state.schedule.updated(unit);
                                state.schedule.done();
                            }
                            (ShardReply::Staged, _) => state.schedule.staged(),
                            (ShardReply::Present { bucket }, Some(held)) => {
                                let ticket = Ticket { step, bucket: bucket as u32 };
                                present_output.session(&held.present).give(ticket);
                                state.schedule.done();
                            }
                            (ShardReply::Snapshot { chunk, part, values }, _) => {
                                let mut cut = state.cuts.first_entry().ok_or(NO_CUT)?;
                                let (held, remaining) = cut.get_mut();
                                let header = header(part, 0, chunk, *held.time() + 1)?;
                                let mut session = state_output.session(&*held);
                                session.give_container(&mut Chunk::new(header, values));
                                drop(session);
                                *remaining -= 1;
                                if *remaining == 0 {
                                    cut.remove();
                                }
                            }
                            (reply, None) => {
                                let what = format!("{reply:?} of the optimizer's thread");
                                return Err(GraphError::Unplanned { step: step + 1, what }.into());
                            }
                        }
                    }
                    if let Some(held) = state.steps.get(&state.schedule.step()) {
                        let copies = squares.into_iter().flat_map(|record| {
                            (0..workers).map(move |destination| Addressed { destination, record })
                        });
                        squares_output.session(&held.squares).give_iterator(copies);
                    }
                    loop {
                        if let Some(report) = state.schedule.report()? {
                            let step = state.schedule.step();
                            let held = state.steps.get(&step).ok_or(NO_STEP)?;
                            reports_output.session(&held.reports).give(report);
                            let remaining = 3 * state.schedule.owned().len();
                            if state.schedule.is_cut() && remaining > 0 {
                                state.cuts.insert(step, (held.state.clone(), remaining));
                            }
                        }
                        let step = state.schedule.step();
                        if !state.schedule.advance() {
                            break;
                        }
                        state.steps.remove(&step);
                    }
                    let jobs: Vec<_> = std::iter::from_fn(|| state.schedule.next()).collect();
                    if !jobs.is_empty() {
                        state.shard.send(jobs);
                    }
                    Ok(())
                };
                if let Some(Err(failure)) = state.as_mut().map(&mut turn) {
                    abort.fail(who.clone(), failure);
                    state = None;
                }
            }
        });
        squares.connect_loop(square_loop);
        OptimizeStreams { parameters, present, reports, state: state_chunks }
    }
}

impl State {
    fn start<B: Backend>(
        optimizer: Optimizer<'_, B>,
        plan: &Arc<TrainingPlan>,
        abort: &Abort,
        worker: usize,
        workers: usize,
        wake: timely::scheduling::SyncActivator,
    ) -> Result<Self, Failure> {
        let Optimizer { backend, layout, state, lender, rule } = optimizer;
        let place = match lender {
            Some(_) => MemoryPlace::Device,
            None => MemoryPlace::Host,
        };
        let who = (worker, workers);
        let staging = match lender {
            Some(_) => Staging::of(plan),
            None => Staging::InPlace,
        };
        let how = (place, staging);
        let schedule = OptimizerSchedule::new(plan, layout, rule.clone(), who, how);
        let (name, plan) = (format!("optimizer-{worker}"), Arc::clone(plan));
        let (owned, decays) = (schedule.owned(), shard::decay_runs(layout));
        let parts = ShardParts { backend, state, rule, plan, owned, decays };
        let shard = match lender {
            Some(lender) => {
                let layout = layout.clone();
                Companion::start(abort, name, Phase::Updating, wake, move |jobs, replies| {
                    DeviceShard::serve(parts, &layout, (lender, staging), who, jobs, replies)
                })?
            }
            None => Companion::start(abort, name, Phase::Updating, wake, |jobs, replies| {
                shard::run(parts, jobs, replies)
            })?,
        };
        let (replies, steps, cuts) = (Vec::new().into_iter(), BTreeMap::new(), BTreeMap::new());
        Ok(Self { schedule, shard, replies, steps, cuts })
    }

    fn next_reply(&mut self) -> Option<ShardReply> {
        loop {
            if let Some(reply) = self.replies.next() {
                return Some(reply);
            }
            self.replies = self.shard.poll()?.into_iter();
        }
    }

    fn hold(&mut self, time: &InputCapability<u64>) {
        let step = *time.time();
        self.steps.entry(step).or_insert_with(|| Held::retain(time));
    }
}
