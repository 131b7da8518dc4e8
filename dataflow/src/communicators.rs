//! How workers reach each other.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use tidemill_collective::LaneSchedule;
use tidemill_collective::communicator::{
    CommunicatorError, Holders, Host, LocalRank, Nccl, Threads, Topology, check_reach,
};
use tidemill_kernels::gpu::collectives::{CollectiveLibrary, GroupId};
use tidemill_kernels::{Backend, MemoryPlace};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::InputHandle;
use timely::dataflow::operators::Operator;

use crate::batch::BatchPlan;
use crate::cluster::progress::{self, Phase};
use crate::cluster::{ClusterSettings, Failure, WorkerContext, by_host};
use crate::error::Result;
use crate::operators::addressed::Addressed;
use crate::operators::lending::{Lending, circle};
use crate::operators::{Connection, GraphError, Trainers};
use crate::parallel::Sharding;

/// The connections of a run's workers: each worker of a process takes its own end.
pub enum Communicators<B: Backend> {
    /// There is one worker.
    None,
    /// All workers are of this process, and read each other's memory: the ends that were not taken.
    Threads(Ends<Threads<B>>, Together<B>),
    /// A library connects the devices of several processes, where they all have it.
    Library {
        /// The library.
        library: CollectiveLibrary,
        /// The lanes of a step.
        schedule: Arc<LaneSchedule>,
        /// The workers of this process between themselves, and how many read each other's memory.
        local: (Ends<LocalRank<B>>, usize),
        /// The ends that are used where a worker lacks the library.
        otherwise: Ends<Host<B>>,
        /// Which workers hold the parameters.
        together: Together<B>,
    },
    /// Bytes go through the host's memory and timely's connections.
    Host(Ends<Host<B>>, Together<B>),
}

/// The ends with which the workers of a process lend each other their parts of the parameters; none where each holds all.
pub struct Together<B: Backend>(Ends<Lending<B>>);

impl<B: Backend> Together<B> {
    /// The workers of this process whose devices are `backends`, if `sharding` says that they hold the parameters together.
    ///
    /// # Errors
    /// Devices that do not read each other's memory.
    fn new(backends: &[&B], sharding: Sharding, first_rank: usize) -> Result<Self> {
        if sharding != Sharding::Parameters || backends.len() < 2 {
            return Ok(Self::none());
        }
        check_reach(backends, first_rank)?;
        Ok(Self(Ends::new(circle(backends.len()))))
    }

    fn none() -> Self {
        Self(Ends::new(Vec::new()))
    }

    fn holders(&self) -> Holders {
        let members = self.0.0.lock().unwrap_or_else(PoisonError::into_inner).len();
        NonZeroUsize::new(members).map_or(Holders::EACH, Holders::together)
    }
}

/// The ends that the workers of this process have not taken.
pub struct Ends<C>(Mutex<Vec<Option<C>>>);

impl<C> Ends<C> {
    fn new(ends: Vec<C>) -> Self {
        Self(Mutex::new(ends.into_iter().map(Some).collect()))
    }

    fn take(&self, local_worker: usize) -> Option<C> {
        let mut ends = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ends.get_mut(local_worker).and_then(Option::take)
    }
}

