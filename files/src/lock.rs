//! Locks on files: a process holds something by locking a file, and the kernel ends the lock with
//! the process.
//!
//! The file is opened for writing, because NFS grants an exclusive lock only on such a file, and
//! never on a folder. The lock belongs to the file and not to its name: if the file is renamed or
//! removed, the name is free again. [`Lock::is_in_place`] says whether the file still has its name.

use std::{
    fs::{self, File, Metadata, OpenOptions, TryLockError},
    io::{self, ErrorKind},
    path::{Path, PathBuf},
};

/// A file that this process has locked, until this is dropped.
#[derive(Debug)]
pub struct Lock {
    path: PathBuf,
    file: File,
}

/// The result of an attempt to lock a file.
#[derive(Debug)]
pub enum Attempt {
    /// This process has the lock.
    Taken(Lock),
    /// Another process has the lock on this file.
    Held(File),
    /// The file was removed or replaced during the attempt.
    Gone,
}

impl Lock {
    /// Creates the file if it is missing, and locks it unless another process has it.
    ///
    /// # Errors The error of the operating system, such as that a file system has no locks.
    pub fn attempt(path: &Path) -> io::Result<Attempt> {
        let mut options = OpenOptions::new();
        Self::of(path, options.create(true).truncate(false).read(true).write(true).open(path)?)
    }

    /// As [`attempt`](Self::attempt), for an existing file.
    ///
    /// # Errors
    /// As [`attempt`](Self::attempt), and a file that does not exist.
    pub fn attempt_existing(path: &Path) -> io::Result<Attempt> {
        Self::of(path, OpenOptions::new().read(true).write(true).open(path)?)
    }

    fn of(path: &Path, file: File) -> io::Result<Attempt> {
        match file.try_lock() {
            Ok(()) => {
                let lock = Self { path: path.to_owned(), file };
                Ok(if lock.is_in_place()? { Attempt::Taken(lock) } else { Attempt::Gone })
            }
            Err(TryLockError::WouldBlock) => Ok(Attempt::Held(file)),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Whether the file still has its name.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn is_in_place(&self) -> io::Result<bool> {
        match fs::metadata(&self.path) {
            Ok(there) => Ok(is_same_file(&there, &self.file.metadata()?)),
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
            {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// The file, open for reading and writing.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The path of the file when it was locked.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Whether two results of `stat` describe the same file, one of them a file that is still open.
#[cfg(unix)]
pub fn is_same_file(one: &Metadata, other: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// Whether two results of `stat` describe the same file, as far as they can tell.
#[cfg(not(unix))]
pub fn is_same_file(one: &Metadata, other: &Metadata) -> bool {
    one.len() == other.len() && one.modified().ok() == other.modified().ok()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn taken(attempt: Attempt) -> Lock {
        match attempt {
            Attempt::Taken(lock) => lock,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn of_two_that_lock_a_file_one_does_until_it_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        assert_eq!(Lock::attempt_existing(&path).unwrap_err().kind(), ErrorKind::NotFound);
        let first = taken(Lock::attempt(&path).unwrap());
        for attempt in [Lock::attempt, Lock::attempt_existing] {
            assert!(matches!(attempt(&path).unwrap(), Attempt::Held(_)));
        }
        drop(first);
        taken(Lock::attempt_existing(&path).unwrap());
    }

    /// NFS grants an exclusive lock only on a file that is open for writing.
    #[test]
    fn what_is_locked_is_open_for_writing() {
        let folder = tempfile::tempdir().unwrap();
        let lock = taken(Lock::attempt(&folder.path().join("lock")).unwrap());
        lock.file().write_all(b"x").unwrap();
    }

    #[test]
    fn a_file_that_is_removed_or_replaced_is_no_longer_the_one_that_is_locked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let lock = taken(Lock::attempt(&path).unwrap());
        assert!(lock.is_in_place().unwrap());
        fs::remove_file(&path).unwrap();
        assert!(!lock.is_in_place().unwrap());
        fs::write(&path, "").unwrap();
        assert!(!lock.is_in_place().unwrap());
        taken(Lock::attempt(&path).unwrap());
    }
}
