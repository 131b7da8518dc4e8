//! Writing an object only where it has not changed.
//!
//! The store compares and writes in one step, so that of two writers one alone succeeds, however late a
//! request of either arrives. An answer may be lost: the next attempt is then refused because the first one
//! succeeded. So after a refusal the object is read back, and its content tells whether this writer wrote it;
//! contents have to differ from those of any other writer.

use bytes::{Bytes, BytesMut};
use object_store::{
    Error, GetOptions, ObjectMeta, ObjectStore, PutMode, PutOptions, PutPayload, UpdateVersion,
};
use tokio::time::timeout;

use super::{
    StoreFailure,
    operation::{Attempts, Operation, Place, Sink},
};
use crate::error::DataError;

/// An etag and a generation that no object has.
const NO_E_TAG: &str = "\"00000000000000000000000000000000\"";
const NO_GENERATION: &str = "1";

/// The version of an object when it was read or written, which the store compares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Seen(UpdateVersion);

/// An object that was read, which can be replaced as long as it is the same.
#[derive(Debug, Clone)]
pub struct Found {
    /// All of it.
    pub content: Bytes,
    pub(super) seen: Seen,
}

/// The outcome of writing a claim.
pub(super) enum Taken {
    /// It is there, and the store keeps to conditions.
    Checked(Seen),
    /// It is there, and the store knows no conditions.
    Unchecked,
    /// Another writer was there first.
    Not,
}

/// Why an attempt wrote nothing, or seems to have.
enum Refused {
    /// The object is not as expected, or the store cannot tell at the moment.
    Condition,
    Otherwise(StoreFailure),
}

impl From<&ObjectMeta> for Seen {
    fn from(meta: &ObjectMeta) -> Seen {
        Seen(UpdateVersion { e_tag: meta.e_tag.clone(), version: meta.version.clone() })
    }
}

impl Operation {
    /// A whole object and its version; none where there is no object.
    pub(super) async fn find(&self) -> Result<Option<Found>, DataError> {
        let _permit = self.permits.acquire().await;
        self.find_within().await
    }

    /// As [`Operation::find`], within an operation.
    async fn find_within(&self) -> Result<Option<Found>, DataError> {
        let mut attempts = Attempts::new(self);
        loop {
            let (mut place, mut sink) =
                (Place::of_whole(self.kind()), Sink::Memory(BytesMut::new()));
            match (self.read_on(&mut place, &mut sink, &mut attempts).await, sink, place.seen) {
                (Ok(()), Sink::Memory(bytes), Some(seen)) => {
                    return Ok(Some(Found { content: bytes.freeze(), seen }));
                }
                (Ok(()), ..) => unreachable!("what was read was seen, and is in memory"),
                (Err(StoreFailure::NotFound { .. }), ..) => return Ok(None),
                (Err(failure), ..) => attempts.failed(failure).await?,
            }
        }
    }

    /// The version of an object, which differs for a later object; none where there is no object.
    pub(super) async fn see(&self) -> Result<Option<Seen>, DataError> {
        let _permit = self.permits.acquire().await;
        let mut attempts = Attempts::new(self);
        loop {
            let options = GetOptions { head: true, ..GetOptions::default() };
            match self.within(self.store.get_opts(&self.path, options)).await {
                Ok(result) => return Ok(Some(Seen::from(&result.meta))),
                Err(StoreFailure::NotFound { .. }) => return Ok(None),
                Err(failure) => attempts.failed(failure).await?,
            }
        }
    }

    /// Writes a whole object if it is as expected, or if none is expected and there is none. Returns the version that was
    /// written; none where another object is there.
    ///
    /// # Errors
    /// The errors of a put. Of these, only [`StoreFailure::Unconditional`] says that nothing was written; after any other, the
    /// object may have been written, or may be still.
    pub(super) async fn put_if(
        &self,
        content: &Bytes,
        expected: Option<&Seen>,
    ) -> Result<Option<Seen>, DataError> {
        let _permit = self.permits.acquire().await;
        let mut attempts = Attempts::new(self);
        loop {
            let failure = match self.put_if_once(content, expected).await {
                Ok(seen) => return Ok(Some(seen)),
                Err(Refused::Otherwise(failure)) => failure,
                Err(Refused::Condition) => match self.find_within().await? {
                    // An earlier attempt wrote it, and its answer was lost.
                    Some(found) if found.content == *content => return Ok(Some(found.seen)),
                    // Stores answer so to requests that meet, whichever wins.
                    found if found.as_ref().map(|found| &found.seen) == expected => {
                        let said = "it conflicts with another request".to_owned();
                        StoreFailure::Other { said }
                    }
                    _ => return Ok(None),
                },
            };
            attempts.failed(failure).await?;
        }
    }

    /// Writes a claim as [`Operation::put_if`] does, or at once where the store knows no conditions.
    pub(super) async fn claim(
        &self,
        content: Bytes,
        expected: Option<&Seen>,
    ) -> Result<Taken, DataError> {
        match self.put_if(&content, expected).await {
            Ok(Some(seen)) if self.keeps_conditions(&content).await? => Ok(Taken::Checked(seen)),
            Ok(Some(_)) => Ok(Taken::Unchecked),
            Ok(None) => Ok(Taken::Not),
            Err(DataError::Store { source: StoreFailure::Unconditional { .. }, .. }) => {
                self.put(content).await.map(|()| Taken::Unchecked)
            }
            Err(error) => Err(error),
        }
    }

    /// Whether the store keeps conditions: it must refuse to write `content`, which is there already, over a
    /// version that never existed. Some stores with the interface of S3 silently ignore conditions.
    async fn keeps_conditions(&self, content: &Bytes) -> Result<bool, DataError> {
        let _permit = self.permits.acquire().await;
        let mut attempts = Attempts::new(self);
        let (e_tag, version) = (Some(NO_E_TAG.to_owned()), Some(NO_GENERATION.to_owned()));
        let never = Seen(UpdateVersion { e_tag, version });
        loop {
            match self.put_if_once(content, Some(&never)).await {
                Ok(_) | Err(Refused::Otherwise(StoreFailure::Unconditional { .. })) => {
                    return Ok(false);
                }
                Err(Refused::Condition) => return Ok(true),
                Err(Refused::Otherwise(failure)) => attempts.failed(failure).await?,
            }
        }
    }

    async fn put_if_once(&self, content: &Bytes, expected: Option<&Seen>) -> Result<Seen, Refused> {
        let mode = match expected {
            Some(Seen(version)) => PutMode::Update(version.clone()),
            None => PutMode::Create,
        };
        let options = PutOptions { mode, ..PutOptions::default() };
        let deadline = self.transfer_deadline(content.len() as u64);
        let payload = PutPayload::from_bytes(content.clone());
        match timeout(deadline, self.store.put_opts(&self.path, payload, options)).await {
            Ok(Ok(written)) => Ok(Seen(written.into())),
            Ok(Err(
                Error::AlreadyExists { .. }
                | Error::Precondition { .. }
                | Error::NotModified { .. },
            )) => Err(Refused::Condition),
            Ok(Err(error)) => Err(Refused::Otherwise(StoreFailure::of_conditional(error))),
            Err(_) => Err(Refused::Otherwise(StoreFailure::Stalled(deadline))),
        }
    }
}
