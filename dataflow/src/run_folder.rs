//! A run folder, held by one run at a time: on this machine, or in a store.
//!
//! The hold is an advisory lock on the folder itself, which the kernel releases with the process: a run
//! that was killed leaves nothing to clean.
//!
//! # In a store
//! Where `run.dir` is a URL, the run works in a folder of this machine, which is held in the same way, below `runs` in the
//! folder of the cache (`data.cache_dir`). Nothing in there is ever needed again: a run that opens the folder empties it and
//! begins with what the store has.
//! - `run.toml` and `devices.json` go to the store when the run starts, `metrics.jsonl` and `evaluation.jsonl` before each
//!   checkpoint and at the end, a checkpoint file by file with `trainer.json` last. It is complete once that is there.
//! - Lines of metrics behind the latest checkpoint are computed again on resume, so none is lost that counts.
//! - Machines cannot see each other's locks. So the run that started last has the folder: it writes `running.json`,
//!   which every run looks at before it writes a checkpoint, and one that finds another's ends with an error. Two
//!   runs that still overlap write the same bytes, as the state after a step depends on nothing but the settings,
//!   which are compared on resume.

mod remote;

use std::convert::Infallible;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;

use tidemill_streaming_data::DataSettings;
use tidemill_streaming_data::store::{Location, RemoteFolder};
use xxhash_rust::xxh3::xxh3_64;

use self::remote::RemoteRun;
pub use self::remote::{RUNNING_FILE, fetch_logs};
use crate::checkpoint::{self, LocalCopy, RemoteCheckpoints, Wanted};
use crate::error::{JobError, Result};

/// The name of the resolved config in a run folder.
pub const RUN_CONFIG_FILE: &str = "run.toml";

/// The name of the list of devices in a run folder: those of process 0's workers when the run was last started.
pub const DEVICES_FILE: &str = "devices.json";

/// The folder of the cache in which runs of stores have their local folders.
const LOCAL_RUNS: &str = "runs";

/// A run folder that this process holds.
#[derive(Debug)]
pub struct RunFolder {
    /// The folder of this machine that is worked in.
    path: PathBuf,
    remote: Option<RemoteRun>,
    /// Keeps the lock for as long as the run lives.
    _lock: File,
    /// Is dropped after the lock.
    _released: Option<Sender<Infallible>>,
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
    /// A folder that cannot be created or opened, or that another run of this machine holds; a store that does not answer
    /// or refuses.
    pub fn hold_with(path: &Path, settings: &DataSettings) -> Result<Self> {
        let location = Location::of_path(path)?;
        if let Some(path) = location.local() {
            let lock = lock(path, path)?;
            return Ok(Self { path: path.to_owned(), remote: None, _lock: lock, _released: None });
        }
        let url = location.to_string();
        let local = settings.cache.folder(&location)?.join(LOCAL_RUNS);
        let local = local.join(format!("{:016x}", xxh3_64(url.as_bytes())));
        let remote = RemoteRun::new(RemoteFolder::open(location, &settings.store)?);
        let lock = lock(&local, Path::new(&url))?;
        empty(&local)?;
        remote.fetch_logs(&local)?;
        Ok(Self { path: local, remote: Some(remote), _lock: lock, _released: None })
    }

    /// Whether the run folder `path` has a complete checkpoint; it is not held.
    ///
    /// # Errors
    /// A folder that cannot be read, or a store that does not answer or refuses.
    pub fn has_checkpoint(path: &Path, settings: &DataSettings) -> Result<bool> {
        let location = Location::of_path(path)?;
        Ok(match location.local() {
            Some(path) => checkpoint::latest(path)?.is_some(),
            None => {
                let folder = RemoteFolder::open(location, &settings.store)?;
                RemoteCheckpoints::of_run(&folder).latest()?.is_some()
            }
        })
    }

