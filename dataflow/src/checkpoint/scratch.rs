//! Folders of this machine for copies, of which a kill leaves nothing that stays.
//!
//! Each is held by a lock that the kernel releases with its process; the next one to be made beside it removes those that
//! nobody holds.

use std::fs::{File, TryLockError};
use std::io::ErrorKind;
use std::path::Path;

use tempfile::TempDir;

/// What their names begin with.
const PREFIX: &str = "tidemill-copy-";

/// A folder that is removed when this is dropped, or later where the process was killed.
#[derive(Debug)]
pub struct Scratch {
    folder: TempDir,
    _lock: File,
}

impl Scratch {
    /// Makes a folder in `parent`, which is made where it is missing.
    pub fn new_in(parent: &Path) -> std::io::Result<Self> {
        std::fs::create_dir_all(parent)?;
        remove_dead(parent)?;
        loop {
            let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent)?;
            // Another process may have taken it for one that nobody holds, before this one held it.
            let lock = match File::open(folder.path()) {
                Ok(lock) => lock,
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            match lock.try_lock() {
                Ok(()) if folder.path().exists() => return Ok(Self { folder, _lock: lock }),
                Ok(()) | Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

fn remove_dead(parent: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(parent)? {
        let entry = entry?;
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        // Others remove such folders too.
        let Ok(lock) = File::open(entry.path()) else { continue };
        if lock.try_lock().is_ok() {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_holds_is_removed_by_the_next() {
        let parent = tempfile::tempdir().unwrap();
        let dead = parent.path().join("tidemill-copy-dead");
        let other = parent.path().join("of-another");
        for folder in [&dead, &other] {
            std::fs::create_dir(folder).unwrap();
            std::fs::write(folder.join("model.safetensors"), "x").unwrap();
        }
        let first = Scratch::new_in(parent.path()).unwrap();
        std::fs::write(first.path().join("file"), "x").unwrap();
        assert!(!dead.exists() && other.join("model.safetensors").exists());
        let second = Scratch::new_in(parent.path()).unwrap();
        assert!(first.path().join("file").exists() && second.path().is_dir());
        let path = first.path().to_owned();
        drop(first);
        assert!(!path.exists());
    }
}
