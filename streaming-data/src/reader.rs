//! Samples in a planned order, decoded ahead of their consumer on threads.
//!
//! A [`Decoder`] of a [`Mixture`] is made once per process: its threads, its memory and its cache of decoded pieces
//! of row groups are shared by all [`Reader`]s made from it, so that workers which read neighbouring
//! parts of the same windows do not decode the same pages again and again. A reader follows a *plan*:
//! ranges of positions in the canonical order, usually one range per step and worker.
//!
//! Contract:
//! - A reader yields exactly the samples of its plan, in its order, for any number of threads, any
//!   memory bound and any behaviour of other readers. An error comes at the place of the sample that
//!   could not be read; after it the reader is at its end.
//! - Memory: three quarters of `memory_bytes` hold decoded pieces of row groups (a page or a few;
//!   the whole row group where a column is of an uncommon form), one quarter holds samples that
//!   wait for their readers, shared evenly. Beyond the bound, each thread may hold the piece that
//!   it is decoding, and each reader at least one batch (up to 128 KiB, or one sample). A window
//!   shuffle wants the samples of two windows to fit:
//!   `2 * window_samples * (seq_len + 1) * 2` bytes where no token is above 65,535, twice that for
//!   pieces in which one is.
//! - Decoded bytes have been verified as far as there are hashes. Of a local shard that
//!   [`prepare`](crate::prepare) wrote the footer is compared with the index and each row group with
//!   the footer, when they are first read, so that no sample waits for bytes of others; a shard whose whole
//!   hash the index states, while no hashes of row groups are stated, is hashed before its first
//!   sample. [`fetch`](crate::fetch) says how remote shards are verified.
//! - Dropping a reader withdraws its plan; dropping the last reader and decoder ends the threads,
//!   after the piece in hand, without waiting for them.
//!
//! ```
//! # use std::{num::NonZeroU64, sync::Arc};
//! # use arrow::{array::*, datatypes::*};
//! use tidemill_streaming_data::{
//!     DataSet, Mixture,
//!     order::{ShuffleOrder, ShuffleSettings},
//!     reader::{Decoder, DecoderSettings},
//! };
//!
//! # let folder = tempfile::tempdir()?;
//! # let tokens: Arc<dyn Array> = Arc::new(FixedSizeListArray::new(
//! #     Arc::new(Field::new("element", DataType::UInt16, false)),
//! #     5,
//! #     Arc::new(UInt16Array::from_iter_values(0..500)),
//! #     None,
//! # ));
//! # let batch = RecordBatch::try_from_iter([("tokens", tokens)])?;
//! # let file = std::fs::File::create(folder.path().join("0.parquet"))?;
//! # let mut writer = parquet::arrow::ArrowWriter::try_new(file, batch.schema(), None)?;
//! # writer.write(&batch)?;
//! # writer.close()?;
//! // A folder with one Parquet file of 100 rows of 5 tokens.
//! let data_set = DataSet::open(folder.path())?;
//! assert_eq!((data_set.samples(), data_set.seq_len()), (100, 4));
//!
//! let shuffle = ShuffleSettings {
//!     order: ShuffleOrder::Window,
//!     window_samples: NonZeroU64::new(64).unwrap(),
//!     seed: 17,
//! };
//! let decoder = Decoder::new(Mixture::of(data_set, shuffle)?, DecoderSettings::default())?;
//!
//! // Steps of 8 samples; this worker reads the second half of each. The plan has no end: take some.
//! let plan = (0..).map(|step| step * 8 + 4..step * 8 + 8);
//! for sample in decoder.reader(plan).take(40) {
//!     let sample = sample?;
//!     assert!(sample.position % 8 >= 4);
//!     assert_eq!(sample.tokens[4], sample.tokens[0] + 4);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::{num::NonZeroUsize, ops::Range, sync::Arc, task::Poll, thread, vec};

use crate::{error::DataError, order::mixture::Mixture};

mod queue;
mod rows;
mod samples;
mod worker_pool;

use queue::Taken;
pub(crate) use rows::TableOwner;
use samples::Samples;
use worker_pool::{Bounds, Work, WorkerPool};

/// One sample of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// Its position in the canonical order.
    pub position: u64,
    /// Its `seq_len + 1` tokens.
    pub tokens: Vec<u32>,
}

/// The resources of a [`Decoder`]; neither changes a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecoderSettings {
    /// Threads that read and decode.
    pub threads: NonZeroUsize,
    /// Memory for decoded row groups and samples that wait; see the [module](self).
    pub memory_bytes: usize,
}

