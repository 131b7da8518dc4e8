//! The bytes of a file, decompressed while they are read.

use std::{
    fs::File,
    io::{self, BufReader, Read},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use flate2::bufread::MultiGzDecoder;

use crate::prepare::format::Compression;

/// How much of a file is asked for at once.
const FILE_BUFFER_BYTES: usize = 256 << 10;

/// Windows up to 2 GiB, which is what `zstd --long=31` makes and some public dumps need; other
/// files need a small part of that, and only one file is open at a time.
const ZSTD_WINDOW_LOG: u32 = 31;

/// A file's bytes after decompression, and how far the file itself was read.
pub(crate) struct Stream {
    bytes: Box<dyn Read + Send>,
    count: ReadCount,
}

/// How far a file was read, while somebody else reads it.
#[derive(Clone, Default)]
pub(crate) struct ReadCount(Arc<AtomicU64>);

impl ReadCount {
    /// Bytes of the file that were read.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Stream {
    /// Opens the file.
    ///
    /// # Errors
    /// [`io::Error`].
    pub(crate) fn open(path: &Path, compression: Compression) -> io::Result<Stream> {
        let count = ReadCount::default();
        let file = Counted { file: File::open(path)?, count: count.clone() };
        let bytes: Box<dyn Read + Send> = match compression {
            Compression::None => Box::new(file),
            Compression::Gzip => {
                Box::new(MultiGzDecoder::new(BufReader::with_capacity(FILE_BUFFER_BYTES, file)))
            }
            Compression::Zstd => {
                let file = BufReader::with_capacity(FILE_BUFFER_BYTES, file);
                let mut decoder = zstd::stream::read::Decoder::with_buffer(file)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG)?;
                Box::new(decoder)
            }
            Compression::Brotli => {
                Box::new(brotli_decompressor::Decompressor::new(file, FILE_BUFFER_BYTES))
            }
        };
        Ok(Stream { bytes, count })
    }

    /// How far the file was read.
    pub(crate) fn count(&self) -> ReadCount {
        self.count.clone()
    }
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.bytes.read(bytes)
    }
}

/// A file that counts what is read of it.
struct Counted {
    file: File,
    count: ReadCount,
}

impl Read for Counted {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(bytes)?;
        self.count.0.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}
