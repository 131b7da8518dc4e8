//! Threads that fetch shards ahead, and decoding threads that fetch what they cannot wait for.
//!
//! Room in the cache is taken in the order of need, one shard after the other, so that a shard
//! never waits for room that a later one has taken; downloads then go on side by side.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ops::Range,
    path::Path,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use super::{
    Fetcher, limit, neighbours,
    wanted::{Access, Wanted},
};
use crate::{
    cache::{
        disk::{Key, Room, ShardCache, Urgency},
        memory::BoundedCache,
    },
    data_set::shards::{Files, Remote, Shards},
    error::DataError,
    order::{CanonicalOrder, SampleId},
    shard::ShardFile,
    store::{Cancel, RemoteFolder},
};

/// How long to wait before looking again at what another process does.
const OTHERS: Duration = Duration::from_millis(20);

/// Remote objects that are open because more of their ranges may be needed.
const OPEN_OBJECTS: usize = 256;

/// See the [module](self).
pub(crate) struct Crew {
    pub(super) shards: Shards,
    pub(super) order: CanonicalOrder,
    pub(super) folder: RemoteFolder,
    cancel: Cancel,
    wanted: Wanted,
    /// None where no shard is wanted whole.
    cache: Option<ShardCache>,
    /// What the cache must hold for it at once.
    needed_bytes: u64,
    pub(super) keys: Vec<Key>,
    by_key: HashMap<Key, usize>,
    objects: BoundedCache<usize, ShardFile>,
    requests: usize,
    /// Held by the one who takes room for a shard ahead of its need.
    turn: Mutex<()>,
    pub(super) state: Mutex<State>,
    /// Something in the state is otherwise.
    changed: Condvar,
}

#[derive(Default)]
pub(super) struct State {
    is_closed: bool,
    readers: BTreeMap<u64, Place>,
    /// Where the last of them is, or was.
    pub(super) position: Option<u64>,
    /// The shard needed first from there on.
    head: Option<(usize, u64)>,
    in_work: HashSet<usize>,
    /// Decoding threads that wait for a request to end, or take room. Nobody takes room ahead of
    /// them, or there might be none for them but that of a shard which is needed as soon.
    urgent: usize,
    /// Shards that were seen to be in the cache, and were not dropped by this process.
    present: HashSet<usize>,
    /// Shards that another process is at. Forgotten when the head moves.
    skipped: HashSet<usize>,
    /// Shards that failed ahead of their need: why, the reader that needs them will find out.
    failed: HashSet<usize>,
    /// Nothing fits into the cache ahead of its need. Forgotten when the head moves.
    is_full: bool,
    pub(super) ranks: Option<neighbours::Ranks>,
}

/// Where a reader is.
#[derive(Default)]
struct Place {
    /// Where its batches begin that are being decoded.
    in_work: Vec<u64>,
    /// Behind the last of them.
    end: u64,
}

impl Place {
    fn position(&self) -> u64 {
        self.in_work.iter().copied().min().unwrap_or(self.end)
    }
}

/// A shard to fetch ahead.
struct Ahead {
    shard: usize,
    /// Its place in the order.
    rank: u64,
    /// What was needed first.
    head: Option<(usize, u64)>,
}

/// What became of an attempt to have a shard in the cache.
pub(super) enum Fetched {
    Landed(Arc<ShardFile>),
    /// Another process, or another decoder, is at it.
    OnItsWay,
    NoRoom,
}

