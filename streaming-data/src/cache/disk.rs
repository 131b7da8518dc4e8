//! Downloaded shards in a folder, shared by the processes of a machine.
//!
//! A shard is named by the place of its data set and by its content (or, where no index states a
//! hash, by its URL, size and etag): the processes that read a data set share it, and no data set can
//! plant a shard for another. It is written to a part file in the same folder, which is renamed when it is
//! whole.
//!
//! Processes share no memory: a process that uses a file holds a lock on the file itself, which the
//! kernel releases when the process ends, however it ends.
//!
//! | file | lock held | meaning |
//! |---|---|---|
//! | `tidemill-<key>-<bytes>.shard` | shared | the shard is being read, and is not dropped |
//! | `tidemill-<key>-<bytes>.<process>-<n>.part` | exclusive | the shard is being downloaded |
//! | the same | none | its process died: the next process that finds it removes it |
//! | `tidemill.lock` | exclusive | files are being made, renamed, counted or dropped, which takes very little time |
//!
//! Contract:
//! - A file with a name outside of this scheme is never removed.
//! - A part file has its full length from its beginning, so that the sum of lengths counts downloads
//!   too. Shards are evicted before a part file is made: the folder never exceeds its limit.
//! - A shard is hashed before its first use in a process. Where no index states a hash, its footer is
//!   compared with the one from the opening of the data set, and its row groups with the hashes that the
//!   footer states; such a shard was synced before it was renamed.
//! - The folder must be on a file system with locks (`flock`), as local ones and NFS are.

use std::{
    collections::HashMap,
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use tidemill_files::lock::{Attempt, Lock, is_same_file};

use crate::{
    error::DataError,
    hash::ContentHasher,
    shard::{Shard, ShardFile},
};

mod key;

pub(crate) use key::Key;
use key::Name;

/// The file that is locked for all others.
const LOCK_FILE: &str = "tidemill.lock";

/// See the [module](self).
pub(crate) struct ShardCache {
    folder: PathBuf,
    limit_bytes: Option<u64>,
    /// Verified files, and when each was written.
    verified: Mutex<HashMap<Key, SystemTime>>,
}

/// For how long the folder's lock is tried, and the pause between two attempts.
const LOCK_PATIENCE: Duration = Duration::from_secs(600);
const LOCK_PAUSE: Duration = Duration::from_millis(1);

/// Numbers the part files of this process.
static PARTS: AtomicU64 = AtomicU64::new(0);

/// The answer to a shard that asks to be downloaded into the cache.
pub(crate) enum Admission {
    /// The shard may be downloaded into this part file.
    Granted(Box<Part>),
    /// Another process or thread downloads the shard, or has just done so.
    InProgress,
    /// The cache is full of shards that may not be evicted now, or the stream has passed the need for the shard.
    Full,
}

/// How soon a shard is needed, which decides what may be evicted for it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Priority {
    /// At once: every shard that is needed later may be evicted for it.
    Now,
    /// As `Now`, and another process's download of the shard is no longer waited for: it may have stalled.
    Overdue,
    /// Ahead of its need: it is number `rank` in the order of need. It is not admitted once that need
    /// has passed, and only shards needed after number `before` are evicted for it.
    Ahead { rank: u64, before: u64 },
}

impl Priority {
    /// Only shards needed after this number in the order of need may be evicted.
    fn before(self) -> u64 {
        match self {
            Priority::Now | Priority::Overdue => 0,
            Priority::Ahead { before, .. } => before,
        }
    }
}

/// The answer to an eviction on a full disk.
pub(crate) enum Eviction {
    /// A shard was evicted.
    Done,
    /// No shard may be evicted now, but some are being downloaded and may be evicted afterwards.
    Pending,
    /// No shard may be evicted, and none is being downloaded.
    Impossible,
}

/// The future uses of cached shards, as far as this process knows them.
pub(crate) trait FutureUse {
    /// When a shard is needed again: the larger, the later; none where no use is known.
    fn next_use(&self, key: &Key) -> Option<u64>;

