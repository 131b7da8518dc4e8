//! How updates and `prune` keep out of each other's way in a store, which has no locks.
//!
//! An object says that `prune` is at work, or of the last time that it was: each time other words. `prune` puts it first,
//! and lists versions then. An update puts all objects of its version, its index among them, and looks at this object
//! then; only if it is what it was when the update began does it become the newest. So either the update sees that
//! it is another, and gives up, or `prune` sees the update's version, and keeps what it has.

use bytes::Bytes;

use crate::{
    data_set::index::STATE_FOLDER,
    prepare::PrepareError,
    store::{Claim, Claimed, RemoteFolder, new_token},
};

const MARK_FILE: &str = "pruned";
const AT_WORK: &str = "prune at work";
const DONE: &str = "pruned";

/// That this process prunes the data set.
pub(super) struct Mark<'a> {
    folder: &'a RemoteFolder,
    token: String,
    claim: Claim,
}

impl<'a> Mark<'a> {
    /// Puts it, in place of that of a process which was killed, too.
    pub fn put(folder: &'a RemoteFolder) -> Result<Mark<'a>, PrepareError> {
        let (name, token) = (mark_file(), new_token());
        let content = Bytes::from(format!("{AT_WORK} {token}\n"));
        let claim = folder.claim(&name, content, folder.find(&name)?.as_ref())?;
        let claim = claim.ok_or_else(|| overtaken(folder))?;
        Ok(Mark { folder, token, claim })
    }

    /// Whether no other process has taken this over. What is under way when one does is removed all the same.
    pub fn check(&self) -> Result<(), PrepareError> {
        match self.folder.is_claimed_by(&self.claim)? {
            true => Ok(()),
            false => Err(overtaken(self.folder)),
        }
    }

    /// Nothing is removed any more.
    pub fn end(mut self) -> Result<(), PrepareError> {
        let content = format!("{DONE} {}\n", self.token).into();
        match self.folder.replace_claim(&mut self.claim, content)? {
            Claimed::Ours => Ok(()),
            Claimed::Others => Err(overtaken(self.folder)),
        }
    }
}

/// What an update knows of `prune` when it begins.
#[derive(Debug)]
pub(crate) struct Unpruned(Option<Bytes>);

impl Unpruned {
    /// To be looked at after the index that the update begins with.
    ///
    /// # Errors
    /// [`PrepareError::PruneRunning`], and the errors of the store.
    pub(crate) fn look(folder: &RemoteFolder) -> Result<Unpruned, PrepareError> {
        let found = folder.get_if_there(&mark_file())?;
        match found.as_ref().is_some_and(|found| found.starts_with(AT_WORK.as_bytes())) {
            true => Err(PrepareError::PruneRunning(folder.location().to_string().into())),
            false => Ok(Unpruned(found)),
        }
    }

    /// Whether nothing was removed since; to be asked once the version and its index are there.
    ///
    /// # Errors
    /// [`PrepareError::UpdateOvertaken`], and the errors of the store.
    pub(crate) fn check(&self, folder: &RemoteFolder) -> Result<(), PrepareError> {
        match folder.get_if_there(&mark_file())? == self.0 {
            true => Ok(()),
            false => Err(overtaken(folder)),
        }
    }
}

fn mark_file() -> String {
    format!("{STATE_FOLDER}/{MARK_FILE}")
}

fn overtaken(folder: &RemoteFolder) -> PrepareError {
    PrepareError::UpdateOvertaken { path: folder.location().to_string().into() }
}