impl Crew {
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
        // What others of this process need of the limit.
        let others = folder.as_ref().map_or_else(|_| Vec::new(), |folder| neighbours::of(folder));
        let taken_bytes = others.iter().map(|crew| crew.needed_bytes).sum();
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
        let crew = Arc::new(Crew {
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
            turn: Mutex::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        // Made before the threads: if one fails to start, those before it end with this.
        let fetcher = Fetcher::Remote(Arc::clone(&crew));
        neighbours::join(&crew);
        if crew.cache.is_some() {
            for number in 0..requests.min(shards.shards().len()) {
                let crew = Arc::clone(&crew);
                thread::Builder::new()
                    .name(format!("tidemill-fetch-{number}"))
                    .spawn(move || crew.work_ahead())
                    .map_err(DataError::io("start a thread to fetch", shards.path()))?;
            }
        }
        Ok(fetcher)
    }

    /// Whether it keeps shards in the cache of a folder.
    pub(super) fn uses(&self, folder: &Path) -> bool {
        let is_there = self.cache.as_ref().is_some_and(|cache| cache.folder() == folder);
        is_there && !self.lock().is_closed
    }

    /// The shard that a key is of, where it is one of these.
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

    pub(super) fn enter(&self, reader: u64, positions: Range<u64>) {
        let mut state = self.lock();
        let place = state.readers.entry(reader).or_default();
        place.in_work.push(positions.start);
        place.end = place.end.max(positions.end);
        self.moved(state);
    }

    pub(super) fn exit(&self, reader: u64, position: u64) {
        let mut state = self.lock();
        // The reader may have left.
        let Some(place) = state.readers.get_mut(&reader) else { return };
        if let Some(at) = place.in_work.iter().position(|&of| of == position) {
            place.in_work.swap_remove(at);
        }
        self.moved(state);
    }

    pub(super) fn leave(&self, reader: u64) {
        let mut state = self.lock();
        state.readers.remove(&reader);
        self.moved(state);
    }

    /// A reader moved: what is needed first may be another shard.
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

    /// A shard that is not there, on a thread that cannot go on without it.
    fn fetch_now(&self, cache: &ShardCache, shard: usize) -> Result<Arc<ShardFile>, DataError> {
        let entry = &self.shards.shards()[shard];
        let (mut without_room_since, mut on_its_way_since) = (None, None);
        loop {
            let mut state = self.lock();
            state.present.remove(&shard);
            state.urgent += 1;
            let urgent = Urgent(self);
            while !state.is_closed
                && (state.in_work.contains(&shard) || state.in_work.len() >= self.requests)
            {
                state = self.wait(state);
            }
            if state.is_closed {
                drop(state);
                return Err(DataError::Cancelled { url: entry.path().display().to_string() });
            }
            state.in_work.insert(shard);
            drop(state);
            let work = Work { crew: self, shard };
            if let Some(file) = cache.find(&self.keys[shard], entry)? {
                return Ok(Arc::new(file));
            }
            let is_overdue =
                |since: Instant| since.elapsed() > self.folder.settings().operation_deadline;
            // Who is at it may stand still, and holds its lock all the same.
            let urgency = if on_its_way_since.is_some_and(is_overdue) {
                Urgency::AtLast
            } else {
                Urgency::Now
            };
            let room = self.make_room(cache, shard, urgency)?;
            drop(urgent);
            match self.fetch(cache, shard, urgency, room)? {
                Fetched::Landed(file) => {
                    // As long as the file is held nobody drops it.
                    self.lock().present.insert(shard);
                    return Ok(file);
                }
                Fetched::OnItsWay => {
                    without_room_since = None;
                    on_its_way_since.get_or_insert_with(Instant::now);
                }
                Fetched::NoRoom => {
                    let since = *without_room_since.get_or_insert_with(Instant::now);
                    if is_overdue(since) {
                        return Err(DataError::CacheInUse {
                            path: cache.folder().to_owned(),
                            limit_bytes: cache.limit_bytes().unwrap_or(u64::MAX),
                            bytes: entry.bytes(),
                        });
                    }
                }
            }
            drop(work);
            // What others do is not told here; that the crew is closed is.
            let state = self.lock();
            if !state.is_closed {
                let waited = self.changed.wait_timeout(state, OTHERS);
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

    /// The life of a thread that fetches ahead.
    fn work_ahead(&self) {
        let Some(cache) = &self.cache else { return };
        loop {
            let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(Ahead { shard, rank, head }) = self.next_ahead() else { return };
            let work = Work { crew: self, shard };
            // To drop what the next epoch needs, long before this one needs what it is dropped for,
            // is to download more in all: only what is needed soon is worth it.
            let before = if rank < self.requests as u64 { rank } else { u64::MAX };
            let urgency = Urgency::Ahead { rank, before };
            let room = match cache.find(&self.keys[shard], &self.shards.shards()[shard]) {
                Ok(Some(file)) => Ok(Err(Arc::new(file))),
                _ => self.make_room(cache, shard, urgency).map(Ok),
            };
            if let Ok(Ok(Room::None)) = &room {
                // Before anybody else has a turn: a smaller shard that is needed later might fit
                // where this one does not, and would have to make room for it after all.
                let mut state = self.lock();
                state.is_full |= state.head == head;
                drop(state);
                drop(work);
                continue;
            }
            drop(turn);
            let fetched = room.and_then(|room| match room {
                Ok(room) => self.fetch(cache, shard, urgency, room),
                Err(file) => Ok(Fetched::Landed(file)),
            });
            let mut state = self.lock();
            match fetched {
                Ok(Fetched::Landed(_)) => drop(state.present.insert(shard)),
                // On the disk, when some of it was there already.
                Ok(Fetched::NoRoom) => state.is_full |= state.head == head,
                Ok(Fetched::OnItsWay) => drop(state.skipped.insert(shard)),
                Err(_) => drop(state.failed.insert(shard)),
            }
            drop(state);
            drop(work);
        }
    }

    /// Waits for a shard to fetch ahead; none when there is no more.
    fn next_ahead(&self) -> Option<Ahead> {
        let mut state = self.lock();
        loop {
            if state.is_closed {
                return None;
            }
            let is_free = state.urgent == 0 && state.in_work.len() < self.requests;
            if let (true, false, Some(position)) = (is_free, state.is_full, state.position) {
                let mut bytes = 0_u64;
                let within = self.upcoming(position).enumerate().take_while(|&(_, shard)| {
                    let is_within = bytes < self.folder.settings().ahead_bytes;
                    bytes = bytes.saturating_add(self.keys[shard].bytes());
                    is_within
                });
                // After as many as there are, shards repeat.
                let next = within.take(self.keys.len()).find(|(_, shard)| {
                    !(state.present.contains(shard)
                        || state.skipped.contains(shard)
                        || state.failed.contains(shard)
                        || state.in_work.contains(shard))
                });
                if let Some((rank, shard)) = next {
                    state.in_work.insert(shard);
                    return Some(Ahead { shard, rank: rank as u64, head: state.head });
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
        let mut room = self.folder.settings().ahead_bytes;
        for sample in samples.iter().filter(|sample| shards.contains(&sample.shard)) {
            let Ok(footer) = self.shards.footer(sample.shard, self) else { continue };
            let (group, _) = footer.group_of(sample.row);
            if is_decoded(sample.shard, group) {
                continue;
            }
            for range in footer.chunk_ranges(group, self.shards.rows()) {
                let bytes = range.end - range.start;
                if bytes <= room && self.file(sample.shard)?.begin(range) {
                    room -= bytes;
                }
            }
        }
        Ok(())
    }
}

impl Files for Crew {
    fn file(&self, shard: usize) -> Result<Arc<ShardFile>, DataError> {
        Crew::file(self, shard)
    }
}

/// A decoding thread that wants a shard. Dropping it, with the state not locked, lets others go on.
struct Urgent<'a>(&'a Crew);

impl Drop for Urgent<'_> {
    fn drop(&mut self) {
        self.0.lock().urgent -= 1;
        self.0.changed.notify_all();
    }
}

/// A shard that is being fetched. Dropping it tells those who wait.
struct Work<'a> {
    crew: &'a Crew,
    shard: usize,
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        self.crew.lock().in_work.remove(&self.shard);
        self.crew.changed.notify_all();
    }
}
