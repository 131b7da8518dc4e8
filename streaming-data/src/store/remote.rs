//! A folder of a remote store.
//!
//! Callers wait for an [`Operation`], which runs on the threads of
//! [`super::runtime`].

use std::{
    fmt,
    fs::File,
    io::Write,
    num::NonZeroU32,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    time::Duration,
};

use bytes::Bytes;
use object_store::{ObjectStore, path::Path};
use tidemill_files::Kind;
use tokio::sync::Semaphore;

use super::{
    Entry, Location, Origin, StoreFailure, StoreSettings, Version, open,
    operation::{Operation, Sink, pieces},
    runtime::{self, Cancel, NotRun},
};
use crate::error::DataError;

/// How often a part of a large object is tried again before the whole is.
const PART_RETRIES: usize = 10;

/// Bounds of hurried operations, for which callers do not wait long: the most attempts, the longest silence
/// of one, and the longest pause before the next.
const HURRIED_ATTEMPTS: NonZeroU32 = NonZeroU32::new(3).unwrap();
const HURRIED_DEADLINE: Duration = Duration::from_secs(5);
const HURRIED_BACK_OFF: Duration = Duration::from_secs(1);

/// See the [module](super). Clones are the same folder.
#[derive(Clone)]
pub struct RemoteFolder {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    location: Location,
    settings: Arc<StoreSettings>,
    /// As `store`, for writes: where the store can, a part of an object is tried again alone.
    writer: Arc<dyn ObjectStore>,
    /// Whether the store has ever answered; of all clones.
    has_answered: Arc<AtomicBool>,
    /// Requests at a time, of all clones.
    permits: Arc<Semaphore>,
    cancel: Cancel,
    /// The settings that name the store in addition to the URL.
    endpoints: Arc<[String]>,
}

impl RemoteFolder {
    /// The folder of a URL. Nothing is sent yet.
    ///
    /// # Errors
    /// [`DataError::Store`] when the URL, the environment and the settings make no store.
    ///
    /// # Panics
    /// If the location is local.
    pub fn open(location: Location, settings: &StoreSettings) -> Result<RemoteFolder, DataError> {
        let url = location.url().expect("a remote location");
        let opened = |retries| {
            open::open(url, settings, retries).map_err(|source| DataError::Store {
                action: "use",
                url: location.to_string(),
                attempts: 1,
                source,
            })
        };
        let (store, prefix) = opened(0)?;
        let (writer, _) = opened(PART_RETRIES)?;
        let folder = RemoteFolder::of_store(store, prefix, location.clone(), settings);
        let endpoints = open::endpoints(settings).into();
        Ok(RemoteFolder { writer, endpoints, ..folder })
    }

    /// A folder of a store that the caller made; messages name `location`.
    pub fn of_store(
        store: Arc<dyn ObjectStore>,
        prefix: Path,
        location: Location,
        settings: &StoreSettings,
    ) -> RemoteFolder {
        let permits = Arc::new(Semaphore::new(settings.requests.get()));
        let (settings, cancel) = (Arc::new(settings.clone()), Cancel::default());
        let (writer, has_answered) = (Arc::clone(&store), Arc::default());
        RemoteFolder {
            store,
            writer,
            prefix,
            location,
            settings,
            has_answered,
            permits,
            cancel,
            endpoints: Arc::default(),
        }
    }

    /// The same folder, with operations that `cancel` ends.
    pub fn cancelled_by(&self, cancel: Cancel) -> RemoteFolder {
        RemoteFolder { cancel, ..self.clone() }
    }

    /// A folder in it.
    pub fn folder(&self, name: &str) -> RemoteFolder {
        let parts = name.split('/').filter(|part| !part.is_empty());
        let prefix = parts.fold(self.prefix.clone(), |prefix, part| prefix.join(part));
        RemoteFolder { prefix, location: self.location.join(name), ..self.clone() }
    }

    /// The same folder, with operations that are soon given up.
    pub(crate) fn hurried(&self) -> RemoteFolder {
        let settings = StoreSettings {
            attempts: self.settings.attempts.min(HURRIED_ATTEMPTS),
            outage: Duration::ZERO,
            progress_deadline: self.settings.progress_deadline.min(HURRIED_DEADLINE),
            back_off_limit: self.settings.back_off_limit.min(HURRIED_BACK_OFF),
            ..StoreSettings::clone(&self.settings)
        };
        RemoteFolder { settings: Arc::new(settings), ..self.clone() }
    }

