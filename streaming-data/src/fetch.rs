//! Remote shards, downloaded ahead of the decoder in the known order.
//!
//! The shards that a stream needs next are known from its position ([`CanonicalOrder::shards_from`]),
//! so the threads of a *prefetcher* download them into a cache on disk before a decoding thread asks.
//! A shard that a decoding thread needs and the cache lacks is downloaded at once, before any other; a
//! download of it that is under way is waited for.
//!
//! **Whole shards or ranges.** A whole shard is verified by the hash of its index, kept, and read
//! from the cache. Where few samples are needed, only the footer and the row groups of those
//! samples are read, by ranges, and nothing is kept:
//! - for a [`Decoder::of_positions`](crate::reader::Decoder::of_positions) of at most 65,536 samples,
//!   from each shard where fewer than a quarter of the samples are needed;
//! - for a full shuffle of a data set that is larger than the limit of the cache;
//! - for [`DataSet::sample`](crate::DataSet::sample).
//!
//! **Verification.** All bytes of shards that [`prepare`](crate::prepare) wrote are verified: a whole shard
//! by its hash in the index; where only ranges are read, the footer by its hash in the index, and each row
//! group by its hash in the footer. A whole shard without an index is verified by its footer and row groups
//! before it is kept. Bytes with another hash are fetched again, four times in all, before an error names
//! the shard (and the row group) and both hashes. Other shards, and indexes of before hashes of footers were
//! stated, can be verified less:
//!
//! | | index with footers | without footers | no index |
//! |---|---|---|---|
//! | a whole shard, of `prepare` | hash | hash | the footer, and row groups by hashes that it states |
//! | a whole shard, of others | hash | hash | the footer |
//! | the footer alone | hash | not verified | hash, from the second time on |
//! | a row group alone, of `prepare` | hash | hash that the footer states | hash that the footer states |
//! | a row group alone, of others | not verified | not verified | not verified |
//!
//! Bytes that no hash verifies must have the stated length, and belong to an object of the stated size (and
//! of the etag, where a listing told it); compressed pages must unpack to their stated sizes, rows must have
//! their length, and tokens must be of the vocabulary. Such a mismatch is an error at once. Damage that passes
//! all these checks, one token for another in pages that are not compressed, is not noticed.
//!
//! **Memory and disk.** `ahead_bytes` bounds the shards that are downloaded, or being downloaded, ahead of
//! their need; a limit of the cache bounds them too, since only shards that are needed later are evicted for
//! them. A download holds a few pieces of the body in memory while it is written.
//!
//! **The smallest limit.** A cache with a limit must hold at once the shards that are being read and written
//! and the shards that the stream soon returns to, or shards would be downloaded again and again.
//! [`Decoder::new`](crate::reader::Decoder::new) refuses a limit below
//!
//! | order | bytes, at most the bytes of all shards |
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
//! Processes share the shards of a data set, and data sets share the folder and its limit, but no data set
//! uses a shard that another one brought. The folder may be deleted while no process uses it. A shard is
//! downloaded into a `.part` file, which is renamed once it is whole and verified. A process that uses a file
//! holds a lock on that file (`flock`), which the kernel releases when the process ends, however it ends, so
//! that no user has to clean up. The part files of dead processes are removed by the next process.
//! No file with another name is touched.
//!
//! **Eviction.** Only shards that no process uses are evicted: first those that the streams of this process
//! do not need, then those that they need last. A shard is never prefetched in place of one that is needed
//! sooner, and in place of one that is needed later only when it is among the next `requests` shards:
//! otherwise more would be downloaded in all. Shards are admitted in the order of need, by one thread at a
//! time, and none ahead of its need while a decoding thread waits. So no shard is evicted between its download
//! and its need, unless batches alternate between more shards than the smallest limit counts.
//!
//! **A full disk** is treated as a limit that is reached: the shard that is needed last is evicted, and
//! prefetching waits. It is an error where no shard may be evicted and none that could be evicted later is
//! being downloaded; without a limit it is an error at once.

use std::{ops::Range, sync::Arc};

use crate::{
    data_set::shards::{Files, Shards},
    error::DataError,
    order::{CanonicalOrder, SampleId},
    shard::ShardFile,
};

mod download;
mod limit;
mod prefetcher;
mod registry;
mod wanted;

pub(crate) use limit::smallest_cache_bytes;
use prefetcher::Prefetcher;

/// Where a decoder's shards come from: from a local folder, or fetched.
pub(crate) enum Fetcher {
    Local(Shards),
    Remote(Arc<Prefetcher>),
}

impl Fetcher {
    /// The source of shards for a decoder of `threads` threads. `positions` are the positions to read,
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
            Some(remote) => Prefetcher::start(shards, remote, order, positions, threads),
        }
    }

    /// Whether shards are fetched, so that the positions of readers matter.
    pub(crate) fn is_remote(&self) -> bool {
        matches!(self, Fetcher::Remote(_))
    }

    /// A reader's batch is about to be decoded.
    pub(crate) fn begin_batch(&self, reader: u64, positions: Range<u64>) {
        if let Fetcher::Remote(prefetcher) = self {
            prefetcher.begin_batch(reader, positions);
        }
    }

    /// A batch that began at this position is decoded, or failed.
    pub(crate) fn end_batch(&self, reader: u64, position: u64) {
        if let Fetcher::Remote(prefetcher) = self {
            prefetcher.end_batch(reader, position);
        }
    }

    /// A reader was dropped.
    pub(crate) fn remove_reader(&self, reader: u64) {
        if let Fetcher::Remote(prefetcher) = self {
            prefetcher.remove_reader(reader);
        }
    }

    /// Begins to read the ranges that samples need, several requests at once. `is_decoded` says which
    /// row groups are decoded already.
    pub(crate) fn begin(
        &self,
        samples: &[SampleId],
        is_decoded: impl Fn(usize, usize) -> bool,
    ) -> Result<(), DataError> {
        match self {
            Fetcher::Local(_) => Ok(()),
            Fetcher::Remote(prefetcher) => prefetcher.begin(samples, is_decoded),
        }
    }

    /// Cancels all downloads and ends the threads.
    pub(crate) fn close(&self) {
        if let Fetcher::Remote(prefetcher) = self {
            prefetcher.close();
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
            Fetcher::Remote(prefetcher) => prefetcher.file(shard),
        }
    }
}
