//! How workers reach each other's devices.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use tidemill_collective::communicator::{Communicator, CommunicatorError, Nccl, Threads};
use tidemill_collective::{Tree, lane_cut};
use tidemill_kernels::backend::MOST_TREE_TERMS;
use tidemill_kernels::gpu::collectives::{CollectiveLibrary, GroupId};
use tidemill_kernels::{Backend, MemoryPlace};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::InputHandle;
use timely::dataflow::channels::pact::Exchange;
use timely::dataflow::operators::Operator;

use crate::cluster::progress::{self, Phase};
use crate::cluster::{Failure, WorkerContext};
use crate::error::Result;

/// What connects the devices of a run's workers: from what the workers of a process share, each takes its own end.
pub enum Communicators<B: Backend> {
    /// Nothing does: what workers have to tell each other goes through the host.
    None,
    /// All workers are of this process, and their devices read each other's memory: the ends that were not taken.
    Threads(Mutex<Vec<Option<Threads<B, f32>>>>),
    /// There are other processes, to which this library connects, where they have it too.
    Library {
        /// The library.
        library: CollectiveLibrary,
        /// The tree over the lanes of a step.
        tree: Tree,
    },
}

impl<B: Backend> Communicators<B> {
    /// What connects `workers` workers in all, which sum over `lanes` lanes; those of this process compute on `backends`. `library`
    /// opens what connects processes.
    ///
    /// # Errors
    /// A number of lanes that is no power of two, or a device that fails.
    pub fn new(
        backends: &[&B],
        workers: usize,
        lanes: usize,
        library: impl FnOnce() -> tidemill_kernels::Result<CollectiveLibrary>,
    ) -> Result<Self> {
        let has_memory = backends.iter().all(|backend| backend.memory() == MemoryPlace::Device);
        if !has_memory || workers == 1 {
            return Ok(Self::None);
        }
        let tree = Tree::new(lanes).map_err(CommunicatorError::from)?;
        let cut = lane_cut(lanes, workers).map_err(CommunicatorError::from)?;
        let nodes: usize = cut.iter().map(|lanes| tree.cover(lanes).len()).sum();
        if nodes > MOST_TREE_TERMS {
            tracing::warn!(
                "{workers} workers have {nodes} sums of {lanes} lanes, and a device adds {MOST_TREE_TERMS}: gradients go \
                 through the host, which is slow"
            );
            return Ok(Self::None);
        }
        if workers != backends.len() {
            return Ok(match library() {
                Ok(library) => Self::Library { library, tree },
                Err(error) => {
                    tracing::warn!("{error}: gradients go through the host, which is slow");
                    Self::None
                }
            });
        }
        match Threads::group(backends, tree) {
            Ok(ends) => Ok(Self::Threads(Mutex::new(ends.into_iter().map(Some).collect()))),
            Err(error @ CommunicatorError::OutOfReach { .. }) => {
                tracing::warn!("{error}: gradients go through the host, which is slow");
                Ok(Self::None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The end of the worker of `context`, which computes on `backend`; `None` where state goes through the host. To be called by
    /// every worker: with other processes it waits for what they have.
    ///
    /// # Errors
    /// What the library answers, or a run that was aborted.
    pub fn take(
        &self,
        context: &mut WorkerContext<'_>,
        backend: &B,
    ) -> std::result::Result<Option<Box<dyn Communicator<B>>>, Failure> {
        let (rank, ranks) = (context.index(), context.peers());
        match self {
            Self::Threads(ends) => {
                let mut ends = ends.lock().unwrap_or_else(PoisonError::into_inner);
                let end = ends.get_mut(rank).and_then(Option::take);
                Ok(end.map(|end| Box::new(end) as Box<dyn Communicator<B>>))
            }
            Self::None if context.processes() == 1 || backend.memory() == MemoryPlace::Host => {
                Ok(None)
            }
            Self::None => agree(context, None).map(|_| None),
            Self::Library { library, tree } => {
                let id = match rank {
                    0 => library.group_id().map(Some),
                    _ => Ok(None),
                };
                let offer = id.map(|id| Offer {
                    id: id.map(|id| id.to_bytes().to_vec()),
                    device: backend.identity(),
                });
                let offer = offer.inspect_err(|error| tracing::warn!("{error}")).ok();
                let Some(id) = agree(context, offer)? else {
                    if rank == 0 {
                        tracing::warn!(
                            "a worker shares its GPU or lacks NCCL: gradients go through the host, which is slow"
                        );
                    }
                    return Ok(None);
                };
                let end = Nccl::join(backend, library, id, (rank, ranks), *tree)?;
                Ok(Some(Box::new(end)))
            }
        }
    }
}

/// What a worker with a library tells the others: worker 0 the group that all join.
#[derive(Clone, Serialize, Deserialize)]
struct Offer {
    id: Option<Vec<u8>>,
    /// What tells its device from others.
    device: Option<String>,
}

/// The group of worker 0, where every worker has an offer, and a device of its own.
fn agree(
    context: &mut WorkerContext<'_>,
    offer: Option<Offer>,
) -> std::result::Result<Option<GroupId>, Failure> {
    let workers = context.peers() as u64;
    let offers = Rc::new(RefCell::new(Vec::new()));
    let mut input = InputHandle::<u64, CapacityContainerBuilder<Vec<(u64, Option<Offer>)>>>::new();
    context.dataflow::<u64, _, _>(|scope| {
        let offers = Rc::clone(&offers);
        let by_worker = Exchange::new(|(worker, _): &(u64, Option<Offer>)| *worker);
        input.to_stream(scope).unary::<CapacityContainerBuilder<Vec<()>>, _, _, _>(
            by_worker,
            "Agree",
            |_, _| {
                move |input, _output| {
                    input.for_each(|_time, told| {
                        offers.borrow_mut().extend(told.drain(..).map(|(_, offer)| offer));
                    });
                }
            },
        );
    });
    let _waiting = progress::during(Phase::WaitingForWorkers);
    (0..workers).for_each(|worker| input.send((worker, offer.clone())));
    input.close();
    context.run_until_done()?;
    let offers: Option<Vec<Offer>> = offers.take().into_iter().collect();
    let Some(offers) = offers else { return Ok(None) };
    let mut devices = BTreeSet::new();
    let is_shared =
        |offer: &Offer| offer.device.as_ref().is_some_and(|d| !devices.insert(d.clone()));
    if offers.iter().any(is_shared) {
        return Ok(None);
    }
    let mut ids = offers.into_iter().filter_map(|offer| offer.id);
    Ok(ids.find_map(|id| Some(GroupId::from_bytes(id.try_into().ok()?))))
}
