//! A worker's own state (masters, states of the optimizer, sums of gradients), and the optimizer thread that keeps it.
//!
//! Four operators have the thread do something and tell the next one by a [`Ticket`] when it is done, or enqueued on the
//! device: [`reduce`](super::reduce), [`optimize`](super::optimize), [`gather`](super::gather) and
//! [`snapshot`](super::snapshot). The thread does its jobs in order; it may wait for other workers, which an operator
//! must not.

mod communication;
mod parts;
mod staging;
mod state;
mod states;
mod sums;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use tidemill_collective::StatePart;
use tidemill_collective::communicator::Communicator;
use tidemill_kernels::Backend;
use tidemill_model::Layout;
use tidemill_model::optimizer::MOST_STATES;
use timely::container::CapacityContainerBuilder;
use timely::dataflow::channels::pact::Pipeline;
use timely::dataflow::operators::Capability;
use timely::dataflow::operators::generic::OutputBuilder;
use timely::dataflow::operators::generic::builder_rc::OperatorBuilder;
use timely::dataflow::{Scope, StreamVec};
use timely::progress::operate::FrontierInterest;
use timely::scheduling::SyncActivator;

pub(super) use self::staging::Staging;
use self::state::OwnedState;
use super::error::GraphError;
use super::job_thread::{JobThread, Replies, SharedJobThread};
use super::lending::Lender;
use super::measure::CommunicationReport;
use super::optimize::ScheduledRule;
use super::plan::TrainingPlan;
use super::ticket::{Ready, Ticket};
use super::trainers::Place;
use crate::cluster::progress::Phase;
use crate::cluster::{Abort, Actor, Failure};
use crate::state_arenas::StateArenas;

/// Parameters and states of the optimizer after `plan.first_step` updates.
#[derive(Clone, Debug)]
pub struct InitialState {
    /// The parameter arena.
    pub parameters: Arc<Vec<f32>>,
    /// The states of the update rule, in its order, each in the order of [its arena](tidemill_model::optimizer::StateArena), which is that of the
    /// parameters where it has a number of each element; zeros where there are none.
    pub states: Option<Vec<Arc<Vec<f32>>>>,
}

/// The state that an optimizer thread starts from.
pub struct Optimizer<'a, B: Backend> {
    /// The device.
    pub backend: Arc<B>,
    /// The layout of the model.
    pub layout: &'a Layout,
    /// Parameters and states of the optimizer after `plan.first_step` updates.
    pub state: InitialState,
    /// Lends the parameters to the device thread.
    pub lender: Lender<B>,
    /// The optimizer and its schedule.
    pub rule: ScheduledRule<B>,
}

/// A job of the optimizer thread.
pub(super) enum StateJob {
    /// Answer sums here.
    AnswerSums(Replies<Ticket>),
    /// Answer means and updates here.
    AnswerUpdates(Replies<UpdateReply>),
    /// Answer gathered buckets here.
    AnswerGathers(Replies<Ticket>),
    /// Answer snapshots here.
    AnswerSnapshots(Replies<SnapshotReply>),
    /// Answer the cost of communication here.
    AnswerMeasures(Replies<CommunicationReport>),
    /// Sum this worker's part of a bucket over the lanes of a round; the last round's sum is answered.
    Sum(Ready),
    /// Form the mean gradient of this worker's part of a bucket.
    Mean { bucket: usize, tokens: u64 },
    /// Update this worker's part of a bucket.
    Update { bucket: usize, update: u64, coefficient: f32 },
    /// Bring the other workers' updated parts of a bucket to this worker.
    Gather(Ticket),
    /// Tell the cost of communication in a step that is over.
    Measure(Ticket),
    /// Begin to copy all that it owns to memory of the host.
    Stage,
    /// Copy a part of a chunk's state, from there where it was copied there.
    Snapshot { chunk: usize, part: StatePart },
}

/// An answer for a step.
pub(super) trait OfStep: Send + 'static {
    /// The step, from 0.
    fn step(&self) -> u64;
}

impl OfStep for Ticket {
    fn step(&self) -> u64 {
        self.step
    }
}

