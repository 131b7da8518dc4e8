//! `-w`, `-n`, `-p` and `--hosts`: workers of this process, of several that are started here, or of one process of a cluster.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::Args;

use super::exit::{ExitCode, cluster_error};
use super::output::note_line;
use super::supervise::{self, INVITATION_VARIABLE};
use crate::cluster::{
    Admission, ClusterError, ClusterSettings, ExitClass, Invitation, Lifeline, Secret,
    SupervisorSettings, join_supervised,
};
use crate::device::{DeviceChoice, LocalWorkers};
use crate::error::{JobError, Result};
use crate::job::config::default_step_deadline_seconds;

/// The end of the help of subcommands with [`ProcessArguments`].
pub(super) const SECRET_HELP: &str = "\
The processes of --hosts must know one secret: TIDEMILL_CLUSTER_SECRET, or the file (mode 0600) that \
TIDEMILL_CLUSTER_SECRET_FILE names. `openssl rand -hex 32` makes one. The processes of -n get one from here.";

/// The most processes that a command starts, and the most threads of `prepare` and `tokenizer`: more than any machine has cores. A larger number is a slip
/// that would take all of the machine before it fails.
const MOST_PROCESSES: usize = 1 << 10;
const MOST_THREADS: usize = 1 << 12;

/// The threads of `prepare` and `tokenizer`.
pub(crate) fn parse_threads(text: &str) -> std::result::Result<NonZeroUsize, String> {
    let threads = text.parse().ok().filter(|threads: &NonZeroUsize| threads.get() <= MOST_THREADS);
    threads.ok_or_else(|| format!("expected a number from 1 to {MOST_THREADS}"))
}

/// Flags of a subcommand whose workers may be of several processes.
#[derive(Clone, Debug, Args)]
pub(crate) struct ProcessArguments {
    /// Workers of each process; never numerics. By default as many as there are cores or GPUs for, up to the lanes.
    #[arg(short = 'w', long, value_name = "WORKERS")]
    pub workers: Option<usize>,
    #[command(flatten)]
    places: PlaceArguments,
}

/// Flags of a subcommand that may run in several processes.
#[derive(Clone, Debug, Args)]
pub(crate) struct PlaceArguments {
    /// Processes that are started here and watched over. Of a cluster on several machines, --hosts says how many there are.
    #[arg(short = 'n', long, value_name = "PROCESSES", conflicts_with_all = ["process", "hosts", "insecure"])]
    processes: Option<usize>,
    /// Be process INDEX of the cluster in --hosts.
    #[arg(short = 'p', long, value_name = "INDEX", requires = "hosts")]
    process: Option<usize>,
    /// One host:port a line, one for each process of the cluster.
    #[arg(long, value_name = "FILE", requires = "process")]
    hosts: Option<PathBuf>,
    /// Go on without a secret though processes of --hosts are on other machines: any caller that reaches their ports can
    /// join them, read what they tell each other and change it.
    #[arg(long, requires = "process")]
    insecure: bool,
}

/// The role of this process among those of its command.
pub(crate) enum Place {
    /// One of those whose workers compute.
    ClusterProcess(ClusterProcess),
    /// The one that starts the others and watches over them.
    Supervisor {
        /// Number of processes that it starts.
        processes: NonZeroUsize,
        /// Workers of each process.
        threads: usize,
    },
}

/// A process whose workers compute.
pub(crate) struct ClusterProcess {
    /// Its workers, and the other processes.
    pub cluster: ClusterSettings,
    /// The end of the connection to the process that started it, where one did. Dropped last.
    pub lifeline: Option<Lifeline>,
}

impl ProcessArguments {
    /// The role of this process; see [`PlaceArguments::place`]. If nothing says how many workers
    /// there are, they are those that `device` has something to compute on for, up to `lanes` over all processes.
    ///
    /// # Errors
    /// The errors of [`PlaceArguments::place`].
    pub(crate) fn place(&self, device: &DeviceChoice, lanes: usize) -> Result<Place> {
        self.places.place(|processes, here| {
            let lanes = (lanes / processes.max(1)).max(1);
            self.workers.unwrap_or_else(|| device.default_workers(lanes, here))
        })
    }

    /// The flag by which each process of a supervisor has `threads` workers, where the command leaves it open.
    pub(crate) fn settled(&self, threads: usize) -> Vec<String> {
        match self.workers {
            Some(_) => Vec::new(),
            None => vec!["-w".to_owned(), threads.to_string()],
        }
    }
}

