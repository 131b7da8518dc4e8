//! The samples of one shard, read from its beginning to its end, compressed or not.
//!
//! A shard is `u32 n`, `u32 offsets[n + 1]`, a description of the columns that the index states too,
//! and the samples. A sample is a `u32` size for every column that has no fixed one, and the bytes
//! of all columns. All is little endian, and offsets count from the beginning of the file. In memory
//! is the wanted column of the current samples; of a shard in Snappy, which can only be decompressed
//! as a whole, all of it.

use std::{
    collections::BTreeMap,
    io::{self, BufReader, Read},
    path::Path,
    sync::Arc,
};

use bytes::{Buf, Bytes};
use tidemill_files::Kind;

use super::{Wanted, digest, offsets::Offsets};
use crate::prepare::{
    PrepareError,
    input::{Limits, format::Compression, stream::Stream, values::Values},
};

/// A shard in Snappy above this is refused.
const SNAPPY_BYTES_LIMIT: u64 = 1 << 30;

/// How much is decompressed at once.
const BUFFER_BYTES: usize = 128 << 10;

/// How a shard is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShardCompression {
    Streamed(Compression),
    Snappy,
}

impl ShardCompression {
    pub(crate) const NONE: ShardCompression = ShardCompression::Streamed(Compression::None);

    /// The compression of this name, with or without a level after it (`zstd:7`).
    pub(crate) fn by_name(name: &str) -> Option<ShardCompression> {
        Some(ShardCompression::Streamed(match name.split(':').next()? {
            "zstd" => Compression::Zstd,
            "gz" => Compression::Gzip,
            "br" => Compression::Brotli,
            "snappy" => return Some(ShardCompression::Snappy),
            _ => return None,
        }))
    }
}

/// A shard as the index states it.
#[derive(Debug)]
pub(crate) struct ShardEntry {
    /// The file that is there.
    pub path: Arc<Path>,
    /// Its size.
    pub bytes: u64,
    /// Its hashes by the names of algorithms.
    pub hashes: BTreeMap<String, String>,
    pub compression: ShardCompression,
    /// Its size when it is not compressed.
    pub raw_bytes: u64,
    pub samples: u64,
    /// Bytes of each column, where they are the same in every sample.
    pub sizes: Vec<Option<u32>>,
    /// The wanted column, and the kind of its content.
    pub column: usize,
    pub wanted: Wanted,
}

/// A shard being read.
pub(crate) struct OpenShard {
    path: Arc<Path>,
    bytes: Box<dyn Read + Send>,
    /// How far the file was read, where it is read as a stream.
    stream_bytes: Box<dyn Fn() -> u64 + Send>,
    sizes: Vec<Option<u32>>,
    column: usize,
    raw_bytes: u64,
    samples: u64,
    /// The beginnings of the samples after the next one, and the end of the last.
    offsets: Offsets,
    /// The next sample, and where it begins.
    sample: u64,
    start: u32,
}

impl OpenShard {
    /// Verifies the file and reads where its samples are.
    ///
    /// # Errors
    /// [`PrepareError::ShardDigest`], [`PrepareError::DamagedMdsShard`] and [`DataError::Io`].
    pub(crate) fn open(entry: &ShardEntry) -> Result<OpenShard, PrepareError> {
        digest::verify(&entry.path, &entry.hashes)?;
        let Content { bytes, again, stream_bytes } = content(entry)?;
        let mut shard = OpenShard {
            path: Arc::clone(&entry.path),
            bytes,
            stream_bytes,
            sizes: entry.sizes.clone(),
            column: entry.column,
            raw_bytes: entry.raw_bytes,
            samples: entry.samples,
            offsets: Offsets::new(again, entry.samples),
            sample: 0,
            start: 0,
        };
        shard.find_samples()?;
        Ok(shard)
    }

    /// Number of the next sample.
    pub(crate) fn sample(&self) -> u64 {
        self.sample
    }

    /// Bytes of the file that were read.
    pub(crate) fn read_bytes(&self) -> u64 {
        (self.stream_bytes)()
    }

    /// Reads up to the first sample.
    fn find_samples(&mut self) -> Result<(), PrepareError> {
        let samples = self.samples;
        let found = u64::from(self.read_u32()?);
        if found != samples {
            return Err(
                self.damaged(format!("{found} samples"), format!("{samples} as the index says"))
            );
        }
        let header_bytes = samples.saturating_mul(4).saturating_add(8);
        // Offsets have 32 bits, so whatever the index says, this is not to be believed above that.
        if header_bytes > self.raw_bytes.min(u64::from(u32::MAX)) {
            let expected = format!("room for them in {} bytes", self.raw_bytes);
            return Err(self.damaged(format!("{samples} samples"), expected));
        }
        self.start = self.next_offset()?.unwrap_or(0);
        if !(header_bytes..=self.raw_bytes).contains(&u64::from(self.start)) {
            let found = format!("samples from byte {}", self.start);
            let expected = format!("from {header_bytes} to {}", self.raw_bytes);
            return Err(self.damaged(found, expected));
        }
        if samples == 0 {
            self.check_last(self.start)?;
        }
        self.pass_over(u64::from(self.start) - 4)
    }

    fn next_offset(&mut self) -> Result<Option<u32>, PrepareError> {
        self.offsets.next().map_err(|error| self.unreadable(error))
    }

    /// Whether the samples end where the shard does.
    fn check_last(&self, end: u32) -> Result<(), PrepareError> {
        match u64::from(end) == self.raw_bytes {
            true => Ok(()),
            false => {
                let expected = format!("samples to byte {}", self.raw_bytes);
                Err(self.damaged(format!("samples to byte {end}"), expected))
            }
        }
    }

