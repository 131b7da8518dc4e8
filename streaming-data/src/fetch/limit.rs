//! The smallest limit of a cache that can work; the table is in [`crate::fetch`].

use std::path::Path;

use crate::{
    error::DataError,
    order::{ShuffleOrder, ShuffleSettings},
    shard::Shard,
};

/// Bytes that the cache must hold at once for a stream.
pub(super) struct Need {
    bytes: u64,
    largest: u64,
    settings: ShuffleSettings,
    threads: usize,
}

impl Need {
    /// The need of a stream that needs these shards, of (bytes, samples), whole.
    pub(super) fn new(shards: &[(u64, u64)], settings: ShuffleSettings, threads: usize) -> Need {
        let largest = shards.iter().map(|shard| shard.0).max().unwrap_or(0);
        Need { bytes: smallest(shards, settings, threads), largest, settings, threads }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Refuses a limit that cannot work, given the needs of the other streams of the process.
    pub(super) fn check(
        &self,
        limit_bytes: u64,
        taken_bytes: u64,
        folder: &Path,
    ) -> Result<(), DataError> {
        let needed_bytes = self.bytes.saturating_add(taken_bytes);
        if limit_bytes >= needed_bytes {
            return Ok(());
        }
        let Need { largest, settings, threads, .. } = self;
        let window = match settings.order {
            ShuffleOrder::Window => format!(" windows of {} samples,", settings.window_samples),
            _ => String::new(),
        };
        let others = match taken_bytes {
            0 => String::new(),
            bytes => format!(", and {bytes} bytes for other streams of this process"),
        };
        let reason = format!(
            "shuffle {},{window} {threads} threads and shards of up to {largest} bytes{others}",
            settings.order
        );
        Err(DataError::CacheLimit { path: folder.to_owned(), limit_bytes, needed_bytes, reason })
    }
}

/// Bytes that the cache must hold.
pub(crate) fn smallest_cache_bytes(
    shards: &[Shard],
    settings: ShuffleSettings,
    threads: usize,
) -> u64 {
    let sizes: Vec<(u64, u64)> =
        shards.iter().map(|shard| (shard.bytes(), shard.samples())).collect();
    smallest(&sizes, settings, threads)
}

/// As [`smallest_cache_bytes`], for shards of (bytes, samples).
fn smallest(shards: &[(u64, u64)], settings: ShuffleSettings, threads: usize) -> u64 {
    let all = shards.iter().fold(0_u64, |sum, shard| sum.saturating_add(shard.0));
    let largest = shards.iter().map(|shard| shard.0).max().unwrap_or(0);
    let in_use = largest.saturating_mul(threads as u64 + 1);
    let needed = match settings.order {
        ShuffleOrder::None | ShuffleOrder::Shard => in_use,
        ShuffleOrder::Window => {
            let samples = settings.window_samples.get().saturating_mul(2);
            in_use.saturating_add(largest).saturating_add(densest(shards, samples))
        }
        // Shards are read whole only where all of them fit.
        ShuffleOrder::Full => all,
    };
    needed.min(all)
}

/// The most bytes that `samples` samples can have; a part of a shard counts in proportion.
fn densest(shards: &[(u64, u64)], mut samples: u64) -> u64 {
    let mut shards: Vec<(u64, u64)> = shards.iter().copied().filter(|shard| shard.1 > 0).collect();
    // Bytes per sample, compared without dividing.
    shards.sort_by(|one, other| {
        let cross = |a: (u64, u64), b: (u64, u64)| u128::from(a.0) * u128::from(b.1);
        cross(*other, *one).cmp(&cross(*one, *other))
    });
    let mut bytes = 0_u64;
    for (of_shard, samples_of_shard) in shards {
        if samples == 0 {
            break;
        }
        let taken = samples.min(samples_of_shard);
        let part = (u128::from(of_shard) * u128::from(taken)).div_ceil(samples_of_shard.into());
        bytes = bytes.saturating_add(part as u64);
        samples -= taken;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;

    #[test]
    fn the_table_is_computed() {
        let shards = [(100, 10), (50, 10), (30, 2), (100, 100), (1000, 1000)];
        let smallest = |order, window| {
            let window_samples = NonZeroU64::new(window).unwrap();
            smallest(&shards, ShuffleSettings { order, window_samples, seed: 0 }, 2)
        };
        let all = 1280;
        assert_eq!(smallest(ShuffleOrder::None, 1), all); // 3 * 1000 is more than all
        let shards = [(100, 10); 20];
        let smallest = |order, window| {
            let window_samples = NonZeroU64::new(window).unwrap();
            super::smallest(&shards, ShuffleSettings { order, window_samples, seed: 0 }, 2)
        };
        assert_eq!(smallest(ShuffleOrder::None, 1), 300);
        assert_eq!(smallest(ShuffleOrder::Shard, 7), 300);
        assert_eq!(smallest(ShuffleOrder::Window, 7), 400 + 140);
        assert_eq!(smallest(ShuffleOrder::Window, 1000), 2000);
        assert_eq!(smallest(ShuffleOrder::Full, 1), 2000);
        // The densest first: 2 of 15, 10 of 10, 4 of 5 bytes each.
        assert_eq!(densest(&[(50, 10), (30, 2), (100, 10), (0, 0)], 16), 30 + 100 + 20);
    }
}
