//! Stores, in a build that speaks to none: there is no [`RemoteFolder`], and so there is nothing to do with one.
//!
//! Code for folders of both kinds is the same in every build. Here the remote kind has no values, which the compiler
//! knows.

use std::{convert::Infallible, fs::File, ops::Range, path::Path, time::Duration};

use bytes::Bytes;
use tidemill_files::Kind;

use super::{Claimed, Entry, Location, Origin, StoreFailure, StoreSettings, Version};
use crate::error::DataError;

/// A folder of a store, which the feature `stores` brings.
#[derive(Debug, Clone)]
pub struct RemoteFolder(Infallible);

/// Which writer has a folder of a store.
#[derive(Debug, Clone)]
pub struct Claim(Infallible);

/// An object of a store that was read.
#[derive(Debug, Clone)]
pub struct Found {
    /// All of it.
    pub content: Bytes,
    _never: Infallible,
}

/// Ends operations on stores; this build has none.
#[derive(Debug, Clone, Default)]
pub struct Cancel(());

/// An operation that is not waited for yet.
pub(crate) struct Started<T = Bytes>(Infallible, std::marker::PhantomData<T>);

impl Cancel {
    /// There is nothing to end.
    pub fn cancel(&self) {}
}

impl Claim {
    pub(crate) fn is_checked(&self) -> bool {
        match self.0 {}
    }
}

impl<T> Started<T> {
    pub(crate) fn wait(self) -> Result<T, DataError> {
        match self.0 {}
    }

    pub(crate) fn wait_for(&self, _time: Duration) -> Option<Result<T, DataError>> {
        match self.0 {}
    }
}

impl RemoteFolder {
    /// None is ever open.
    ///
    /// # Errors
    /// [`DataError::Store`], always.
    pub fn open(location: Location, _settings: &StoreSettings) -> Result<RemoteFolder, DataError> {
        let said = "this build speaks to no stores, expected one with the feature `remote` of \
                    tidemill-streaming-data";
        let source = StoreFailure::Unsupported { said: said.to_owned() };
        Err(DataError::Store { action: "use", url: location.to_string(), attempts: 1, source })
    }
}

/// The methods of a [`RemoteFolder`], which are never called.
macro_rules! methods {
    ($($visible:vis fn $name:ident(&self $(, $argument:ident: $type:ty)*) -> $result:ty;)*) => {
        impl RemoteFolder {$(
            /// See the documentation with the feature `stores`.
            #[allow(unused_variables, reason = "there is nothing to give them to")]
            $visible fn $name(&self, $($argument: $type),*) -> $result {
                match self.0 {}
            }
        )*}
    };
}

methods! {
    pub fn cancelled_by(&self, cancel: Cancel) -> RemoteFolder;
    pub fn folder(&self, name: &str) -> RemoteFolder;
    pub(crate) fn hurried(&self) -> RemoteFolder;
    pub fn location(&self) -> &Location;
    pub(crate) fn origin(&self) -> Origin;
    pub fn settings(&self) -> &StoreSettings;
    pub fn get(&self, name: &str) -> Result<Bytes, DataError>;
    pub fn get_if_there(&self, name: &str) -> Result<Option<Bytes>, DataError>;
    pub fn get_range(&self, name: &str, range: Range<u64>, version: &Version) -> Result<Bytes, DataError>;
    pub(crate) fn start_range(&self, name: &str, range: Range<u64>, version: &Version) -> Result<Started, DataError>;
    pub(crate) fn download(
        &self,
        name: &str,
        version: &Version,
        kind: Option<Kind>,
        take: impl FnMut(&[u8]) -> Result<(), DataError>
    ) -> Result<(), DataError>;
    pub fn get_file(&self, name: &str, file: &Path) -> Result<(), DataError>;
    pub fn list(&self) -> Result<Vec<Entry>, DataError>;
    pub fn list_folders(&self) -> Result<Vec<String>, DataError>;
    pub fn put(&self, name: &str, bytes: Bytes) -> Result<(), DataError>;
    pub fn put_file(&self, name: &str, file: &Path) -> Result<(), DataError>;
    pub fn delete(&self, name: &str) -> Result<(), DataError>;
    pub fn find(&self, name: &str) -> Result<Option<Found>, DataError>;
    pub fn claim(&self, name: &str, content: Bytes, found: Option<&Found>) -> Result<Option<Claim>, DataError>;
    pub fn is_claimed_by(&self, claim: &Claim) -> Result<bool, DataError>;
    pub fn replace_claim(&self, claim: &mut Claim, content: Bytes) -> Result<Claimed, DataError>;
    pub fn put_claimed(&self, claim: &Claim, name: &str, content: Bytes) -> Result<Claimed, DataError>;
    pub(crate) fn start_file(&self, name: &str, file: File, given_up: &Cancel) -> Result<Started<()>, DataError>;
    pub(crate) fn start_claimed(
        &self,
        claim: &Claim,
        name: &str,
        file: File,
        given_up: &Cancel
    ) -> Result<Started<Claimed>, DataError>;
}
