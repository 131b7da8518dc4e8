//! Where a data set is written: the interface of folders and stores.
//!
//! Half of a data set must never be taken for one. A folder is written aside and renamed when it is
//! complete; a store has no rename, so there the index says from the first to the last moment that
//! the data set is not complete. A data set that is updated is complete all the time: its new version is
//! written next to the existing one, and the index is replaced last.

mod folder;
mod remote;
pub(crate) mod shard;
pub(crate) mod updated_folder;
mod updated_store;

use std::{fs::File, path::Path};

pub(crate) use self::{
    folder::{OutputFolder, is_in_the_making},
    remote::RemoteOutput,
    updated_folder::{UpdatedFolder, WriterLock, remove_unfinished},
    updated_store::UpdatedStore,
};
use crate::{data_set::index::Index, prepare::PrepareError};

/// A data set in the making. One that was neither published nor abandoned, for instance because the
/// process was killed, is not taken for a data set.
pub(crate) trait Output {
    /// The folder on this machine in which shards are written.
    fn folder(&self) -> &Path;

    /// The name here of a file of the data set: of a shard, or of the tokenizer.
    fn name_of(&self, file: &str) -> String;

    /// An empty file for a shard of this name, which was not written before.
    ///
    /// # Errors
    /// [`DataError::Io`].
    fn create(&self, name: &str) -> Result<File, PrepareError>;

    /// Takes the complete file of a shard, which may have been created under another name.
    ///
    /// # Errors
    /// [`DataError::Io`] when it cannot be put in place, or its upload not begin.
    fn take(&mut self, written_as: &str, name: &str, file: File) -> Result<(), PrepareError>;

    /// Writes a whole file, with `/` between folders in its name. An existing file may be replaced
    /// at any time until the data set is published.
    ///
    /// # Errors
    /// [`DataError::Io`], [`DataError::Store`].
    fn put(&mut self, name: &str, content: Vec<u8>) -> Result<(), PrepareError>;

    /// Whether at most this many of the shards taken are still being uploaded; if more are, it waits a
    /// moment.
    ///
    /// # Errors
    /// The error of a shard that cannot be stored.
    fn has_at_most(&mut self, uploading: usize) -> Result<bool, PrepareError>;

    /// Makes it a data set: all its shards were taken, and none is being uploaded.
    ///
    /// # Errors
    /// [`DataError::Io`], [`DataError::Store`], [`PrepareError::OutputTaken`]; it is abandoned then.
    fn publish(
        self: Box<Self>,
        index: &Index,
        tokenizer_json: Option<&str>,
    ) -> Result<(), PrepareError>;

    /// Removes all of it, as far as that is possible.
    fn abandon(self: Box<Self>);
}