impl<B: Backend> Communicators<B> {
    /// Connects the workers of `schedule`, which sum over its lanes; those of this process of `cluster` compute on
    /// `backends`, and every process has as many; those of a process share out the state that `sharding` names. `library` opens the
    /// connection between devices of several processes.
    ///
    /// Where bytes go through the host's memory, the processes whose addresses name one host, and follow each other, cross the
    /// network together: their sums and updates are formed once for all of them ([`Topology`]).
    ///
    /// # Errors
    /// A schedule of other workers than the cluster's, devices of a process that are to hold the parameters together and do not read
    /// each other's memory while there are other processes, or a device that fails.
    pub fn new(
        backends: &[&B],
        cluster: &ClusterSettings,
        schedule: LaneSchedule,
        sharding: Sharding,
        library: impl FnOnce() -> tidemill_kernels::Result<CollectiveLibrary>,
    ) -> Result<Self> {
        let workers = schedule.workers();
        if workers == 1 {
            return Ok(Self::None);
        }
        let schedule = Arc::new(schedule);
        let (process, of_process) = (cluster.process, backends.len().max(1));
        let hosts = by_host(&cluster.addresses);
        if workers == of_process {
            return match Threads::group(backends, &schedule) {
                Ok(ends) => {
                    Ok(Self::Threads(Ends::new(ends), Together::new(backends, sharding, 0)?))
                }
                Err(error @ CommunicatorError::OutOfReach { .. }) => {
                    tracing::warn!("{error}: {SLOW}");
                    let ends = alone(backends, process, &schedule, (Holders::EACH, &hosts))?;
                    Ok(Self::Host(ends, Together::none()))
                }
                Err(error) => Err(error.into()),
            };
        }
        let together = Together::new(backends, sharding, process * of_process)?;
        let holders = together.holders();
        if backends.iter().all(|backend| backend.memory() == MemoryPlace::Host) {
            let groups: Vec<_> = (0..workers / of_process)
                .map(|process| process * of_process..(process + 1) * of_process)
                .collect();
            let topology = Topology::new(groups, hosts).map_err(CommunicatorError::from)?;
            let ends = Host::group(backends, &topology, process, &schedule, holders)?;
            return Ok(Self::Host(Ends::new(ends), together));
        }
        // The devices that another process reaches are not known here.
        let otherwise = alone(backends, process, &schedule, (holders, &hosts))?;
        Ok(match library() {
            Ok(library) => {
                let local = of_process_by_reach(backends, process, &schedule)?;
                Self::Library { library, schedule, local, otherwise, together }
            }
            Err(error) => {
                tracing::warn!("{error}: {SLOW}");
                Self::Host(otherwise, together)
            }
        })
    }

    /// Connects the workers of `cluster`, which train batches of `batch`, without a library; those of this process compute on
    /// `backends`.
    ///
    /// # Errors
    /// More workers than lanes, or a device that fails.
    pub fn of_cluster(
        backends: &[&B],
        cluster: &ClusterSettings,
        batch: &BatchPlan,
    ) -> Result<Self> {
        let schedule = batch.lane_schedule(cluster.workers * cluster.processes())?;
        let none = || CollectiveLibrary::open("none");
        Self::new(backends, cluster, schedule, batch.sharding(), none)
    }

    /// The connection of the worker of `context`, which computes on `backend`, among the workers of a dataflow that train: none if it trains
    /// alone, or not at all. Some of the workers are threads of one process, whose connections are those of a
    /// [cluster](Self::of_cluster) of as many threads.
    ///
    /// # Errors
    /// As [`take`](Self::take); trainers that the dataflow does not have, or some of several processes.
    pub fn take_among(
        &self,
        trainers: &Trainers,
        context: &mut WorkerContext<'_>,
        backend: &B,
    ) -> std::result::Result<Option<Connection<B>>, Failure> {
        if trainers.are_all() {
            return self.take(context, backend);
        }
        let place = trainers.place(context.index(), context.peers())?;
        let of_process = (context.peers() / context.processes().max(1)).max(1);
        let process = |worker: &usize| worker / of_process;
        let is_of_one = place.trainers().iter().map(process).is_sorted_by(|one, next| one == next);
        match (self, place.rank()) {
            (_, None) | (Self::None, _) => Ok(None),
            (Self::Threads(ends, Together(together)), Some(rank)) if is_of_one => {
                let by = |end| Connection { lending: together.take(rank), ..Connection::by(end) };
                Ok(ends.take(rank).map(by))
            }
            _ => Err(GraphError::TrainersAcrossProcesses.into()),
        }
    }

