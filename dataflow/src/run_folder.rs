//! A run folder, held by one run at a time: on this machine, or in a store.
//!
//! The hold is an advisory lock on the file `run.lock` in the folder, which the kernel releases with the process: a run
//! that was killed leaves nothing to clean. The file stays and says which process held the folder last. A run that starts while the
//! processes of a killed one are still going away waits for them, some seconds. Before a line of metrics is written and
//! before a checkpoint is begun or completed, the folder is looked at: where it was removed or renamed, the run ends.
//!
//! # In a store
//! Where `run.dir` is a URL, the run works in a folder of this machine, which is held in the same way, below `runs` in the
//! folder of the cache (`data.cache_dir`). Nothing in there is ever needed again: a run that opens the folder empties it and
//! begins with the store's state.
//! - `run.toml` and `devices.json` go to the store when the run starts, `history.jsonl`, `metrics.jsonl` and `evaluation.jsonl`
//!   before each checkpoint and at the end, a checkpoint file by file with `trainer.json` last. It is complete once that is there.
//! - Lines of metrics behind the latest checkpoint are computed again on resume, so none is lost that counts.
//! - Machines cannot see each other's locks. So the run that started last has the folder: `run.json` holds its token, and
//!   names the checkpoints that count. Each run puts that object only in place of the one that it saw there last, so that
//!   one which was overtaken can neither add a checkpoint nor remove one; it sees so before it writes a checkpoint, before
//!   the checkpoint is complete and when it is to count, and ends with an error. The token is also in the names of the
//!   folders of checkpoints, so that no two runs write the same file, and what both write (logs, config, list of devices)
//!   is put only over what was there before the run saw that the folder was still its own. Requests that arrive late
//!   change none of that.
//! - A store that cannot compare and write in one step is warned of. There `run.json` is looked at before it is written,
//!   and a request that was under way when the folder changed hands takes effect.
//! - A folder without `run.json`, copied there by hand say, has the checkpoints that are complete.

mod hold;
mod remote;

use std::path::{Path, PathBuf};
use std::time::Duration;

use tidemill_files::durable;
use tidemill_streaming_data::DataSettings;
use tidemill_streaming_data::store::{Cancel, Location, RemoteFolder};
use xxhash_rust::xxh3::xxh3_64;

pub use self::hold::LOCK_FILE;
use self::hold::{Hold, PATIENCE};
use self::remote::RemoteRun;
pub use self::remote::fetch_logs;
use crate::checkpoint::{self, LocalCopy, RemoteCheckpoints, TrainerState, Wanted};
use crate::error::{JobError, Result};
use crate::metrics::{RunLine, StepMetrics};
use crate::operators::EvaluationReport;

/// The name of the resolved config in a run folder.
pub const RUN_CONFIG_FILE: &str = "run.toml";

/// The name of the list of devices in a run folder: the devices of process 0's workers when the run was last started.
pub const DEVICES_FILE: &str = "devices.json";

/// The folder of the cache in which runs of stores have their local folders.
const LOCAL_RUNS: &str = "runs";

/// A run folder that this process holds.
#[derive(Debug)]
pub struct RunFolder {
    /// The folder of this machine that is worked in.
    path: PathBuf,
    remote: Option<RemoteRun>,
    /// Lasts for as long as the run lives.
    hold: Hold,
}

/// Whether a run has something left to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writes {
    /// It has.
    Something,
    /// It is at its end already.
    Nothing,
}

/// A checkpoint that a run can go on from.
#[derive(Debug)]
pub struct FoundCheckpoint {
    /// Its folder or URL.
    pub path: PathBuf,
    /// Its files.
    pub files: LocalCopy,
}

impl RunFolder {
    /// Creates `path`, a folder or URL, where it is missing and takes hold of it.
    ///
    /// # Errors
    /// As [`hold_with`](Self::hold_with).
    pub fn hold(path: &Path) -> Result<Self> {
        Self::hold_with(path, &DataSettings::default())
    }

    /// As [`hold`](Self::hold); `settings` say how a store is used and where the cache is.
    ///
    /// # Errors
    /// A folder that cannot be created or opened, or that another run goes on holding; a store that does not answer or
    /// refuses.
    pub fn hold_with(path: &Path, settings: &DataSettings) -> Result<Self> {
        Self::hold_within(path, settings, PATIENCE)
    }

