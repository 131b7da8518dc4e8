//! The canonical order: which sample is at a position of the endless stream.
//!
//! Position -> sample is a pure function of the numbers of samples per shard and of the
//! [`ShuffleSettings`]. It depends on no worker, thread or batch that reads the position.
//! It is computed for any position at once, in time O(log shards) and memory O(shards), so
//! resuming costs nothing and no epoch has to be built.
//!
//! Epochs follow each other without a seam: positions `[e n, (e + 1) n)` hold every one of the n
//! samples once, in a permutation of their own. Within an epoch:
//!
//! | [`ShuffleOrder`] | order |
//! |---|---|
//! | `none` | as stored |
//! | `shard` | shards permuted, rows as stored |
//! | `window` | shards permuted, then windows of `window_samples` of that stream permuted inside |
//! | `full` | one permutation of all samples |
//!
//! `window` is the one to train with: it mixes thousands of samples, yet reads few shards at a
//! time. `full` mixes perfectly and decodes a row group for nearly every sample of a large set.
//!
//! ```
//! use std::num::NonZeroU64;
//! use tidemill_streaming_data::order::{CanonicalOrder, ShuffleOrder, ShuffleSettings};
//!
//! let settings = ShuffleSettings {
//!     order: ShuffleOrder::Window,
//!     window_samples: NonZeroU64::new(4).unwrap(),
//!     seed: 17,
//! };
//! let order = CanonicalOrder::new(&[5, 3], settings)?;
//! let mut first_epoch: Vec<_> = (0..8).map(|position| order.sample_at(position)).collect();
//! assert!(first_epoch.iter().all(|sample| sample.epoch == 0));
//! first_epoch.sort_by_key(|sample| (sample.shard, sample.row));
//! assert_eq!(first_epoch.iter().map(|s| s.row).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 0, 1, 2]);
//! // Any position, at once.
//! assert_eq!(order.sample_at(8_000_000_000_000).epoch, 1_000_000_000_000);
//! # Ok::<(), tidemill_streaming_data::DataError>(())
//! ```

use std::{
    collections::VecDeque,
    fmt,
    num::NonZeroU64,
    sync::{Arc, Mutex, PoisonError},
};

use serde::{Deserialize, Serialize};

use crate::error::DataError;

pub mod cursor;
pub mod mixture;
mod permutation;
mod shares;
pub mod statistics;
mod upcoming;

pub use permutation::{Key, Permutation};
pub use shares::Shares;
pub use upcoming::ShardUse;

/// How the samples of an epoch are permuted; see the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ShuffleOrder {
    /// Samples in the order in which they are stored.
    None,
    /// Shards permuted, rows as stored.
    Shard,
    /// Shards permuted, then windows of that stream permuted inside.
    #[default]
    Window,
    /// One permutation of all samples.
    Full,
}

impl fmt::Display for ShuffleOrder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            ShuffleOrder::None => "none",
            ShuffleOrder::Shard => "shard",
            ShuffleOrder::Window => "window",
            ShuffleOrder::Full => "full",
        })
    }
}

/// Everything but the data that the canonical order depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShuffleSettings {
    /// How an epoch is permuted.
    pub order: ShuffleOrder,
    /// Samples in a window, the last of an epoch excepted; only [`ShuffleOrder::Window`] uses it.
    pub window_samples: NonZeroU64,
    /// Selects the permutations; [`ShuffleOrder::None`] does not use it.
    pub seed: u64,
}

impl ShuffleSettings {
    /// Samples in a window unless another number is asked for.
    pub const DEFAULT_WINDOW_SAMPLES: NonZeroU64 = NonZeroU64::new(16_384).unwrap();
}

/// A sample of the data set, and the epoch in which the stream meets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SampleId {
    /// Which pass over the data, from 0.
    pub epoch: u64,
    /// Which shard, in stored order, from 0.
    pub shard: usize,
    /// Which row of the shard, from 0.
    pub row: u64,
}

/// The function from positions to samples; see the [module](self).
#[derive(Debug)]
pub struct CanonicalOrder {
    settings: ShuffleSettings,
    samples: NonZeroU64,
    /// The shards one after the other as they are stored.
    stored: Arc<Concatenation>,
    /// The shards of the epochs used last, one after the other as that epoch permutes them. Two,
    /// because readers at a seam look to both sides of it.
    epochs: Mutex<VecDeque<(u64, Arc<Concatenation>)>>,
}

const EPOCHS_KEPT: usize = 2;

/// The uses of permutations, so that no two of them share a key.
mod purpose {
    pub const SHARDS: u64 = 1;
    pub const WINDOW: u64 = 2;
    pub const FULL: u64 = 3;
}

