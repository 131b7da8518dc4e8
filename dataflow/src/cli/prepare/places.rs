//! Where `prepare` runs: in this process, in several that it starts, or as one of a cluster.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::available_parallelism;

use tidemill_streaming_data::hash::ContentHash;
use tidemill_streaming_data::prepare::{
    Peers, PrepareError, PrepareReport, PrepareSettings, Progress, Tokenize, UpdateReport,
    UpdateSettings, prepare, prepare_together, update, update_together,
};

use super::PrepareArguments;
use super::phases::Phases;
use crate::cli::exit::ExitCode;
use crate::cli::processes::{
    ClusterProcess, Place, answer, is_supervised, leave, quiet_worker_panics,
};
use crate::cli::signals::on_requests_to_stop;
use crate::cli::supervise;
use crate::cluster::{ClusterError, ClusterSettings, Lifeline, SupervisorSettings};
use crate::job::StopRequest;
use crate::prepare::together;

/// A preparation to be done.
pub(super) struct Task {
    pub what: What,
    pub tokenizer: Box<dyn Tokenize>,
}

/// A data set that is to be made, or to be brought up to date.
#[derive(Debug)]
pub(super) enum What {
    Prepare(Box<PrepareSettings>),
    Update(UpdateSettings),
}

/// A preparation that was done.
pub(super) enum Done {
    Prepared(PrepareReport),
    Updated(UpdateReport),
}

/// How this process ended.
pub(super) enum Ended {
    /// It has done it, alone or together with others. The connection to the process that started it is dropped last.
    Done(Box<Done>, Option<Lifeline>),
    /// Another process prints the report.
    Elsewhere(ExitCode),
}

type Show<'a> = dyn FnMut(Progress) -> ControlFlow<()> + 'a;

impl Task {
    fn alone(&self, show: &mut Show<'_>) -> Result<Done, PrepareError> {
        let tokenizer = &*self.tokenizer;
        match &self.what {
            What::Prepare(settings) => prepare(settings, tokenizer, show).map(Done::Prepared),
            What::Update(settings) => update(settings, tokenizer, show).map(Done::Updated),
        }
    }

    /// The result on process 0; `None` on other processes.
    fn together(
        &self,
        peers: &dyn Peers,
        show: &mut Show<'_>,
    ) -> Result<Option<Done>, PrepareError> {
        let tokenizer = &*self.tokenizer;
        Ok(match &self.what {
            What::Prepare(settings) => {
                prepare_together(peers, settings, tokenizer, show)?.map(Done::Prepared)
            }
            What::Update(settings) => {
                update_together(peers, settings, tokenizer, show)?.map(Done::Updated)
            }
        })
    }

    /// Settings that must be the same in all processes.
    fn identity(&self) -> Vec<(&'static str, String)> {
        let json = self.tokenizer.tokenizer_json().unwrap_or_default();
        let (eos, size) = (self.tokenizer.eos_token_id(), self.tokenizer.vocab_size());
        let hash = ContentHash::of(json.as_bytes());
        let mut identity = vec![
            ("program", env!("CARGO_PKG_VERSION").to_owned()),
            ("tokenizer", format!("{hash} with {size} tokens, of which {eos} ends documents")),
        ];
        match &self.what {
            What::Prepare(settings) => identity.extend([
                ("--input", format!("{:?}", settings.inputs)),
                ("--glob", settings.glob.clone()),
                ("--text-key", format!("{:?}", settings.text_key)),
                ("--seq-len", format!("{:?}", settings.seq_len)),
                ("--vocab-size", format!("{:?}", settings.vocab_size)),
                ("--filter", format!("{:?}", settings.filters)),
                ("--dedup", format!("{:?}", settings.dedup)),
                ("--exclude", format!("{:?}", settings.exclude)),
                ("--strict", format!("{:?}", settings.strictness)),
                ("--shard-samples", format!("{:?}", settings.shard_samples)),
                ("--updatable", format!("{:?}", settings.layout)),
                ("--report", format!("{:?}", settings.reporting)),
            ]),
            What::Update(settings) => identity.extend([
                ("--update", format!("{:?}", settings.output)),
                ("--verify", format!("{:?}", settings.verify)),
            ]),
        }
        identity
    }
}

