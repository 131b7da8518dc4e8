//! Entries of documents in all their buckets, sorted within a bound of memory.

use std::io;

use super::{Dedup, DedupSettings, Signature, buckets::Buckets};
use crate::prepare::PrepareError;

/// How a document resembles the first document of one of its buckets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Likeness {
    Copy,
    NearCopy,
}

/// A bucket of either kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bucket {
    /// Documents with the same text, or the same words, by the hash of these.
    Copies(u128),
    /// Documents that have a band in common, by its hash.
    Band(u64),
}

impl Signature {
    /// All buckets of a document.
    pub(crate) fn buckets(&self) -> impl Iterator<Item = Bucket> {
        let bands = self.near.into_iter().flatten().map(Bucket::Band);
        std::iter::once(Bucket::Copies(self.copies)).chain(bands)
    }
}

/// Called with a document that is not the first in a bucket, and a document before it in that bucket.
pub(crate) type Tell<'a> = dyn FnMut(Likeness, u64, u64) + 'a;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Sorter {
    copies: Buckets<[u64; 2]>,
    bands: Buckets<u64>,
}

impl Sorter {
    /// For a limit of memory: a copy's entry has 24 bytes, the entries of bands 14 times 16.
    pub(crate) fn new(settings: DedupSettings) -> Sorter {
        let memory_bytes = settings.memory_bytes;
        let for_copies = match settings.dedup {
            Dedup::Near => memory_bytes / 10,
            Dedup::None | Dedup::Exact | Dedup::ExactWords => memory_bytes,
        };
        Sorter { copies: Buckets::new(for_copies), bands: Buckets::new(memory_bytes - for_copies) }
    }

    /// Puts a document into a bucket; documents come in any order. `tell` may be told of this and others, and
    /// of one perhaps twice.
    ///
    /// # Errors
    /// Errors of a temporary file.
    pub(crate) fn insert(
        &mut self,
        bucket: Bucket,
        document: u64,
        tell: &mut Tell<'_>,
    ) -> Result<(), PrepareError> {
        let inserted = match bucket {
            Bucket::Copies(copies) => {
                let key = [(copies >> 64) as u64, copies as u64];
                let tell = &mut |document, first| tell(Likeness::Copy, document, first);
                self.copies.insert(key, document, tell)
            }
            Bucket::Band(band) => {
                let tell = &mut |document, first| tell(Likeness::NearCopy, document, first);
                self.bands.insert(band, document, tell)
            }
        };
        inserted.map_err(sorting_failed)
    }

    /// Tells of all documents that are not the first of a bucket and were not told of before; `go_on` is asked
    /// now and then.
    ///
    /// # Errors
    /// Errors of a temporary file, or of `go_on`.
    pub(crate) fn finish(
        self,
        tell: &mut Tell<'_>,
        go_on: &mut dyn FnMut() -> Result<(), PrepareError>,
    ) -> Result<(), PrepareError> {
        let mut go_on = || go_on().map_err(Stopped::Asked);
        let stopped = |stopped| match stopped {
            Stopped::Asked(error) => error,
            Stopped::Io(error) => sorting_failed(error),
        };
        let of_copies = &mut |document, first| tell(Likeness::Copy, document, first);
        self.copies.finish(of_copies, &mut go_on).map_err(stopped)?;
        let of_bands = &mut |document, first| tell(Likeness::NearCopy, document, first);
        self.bands.finish(of_bands, &mut go_on).map_err(stopped)
    }
}

/// Why the buckets were not finished.
enum Stopped {
    Asked(PrepareError),
    Io(io::Error),
}

impl From<io::Error> for Stopped {
    fn from(error: io::Error) -> Stopped {
        Stopped::Io(error)
    }
}

fn sorting_failed(error: io::Error) -> PrepareError {
    PrepareError::io("sort records of documents in", std::env::temp_dir())(error)
}
