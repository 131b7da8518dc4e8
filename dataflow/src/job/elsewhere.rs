//! Checkpoints that other processes have in their own `run.dir`.
//!
//! Only process 0's run folder counts. Where another machine becomes process 0, its folder may be empty, or behind, while the
//! run's checkpoints lie where process 0 was before: the run would start again without a message. So every other process
//! says how far its own folder goes before process 0 touches its own.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tidemill_streaming_data::store::Location;

use super::mail::mail;
use super::resolve::ResolvedRun;
use crate::checkpoint;
use crate::cluster::{Failure, WorkerContext};
use crate::error::{JobError, Result};
use crate::operators::addressed::Addressed;

/// The latest checkpoint of another process's own folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Elsewhere {
    process: usize,
    folder: PathBuf,
    step: u64,
}

/// Asks all processes; answers, on worker 0, the one that has come furthest. Every worker takes part.
///
/// # Errors
/// A run that was aborted.
pub(super) fn furthest(
    context: &mut WorkerContext<'_>,
    run: &ResolvedRun,
    local_workers: usize,
) -> std::result::Result<Option<Elsewhere>, Failure> {
    if context.processes() == 1 {
        return Ok(None);
    }
    let process = context.process();
    let (mut sender, found, _) = context.dataflow(|scope| mail(scope, "Elsewhere"));
    let is_first_of_process = context.index() == process * local_workers;
    if process > 0
        && is_first_of_process
        && let Some(elsewhere) = own(run, process)
    {
        sender.send(Addressed::new(0, elsewhere));
    }
    sender.close();
    context.run_until_done()?;
    // Where several are equally far, the one of the first process is named.
    Ok(found.take().into_iter().max_by_key(|it| (it.step, std::cmp::Reverse(it.process))))
}

/// The state in this process's own folder. A folder in a store is the same for all, and one that cannot be read is not needed.
fn own(run: &ResolvedRun, process: usize) -> Option<Elsewhere> {
    let location = Location::of_path(&run.config.run.dir).ok()?;
    let folder = location.local()?;
    match checkpoint::latest(folder) {
        Ok(entry) => {
            let step = entry?.step;
            Some(Elsewhere { process, folder: folder.to_owned(), step })
        }
        Err(error) => {
            tracing::debug!("{error}, which process 0 alone needs");
            None
        }
    }
}

impl Elsewhere {
    /// Refuses to train where another process's folder goes beyond `step`, process 0's latest checkpoint.
    pub fn check(&self, run: &ResolvedRun, step: Option<u64>) -> Result<()> {
        if step >= Some(self.step) {
            return Ok(());
        }
        Err(JobError::RunElsewhere {
            path: run.config.run.dir.clone(),
            step: step.map_or("no checkpoint".to_owned(), |step| format!("step {step} at most")),
            process: self.process,
            other_path: self.folder.clone(),
            other_step: self.step,
        })
    }
}