    /// A shard was evicted.
    fn evicted(&self, key: &Key);
}

/// Bytes in the cache, and the state of one shard there.
struct Usage {
    /// Bytes of all files.
    held_bytes: u64,
    is_cached: bool,
    is_downloading: bool,
}

/// A file of the cache that may be evicted unless a process uses it.
struct Candidate {
    key: Key,
    path: PathBuf,
    bytes: u64,
    next_use: Option<u64>,
}

impl ShardCache {
    /// Opens the folder, which is made where there is none, and removes part files of dead processes.
    ///
    /// # Errors
    /// [`DataError::Io`] when the folder cannot be made, read, written or locked.
    pub(crate) fn open(folder: PathBuf, limit_bytes: Option<u64>) -> Result<ShardCache, DataError> {
        fs::create_dir_all(&folder).map_err(DataError::io("make cache", &folder))?;
        let cache = ShardCache { folder, limit_bytes, verified: Mutex::default() };
        let _locked = cache.lock_folder()?;
        cache.remove_dead_parts()?;
        Ok(cache)
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn limit_bytes(&self) -> Option<u64> {
        self.limit_bytes
    }

    /// The cached shard of a key, locked so that no process evicts it. A cached file with wrong content
    /// is removed.
    pub(crate) fn find(&self, key: &Key, known: &Shard) -> Result<Option<ShardFile>, DataError> {
        let place = self.folder.join(Name::Shard(*key).to_string());
        let file = match File::open(&place) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(DataError::io("open cached shard", place)(error)),
        };
        match file.try_lock_shared() {
            Ok(()) => {}
            // Another process evicts it.
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => {
                return Err(DataError::io("lock cached shard", place)(error));
            }
        }
        let look = DataError::io("look at cached shard", &place);
        // It may have been dropped between being opened and being locked; from here on it cannot be.
        if !place.try_exists().map_err(look)? {
            return Ok(None);
        }
        let opened = file.metadata().map_err(DataError::io("look at cached shard", &place))?;
        let written = opened.modified().map_err(DataError::io("look at cached shard", &place))?;
        let shard = ShardFile::of_file(known.path(), file)?;
        let mut verified = self.verified.lock().unwrap_or_else(PoisonError::into_inner);
        if verified.get(key) == Some(&written) && shard.bytes() == key.bytes() {
            return Ok(Some(shard.verified()));
        }
        drop(verified);
        let is_right = shard.bytes() == key.bytes()
            && match key.hash() {
                Some(expected) => shard.hash()? == expected,
                None => known.check_parts(&shard)?.is_ok(),
            };
        if !is_right {
            let _locked = self.lock_folder()?;
            // Another process may have found the same, and have put the right file there.
            if fs::metadata(&place).is_ok_and(|there| is_same_file(&there, &opened)) {
                remove(&place)?;
            }
            return Ok(None);
        }
        verified = self.verified.lock().unwrap_or_else(PoisonError::into_inner);
        verified.insert(*key, written);
        Ok(Some(shard.verified()))
    }

    /// Evicts for a shard and begins its part file, unless its download has begun already. The shards that
    /// are evicted are not in use, and are needed last. `future` is called under the folder's lock: an
    /// answer from before the wait for the lock would be out of date.
    pub(crate) fn admit<F: FutureUse>(
        &self,
        key: &Key,
        priority: Priority,
        future: impl FnOnce() -> F,
    ) -> Result<Admission, DataError> {
        let _locked = self.lock_folder()?;
        let Usage { held_bytes, is_cached, is_downloading } = self.usage_of(key)?;
        if is_cached || (is_downloading && !matches!(priority, Priority::Overdue)) {
            return Ok(Admission::InProgress);
        }
        let future = &future();
        if let Priority::Ahead { rank, .. } = priority
            && future.next_use(key).is_none_or(|next| next > rank)
        {
            return Ok(Admission::Full);
        }
        if let Some(limit) = self.limit_bytes {
            let excess = (held_bytes.saturating_add(key.bytes())).saturating_sub(limit);
            if excess > 0 && !self.evict(excess, priority.before(), future)? {
                return Ok(Admission::Full);
            }
        }
        loop {
            let number = PARTS.fetch_add(1, Ordering::Relaxed);
            let name = Name::Part { key: *key, process: std::process::id(), number };
            let path = self.folder.join(name.to_string());
            let mut options = OpenOptions::new();
            let file = match options.read(true).write(true).create_new(true).open(&path) {
                Ok(file) => file,
                // Another container has a process of the same number.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(DataError::io("create", path)(error)),
            };
            let part = Part { path, file, key: *key, hasher: ContentHasher::new(), at: 0 };
            part.file
                .try_lock()
                .map_err(|error| DataError::io("lock", &part.path)(error.into()))?;
            part.file.set_len(key.bytes()).map_err(DataError::io("make room for", &part.path))?;
            return Ok(Admission::Granted(Box::new(part)));
        }
    }

