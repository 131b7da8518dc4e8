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

use crate::prepare::input::format::Compression;

/// How much of a file is asked for at once.
const FILE_BUFFER_BYTES: usize = 256 << 10;

/// Windows up to 128 MiB, as `zstd` itself takes without being asked for more: a file of a few
/// kilobytes may demand all of its window.
const ZSTD_WINDOW_LOG: u32 = 27;

/// Zstandard's error for a window above that.
const ZSTD_WINDOW_TOO_LARGE: &str = "Frame requires too much memory for decoding";

/// A file in Zstandard needs too much memory.
#[derive(Debug, thiserror::Error)]
#[error(
    "its Zstandard window is larger than 128 MiB, expected one that `zstd` takes without --long: \
     compress it again (zstd -d --long=31 --stdout OLD | zstd -o NEW)"
)]
struct WindowTooLarge;

/// A file's bytes after decompression, and how far the file itself was read.
pub(crate) struct Stream {
    bytes: Box<dyn Read + Send>,
    count: ReadCount,
}

/// How far a file was read, for another thread than the reading one.
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
        let file = Counted { file: tidemill_files::open(path)?, count: count.clone() };
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
            #[cfg(feature = "mds")]
            Compression::Brotli => {
                let file = NarrowBrotli { bytes: file, is_begun: false };
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
        self.bytes.read(bytes).map_err(|error| match error.to_string() {
            said if said == ZSTD_WINDOW_TOO_LARGE => {
                io::Error::new(io::ErrorKind::InvalidData, WindowTooLarge)
            }
            // An error that is not the operating system's is the decoder's, about the bytes that it was given.
            _ if error.kind() == io::ErrorKind::Other && error.raw_os_error().is_none() => {
                io::Error::new(io::ErrorKind::InvalidData, error)
            }
            _ => error,
        })
    }
}

/// Brotli as its standard has it: with windows up to 16 MiB. A first byte that the standard does not
/// know asks for windows up to 1 GiB, which the decoder would accept.
#[cfg(feature = "mds")]
struct NarrowBrotli<R> {
    bytes: R,
    is_begun: bool,
}

#[cfg(feature = "mds")]
impl<R: Read> Read for NarrowBrotli<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.bytes.read(bytes)?;
        if !self.is_begun && read > 0 {
            self.is_begun = true;
            if bytes[0] & 0x7f == 0x11 {
                let said = "it is Brotli with a large window, expected one of at most 16 MiB";
                return Err(io::Error::new(io::ErrorKind::InvalidData, said));
            }
        }
        Ok(read)
    }
}

/// A file that counts the bytes that are read from it.
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
