//! `tidemill bench collective`: how fast sums are formed at their owners, and owned values are brought to every worker, by
//! the size of a bucket.
//!
//! Each worker has an arena, and owns its range of every bucket. The measured work is the work of training between a backward pass
//! and the next step, through the same communicator. A rate is the bytes that a worker receives from the others a second. Every sum and
//! every gathered element of the last round is compared to the bit with the host's sum along the canonical tree, so that no
//! rate is printed of something wrong.
//!
//! Where workers have GPUs and NCCL is there, NCCL alone ([`library`]) is measured beside it by turns, and compared
//! within rounding: training never uses its sums.

mod arena;
mod library;
mod measure;
mod outcome;
mod rank;
mod values;

use std::num::{NonZeroU64, NonZeroUsize};
use std::sync::Arc;

use clap::Args;
use tidemill_collective::LaneSchedule;
use tidemill_kernels::gpu::collectives::CollectiveLibrary;
use tidemill_kernels::{Backend, MemoryPlace};

use self::measure::{Arm, Arms, Plan, measure};
use self::outcome::Outcome;
use self::rank::Worker;
use self::values::Values;
use crate::cli::Format;
use crate::cli::device::{self, BackendArgument};
use crate::cli::exit::ExitCode;
use crate::cli::output::note_line;
use crate::cli::processes::{ProcessArguments, SECRET_HELP};
use crate::cluster::{ClusterSettings, Failure, WorkerContext};
use crate::communicators::{Communicators, group};
use crate::device::{Devices, LocalWorkers, WithBackend, kind_in_words};
use crate::error::{JobError, Result};
use crate::memory::available_bytes;
use crate::operators::GraphError;
use crate::parallel::Sharding;

/// More workers than any machine has places for: beyond, threads would be measured.
const MOST_WORKERS: usize = 256;
/// MiB of the buckets where a command does not say, as far as the arena has as much.
const BUCKETS: [usize; 5] = [1, 4, 16, 64, 256];
/// Memory of a device that other things than arenas take.
const SPARE_BYTES: usize = 64 << 20;
/// About the part of it that a library of collectives takes for a group.
const LIBRARY_BYTES: usize = 512 << 20;

/// The consequence of a library that is missing or that workers cannot use.
const NOT_MEASURED: &str = "what NCCL does alone is not measured beside ours";

/// Flags of `tidemill bench collective`.
#[derive(Debug, Args)]
#[command(after_help = SECRET_HELP)]
pub(crate) struct CollectiveBench {
    #[command(flatten)]
    processes: ProcessArguments,
    #[command(flatten)]
    backend: BackendArgument,
    /// MiB of fp32 that every worker has, and that are summed and gathered; by default 1024 in the memory of GPUs and 256 in
    /// the host's, or as much as there is room for.
    #[arg(long, value_name = "MIB")]
    megabytes: Option<NonZeroUsize>,
    /// MiB of the buckets; by default 1,4,16,64,256, as far as the arena has as much.
    #[arg(long, value_name = "MIB,...", value_delimiter = ',')]
    buckets: Vec<NonZeroUsize>,
    /// Rounds that are measured, after one that is not; by default 64 in the memory of GPUs and 16 in the host's.
    #[arg(long, value_name = "N")]
    rounds: Option<NonZeroU64>,
    /// Leave out NCCL's own reduce_scatter and all_gather, which are measured beside ours where workers have a GPU each and NCCL
    /// is installed. Training never uses these: their sums are in an order that depends on the number of GPUs.
    #[arg(long)]
    no_peer: bool,
    /// How the result is printed.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// The buffers that workers exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sizes {
    arena_mebibytes: usize,
    bucket_mebibytes: Vec<usize>,
}

impl Sizes {
    /// The buckets, as a command says them.
    fn buckets(&self) -> String {
        self.bucket_mebibytes.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
    }
}

pub(crate) fn run(bench: &CollectiveBench) -> anyhow::Result<ExitCode> {
    let choice = bench.backend.choice()?;
    let place = bench.processes.place(&choice, MOST_WORKERS)?;
    let workers = check_workers(place.workers())?;
    let settled = |threads| {
        let default_mebibytes = default_mebibytes(choice.memory());
        let sizes = bench.sizes(Room { default_mebibytes, ..Room::of_host(workers) })?;
        Ok([bench.processes.settled(threads), bench.settled(&sizes)].concat())
    };
    place.bench(settled, |cluster| {
        let local = LocalWorkers::of(&cluster);
        let smaller = || vec!["lower --megabytes".to_owned()];
        device::open(&choice, local, smaller, Measuring { bench, cluster, workers })
    })
}

