//! A store that several writers ask at the same time, in an order that a seed decides.
//!
//! A request waits until every writer waits at one, or is done. Then the seed chooses the writer that goes
//! on, and what becomes of its request: it may be answered; or not arrive; or arrive without an answer; or
//! arrive late, between any two requests of whichever writer. Where each writer asks one request at a time,
//! a seed gives the same run every time. The module around this one names the crate's types of stores.

use std::{
    fmt,
    num::{NonZeroU32, NonZeroUsize},
    ops::{ControlFlow, Range},
    sync::{Arc, Mutex, MutexGuard},
    thread,
    time::Duration,
};

use async_trait::async_trait;
use futures_util::{FutureExt, StreamExt, stream::BoxStream};
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
    memory::InMemory, path::Path,
};
use tokio::sync::oneshot;

use super::{Location, RemoteFolder, StoreSettings};

/// The change that a request makes.
#[derive(Debug, Clone)]
pub enum Change {
    Put(Path, PutPayload, PutOptions),
    Remove(Path),
}

/// Called at each change with the writer, the change, and the store after it.
type Watch = Box<dyn FnMut(usize, &Change, &InMemory) + Send>;

/// The work of a writer with its handle.
type Write<'a, T> = Box<dyn FnOnce(Arc<dyn ObjectStore>) -> T + Send + 'a>;

/// Which of the two writers begins, and how often it has begun before.
#[derive(Clone, Copy)]
pub struct Attempt {
    writer: u64,
    number: u64,
    /// Where this one is to be killed, a number that says when.
    pub killed: Option<u64>,
}

/// The outcome of a request.
#[derive(Debug, Clone, Copy)]
enum Fate {
    Answered,
    AnswerLost,
    Late,
    NotSent,
}

enum Turn {
    /// It does something else than to ask.
    Running,
    Waiting(oneshot::Sender<Fate>),
    Done,
}

/// See the module.
struct Store {
    inner: InMemory,
    state: Mutex<State>,
}

struct State {
    random: u64,
    /// The percentage of requests that fail, and that of decisions that let another writer continue.
    failing: u64,
    switching: u64,
    turns: Vec<Turn>,
    last: usize,
    /// Requests of a writer that still fail, one after the other.
    outage: Vec<u32>,
    late: Vec<(usize, Change)>,
    changed: Watch,
}

impl Attempt {
    /// A name that no other attempt has.
    pub fn label(&self) -> String {
        format!("writer {}, attempt {}", self.writer, self.number)
    }
}

/// A folder of the store, with one request at a time, of which each is tried three times.
pub fn folder(store: Arc<dyn ObjectStore>, name: &str) -> RemoteFolder {
    let settings = StoreSettings {
        requests: NonZeroUsize::MIN,
        attempts: NonZeroU32::new(3).unwrap(),
        outage: Duration::ZERO,
        back_off: Duration::ZERO,
        progress_deadline: Duration::from_secs(60),
        ..StoreSettings::default()
    };
    let location = Location::parse(&format!("memory://store/{name}")).unwrap();
    RemoteFolder::of_store(store, Path::from(name), location, &settings)
}

/// Two writers of a store that is empty at first. Each begins at most `attempts` times, until it breaks off.
/// Answers their results, the objects that are there then, and the state that `see` has formed of all changes.
pub fn two_writers<T: Send, W: Default + Send + 'static>(
    seed: u64,
    attempts: u64,
    see: fn(&mut W, usize, &Change, &InMemory),
    write: impl Fn(Arc<dyn ObjectStore>, Attempt) -> ControlFlow<T, T> + Sync,
) -> (Vec<Vec<T>>, InMemory, W) {
    let (store, witness) = (InMemory::new(), Arc::new(Mutex::new(W::default())));
    let changed = {
        let witness = Arc::clone(&witness);
        move |writer: usize, change: &Change, store: &InMemory| {
            see(&mut witness.lock().unwrap(), writer, change, store);
        }
    };
    let write = &write;
    let begin = |writer: u64| -> Write<'_, Vec<T>> {
        Box::new(move |store| {
            let mut results = Vec::new();
            for number in 0..attempts {
                let is_killed = killed(seed) == Some(writer) && number == 0;
                let killed = is_killed.then_some(seed / 12);
                match write(Arc::clone(&store), Attempt { writer, number, killed }) {
                    ControlFlow::Continue(result) => results.push(result),
                    ControlFlow::Break(result) => {
                        results.push(result);
                        break;
                    }
                }
            }
            results
        })
    };
    let results = interleave(seed, &store, changed, (0..2).map(begin).collect());
    let witness = std::mem::take(&mut *witness.lock().unwrap());
    (results, store, witness)
}