    /// The connection of the worker of `context`, which computes on `backend`; `None` if it is alone. To be called by
    /// every worker: with other processes it waits for their offers.
    ///
    /// # Errors
    /// An error of the library, or a run that was aborted.
    pub fn take(
        &self,
        context: &mut WorkerContext<'_>,
        backend: &B,
    ) -> std::result::Result<Option<Connection<B>>, Failure> {
        let (rank, ranks) = (context.index(), context.peers());
        let local = rank % (ranks / context.processes().max(1)).max(1);
        let by_host = |ends: &Ends<Host<B>>, Together(together): &Together<B>| {
            Some(Connection { lending: together.take(local), ..Connection::by(ends.take(local)?) })
        };
        match self {
            Self::None => Ok(None),
            Self::Threads(ends, Together(together)) => Ok(ends
                .take(local)
                .map(|end| Connection { lending: together.take(local), ..Connection::by(end) })),
            Self::Host(ends, together) => {
                if context.processes() > 1 && backend.memory() == MemoryPlace::Device {
                    // Others may have the library, and ask.
                    _ = group(context, backend, None, 1)?;
                }
                Ok(by_host(ends, together))
            }
            Self::Library { library, schedule, local: (ends, of_process), otherwise, together } => {
                let id = match group(context, backend, Some(library), *of_process)? {
                    Ok(id) => id,
                    Err(why) => {
                        if rank == 0 {
                            tracing::warn!("{why}: {SLOW}");
                        }
                        return Ok(by_host(otherwise, together));
                    }
                };
                let Some(own) = ends.take(local) else { return Ok(None) };
                let (of_library, holders) = ((library, id), together.holders());
                let end = Nccl::join(backend, of_library, (own, ranks), schedule, holders)?;
                Ok(Some(Connection { lending: together.0.take(local), ..Connection::by(end) }))
            }
        }
    }
}

const SLOW: &str = "gradients go through the host, which is slow";

/// The ends between the workers of a process, whose devices are `backends`: each by itself where one does not read another's memory.
fn of_process_by_reach<B: Backend>(
    backends: &[&B],
    process: usize,
    schedule: &Arc<LaneSchedule>,
) -> Result<(Ends<LocalRank<B>>, usize)> {
    let first = process * backends.len();
    match LocalRank::of_process(backends, first, schedule) {
        Err(CommunicatorError::OutOfReach { .. }) => {
            let ranks = first..first + backends.len();
            let alone = ranks.map(|rank| LocalRank::alone(rank, schedule)).collect();
            Ok((Ends::new(alone), 1))
        }
        ends => Ok((Ends::new(ends?), backends.len())),
    }
}

/// The ends of workers that do not read each other's memory; `hosts` has the range of processes of each host.
fn alone<B: Backend>(
    backends: &[&B],
    process: usize,
    schedule: &Arc<LaneSchedule>,
    (holders, hosts): (Holders, &[Range<usize>]),
) -> Result<Ends<Host<B>>> {
    let groups: Vec<_> = (0..schedule.workers()).map(|worker| worker..worker + 1).collect();
    let of_process = backends.len();
    let workers = |of: &Range<usize>| of.start * of_process..of.end * of_process;
    let hosts = hosts.iter().map(workers).collect();
    let topology = Topology::new(groups, hosts).map_err(CommunicatorError::from)?;
    let first = process * of_process;
    let ends = backends.iter().enumerate().map(|(local, &backend)| {
        Ok(Host::group(&[backend], &topology, first + local, schedule, holders)?.remove(0))
    });
    Ok(Ends::new(ends.collect::<Result<Vec<_>>>()?))
}

/// The group of all workers' devices by `library`, or why there can be none; `backend` is the device of the worker of `context`. To be
/// called by every worker: it waits for the others' offers. `reading` workers of this process read each other's memory.
///
/// # Errors
/// A run that was aborted.
pub(crate) fn group<B: Backend>(
    context: &mut WorkerContext<'_>,
    backend: &B,
    library: Option<&CollectiveLibrary>,
    reading: usize,
) -> std::result::Result<std::result::Result<GroupId, NoGroup>, Failure> {
    let is_first = context.index() == 0;
    let offer = library.and_then(|library| {
        let id = if is_first { library.group_id().map(Some) } else { Ok(None) };
        let id = id.inspect_err(|error| tracing::warn!("{error}")).ok()?;
        Some(Offer {
            id: id.map(|id| id.to_bytes().to_vec()),
            library: library.found().version,
            device: backend.identity(),
            reading,
        })
    });
    Ok(join(exchange(context, offer)?))
}

/// Why a library connects no group of all workers.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoGroup {
    #[error("worker {worker} lacks NCCL or RCCL")]
    Lacking { worker: usize },
    /// Each version of the library has a protocol of its own.
    #[error("worker {} has {} and worker {} has {}, which do not join", .0[0].0, .0[0].1, .0[1].0, .0[1].1)]
    OtherLibrary([(usize, String); 2]),
    #[error("workers {} and {} share a GPU", .0[0], .0[1])]
    SharedDevice([usize; 2]),
    #[error("worker {} is one of {} that read each other's memory and worker {} one of {}", .0[0].0, .0[0].1, .0[1].0, .0[1].1)]
    OtherReach([(usize, usize); 2]),
}

