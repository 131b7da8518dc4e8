//! One operation on one object, here to read it: its attempts, the times between them, and its deadlines.
//!
//! A body that breaks is resumed where it broke, so that progress is not lost. Its size, and its etag where
//! the store knows one, show that it is still the same object.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use object_store::{GetOptions, GetRange, ObjectStore, path::Path};
use tidemill_files::Kind;
use tokio::{
    sync::Semaphore,
    time::{Instant, sleep, timeout},
};

use super::{StoreFailure, StoreSettings, Version, backoff::BackOff, conditional::Seen};
use crate::error::DataError;

/// The slowest transfer for which an operation's deadline leaves time.
const SLOWEST_BYTES_PER_SECOND: u64 = 102_400;

/// Pieces of a body that wait for the thread which takes them.
const WAITING_PIECES: usize = 16;

/// Progress that makes a later failure a first one again.
const PROGRESS_BYTES: u64 = 1 << 20;

/// See the [module](self).
pub(super) struct Operation {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) path: Path,
    /// The name in messages.
    pub(super) url: String,
    /// The attempted action, as a verb.
    pub(super) action: &'static str,
    pub(super) settings: Arc<StoreSettings>,
    /// Whether the store has ever answered.
    pub(super) has_answered: Arc<AtomicBool>,
    /// One is held while the operation runs.
    pub(super) permits: Arc<Semaphore>,
}

/// The receiver of an object's bytes.
pub(super) enum Sink {
    Memory(BytesMut),
    Pieces(PieceSender),
}

/// The place in an object's bytes, between attempts.
#[derive(Default)]
pub(super) struct Place {
    /// The next byte of the object.
    at: u64,
    /// One past the last byte, once it is known.
    end: Option<u64>,
    version: Version,
    /// The object, once there was an answer.
    pub(super) seen: Option<Seen>,
    /// The most bytes that the whole object may have.
    kind: Option<Kind>,
}

impl Place {
    /// The beginning of an object that is to be read whole, if it is no larger than its kind may be.
    pub(super) fn of_whole(kind: Kind) -> Place {
        Place { kind: Some(kind), ..Place::default() }
    }
}

impl Operation {
    pub(super) fn url(&self) -> String {
        self.url.clone()
    }

    /// A range, or all, of an object in memory; all of it only where it is no larger than its kind may
    /// be.
    pub(super) async fn collect(
        &self,
        range: Option<Range<u64>>,
        version: Version,
    ) -> Result<Bytes, DataError> {
        let mut sink = Sink::Memory(BytesMut::new());
        self.read(range, version, Some(self.kind()), &mut sink).await?;
        match sink {
            Sink::Memory(bytes) => Ok(bytes.freeze()),
            Sink::Pieces(_) => unreachable!("it was made above"),
        }
    }

    /// The kind of the object, by its name.
    pub(super) fn kind(&self) -> Kind {
        Kind::of_name(self.path.filename().unwrap_or_default())
    }

    /// A range, or all, of an object; all of one that is no larger than `kind` may be.
    pub(super) async fn read(
        &self,
        range: Option<Range<u64>>,
        version: Version,
        kind: Option<Kind>,
        sink: &mut Sink,
    ) -> Result<(), DataError> {
        let _permit = self.permits.acquire().await;
        let mut attempts = Attempts::new(self);
        let mut place = match range {
            Some(range) => {
                Place { at: range.start, end: Some(range.end), version, kind, ..Place::default() }
            }
            None => Place { version, kind, ..Place::default() },
        };
        loop {
            match self.read_on(&mut place, sink, &mut attempts).await {
                Ok(()) => return Ok(()),
                Err(failure) => attempts.failed(failure).await?,
            }
        }
    }

    /// One attempt to read the rest.
    pub(super) async fn read_on(
        &self,
        place: &mut Place,
        sink: &mut Sink,
        attempts: &mut Attempts<'_>,
    ) -> Result<(), StoreFailure> {
        let range = place.end.map(|end| GetRange::Bounded(place.at..end));
        let options = GetOptions { range, ..GetOptions::default() };
        let result = self.within(self.store.get_opts(&self.path, options)).await?;
        place.version.check(result.meta.size, result.meta.e_tag.as_deref())?;
        place.seen = Some(Seen::from(&result.meta));
        if result.range.start != place.at {
            let said = format!("a range from {}, not from {}", result.range.start, place.at);
            return Err(StoreFailure::Unsupported { said });
        }
        if let (None, Some(kind)) = (place.end, place.kind) {
            kind.check(result.meta.size).map_err(StoreFailure::TooLarge)?;
        }
        let start = place.at;
        let end = *place.end.get_or_insert(result.meta.size);
        let mut body = result.into_stream();
        while place.at < end {
            let Some(bytes) = self.within_time(body.next()).await? else {
                let (found, expected) = (place.at - start, end - start);
                return Err(StoreFailure::Truncated { found, expected });
            };
            let mut bytes = bytes?;
            // No store sends more than it was asked for; excess bytes would be cut off.
            bytes.truncate(usize::try_from(end - place.at).unwrap_or(usize::MAX));
            place.at += bytes.len() as u64;
            attempts.progressed(bytes.len() as u64)?;
            let paused = Instant::now();
            if !sink.take(bytes).await {
                break; // The caller wants no more.
            }
            attempts.idle += paused.elapsed();
        }
        Ok(())
    }

