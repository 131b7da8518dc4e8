//! A store that fails as networks do, in an order that a seed decides.

use std::{
    collections::HashMap,
    fmt,
    ops::Range,
    path::Path as FilePath,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{
    StreamExt,
    future::pending,
    stream::{self, BoxStream},
};
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, Result, UploadPart, memory::InMemory, path::Path,
};
use tokio::sync::watch;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A fault of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The server is too busy.
    Busy,
    /// No answer comes.
    Silence,
    /// The body stops half way.
    Stall,
    /// The connection breaks half way.
    Break,
    /// The body ends half way as if that were all.
    Truncate,
    /// A byte is another one.
    Flip,
    /// There is no such object.
    Missing,
    /// The credentials do not allow it.
    Refused,
    /// A write is done, but its answer is lost; a read succeeds.
    Lost,
}

/// The store's treatment of conditional puts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Conditions {
    Kept,
    /// It puts all the same, without a word.
    PassedOver,
    /// It says that it cannot.
    Refused,
}

pub const PASSING: [Fault; 5] =
    [Fault::Busy, Fault::Silence, Fault::Stall, Fault::Break, Fault::Truncate];

/// The requests to the store.
#[derive(Debug, Default)]
pub struct Asked {
    pub requests: AtomicUsize,
    pub at_once: AtomicUsize,
    pub most_at_once: AtomicUsize,
    /// Requests to write among them.
    pub puts: AtomicUsize,
    /// Parts of objects that were sent, and objects in parts that were given up.
    pub parts: AtomicUsize,
    pub aborted: AtomicUsize,
    /// Requests, and bytes that were sent, by object.
    pub objects: Mutex<HashMap<String, (usize, u64)>>,
}

impl Asked {
    pub fn bytes(&self) -> u64 {
        self.objects.lock().unwrap().values().map(|(_, bytes)| bytes).sum()
    }

    pub fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }

    /// Requests for one object.
    pub fn of(&self, object: &str) -> usize {
        self.objects.lock().unwrap().get(object).map_or(0, |(requests, _)| *requests)
    }
}

/// See the module.
pub struct Faulty {
    pub inner: Arc<InMemory>,
    seed: u64,
    faults: Vec<Fault>,
    /// The percentage of requests that fail; for one object never more than `in_a_row` fail in sequence.
    percent: u64,
    in_a_row: usize,
    pub asked: Arc<Asked>,
    failed: Mutex<HashMap<String, usize>>,
    /// How often a byte was wrong, by object and end of the range.
    flipped: Mutex<HashMap<(String, u64), usize>>,
    /// Only objects that hold this in their path fail.
    only: String,
    /// Only what writes fails.
    only_puts: bool,
    conditions: Conditions,
    /// The fault of the first write of an object that may fail, and that of all later requests for such objects.
    first_and_then: Option<(Option<Fault>, Fault)>,
    was_first: AtomicBool,
    /// Shards are written while this is true.
    pub gate: Arc<watch::Sender<bool>>,
    /// While it is set, nothing fails.
    pub is_calm: AtomicBool,
}

impl Faulty {
    /// A store with the files of a folder, which fails `percent` of all requests.
    pub fn of_folder(folder: &FilePath, seed: u64, faults: &[Fault], percent: u64) -> Faulty {
        Faulty {
            inner: Arc::new(in_memory(folder)),
            seed,
            faults: faults.to_vec(),
            percent,
            in_a_row: 3,
            asked: Arc::default(),
            failed: Mutex::default(),
            flipped: Mutex::default(),
            only: String::new(),
            only_puts: false,
            conditions: Conditions::Kept,
            first_and_then: None,
            was_first: AtomicBool::default(),
            gate: Arc::new(watch::Sender::new(true)),
            is_calm: AtomicBool::default(),
        }
    }

    /// Every request for such an object fails.
    pub fn always(folder: &FilePath, only: &str, fault: Fault) -> Faulty {
        let store = Faulty::of_folder(folder, 0, &[fault], 100).only(only);
        Faulty { in_a_row: usize::MAX, ..store }
    }

    /// So many requests for one object may fail in a row.
    pub fn in_a_row(self, in_a_row: usize) -> Faulty {
        Faulty { in_a_row, ..self }
    }

    /// Only objects that hold this in their path fail.
    pub fn only(self, part: &str) -> Faulty {
        Faulty { only: part.to_owned(), ..self }
    }

