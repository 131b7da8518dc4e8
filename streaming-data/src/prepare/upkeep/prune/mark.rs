//! How updates and `prune` keep out of each other's way in a store, which has no locks.
//!
//! A mark, which is an object, says that `prune` is at work or has ended; its content differs for every `prune`. `prune`
//! first writes the mark and then lists versions. An update writes all objects of its version, its index among them, and
//! then reads the mark; its version becomes the newest only if the mark is the same as when the update began. So either
//! the update sees that the mark changed, and gives up, or `prune` sees the update's version, and keeps its files.

use bytes::Bytes;

use crate::{
    data_set::index::STATE_FOLDER,
    prepare::PrepareError,
    store::{Claim, Claimed, RemoteFolder, new_token},
};

const MARK_FILE: &str = "pruned";
const AT_WORK: &str = "prune at work";
const DONE: &str = "pruned";

/// The mark of this process while it prunes the data set.
pub(super) struct Mark<'a> {
    folder: &'a RemoteFolder,
    token: String,
    claim: Claim,
}

impl<'a> Mark<'a> {
    /// Writes the mark, also over the mark of a process that was killed.
    pub fn put(folder: &'a RemoteFolder) -> Result<Mark<'a>, PrepareError> {
        let (name, token) = (mark_file(), new_token());
        let content = Bytes::from(format!("{AT_WORK} {token}\n"));
        let claim = folder.claim(&name, content, folder.find(&name)?.as_ref())?;
        let claim = claim.ok_or_else(|| overtaken(folder))?;
        Ok(Mark { folder, token, claim })
    }

    /// Fails if another process has replaced the mark. A removal that is under way at that moment still happens.
    pub fn check(&self) -> Result<(), PrepareError> {
        match self.folder.is_claimed_by(&self.claim)? {
            true => Ok(()),
            false => Err(overtaken(self.folder)),
        }
    }

    /// Changes the mark to say that `prune` has ended: nothing is removed any more.
    pub fn end(mut self) -> Result<(), PrepareError> {
        let content = format!("{DONE} {}\n", self.token).into();
        match self.folder.replace_claim(&mut self.claim, content)? {
            Claimed::Ours => Ok(()),
            Claimed::Others => Err(overtaken(self.folder)),
        }
    }
}

/// The content of the mark when an update begins; `None` where there is no mark.
#[derive(Debug)]
pub(crate) struct Unpruned(Option<Bytes>);

impl Unpruned {
    /// Reads the mark, after the index that the update begins with was read.
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

    /// Fails if the mark changed; to be called once the version and its index are written.
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