    pub(super) async fn within<T>(
        &self,
        answer: impl Future<Output = Result<T, object_store::Error>>,
    ) -> Result<T, StoreFailure> {
        Ok(self.within_time(answer).await??)
    }

    pub(super) async fn within_time<T>(
        &self,
        step: impl Future<Output = T>,
    ) -> Result<T, StoreFailure> {
        let deadline = self.settings.progress_deadline;
        timeout(deadline, step).await.map_err(|_| StoreFailure::Stalled(deadline))
    }
}

impl Version {
    /// Compares the size and version with an answer, and takes them over where they were unknown.
    fn check(&mut self, bytes: u64, e_tag: Option<&str>) -> Result<(), StoreFailure> {
        let expected = *self.bytes.get_or_insert(bytes);
        if expected != bytes {
            return Err(StoreFailure::Size { found: bytes, expected });
        }
        match (&self.e_tag, e_tag) {
            (Some(expected), Some(found)) if expected != found => Err(StoreFailure::Changed {
                found: format!("etag {found}"),
                expected: format!("etag {expected}"),
            }),
            (None, Some(found)) => {
                self.e_tag = Some(found.to_owned());
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// The attempts of an operation so far.
pub(super) struct Attempts<'a> {
    operation: &'a Operation,
    back_off: BackOff<'a>,
    begun: Instant,
    /// Time in which the taker of the bytes was waited for.
    idle: Duration,
    all: u32,
    /// When the failures began that no progress was made since.
    failing_since: Option<Instant>,
    /// Bytes since the last failure, and in all.
    since_failure: u64,
    pub(super) bytes: u64,
}

impl<'a> Attempts<'a> {
    pub(super) fn new(operation: &'a Operation) -> Attempts<'a> {
        Attempts {
            operation,
            back_off: BackOff::new(&operation.settings, &operation.url),
            begun: Instant::now(),
            idle: Duration::ZERO,
            all: 1,
            failing_since: None,
            since_failure: 0,
            bytes: 0,
        }
    }

    /// Counts bytes that arrived.
    fn progressed(&mut self, bytes: u64) -> Result<(), StoreFailure> {
        self.bytes += bytes;
        self.since_failure += bytes;
        if self.since_failure >= PROGRESS_BYTES {
            self.back_off.progressed();
            self.failing_since = None;
        }
        self.check_time()
    }

    fn check_time(&self) -> Result<(), StoreFailure> {
        let taken = self.begun.elapsed().saturating_sub(self.idle);
        let time = self.operation.settings.operation_deadline;
        if taken > time.saturating_add(transfer_time(self.bytes)) {
            return Err(StoreFailure::TooSlow(taken));
        }
        Ok(())
    }

    /// Waits until the next attempt, or ends the operation.
    pub(super) async fn failed(&mut self, failure: StoreFailure) -> Result<(), DataError> {
        let operation = self.operation;
        let end = |source| {
            let (action, url) = (operation.action, operation.url.clone());
            Err(DataError::Store { action, url, attempts: self.all, source })
        };
        self.since_failure = 0;
        let pause = self.back_off.next();
        let failing_since = *self.failing_since.get_or_insert_with(Instant::now);
        let is_outage = operation.has_answered.load(Ordering::Relaxed)
            && failing_since.elapsed() < operation.settings.outage;
        let is_enough = self.back_off.failures() >= operation.settings.attempts.get();
        if failure.is_final() || (is_enough && !is_outage) {
            return end(failure);
        }
        if self.check_time().is_err() {
            return end(failure);
        }
        sleep(pause).await;
        self.all += 1;
        Ok(())
    }
}

pub(super) fn transfer_time(bytes: u64) -> Duration {
    Duration::from_secs(bytes / SLOWEST_BYTES_PER_SECOND)
}

impl Sink {
    /// Takes a piece; returns whether more pieces are wanted.
    async fn take(&mut self, piece: Bytes) -> bool {
        match self {
            Sink::Memory(bytes) => {
                bytes.extend_from_slice(&piece);
                true
            }
            Sink::Pieces(sender) => sender.send(piece).await,
        }
    }
}

/// A channel for pieces from a task to a thread, with room for a few that wait.
pub(super) fn pieces() -> (PieceSender, Pieces) {
    let (sender, receiver) = mpsc::channel();
    let room = Arc::new(Semaphore::new(WAITING_PIECES));
    (PieceSender { sender, room: Arc::clone(&room) }, Pieces { receiver, room })
}

pub(super) struct PieceSender {
    sender: mpsc::Sender<Bytes>,
    room: Arc<Semaphore>,
}

impl PieceSender {
    async fn send(&self, piece: Bytes) -> bool {
        match self.room.acquire().await {
            Ok(permit) => {
                permit.forget();
                self.sender.send(piece).is_ok()
            }
            Err(_) => false,
        }
    }
}

/// The thread's end; dropping it tells the task that no more is wanted.
pub(super) struct Pieces {
    receiver: mpsc::Receiver<Bytes>,
    room: Arc<Semaphore>,
}

impl Iterator for Pieces {
    type Item = Bytes;

    fn next(&mut self) -> Option<Bytes> {
        let piece = self.receiver.recv().ok()?;
        self.room.add_permits(1);
        Some(piece)
    }
}

impl Drop for Pieces {
    fn drop(&mut self) {
        self.room.close();
    }
}