impl Default for DecoderSettings {
    /// Two threads and 512 MiB.
    fn default() -> DecoderSettings {
        DecoderSettings { threads: NonZeroUsize::MIN.saturating_add(1), memory_bytes: 512 << 20 }
    }
}

/// Decodes for the readers of a process; see the [module](self). Clones are the same decoder.
#[derive(Clone)]
pub struct Decoder {
    owner: Arc<Owner<Samples>>,
}

/// Held by decoders and readers, not by threads: dropping the last one ends the threads.
struct Owner<W: Work> {
    pool: Arc<WorkerPool<W>>,
}

impl<W: Work> Owner<W> {
    /// Starts the threads.
    fn start(work: W, bounds: Bounds, threads: NonZeroUsize) -> Result<Arc<Owner<W>>, DataError> {
        let pool = Arc::new(WorkerPool::new(work, bounds));
        // Made before the threads: if one fails to start, dropping this ends the threads started before.
        let owner = Arc::new(Owner { pool: Arc::clone(&pool) });
        for number in 0..threads.get() {
            let pool = Arc::clone(&pool);
            let name = format!("tidemill-decode-{number}");
            thread::Builder::new()
                .name(name.clone())
                .spawn(move || pool.run_worker())
                .map_err(DataError::io("start the thread", name))?;
        }
        Ok(owner)
    }

    /// A reader of a plan; `wake` is called when the reader has something again.
    fn reader(
        self: &Arc<Self>,
        plan: queue::Plan,
        wake: impl Fn() + Send + Sync + 'static,
    ) -> Reader<W::Item> {
        let id = self.pool.add_reader(plan, Arc::new(wake));
        let supply = Arc::clone(self) as Arc<dyn Supply<W::Item>>;
        Reader { supply, id, batch: Vec::new().into_iter(), at_end: false }
    }
}

impl<W: Work> Drop for Owner<W> {
    fn drop(&mut self) {
        self.pool.close();
    }
}

/// The source of a reader's items, for any kind of work.
trait Supply<T>: Send + Sync {
    fn try_take(&self, reader: u64) -> Poll<Taken<T>>;
    fn take(&self, reader: u64) -> Taken<T>;
    fn remove_reader(&self, reader: u64);
}

impl<W: Work> Supply<W::Item> for Owner<W> {
    fn try_take(&self, reader: u64) -> Poll<Taken<W::Item>> {
        self.pool.try_take(reader)
    }

    fn take(&self, reader: u64) -> Taken<W::Item> {
        self.pool.take(reader)
    }

    fn remove_reader(&self, reader: u64) {
        self.pool.remove_reader(reader);
    }
}

impl Decoder {
    /// Starts the threads. Nothing is read before there is a reader.
    ///
    /// # Errors
    /// [`DataError::CacheLimit`] for a cache that is too small, [`DataError::Io`] when a thread
    /// cannot be started or the cache not be opened.
    pub fn new(mixture: Mixture, settings: DecoderSettings) -> Result<Decoder, DataError> {
        Decoder::start(mixture, settings, None)
    }

    /// As [`Decoder::new`], for readers that will stay within these positions: of a remote data
    /// set no more than that is downloaded, and only parts of shards where that is little.
    ///
    /// # Errors
    /// As [`Decoder::new`].
    pub fn of_positions(
        mixture: Mixture,
        settings: DecoderSettings,
        positions: Range<u64>,
    ) -> Result<Decoder, DataError> {
        Decoder::start(mixture, settings, Some(positions))
    }

    fn start(
        mixture: Mixture,
        settings: DecoderSettings,
        positions: Option<Range<u64>>,
    ) -> Result<Decoder, DataError> {
        let (samples, bounds) = Samples::new(mixture, settings, positions)?;
        Ok(Decoder { owner: Owner::start(samples, bounds, settings.threads)? })
    }

    /// The mixture that is decoded.
    pub fn mixture(&self) -> &Mixture {
        self.owner.pool.work().mixture()
    }

    /// A reader of the positions of a plan, one range after the other.
    ///
    /// The plan is asked for its next range while the decoder is locked: it should compute, not
    /// wait. It may be endless.
    pub fn reader<P>(&self, plan: P) -> Reader
    where
        P: IntoIterator<Item = Range<u64>, IntoIter: Send + 'static>,
    {
        self.reader_with_wake(plan, || {})
    }

