//! Downloaded shards in a folder, shared by the processes of a machine.
//!
//! A shard is named by the place of its data set and by its content (or, where no index states a
//! hash, by its URL, size and etag): the processes that read a data set share it, and no data set can
//! plant a shard for another. It lands in a part file beside the others, which is renamed when it is
//! whole.
//!
//! There is no shared memory: who uses a file holds a lock on the file itself, which the kernel
//! releases when a process ends, however it ends.
//!
//! | file | lock held | what it means |
//! |---|---|---|
//! | `tidemill-<key>-<bytes>.shard` | shared | is being read: is not dropped |
//! | `tidemill-<key>-<bytes>.<process>-<n>.part` | exclusive | is being downloaded |
//! | the same | none | its process died: whoever finds it removes it |
//! | `tidemill.lock` | exclusive | files are being made, renamed, counted or dropped, which takes no time |
//!
//! Contract:
//! - No file is ever removed whose name is not of this scheme.
//! - A part file has its full length from its beginning, so that adding up lengths counts what is
//!   on its way. Room is made before a part file is: within a limit the folder never exceeds it.
//! - What is found is hashed before its first use in a process. A shard without a hash in an index
//!   has its footer compared with what it was on opening and its row groups with what that says, as
//!   far as it does; it was synced before it was renamed.
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

use key::Name;
pub(crate) use key::{Key, Origin};

/// The file that is locked for all others.
const LOCK_FILE: &str = "tidemill.lock";

/// See the [module](self).
pub(crate) struct ShardCache {
    folder: PathBuf,
    limit_bytes: Option<u64>,
    /// Files that were found to be right, by when they were written.
    verified: Mutex<HashMap<Key, SystemTime>>,
}

/// How long the folder's lock is tried for, and how often.
const LOCK_PATIENCE: Duration = Duration::from_secs(600);
const LOCK_PAUSE: Duration = Duration::from_millis(1);

/// Part files of this process are told apart by this.
static PARTS: AtomicU64 = AtomicU64::new(0);

/// Whether a shard can be downloaded into the cache now.
pub(crate) enum Room {
    /// It can, into this.
    Part(Box<Part>),
    /// Somebody else is at it.
    OnItsWay,
    /// Not before something is dropped that may not be dropped now.
    None,
}

/// How soon a shard is needed for which there is to be room.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Urgency {
    /// At once: all may be dropped for it that is not needed as soon.
    Now,
    /// As `Now`, and what another is at is not waited for any longer: it may stand still.
    AtLast,
    /// As the one of this rank in the order of need. If that need has passed there is no room; for
    /// it only what is needed after the one of rank `before` is dropped.
    Ahead { rank: u64, before: u64 },
}

impl Urgency {
    /// Only what is needed after the one of this rank may be dropped.
    fn before(self) -> u64 {
        match self {
            Urgency::Now | Urgency::AtLast => 0,
            Urgency::Ahead { before, .. } => before,
        }
    }
}

/// What can be had on a disk that is full.
pub(crate) enum Freed {
    /// A shard was dropped.
    One,
    /// None may be; but others are on their way, and can be dropped when they have arrived.
    Later,
    None,
}

/// What is known of the shards of the cache, by the one who makes room.
pub(crate) trait Future {
    /// When a shard is needed again: the larger, the later; none for never, as far as is known.
    fn next_use(&self, key: &Key) -> Option<u64>;

    /// A shard was dropped.
    fn dropped(&self, key: &Key);
}

/// What is in the cache, of all shards and of one.
struct Survey {
    /// Bytes of all files.
    held_bytes: u64,
    is_there: bool,
    is_on_its_way: bool,
}

/// A file of the cache that is not in anybody's way to be dropped.
struct Candidate {
    key: Key,
    path: PathBuf,
    bytes: u64,
    next_use: Option<u64>,
}

impl ShardCache {
    /// Opens the folder, which is made where there is none, and removes what dead processes left.
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

