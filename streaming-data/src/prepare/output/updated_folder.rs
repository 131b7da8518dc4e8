//! A data set in a folder, to which a new version is written.
//!
//! Everything is written into a hidden folder in it and renamed when all is there, under names that depend on the
//! content: a file of the same name in another version is the same. The version's own index follows, and `index.json`
//! last, each in one step. So whatever happens, `index.json` belongs to a version that is complete; files that a
//! killed process put in place belong to no version, until an update writes the same again or `prune` removes them.
//! The hidden folder is removed by the process that wrote it, or, where that was killed, by the next update or
//! `prune`.
//!
//! One process at a time writes: it holds a lock, which ends with it.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs::{self, File},
    path::{Path, PathBuf},
};

use tidemill_files::{
    durable,
    lock::{Attempt, Lock},
    scratch::{self, ScratchFolder},
};

use super::Output;
use crate::{
    data_set::index::{INDEX_FILE, Index, STATE_FOLDER, VERSIONS_FOLDER, version_file},
    prepare::PrepareError,
};

/// The prefix of the names of hidden folders.
const UPDATING: &str = ".updating-";

/// The file that is locked, in the folder of the state.
const LOCK_FILE: &str = "lock";

/// The right to change a data set, until it is dropped.
#[derive(Debug)]
pub(crate) struct WriterLock {
    lock: Lock,
}

impl WriterLock {
    /// Takes it.
    ///
    /// # Errors
    /// [`PrepareError::UpdateRunning`] where another process has it, or [`DataError::Io`].
    pub(crate) fn take(folder: &Path) -> Result<WriterLock, PrepareError> {
        let path = folder.join(STATE_FOLDER).join(LOCK_FILE);
        loop {
            match Lock::attempt(&path).map_err(PrepareError::io("lock", &path))? {
                Attempt::Taken(lock) => return Ok(WriterLock { lock }),
                Attempt::Held(_) => {
                    return Err(PrepareError::UpdateRunning { path: folder.to_owned() });
                }
                // The one before has just ended.
                Attempt::Gone => {}
            }
        }
    }
}

