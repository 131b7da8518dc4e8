//! A data set in a store, to which a new version is written.
//!
//! Objects are named by their content, so that several processes may write the same one. `index.json` is
//! replaced last, and only where it is still the one that the update began with: of two updates of the same
//! data set at once, only one succeeds, and the other gets an error: its version is not the newest. Nothing is
//! removed here; before `index.json` is replaced, it is checked that no other process removed a needed object.

use std::{
    collections::BTreeSet,
    env,
    fs::File,
    path::{Path, PathBuf},
};

use super::{
    Output,
    remote::{unnamed_file, wait_for_some},
};
use crate::{
    data_set::index::{INDEX_FILE, Index, version_file},
    prepare::{PrepareError, upkeep::Unpruned},
    store::{Cancel, Found, RemoteFolder, Started},
};

/// See the [module](self).
pub(crate) struct UpdatedStore {
    folder: RemoteFolder,
    /// Where shards are on this machine.
    temporary: PathBuf,
    /// The index that is to be replaced.
    found: Found,
    /// The objects removed before they were read.
    unpruned: Unpruned,
    /// The objects of the version that is to be replaced.
    there: BTreeSet<String>,
    given_up: Cancel,
    uploading: Vec<Started<()>>,
}

impl UpdatedStore {
    /// Begins a version after the one of an index, which has files of these names.
    pub(crate) fn begin(
        folder: RemoteFolder,
        (found, unpruned): (Found, Unpruned),
        there: BTreeSet<String>,
    ) -> UpdatedStore {
        let (given_up, uploading) = (Cancel::default(), Vec::new());
        let temporary = env::temp_dir();
        UpdatedStore { folder, temporary, found, unpruned, there, given_up, uploading }
    }

    /// Whether the store's index has these bytes, as far as it says so soon.
    fn is_newest(&self, index: &[u8]) -> bool {
        let found = self.folder.hurried().find(INDEX_FILE);
        found.is_ok_and(|found| found.is_some_and(|found| found.content == index))
    }
}

impl Output for UpdatedStore {
    fn folder(&self) -> &Path {
        &self.temporary
    }

    fn name_of(&self, file: &str) -> String {
        file.to_owned()
    }

    fn create(&self, _: &str) -> Result<File, PrepareError> {
        unnamed_file(&self.temporary)
    }

    fn take(&mut self, _: &str, name: &str, file: File) -> Result<(), PrepareError> {
        if !self.there.contains(name) {
            self.uploading.push(self.folder.start_file(name, file, &self.given_up)?);
        }
        Ok(())
    }

    fn put(&mut self, name: &str, content: Vec<u8>) -> Result<(), PrepareError> {
        match self.there.contains(name) {
            true => Ok(()),
            false => Ok(self.folder.put(name, content.into())?),
        }
    }

    fn has_at_most(&mut self, uploading: usize) -> Result<bool, PrepareError> {
        wait_for_some(&mut self.uploading, uploading)?;
        Ok(self.uploading.len() <= uploading)
    }

    fn publish(self: Box<Self>, index: &Index, _: Option<&str>) -> Result<(), PrepareError> {
        assert!(self.uploading.is_empty(), "all shards were waited for");
        let bytes = index.to_bytes();
        if self.found.content == bytes {
            return Ok(());
        }
        self.folder.put(&version_file(index), bytes.clone().into())?;
        self.unpruned.check(&self.folder)?;
        match self.folder.claim(INDEX_FILE, bytes.clone().into(), Some(&self.found)) {
            Ok(Some(_)) => Ok(()),
            // The store may have replaced the index without an answer, and refused to do so again.
            _ if self.is_newest(&bytes) => Ok(()),
            Ok(None) => {
                let path = self.folder.location().to_string().into();
                Err(PrepareError::UpdateOvertaken { path })
            }
            Err(error) => Err(error.into()),
        }
    }

    fn abandon(self: Box<Self>) {
        self.given_up.cancel();
        for started in self.uploading {
            let _ = started.wait();
        }
    }
}
