//! `tidemill bench collective`: how fast sums are formed where they are owned, and what is there is brought to every worker, by
//! the size of a bucket.
//!
//! Each worker has an arena, and owns its range of every bucket. What is measured is what training does between a backward pass
//! and the next step: [`devices`] where a communicator connects the workers' devices, [`host`] elsewhere. A rate is what a
//! worker receives from the others a second. Every sum and every gathered element of the last round is compared to the bit
//! with what the host adds along the canonical tree, so that no rate is printed of something wrong.

mod devices;
mod host;
mod measure;
mod values;

use std::num::{NonZeroU64, NonZeroUsize};
use std::str::FromStr;
use std::sync::Arc;

use clap::Args;
use tidemill_collective::CHUNK_ELEMENTS;
use tidemill_kernels::gpu::collectives::{CollectiveLibrary, NCCL};
use tidemill_kernels::{Backend, MemoryPlace};

use self::measure::{Exchange, Measured, Plan, measure};
use self::values::Values;
use crate::cli::Format;
use crate::cli::device::{self, BackendArgument};
use crate::cli::exit::ExitCode;
use crate::cli::output::result_line;
use crate::cli::supervise::{self, INVITATION_VARIABLE};
use crate::cluster::{
    ClusterError, ClusterSettings, ExitClass, Failure, Invitation, SupervisorSettings,
    WorkerContext, join_supervised,
};
use crate::device::{Communicators, Devices, LocalWorkers, WithBackend};
use crate::error::{JobError, Result};
use crate::memory::available_bytes;

/// More workers than any machine has places for: beyond, threads are what is measured.
const MOST_WORKERS: usize = 256;
/// MiB of the buckets where a command does not say, as far as the arena has as much.
const BUCKETS: [usize; 5] = [1, 4, 16, 64, 256];
/// Memory of a device that other things than arenas take.
const SPARE_BYTES: usize = 64 << 20;

/// Flags of `tidemill bench collective`.
#[derive(Debug, Args)]
pub(crate) struct CollectiveBench {
    /// Workers of each process; by default one per core or GPU.
    #[arg(short = 'w', long, value_name = "WORKERS")]
    workers: Option<usize>,
    /// Processes, all started here.
    #[arg(short = 'n', long, value_name = "PROCESSES", default_value = "1")]
    processes: NonZeroUsize,
    #[command(flatten)]
    backend: BackendArgument,
    /// MiB of fp32 that every worker has, and that are summed and gathered; by default 1024 in the memory of GPUs and 256 in
    /// the host's, or what there is room for.
    #[arg(long, value_name = "MIB")]
    megabytes: Option<NonZeroUsize>,
    /// MiB of the buckets; by default 1,4,16,64,256, as far as the arena has as much.
    #[arg(long, value_name = "MIB,...", value_delimiter = ',')]
    buckets: Vec<NonZeroUsize>,
    /// Rounds that are measured, after one that is not.
    #[arg(long, value_name = "N", default_value = "16")]
    rounds: NonZeroU64,
    /// How the result is printed.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// What is exchanged.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sizes {
    arena_mebibytes: usize,
    bucket_mebibytes: Vec<usize>,
}