    /// Evicts the shard that is needed last, on a disk that is full.
    pub(crate) fn evict_one<F: FutureUse>(
        &self,
        priority: Priority,
        future: impl FnOnce() -> F,
    ) -> Result<Eviction, DataError> {
        let _locked = self.lock_folder()?;
        if self.evict(1, priority.before(), &future())? {
            return Ok(Eviction::Done);
        }
        let is_part = |(name, _): &(Name, PathBuf)| matches!(name, Name::Part { .. });
        let is_downloading = self.files()?.iter().any(is_part);
        Ok(if is_downloading { Eviction::Pending } else { Eviction::Impossible })
    }

    /// Verifies a complete part file and renames it to its shard; of a wrong one, removes the part file and
    /// answers the fault.
    pub(crate) fn complete(
        &self,
        mut part: Box<Part>,
        known: &Shard,
    ) -> Result<Result<ShardFile, DataError>, DataError> {
        let found = part.hasher.finish();
        if part.key.hash().is_some_and(|expected| expected != found) {
            return Ok(Err(known.wrong_hash(found)));
        }
        let io = |error| DataError::io("write", part.path.clone())(error);
        let file = part.file.try_clone().map_err(io)?;
        let shard = ShardFile::of_file(known.path(), part.file.try_clone().map_err(io)?)?;
        if part.key.hash().is_none() {
            if let Err(wrong) = known.check_parts(&shard)? {
                return Ok(Err(wrong));
            }
            // After a power cut a file of zeros might else pass for the real one.
            part.file.sync_data().map_err(io)?;
        }
        let written = part.file.metadata().and_then(|metadata| metadata.modified()).map_err(io)?;
        let place = self.folder.join(Name::Shard(part.key).to_string());
        {
            let _locked = self.lock_folder()?;
            fs::rename(&part.path, &place).map_err(io)?;
            // Between the two locks the file is unlocked: the folder's lock keeps it from being evicted.
            let shared = file.unlock().and_then(|()| file.lock_shared());
            shared.map_err(DataError::io("lock cached shard", &place))?;
        }
        let mut verified = self.verified.lock().unwrap_or_else(PoisonError::into_inner);
        verified.insert(part.key, written);
        // Dropping the part must not remove the renamed file.
        part.path = PathBuf::new();
        Ok(Ok(shard.verified()))
    }

    /// Adds up all files of the cache, and removes part files of dead processes.
    fn usage_of(&self, of: &Key) -> Result<Usage, DataError> {
        let mut usage = Usage { held_bytes: 0, is_cached: false, is_downloading: false };
        for (name, path) in self.files()? {
            match name {
                Name::Shard(key) => usage.is_cached |= key == *of,
                Name::Part { .. } if is_dead(&path)? => {
                    remove(&path)?;
                    continue;
                }
                Name::Part { key, .. } => usage.is_downloading |= key == *of,
            }
            // A file that is gone by now counts as empty.
            let bytes = path.metadata().map_or(0, |metadata| metadata.len());
            usage.held_bytes = usage.held_bytes.saturating_add(bytes);
        }
        Ok(usage)
    }