impl Drop for WriterLock {
    fn drop(&mut self) {
        // Removed while it is locked, so that it is no other process's lock yet.
        let _ = fs::remove_file(self.lock.path());
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct UpdatedFolder {
    folder: PathBuf,
    aside: ScratchFolder,
    /// Names of files that are complete in the hidden folder.
    ready: BTreeSet<String>,
    /// The files of the previous version.
    there: BTreeSet<String>,
    _lock: WriterLock,
}

/// Removes the hidden folders of updates that were killed.
pub(crate) fn remove_unfinished(folder: &Path) {
    scratch::remove_dead(folder, OsStr::new(UPDATING));
}

impl UpdatedFolder {
    /// Begins a version of the data set in a folder, after one that has files of these names.
    ///
    /// # Errors
    /// [`DataError::Io`] when nothing can be written there.
    pub(crate) fn begin(
        folder: &Path,
        there: BTreeSet<String>,
        lock: WriterLock,
    ) -> Result<UpdatedFolder, PrepareError> {
        let aside = ScratchFolder::new_in(folder, OsStr::new(UPDATING))
            .map_err(PrepareError::io("create a folder in", folder))?;
        let (folder, ready) = (folder.to_owned(), BTreeSet::new());
        Ok(UpdatedFolder { folder, aside, ready, there, _lock: lock })
    }

    /// Where a file is until it is put in place: its name there has no folders.
    fn aside(&self, name: &str) -> PathBuf {
        self.aside.path().join(name.replace('/', "-"))
    }

    /// Writes a file into the hidden folder.
    fn write_aside(&self, name: &str, content: &[u8]) -> Result<(), PrepareError> {
        let path = self.aside(name);
        step().and_then(|()| fs::write(&path, content)).map_err(PrepareError::io("write", path))
    }

    /// Keeps the bytes of a file in the hidden folder.
    fn sync_aside(&self, name: &str) -> Result<(), PrepareError> {
        let path = self.aside(name);
        durable::sync(&path).map_err(PrepareError::io("write", path))
    }

    fn put_in_place(&self, name: &str) -> Result<(), PrepareError> {
        let path = self.folder.join(name);
        step()
            .and_then(|()| fs::rename(self.aside(name), &path))
            .map_err(PrepareError::io("put in place", path))
    }

    /// Keeps the names in a folder of the data set, or in itself.
    fn keep_names(&self, folder: &str) -> Result<(), PrepareError> {
        let path = if folder.is_empty() { self.folder.clone() } else { self.folder.join(folder) };
        durable::sync_folder(&path).map_err(PrepareError::io("write", path))
    }
}

impl Output for UpdatedFolder {
    fn folder(&self) -> &Path {
        self.aside.path()
    }

    fn name_of(&self, file: &str) -> String {
        file.to_owned()
    }

    fn create(&self, name: &str) -> Result<File, PrepareError> {
        let path = self.aside(name);
        step().and_then(|()| File::create_new(&path)).map_err(PrepareError::io("create", path))
    }

    fn take(&mut self, written_as: &str, name: &str, _: File) -> Result<(), PrepareError> {
        let (from, to) = (self.aside(written_as), self.aside(name));
        step().and_then(|()| fs::rename(&from, &to)).map_err(PrepareError::io("name shard", to))?;
        if !self.there.contains(name) {
            self.ready.insert(name.to_owned());
        }
        Ok(())
    }

    fn put(&mut self, name: &str, content: Vec<u8>) -> Result<(), PrepareError> {
        if self.there.contains(name) {
            return Ok(());
        }
        self.write_aside(name, &content)?;
        self.ready.insert(name.to_owned());
        Ok(())
    }

    fn has_at_most(&mut self, _: usize) -> Result<bool, PrepareError> {
        Ok(true)
    }

    fn publish(self: Box<Self>, index: &Index, _: Option<&str>) -> Result<(), PrepareError> {
        // All bytes are on the disk before the first name changes: one that is full stays as it was.
        let (version, bytes) = (version_file(index), index.to_bytes());
        for name in [&version, INDEX_FILE] {
            self.write_aside(name, &bytes)?;
            self.sync_aside(name)?;
        }
        self.ready.iter().try_for_each(|name| self.sync_aside(name))?;
        for name in [STATE_FOLDER, VERSIONS_FOLDER] {
            let path = self.folder.join(name);
            durable::make_folders(&path).map_err(PrepareError::io("create folder", path))?;
        }
        self.ready.iter().try_for_each(|name| self.put_in_place(name))?;
        [STATE_FOLDER, ""].into_iter().try_for_each(|folder| self.keep_names(folder))?;
        // The index is renamed into place last, when the names of all files that it lists are durable.
        self.put_in_place(&version)?;
        self.keep_names(VERSIONS_FOLDER)?;
        self.put_in_place(INDEX_FILE)?;
        self.keep_names("")
    }

    fn abandon(self: Box<Self>) {}
}

/// A moment before a change of the folder: tests look there at the files that a kill would leave, and let the change fail.
#[cfg(not(test))]
fn step() -> std::io::Result<()> {
    Ok(())
}

#[cfg(test)]
use steps::step;

#[cfg(test)]
pub(crate) mod steps {
    use std::{cell::RefCell, io};

    type Step = Box<dyn FnMut() -> io::Result<()>>;

    thread_local! {
        static STEP: RefCell<Option<Step>> = const { RefCell::new(None) };
    }

    /// Calls `step` before each change of a folder that this thread makes in `work`.
    pub(crate) fn at_each_step<T>(
        step: impl FnMut() -> io::Result<()> + 'static,
        work: impl FnOnce() -> T,
    ) -> T {
        STEP.set(Some(Box::new(step)));
        let done = work();
        STEP.set(None);
        done
    }

    pub(super) fn step() -> io::Result<()> {
        STEP.with_borrow_mut(|step| step.as_mut().map_or(Ok(()), |step| step()))
    }
}