    /// As [`hold_with`](Self::hold_with); another run may take `patience` to let go.
    fn hold_within(path: &Path, settings: &DataSettings, patience: Duration) -> Result<Self> {
        let location = Location::of_path(path)?;
        if let Some(path) = location.local() {
            let hold = Hold::take(path, path, patience)?;
            return Ok(Self { path: path.to_owned(), remote: None, hold });
        }
        let url = location.to_string();
        let local = settings.cache.folder(&location)?.join(LOCAL_RUNS);
        let local = local.join(format!("{:016x}", xxh3_64(url.as_bytes())));
        let remote = RemoteRun::new(RemoteFolder::open(location, &settings.store)?);
        let hold = Hold::take(&local, Path::new(&url), patience)?;
        empty(&local)?;
        Ok(Self { path: local, remote: Some(remote), hold })
    }

    /// Looks at whether the folder is still the one that is held.
    ///
    /// # Errors
    /// [`JobError::RunFolderGone`], or a folder that cannot be looked at.
    pub fn check(&self) -> Result<()> {
        self.hold.check()
    }

    /// The mark by which other processes know this folder, where they see it at all: [`is_held_under`](Self::is_held_under). None for a
    /// run in a store, where each process has a folder of its own.
    pub fn token(&self) -> Option<&str> {
        self.remote.is_none().then(|| self.hold.token())
    }

    /// Whether the local folder `path` is the one that some process holds under `token`.
    pub fn is_held_under(path: &Path, token: &str) -> bool {
        hold::shows(path, token)
    }

    /// Whether this process may write into the local folder `path`.
    pub fn takes_files(path: &Path) -> bool {
        tempfile::tempfile_in(path).is_ok()
    }

    /// The updates of the complete checkpoint with the most of them in the run folder `path`, which is not held.
    ///
    /// # Errors
    /// A folder that cannot be read, or a store that does not answer or refuses.
    pub fn latest_step(path: &Path, settings: &DataSettings) -> Result<Option<u64>> {
        let location = Location::of_path(path)?;
        match location.local() {
            Some(path) => Ok(checkpoint::latest(path)?.map(|entry| entry.step)),
            None => {
                let folder = RemoteFolder::open(location, &settings.store)?;
                Ok(RemoteCheckpoints::of_run(&folder).steps()?.pop())
            }
        }
    }

    /// The state of the run in the complete checkpoint with the most updates, in the run folder `path`, which is not held.
    ///
    /// # Errors
    /// As [`latest_step`](Self::latest_step), or a file that is damaged.
    pub fn latest_state(path: &Path, settings: &DataSettings) -> Result<Option<TrainerState>> {
        let location = Location::of_path(path)?;
        match location.local() {
            Some(path) => {
                let latest = checkpoint::latest(path)?;
                latest.map(|entry| TrainerState::read(&entry.path)).transpose()
            }
            None => {
                let folder = RemoteFolder::open(location, &settings.store)?;
                let latest = RemoteCheckpoints::of_run(&folder).latest_state()?;
                Ok(latest.map(|(_, state)| state))
            }
        }
    }

    /// The same folder; its requests to a store end when it is cancelled.
    pub fn cancelled_by(self, cancel: Cancel) -> Self {
        Self { remote: self.remote.map(|remote| remote.cancelled_by(cancel)), ..self }
    }

    /// Whether the run folder is in a store.
    pub fn is_in_store(&self) -> bool {
        self.remote.is_some()
    }

    /// The folder of this machine that the run works in: the run folder itself, unless that is in a store.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder or URL of the complete checkpoint with the most updates.
    ///
    /// # Errors
    /// A folder that cannot be read, or a store that does not answer or refuses.
    pub fn latest_checkpoint(&self) -> Result<Option<PathBuf>> {
        match &self.remote {
            None => Ok(checkpoint::latest(&self.path)?.map(|entry| entry.path)),
            Some(remote) => {
                let checkpoints = remote.checkpoints();
                Ok(checkpoints.latest()?.map(|name| checkpoints.url(&name)))
            }
        }
    }