impl OfStep for CommunicationReport {
    fn step(&self) -> u64 {
        self.step - 1
    }
}

/// An answer to `optimize`.
#[derive(Debug, PartialEq)]
pub(super) enum UpdateReply {
    /// The sums of squares of the mean gradients of some chunks.
    Squares(Vec<(usize, f64)>),
    /// This worker's part of a bucket is updated.
    Updated { bucket: usize },
}

/// An answer to `snapshot`.
#[derive(Debug, PartialEq)]
pub(super) enum SnapshotReply {
    /// All that this worker owns is on its way to memory of the host.
    Staged,
    /// A part of the chunk's state.
    Values { chunk: usize, part: StatePart, values: Vec<f32> },
}

/// The optimizer thread of a worker, as its operators know it.
pub struct OptimizerThread {
    /// None where the worker does not train, or where it could not be started, which has ended the run.
    thread: Option<SharedJobThread<StateJob>>,
    abort: Abort,
    place: Place,
    staging: Staging,
    /// The places of the update rule's states.
    arenas: Arc<StateArenas>,
    /// By bucket: the chunks that this worker owns of it.
    owned: Vec<Range<usize>>,
    /// Rounds of a step's lanes.
    rounds: u32,
}

impl OptimizerThread {
    /// Starts the thread of the worker of `scope`, if it [trains](TrainingPlan::trainers). Elsewhere there is no thread, whatever
    /// `optimizer` is, and its operators do nothing.
    pub fn start<'a, B: Backend>(
        optimizer: impl Into<Option<Optimizer<'a, B>>>,
        plan: &Arc<TrainingPlan>,
        abort: &Abort,
        scope: Scope<'_, u64>,
    ) -> Self {
        let place = plan.trainers.place_in(scope, abort);
        let Some(among) = place.among() else { return Self::none(abort, place) };
        let optimizer = optimizer.into().ok_or(GraphError::NotGiven { what: "an optimizer" });
        let started = optimizer.map_err(Failure::from).and_then(|optimizer| {
            check_end(optimizer.lender.communicator.as_deref(), plan, among)?;
            Self::start_at(among, optimizer, plan, abort, (place.clone(), scope.index()))
        });
        started.unwrap_or_else(|error| {
            abort.fail(Actor::Worker(scope.index()), error);
            Self::none(abort, place)
        })
    }

    fn start_at<B: Backend>(
        (rank, ranks): (usize, usize),
        optimizer: Optimizer<'_, B>,
        plan: &Arc<TrainingPlan>,
        abort: &Abort,
        (place, worker): (Place, usize),
    ) -> Result<Self, Failure> {
        // The thread refuses states that rules may not have.
        let states = optimizer.rule.rule.states();
        let states = &states[..states.len().min(MOST_STATES)];
        let arenas = Arc::new(StateArenas::new(optimizer.layout, states));
        let staging = Staging::of(plan, arenas.elements());
        let owners = plan.buckets.owners(&plan.chunks, ranks);
        let owned = owners.iter().map(|owners| owners.chunks(rank)).collect();
        let Optimizer { backend, layout, state, lender, rule } = optimizer;
        let rounds = plan.batch.lane_schedule(ranks)?.rounds() as u32;
        let (plan, layout, of_thread) = (Arc::clone(plan), layout.clone(), Arc::clone(&arenas));
        let name = format!("optimizer-{worker}");
        let thread = SharedJobThread::start(abort, name, Phase::Updating, move |jobs| {
            let parts = Optimizer { backend, layout: &layout, state, lender, rule };
            OwnedState::serve((parts, &of_thread), plan, staging, (rank, ranks), jobs)
        })?;
        Ok(Self {
            thread: Some(thread),
            abort: abort.clone(),
            place,
            staging,
            arenas,
            owned,
            rounds,
        })
    }

    /// No thread.
    fn none(abort: &Abort, place: Place) -> Self {
        let arenas = Arc::new(StateArenas::new(&Layout::new(), &[]));
        let (staging, owned) = (Staging::InPlace, Vec::new());
        Self { thread: None, abort: abort.clone(), place, staging, arenas, owned, rounds: 1 }
    }

    /// An operator's end; none where there is no thread.
    pub(super) fn end<Reply: Send + 'static>(
        &self,
        wake: SyncActivator,
        answer: impl FnOnce(Replies<Reply>) -> StateJob,
    ) -> Option<JobThread<StateJob, Reply>> {
        self.thread.as_ref().map(|thread| thread.end(wake, answer))
    }

    pub(super) fn abort(&self) -> &Abort {
        &self.abort
    }

    /// The workers that train, and which of them this is.
    pub(super) fn place(&self) -> &Place {
        &self.place
    }

    pub(super) fn staging(&self) -> Staging {
        self.staging
    }

    /// The places of the update rule's states.
    pub(super) fn arenas(&self) -> &Arc<StateArenas> {
        &self.arenas
    }

    /// Rounds of a step's lanes.
    pub(super) fn rounds(&self) -> u32 {
        self.rounds
    }

    /// By bucket: the chunks that this worker owns of it.
    pub(super) fn owned(&self) -> &[Range<usize>] {
        &self.owned
    }

    /// Has the thread do `job` for each of `records`, and gives its answers: one reply for each for which `is_answered`.
    pub(super) fn for_each<'scope, D: 'static, R: OfStep>(
        &self,
        name: &str,
        records: StreamVec<'scope, u64, D>,
        answer: fn(Replies<R>) -> StateJob,
        (job, is_answered): (fn(D) -> StateJob, impl Fn(&D) -> bool + 'static),
    ) -> StreamVec<'scope, u64, R> {
        let scope = records.scope();
        let mut builder = OperatorBuilder::new(name.to_owned(), scope);
        let (output, done) = builder.new_output::<Vec<R>>();
        let mut output = OutputBuilder::<_, CapacityContainerBuilder<Vec<_>>>::from(output);
        let mut records = builder.new_input(records, Pipeline);
        builder.set_notify_for(0, FrontierInterest::Never);
        let wake = scope.worker().sync_activator_for(builder.operator_info().address.to_vec());
        let mut thread = self.end(wake, answer);
        builder.build(move |capabilities| {
            drop(capabilities);
            // For each step its capability, and the number of records without an answer.
            let mut steps: BTreeMap<u64, (Capability<u64>, usize)> = BTreeMap::new();
            move |_frontiers| {
                records.for_each(|time, records| {
                    let Some(thread) = &mut thread else { return };
                    let answered = records.iter().filter(|record| is_answered(record)).count();
                    if answered > 0 {
                        let held = || (time.retain(0), 0);
                        steps.entry(*time.time()).or_insert_with(held).1 += answered;
                    }
                    records.drain(..).for_each(|record| thread.send(job(record)));
                });
                let mut output = output.activate();
                while let Some(reply) = thread.as_mut().and_then(JobThread::poll) {
                    let step = reply.step();
                    let Some((held, left)) = steps.get_mut(&step) else { continue };
                    output.session(&*held).give(reply);
                    *left -= 1;
                    if *left == 0 {
                        steps.remove(&step);
                    }
                }
            }
        });
        done
    }
}

/// Checks the end of a worker with rank `rank` of `ranks`, which has none where it trains alone.
fn check_end<B: Backend>(
    communicator: Option<&dyn Communicator<B>>,
    plan: &TrainingPlan,
    (worker, workers): (usize, usize),
) -> Result<(), Failure> {
    let planned = plan.batch.lane_schedule(workers)?;
    let (rank, ranks) = communicator.map_or((0, 1), |end| (end.rank(), end.ranks()));
    if (rank, ranks) != (worker, workers) {
        return Err(GraphError::ForeignEnd { worker, workers, rank, ranks }.into());
    }
    match communicator.map(Communicator::schedule) {
        Some(found) if *found != planned => {
            let (planned, found) = (planned.rounds(), found.rounds());
            Err(GraphError::ForeignLanes { worker, planned, found }.into())
        }
        _ => Ok(()),
    }
}
