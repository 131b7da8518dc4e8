//! A run folder in a store: the run that it belongs to, and the files that go there and come back.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tidemill_streaming_data::store::{Cancel, Claim, Claimed, RemoteFolder, new_token};

use crate::checkpoint::{
    LocalCopy, RUN_FILE, RemoteCheckpoints, RunRecord, TrainerState, Wanted, checkpoint_name,
    checkpoint_name_of, step_of,
};
use crate::error::{JobError, Result};
use crate::history::HistoryLine;
use crate::metrics::{RunLine, StepMetrics};
use crate::operators::EvaluationReport;

/// The logs of a run.
const LOGS: [&str; 3] = [HistoryLine::FILE, StepMetrics::FILE, EvaluationReport::FILE];

/// The part of a run folder that is in a store.
#[derive(Debug)]
pub struct RemoteRun {
    folder: RemoteFolder,
    held: Mutex<Option<Held>>,
}

/// A run folder that was claimed, as its record was last put.
#[derive(Debug)]
struct Held {
    claim: Claim,
    record: RunRecord,
}

impl RemoteRun {
    pub fn new(folder: RemoteFolder) -> Self {
        Self { folder, held: Mutex::default() }
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

    /// Makes the folder this run's, whichever had it: that a run on another machine was killed cannot be seen from here.
    pub fn claim(&self) -> Result<()> {
        loop {
            let found = self.folder.find(RUN_FILE)?;
            let there = found
                .as_ref()
                .map(|found| RunRecord::from_bytes(&found.content, &self.folder))
                .transpose()?;
            let checkpoints = self.checkpoints().complete(there.as_ref())?;
            // A new one each time: the one before may have been there, and no state comes twice.
            let record = RunRecord { run: new_token(), ended: false, checkpoints };
            let content = record.to_bytes().into();
            if let Some(claim) = self.folder.claim(RUN_FILE, content, found.as_ref())? {
                *self.lock() = Some(Held { claim, record });
                return Ok(());
            }
            // Another run was there first.
        }
    }

    /// Copies the logs into the local folder `into`.
    pub fn fetch_logs(&self, into: &Path) -> Result<()> {
        fetch_logs(&self.folder, into)
    }

    /// Writes a text that every run of the folder writes.
    pub fn put(&self, name: &str, text: &str) -> Result<()> {
        self.with_held(|held| self.put_bytes(held, name, text.as_bytes().to_vec()))
    }

    /// The state of the run in the latest checkpoint, and its URL.
    pub fn peek(&self) -> Result<Option<(PathBuf, TrainerState)>> {
        self.checkpoints().latest_state()
    }

    /// A verified copy of the latest checkpoint in the local folder `parent`, and its URL.
    pub fn fetch_latest(
        &self,
        parent: &Path,
        mut on_fetch: impl FnMut(&Path),
    ) -> Result<Option<(PathBuf, LocalCopy)>> {
        self.checkpoints().with_latest(|name, folder| {
            let url = self.checkpoints().url(name);
            on_fetch(&url);
            Ok((url, LocalCopy::fetch(folder, Wanted::Checkpoint, parent)?))
        })
    }

    /// Writes the checkpoint of `step`, complete or not at all, and before it the logs, whose lines it stands behind; and
    /// removes the oldest beyond `keep`. Where there is one of as many updates, that stays. The URL of the latest
    /// checkpoint.
    pub fn publish(
        &self,
        step: u64,
        checkpoint: &Path,
        keep: usize,
        logs: &Path,
    ) -> Result<PathBuf> {
        let checkpoints = self.checkpoints();
        self.with_held(|held| {
            self.check(held)?;
            if let Some(latest) =
                held.record.checkpoints.last().filter(|name| step_of(name) >= Some(step))
            {
                return Ok(checkpoints.url(latest));
            }
            self.put_logs(held, logs)?;
            let name = checkpoint_name_of(step, &held.record.run);
            let counts = checkpoints
                .upload(&name, checkpoint, || self.check(held))
                .and_then(|()| self.make_count(held, &name, keep));
            match counts {
                Ok(left_over) => left_over.iter().try_for_each(|old| checkpoints.remove(old))?,
                Err(error) => {
                    if matches!(error, JobError::RunFolderTaken { .. }) {
                        // The run that took the folder may have found it in the record; if not, none ever will. That
                        // the folder was taken is what to report.
                        let is_named = checkpoints.list().map(|names| names.contains(&name));
                        if is_named.is_ok_and(|is_named| !is_named) {
                            let _ = checkpoints.remove(&name);
                        }
                    }
                    return Err(error);
                }
            }
            Ok(checkpoints.url(&name))
        })
    }

    /// Puts a checkpoint into the record, in which `keep` stay. The names of what can be removed then: of checkpoints that
    /// no longer count, and of others that runs left behind.
    fn make_count(&self, held: &mut Held, name: &str, keep: usize) -> Result<Vec<String>> {
        // Records that are there before ours is put belong to runs that claimed the folder earlier: they are gone.
        let there = self.checkpoints().folders()?;
        let mut record = held.record.clone();
        record.checkpoints.push(name.to_owned());
        let old = record.checkpoints.len().saturating_sub(keep);
        let mut left_over: Vec<String> = record.checkpoints.drain(..old).collect();
        self.replace(held, record)?;
        let is_remains = |it: &String| {
            let is_by_hand = step_of(it).is_some_and(|step| *it == checkpoint_name(step));
            !is_by_hand && !held.record.checkpoints.contains(it) && !left_over.contains(it)
        };
        let remains: Vec<String> = there.into_iter().filter(is_remains).collect();
        left_over.extend(remains);
        Ok(left_over)
    }

    /// Ends the claim of a run that has come to its last step, with its last lines.
    pub fn finish(&self, logs: &Path) -> Result<()> {
        self.with_held(|held| {
            self.put_logs(held, logs)?;
            let record = RunRecord { ended: true, ..held.record.clone() };
            self.replace(held, record)
        })
    }

    /// The folder's URL.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(self.folder.location().to_string())
    }

    /// Fails where another run has claimed the folder since, whether or not it has ended.
    fn check(&self, held: &Held) -> Result<()> {
        match self.folder.is_claimed_by(&held.claim)? {
            true => Ok(()),
            false => Err(self.taken()),
        }
    }

    fn replace(&self, held: &mut Held, record: RunRecord) -> Result<()> {
        let content = record.to_bytes().into();
        self.unless_taken(self.folder.replace_claim(&mut held.claim, content)?)?;
        held.record = record;
        Ok(())
    }

    fn put_logs(&self, held: &Held, from: &Path) -> Result<()> {
        for name in LOGS {
            let file = from.join(name);
            if file.exists() {
                let bytes = std::fs::read(&file)
                    .map_err(|source| JobError::file("reading", &file, source))?;
                self.put_bytes(held, name, bytes)?;
            }
        }
        Ok(())
    }

    fn put_bytes(&self, held: &Held, name: &str, bytes: Vec<u8>) -> Result<()> {
        self.unless_taken(self.folder.put_claimed(&held.claim, name, bytes.into())?)
    }

    fn unless_taken(&self, claimed: Claimed) -> Result<()> {
        match claimed {
            Claimed::Ours => Ok(()),
            Claimed::Others => Err(self.taken()),
        }
    }

    fn taken(&self) -> JobError {
        JobError::RunFolderTaken { path: self.path() }
    }

    fn with_held<T>(&self, act: impl FnOnce(&mut Held) -> Result<T>) -> Result<T> {
        match &mut *self.lock() {
            Some(held) => act(held),
            None => Err(self.taken()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
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

#[cfg(test)]
mod tests;
