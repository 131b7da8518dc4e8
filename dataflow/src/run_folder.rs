//! A run folder, held by one run at a time.
//!
//! The hold is an advisory lock on the folder itself, which the kernel releases with the process: a run
//! that was killed leaves nothing to clean.

use std::convert::Infallible;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;

use crate::error::{JobError, Result};

/// The name of the resolved config in a run folder.
pub const RUN_CONFIG_FILE: &str = "run.toml";

/// The name of the list of devices in a run folder: those of process 0's workers when the run was last started.
pub const DEVICES_FILE: &str = "devices.json";

/// A run folder that this process holds.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    /// Keeps the lock for as long as the run lives.
    _lock: File,
    /// Is dropped after the lock.
    _released: Option<Sender<Infallible>>,
}

impl RunFolder {
    /// Creates `path` where it is missing and takes hold of it.
    ///
    /// # Errors
    /// A folder that cannot be created or opened, or that another run holds.
    pub fn hold(path: &Path) -> Result<Self> {
        std::fs::create_dir_all(path).map_err(|source| JobError::file("creating", path, source))?;
        let lock = File::open(path).map_err(|source| JobError::file("opening", path, source))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { path: path.to_owned(), _lock: lock, _released: None }),
            Err(std::fs::TryLockError::WouldBlock) => {
                Err(JobError::RunFolderInUse { path: path.to_owned() })
            }
            Err(std::fs::TryLockError::Error(source)) => {
                Err(JobError::file("locking", path, source))
            }
        }
    }

    /// Drops `released` once the folder is let go, by whichever thread uses it last.
    pub fn announce_release(&mut self, released: Sender<Infallible>) {
        self._released = Some(released);
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the resolved config, wholly or not at all.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write_config(&self, toml: &str) -> Result<()> {
        self.write(RUN_CONFIG_FILE, toml)
    }

    /// Writes what computes, wholly or not at all.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write_devices(&self, json: &str) -> Result<()> {
        self.write(DEVICES_FILE, json)
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.path.join(name);
        let aside = self.path.join(format!("{name}.partial"));
        std::fs::write(&aside, text)
            .and_then(|()| std::fs::rename(&aside, &path))
            .map_err(|source| JobError::file("writing", &path, source))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_run_is_refused_until_the_first_lets_go() {
        let dir = tempfile::tempdir().unwrap();
        let first = RunFolder::hold(dir.path()).unwrap();
        let error = RunFolder::hold(dir.path()).unwrap_err();
        assert!(matches!(error, JobError::RunFolderInUse { .. }), "{error}");
        drop(first);
        RunFolder::hold(dir.path()).unwrap();
    }
}