impl CanonicalOrder {
    /// The order over shards of these numbers of samples.
    ///
    /// # Errors
    /// [`DataError::Order`] when there is no sample, or more than a `u64` counts.
    pub fn new(
        samples_per_shard: &[u64],
        settings: ShuffleSettings,
    ) -> Result<CanonicalOrder, DataError> {
        let wrong = |found: &str| DataError::Order {
            shards: samples_per_shard.len(),
            found: found.to_owned(),
            expected: "1 to 2^64 - 1 samples in all",
        };
        samples_per_shard
            .iter()
            .try_fold(0_u64, |sum, &samples| sum.checked_add(samples))
            .ok_or_else(|| wrong("more samples than 2^64 - 1"))?;
        let stored = Concatenation::new((0..samples_per_shard.len()).collect(), samples_per_shard);
        let samples = NonZeroU64::new(stored.samples()).ok_or_else(|| wrong("no sample"))?;
        Ok(CanonicalOrder {
            settings,
            samples,
            stored: Arc::new(stored),
            epochs: Mutex::new(VecDeque::with_capacity(EPOCHS_KEPT)),
        })
    }

    /// The settings that it was made with.
    pub fn settings(&self) -> ShuffleSettings {
        self.settings
    }

    /// Samples in an epoch.
    pub fn samples(&self) -> u64 {
        self.samples.get()
    }

    /// The sample at a position of the endless stream.
    pub fn sample_at(&self, position: u64) -> SampleId {
        let (epoch, place) = (position / self.samples, position % self.samples);
        let key = Key::new(self.settings.seed);
        let (shard, row) = match self.settings.order {
            ShuffleOrder::None => self.stored.locate(place),
            ShuffleOrder::Shard => self.of_epoch(epoch).locate(place),
            ShuffleOrder::Window => {
                let window = place / self.settings.window_samples;
                let start = window * self.settings.window_samples.get();
                let length = self.settings.window_samples.get().min(self.samples.get() - start);
                let length = NonZeroU64::new(length).expect("a place is inside of its window");
                let key = key.refine(purpose::WINDOW).refine(epoch).refine(window);
                let inside = Permutation::new(length, key).apply(place - start);
                self.of_epoch(epoch).locate(start + inside)
            }
            ShuffleOrder::Full => {
                let key = key.refine(purpose::FULL).refine(epoch);
                self.stored.locate(Permutation::new(self.samples, key).apply(place))
            }
        };
        SampleId { epoch, shard, row }
    }

    /// The place of a sample in stored order, from 0.
    pub(crate) fn stored_place(&self, sample: SampleId) -> u64 {
        self.stored.start(sample.shard) + sample.row
    }

    /// The shards in the order of an epoch.
    fn of_epoch(&self, epoch: u64) -> Arc<Concatenation> {
        // A panic cannot leave this queue half changed: its lock is used poisoned or not.
        let mut epochs = self.epochs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, order)) = epochs.iter().find(|(of, _)| *of == epoch) {
            return Arc::clone(order);
        }
        let key = Key::new(self.settings.seed).refine(purpose::SHARDS).refine(epoch);
        let shards = permutation::shuffled(self.stored.shards.len(), key);
        let order = Arc::new(Concatenation::new(shards, &self.stored.samples_per_shard()));
        if epochs.len() == EPOCHS_KEPT {
            epochs.pop_front();
        }
        epochs.push_back((epoch, Arc::clone(&order)));
        order
    }
}

/// Shards one after the other.
#[derive(Debug)]
struct Concatenation {
    /// The shards in this order.
    shards: Vec<usize>,
    /// The end of each shard, counted in samples from the first shard.
    ends: Vec<u64>,
}

impl Concatenation {
    /// The sum of all samples must fit a `u64`.
    fn new(shards: Vec<usize>, samples_per_shard: &[u64]) -> Concatenation {
        let ends = shards
            .iter()
            .scan(0, |end, &shard| {
                *end += samples_per_shard[shard];
                Some(*end)
            })
            .collect();
        Concatenation { shards, ends }
    }

    fn samples(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    fn start(&self, at: usize) -> u64 {
        if at == 0 { 0 } else { self.ends[at - 1] }
    }

    /// Samples of a shard; only meaningful where the shards are in stored order.
    fn samples_of(&self, shard: usize) -> u64 {
        self.ends[shard] - self.start(shard)
    }

    /// Samples by shard; only meaningful where the shards are in stored order.
    fn samples_per_shard(&self) -> Vec<u64> {
        (0..self.ends.len()).map(|at| self.ends[at] - self.start(at)).collect()
    }

    /// Shard and row of a place below `samples()`; empty shards hold no place.
    fn locate(&self, place: u64) -> (usize, u64) {
        let at = self.ends.partition_point(|&end| end <= place);
        (self.shards[at], place - self.start(at))
    }
}
