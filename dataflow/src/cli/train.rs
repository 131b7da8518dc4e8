//! `tidemill train`: run a `RUN.toml`, in this process, in several, or as one of a cluster.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use clap::Args;

use super::output::{note_line, result_line};
use super::progress::TrainProgress;
use super::signals::on_requests_to_stop;
use super::supervise::{self, INVITATION_VARIABLE};
use crate::cli::exit::ExitCode;
use crate::cluster::{
    Admission, ClusterError, ClusterSettings, ExitClass, Invitation, Lifeline, Secret,
    SupervisorSettings, join_supervised,
};
use crate::device::{DeviceChoice, LocalWorkers};
use crate::error::JobError;
use crate::job::{ResolvedRun, RunConfig, StopRequest, TrainOptions, TrainSummary};

/// What the help ends with.
const SECRET_HELP: &str = "\
The processes of --hosts must know one secret: TIDEMILL_CLUSTER_SECRET, or the file (mode 0600) that \
TIDEMILL_CLUSTER_SECRET_FILE names. `openssl rand -hex 32` makes one. The processes of -n get one from here.";

/// The last line of a run that ended before it began.
const STOPPED_EARLY: &str = "stopped before the first step; the same command goes on";

/// Flags of `tidemill train`.
#[derive(Debug, Args)]
#[command(after_help = SECRET_HELP)]
pub(crate) struct TrainArguments {
    /// The run's config.
    #[arg(value_name = "RUN.toml")]
    config: PathBuf,
    /// Overrides a key, such as `--set run.steps=100`; may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Workers of each process; never numerics. By default as many as there are cores or GPUs for, up to the lanes.
    #[arg(short = 'w', long, value_name = "WORKERS")]
    workers: Option<usize>,
    /// Processes: alone, that many are started here and watched over; with -p, the hosts file says how many.
    #[arg(short = 'n', long, value_name = "PROCESSES", conflicts_with = "process")]
    processes: Option<usize>,
    /// Be process INDEX of the cluster in --hosts.
    #[arg(short = 'p', long, value_name = "INDEX", requires = "hosts")]
    process: Option<usize>,
    /// One host:port a line, one for each process of the cluster.
    #[arg(long, value_name = "FILE", requires = "process")]
    hosts: Option<PathBuf>,
    /// Go on without a secret though processes of --hosts are on other machines: any caller that reaches their ports can
    /// join the run, read the model and change it.
    #[arg(long, requires = "process")]
    insecure: bool,
    /// Print the resolved config and end.
    #[arg(long)]
    print_config: bool,
}

pub(crate) fn run(arguments: &TrainArguments) -> anyhow::Result<ExitCode> {
    let config = RunConfig::load(&arguments.config, &arguments.overrides)?;
    let invitation = std::env::var(INVITATION_VARIABLE).ok();
    let stop = StopRequest::default();
    if invitation.is_some() {
        // Before it waits for its siblings: it is stopped together with them.
        heed_signals(&stop)?;
    }
    let device = DeviceChoice::new(&config.device)?;
    let workers = |others: Others| workers(arguments, &config, &device, others);
    let (cluster, lifeline, here) = match (&invitation, arguments.process, &arguments.hosts) {
        (Some(text), ..) => {
            let threads = workers(Others { processes: 1, here: 1 })?;
            let invitation = Invitation::from_str(text)?;
            let (cluster, lifeline) = match join_supervised(&invitation, threads) {
                Ok(joined) => joined,
                // The supervisor says so.
                Err(ClusterError::StoppedEarly) => return Ok(ExitCode::SUCCESS),
                Err(error) => return Err(error.into()),
            };
            let here = LocalWorkers::of(&cluster);
            (cluster, Some(lifeline), here)
        }
        (None, Some(process), Some(hosts)) => {
            let mut cluster = ClusterSettings::from_hosts(1, process, hosts)?;
            cluster.admission = admission(arguments)?;
            cluster.check_admission()?;
            let here = LocalWorkers::processes_here(&cluster);
            cluster.threads = workers(Others { processes: cluster.processes(), here })?;
            let here = LocalWorkers::of(&cluster);
            (cluster, None, here)
        }
        _ => {
            let processes = processes(arguments)?;
            let others = Others { processes: processes.get(), here: processes.get() };
            let threads = workers(others)?;
            let here = LocalWorkers::of_each(threads, processes);
            (ClusterSettings::threads(threads), None, here)
        }
    };
    let run = ResolvedRun::for_workers(config, here)?;
    if arguments.print_config {
        result_line!("{}", run.to_toml().trim_end())?;
        return Ok(ExitCode::SUCCESS);
    }
    if invitation.is_none() && processes(arguments)?.get() > 1 {
        return supervise(arguments, &run, cluster.threads);
    }
    quiet_worker_panics();
    match &lifeline {
        Some(lifeline) => heed_supervisor(lifeline, &stop),
        None => heed_signals(&stop)?,
    }
    warn_of_open_ports(&cluster);
    let shows_progress = cluster.process == 0;
    if let Some(note) = device.note()
        && shows_progress
        && arguments.workers.is_none()
    {
        note_line!("note: {note}");
    }
    let supervised = lifeline.is_some();
    let progress = Arc::new(TrainProgress::new(&run));
    let observer = Arc::clone(&progress);
    let options =
        TrainOptions { cluster, stop, observer: Arc::new(move |event| observer.show(event)) };
    let result = crate::job::train(run, options);
    match &result {
        // A thread that is stuck in an output has its lock: words may not get out any more.
        Err(JobError::Cluster(error @ ClusterError::LeftBehind { .. })) => {
            ExitCode::from(error.exit_class().exit_code()).leave_soon();
        }
        _ => progress.finish(),
    }
    // The supervisor must see this process end by itself, not its connection close first.
    let code = match result {
        Ok(summary) => {
            if shows_progress {
                print(&summary)?;
            }
            ExitCode::SUCCESS
        }
        Err(JobError::Cluster(ClusterError::StoppedEarly)) => {
            if shows_progress || !supervised {
                result_line!("{STOPPED_EARLY}")?;
            }
            ExitCode::SUCCESS
        }
        // The process in which it happened has said so already.
        Err(JobError::Cluster(error @ ClusterError::Reported { .. })) if supervised => {
            ExitCode::from(error.exit_class().exit_code())
        }
        Err(error) => return Err(error.into()),
    };
    drop(lifeline);
    Ok(code)
}

