//! The prefetcher: its threads download shards ahead of their need, and decoding threads download the
//! shards that they need at once.
//!
//! Shards are admitted to the cache in the order of need, one after the other, so that a shard never
//! waits for bytes that a later one has taken; admitted shards are downloaded side by side.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ops::Range,
    path::Path,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use super::{
    Fetcher, limit, registry,
    wanted::{Access, Wanted},
};
use crate::{
    cache::{
        disk::{Admission, Key, Priority, ShardCache},
        memory::BoundedCache,
    },
    data_set::shards::{Files, Remote, Shards},
    error::DataError,
    order::{CanonicalOrder, SampleId},
    shard::ShardFile,
    store::{Cancel, RemoteFolder},
};

/// How long to wait before looking again at the downloads of other processes.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Remote objects that stay open because more of their ranges may be needed.
const OPEN_OBJECTS: usize = 256;

/// See the [module](self).
pub(crate) struct Prefetcher {
    pub(super) shards: Shards,
    pub(super) order: CanonicalOrder,
    pub(super) folder: RemoteFolder,
    cancel: Cancel,
    wanted: Wanted,
    /// None where no shard is wanted whole.
    cache: Option<ShardCache>,
    /// Bytes that the cache must hold at once for this stream.
    needed_bytes: u64,
    pub(super) keys: Vec<Key>,
    by_key: HashMap<Key, usize>,
    objects: BoundedCache<usize, ShardFile>,
    requests: usize,
    /// Held by the thread that asks to admit a shard ahead of its need.
    admitting: Mutex<()>,
    pub(super) state: Mutex<State>,
    /// Notified after every change of the state.
    changed: Condvar,
}

#[derive(Default)]
pub(super) struct State {
    is_closed: bool,
    readers: BTreeMap<u64, Place>,
    /// The position of the reader that is furthest behind; the last one known, where all have left.
    pub(super) position: Option<u64>,
    /// The shard needed first from that position on, and the position of that need.
    head: Option<(usize, u64)>,
    in_flight: HashSet<usize>,
    /// Decoding threads that wait for a request to end, or ask to admit a shard. Meanwhile no shard is
    /// admitted ahead of its need, or only shards that are needed as soon might be left to evict.
    waiting_decoders: usize,
    /// Shards that were seen in the cache, and were not evicted by this process.
    present: HashSet<usize>,
    /// Shards that another process downloads. Forgotten when the head moves.
    skipped: HashSet<usize>,
    /// Shards that failed ahead of their need; a reader that needs one tries again and gets the error.
    failed: HashSet<usize>,
    /// No shard can be admitted ahead of its need. Forgotten when the head moves.
    is_full: bool,
    pub(super) ranks: Option<registry::Ranks>,
}

/// Where a reader is.
#[derive(Default)]
struct Place {
    /// The first positions of its batches that are being decoded.
    batches: Vec<u64>,
    /// The end of the furthest batch so far.
    end: u64,
}

impl Place {
    fn position(&self) -> u64 {
        self.batches.iter().copied().min().unwrap_or(self.end)
    }
}

/// A shard to fetch ahead.
struct Candidate {
    shard: usize,
    /// Its place in the order.
    rank: u64,
    /// The shard that was needed first then, as in the state.
    head: Option<(usize, u64)>,
}

/// The outcome of an attempt to bring a shard into the cache.
pub(super) enum Fetched {
    Done(Arc<ShardFile>),
    /// Another process, or another decoder, downloads it.
    InProgress,
    CacheFull,
}