    /// A reader that calls `wake` when [`Reader::try_next`] is ready again.
    ///
    /// `wake` is called by a thread of the decoder, after a sample has become ready, or an error,
    /// or the end, to a reader that had nothing ready. It may be called once more after the
    /// reader was dropped.
    pub fn reader_with_wake<P>(&self, plan: P, wake: impl Fn() + Send + Sync + 'static) -> Reader
    where
        P: IntoIterator<Item = Range<u64>, IntoIter: Send + 'static>,
    {
        self.owner.reader(Box::new(plan.into_iter()), wake)
    }
}

/// An iterator over the items of a plan; see the [module](self).
pub struct Reader<T = Sample> {
    supply: Arc<dyn Supply<T>>,
    id: u64,
    /// Items that were taken from the decoder and not yet yielded.
    batch: vec::IntoIter<T>,
    at_end: bool,
}

impl<T> Reader<T> {
    /// The next item if it is ready, without blocking. `Ready(None)` is the end of the plan, or
    /// comes after an error.
    ///
    /// # Errors
    /// The fault of the sample's shard or row; [`DataError::DecodingPanic`] when a
    /// thread, the plan or the wake callback panicked.
    pub fn try_next(&mut self) -> Poll<Option<Result<T, DataError>>> {
        if let Some(item) = self.batch.next() {
            return Poll::Ready(Some(Ok(item)));
        }
        if self.at_end {
            return Poll::Ready(None);
        }
        match self.supply.try_take(self.id) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(taken) => Poll::Ready(self.accept(taken)),
        }
    }

    fn accept(&mut self, taken: Taken<T>) -> Option<Result<T, DataError>> {
        match taken {
            Taken::Batch(items) => {
                self.batch = items.into_iter();
                self.batch.next().map(Ok)
            }
            Taken::Failure(error) => {
                self.at_end = true;
                Some(Err(error))
            }
            Taken::End => {
                self.at_end = true;
                None
            }
        }
    }
}

impl<T> Iterator for Reader<T> {
    type Item = Result<T, DataError>;

    /// The next item, waiting for it.
    fn next(&mut self) -> Option<Result<T, DataError>> {
        match self.try_next() {
            Poll::Ready(next) => next,
            Poll::Pending => {
                let taken = self.supply.take(self.id);
                self.accept(taken)
            }
        }
    }
}

impl<T> Drop for Reader<T> {
    fn drop(&mut self) {
        self.supply.remove_reader(self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        iter::once,
        num::NonZeroU64,
        time::{Duration, Instant},
    };

    use arrow::{
        array::{ArrayRef, FixedSizeListArray, RecordBatch, UInt16Array},
        datatypes::{DataType, Field},
    };
    use parquet::arrow::ArrowWriter;

    use super::*;
    use crate::{
        data_set::DataSet,
        order::{ShuffleOrder, ShuffleSettings},
    };

    #[test]
    fn threads_end_with_the_last_decoder_and_reader() {
        let folder = tempfile::tempdir().unwrap();
        let item = Arc::new(Field::new("element", DataType::UInt16, false));
        let tokens = Arc::new(UInt16Array::from_iter_values(0..60));
        let lists = Arc::new(FixedSizeListArray::new(item, 3, tokens, None)) as ArrayRef;
        let batch = RecordBatch::try_from_iter([("tokens", lists)]).unwrap();
        let file = fs::File::create(folder.path().join("a.parquet")).unwrap();
        let mut writer = ArrowWriter::try_new(file, batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();

        let data_set = DataSet::open(folder.path()).unwrap();
        for is_in_use in [false, true] {
            let settings = ShuffleSettings {
                order: ShuffleOrder::Full,
                window_samples: NonZeroU64::MIN,
                seed: 1,
            };
            let mixture = Mixture::of(data_set.clone(), settings).unwrap();
            let decoder = Decoder::new(mixture, DecoderSettings::default()).unwrap();
            let pool = Arc::downgrade(&decoder.owner.pool);
            let mut reader = decoder.reader(once(0..u64::MAX));
            drop(decoder);
            if is_in_use {
                assert!(reader.next().unwrap().is_ok());
            }
            assert!(pool.upgrade().is_some());
            drop(reader);
            // Only threads still hold the pool.
            let deadline = Instant::now() + Duration::from_secs(60);
            while pool.strong_count() > 0 {
                assert!(Instant::now() < deadline, "threads go on without a reader");
                thread::yield_now();
            }
        }
    }
}