    /// Where it is.
    pub fn location(&self) -> &Location {
        &self.location
    }

    /// The place's identity in a cache.
    pub(crate) fn origin(&self) -> Origin {
        let place = self.location.to_string();
        Origin::of([place.as_str()].into_iter().chain(self.endpoints.iter().map(String::as_str)))
    }

    /// How it is used.
    pub fn settings(&self) -> &StoreSettings {
        &self.settings
    }

    /// A whole object in memory, of no more bytes than an object of this name may have
    /// ([`Kind::of_name`]).
    ///
    /// # Errors
    /// [`DataError::Store`] (with [`StoreFailure::TooLarge`] before such an object is read),
    /// [`DataError::Cancelled`].
    pub fn get(&self, name: &str) -> Result<Bytes, DataError> {
        let operation = self.operation("read", name);
        let version = Version::default();
        self.wait(operation.url(), async move { operation.collect(None, version).await })
    }

    /// As [`RemoteFolder::get`], or none when there is no such object.
    ///
    /// # Errors
    /// As [`RemoteFolder::get`]. A missing bucket is no such object to many stores.
    pub fn get_if_there(&self, name: &str) -> Result<Option<Bytes>, DataError> {
        match self.get(name) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(DataError::Store { source: StoreFailure::NotFound { .. }, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A range of an object, which must be of the version.
    ///
    /// # Errors
    /// As [`RemoteFolder::get`]; [`StoreFailure::Changed`] for another version.
    pub fn get_range(
        &self,
        name: &str,
        range: Range<u64>,
        version: &Version,
    ) -> Result<Bytes, DataError> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        self.start_range(name, range, version)?.wait()
    }

    /// Begins to get a range, which must not be empty.
    pub(crate) fn start_range(
        &self,
        name: &str,
        range: Range<u64>,
        version: &Version,
    ) -> Result<Started, DataError> {
        let operation = self.operation("read", name);
        let (url, version) = (operation.url(), version.clone());
        let future = async move { operation.collect(Some(range), version).await };
        self.start(url, future)
    }

    /// A whole object, of no more bytes than a `kind` may have, piece by piece, given to `take` on the
    /// caller's thread. It ends early when `take` fails.
    ///
    /// # Errors
    /// The errors of [`RemoteFolder::get_range`] and of `take`.
    pub(crate) fn download(
        &self,
        name: &str,
        version: &Version,
        kind: Option<Kind>,
        mut take: impl FnMut(&[u8]) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let operation = self.operation("read", name);
        let (url, version) = (operation.url(), version.clone());
        let (sender, pieces) = pieces();
        let end = runtime::start(
            async move { operation.read(None, version, kind, &mut Sink::Pieces(sender)).await },
            &self.cancel,
        )
        .map_err(|not_run| not_run_error(not_run, url.clone()))?;
        for bytes in pieces {
            take(&bytes)?;
        }
        end.recv().unwrap_or(Err(DataError::Cancelled { url }))
    }

    /// Writes a whole object into a local file, over one that may be there.
    ///
    /// # Errors
    /// As [`RemoteFolder::get`], and [`DataError::Io`] when the file cannot be written; what arrived
    /// is left there then.
    pub fn get_file(&self, name: &str, file: &std::path::Path) -> Result<(), DataError> {
        let mut target = File::create(file).map_err(DataError::io("create", file))?;
        // An object of an unknown kind may hold weights, of any size.
        let kind = Some(Kind::of_name(name)).filter(|&kind| kind != Kind::Other);
        self.download(name, &Version::default(), kind, |bytes| {
            target.write_all(bytes).map_err(DataError::io("write", file))
        })
    }

    /// The objects directly in the folder, in byte order of their names.
    ///
    /// # Errors
    /// As [`RemoteFolder::get`].
    pub fn list(&self) -> Result<Vec<Entry>, DataError> {
        let operation = self.operation("list", "");
        self.wait(operation.url(), async move { Ok(operation.list().await?.0) })
    }

    /// The names of the folders directly in the folder, in byte order.
    ///
    /// # Errors
    /// As [`RemoteFolder::get`].
    pub fn list_folders(&self) -> Result<Vec<String>, DataError> {
        let operation = self.operation("list", "");
        self.wait(operation.url(), async move { Ok(operation.list().await?.1) })
    }

    /// Writes a whole object at once, over one that may be there.
    ///
    /// # Errors
    /// As [`RemoteFolder::get`]; the object is then unchanged.
    pub fn put(&self, name: &str, bytes: Bytes) -> Result<(), DataError> {
        let operation = self.operation("write", name);
        self.wait(operation.url(), async move { operation.put(bytes).await })
    }

    /// Writes a whole object from a local file of any size, over one that may be there. It is there
    /// when all of it is; a large one is sent in at most 10,000 parts of 8 MiB or more. A part that
    /// fails is sent again alone where the store is known to take that, else with all others.
    ///
    /// # Errors
    /// As [`RemoteFolder::get`], and [`DataError::Io`] when the file cannot be opened; what was there
    /// is unchanged then.
    pub fn put_file(&self, name: &str, file: &std::path::Path) -> Result<(), DataError> {
        let (operation, file) = (self.operation("write", name), file.to_owned());
        self.wait(operation.url(), async move { operation.put_file(file).await })
    }

    /// Removes an object; that it is not there is no error.
    ///
    /// # Errors
    /// As [`RemoteFolder::get`].
    pub fn delete(&self, name: &str) -> Result<(), DataError> {
        let operation = self.operation("remove", name);
        self.wait(operation.url(), async move { operation.delete().await })
    }

    pub(super) fn operation(&self, action: &'static str, name: &str) -> Operation {
        let parts = name.split('/').filter(|part| !part.is_empty());
        let url = if name.is_empty() { self.location.clone() } else { self.location.join(name) };
        let store = if action == "write" { &self.writer } else { &self.store };
        Operation {
            store: Arc::clone(store),
            has_answered: Arc::clone(&self.has_answered),
            path: parts.fold(self.prefix.clone(), |path, part| path.join(part)),
            url: url.to_string(),
            action,
            settings: Arc::clone(&self.settings),
            permits: Arc::clone(&self.permits),
        }
    }

    /// A write under conditions. `object_store` must not repeat its attempts, as one without an answer may
    /// have succeeded.
    pub(super) fn conditional(&self, name: &str) -> Operation {
        Operation { store: Arc::clone(&self.store), ..self.operation("write", name) }
    }

    pub(super) fn start<T: Send + 'static>(
        &self,
        url: String,
        future: impl Future<Output = Result<T, DataError>> + Send + 'static,
    ) -> Result<Started<T>, DataError> {
        match runtime::start(self.noting(future), &self.cancel) {
            Ok(receiver) => Ok(Started { receiver, url }),
            Err(not_run) => Err(not_run_error(not_run, url)),
        }
    }

    /// The future, which notes whether the store answered.
    fn noting<T, F: Future<Output = Result<T, DataError>>>(
        &self,
        future: F,
    ) -> impl Future<Output = Result<T, DataError>> + use<T, F> {
        let has_answered = Arc::clone(&self.has_answered);
        async move {
            let result = future.await;
            match &result {
                Err(DataError::Store { source, .. }) if !source.is_final() => {}
                _ => has_answered.store(true, Ordering::Relaxed),
            }
            result
        }
    }

    pub(super) fn wait<T: Send + 'static>(
        &self,
        url: String,
        future: impl Future<Output = Result<T, DataError>> + Send + 'static,
    ) -> Result<T, DataError> {
        match runtime::wait(self.noting(future), &self.cancel) {
            Ok(result) => result,
            Err(not_run) => Err(not_run_error(not_run, url)),
        }
    }
}

impl fmt::Debug for RemoteFolder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("RemoteFolder").field(&self.location).finish()
    }
}

/// A range that is being read, or another operation that is not waited for yet.
pub(crate) struct Started<T = Bytes> {
    receiver: mpsc::Receiver<Result<T, DataError>>,
    url: String,
}

impl<T> Started<T> {
    /// Waits for it.
    pub(crate) fn wait(self) -> Result<T, DataError> {
        self.receiver.recv().unwrap_or(Err(DataError::Cancelled { url: self.url }))
    }

    /// Waits for at most so long; the result is given once.
    pub(crate) fn wait_for(&self, time: Duration) -> Option<Result<T, DataError>> {
        match self.receiver.recv_timeout(time) {
            Ok(result) => Some(result),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                Some(Err(DataError::Cancelled { url: self.url.clone() }))
            }
        }
    }
}

fn not_run_error(not_run: NotRun, url: String) -> DataError {
    match not_run {
        NotRun::Cancelled => DataError::Cancelled { url },
        NotRun::NoRuntime(source) => {
            DataError::Io { action: "start threads to read", path: url.into(), source }
        }
    }
}