impl PlaceArguments {
    /// The role of this process. A process that another one started waits here for its siblings, and ends here if all are asked to
    /// stop before they are there. Each process has as many workers as `threads` says, which is told how many processes there
    /// are, and how many of them on this machine.
    ///
    /// # Errors
    /// Flags that are wrong, a hosts file or a secret that is, or siblings that do not come.
    pub(crate) fn place(&self, threads: impl Fn(usize, usize) -> usize) -> Result<Place> {
        let processes = self.processes.unwrap_or(1);
        if processes > MOST_PROCESSES {
            let expected = format!("at most {MOST_PROCESSES} processes");
            return Err(JobError::value("-n", expected, processes));
        }
        let processes = NonZeroUsize::new(processes)
            .ok_or_else(|| JobError::value("-n", "at least 1 process", 0))?;
        let workers = |processes: usize, here: usize| match threads(processes, here) {
            0 => Err(JobError::value("-w", "at least 1 worker", 0)),
            workers => Ok(workers),
        };
        if let Ok(text) = std::env::var(INVITATION_VARIABLE) {
            let threads = workers(processes.get(), processes.get())?;
            let invitation = Invitation::from_str(&text)?;
            let (cluster, lifeline) = match join_supervised(&invitation, threads) {
                // The supervisor says so.
                Err(ClusterError::StoppedEarly) => ExitCode::SUCCESS.leave(),
                joined => joined?,
            };
            lifeline.on_lost(leave);
            return Ok(Place::ClusterProcess(ClusterProcess { cluster, lifeline: Some(lifeline) }));
        }
        if let (Some(process), Some(hosts)) = (self.process, &self.hosts) {
            let mut cluster = self.cluster(process, hosts)?;
            let here = LocalWorkers::processes_here(&cluster);
            cluster.workers = workers(cluster.processes(), here)?;
            return Ok(Place::ClusterProcess(ClusterProcess { cluster, lifeline: None }));
        }
        let threads = workers(processes.get(), processes.get())?;
        if processes.get() > 1 {
            return Ok(Place::Supervisor { processes, threads });
        }
        let cluster = ClusterSettings::workers(threads);
        Ok(Place::ClusterProcess(ClusterProcess { cluster, lifeline: None }))
    }

    /// Process `process` of those in `hosts`, if it may join them.
    fn cluster(&self, process: usize, hosts: &Path) -> Result<ClusterSettings> {
        let mut cluster = ClusterSettings::from_hosts(1, process, hosts)?;
        cluster.admission = match Secret::from_environment()? {
            Some(secret) => Admission::Secret(secret),
            None if self.insecure => Admission::Anyone,
            None => Admission::LoopbackOnly,
        };
        cluster.check_admission()?;
        Ok(cluster)
    }
}

/// Whether a supervisor has started this process.
pub(super) fn is_supervised() -> bool {
    std::env::var_os(INVITATION_VARIABLE).is_some()
}

/// Ends a process whose supervisor is gone, or wants no more of it.
pub(super) fn leave() {
    ExitCode::from(ExitClass::Restart.exit_code()).leave_unflushed()
}

/// Panics of workers and their threads are caught, and reported once as the error of the run; their
/// own messages would only repeat it, and those of timely's threads are its consequences.
pub(super) fn quiet_worker_panics() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if std::thread::current().name() == Some("main") {
            default(panic);
        } else {
            tracing::debug!("{panic}");
        }
    }));
}

impl Place {
    /// The workers of this process, or of the first process that it starts, among all workers of its machine.
    pub(crate) fn workers_here(&self) -> LocalWorkers {
        match self {
            Self::ClusterProcess(process) => LocalWorkers::of(&process.cluster),
            Self::Supervisor { processes, threads } => LocalWorkers::of_each(*threads, *processes),
        }
    }

    /// Workers of all processes.
    pub(crate) fn workers(&self) -> usize {
        match self {
            Self::ClusterProcess(process) => process.workers(),
            Self::Supervisor { processes, threads } => threads.saturating_mul(processes.get()),
        }
    }

    /// Does `work`, or starts the processes that do, with the flags `settled` that the command leaves open. It leaves nothing
    /// behind, and so ends wherever it stands when it is asked to; where it stands still, it ends as a run does.
    ///
    /// # Errors
    /// The errors of `work`, or a process that cannot be started.
    pub(crate) fn bench(
        self,
        settled: impl FnOnce(usize) -> Result<Vec<String>>,
        work: impl FnOnce(ClusterSettings) -> anyhow::Result<ExitCode>,
    ) -> anyhow::Result<ExitCode> {
        let process = match self {
            Self::ClusterProcess(process) => process,
            Self::Supervisor { processes, threads } => {
                let settings = SupervisorSettings::new(processes.get());
                let outcome = supervise::run(settings, &settled(threads)?)?;
                return Ok(ExitCode::from(outcome.exit_code()));
            }
        };
        process.warn_of_open_ports();
        let ClusterProcess { mut cluster, lifeline } = process;
        cluster.step_deadline = Some(Duration::from_secs_f64(default_step_deadline_seconds()));
        if let Some(lifeline) = &lifeline {
            lifeline.on_stop(leave);
        }
        answer(lifeline, work(cluster))
    }
}

impl ClusterProcess {
    /// Workers of all processes.
    pub(crate) fn workers(&self) -> usize {
        self.cluster.workers.saturating_mul(self.cluster.processes())
    }

    /// Says which callers could join, where that is not for those alone that know a secret.
    pub(crate) fn warn_of_open_ports(&self) {
        let open_to = match &self.cluster.admission {
            _ if self.cluster.processes() == 1 => return,
            Admission::Secret(_) => return,
            Admission::LoopbackOnly => "any user of this machine",
            Admission::Anyone => "any caller that reaches its port",
        };
        note_line!(
            "note: without TIDEMILL_CLUSTER_SECRET {open_to} can join, read what the processes tell each other and change it"
        );
    }
}

/// Tells the process at the end of `lifeline` the result; its connection closes last, so that the supervisor sees it end by
/// itself.
pub(super) fn answer(
    lifeline: Option<Lifeline>,
    result: anyhow::Result<ExitCode>,
) -> anyhow::Result<ExitCode> {
    result.or_else(|error| match cluster_error(&error) {
        // The process in which it happened has said so already.
        Some(reported @ ClusterError::Reported { .. }) if lifeline.is_some() => {
            Ok(ExitCode::from(reported.exit_class().exit_code()))
        }
        _ => Err(error),
    })
}