    /// The shard of a key if it is there and is right, held so that nobody drops it. What is there
    /// and is wrong is removed.
    pub(crate) fn find(&self, key: &Key, known: &Shard) -> Result<Option<ShardFile>, DataError> {
        let place = self.folder.join(Name::Shard(*key).to_string());
        let file = match File::open(&place) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(DataError::io("open cached shard", place)(error)),
        };
        match file.try_lock_shared() {
            Ok(()) => {}
            // It is being dropped.
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
            // Another may have found the same, and put the right one there.
            if fs::metadata(&place).is_ok_and(|there| is_same_file(&there, &opened)) {
                remove(&place)?;
            }
            return Ok(None);
        }
        verified = self.verified.lock().unwrap_or_else(PoisonError::into_inner);
        verified.insert(*key, written);
        Ok(Some(shard.verified()))
    }

    /// Makes room for a shard and begins it, unless somebody has begun it. What is dropped for it
    /// is not in use, and needed last. The future is asked for when nobody else can drop anything:
    /// what it says while one waits for that would be of the past.
    pub(crate) fn begin<F: Future>(
        &self,
        key: &Key,
        urgency: Urgency,
        future: impl FnOnce() -> F,
    ) -> Result<Room, DataError> {
        let _locked = self.lock_folder()?;
        let Survey { held_bytes, is_there, is_on_its_way } = self.survey(key)?;
        if is_there || (is_on_its_way && !matches!(urgency, Urgency::AtLast)) {
            return Ok(Room::OnItsWay);
        }
        let future = &future();
        if let Urgency::Ahead { rank, .. } = urgency
            && future.next_use(key).is_none_or(|next| next > rank)
        {
            return Ok(Room::None);
        }
        if let Some(limit) = self.limit_bytes {
            let excess = (held_bytes.saturating_add(key.bytes())).saturating_sub(limit);
            if excess > 0 && !self.drop_files(excess, urgency.before(), future)? {
                return Ok(Room::None);
            }
        }
        loop {
            let number = PARTS.fetch_add(1, Ordering::Relaxed);
            let name = Name::Part { key: *key, process: std::process::id(), number };
            let path = self.folder.join(name.to_string());
            let mut options = OpenOptions::new();
            let file = match options.read(true).write(true).create_new(true).open(&path) {
                Ok(file) => file,
                // Of a process with the same number, in another container.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(DataError::io("create", path)(error)),
            };
            let part = Part { path, file, key: *key, hasher: ContentHasher::new(), at: 0 };
            part.file
                .try_lock()
                .map_err(|error| DataError::io("lock", &part.path)(error.into()))?;
            part.file.set_len(key.bytes()).map_err(DataError::io("make room for", &part.path))?;
            return Ok(Room::Part(Box::new(part)));
        }
    }

    /// Makes room on a disk that is full: drops the shard that is needed last, if that can be.
    pub(crate) fn drop_one<F: Future>(
        &self,
        urgency: Urgency,
        future: impl FnOnce() -> F,
    ) -> Result<Freed, DataError> {
        let _locked = self.lock_folder()?;
        if self.drop_files(1, urgency.before(), &future())? {
            return Ok(Freed::One);
        }
        let is_part = |(name, _): &(Name, PathBuf)| matches!(name, Name::Part { .. });
        let is_on_its_way = self.files()?.iter().any(is_part);
        Ok(if is_on_its_way { Freed::Later } else { Freed::None })
    }

    /// Puts a whole part of a shard in its place; or says what is wrong with it when it is not what
    /// it should be, and removes it.
    pub(crate) fn land(
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
            // Nothing else might tell a file of zeros after a power cut from the real one.
            part.file.sync_data().map_err(io)?;
        }
        let written = part.file.metadata().and_then(|metadata| metadata.modified()).map_err(io)?;
        let place = self.folder.join(Name::Shard(part.key).to_string());
        {
            let _locked = self.lock_folder()?;
            fs::rename(&part.path, &place).map_err(io)?;
            // While the folder is locked nobody drops what has no lock for a moment.
            let shared = file.unlock().and_then(|()| file.lock_shared());
            shared.map_err(DataError::io("lock cached shard", &place))?;
        }
        let mut verified = self.verified.lock().unwrap_or_else(PoisonError::into_inner);
        verified.insert(part.key, written);
        // Its name is no longer there to be removed.
        part.path = PathBuf::new();
        Ok(Ok(shard.verified()))
    }

    /// Looks at all files of the cache, of which those of dead processes are removed.
    fn survey(&self, of: &Key) -> Result<Survey, DataError> {
        let mut survey = Survey { held_bytes: 0, is_there: false, is_on_its_way: false };
        for (name, path) in self.files()? {
            match name {
                Name::Shard(key) => survey.is_there |= key == *of,
                Name::Part { .. } if is_dead(&path)? => {
                    remove(&path)?;
                    continue;
                }
                Name::Part { key, .. } => survey.is_on_its_way |= key == *of,
            }
            // A file that went away since is none.
            let bytes = path.metadata().map_or(0, |metadata| metadata.len());
            survey.held_bytes = survey.held_bytes.saturating_add(bytes);
        }
        Ok(survey)
    }

    /// Drops files until so many bytes are free, those needed last first; whether they are.
    fn drop_files(&self, bytes: u64, before: u64, future: &dyn Future) -> Result<bool, DataError> {
        let mut candidates = Vec::new();
        for (name, path) in self.files()? {
            let Name::Shard(key) = name else { continue };
            let next_use = future.next_use(&key);
            if next_use.is_none_or(|next| next > before) {
                let bytes = path.metadata().map_or(0, |metadata| metadata.len());
                candidates.push(Candidate { key, path, bytes, next_use });
            }
        }
        // Never again, then latest first; names last, so that the order is one.
        candidates.sort_by_key(|candidate| {
            (candidate.next_use.is_some(), u64::MAX - candidate.next_use.unwrap_or(0))
        });
        // Locked before any is dropped: nothing is lost where room cannot be made anyway.
        let (mut free, mut dropped) = (0, Vec::new());
        for candidate in candidates {
            if free >= bytes {
                break;
            }
            // What another user put there can be read, and not be dropped.
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
            future.dropped(&candidate.key);
        }
        Ok(true)
    }

    /// Removes the part files of processes that are no more. The folder is locked.
    fn remove_dead_parts(&self) -> Result<(), DataError> {
        for (name, path) in self.files()? {
            if matches!(name, Name::Part { .. }) && is_dead(&path)? {
                remove(&path)?;
            }
        }
        Ok(())
    }

    /// The files that are named as ours are.
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

/// Whether nobody holds the lock of a part file.
fn is_dead(path: &Path) -> Result<bool, DataError> {
    match Lock::attempt_existing(path) {
        Ok(Attempt::Taken(_) | Attempt::Gone) => Ok(true),
        Ok(Attempt::Held(_)) => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        // Another user's, who removes it.
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
            // Where this fails, the next who opens the cache removes it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests;