pub(crate) fn run(bench: &CollectiveBench) -> anyhow::Result<ExitCode> {
    let choice = bench.backend.choice()?;
    let processes = bench.processes.get();
    let of_each = || choice.default_workers(MOST_WORKERS, processes);
    let threads = bench.workers.unwrap_or_else(of_each);
    let workers = check_workers(threads, processes)?;
    let open = |cluster: ClusterSettings| {
        let local = LocalWorkers::of(&cluster);
        let measuring = Measuring { bench, cluster, workers };
        device::open(&choice, local, &["lower --megabytes"], measuring)
    };
    if processes == 1 {
        return open(ClusterSettings::threads(threads));
    }
    let Ok(invitation) = std::env::var(INVITATION_VARIABLE) else {
        let default_mebibytes = default_mebibytes(choice.memory());
        let room = Room { default_mebibytes, ..Room::of_host(workers) };
        return supervise(bench, threads, &bench.sizes(room)?);
    };
    let (cluster, lifeline) = join_supervised(&Invitation::from_str(&invitation)?, threads)?;
    let leave = || ExitCode::from(ExitClass::Restart.exit_code()).leave_unflushed();
    lifeline.on_stop(leave);
    lifeline.on_lost(leave);
    // The supervisor must see this process end by itself, not its connection close first.
    let result = open(cluster);
    drop(lifeline);
    result.or_else(|error| match error.downcast_ref::<ClusterError>() {
        // The process in which it happened has said so already.
        Some(reported @ ClusterError::Reported { .. }) => {
            Ok(ExitCode::from(reported.exit_class().exit_code()))
        }
        _ => Err(error),
    })
}

/// The workers of all processes.
fn check_workers(threads: usize, processes: usize) -> Result<usize> {
    let workers = threads.saturating_mul(processes);
    if workers < 2 || threads == 0 {
        let expected = "at least 2 workers, over all processes, to exchange anything";
        return Err(JobError::value("-w", expected, workers));
    }
    if workers > MOST_WORKERS {
        let expected = format!("at most {MOST_WORKERS} workers over all processes");
        return Err(JobError::value("-w", expected, workers));
    }
    Ok(workers)
}

fn supervise(bench: &CollectiveBench, threads: usize, sizes: &Sizes) -> anyhow::Result<ExitCode> {
    let Sizes { arena_mebibytes, bucket_mebibytes } = sizes;
    let buckets: Vec<_> = bucket_mebibytes.iter().map(usize::to_string).collect();
    let settings = SupervisorSettings::new(bench.processes.get());
    let outcome = supervise::run(settings, |command| {
        command
            .args(["bench", "collective", "--backend", &bench.backend.word()])
            .args(["--format", if bench.format == Format::Json { "json" } else { "text" }])
            .args(["-w", &threads.to_string(), "-n", &bench.processes.to_string()])
            .args(["--megabytes", &arena_mebibytes.to_string(), "--buckets", &buckets.join(",")])
            .args(["--rounds", &bench.rounds.to_string()]);
    })?;
    Ok(ExitCode::from(outcome.exit_code()))
}

/// MiB of an arena in `memory`, where a command does not say.
fn default_mebibytes(memory: MemoryPlace) -> usize {
    match memory {
        MemoryPlace::Host => 256,
        MemoryPlace::Device => 1024,
    }
}

/// Memory for arenas.
#[derive(Clone, Copy, Debug)]
struct Room {
    /// The arena where a command does not say.
    default_mebibytes: usize,
    /// What a worker's may have at most.
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

    /// On devices: of every worker an arena, and its share of the sums.
    fn of_devices<B: Backend>(devices: &Devices<B>, workers: usize) -> Result<Self> {
        let free = devices.backends().into_iter().map(|backend| backend.free_memory_bytes());
        let free = free.collect::<std::result::Result<Vec<_>, _>>();
        let free = free.map_err(|error| JobError::Communicator(error.into()))?;
        let least = free.into_iter().flatten().min().unwrap_or_default();
        let of_each = (least / devices.workers_per_device()).saturating_sub(SPARE_BYTES);
        // A share is a little more than a part of `workers`, as chunks are not cut.
        let most_mebibytes = (of_each >> 20) * workers / (workers + 2);
        let default_mebibytes = default_mebibytes(MemoryPlace::Device);
        Ok(Self { default_mebibytes, most_mebibytes, workers })
    }
}