/// Which processes may join those of the hosts file.
fn admission(arguments: &TrainArguments) -> Result<Admission, ClusterError> {
    Ok(match Secret::from_environment()? {
        Some(secret) => Admission::Secret(secret),
        None if arguments.insecure => Admission::Anyone,
        None => Admission::LoopbackOnly,
    })
}

fn warn_of_open_ports(cluster: &ClusterSettings) {
    let open_to = match &cluster.admission {
        _ if cluster.processes() == 1 => return,
        Admission::Secret(_) => return,
        Admission::LoopbackOnly => "any user of this machine",
        Admission::Anyone => "any caller that reaches its port",
    };
    note_line!(
        "note: without TIDEMILL_CLUSTER_SECRET {open_to} can join this run, read the model and change it"
    );
}

fn processes(arguments: &TrainArguments) -> Result<NonZeroUsize, JobError> {
    NonZeroUsize::new(arguments.processes.unwrap_or(1))
        .ok_or_else(|| JobError::value("-n", "at least 1 process", 0))
}

/// Processes of a run, and those of them on this machine.
#[derive(Clone, Copy)]
struct Others {
    processes: usize,
    here: usize,
}

/// Workers of each process: those asked for, or the default of the device.
fn workers(
    arguments: &TrainArguments,
    config: &RunConfig,
    device: &DeviceChoice,
    others: Others,
) -> anyhow::Result<usize> {
    let lanes = (config.batch.resolved_lanes() / others.processes.max(1)).max(1);
    let default = || device.default_workers(lanes, others.here);
    match arguments.workers.unwrap_or_else(default) {
        0 => Err(JobError::value("-w", "at least 1 worker", 0).into()),
        workers => Ok(workers),
    }
}

/// Starts the processes of `-n` and watches over them.
fn supervise(
    arguments: &TrainArguments,
    run: &ResolvedRun,
    threads: usize,
) -> anyhow::Result<ExitCode> {
    let processes = processes(arguments)?.get();
    run.batch.worker_lanes(0, threads * processes)?;
    let mut settings = SupervisorSettings::new(processes);
    // Longer than the peers wait for each other, so that they can say what happened.
    settings.silence_deadline = run.peer_deadline() + run.peer_deadline() / 2;
    settings.join_deadline = run.connect_deadline();
    let outcome = supervise::run(settings, |command| {
        command.arg("train").arg(&arguments.config);
        for assignment in &arguments.overrides {
            command.arg("--set").arg(assignment);
        }
        command.arg("-w").arg(threads.to_string());
    })?;
    if outcome.stopped_early && outcome.exit_code() == 0 {
        result_line!("{STOPPED_EARLY}")?;
    }
    Ok(ExitCode::from(outcome.exit_code()))
}

/// The first Ctrl-C (or SIGTERM) asks for a last step and a checkpoint; the second ends at once.
fn heed_signals(stop: &StopRequest) -> anyhow::Result<()> {
    let stop = stop.clone();
    on_requests_to_stop(move |requests| match requests {
        1 => stop.request(),
        _ => ExitCode::from(ExitClass::Restart.exit_code()).leave_unflushed(),
    })
}

fn heed_supervisor(lifeline: &Lifeline, stop: &StopRequest) {
    let stop = stop.clone();
    lifeline.on_stop(move || stop.request());
    lifeline.on_lost(|| ExitCode::from(ExitClass::Restart.exit_code()).leave_unflushed());
}

/// Panics of workers and their threads are caught, and reported once as the error of the run; their
/// own messages would only repeat it, and those of timely's threads are its consequences.
fn quiet_worker_panics() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if std::thread::current().name() == Some("main") {
            default(panic);
        } else {
            tracing::debug!("{panic}");
        }
    }));
}

fn print(summary: &TrainSummary) -> anyhow::Result<()> {
    let loss = summary.last.as_ref().map_or(f64::NAN, |last| last.loss);
    if summary.stopped {
        result_line!(
            "stopped after step {} of {}; the same command goes on",
            summary.step,
            summary.steps
        )?;
    } else {
        result_line!("done: {} steps, loss {loss:.4}", summary.step)?;
    }
    if let Some(path) = &summary.checkpoint {
        result_line!("checkpoint: {}", path.display())?;
    }
    Ok(())
}
