//! The source of a shard's bytes: an open file, or ranges of an object in a store.
//!
//! One handle serves all threads: every read states its offset. A range that was begun ahead is
//! taken once it has come; the end of an object is asked for once, since the footer is there.
//! Ranges with a hash of their own can be verified as they are read.

use std::{
    collections::HashMap,
    fs::File,
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use bytes::Bytes;

use crate::{
    cache::memory::Weigh,
    error::DataError,
    hash::{ContentHash, ContentHasher},
    store::{RemoteFolder, Started, Version},
};

/// How much is read at once when a file is hashed.
const BLOCK_BYTES: u64 = 1 << 20;

/// The end of an object that is asked for where the size of its footer is not known: most fit.
const TAIL_BYTES: u64 = 64 << 10;

/// How often bytes with a wrong hash are fetched before that is an error.
pub(crate) const FETCHES: u32 = 4;

/// A shard that can be read.
pub(crate) struct ShardFile {
    /// The name in errors: a path, or the text of a URL.
    path: PathBuf,
    bytes: u64,
    is_verified: bool,
    content: Content,
}

enum Content {
    File(PositionedFile),
    Ranges(Box<Ranges>),
}

/// An object that is read by ranges.
struct Ranges {
    folder: RemoteFolder,
    name: String,
    version: Version,
    /// How much of the end is asked for at once.
    tail_bytes: u64,
    tail: Mutex<Option<Bytes>>,
    /// Ranges that are being read, by where they begin.
    begun: Mutex<HashMap<u64, (Range<u64>, Started)>>,
}

impl ShardFile {
    /// Opens a local file.
    pub(crate) fn open(path: &Path) -> Result<ShardFile, DataError> {
        let file = tidemill_files::open(path).map_err(DataError::io("open shard", path))?;
        ShardFile::of_file(path, file)
    }

    /// An open file; errors name `path`.
    pub(crate) fn of_file(path: &Path, file: File) -> Result<ShardFile, DataError> {
        let bytes = file.metadata().map_err(DataError::io("look at shard", path))?.len();
        let content = Content::File(PositionedFile::new(file));
        Ok(ShardFile { path: path.to_owned(), bytes, is_verified: false, content })
    }

    /// The same file, marked as verified as a whole.
    pub(crate) fn verified(self) -> ShardFile {
        ShardFile { is_verified: true, ..self }
    }

    /// Whether the file was verified as a whole.
    pub(crate) fn is_verified(&self) -> bool {
        self.is_verified
    }

    /// An object of a known size, to be read by ranges. Nothing is read yet. Of the end as much is
    /// asked for as its footer has, where that is known.
    pub(crate) fn of_object(
        path: &Path,
        folder: RemoteFolder,
        name: &str,
        version: Version,
        bytes: u64,
        footer_bytes: Option<u64>,
    ) -> ShardFile {
        let version = Version { bytes: Some(bytes), ..version };
        let content = Content::Ranges(Box::new(Ranges {
            folder,
            name: name.to_owned(),
            version,
            tail_bytes: footer_bytes.unwrap_or(TAIL_BYTES),
            tail: Mutex::default(),
            begun: Mutex::default(),
        }));
        ShardFile { path: path.to_owned(), bytes, is_verified: false, content }
    }

    /// The name in errors.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Size of the whole.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of a range, which must lie within the file.
    pub(crate) fn read(&self, range: Range<u64>) -> Result<Bytes, DataError> {
        match &self.content {
            Content::File(file) => {
                let length = range.end.saturating_sub(range.start) as usize;
                let mut bytes = vec![0; length];
                file.read_exact_at(&mut bytes, range.start)
                    .map_err(DataError::io("read shard", &self.path))?;
                Ok(bytes.into())
            }
            Content::Ranges(object) => object.read(range, self.bytes),
        }
    }

    /// Bytes of a range, which must lie within the file, and whose hash is known; or the hash of the bytes
    /// that are there, where it differs. Fetched bytes are fetched again before a difference is believed.
    pub(crate) fn read_verified(
        &self,
        range: Range<u64>,
        expected: ContentHash,
    ) -> Result<Result<Bytes, ContentHash>, DataError> {
        let mut bytes = self.read(range.clone())?;
        let mut fetches = 1;
        loop {
            let found = ContentHash::of(&bytes);
            match &self.content {
                _ if found == expected => return Ok(Ok(bytes)),
                Content::Ranges(object) if fetches < FETCHES => {
                    bytes = object.request(range.clone())?;
                    fetches += 1;
                }
                _ => return Ok(Err(found)),
            }
        }
    }

    /// Whether reading costs no request.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self.content, Content::File(_))
    }

    /// Reads a range, which must lie within the file, into memory that is used again: `out` then
    /// holds that and nothing else.
    pub(crate) fn read_into(&self, range: Range<u64>, out: &mut Vec<u8>) -> Result<(), DataError> {
        match &self.content {
            Content::File(file) => {
                out.resize(range.end.saturating_sub(range.start) as usize, 0);
                file.read_exact_at(out, range.start)
                    .map_err(DataError::io("read shard", &self.path))
            }
            Content::Ranges(object) => {
                out.clear();
                out.extend_from_slice(&object.read(range, self.bytes)?);
                Ok(())
            }
        }
    }

    /// Begins to read a range that will be wanted soon, where that takes a request; whether it
    /// did.
    pub(crate) fn begin(&self, range: Range<u64>) -> bool {
        match &self.content {
            Content::File(_) => false,
            Content::Ranges(object) => object.begin(range, self.bytes),
        }
    }

    /// Hash of the whole.
    pub(crate) fn hash(&self) -> Result<ContentHash, DataError> {
        self.hash_range(0..self.bytes, &mut Vec::new())
    }

    /// Hash of a range, which must lie within the file; it is read into memory that is used again.
    pub(crate) fn hash_range(
        &self,
        range: Range<u64>,
        block: &mut Vec<u8>,
    ) -> Result<ContentHash, DataError> {
        let mut hasher = ContentHasher::new();
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min(start + BLOCK_BYTES);
            self.read_into(start..end, block)?;
            hasher.update(block);
            start = end;
        }
        Ok(hasher.finish())
    }
}

