//! `tidemill train`: run a `RUN.toml`, in this process, in several, or as one of a cluster.

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use clap::Args;

use super::metrics_endpoint::MetricsEndpoint;
use super::output::{check_replaceable, counted, note_line, result_line};
use super::processes::{
    ClusterProcess, Place, ProcessArguments, SECRET_HELP, answer, is_supervised, leave,
    quiet_worker_panics,
};
use super::progress::TrainProgress;
use super::questions::questions;
use super::signals::on_requests_to_stop;
use super::supervise;
use crate::cli::exit::ExitCode;
use crate::cluster::trace::Trace;
use crate::cluster::{ClusterError, SupervisorSettings};
use crate::device::DeviceChoice;
use crate::error::JobError;
use crate::job::{ResolvedRun, RunConfig, StopRequest, TrainEvent, TrainOptions, TrainSummary};

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
    #[command(flatten)]
    processes: ProcessArguments,
    /// Answers at http://HOST:PORT/metrics with the run's numbers, as Prometheus reads them.
    #[arg(long, value_name = "PORT")]
    metrics_port: Option<u16>,
    /// The address of this machine that `--metrics-port` listens at.
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1", requires = "metrics_port")]
    metrics_host: IpAddr,
    /// Writes down what each thread did and when, for Perfetto (ui.perfetto.dev): operators, devices, sums, checkpoints. Of several
    /// processes those but the first add their number to the name.
    #[arg(long, value_name = "FILE.json")]
    trace: Option<PathBuf>,
    /// Of these steps alone, such as 100..110: the file of a long run is large, and the first steps are none like the others.
    #[arg(long, value_name = "FIRST..LAST", requires = "trace", value_parser = parse_steps)]
    trace_steps: Option<RangeInclusive<u64>>,
    /// Print the resolved config and end.
    #[arg(long)]
    print_config: bool,
}

pub(crate) fn run(arguments: &TrainArguments) -> anyhow::Result<ExitCode> {
    let config = RunConfig::load(&arguments.config, &arguments.overrides)?;
    let stop = StopRequest::default();
    if is_supervised() {
        // Before it waits for its siblings: it is stopped together with them.
        stop_on_signals(&stop)?;
    }
    let device = DeviceChoice::new(&config.device)?;
    let place = arguments.processes.place(&device, config.batch.resolved_lanes())?;
    let mut run = ResolvedRun::for_workers(config, place.workers_here())?;
    if arguments.print_config {
        result_line!("{}", run.to_toml().trim_end())?;
        return Ok(ExitCode::SUCCESS);
    }
    run.questions = questions(&run)?;
    let process = match place {
        Place::ClusterProcess(process) => process,
        Place::Supervisor { processes, threads } => {
            return supervise(arguments, &run, processes.get(), threads);
        }
    };
    quiet_worker_panics();
    process.warn_of_open_ports();
    let ClusterProcess { cluster, lifeline } = process;
    match &lifeline {
        Some(lifeline) => {
            let stop = stop.clone();
            lifeline.on_stop(move || stop.request());
        }
        None => stop_on_signals(&stop)?,
    }
    let shows_progress = cluster.process == 0;
    if let Some(note) = device.note()
        && shows_progress
        && arguments.processes.workers.is_none()
    {
        note_line!("note: {note}");
    }
    let supervised = lifeline.is_some();
    let progress = Arc::new(TrainProgress::new(&run));
    let endpoint = match arguments.metrics_port.filter(|_| shows_progress) {
        Some(port) => Some(MetricsEndpoint::open(arguments.metrics_host, port, &run)?),
        None => None,
    };
    let shown = Arc::clone(&progress);
    let observer = Arc::new(move |event: &TrainEvent| {
        shown.show(event);
        if let Some(endpoint) = &endpoint {
            endpoint.show(event);
        }
    });
    let trace = arguments.trace.as_deref().map(|path| open_trace(path, cluster.process));
    let trace = match (trace.transpose()?, &arguments.trace_steps) {
        (Some(trace), Some(steps)) => Some(trace.of_steps(steps.clone())),
        (trace, _) => trace,
    };
    let options = TrainOptions { cluster, stop, observer, trace: trace.clone() };
    let result = crate::job::train(run, options);
    if let Some(Err(error)) = trace.map(|trace| trace.finish()) {
        note_line!("note: the trace lacks its end, as its file cannot be written: {error}");
    }
    match &result {
        // A thread that is stuck in an output has its lock: words may not get out any more.
        Err(JobError::Cluster(error @ ClusterError::LeftBehind { .. })) => {
            ExitCode::from(error.exit_class().exit_code()).leave_soon();
        }
        _ => progress.finish(),
    }
    let code = match result {
        Ok(summary) => {
            if shows_progress {
                print(&summary)?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Err(JobError::Cluster(ClusterError::StoppedEarly)) => {
            if shows_progress || !supervised {
                result_line!("{STOPPED_EARLY}")?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => Err(error.into()),
    };
    answer(lifeline, code)
}

/// Two steps, counted from 1; the second is not before the first.
fn parse_steps(text: &str) -> Result<RangeInclusive<u64>, String> {
    let parsed = text.split_once("..").and_then(|(first, last)| {
        let [first, last] = [first, last].map(|step| step.trim().parse::<u64>().ok());
        first.zip(last)
    });
    match parsed {
        Some((first, last)) if 1 <= first && first <= last => Ok(first..=last),
        _ => {
            Err("expected the first and the last step, counted from 1, such as 100..110".to_owned())
        }
    }
}

/// Begins the trace of a process.
fn open_trace(path: &Path, process: usize) -> anyhow::Result<Trace> {
    let mut path = path.to_owned();
    if process > 0 {
        let mut name = path.file_stem().unwrap_or_default().to_owned();
        name.push(format!("-{process}"));
        if let Some(ending) = path.extension() {
            name.push(".");
            name.push(ending);
        }
        path.set_file_name(name);
    }
    check_replaceable(&path, &[b"[\n"], "a trace")?;
    Trace::create(&path, process)
        .with_context(|| format!("--trace: writing {} failed", path.display()))
}

/// Starts the processes of `-n` and watches over them.
fn supervise(
    arguments: &TrainArguments,
    run: &ResolvedRun,
    processes: usize,
    threads: usize,
) -> anyhow::Result<ExitCode> {
    run.batch.worker_lanes(0, threads.saturating_mul(processes))?;
    let mut settings = SupervisorSettings::new(processes);
    // Longer than the peers wait for each other, so that they can name the failure.
    settings.silence_deadline = run.peer_deadline() + run.peer_deadline() / 2;
    settings.join_deadline = run.connect_deadline();
    let outcome = supervise::run(settings, &arguments.processes.settled(threads))?;
    if outcome.stopped_early && outcome.exit_code() == 0 {
        result_line!("{STOPPED_EARLY}")?;
    }
    Ok(ExitCode::from(outcome.exit_code()))
}

/// The first Ctrl-C (or SIGTERM) asks for a last step and a checkpoint; the second ends at once.
fn stop_on_signals(stop: &StopRequest) -> anyhow::Result<()> {
    let stop = stop.clone();
    on_requests_to_stop(move |requests| match requests {
        1 => stop.request(),
        _ => leave(),
    })
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
        let steps = counted(summary.step, "step", "steps");
        result_line!("done: {steps}, loss {loss:.4}")?;
    }
    if let Some(path) = &summary.checkpoint {
        result_line!("checkpoint: {}", path.display())?;
    }
    Ok(())
}