impl Prefetcher {
    pub(super) fn start(
        shards: &Shards,
        remote: &Remote,
        order: &CanonicalOrder,
        positions: Option<Range<u64>>,
        threads: usize,
    ) -> Result<Fetcher, DataError> {
        let cancel = Cancel::default();
        let limit_bytes = remote.settings.cache.limit_bytes;
        let order = shards.order(order.settings())?;
        let folder = remote.settings.cache.folder(remote.folder.location());
        // Other streams of this process need a part of the limit.
        let others =
            folder.as_ref().map_or_else(|_| Vec::new(), |folder| registry::sharing(folder));
        let taken_bytes = others.iter().map(|prefetcher| prefetcher.needed_bytes).sum();
        let left_bytes = limit_bytes.map(|limit| limit.saturating_sub(taken_bytes));
        let wanted = Wanted::new(shards.shards(), &order, positions, left_bytes);
        let whole: Vec<(u64, u64)> = (shards.shards().iter().enumerate())
            .filter(|&(shard, _)| wanted.access(shard) == Access::Whole)
            .map(|(_, shard)| (shard.bytes(), shard.samples()))
            .collect();
        let need = limit::Need::new(&whole, order.settings(), threads);
        let cache = match whole.is_empty() {
            true => None,
            false => {
                let folder = folder?;
                if let Some(limit_bytes) = limit_bytes {
                    need.check(limit_bytes, taken_bytes, &folder)?;
                }
                Some(ShardCache::open(folder, limit_bytes)?)
            }
        };
        let origin = remote.folder.origin();
        let keys: Vec<Key> = shards.shards().iter().map(|shard| shard.key(origin)).collect();
        let requests = remote.settings.store.requests.get();
        let prefetcher = Arc::new(Prefetcher {
            shards: shards.clone(),
            order,
            folder: remote.folder.cancelled_by(cancel.clone()),
            cancel,
            wanted,
            cache,
            needed_bytes: need.bytes(),
            by_key: keys.iter().enumerate().map(|(shard, &key)| (key, shard)).collect(),
            keys,
            objects: BoundedCache::new(OPEN_OBJECTS),
            requests,
            admitting: Mutex::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        // Made before the threads: if one fails to start, dropping this ends the threads started before.
        let fetcher = Fetcher::Remote(Arc::clone(&prefetcher));
        registry::register(&prefetcher);
        if prefetcher.cache.is_some() {
            for number in 0..requests.min(shards.shards().len()) {
                let prefetcher = Arc::clone(&prefetcher);
                thread::Builder::new()
                    .name(format!("tidemill-fetch-{number}"))
                    .spawn(move || prefetcher.prefetch())
                    .map_err(DataError::io("start a thread to fetch", shards.path()))?;
            }
        }
        Ok(fetcher)
    }

    /// Whether this prefetcher keeps shards in the cache of a folder.
    pub(super) fn uses(&self, folder: &Path) -> bool {
        let is_there = self.cache.as_ref().is_some_and(|cache| cache.folder() == folder);
        is_there && !self.lock().is_closed
    }

    /// The shard of a key, where the stream has it.
    pub(super) fn shard_of(&self, key: &Key) -> Option<usize> {
        self.by_key.get(key).copied()
    }

    /// A shard is no longer in the cache.
    pub(super) fn forget(&self, key: &Key) {
        if let Some(shard) = self.shard_of(key) {
            self.lock().present.remove(&shard);
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while the state is half changed: it is used poisoned or not.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.cancel.cancel();
        self.changed.notify_all();
    }

    pub(super) fn begin_batch(&self, reader: u64, positions: Range<u64>) {
        let mut state = self.lock();
        let place = state.readers.entry(reader).or_default();
        place.batches.push(positions.start);
        place.end = place.end.max(positions.end);
        self.moved(state);
    }

    pub(super) fn end_batch(&self, reader: u64, position: u64) {
        let mut state = self.lock();
        // The reader may have left.
        let Some(place) = state.readers.get_mut(&reader) else { return };
        if let Some(at) = place.batches.iter().position(|&of| of == position) {
            place.batches.swap_remove(at);
        }
        self.moved(state);
    }

    pub(super) fn remove_reader(&self, reader: u64) {
        let mut state = self.lock();
        state.readers.remove(&reader);
        self.moved(state);
    }

    /// Finds out which shard is needed first, after a reader has moved.
    fn moved(&self, mut state: MutexGuard<'_, State>) {
        let Some(position) = state.readers.values().map(Place::position).min() else { return };
        if state.position == Some(position) {
            return;
        }
        state.position = Some(position);
        let head = self.order.shards_from(position).next();
        let head = head.map(|first| (first.shard, first.positions.start));
        if state.head != head {
            state.head = head;
            state.skipped.clear();
            state.is_full = false;
            state.ranks = None;
            drop(state);
            self.changed.notify_all();
        }
    }

    pub(super) fn file(&self, shard: usize) -> Result<Arc<ShardFile>, DataError> {
        let entry = &self.shards.shards()[shard];
        match (self.wanted.access(shard), &self.cache) {
            (Access::Whole, Some(cache)) => {
                if let Some(file) = cache.find(&self.keys[shard], entry)? {
                    return Ok(Arc::new(file));
                }
                self.fetch_now(cache, shard)
            }
            _ => self.objects.get_or_load(shard, || Ok(entry.ranges(&self.folder))),
        }
    }

    /// Downloads a shard that a decoding thread needs at once.
    fn fetch_now(&self, cache: &ShardCache, shard: usize) -> Result<Arc<ShardFile>, DataError> {
        let entry = &self.shards.shards()[shard];
        let (mut full_since, mut in_progress_since) = (None, None);
        loop {
            let mut state = self.lock();
            state.present.remove(&shard);
            state.waiting_decoders += 1;
            let waiting = Waiting(self);
            while !state.is_closed
                && (state.in_flight.contains(&shard) || state.in_flight.len() >= self.requests)
            {
                state = self.wait(state);
            }
            if state.is_closed {
                drop(state);
                return Err(DataError::Cancelled { url: entry.path().display().to_string() });
            }
            state.in_flight.insert(shard);
            drop(state);
            let in_flight = InFlight { prefetcher: self, shard };
            if let Some(file) = cache.find(&self.keys[shard], entry)? {
                return Ok(Arc::new(file));
            }
            let is_overdue =
                |since: Instant| since.elapsed() > self.folder.settings().operation_deadline;
            // The process that downloads the shard may have stalled while it holds the lock.
            let priority = if in_progress_since.is_some_and(is_overdue) {
                Priority::Overdue
            } else {
                Priority::Now
            };
            let admission = self.admit(cache, shard, priority)?;
            drop(waiting);
            match self.fetch(cache, shard, priority, admission)? {
                Fetched::Done(file) => {
                    // The open file is locked, so that no process evicts it.
                    self.lock().present.insert(shard);
                    return Ok(file);
                }
                Fetched::InProgress => {
                    full_since = None;
                    in_progress_since.get_or_insert_with(Instant::now);
                }
                Fetched::CacheFull => {
                    let since = *full_since.get_or_insert_with(Instant::now);
                    if is_overdue(since) {
                        return Err(DataError::CacheInUse {
                            path: cache.folder().to_owned(),
                            limit_bytes: cache.limit_bytes().unwrap_or(u64::MAX),
                            bytes: entry.bytes(),
                        });
                    }
                }
            }
            drop(in_flight);
            // Other processes do not notify this one; only a change of this prefetcher's state does.
            let state = self.lock();
            if !state.is_closed {
                let waited = self.changed.wait_timeout(state, POLL_INTERVAL);
                drop(waited.unwrap_or_else(PoisonError::into_inner));
            }
            if let Some(file) = cache.find(&self.keys[shard], entry)? {
                return Ok(Arc::new(file));
            }
        }
    }

    /// The shards needed whole from a position on, in order.
    pub(super) fn upcoming(&self, position: u64) -> impl Iterator<Item = usize> + '_ {
        let end = self.wanted.end();
        self.order
            .shards_from(position)
            .take_while(move |need| need.positions.start < end)
            .map(|need| need.shard)
            .filter(|&shard| self.wanted.access(shard) == Access::Whole)
    }

    /// The loop of a thread that downloads shards ahead of their need.
    fn prefetch(&self) {
        let Some(cache) = &self.cache else { return };
        loop {
            let admitting = self.admitting.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(Candidate { shard, rank, head }) = self.next_candidate() else { return };
            let in_flight = InFlight { prefetcher: self, shard };
            // A shard that the next epoch needs would have to be downloaded again: it is evicted only for
            // one that is needed soon.
            let before = if rank < self.requests as u64 { rank } else { u64::MAX };
            let priority = Priority::Ahead { rank, before };
            let admission = match cache.find(&self.keys[shard], &self.shards.shards()[shard]) {
                Ok(Some(file)) => Ok(Err(Arc::new(file))),
                _ => self.admit(cache, shard, priority).map(Ok),
            };
            if let Ok(Ok(Admission::Full)) = &admission {
                // Set before the next thread asks: a smaller shard that is needed later might be admitted
                // where this one is not, and would have to be evicted for it.
                let mut state = self.lock();
                state.is_full |= state.head == head;
                drop(state);
                drop(in_flight);
                continue;
            }
            drop(admitting);
            let fetched = admission.and_then(|admission| match admission {
                Ok(admission) => self.fetch(cache, shard, priority, admission),
                Err(file) => Ok(Fetched::Done(file)),
            });
            let mut state = self.lock();
            match fetched {
                Ok(Fetched::Done(_)) => drop(state.present.insert(shard)),
                // The disk became full during the download.
                Ok(Fetched::CacheFull) => state.is_full |= state.head == head,
                Ok(Fetched::InProgress) => drop(state.skipped.insert(shard)),
                Err(_) => drop(state.failed.insert(shard)),
            }
            drop(state);
            drop(in_flight);
        }
    }

    /// Waits for a shard to download ahead of its need; none once the prefetcher is closed.
    fn next_candidate(&self) -> Option<Candidate> {
        let mut state = self.lock();
        loop {
            if state.is_closed {
                return None;
            }
            let is_free = state.waiting_decoders == 0 && state.in_flight.len() < self.requests;
            if let (true, false, Some(position)) = (is_free, state.is_full, state.position) {
                let mut bytes = 0_u64;
                let within = self.upcoming(position).enumerate().take_while(|&(_, shard)| {
                    let is_within = bytes < self.folder.settings().ahead_bytes;
                    bytes = bytes.saturating_add(self.keys[shard].bytes());
                    is_within
                });
                // There are no more different shards than keys.
                let next = within.take(self.keys.len()).find(|(_, shard)| {
                    !(state.present.contains(shard)
                        || state.skipped.contains(shard)
                        || state.failed.contains(shard)
                        || state.in_flight.contains(shard))
                });
                if let Some((rank, shard)) = next {
                    state.in_flight.insert(shard);
                    return Some(Candidate { shard, rank: rank as u64, head: state.head });
                }
            }
            state = self.wait(state);
        }
    }

    pub(super) fn begin(
        &self,
        samples: &[SampleId],
        is_decoded: impl Fn(usize, usize) -> bool,
    ) -> Result<(), DataError> {
        let mut shards = Vec::new();
        for sample in samples {
            if self.wanted.access(sample.shard) == Access::Ranges && !shards.contains(&sample.shard)
            {
                shards.push(sample.shard);
            }
        }
        for &shard in &shards {
            if !self.shards.has_footer(shard) {
                let file = self.file(shard)?;
                file.begin(file.bytes().saturating_sub(1)..file.bytes());
            }
        }
        let mut left_bytes = self.folder.settings().ahead_bytes;
        for sample in samples.iter().filter(|sample| shards.contains(&sample.shard)) {
            let Ok(footer) = self.shards.footer(sample.shard, self) else { continue };
            let (group, _) = footer.group_of(sample.row);
            if is_decoded(sample.shard, group) {
                continue;
            }
            for range in footer.chunk_ranges(group, self.shards.rows()) {
                let bytes = range.end - range.start;
                if bytes <= left_bytes && self.file(sample.shard)?.begin(range) {
                    left_bytes -= bytes;
                }
            }
        }
        Ok(())
    }
}

impl Files for Prefetcher {
    fn file(&self, shard: usize) -> Result<Arc<ShardFile>, DataError> {
        Prefetcher::file(self, shard)
    }
}

/// A decoding thread that waits for a shard. Dropping this wakes other threads; the state must not be locked.
struct Waiting<'a>(&'a Prefetcher);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.lock().waiting_decoders -= 1;
        self.0.changed.notify_all();
    }
}

/// A shard that is being downloaded. Dropping this wakes the threads that wait for it.
struct InFlight<'a> {
    prefetcher: &'a Prefetcher,
    shard: usize,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.prefetcher.lock().in_flight.remove(&self.shard);
        self.prefetcher.changed.notify_all();
    }
}
