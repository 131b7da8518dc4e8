//! What a worker owns (masters, moments, sums of gradients), and the optimizer thread that keeps it.
//!
//! Four operators have the thread do something and tell the next one by a [`Ticket`] when it is done, or enqueued on the
//! device: [`reduce`](super::reduce), [`optimize`](super::optimize), [`gather`](super::gather) and
//! [`snapshot`](super::snapshot). The thread does what it is told in order; it may wait for other workers, which an operator
//! must not.

mod staging;
mod state;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use tidemill_collective::StatePart;
use tidemill_kernels::Backend;
use tidemill_model::Layout;
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
use super::companion::{Companion, Replies, SharedCompanion};
use super::lending::Lender;
use super::optimize::UpdateRule;
use super::plan::TrainingPlan;
use super::ticket::Ticket;
use crate::cluster::progress::Phase;
use crate::cluster::{Abort, Actor};

/// Parameters and moments after `plan.first_step` updates.
#[derive(Clone, Debug)]
pub struct InitialState {
    /// The parameter arena.
    pub parameters: Arc<Vec<f32>>,
    /// The first and the second moments, in the order of the arena; zeros where there are none.
    pub moments: Option<[Arc<Vec<f32>>; 2]>,
}

/// What an optimizer thread starts from.
pub struct Optimizer<'a, B: Backend> {
    /// The device.
    pub backend: Arc<B>,
    /// The layout of the model.
    pub layout: &'a Layout,
    /// Parameters and moments after `plan.first_step` updates.
    pub state: InitialState,
    /// Lends the parameters to the device thread.
    pub lender: Lender<B>,
    /// The optimizer and its schedule.
    pub rule: UpdateRule,
}

/// What the optimizer thread is told.
pub(super) enum StateJob {
    /// Answer sums here.
    AnswerSums(Replies<Ticket>),
    /// Answer means and updates here.
    AnswerUpdates(Replies<UpdateReply>),
    /// Answer what is gathered here.
    AnswerGathers(Replies<Ticket>),
    /// Answer snapshots here.
    AnswerSnapshots(Replies<SnapshotReply>),
    /// Sum what this worker owns of a bucket over all workers.
    Sum(Ticket),
    /// Form the mean gradient of what it owns of a bucket.
    Mean { bucket: usize, tokens: u64 },
    /// Update what it owns of a bucket.
    Update { bucket: usize, update: u64, coefficient: f32 },
    /// Bring what other workers have updated of a bucket to this worker.
    Gather(Ticket),
    /// Begin to copy all that it owns to memory of the host.
    Stage,
    /// Copy a part of a chunk's state, from there where it was copied there.
    Snapshot { chunk: usize, part: StatePart },
}

/// What is answered to `optimize`.
#[derive(Debug, PartialEq)]
pub(super) enum UpdateReply {
    /// The sums of squares of the mean gradients of some chunks.
    Squares(Vec<(usize, f64)>),
    /// What this worker owns of a bucket is updated.
    Updated { bucket: usize },
}

/// What is answered to `snapshot`.
#[derive(Debug, PartialEq)]
pub(super) enum SnapshotReply {
    /// All that this worker owns is on its way to memory of the host.
    Staged,
    /// A part of the chunk's state.
    Values { chunk: usize, part: StatePart, values: Vec<f32> },
}

/// The optimizer thread of a worker, as its operators know it.
pub struct OptimizerThread {
    /// None where it could not be started, which has ended the run.
    thread: Option<SharedCompanion<StateJob>>,
    abort: Abort,
    staging: Staging,
    /// By bucket: the chunks that this worker owns of it.
    owned: Vec<Range<usize>>,
}

impl OptimizerThread {
    /// Starts the thread of the worker of `scope`.
    pub fn start<B: Backend>(
        optimizer: Optimizer<'_, B>,
        plan: &Arc<TrainingPlan>,
        abort: &Abort,
        scope: Scope<'_, u64>,
    ) -> Self {
        let (worker, workers) = (scope.index(), scope.peers());
        let staging = Staging::of(plan);
        let owners = plan.buckets.owners(&plan.chunks, workers);
        let owned = owners.iter().map(|owners| owners.chunks(worker)).collect();
        let Optimizer { backend, layout, state, lender, rule } = optimizer;
        let (plan, layout) = (Arc::clone(plan), layout.clone());
        let name = format!("optimizer-{worker}");
        let thread = SharedCompanion::start(abort, name, Phase::Updating, move |jobs| {
            let parts = Optimizer { backend, layout: &layout, state, lender, rule };
            OwnedState::serve(parts, plan, staging, (worker, workers), jobs)
        });
        let thread = thread.map_err(|error| abort.fail(Actor::Worker(worker), error)).ok();
        Self { thread, abort: abort.clone(), staging, owned }
    }

    /// An operator's end; none where there is no thread.
    pub(super) fn end<Reply: Send + 'static>(
        &self,
        wake: SyncActivator,
        answer: impl FnOnce(Replies<Reply>) -> StateJob,
    ) -> Option<Companion<StateJob, Reply>> {
        self.thread.as_ref().map(|thread| thread.end(wake, answer))
    }

    pub(super) fn abort(&self) -> &Abort {
        &self.abort
    }

    pub(super) fn staging(&self) -> Staging {
        self.staging
    }

    /// By bucket: the chunks that this worker owns of it.
    pub(super) fn owned(&self) -> &[Range<usize>] {
        &self.owned
    }

    /// Has the thread do `job` for each of `tickets`, and passes each on when it is done.
    pub(super) fn for_each<'scope>(
        &self,
        name: &str,
        tickets: StreamVec<'scope, u64, Ticket>,
        answer: fn(Replies<Ticket>) -> StateJob,
        job: fn(Ticket) -> StateJob,
    ) -> StreamVec<'scope, u64, Ticket> {
        let scope = tickets.scope();
        let mut builder = OperatorBuilder::new(name.to_owned(), scope);
        let (output, done) = builder.new_output::<Vec<Ticket>>();
        let mut output = OutputBuilder::<_, CapacityContainerBuilder<Vec<_>>>::from(output);
        let mut tickets = builder.new_input(tickets, Pipeline);
        builder.set_notify_for(0, FrontierInterest::Never);
        let wake = scope.worker().sync_activator_for(builder.operator_info().address.to_vec());
        let mut thread = self.end(wake, answer);
        builder.build(move |capabilities| {
            drop(capabilities);
            // By step: how many of its tickets are not answered.
            let mut steps: BTreeMap<u64, (Capability<u64>, usize)> = BTreeMap::new();
            move |_frontiers| {
                tickets.for_each(|time, tickets| {
                    let Some(thread) = &mut thread else { return };
                    let held = steps.entry(*time.time()).or_insert_with(|| (time.retain(0), 0));
                    held.1 += tickets.len();
                    tickets.drain(..).for_each(|ticket| thread.send(job(ticket)));
                });
                let mut output = output.activate();
                while let Some(ticket) = thread.as_mut().and_then(Companion::poll) {
                    let Some((held, left)) = steps.get_mut(&ticket.step) else { continue };
                    output.session(&*held).give(ticket);
                    *left -= 1;
                    if *left == 0 {
                        steps.remove(&ticket.step);
                    }
                }
            }
        });
        done
    }
}
