//! Remote shards on their way to a decoder, ahead of it in the known order.
//!
//! The shards that a stream needs next are known from its position ([`CanonicalOrder::shards_from`]),
//! so some threads download them into a cache on disk before a decoding thread asks.
//! One that is asked for and is not there is downloaded at once, before any other; if it is on its
//! way, it is waited for.
//!
//! **Whole shards or ranges.** A whole shard is verified by the hash of its index, kept, and read
//! from the cache. Where few samples are wanted, only the footer and the row groups of those
//! samples are read, by ranges, and nothing is kept:
//! - for a [`Decoder::of_positions`](crate::reader::Decoder::of_positions) of at most 65,536 samples,
//!   from each shard of which fewer than a quarter of the samples are wanted;
//! - for a full shuffle of a data set that is larger than the limit of the cache;
//! - for [`DataSet::sample`](crate::DataSet::sample).
//!
//! **What arrives is verified.** Of shards that [`prepare`](crate::prepare) wrote, all: whole ones by
//! the hash in the index; of what is read alone, the footer by its hash in the index, and every row
//! group by its hash in the footer. Whole ones without an index are verified by these two before they
//! are kept. What has another hash is fetched again, four times in all, before an error names the
//! shard (and the row group) and both hashes. Of other shards, and of an index that was written before
//! it stated footers, less is known:
//!
//! | | index with footers | without footers | no index |
//! |---|---|---|---|
//! | a whole shard, of `prepare` | hash | hash | the footer, and row groups by hashes that it states |
//! | a whole shard, of others | hash | hash | the footer |
//! | the footer alone | hash | not verified | hash, from the second time on |
//! | a row group alone, of `prepare` | hash | hash that the footer states | hash that the footer states |
//! | a row group alone, of others | not verified | not verified | not verified |
//!
//! Whatever is not verified by a hash must have the length and be of an object of the size that it
//! should have (and of the etag, where a listing told it), its compressed pages must unpack to their
//! stated sizes, and its rows have their length and tokens of the vocabulary. Damage that leaves all
//! that intact, one token for another in pages that are not compressed, is not noticed; what is
//! noticed there is an error at once.
//!
//! **Memory and disk.** `ahead_bytes` bounds the shards that are downloaded or on their way and are
//! not needed yet; with a limit of the cache they are bounded by what need not be dropped for them.
//! A shard takes a few pieces of a body in memory while it is written.
//!
//! **The smallest limit.** With a limit, the cache must hold at once what is being read and written
//! and what the stream will come back to in a moment, or it would download shards again and again.
//! [`Decoder::new`](crate::reader::Decoder::new) refuses a limit below
//!
//! | order | bytes, at most those of all shards |
//! |---|---|
//! | `none`, `shard` | the largest shard, `threads + 1` times |
//! | `window` | that, and one more of the largest, and the shards that make up `2 * window_samples` samples, those with the most bytes per sample first |
//! | `full` | nothing: below the bytes of all shards it reads ranges |
//!
//! for every stream of the process that shares the folder: the parts of a mixture, training and
//! evaluation. A process that shares it with others keeps to its own limit, all their files counted.
//!
//! **The cache** is a folder of files `tidemill-<key>-<bytes>.shard`, named by the place of the data
//! set and the content of the shard (or its URL, etag and footer, where no index states a hash).
//! Processes share the shards of a data set, and data sets the folder and its limit, but no data set
//! finds what another one brought. It may be deleted at any time that nobody uses it. A shard lands in a `.part` file and is
//! renamed when it is whole and right. There are no lock files: who uses a file holds a lock on
//! that file (`flock`), which the kernel releases when a process ends, however it ends, so that
//! nothing is ever to be cleaned up. The part files of dead processes are removed by the next one.
//! No file with another name is touched.
//!
//! **What is dropped.** Shards in use by no process: first those that this stream does not know,
//! then those that it needs last. Ahead of its need a shard is never fetched in place of one that is
//! needed sooner, and in place of what the stream knows only when it is among the next `requests`
//! shards: earlier than that would be to download more in all. Room is taken in the order of need, by
//! one thread at a time, and never in front of a decoding thread that waits; so no shard is dropped
//! between being fetched and being needed, unless batches take turns with more shards than the
//! smallest limit counts.
//!
//! **A disk that is full** before the limit is reached is taken for a limit that is: what is needed last
//! is dropped, and what is not needed yet waits. It is an error where nothing may be dropped and nothing
//! is on its way that could be when it has arrived, and without a limit at once.

use std::{ops::Range, sync::Arc};

use crate::{
    data_set::shards::{Files, Shards},
    error::DataError,
    order::{CanonicalOrder, SampleId},
    shard::ShardFile,
};

mod crew;
mod download;
mod limit;
mod neighbours;
mod wanted;

use crew::Crew;
pub(crate) use limit::smallest_cache_bytes;

/// Where a decoder's shards come from: from a local folder, or fetched.
pub(crate) enum Fetcher {
    Local(Shards),
    Remote(Arc<Crew>),
}

impl Fetcher {
    /// What a decoder of so many threads reads from. `positions` are those that will be read,
    /// where they are known.
    ///
    /// # Errors
    /// [`DataError::CacheLimit`]; [`DataError::Io`] when the cache cannot be opened or threads not
    /// be started.
    pub(crate) fn new(
        shards: &Shards,
        order: &CanonicalOrder,
        positions: Option<Range<u64>>,
        threads: usize,
    ) -> Result<Fetcher, DataError> {
        match shards.remote() {
            None => Ok(Fetcher::Local(shards.clone())),
            Some(remote) => Crew::start(shards, remote, order, positions, threads),
        }
    }

    /// Whether it needs to know what its readers do.
    pub(crate) fn is_remote(&self) -> bool {
        matches!(self, Fetcher::Remote(_))
    }

    /// A reader's batch begins to be decoded.
    pub(crate) fn enter(&self, reader: u64, positions: Range<u64>) {
        if let Fetcher::Remote(crew) = self {
            crew.enter(reader, positions);
        }
    }

    /// A batch that began at this position is decoded, or failed.
    pub(crate) fn exit(&self, reader: u64, position: u64) {
        if let Fetcher::Remote(crew) = self {
            crew.exit(reader, position);
        }
    }

    /// A reader is gone.
    pub(crate) fn leave(&self, reader: u64) {
        if let Fetcher::Remote(crew) = self {
            crew.leave(reader);
        }
    }

    /// Begins to read what samples need and takes requests of its own, several at once.
    /// `is_decoded` says which row groups are not needed.
    pub(crate) fn begin(
        &self,
        samples: &[SampleId],
        is_decoded: impl Fn(usize, usize) -> bool,
    ) -> Result<(), DataError> {
        match self {
            Fetcher::Local(_) => Ok(()),
            Fetcher::Remote(crew) => crew.begin(samples, is_decoded),
        }
    }

    /// Ends all that is under way.
    pub(crate) fn close(&self) {
        if let Fetcher::Remote(crew) = self {
            crew.close();
        }
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        self.close();
    }
}

impl Files for Fetcher {
    fn file(&self, shard: usize) -> Result<Arc<ShardFile>, DataError> {
        match self {
            Fetcher::Local(shards) => shards.file(shard),
            Fetcher::Remote(crew) => crew.file(shard),
        }
    }
}