impl Weigh for ShardFile {
    /// Files are counted, not weighed: the number of handles is limited, not their memory.
    fn weight_bytes(&self) -> usize {
        1
    }
}

impl Ranges {
    fn read(&self, range: Range<u64>, bytes: u64) -> Result<Bytes, DataError> {
        let tail_start = bytes.saturating_sub(self.tail_bytes);
        if range.start >= tail_start && range.end <= bytes {
            // The lock is held while the end is read: other threads that need it wait.
            let mut tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
            let tail = match &mut *tail {
                Some(tail) => tail,
                None => {
                    let read = match self.take_begun(tail_start, bytes) {
                        Some(begun) => begun.wait()?,
                        None => self.request(tail_start..bytes)?,
                    };
                    tail.insert(read)
                }
            };
            let place = |at: u64| (at - tail_start) as usize;
            return Ok(tail.slice(place(range.start)..place(range.end)));
        }
        match self.take_begun(range.start, range.end) {
            Some(begun) => begun.wait(),
            None => self.request(range),
        }
    }

    fn request(&self, range: Range<u64>) -> Result<Bytes, DataError> {
        self.folder.get_range(&self.name, range, &self.version)
    }

    fn take_begun(&self, start: u64, end: u64) -> Option<Started> {
        let mut begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        begun.remove(&start).filter(|(range, _)| range.end == end).map(|(_, started)| started)
    }

    fn begin(&self, range: Range<u64>, bytes: u64) -> bool {
        let tail_start = bytes.saturating_sub(self.tail_bytes);
        let range = if range.start >= tail_start { tail_start..bytes } else { range };
        if range.is_empty() || range.end > bytes {
            return false;
        }
        if range.start == tail_start
            && self.tail.lock().unwrap_or_else(PoisonError::into_inner).is_some()
        {
            return false;
        }
        let mut begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        if begun.contains_key(&range.start) {
            return false;
        }
        // Where it cannot begin, the reader will find out why.
        let Ok(started) = self.folder.start_range(&self.name, range.clone(), &self.version) else {
            return false;
        };
        begun.insert(range.start, (range, started));
        true
    }
}

#[cfg(unix)]
struct PositionedFile(File);

#[cfg(unix)]
impl PositionedFile {
    fn new(file: File) -> PositionedFile {
        PositionedFile(file)
    }

    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.0, bytes, offset)
    }
}

/// Elsewhere threads take turns with the one offset of the file.
#[cfg(not(unix))]
struct PositionedFile(Mutex<File>);

#[cfg(not(unix))]
impl PositionedFile {
    fn new(file: File) -> PositionedFile {
        PositionedFile(Mutex::new(file))
    }

    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        use std::io::{Read, Seek, SeekFrom};
        let mut file = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        file.seek(SeekFrom::Start(offset))?;
        file.read_exact(bytes)
    }
}