    /// The state of the run in the complete checkpoint with the most updates, and that checkpoint's folder or URL.
    ///
    /// # Errors
    /// As [`latest_checkpoint`](Self::latest_checkpoint), or a file that is damaged.
    pub fn peek(&self) -> Result<Option<(PathBuf, TrainerState)>> {
        if let Some(remote) = &self.remote {
            return remote.peek();
        }
        let Some(entry) = checkpoint::latest(&self.path)? else { return Ok(None) };
        let state = TrainerState::read(&entry.path)?;
        Ok(Some((entry.path, state)))
    }

    /// Makes the folder this run's. Of one in a store the logs and the complete checkpoint with the most updates are
    /// fetched, after `on_fetch` was called with its URL; it is there all the same if nothing is written then.
    ///
    /// # Errors
    /// As [`latest_checkpoint`](Self::latest_checkpoint), or files that are damaged.
    pub fn begin(
        &self,
        writes: Writes,
        on_fetch: impl FnMut(&Path),
    ) -> Result<Option<FoundCheckpoint>> {
        let Some(remote) = &self.remote else {
            let Some(entry) = checkpoint::latest(&self.path)? else { return Ok(None) };
            let files = LocalCopy::of(&entry.path, Wanted::Checkpoint)?;
            return Ok(Some(FoundCheckpoint { path: entry.path, files }));
        };
        if writes == Writes::Something {
            remote.claim()?;
        }
        let found = remote.fetch_latest(&self.path, on_fetch)?;
        // Behind the checkpoint, whose lines they have then.
        remote.fetch_logs(&self.path)?;
        Ok(found.map(|(path, files)| FoundCheckpoint { path, files }))
    }

    /// Brings the checkpoint of `step`, which is complete in this machine's folder, to where the run folder is, and removes
    /// the oldest there beyond `keep`. Returns the folder or URL of the latest there.
    ///
    /// # Errors
    /// [`JobError::RunFolderTaken`]; a store that does not answer or refuses; files that cannot be read or removed.
    pub fn publish(&self, step: u64, checkpoint: PathBuf, keep: usize) -> Result<PathBuf> {
        let Some(remote) = &self.remote else { return Ok(checkpoint) };
        let published = remote.publish(step, &checkpoint, keep, &self.path)?;
        std::fs::remove_dir_all(&checkpoint)
            .map_err(|source| JobError::file("removing", &checkpoint, source))?;
        Ok(published)
    }

    /// The run is at its end: brings its last lines of metrics to where the run folder is.
    ///
    /// # Errors
    /// As [`publish`](Self::publish).
    pub fn finish(&self) -> Result<()> {
        self.remote.as_ref().map_or(Ok(()), |remote| remote.finish(&self.path))
    }

    /// Writes the resolved config, wholly or not at all.
    ///
    /// # Errors
    /// A file or object that cannot be written.
    pub fn write_config(&self, toml: &str) -> Result<()> {
        self.write(RUN_CONFIG_FILE, toml)
    }

    /// Writes the list of devices, wholly or not at all.
    ///
    /// # Errors
    /// A file or object that cannot be written.
    pub fn write_devices(&self, json: &str) -> Result<()> {
        self.write(DEVICES_FILE, json)
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        if let Some(remote) = &self.remote {
            return remote.put(name, text);
        }
        let path = self.path.join(name);
        durable::replace(&path, text.as_bytes())
            .map_err(|source| JobError::file("writing", &path, source))
    }

    /// Keeps the logs through a power cut too: a checkpoint that is made visible afterwards relies on it.
    ///
    /// # Errors
    /// A file or folder that cannot be synced.
    pub fn sync_logs(&self) -> Result<()> {
        let [metrics, evaluations] =
            [StepMetrics::FILE, EvaluationReport::FILE].map(|name| self.path.join(name));
        // There is a line for each step by now, and where nothing is evaluated no file.
        durable::sync(&metrics).map_err(|source| JobError::file("syncing", &metrics, source))?;
        durable::sync_if_there(&evaluations)
            .map_err(|source| JobError::file("syncing", &evaluations, source))?;
        // Syncs their names, and the name of the folder of checkpoints.
        durable::sync_folder(&self.path)
            .map_err(|source| JobError::file("syncing", &self.path, source))
    }
}

