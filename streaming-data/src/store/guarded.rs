//! Writing an object only while another one says that it may be written.
//!
//! Stores have no locks. Who wants to be the only writer of a folder puts an object there that tells
//! it from others, and looks at it again before each further object: of two who began, the one whose
//! object was written over soon stops.

use std::{
    fs::File,
    hash::{BuildHasher, RandomState},
};

use bytes::Bytes;
use serde_json::json;

use super::{RemoteFolder, Started, StoreFailure, Version, runtime::Cancel};
use crate::error::DataError;

/// What an object must be for others to be written: a claim on its folder.
#[derive(Debug, Clone)]
pub struct Guard {
    /// Its name in the folder.
    name: String,
    /// All of it.
    content: Bytes,
}

impl Guard {
    /// An object of this name that nobody else's equals: in JSON, with a token of its own at `key`.
    pub fn new(name: &str, key: &str) -> Guard {
        // The standard library's hashers have keys from the operating system's randomness.
        let keys = RandomState::new();
        let token = [1, 2].map(|half: u8| format!("{:016x}", keys.hash_one(half))).concat();
        Guard { name: name.to_owned(), content: format!("{}\n", json!({ key: token })).into() }
    }
}

/// What became of an object that was to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Guarded {
    /// It is there.
    Written,
    /// The guard is gone, or is another one.
    Refused,
}

impl RemoteFolder {
    /// Begins to write a whole object from a file, as [`RemoteFolder::put_file`] does, unless the
    /// guard is another one. Given up, it ends soon, and leaves no parts in the store.
    pub(crate) fn start_guarded(
        &self,
        name: &str,
        file: File,
        guard: &Guard,
        given_up: &Cancel,
    ) -> Result<Started<Guarded>, DataError> {
        let (guarding, writing) =
            (self.operation("read", &guard.name), self.operation("write", name));
        let (url, expected, given_up) = (writing.url(), guard.content.clone(), given_up.clone());
        self.start(url.clone(), async move {
            match given_up.unless(guarding.collect(None, Version::default())).await {
                Some(Ok(found)) if found == expected => {
                    writing.put_opened(file, &given_up).await.map(|()| Guarded::Written)
                }
                Some(Ok(_)) => Ok(Guarded::Refused),
                Some(Err(DataError::Store { source: StoreFailure::NotFound { .. }, .. })) => {
                    Ok(Guarded::Refused)
                }
                Some(Err(error)) => Err(error),
                None => Err(DataError::Cancelled { url }),
            }
        })
    }

    /// Puts the guard where it is to be, over another's that may be there.
    ///
    /// # Errors
    /// As [`RemoteFolder::put`].
    pub fn put_guard(&self, guard: &Guard) -> Result<(), DataError> {
        self.put(&guard.name, guard.content.clone())
    }

    /// Whether the guard is there as it should be.
    ///
    /// # Errors
    /// As [`RemoteFolder::get`].
    pub fn is_guarded(&self, guard: &Guard) -> Result<bool, DataError> {
        Ok(self.get_if_there(&guard.name)?.is_some_and(|found| found == guard.content))
    }
}