impl CollectiveBench {
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
        let outcome = self.measure(devices, || CollectiveLibrary::open(NCCL))?;
        if process == 0 {
            outcome.print(bench, &words)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Devices read each other's memory.
    Devices,
    /// A library moves them between devices.
    Library,
    /// Through the host.
    Host,
}

/// What was measured.
#[derive(Debug)]
struct Outcome {
    workers: usize,
    way: Way,
    sizes: Sizes,
    measured: Vec<Measured>,
}

impl Measuring<'_> {
    fn measure<B: Backend>(
        self,
        devices: Devices<B>,
        library: impl FnOnce() -> tidemill_kernels::Result<CollectiveLibrary>,
    ) -> anyhow::Result<Outcome> {
        let Self { bench, cluster, workers } = self;
        let (lanes, backends) = (workers.next_power_of_two(), devices.backends());
        let communicators = Communicators::new(&backends, workers, lanes, library)?;
        let room = match &communicators {
            // Their supervisor has said how much each has.
            _ if cluster.processes() > 1 => {
                Room { most_mebibytes: usize::MAX, ..Room::of_host(workers) }
            }
            Communicators::None => Room::of_host(workers),
            _ => Room::of_devices(&devices, workers)?,
        };
        let sizes = bench.sizes(room)?;
        let elements = (sizes.arena_mebibytes << 20) / size_of::<f32>();
        let values = Arc::new(Values::new(workers, elements)?);
        let plan = |&bucket| Plan::new(bucket, elements, &values).map(Arc::new);
        let plans = sizes.bucket_mebibytes.iter().map(plan).collect::<Result<Vec<_>>>()?;
        let make = move |context: &mut WorkerContext<'_>| -> std::result::Result<_, Failure> {
            let local_index = context.index() % devices.workers().len();
            let backend = Arc::clone(&devices.workers()[local_index].backend);
            let exchange: Box<dyn Exchange> = match communicators.take(context, &backend)? {
                None => Box::new(host::Worker::new(context, elements)),
                Some(end) => {
                    let way = match communicators {
                        Communicators::Library { .. } => Way::Library,
                        _ => Way::Devices,
                    };
                    Box::new(devices::Rank::new(context, backend, end, elements, way)?)
                }
            };
            Ok(exchange)
        };
        let (way, measured) = measure(cluster, plans, bench.rounds.get(), make)?;
        Ok(Outcome { workers, way, sizes, measured })
    }
}

impl Outcome {
    fn print(&self, bench: &CollectiveBench, device: &str) -> anyhow::Result<()> {
        let Self { workers, way, sizes, measured } = self;
        let (arena, processes) = (sizes.arena_mebibytes, bench.processes);
        if bench.format == Format::Json {
            let row = |row: &Measured| {
                serde_json::json!({
                    "bucket_mebibytes": row.bucket_mebibytes,
                    "summed_gigabytes_per_second": row.summed,
                    "gathered_gigabytes_per_second": row.gathered,
                })
            };
            let result = serde_json::json!({
                "device": device,
                "through": match way {
                    Way::Devices => "devices",
                    Way::Library => "nccl",
                    Way::Host => "host",
                },
                "workers": workers,
                "processes": processes,
                "arena_mebibytes": arena,
                "rounds": bench.rounds,
                "buckets": measured.iter().map(row).collect::<Vec<_>>(),
            });
            return result_line!("{result}");
        }
        let of_processes = match processes.get() {
            1 => String::new(),
            processes => format!(" of {processes} processes"),
        };
        let way = match way {
            Way::Devices => "devices read each other's memory".to_owned(),
            Way::Library => "NCCL moves parts, and their owners add them".to_owned(),
            Way::Host => {
                let kib = (CHUNK_ELEMENTS * size_of::<f32>()) >> 10;
                format!("through the host, in chunks of {kib} KiB")
            }
        };
        result_line!("{workers} workers{of_processes} on {device}, {arena} MiB each: {way}")?;
        result_line!("what a worker receives a second, all results compared to the bit:")?;
        result_line!("bucket MiB  summed GB/s  gathered GB/s")?;
        for Measured { bucket_mebibytes, summed, gathered } in measured {
            result_line!("{bucket_mebibytes:>10}  {summed:>11.2}  {gathered:>13.2}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
