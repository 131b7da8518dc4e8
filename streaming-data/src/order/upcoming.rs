//! Which shards the stream needs next, without looking at samples.
//!
//! Shards are fetched, kept and evicted by their known future uses. Whole windows are looked at, not
//! samples: a shard is needed from the first window that holds a row of it to the last.

use std::{collections::HashSet, iter, ops::Range};

use super::{CanonicalOrder, ShuffleOrder};

/// A shard, and where in the stream it is needed during one epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardUse {
    /// Which shard, in stored order, from 0.
    pub shard: usize,
    /// Positions among which all of its samples of the epoch are.
    pub positions: Range<u64>,
}

/// Samples of a full shuffle that are looked at, to know which shards come first.
const FULL_LOOK_AHEAD: u64 = 1024;

impl CanonicalOrder {
    /// The shards that the stream needs from a position on, in the order in which it needs them,
    /// without end. Each shard comes once for each epoch. Finding the first takes O(log shards) for a
    /// known epoch, and O(1) for each further one.
    ///
    /// A full shuffle needs all shards all the time: the shards of its next 1,024 samples come first,
    /// then the others as they are stored.
    pub fn shards_from(&self, position: u64) -> impl Iterator<Item = ShardUse> + use<'_> {
        let first = position / self.samples;
        (first..=u64::MAX / self.samples).flat_map(move |epoch| {
            let place = if epoch == first { position % self.samples } else { 0 };
            self.shards_of_epoch(epoch, place)
        })
    }

    fn shards_of_epoch(&self, epoch: u64, from: u64) -> Box<dyn Iterator<Item = ShardUse> + '_> {
        let (n, start) = (self.samples.get(), epoch * self.samples.get());
        if self.settings.order == ShuffleOrder::Full {
            let mut seen = HashSet::new();
            let look = (from..n.min(from.saturating_add(FULL_LOOK_AHEAD)))
                .map(move |place| self.sample_at(start + place).shard);
            let all = self.stored.shards.iter().copied();
            let shards = look
                .chain(all)
                .filter(move |&shard| seen.insert(shard) && self.stored.samples_of(shard) > 0);
            let positions = start..start.saturating_add(n);
            return Box::new(
                shards.map(move |shard| ShardUse { shard, positions: positions.clone() }),
            );
        }
        let shards = match self.settings.order {
            ShuffleOrder::None => std::sync::Arc::clone(&self.stored),
            _ => self.of_epoch(epoch),
        };
        let window = match self.settings.order {
            ShuffleOrder::Window => self.settings.window_samples.get(),
            _ => 1,
        };
        let end_of_need = move |end: u64| end.div_ceil(window).saturating_mul(window).min(n);
        let mut at = shards.ends.partition_point(|&end| end_of_need(end) <= from);
        Box::new(iter::from_fn(move || {
            while at < shards.shards.len() {
                let (first, end) = (shards.start(at), shards.ends[at]);
                let shard = shards.shards[at];
                at += 1;
                // A shard without samples is never needed.
                if first < end {
                    let begin = start + first / window * window;
                    let positions = begin..start.saturating_add(end_of_need(end));
                    return Some(ShardUse { shard, positions });
                }
            }
            None
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;
    use crate::order::ShuffleSettings;

    #[test]
    fn every_shard_stands_at_its_first_need_and_is_not_needed_outside_of_its_positions() {
        let samples = [13, 1, 0, 24, 7, 10];
        let n = 55;
        for order in
            [ShuffleOrder::None, ShuffleOrder::Shard, ShuffleOrder::Window, ShuffleOrder::Full]
        {
            for window in [1, 9, 24, 100] {
                let window_samples = NonZeroU64::new(window).unwrap();
                let settings = ShuffleSettings { order, window_samples, seed: 5 };
                let canonical = CanonicalOrder::new(&samples, settings).unwrap();
                for from in (0..2 * n).step_by(7) {
                    let uses: Vec<ShardUse> = canonical.shards_from(from).take(8).collect();
                    for (at, need) in uses.iter().enumerate() {
                        assert!(need.positions.end > from);
                        let epoch = need.positions.start / n;
                        for position in epoch * n..(epoch + 1) * n {
                            let is_needed = canonical.sample_at(position).shard == need.shard;
                            assert!(!is_needed || need.positions.contains(&position));
                        }
                        assert!(at == 0 || uses[at - 1].positions.start <= need.positions.start);
                    }
                    // No shard is left out: the shards of the next samples are among the first.
                    let next: Vec<usize> = uses.iter().map(|need| need.shard).collect();
                    for position in from..from + 3 {
                        assert!(
                            next.contains(&canonical.sample_at(position).shard),
                            "{order} {from}"
                        );
                    }
                    let of_first =
                        uses.iter().filter(|u| u.positions.start / n == from / n).count();
                    assert!(of_first <= 5);
                }
            }
        }
    }
}