    /// Evicts shards, the last needed first, until this many bytes are free; returns whether they are.
    fn evict(&self, bytes: u64, before: u64, future: &dyn FutureUse) -> Result<bool, DataError> {
        let mut candidates = Vec::new();
        for (name, path) in self.files()? {
            let Name::Shard(key) = name else { continue };
            let next_use = future.next_use(&key);
            if next_use.is_none_or(|next| next > before) {
                let bytes = path.metadata().map_or(0, |metadata| metadata.len());
                candidates.push(Candidate { key, path, bytes, next_use });
            }
        }
        // Shards that are never needed again come first, then the shards that are needed last.
        candidates.sort_by_key(|candidate| {
            (candidate.next_use.is_some(), u64::MAX - candidate.next_use.unwrap_or(0))
        });
        // All are locked before any is removed: no shard is lost where the bytes cannot be freed.
        let (mut free, mut dropped) = (0, Vec::new());
        for candidate in candidates {
            if free >= bytes {
                break;
            }
            // A file of another user can be read, but not be evicted.
            if let Ok(Attempt::Taken(lock)) = Lock::attempt_existing(&candidate.path) {
                free += candidate.bytes;
                dropped.push((candidate, lock));
            }
        }
        if free < bytes {
            return Ok(false);
        }
        for (candidate, _locked) in &dropped {
            remove(&candidate.path)?;
            future.evicted(&candidate.key);
        }
        Ok(true)
    }

    /// Removes the part files of dead processes. The caller holds the folder's lock.
    fn remove_dead_parts(&self) -> Result<(), DataError> {
        for (name, path) in self.files()? {
            if matches!(name, Name::Part { .. }) && is_dead(&path)? {
                remove(&path)?;
            }
        }
        Ok(())
    }

    /// The files of the cache, by their names.
    fn files(&self) -> Result<Vec<(Name, PathBuf)>, DataError> {
        let io = |error| DataError::io("list cache", &self.folder)(error);
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(io)? {
            let entry = entry.map_err(io)?;
            let name = entry.file_name().to_str().and_then(|name| name.parse().ok());
            if let Some(name) = name {
                files.push((name, entry.path()));
            }
        }
        Ok(files)
    }

    /// Held while files are made, renamed, counted or dropped.
    fn lock_folder(&self) -> Result<Lock, DataError> {
        let path = self.folder.join(LOCK_FILE);
        let since = Instant::now();
        loop {
            match Lock::attempt(&path).map_err(DataError::io("lock cache", &path))? {
                Attempt::Taken(lock) => return Ok(lock),
                Attempt::Held(_) | Attempt::Gone if since.elapsed() < LOCK_PATIENCE => {
                    thread::sleep(LOCK_PAUSE);
                }
                Attempt::Held(_) | Attempt::Gone => {
                    let held =
                        "another process has held the lock all the time, and may stand still";
                    let error = io::Error::new(io::ErrorKind::TimedOut, held);
                    return Err(DataError::io("lock cache", path)(error));
                }
            }
        }
    }
}

/// Whether no process holds the lock of a part file.
fn is_dead(path: &Path) -> Result<bool, DataError> {
    match Lock::attempt_existing(path) {
        Ok(Attempt::Taken(_) | Attempt::Gone) => Ok(true),
        Ok(Attempt::Held(_)) => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        // A part file of another user, whose processes remove it.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(false),
        Err(error) => Err(DataError::io("lock", path)(error)),
    }
}

fn remove(path: &Path) -> Result<(), DataError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(DataError::io("remove", path)(error))
        }
        _ => Ok(()),
    }
}

/// A shard that is being downloaded. Dropping it removes its file.
pub(crate) struct Part {
    /// Empty once the file has its final name.
    path: PathBuf,
    file: File,
    key: Key,
    hasher: ContentHasher,
    at: u64,
}

impl Part {
    /// Appends bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        self.file.write_all(bytes).map_err(DataError::io("write", &self.path))?;
        self.hasher.update(bytes);
        self.at += bytes.len() as u64;
        Ok(())
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            // Where this fails, the next process that opens the cache removes the file.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests;