    /// Only what writes fails, and it always does.
    pub fn only_puts(self) -> Faulty {
        Faulty { only_puts: true, in_a_row: usize::MAX, ..self }
    }

    /// Nothing fails until an object that may fail is written. That write has the fault `first`; every later request for such an
    /// object, or every later write where only writes fail, has the fault `then`.
    pub fn first_and_then(self, first: Option<Fault>, then: Fault) -> Faulty {
        Faulty { first_and_then: Some((first, then)), ..self }
    }

    /// Conditions of puts are treated so.
    pub fn conditions(self, conditions: Conditions) -> Faulty {
        Faulty { conditions, ..self }
    }

    /// The fault of a request, if it has one, and a number that chooses the place in a body.
    fn fault(&self, path: &Path) -> Option<(Fault, usize)> {
        let number = self.asked.requests.fetch_add(1, Ordering::SeqCst) as u64;
        let is_calm = self.faults.is_empty() || self.is_calm.load(Ordering::SeqCst);
        if is_calm || !path.as_ref().contains(&self.only) {
            return None;
        }
        if let Some((_, then)) = self.first_and_then {
            return self.was_first.load(Ordering::SeqCst).then_some((then, 0));
        }
        let random = xxh3_64_with_seed(path.as_ref().as_bytes(), self.seed ^ (number << 20));
        let mut failed = self.failed.lock().unwrap();
        let in_a_row = failed.entry(path.to_string()).or_default();
        if random % 100 >= self.percent || *in_a_row >= self.in_a_row {
            *in_a_row = 0;
            return None;
        }
        *in_a_row += 1;
        let fault = self.faults[(random >> 32) as usize % self.faults.len()];
        Some((fault, (random >> 7) as usize & 0xff_ffff))
    }

    /// Whether nothing that may fail was written before.
    fn is_first(&self, path: &Path) -> bool {
        let is_calm = self.is_calm.load(Ordering::SeqCst);
        let may_fail = !is_calm && path.as_ref().contains(&self.only);
        may_fail && !self.was_first.swap(true, Ordering::SeqCst)
    }

    /// A client that asks for the same range again, or for its rest, at last gets the right bytes.
    fn may_flip(&self, path: &Path, end: u64) -> bool {
        let mut flipped = self.flipped.lock().unwrap();
        let flips = flipped.entry((path.to_string(), end)).or_default();
        *flips += 1;
        *flips <= self.in_a_row
    }
}

/// A store with the files of a folder below `set`.
pub fn in_memory(folder: &FilePath) -> InMemory {
    let store = InMemory::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let path = Path::from("set").join(entry.file_name().to_str().unwrap());
        let bytes = std::fs::read(entry.path()).unwrap();
        now(store.put(&path, bytes.into())).unwrap();
    }
    store
}

/// The value of a future that does not wait: stores in memory do not.
pub fn now<T>(future: impl Future<Output = T>) -> T {
    futures_util::FutureExt::now_or_never(future).expect("a store in memory does not wait")
}

/// One more request under way, until it is dropped.
struct Under(Arc<Asked>);

impl Under {
    fn way(asked: &Arc<Asked>) -> Under {
        let at_once = asked.at_once.fetch_add(1, Ordering::SeqCst) + 1;
        asked.most_at_once.fetch_max(at_once, Ordering::SeqCst);
        Under(Arc::clone(asked))
    }
}

impl Drop for Under {
    fn drop(&mut self) {
        self.0.at_once.fetch_sub(1, Ordering::SeqCst);
    }
}

fn refused(location: &Path) -> Error {
    let source = "403 Forbidden".into();
    Error::PermissionDenied { path: location.to_string(), source }
}

fn broken() -> Error {
    Error::Generic { store: "Faulty", source: "the connection broke".into() }
}