/// Removes everything in `folder` but the file by which it is held.
fn empty(folder: &Path) -> Result<()> {
    let failed = |source| JobError::file("emptying", folder, source);
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let is_folder = entry.file_type().map_err(failed)?.is_dir();
        let path = entry.path();
        if entry.file_name() == LOCK_FILE {
            continue;
        }
        if is_folder { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) }
            .map_err(failed)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tidemill_streaming_data::CacheSettings;

    use super::*;

    #[test]
    fn a_second_run_is_refused_until_the_first_lets_go() {
        let dir = tempfile::tempdir().unwrap();
        let cache = tempfile::tempdir().unwrap();
        let settings = settings(cache.path());
        for path in [dir.path(), Path::new("memory://one-at-a-time/run")] {
            let first = RunFolder::hold_with(path, &settings).unwrap();
            let error = RunFolder::hold_within(path, &settings, Duration::ZERO).unwrap_err();
            assert!(matches!(error, JobError::RunFolderInUse { .. }), "{error}");
            let us = format!("in use by another run (process {} on ", std::process::id());
            for part in [path.to_str().unwrap(), &us] {
                assert!(error.to_string().contains(part), "{error}");
            }
            drop(first);
            RunFolder::hold_with(path, &settings).unwrap();
        }
    }

    /// The data settings of a machine with this cache.
    fn settings(cache: &Path) -> DataSettings {
        let cache = CacheSettings { dir: Some(cache.to_owned()), limit_bytes: None };
        DataSettings { cache, ..DataSettings::default() }
    }

    /// A checkpoint of these files alone, in this machine's folder of a run.
    fn checkpoint_in(run: &RunFolder, step: u64) -> PathBuf {
        let path = checkpoint::checkpoint_path(run.path(), step);
        std::fs::create_dir_all(&path).unwrap();
        for name in ["config.json", checkpoint::TRAINER_FILE] {
            std::fs::write(path.join(name), format!("{name} of {step}")).unwrap();
        }
        path
    }

    #[test]
    fn of_two_machines_the_later_has_the_folder_and_the_earlier_is_told() {
        let url = Path::new("memory://two-machines/run");
        let machines = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [one, other] = machines
            .each_ref()
            .map(|cache| RunFolder::hold_with(url, &settings(cache.path())).unwrap());
        let taken = |error: JobError| {
            assert!(matches!(error, JobError::RunFolderTaken { .. }), "{error}");
        };
        let write_log = |run: &RunFolder, text: &str| {
            std::fs::write(run.path().join("metrics.jsonl"), text).unwrap();
        };
        let begin = |run: &RunFolder| run.begin(Writes::Something, |_| ());
        assert!(begin(&one).unwrap().is_none());
        write_log(&one, "two");
        let path = one.publish(2, checkpoint_in(&one, 2), 3).unwrap();
        let url = path.to_str().unwrap();
        assert!(url.starts_with("memory://two-machines/run/checkpoints/step-00000002-"), "{url}");
        assert_eq!(std::fs::read_dir(one.path().join("checkpoints")).unwrap().count(), 0);
        // Looking for checkpoints claims nothing.
        other.latest_checkpoint().unwrap();
        write_log(&one, "two four six");
        let sixth = one.publish(6, checkpoint_in(&one, 6), 3).unwrap();

        // No run can resume from these checkpoints: `begin` is here for its claim of the folder.
        begin(&other).unwrap_err();
        taken(one.publish(8, checkpoint_in(&one, 8), 3).unwrap_err());
        taken(one.finish().unwrap_err());
        let remote = other.remote.as_ref().unwrap();
        let steps = || remote.checkpoints().steps().unwrap();
        let log = || remote.folder().get("metrics.jsonl").unwrap();
        assert_eq!((steps(), log()), (vec![2, 6], "two four six".into()));
        // A checkpoint of as many updates is not written over.
        assert_eq!(other.publish(6, checkpoint_in(&other, 6), 2).unwrap(), sixth);
        assert_eq!((steps(), log()), (vec![2, 6], "two four six".into()));
        write_log(&other, "two four six eight");
        let eighth = other.publish(8, checkpoint_in(&other, 8), 2).unwrap();
        assert_eq!((steps(), log()), (vec![6, 8], "two four six eight".into()));
        other.finish().unwrap();
        assert_eq!(other.latest_checkpoint().unwrap(), Some(eighth));
        // Nor does the earlier go on once the later is done.
        taken(one.publish(10, checkpoint_in(&one, 10), 2).unwrap_err());
        assert_eq!((steps(), log()), (vec![6, 8], "two four six eight".into()));
        assert_eq!(remote.checkpoints().folders().unwrap().len(), 2);
    }
}
