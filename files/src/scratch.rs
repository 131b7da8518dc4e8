//! Temporary folders, removed after a kill too.
//!
//! Beside each folder stands a file `<name>.lock`, which is created before the folder, removed
//! after it, and locked as long as its process lives. The next process that creates such a folder
//! removes the folders whose file is not locked. On file systems without locks, folders of killed
//! processes stay.

use std::{
    ffi::{OsStr, OsString},
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    process,
};

use crate::lock::{Attempt, Lock};

/// The ending of the name of the lock file.
const LOCK_SUFFIX: &str = ".lock";

/// A folder that is removed when this is dropped, or later if the process was killed.
#[derive(Debug)]
pub struct ScratchFolder {
    path: PathBuf,
    lock_path: PathBuf,
    /// `None` where files cannot be locked.
    _lock: Option<Lock>,
}

impl ScratchFolder {
    /// Creates a folder in `parent` whose name begins with `prefix`, and removes those with that
    /// prefix that killed processes left.
    ///
    /// # Errors
    /// A folder or file that cannot be created.
    pub fn new_in(parent: &Path, prefix: &OsStr) -> io::Result<Self> {
        remove_dead(parent, prefix);
        // Process numbers are reused, in containers even at once: the name must also be free.
        for attempt in 0_u64.. {
            let mut name = prefix.to_owned();
            name.push(format!("{}-{attempt}", process::id()));
            let path = parent.join(name);
            let lock_path = lock_path(&path);
            match fs::File::create_new(&lock_path) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            }
            // Before it is locked, another process may take it for that of a killed one.
            let lock = match Lock::attempt_existing(&lock_path) {
                Ok(Attempt::Taken(lock)) => Some(lock),
                Ok(Attempt::Held(_) | Attempt::Gone) => continue,
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(_) => None,
            };
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Self { path, lock_path, _lock: lock }),
                Err(error) => {
                    fs::remove_file(&lock_path)?;
                    if error.kind() != ErrorKind::AlreadyExists {
                        return Err(error);
                    }
                }
            }
        }
        unreachable!("there are more numbers than files")
    }

    /// The path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Renames the folder, to a free name or that of an empty folder. It stays under the new name.
    ///
    /// # Errors The error of the operating system, with the folder, which is unchanged.
    pub fn rename(self, to: &Path) -> Result<(), (io::Error, Self)> {
        // The drop finds no folder to remove any more, only its lock file.
        fs::rename(&self.path, to).map_err(|error| (error, self))
    }
}

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        // The next process removes a folder that cannot be removed now.
        if !self.path.exists() || fs::remove_dir_all(&self.path).is_ok() {
            let _ = fs::remove_file(&self.lock_path);
        }
    }
}

fn lock_path(folder: &Path) -> PathBuf {
    let mut name = OsString::from(folder);
    name.push(LOCK_SUFFIX);
    name.into()
}

/// Removes the folders in `parent` whose name begins with `prefix` and that killed processes left.
/// A folder that cannot be removed stays, and harms no other.
pub fn remove_dead(parent: &Path, prefix: &OsStr) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.as_encoded_bytes();
        if !name.starts_with(prefix.as_encoded_bytes()) || !name.ends_with(LOCK_SUFFIX.as_bytes()) {
            continue;
        }
        let lock_path = entry.path();
        if let Ok(Attempt::Taken(lock)) = Lock::attempt_existing(&lock_path) {
            let folder = lock_path.with_extension("");
            if !folder.exists() || fs::remove_dir_all(folder).is_ok() {
                let _ = fs::remove_file(&lock_path);
            }
            drop(lock);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn names(folder: &Path) -> BTreeSet<OsString> {
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    }

    fn set<const N: usize>(names: [&str; N]) -> BTreeSet<OsString> {
        names.map(OsString::from).into()
    }

    #[test]
    fn what_nobody_holds_is_removed_by_the_next() {
        let parent = tempfile::tempdir().unwrap();
        let (dead, other) = (parent.path().join("copy-1.5-0"), parent.path().join("of-another"));
        for folder in [&dead, &other] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join("model.safetensors"), "x").unwrap();
            fs::write(lock_path(folder), "").unwrap();
        }
        // A process that was killed before it created its folder.
        fs::write(parent.path().join("copy-2-0.lock"), "").unwrap();
        let first = ScratchFolder::new_in(parent.path(), OsStr::new("copy-")).unwrap();
        fs::write(first.path().join("file"), "x").unwrap();
        assert!(!dead.exists() && other.join("model.safetensors").exists());
        let second = ScratchFolder::new_in(parent.path(), OsStr::new("copy-")).unwrap();
        assert!(first.path().join("file").exists() && second.path().is_dir());
        drop((first, second));
        assert_eq!(names(parent.path()), set(["of-another", "of-another.lock"]));
    }

    #[test]
    fn what_is_renamed_stays_and_its_lock_goes() {
        let parent = tempfile::tempdir().unwrap();
        let scratch = ScratchFolder::new_in(parent.path(), OsStr::new(".made-")).unwrap();
        fs::write(scratch.path().join("file"), "x").unwrap();
        let taken = parent.path().join("taken");
        fs::create_dir_all(taken.join("full")).unwrap();
        let (_, scratch) = scratch.rename(&taken).unwrap_err();
        scratch.rename(&parent.path().join("done")).unwrap();
        assert_eq!(names(parent.path()), set(["done", "taken"]));
        assert_eq!(names(&parent.path().join("done")), set(["file"]));
    }

    #[test]
    fn a_name_that_is_taken_is_passed_over() {
        let parent = tempfile::tempdir().unwrap();
        let taken = parent.path().join(format!("x-{}-0", process::id()));
        fs::create_dir(&taken).unwrap();
        let scratch = ScratchFolder::new_in(parent.path(), OsStr::new("x-")).unwrap();
        assert!(scratch.path().ends_with(format!("x-{}-1", process::id())));
        drop(scratch);
        assert!(taken.exists());
        assert_eq!(names(parent.path()).len(), 1);
    }
}