    /// Appends the wanted column of the next sample; false where there is none.
    ///
    /// # Errors
    /// [`PrepareError::DamagedMdsShard`] and [`DataError::Io`].
    pub(crate) fn read_sample(
        &mut self,
        values: &mut Values,
        limits: Limits,
    ) -> Result<bool, PrepareError> {
        if self.sample == self.samples {
            return self.check_end().map(|()| false);
        }
        let start = self.start;
        let end = self.next_offset()?.unwrap_or(start);
        if end < start || u64::from(end) > self.raw_bytes {
            let found = format!("sample {} from byte {start} to byte {end}", self.sample);
            let expected = format!("one behind the other up to byte {}", self.raw_bytes);
            return Err(self.damaged(found, expected));
        }
        if self.sample + 1 == self.samples {
            self.check_last(end)?;
        }
        let mut left = u64::from(end - start);
        let (mut before, mut size, mut behind) = (0, 0, 0);
        for column in 0..self.sizes.len() {
            let column_bytes = match self.sizes[column] {
                Some(bytes) => bytes,
                None => {
                    left = left.checked_sub(4).ok_or_else(|| self.wrong_sample(start, end))?;
                    self.read_u32()?
                }
            };
            let sum = match column.cmp(&self.column) {
                std::cmp::Ordering::Less => &mut before,
                std::cmp::Ordering::Equal => &mut size,
                std::cmp::Ordering::Greater => &mut behind,
            };
            *sum += u64::from(column_bytes);
        }
        if before + size + behind != left {
            return Err(self.wrong_sample(start, end));
        }
        self.pass_over(before)?;
        if size > limits.document_bytes as u64 {
            values.push_too_long(limits);
            self.pass_over(size)?;
        } else {
            let mut value = vec![0; size as usize];
            self.read_exact(&mut value)?;
            values.push(&value, limits);
        }
        self.pass_over(behind)?;
        self.sample += 1;
        self.start = end;
        Ok(true)
    }

    /// Checks that no bytes follow the last sample, and that the compressed end is sound.
    fn check_end(&mut self) -> Result<(), PrepareError> {
        match self.bytes.read(&mut [0]).map_err(|error| self.unreadable(error))? {
            0 => Ok(()),
            _ => {
                let expected = format!("{} as the index says", self.raw_bytes);
                Err(self.damaged("more bytes behind the last sample".to_owned(), expected))
            }
        }
    }

    fn read_u32(&mut self) -> Result<u32, PrepareError> {
        let mut bytes = [0; 4];
        self.read_exact(&mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn read_exact(&mut self, bytes: &mut [u8]) -> Result<(), PrepareError> {
        self.bytes.read_exact(bytes).map_err(|error| self.unreadable(error))
    }

    fn pass_over(&mut self, bytes: u64) -> Result<(), PrepareError> {
        let passed = io::copy(&mut (&mut self.bytes).take(bytes), &mut io::sink());
        match passed {
            Ok(passed) if passed == bytes => Ok(()),
            Ok(_) => Err(self.unreadable(io::ErrorKind::UnexpectedEof.into())),
            Err(error) => Err(self.unreadable(error)),
        }
    }

    fn wrong_sample(&self, start: u32, end: u32) -> PrepareError {
        let found = format!("sample {} of {} bytes", self.sample, end - start);
        self.damaged(found, "as many as its columns have".to_owned())
    }

    fn damaged(&self, found: String, expected: String) -> PrepareError {
        PrepareError::DamagedMdsShard { path: self.path.to_path_buf(), found, expected }
    }

    fn unreadable(&self, error: io::Error) -> PrepareError {
        PrepareError::io("read shard", &*self.path)(error)
    }
}

/// The content of a shard.
struct Content {
    bytes: Box<dyn Read + Send>,
    /// The same once more.
    again: Box<dyn Read + Send>,
    /// How far the first of them was read in the file.
    stream_bytes: Box<dyn Fn() -> u64 + Send>,
}

fn content(entry: &ShardEntry) -> Result<Content, PrepareError> {
    let path = &entry.path;
    match entry.compression {
        ShardCompression::Streamed(compression) => {
            let open =
                || Stream::open(path, compression).map_err(PrepareError::io("open shard", &**path));
            let (stream, again) = (open()?, open()?);
            let count = stream.count();
            Ok(Content {
                bytes: Box::new(BufReader::with_capacity(BUFFER_BYTES, stream)),
                again: Box::new(BufReader::with_capacity(BUFFER_BYTES, again)),
                stream_bytes: Box::new(move || count.bytes()),
            })
        }
        ShardCompression::Snappy => {
            let damaged = |found: String, expected: String| {
                let path = path.to_path_buf();
                PrepareError::DamagedMdsShard { path, found, expected }
            };
            let bytes = tidemill_files::read(path, Kind::Other)
                .map_err(PrepareError::io("read shard", &**path))?;
            let length = snap::raw::decompress_len(&bytes).map_or(0, |length| length as u64);
            if length != entry.raw_bytes || length > SNAPPY_BYTES_LIMIT {
                let expected = entry.raw_bytes;
                return Err(damaged(
                    format!("{length} bytes in Snappy"),
                    format!("{expected} as the index says, and at most {SNAPPY_BYTES_LIMIT}"),
                ));
            }
            let raw = snap::raw::Decoder::new().decompress_vec(&bytes).map_err(|error| {
                damaged(format!("no Snappy ({error})"), "what the index says".to_owned())
            })?;
            let (raw, file_bytes) = (Bytes::from(raw), entry.bytes);
            Ok(Content {
                bytes: Box::new(raw.clone().reader()),
                again: Box::new(raw.reader()),
                stream_bytes: Box::new(move || file_bytes),
            })
        }
    }
}