#[async_trait]
impl ObjectStore for Faulty {
    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let under = Under::way(&self.asked);
        let (fault, place) = self.fault(location).filter(|_| !self.only_puts).unzip();
        match fault {
            Some(Fault::Busy) => {
                let source = "503 Service Unavailable".into();
                return Err(Error::Generic { store: "Faulty", source });
            }
            Some(Fault::Silence) => pending().await,
            Some(Fault::Missing) => {
                let path = location.to_string();
                return Err(Error::NotFound { path, source: "no such key".into() });
            }
            Some(Fault::Refused) => return Err(refused(location)),
            _ => {}
        }
        let result = self.inner.get_opts(location, options).await?;
        let (meta, range) = (result.meta.clone(), result.range.clone());
        let (attributes, extensions) = (result.attributes.clone(), result.extensions.clone());
        let mut bytes = result.bytes().await?.to_vec();
        let half = bytes.len() / 2;
        if let (Some(Fault::Flip), Some(place), 1..) = (fault, place, bytes.len())
            && self.may_flip(location, range.end)
        {
            let place = place % bytes.len();
            bytes[place] ^= 4;
        }
        let is_cut = matches!(fault, Some(Fault::Stall | Fault::Break | Fault::Truncate));
        let sent = if is_cut { half } else { bytes.len() };
        {
            let mut objects = self.asked.objects.lock().unwrap();
            let (requests, all) = objects.entry(location.to_string()).or_default();
            *requests += 1;
            *all += sent as u64;
        }
        let bytes = Bytes::from(bytes).slice(..sent);
        // In pieces, as from a network.
        let size = (sent / 3).max(1);
        let pieces: Vec<Result<Bytes>> = pieces(sent, size).map(|r| Ok(bytes.slice(r))).collect();
        let rest: BoxStream<'static, Result<Bytes>> = match fault {
            Some(Fault::Stall) => stream::pending().boxed(),
            Some(Fault::Break) => stream::once(async { Err(broken()) }).boxed(),
            _ => stream::empty().boxed(),
        };
        let body = stream::iter(pieces).chain(rest).map(move |piece| {
            let _held = &under;
            piece
        });
        let payload = GetResultPayload::Stream(body.boxed());
        Ok(GetResult { payload, meta, range, attributes, extensions })
    }

    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        mut options: PutOptions,
    ) -> Result<PutResult> {
        match self.conditions {
            Conditions::Refused if options.mode != PutMode::Overwrite => {
                let (operation, implementer) = ("conditions".to_owned(), self.to_string());
                return Err(Error::NotImplemented { operation, implementer });
            }
            Conditions::PassedOver => options.mode = PutMode::Overwrite,
            _ => {}
        }
        let _under = Under::way(&self.asked);
        self.asked.puts.fetch_add(1, Ordering::SeqCst);
        if location.as_ref().ends_with(".parquet") {
            let _ = self.gate.subscribe().wait_for(|&is_open| is_open).await;
        }
        let fault = match self.first_and_then {
            Some((first, _)) if self.is_first(location) => first,
            _ => self.fault(location).map(|(fault, _)| fault),
        };
        match fault {
            Some(Fault::Silence | Fault::Stall) => pending().await,
            Some(Fault::Refused) => Err(refused(location)),
            Some(Fault::Lost) => {
                self.inner.put_opts(location, payload, options).await?;
                Err(broken())
            }
            // A flip changes bytes only when they are read.
            None | Some(Fault::Flip) => self.inner.put_opts(location, payload, options).await,
            Some(_) => Err(broken()),
        }
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let inner = self.inner.put_multipart_opts(location, options).await?;
        let (asked, gate) = (Arc::clone(&self.asked), Arc::clone(&self.gate));
        Ok(Box::new(Parts { inner, asked, gate }))
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        match self.fault(prefix.unwrap_or(&Path::default())) {
            Some(_) => Err(broken()),
            None => self.inner.list_with_delimiter(prefix).await,
        }
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

/// An object that arrives in parts while the gate is open.
#[derive(Debug)]
struct Parts {
    inner: Box<dyn MultipartUpload>,
    asked: Arc<Asked>,
    gate: Arc<watch::Sender<bool>>,
}

#[async_trait]
impl MultipartUpload for Parts {
    fn put_part(&mut self, part: PutPayload) -> UploadPart {
        self.asked.parts.fetch_add(1, Ordering::SeqCst);
        let (put, mut gate) = (self.inner.put_part(part), self.gate.subscribe());
        Box::pin(async move {
            let _ = gate.wait_for(|&is_open| is_open).await;
            put.await
        })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        self.inner.complete().await
    }

    async fn abort(&mut self) -> Result<()> {
        self.asked.aborted.fetch_add(1, Ordering::SeqCst);
        self.inner.abort().await
    }
}

fn pieces(length: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..length).step_by(size).map(move |start| start..length.min(start + size))
}

impl fmt::Display for Faulty {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a faulty store")
    }
}

impl fmt::Debug for Faulty {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}