/// Checks the number of workers of all processes.
fn check_workers(workers: usize) -> Result<usize> {
    let expected = match workers {
        0..2 => "at least 2 workers, over all processes, to exchange anything".to_owned(),
        2..=MOST_WORKERS => return Ok(workers),
        _ => format!("at most {MOST_WORKERS} workers over all processes"),
    };
    Err(JobError::value("-w", expected, workers))
}

/// MiB of an arena in `memory`, where a command does not say.
fn default_mebibytes(memory: MemoryPlace) -> usize {
    match memory {
        MemoryPlace::Host => 256,
        MemoryPlace::Device => 1024,
    }
}

/// Rounds in `memory`, where a command does not say: so many that the start of threads does not count.
fn default_rounds(memory: MemoryPlace) -> NonZeroU64 {
    const HOST: NonZeroU64 = NonZeroU64::new(16).unwrap();
    const DEVICE: NonZeroU64 = NonZeroU64::new(64).unwrap();
    match memory {
        MemoryPlace::Host => HOST,
        MemoryPlace::Device => DEVICE,
    }
}

/// Memory for arenas.
#[derive(Clone, Copy, Debug)]
struct Room {
    /// The arena where a command does not say.
    default_mebibytes: usize,
    /// The most that a buffer of a worker may have.
    most_mebibytes: usize,
    workers: usize,
}

impl Room {
    /// In the host's memory: of every worker an arena and, on their way, copies of it, and of all together their sums, of
    /// two rounds.
    fn of_host(workers: usize) -> Self {
        let most_mebibytes = (available_bytes() / (2 * workers + 2)) >> 20;
        Self { default_mebibytes: default_mebibytes(MemoryPlace::Host), most_mebibytes, workers }
    }

    /// On devices: of every worker an arena for each of `ways` between them, and its share of the sums.
    fn of_devices<B: Backend>(devices: &Devices<B>, workers: usize, ways: usize) -> Result<Self> {
        let free = devices.backends().into_iter().map(|backend| backend.free_memory_bytes());
        let free = free.collect::<std::result::Result<Vec<_>, _>>();
        let free = free.map_err(|error| JobError::Communicator(error.into()))?;
        let least = free.into_iter().flatten().min().unwrap_or_default();
        let libraries = (ways - 1) * LIBRARY_BYTES;
        let of_each = least / devices.workers_per_device();
        let of_way = of_each.saturating_sub(SPARE_BYTES + libraries) / ways;
        // A share is a little more than a part of `workers`, as chunks are not cut.
        let most_mebibytes = (of_way >> 20) * workers / (workers + 2);
        let default_mebibytes = default_mebibytes(MemoryPlace::Device);
        Ok(Self { default_mebibytes, most_mebibytes, workers })
    }
}

impl CollectiveBench {
    /// The flags by which the processes of a supervisor have `sizes`, as far as the command leaves them open.
    fn settled(&self, sizes: &Sizes) -> Vec<String> {
        let Sizes { arena_mebibytes, .. } = sizes;
        let arena = self.megabytes.is_none().then(|| format!("--megabytes={arena_mebibytes}"));
        let buckets = self.buckets.is_empty().then(|| format!("--buckets={}", sizes.buckets()));
        arena.into_iter().chain(buckets).collect()
    }

    /// The sizes that were asked for, and others that fit beside them.
    fn sizes(&self, room: Room) -> Result<Sizes> {
        let Room { default_mebibytes, most_mebibytes, workers } = room;
        if most_mebibytes == 0 {
            let expected = "as many workers as have 1 MiB each in the memory that is free";
            return Err(JobError::value("-w", expected, workers));
        }
        let arena_mebibytes = match self.megabytes.map(NonZeroUsize::get) {
            None => default_mebibytes.min(most_mebibytes),
            Some(asked) if asked <= most_mebibytes => asked,
            Some(asked) => {
                let expected = format!(
                    "at most {most_mebibytes}, for which {workers} workers have memory now"
                );
                return Err(JobError::value("--megabytes", expected, asked));
            }
        };
        let bucket_mebibytes = match &self.buckets[..] {
            [] => BUCKETS.into_iter().filter(|&bucket| bucket <= arena_mebibytes).collect(),
            asked => asked.iter().map(|bucket| bucket.get()).collect::<Vec<_>>(),
        };
        if let Some(&larger) = bucket_mebibytes.iter().find(|&&bucket| bucket > arena_mebibytes) {
            let expected = format!("at most {arena_mebibytes}, the MiB of --megabytes");
            return Err(JobError::value("--buckets", expected, larger));
        }
        Ok(Sizes { arena_mebibytes, bucket_mebibytes })
    }
}

/// A measurement that waits for its devices.
struct Measuring<'a> {
    bench: &'a CollectiveBench,
    cluster: ClusterSettings,
    /// Over all processes.
    workers: usize,
}

