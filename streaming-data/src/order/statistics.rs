//! Order statistics: how well an order mixes, and the cost of reading it, to choose one before a run.
//!
//! **Mixing.** Samples that are stored close together are often alike: one site, one language, one
//! year. A batch of samples that were stored side by side says little more than one of them. The
//! [effective batch](OrderStatistics::effective_batch) puts a number to it: let u be the place of a sample in
//! stored order, from 0 to 1. The mean of u over a batch of B samples drawn independently has the
//! variance 1 / (12 B) around 1/2; the mean over a batch of the order has some variance v, and
//! `1 / (12 v)` is the number of independent samples that such a batch is worth to anything that
//! drifts along the stored order (the reciprocal of the design effect of L. Kish, "Survey
//! Sampling", 1965, times B). It is about 1 for batches that were stored side by side, and B for a
//! perfect shuffle. It is estimated over batches of several epochs, and good to a tenth.
//!
//! **Cost.** The bytes to download before the first batch, the cache size with which every shard is
//! downloaded once an epoch, and how often shards are read with a smaller cache.

use std::{collections::BTreeSet, num::NonZeroU64};

use crate::{
    fetch,
    order::{ShuffleOrder, mixture::Mixture},
};

/// Statistics of an order; see the [module](self).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OrderStatistics {
    /// Samples of a batch, at most those of an epoch.
    pub batch: u64,
    /// Independent samples that a batch is worth, from 1 to `batch`.
    pub effective_batch: f64,
    /// Shards in which the samples of a batch are, on average.
    pub shards_per_batch: f64,
    /// Bytes of all shards.
    pub bytes: u64,
    /// Bytes of the shards that hold the samples of the first batch; reading by ranges takes fewer.
    pub first_batch_bytes: u64,
    /// The smallest `cache_limit_bytes` with which shards are downloaded whole, by a decoder of
    /// two threads.
    pub cache_bytes: u64,
    /// How often a shard is read in an epoch: once where shards are downloaded whole; once for every
    /// sample where a full shuffle reads ranges; none where a run with such a limit is refused.
    pub reads_per_shard: Option<f64>,
}

/// About how many samples are measured.
const MEASURED_SAMPLES: u64 = 1 << 19;

/// The most batches that are measured.
const BATCHES: u64 = 1024;

/// Epochs over which they are spread.
const EPOCHS: u64 = 8;

/// Threads of a decoder, as by default.
const THREADS: usize = 2;

impl OrderStatistics {
    /// Measures the order of a mixture in batches of `batch` samples, with a cache of
    /// `cache_limit_bytes` where it has a limit. A larger batch than an epoch is measured as one of an epoch.
    pub fn new(
        mixture: &Mixture,
        batch: NonZeroU64,
        cache_limit_bytes: Option<u64>,
    ) -> OrderStatistics {
        let batch = batch.get().min(mixture.samples().max(1));
        let batches = (MEASURED_SAMPLES / batch).clamp(16, BATCHES);
        let span = mixture.samples().saturating_mul(EPOCHS).max(batch);
        let (mut squares, mut shards) = (0.0, 0);
        for number in 0..batches {
            // Spread evenly, and not in step with windows.
            let start =
                (u128::from(span - batch) * u128::from(number) / u128::from(batches)) as u64;
            let (mean, touched) = measure(mixture, start, batch);
            squares += (mean - 0.5).powi(2);
            shards += touched.len();
        }
        let variance = squares / batches as f64;
        let parts = || mixture.parts().iter().enumerate();
        let bytes = |part: usize| -> u64 {
            mixture.data_set(part).shards().iter().map(|shard| shard.bytes()).sum()
        };
        let (_, first) = measure(mixture, 0, batch);
        let first_batch_bytes =
            first.iter().map(|&(part, shard)| mixture.data_set(part).shards()[shard].bytes()).sum();
        let cache_bytes = parts()
            .map(|(part, _)| {
                let settings = mixture.order(part).settings();
                fetch::smallest_cache_bytes(mixture.data_set(part).shards(), settings, THREADS)
            })
            .sum();
        let is_whole = cache_limit_bytes.is_none_or(|limit| limit >= cache_bytes);
        let is_ranged =
            parts().all(|(part, _)| mixture.order(part).settings().order == ShuffleOrder::Full);
        let (samples, count) = parts().fold((0, 0), |(samples, count), (_, part)| {
            (samples + part.data_set.samples(), count + part.data_set.shards().len())
        });
        OrderStatistics {
            batch,
            effective_batch: (1.0 / (12.0 * variance)).max(1.0).min(batch as f64),
            shards_per_batch: shards as f64 / batches as f64,
            bytes: parts().map(|(part, _)| bytes(part)).sum(),
            first_batch_bytes,
            cache_bytes,
            reads_per_shard: match is_whole {
                true => Some(1.0),
                false => is_ranged.then_some(samples as f64 / count as f64),
            },
        }
    }
}

/// Mean place in stored order of the samples of a batch, from 0 to 1, and the parts and shards in
/// which they are.
fn measure(mixture: &Mixture, start: u64, batch: u64) -> (f64, BTreeSet<(usize, usize)>) {
    let (mut sum, mut shards) = (0.0, BTreeSet::new());
    for position in start..start + batch {
        let mixed = mixture.sample_at(position);
        let order = mixture.order(mixed.part);
        sum += (order.stored_place(mixed.sample) as f64 + 0.5) / order.samples() as f64;
        shards.insert((mixed.part, mixed.sample.shard));
    }
    (sum / batch as f64, shards)
}