/// The writer that is killed at its first attempt, where one is.
pub fn killed(seed: u64) -> Option<u64> {
    Some((seed / 4) % 3).filter(|&writer| writer < 2)
}

/// Lets each of `writers` ask the store through a handle of its own, on a thread of its own, until all are
/// done and every late request has arrived. `changed` is called with every change that takes effect.
fn interleave<T: Send>(
    seed: u64,
    inner: &InMemory,
    changed: impl FnMut(usize, &Change, &InMemory) + Send + 'static,
    writers: Vec<Write<'_, T>>,
) -> Vec<T> {
    let mut state = State {
        random: seed,
        failing: 0,
        switching: 0,
        turns: writers.iter().map(|_| Turn::Running).collect(),
        last: 0,
        outage: vec![0; writers.len()],
        late: Vec::new(),
        changed: Box::new(changed),
    };
    state.failing = if is_calm(seed) { 0 } else { [5, 15, 40][state.below(3)] };
    state.switching = [5, 20, 60][state.below(3)];
    let store = Arc::new(Store { inner: inner.clone(), state: Mutex::new(state) });
    let results = thread::scope(|scope| {
        let threads: Vec<_> = (writers.into_iter().enumerate())
            .map(|(number, write)| {
                let done = Done { store: Arc::clone(&store), number };
                let writer = Arc::new(Writer { store: Arc::clone(&store), number });
                scope.spawn(move || {
                    let _done = done;
                    write(writer)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut state = store.lock();
    while state.arrive(&store.inner).is_continue() {}
    results
}

/// The seeds to try: these, or as many as the environment says (`TIDEMILL_TEST_SEEDS`).
pub fn seeds(usual: Range<u64>) -> Range<u64> {
    std::env::var("TIDEMILL_TEST_SEEDS").map_or(usual, |seeds| 0..seeds.parse().unwrap())
}

/// Whether nothing fails with this seed.
pub fn is_calm(seed: u64) -> bool {
    seed.is_multiple_of(4)
}

/// The value of a future that does not wait: stores in memory do not.
pub fn now<T>(future: impl Future<Output = T>) -> T {
    future.now_or_never().expect("a store in memory does not wait")
}

impl State {
    /// A number below `end`, of the seed's sequence (splitmix64).
    fn below(&mut self, end: usize) -> usize {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.random ^ (self.random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % end as u64) as usize
    }

    fn percent(&mut self, percent: u64) -> bool {
        (self.below(100) as u64) < percent
    }

    /// Lets a writer go on, once all of them wait or are done.
    fn go_on(&mut self, inner: &InMemory) {
        if self.turns.iter().any(|turn| matches!(turn, Turn::Running)) {
            return;
        }
        while self.percent(25) && self.arrive(inner).is_continue() {}
        let waiting: Vec<usize> = (0..self.turns.len())
            .filter(|&writer| matches!(self.turns[writer], Turn::Waiting(_)))
            .collect();
        if waiting.is_empty() {
            return;
        }
        let stays = waiting.contains(&self.last) && !self.percent(self.switching);
        let chosen = if stays { self.last } else { waiting[self.below(waiting.len())] };
        self.last = chosen;
        let fate = self.fate(chosen);
        if let Turn::Waiting(asker) = std::mem::replace(&mut self.turns[chosen], Turn::Running) {
            // One that no longer waits for its answer goes on all the same.
            let _ = asker.send(fate);
        }
    }

    fn fate(&mut self, writer: usize) -> Fate {
        if self.failing > 0 && self.percent(2) {
            self.outage[writer] = 12;
        }
        let is_outage = self.outage[writer] > 0;
        self.outage[writer] = self.outage[writer].saturating_sub(1);
        if !is_outage && !self.percent(self.failing) {
            return Fate::Answered;
        }
        [Fate::AnswerLost, Fate::Late, Fate::NotSent][self.below(3)]
    }

    /// One of the late requests arrives, where there is one.
    fn arrive(&mut self, inner: &InMemory) -> ControlFlow<()> {
        if self.late.is_empty() {
            return ControlFlow::Break(());
        }
        let at = self.below(self.late.len());
        let (writer, change) = self.late.swap_remove(at);
        let _ = self.apply(writer, change, inner);
        ControlFlow::Continue(())
    }

    fn apply(
        &mut self,
        writer: usize,
        change: Change,
        inner: &InMemory,
    ) -> Result<Option<PutResult>> {
        let result = match change.clone() {
            Change::Put(path, payload, options) => {
                now(inner.put_opts(&path, payload, options)).map(Some)
            }
            Change::Remove(path) => now(inner.delete(&path)).map(|()| None),
        };
        if result.is_ok() {
            (self.changed)(writer, &change, inner);
        }
        result
    }
}

impl Store {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

/// Says that a writer is done, however it ended.
struct Done {
    store: Arc<Store>,
    number: usize,
}

impl Drop for Done {
    fn drop(&mut self) {
        let mut state = self.store.lock();
        state.turns[self.number] = Turn::Done;
        state.go_on(&self.store.inner);
    }
}

/// A writer's handle.
struct Writer {
    store: Arc<Store>,
    number: usize,
}

impl Writer {
    async fn turn(&self) -> Fate {
        let (asker, answer) = oneshot::channel();
        {
            let mut state = self.store.lock();
            state.turns[self.number] = Turn::Waiting(asker);
            state.go_on(&self.store.inner);
        }
        answer.await.unwrap_or(Fate::NotSent)
    }

    /// A request that only reads.
    async fn read(&self) -> Result<&InMemory> {
        match self.turn().await {
            Fate::Answered => Ok(&self.store.inner),
            _ => Err(broken()),
        }
    }

    async fn change(&self, change: Change) -> Result<Option<PutResult>> {
        let fate = self.turn().await;
        let mut state = self.store.lock();
        match fate {
            Fate::Answered => state.apply(self.number, change, &self.store.inner),
            Fate::AnswerLost => {
                let _ = state.apply(self.number, change, &self.store.inner);
                Err(broken())
            }
            Fate::Late => {
                state.late.push((self.number, change));
                Err(broken())
            }
            Fate::NotSent => Err(broken()),
        }
    }
}

fn broken() -> Error {
    Error::Generic { store: "Interleaved", source: "the connection broke".into() }
}

#[async_trait]
impl ObjectStore for Writer {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let change = Change::Put(location.clone(), payload, options);
        Ok(self.change(change).await?.expect("a put has a result"))
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let (operation, implementer) = ("parts".to_owned(), self.to_string());
        Err(Error::NotImplemented { operation, implementer })
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.read().await?.get_opts(location, options).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let writer = Arc::new(Writer { store: Arc::clone(&self.store), number: self.number });
        let removed = locations.then(move |location| {
            let writer = Arc::clone(&writer);
            async move {
                let location = location?;
                writer.change(Change::Remove(location.clone())).await?;
                Ok(location)
            }
        });
        removed.boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.store.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.read().await?.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        let (operation, implementer) = ("copies".to_owned(), self.to_string());
        Err(Error::NotImplemented { operation, implementer })
    }
}

impl fmt::Display for Writer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "writer {} of a store", self.number)
    }
}

impl fmt::Debug for Writer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}