/// The offer of a worker with a library; worker 0's has the group that all join.
#[derive(Clone, Serialize, Deserialize)]
struct Offer {
    id: Option<Vec<u8>>,
    /// Its name and version.
    library: String,
    /// The identity of its device.
    device: Option<String>,
    /// How many workers of its process read each other's memory.
    reading: usize,
}

/// The offers of all workers, in their order.
fn exchange(
    context: &mut WorkerContext<'_>,
    offer: Option<Offer>,
) -> std::result::Result<Vec<Option<Offer>>, Failure> {
    /// The offer of a worker.
    type Offered = (u64, Option<Offer>);
    let (from, workers) = (context.index() as u64, context.peers());
    let offers = Rc::new(RefCell::new(BTreeMap::new()));
    let mut input = InputHandle::<u64, CapacityContainerBuilder<Vec<Addressed<Offered>>>>::new();
    context.dataflow::<u64, _, _>(|scope| {
        let offers = Rc::clone(&offers);
        input.to_stream(scope).unary::<CapacityContainerBuilder<Vec<()>>, _, _, _>(
            Addressed::by_destination(),
            "Agree",
            |_, _| {
                move |input, _output| {
                    input.for_each(|_time, told| {
                        offers.borrow_mut().extend(told.drain(..).map(Addressed::into_record));
                    });
                }
            },
        );
    });
    let _waiting = progress::during(Phase::WaitingForWorkers);
    (0..workers).for_each(|to| input.send(Addressed::new(to, (from, offer.clone()))));
    input.close();
    context.run_until_done()?;
    Ok(offers.take().into_values().collect())
}

/// The group of worker 0, where every worker has the same library, and a device of its own.
fn join(offers: Vec<Option<Offer>>) -> std::result::Result<GroupId, NoGroup> {
    let mut group = None;
    let (mut first_library, mut first_reading) = (None, None);
    let mut devices = BTreeMap::new();
    for (worker, offer) in offers.into_iter().enumerate() {
        let offer = offer.ok_or(NoGroup::Lacking { worker })?;
        let library = first_library.get_or_insert_with(|| offer.library.clone());
        if *library != offer.library {
            return Err(NoGroup::OtherLibrary([(0, library.clone()), (worker, offer.library)]));
        }
        let reading = *first_reading.get_or_insert(offer.reading);
        if reading != offer.reading {
            return Err(NoGroup::OtherReach([(0, reading), (worker, offer.reading)]));
        }
        if let Some(other) = offer.device.and_then(|device| devices.insert(device, worker)) {
            return Err(NoGroup::SharedDevice([other, worker]));
        }
        group = group.or_else(|| Some(GroupId::from_bytes(offer.id?.try_into().ok()?)));
    }
    group.ok_or(NoGroup::Lacking { worker: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(worker: usize, library: &str, device: &str) -> Option<Offer> {
        Some(Offer {
            id: (worker == 0).then(|| vec![7; GroupId::BYTES]),
            library: library.to_owned(),
            device: Some(device.to_owned()),
            reading: 1,
        })
    }

    #[test]
    fn a_group_has_one_library_and_a_device_for_each() {
        let all = || vec![offer(0, "libnccl 2.28", "a"), offer(1, "libnccl 2.28", "b")];
        assert!(join(all()).is_ok_and(|id| id.to_bytes() == [7; GroupId::BYTES]));

        let and = |third| join([all(), vec![third]].concat()).map(|_| ());
        assert_eq!(and(offer(2, "libnccl 2.28", "c")), Ok(()));
        assert_eq!(and(None), Err(NoGroup::Lacking { worker: 2 }));
        assert_eq!(and(offer(2, "libnccl 2.28", "b")), Err(NoGroup::SharedDevice([1, 2])));
        let said = and(offer(2, "libnccl 2.27", "c")).unwrap_err().to_string();
        let words = "worker 0 has libnccl 2.28 and worker 2 has libnccl 2.27, which do not join";
        assert_eq!(said, words);

        let of_two = offer(2, "libnccl 2.28", "c").map(|offer| Offer { reading: 2, ..offer });
        let said = and(of_two).unwrap_err().to_string();
        let words = "worker 0 is one of 1 that read each other's memory and worker 2 one of 2";
        assert_eq!(said, words);
    }
}