    /// Drops `released` once the folder is let go, by whichever thread uses it last.
    pub fn announce_release(&mut self, released: Sender<Infallible>) {
        self._released = Some(released);
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
                Ok(checkpoints.latest()?.map(|step| checkpoints.url(step)))
            }
        }
    }

    /// The complete checkpoint with the most updates. Where it is in a store, it is fetched after `on_fetch` was told its
    /// URL.
    ///
    /// # Errors
    /// As [`latest_checkpoint`](Self::latest_checkpoint), or files that are damaged.
    pub fn fetch_latest_checkpoint(
        &self,
        on_fetch: impl FnOnce(&Path),
    ) -> Result<Option<FoundCheckpoint>> {
        match &self.remote {
            None => {
                let Some(entry) = checkpoint::latest(&self.path)? else { return Ok(None) };
                let files = LocalCopy::of(&entry.path, Wanted::Checkpoint)?;
                Ok(Some(FoundCheckpoint { path: entry.path, files }))
            }
            Some(remote) => {
                let checkpoints = remote.checkpoints();
                let Some(step) = checkpoints.latest()? else { return Ok(None) };
                let path = checkpoints.url(step);
                on_fetch(&path);
                let files = remote.fetch_checkpoint(step, &self.path)?;
                Ok(Some(FoundCheckpoint { path, files }))
            }
        }
    }

    /// Says that this run writes here from now on; of use in a store only.
    ///
    /// # Errors
    /// A store that does not answer or refuses.
    pub fn claim(&self) -> Result<()> {
        self.remote.as_ref().map_or(Ok(()), RemoteRun::claim)
    }

    /// Brings the checkpoint of `step`, which is complete in this machine's folder, to where the run folder is, and removes
    /// the oldest there beyond `keep`. Returns its folder or URL.
    ///
    /// # Errors
    /// [`JobError::RunFolderTaken`]; a store that does not answer or refuses; files that cannot be read or removed.
    pub fn publish(&self, step: u64, checkpoint: PathBuf, keep: usize) -> Result<PathBuf> {
        let Some(remote) = &self.remote else { return Ok(checkpoint) };
        remote.publish(step, &checkpoint, keep, &self.path)?;
        std::fs::remove_dir_all(&checkpoint)
            .map_err(|source| JobError::file("removing", &checkpoint, source))?;
        Ok(remote.checkpoints().url(step))
    }

    /// The run is at its end: brings its last lines of metrics to where the run folder is.
    ///
    /// # Errors
    /// As [`publish`](Self::publish).
    pub fn finish(&self) -> Result<()> {
        let Some(remote) = &self.remote else { return Ok(()) };
        remote.check_claim()?;
        remote.put_logs(&self.path)?;
        remote.release()
    }

    /// Writes the resolved config, wholly or not at all.
    ///
    /// # Errors
    /// A file or object that cannot be written.
    pub fn write_config(&self, toml: &str) -> Result<()> {
        self.write(RUN_CONFIG_FILE, toml)
    }

    /// Writes what computes, wholly or not at all.
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
        let aside = self.path.join(format!("{name}.partial"));
        std::fs::write(&aside, text)
            .and_then(|()| std::fs::rename(&aside, &path))
            .map_err(|source| JobError::file("writing", &path, source))
    }
}

/// Creates `folder` where it is missing and locks it; `shown` is what a refusal names.
fn lock(folder: &Path, shown: &Path) -> Result<File> {
    std::fs::create_dir_all(folder).map_err(|source| JobError::file("creating", folder, source))?;
    let lock = File::open(folder).map_err(|source| JobError::file("opening", folder, source))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(std::fs::TryLockError::WouldBlock) => {
            Err(JobError::RunFolderInUse { path: shown.to_owned() })
        }
        Err(std::fs::TryLockError::Error(source)) => Err(JobError::file("locking", folder, source)),
    }
}

/// Removes everything in `folder`.
fn empty(folder: &Path) -> Result<()> {
    let failed = |source| JobError::file("emptying", folder, source);
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let is_folder = entry.file_type().map_err(failed)?.is_dir();
        let path = entry.path();
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
            let error = RunFolder::hold_with(path, &settings).unwrap_err();
            assert!(matches!(error, JobError::RunFolderInUse { .. }), "{error}");
            assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
            drop(first);
            RunFolder::hold_with(path, &settings).unwrap();
        }
    }

    /// Those of a machine with this cache.
    fn settings(cache: &Path) -> DataSettings {
        let cache = CacheSettings { dir: Some(cache.to_owned()), limit_bytes: None };
        DataSettings { cache, ..DataSettings::default() }
    }

    /// A checkpoint of nothing but these files, in this machine's folder of a run.
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
        one.claim().unwrap();
        let path = one.publish(2, checkpoint_in(&one, 2), 3).unwrap();
        assert_eq!(path, Path::new("memory://two-machines/run/checkpoints/step-00000002"));
        assert_eq!(std::fs::read_dir(one.path().join("checkpoints")).unwrap().count(), 0);
        // To look at a folder takes nothing from the run that has it.
        one.publish(4, checkpoint_in(&one, 4), 3).unwrap();
        other.claim().unwrap();
        let error = one.publish(6, checkpoint_in(&one, 6), 3).unwrap_err();
        assert!(matches!(error, JobError::RunFolderTaken { .. }), "{error}");
        assert!(matches!(one.finish(), Err(JobError::RunFolderTaken { .. })));
        other.publish(6, checkpoint_in(&other, 6), 2).unwrap();
        other.finish().unwrap();
        let checkpoints = other.remote.as_ref().unwrap().checkpoints();
        assert_eq!(checkpoints.list().unwrap(), [4, 6]);
        assert_eq!(other.latest_checkpoint().unwrap(), Some(checkpoints.url(6)));
        // The claim is gone with the run that had it.
        one.finish().unwrap();
    }
}
