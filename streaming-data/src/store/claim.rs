//! Folders with one writer at a time: see [`Claim`].

use std::fs::File;

use bytes::Bytes;

use super::{
    Claimed, Found, RemoteFolder, Started, StoreFailure, Version,
    conditional::{Seen, Taken},
    runtime::Cancel,
};
use crate::error::DataError;

/// The object of a folder in a store that says which writer has the folder.
///
/// Stores have no locks. A writer puts this object with a token of its own, in place of the one that it
/// saw there, and replaces it only where it is still the same; so does the next writer, which takes the
/// folder over. This one object is the state of the folder: it goes from state to state, and no request
/// brings an earlier state back, however late it arrives. It is never removed, since a removal cannot have a
/// condition. All other objects are written under names that hold the token, which no other writer has, or by
/// [`RemoteFolder::put_claimed`].
///
/// # Stores without conditions
/// WebDAV has none, nor have some stores with the interface of S3. They say so, or a check finds it when the
/// claim is taken; a warning is logged then. In such a store the claim is read before each write. A writer
/// that was overtaken still learns it, but its requests that were under way then take effect.
#[derive(Debug, Clone)]
pub struct Claim {
    name: String,
    content: Bytes,
    /// None where the store knows no conditions.
    seen: Option<Seen>,
}

impl Claim {
    /// Whether the store keeps to conditions.
    pub(crate) fn is_checked(&self) -> bool {
        self.seen.is_some()
    }
}

impl RemoteFolder {
    /// A whole object, so that a claim can replace it; none if it does not exist.
    ///
    /// # Errors
    /// As [`RemoteFolder::get`].
    pub fn find(&self, name: &str) -> Result<Option<Found>, DataError> {
        let operation = self.operation("read", name);
        self.wait(operation.url(), async move { operation.find().await })
    }

    /// Claims the folder: puts `content`, which no other writer puts, in place of the object that was found, or where
    /// nothing was. None where something else is there by now.
    ///
    /// # Errors
    /// As [`RemoteFolder::put`]; it may be claimed all the same.
    pub fn claim(
        &self,
        name: &str,
        content: Bytes,
        found: Option<&Found>,
    ) -> Result<Option<Claim>, DataError> {
        let (operation, seen) = (self.conditional(name), found.map(|found| found.seen.clone()));
        let writing = content.clone();
        let taken = self
            .wait(operation.url(), async move { operation.claim(writing, seen.as_ref()).await })?;
        let seen = match taken {
            Taken::Checked(seen) => Some(seen),
            Taken::Unchecked => {
                tracing::warn!(
                    "{} cannot write an object only where it is unchanged: two that write there at \
                     the same time may damage what the other wrote",
                    self.location()
                );
                None
            }
            Taken::Not => return Ok(None),
        };
        Ok(Some(Claim { name: name.to_owned(), content, seen }))
    }

    /// Whether the claim is there as it was last put.
    ///
    /// # Errors
    /// As [`RemoteFolder::get`].
    pub fn is_claimed_by(&self, claim: &Claim) -> Result<bool, DataError> {
        Ok(self.get_if_there(&claim.name)?.is_some_and(|found| found == claim.content))
    }

    /// Puts `content`, which no other writer puts, in place of the claim, and is the claim then.
    ///
    /// # Errors
    /// As [`RemoteFolder::put`]; it may be there all the same, or may still arrive.
    pub fn replace_claim(&self, claim: &mut Claim, content: Bytes) -> Result<Claimed, DataError> {
        let Some(seen) = claim.seen.clone() else {
            if !self.is_claimed_by(claim)? {
                return Ok(Claimed::Others);
            }
            self.put(&claim.name, content.clone())?;
            claim.content = content;
            return Ok(Claimed::Ours);
        };
        let (operation, writing) = (self.conditional(&claim.name), content.clone());
        let written = self
            .wait(operation.url(), async move { operation.put_if(&writing, Some(&seen)).await })?;
        let Some(seen) = written else { return Ok(Claimed::Others) };
        (claim.content, claim.seen) = (content, Some(seen));
        Ok(Claimed::Ours)
    }

    /// Writes a whole object that other writers of the folder write too, over theirs, unless the claim is
    /// another's. It never takes the place of a later claim's object.
    ///
    /// # Errors
    /// As [`RemoteFolder::put`]; it may be there all the same, or may still arrive.
    pub fn put_claimed(
        &self,
        claim: &Claim,
        name: &str,
        content: Bytes,
    ) -> Result<Claimed, DataError> {
        if claim.seen.is_none() {
            if !self.is_claimed_by(claim)? {
                return Ok(Claimed::Others);
            }
            return self.put(name, content).map(|()| Claimed::Ours);
        }
        loop {
            let operation = self.operation("read", name);
            let seen = self.wait(operation.url(), async move { operation.see().await })?;
            // In this order: a writer that claims later writes later than the object that was just seen.
            if !self.is_claimed_by(claim)? {
                return Ok(Claimed::Others);
            }
            let (operation, writing) = (self.conditional(name), content.clone());
            let written = self.wait(operation.url(), async move {
                operation.put_if(&writing, seen.as_ref()).await
            })?;
            if written.is_some() {
                return Ok(Claimed::Ours);
            }
        }
    }

    /// Begins to write a whole object from a file, as [`RemoteFolder::put_file`] does. Given up, it ends soon,
    /// and leaves no parts in the store.
    pub(crate) fn start_file(
        &self,
        name: &str,
        file: File,
        given_up: &Cancel,
    ) -> Result<Started<()>, DataError> {
        let (writing, given_up) = (self.operation("write", name), given_up.clone());
        self.start(writing.url(), async move { writing.put_opened(file, &given_up).await })
    }

    /// Begins to write a whole object from a file, as [`RemoteFolder::put_file`] does, unless the claim is
    /// another's. Given up, it ends soon, and leaves no parts in the store.
    pub(crate) fn start_claimed(
        &self,
        claim: &Claim,
        name: &str,
        file: File,
        given_up: &Cancel,
    ) -> Result<Started<Claimed>, DataError> {
        let (looking, writing) =
            (self.operation("read", &claim.name), self.operation("write", name));
        let (url, expected, given_up) = (writing.url(), claim.content.clone(), given_up.clone());
        self.start(url.clone(), async move {
            match given_up.unless(looking.collect(None, Version::default())).await {
                Some(Ok(found)) if found == expected => {
                    writing.put_opened(file, &given_up).await.map(|()| Claimed::Ours)
                }
                Some(Ok(_)) => Ok(Claimed::Others),
                Some(Err(DataError::Store { source: StoreFailure::NotFound { .. }, .. })) => {
                    Ok(Claimed::Others)
                }
                Some(Err(error)) => Err(error),
                None => Err(DataError::Cancelled { url }),
            }
        })
    }
}