impl WithBackend for Measuring<'_> {
    type Output = anyhow::Result<ExitCode>;

    fn run<B: Backend>(self, devices: Devices<B>) -> Self::Output {
        let (bench, process) = (self.bench, self.cluster.process);
        let words = devices.in_words();
        let backend = Arc::clone(devices.first());
        let outcome = self.measure(devices, || backend.collective_library())?;
        if process == 0 {
            outcome.print(bench.format, &words)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Devices read each other's memory.
    Devices,
    /// Threads read each other's memory.
    Memory,
    /// A library moves them between devices.
    Library,
    /// Through the host.
    Host,
}

impl Measuring<'_> {
    fn measure<B: Backend>(
        self,
        devices: Devices<B>,
        library: impl Fn() -> tidemill_kernels::Result<CollectiveLibrary>,
    ) -> anyhow::Result<Outcome> {
        let Self { bench, mut cluster, workers } = self;
        let lanes = LaneSchedule::at_once(workers.next_power_of_two(), workers);
        let lanes = lanes.map_err(|error| JobError::Communicator(error.into()))?;
        let backends = devices.backends();
        let sharding = Sharding::Optimizer;
        let communicators = Communicators::new(&backends, &cluster, lanes, sharding, &library)?;
        let asks = devices.first().memory() == MemoryPlace::Device && !bench.no_peer;
        let peer = asks.then(&library).transpose().unwrap_or_else(|error| {
            if cluster.process == 0 {
                note_line!("note: {error}: {NOT_MEASURED}");
            }
            None
        });
        let room = match devices.first().memory() {
            // Their supervisor has said how much each has.
            _ if cluster.siblings.is_some() => {
                Room { most_mebibytes: usize::MAX, ..Room::of_host(workers) }
            }
            MemoryPlace::Host => Room::of_host(LocalWorkers::of(&cluster).here),
            MemoryPlace::Device => {
                Room::of_devices(&devices, workers, 1 + usize::from(peer.is_some()))?
            }
        };
        let sizes = bench.sizes(room)?;
        let processes = cluster.processes();
        let rounds = bench.rounds.unwrap_or(default_rounds(devices.first().memory()));
        let equal = [
            ("--megabytes", sizes.arena_mebibytes.to_string()),
            ("--buckets", sizes.buckets()),
            ("--rounds", rounds.to_string()),
            ("--no-peer", bench.no_peer.to_string()),
            ("--backend (its kind)", kind_in_words(devices.kind())),
        ];
        cluster.identity.extend(equal.map(|(flag, value)| (flag.to_owned(), value)));
        let elements = (sizes.arena_mebibytes << 20) / size_of::<f32>();
        let values = Arc::new(Values::new(workers, elements)?);
        let plan = |&bucket| Plan::new(bucket, elements, &values).map(Arc::new);
        let plans = sizes.bucket_mebibytes.iter().map(plan).collect::<Result<Vec<_>>>()?;
        let make = move |context: &mut WorkerContext<'_>| -> std::result::Result<_, Failure> {
            let local_index = context.index() % devices.workers().len();
            let backend = Arc::clone(&devices.workers()[local_index].backend);
            let (worker, workers) = (context.index(), context.peers());
            let end = communicators.take(context, &backend)?;
            let end = end.ok_or(GraphError::ForeignEnd { worker, workers, rank: 0, ranks: 1 })?;
            let way = match (&communicators, backend.memory()) {
                (Communicators::Library { .. }, _) => Way::Library,
                (_, MemoryPlace::Device) => Way::Devices,
                (_, MemoryPlace::Host) => Way::Memory,
            };
            let (local_backend, end) = (Arc::clone(&backend), end.communicator);
            let worker = Worker::new(context, local_backend, end, elements, way)?;
            // Every worker says whether it has the library, though this one may not.
            let id = asks.then(|| group(context, &*backend, peer.as_ref(), 1)).transpose()?;
            let library_alone: Option<Box<dyn Arm>> = match (&peer, id) {
                (Some(library), Some(Ok(id))) => {
                    let rank = library::Rank::join(context, backend, library, id, elements)?;
                    Some(Box::new(rank))
                }
                (Some(_), Some(Err(why))) if context.index() == 0 => {
                    note_line!("note: {why}: {NOT_MEASURED}");
                    None
                }
                _ => None,
            };
            Ok(Arms { way: worker.way(), ours: Box::new(worker), library_alone })
        };
        let (way, measured) = measure(cluster, plans, rounds.get(), make)?;
        Ok(Outcome {
            workers,
            processes,
            way,
            arena_mebibytes: sizes.arena_mebibytes,
            rounds,
            measured,
        })
    }
}

#[cfg(test)]
mod tests;
