//! A run folder in a store: which run it belongs to, and what goes there and comes back.

use std::path::{Path, PathBuf};

use tidemill_streaming_data::store::{Cancel, Guard, RemoteFolder};

use crate::checkpoint::{LocalCopy, RemoteCheckpoints, TRAINER_FILE, TrainerState, Wanted};
use crate::error::{JobError, Result};
use crate::metrics::{StepLine, StepMetrics};
use crate::operators::EvaluationReport;

/// The name of the object that says which run writes there. It is there while one does, or after one was killed.
pub const RUNNING_FILE: &str = "running.json";

/// The logs of a run.
const LOGS: [&str; 2] = [StepMetrics::FILE, EvaluationReport::FILE];

/// The part of a run folder that is in a store.
#[derive(Debug)]
pub struct RemoteRun {
    folder: RemoteFolder,
    /// Tells this run from any other.
    claim: Guard,
}

impl RemoteRun {
    pub fn new(folder: RemoteFolder) -> Self {
        Self { folder, claim: Guard::new(RUNNING_FILE, "run") }
    }

    #[cfg(test)]
    pub fn folder(&self) -> &RemoteFolder {
        &self.folder
    }

    pub fn checkpoints(&self) -> RemoteCheckpoints {
        RemoteCheckpoints::of_run(&self.folder)
    }

    /// The same run, whose operations end when they are cancelled.
    pub fn cancelled_by(self, cancel: Cancel) -> Self {
        Self { folder: self.folder.cancelled_by(cancel), ..self }
    }

    /// Makes the folder this run's, whoever had it: that a run on another machine was killed cannot be seen from here.
    pub fn claim(&self) -> Result<()> {
        Ok(self.folder.put_guard(&self.claim)?)
    }

    /// Fails where another run has claimed the folder since, whether or not it has ended.
    pub fn check_claim(&self) -> Result<()> {
        match self.folder.is_guarded(&self.claim)? {
            true => Ok(()),
            false => Err(JobError::RunFolderTaken { path: self.path() }),
        }
    }

    /// Ends the claim.
    pub fn release(&self) -> Result<()> {
        self.check_claim()?;
        Ok(self.folder.delete(RUNNING_FILE)?)
    }

    /// Copies the logs into the local folder `into`.
    pub fn fetch_logs(&self, into: &Path) -> Result<()> {
        fetch_logs(&self.folder, into)
    }

    /// Writes the logs of the local folder `from`.
    pub fn put_logs(&self, from: &Path) -> Result<()> {
        for name in LOGS {
            let file = from.join(name);
            if file.exists() {
                self.folder.put_file(name, &file)?;
            }
        }
        Ok(())
    }

    pub fn put(&self, name: &str, text: &str) -> Result<()> {
        Ok(self.folder.put(name, text.as_bytes().to_vec().into())?)
    }

    /// What the latest checkpoint says of the run, and its URL.
    pub fn peek(&self) -> Result<Option<(PathBuf, TrainerState)>> {
        self.checkpoints().with_latest(|step, folder| {
            let path = PathBuf::from(folder.location().join(TRAINER_FILE).to_string());
            let state = TrainerState::from_bytes(&folder.get(TRAINER_FILE)?, &path)?;
            Ok((self.checkpoints().url(step), state))
        })
    }

    /// A verified copy of the latest checkpoint in the local folder `parent`, and its URL.
    pub fn fetch_latest(
        &self,
        parent: &Path,
        mut on_fetch: impl FnMut(&Path),
    ) -> Result<Option<(PathBuf, LocalCopy)>> {
        self.checkpoints().with_latest(|step, folder| {
            let url = self.checkpoints().url(step);
            on_fetch(&url);
            Ok((url, LocalCopy::fetch(folder, Wanted::Checkpoint, parent)?))
        })
    }

    /// Writes the checkpoint of `step`, complete or not at all, and before it the logs, whose lines it stands behind. Where a
    /// run that had the folder before has come as far, what it left stays. The URL of the latest checkpoint.
    pub fn publish(
        &self,
        step: u64,
        checkpoint: &Path,
        keep: usize,
        logs: &Path,
    ) -> Result<PathBuf> {
        self.check_claim()?;
        let checkpoints = self.checkpoints();
        if let Some(latest) = checkpoints.latest()?.filter(|&latest| latest >= step) {
            return Ok(checkpoints.url(latest));
        }
        self.put_logs(logs)?;
        checkpoints.upload(step, checkpoint, || self.check_claim())?;
        self.check_claim()?;
        checkpoints.retain(step, keep)?;
        Ok(checkpoints.url(step))
    }

    /// Ends the claim of a run that has come to `step`, with its last lines.
    pub fn finish(&self, step: u64, logs: &Path) -> Result<()> {
        self.check_claim()?;
        if self.checkpoints().latest()? <= Some(step) {
            self.put_logs(logs)?;
        }
        self.release()
    }

    /// The folder's URL.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(self.folder.location().to_string())
    }
}

/// Copies the logs of a run in a store into the local folder `into`.
///
/// # Errors
/// A store that does not answer or refuses, or files that cannot be written.
pub fn fetch_logs(run: &RemoteFolder, into: &Path) -> Result<()> {
    for name in LOGS {
        if let Some(bytes) = run.get_if_there(name)? {
            let path = into.join(name);
            std::fs::write(&path, bytes)
                .map_err(|source| JobError::file("writing", &path, source))?;
        }
    }
    Ok(())
}