/// Runs `task` with the number of threads: here, or in the processes that the flags name.
pub(super) fn run(
    arguments: &PrepareArguments,
    task: impl Fn(NonZeroUsize) -> anyhow::Result<Task>,
) -> anyhow::Result<Ended> {
    let stop = StopRequest::default();
    if is_supervised() {
        // Before it waits for its siblings: it is stopped together with them.
        stop_on_signals(&stop)?;
    }
    let cores = cores();
    let threads = |_processes: usize, here: usize| match arguments.workers {
        Some(workers) => workers.get(),
        None => (cores.get() / here.max(1)).max(1),
    };
    let process = match arguments.places.place(threads)? {
        Place::Supervisor { processes, threads } => {
            // A wrong setting is reported once.
            task(NonZeroUsize::MIN)?;
            return supervise(arguments, processes.get(), threads);
        }
        Place::ClusterProcess(process) => process,
    };
    let workers = NonZeroUsize::new(process.cluster.workers).unwrap_or(NonZeroUsize::MIN);
    let task = task(workers)?;
    if process.cluster.processes() > 1 {
        return in_cluster(process, task, &stop);
    }
    stop_on_signals(&stop)?;
    let mut phases = Phases::new();
    let done = task.alone(&mut |now| phases.show(now, &stop));
    phases.finish();
    Ok(Ended::Done(Box::new(done?), None))
}

/// Takes part as one of several processes.
fn in_cluster(process: ClusterProcess, task: Task, stop: &StopRequest) -> anyhow::Result<Ended> {
    quiet_worker_panics();
    process.warn_of_open_ports();
    let ClusterProcess { cluster, lifeline } = process;
    let process = cluster.process;
    match &lifeline {
        // Of supervised processes only process 0 acts on a request to stop; the others learn of it from process 0.
        Some(lifeline) if process == 0 => {
            let stop = stop.clone();
            lifeline.on_stop(move || stop.request());
        }
        Some(_) => {}
        None => stop_on_signals(stop)?,
    }
    let mut cluster: ClusterSettings = cluster;
    for (key, value) in task.identity() {
        cluster = cluster.with_identity(key, value);
    }
    let acts_on_stop = process == 0 || lifeline.is_none();
    let (done, asked) = (Arc::new(Mutex::new(None)), stop.clone());
    let slot = Arc::clone(&done);
    let ended = together(cluster, stop, move |peers| {
        let mut phases = if process == 0 { Phases::new() } else { Phases::silent() };
        let never = StopRequest::default();
        let asked = if acts_on_stop { &asked } else { &never };
        let did = task.together(peers, &mut |now| phases.show(now, asked));
        phases.finish();
        *slot.lock().unwrap_or_else(PoisonError::into_inner) = did?;
        Ok(())
    });
    if let Err(error @ ClusterError::LeftBehind { .. }) = &ended {
        // A thread that is stuck in an output has its lock: words may not get out any more.
        ExitCode::from(error.exit_class().exit_code()).leave_soon();
    }
    // Once the data set is there, it does not matter how the other processes ended.
    if let Some(done) = done.lock().unwrap_or_else(PoisonError::into_inner).take() {
        return Ok(Ended::Done(Box::new(done), lifeline));
    }
    let code = match ended {
        Ok(()) => Ok(ExitCode::SUCCESS),
        // Of the processes that one supervisor has started, only process 0 reports it.
        Err(ClusterError::StoppedEarly) if acts_on_stop => Err(PrepareError::Interrupted.into()),
        Err(error @ ClusterError::StoppedEarly) => {
            Ok(ExitCode::from(error.exit_class().exit_code()))
        }
        Err(error) => Err(error.into()),
    };
    answer(lifeline, code).map(Ended::Elsewhere)
}

/// Starts the processes of `-n` and watches over them.
fn supervise(
    arguments: &PrepareArguments,
    processes: usize,
    threads: usize,
) -> anyhow::Result<Ended> {
    let settled = match arguments.workers {
        Some(_) => Vec::new(),
        None => vec!["-w".to_owned(), threads.to_string()],
    };
    let outcome = supervise::run(SupervisorSettings::new(processes), &settled)?;
    match outcome.exit_code() {
        // They were stopped before they had met, and have said nothing.
        0 if outcome.stopped_early => Err(PrepareError::Interrupted.into()),
        code => Ok(Ended::Elsewhere(ExitCode::from(code))),
    }
}

/// Threads that compute at the same time here.
pub(super) fn cores() -> NonZeroUsize {
    available_parallelism().unwrap_or(NonZeroUsize::MIN)
}

/// The first Ctrl-C (or SIGTERM) ends the work, and removes the files written so far; the second ends the process at once.
fn stop_on_signals(stop: &StopRequest) -> anyhow::Result<()> {
    let stop = stop.clone();
    on_requests_to_stop(move |requests| match requests {
        1 => stop.request(),
        _ => leave(),
    })
}
