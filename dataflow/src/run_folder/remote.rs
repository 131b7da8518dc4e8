//! A run folder in a store: which run it belongs to, and what goes there and comes back.

use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};

use serde_json::json;
use tidemill_streaming_data::store::RemoteFolder;

use crate::checkpoint::{LocalCopy, RemoteCheckpoints, Wanted};
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
    token: String,
}

impl RemoteRun {
    pub fn new(folder: RemoteFolder) -> Self {
        // Keys of hashers are random.
        let token = [(); 2].map(|()| RandomState::new().hash_one(std::process::id()));
        Self { folder, token: format!("{:016x}{:016x}", token[0], token[1]) }
    }

    pub fn checkpoints(&self) -> RemoteCheckpoints {
        RemoteCheckpoints::of_run(&self.folder)
    }

    /// Makes the folder this run's, whoever had it: that a run on another machine was killed cannot be seen from here.
    pub fn claim(&self) -> Result<()> {
        let mut text = json!({ "run": self.token }).to_string();
        text.push('\n');
        Ok(self.folder.put(RUNNING_FILE, text.into())?)
    }

    /// Fails where another run has claimed the folder since.
    pub fn check_claim(&self) -> Result<()> {
        if self.is_claimed_by_another()? {
            return Err(JobError::RunFolderTaken { path: self.path() });
        }
        Ok(())
    }

    fn is_claimed_by_another(&self) -> Result<bool> {
        let Some(bytes) = self.folder.get_if_there(RUNNING_FILE)? else { return Ok(false) };
        let claim: serde_json::Value = serde_json::from_slice(&bytes).unwrap_or_default();
        Ok(claim["run"] != self.token)
    }

    /// Ends the claim, where it is still this run's.
    pub fn release(&self) -> Result<()> {
        if !self.is_claimed_by_another()? {
            self.folder.delete(RUNNING_FILE)?;
        }
        Ok(())
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

    /// A verified copy of the checkpoint of `step`, in the local folder `parent`.
    pub fn fetch_checkpoint(&self, step: u64, parent: &Path) -> Result<LocalCopy> {
        LocalCopy::fetch(&self.checkpoints().folder(step), Wanted::Checkpoint, parent)
    }

    /// Writes the checkpoint of `step`, complete or not at all, and before it the logs, whose lines it stands behind.
    pub fn publish(&self, step: u64, checkpoint: &Path, keep: usize, logs: &Path) -> Result<()> {
        self.check_claim()?;
        self.put_logs(logs)?;
        let checkpoints = self.checkpoints();
        checkpoints.upload(step, checkpoint)?;
        checkpoints.retain(step, keep)
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
