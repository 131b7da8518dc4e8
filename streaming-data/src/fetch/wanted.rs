//! How much of each shard a stream needs: the whole, or ranges.

use std::{collections::HashMap, ops::Range};

use crate::{
    order::{CanonicalOrder, ShuffleOrder},
    shard::Shard,
};

/// The longest stream that is counted sample by sample.
const COUNTED_SAMPLES: u64 = 65_536;

/// A shard is fetched whole if at least one in `WHOLE_FROM` of its samples is wanted.
const WHOLE_FROM: u64 = 4;

/// How a shard is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Whole,
    Ranges,
}

/// See the [module](self).
pub(super) enum Wanted {
    /// All of every shard, up to a position.
    All { end: u64 },
    /// All, but a few samples at a time from any shard.
    Scattered,
    /// These shards, whole or in part, up to a position.
    Counted { shards: HashMap<usize, Access>, end: u64 },
}

impl Wanted {
    pub(super) fn new(
        shards: &[Shard],
        order: &CanonicalOrder,
        positions: Option<Range<u64>>,
        limit_bytes: Option<u64>,
    ) -> Wanted {
        let bytes: u64 = shards.iter().fold(0, |sum, shard| sum.saturating_add(shard.bytes()));
        let end = positions.as_ref().map_or(u64::MAX, |positions| positions.end);
        match positions {
            Some(positions) if positions.end.saturating_sub(positions.start) <= COUNTED_SAMPLES => {
                let mut counts: HashMap<usize, u64> = HashMap::new();
                for position in positions {
                    *counts.entry(order.sample_at(position).shard).or_default() += 1;
                }
                let is_too_large = order.settings().order == ShuffleOrder::Full
                    && limit_bytes.is_some_and(|limit| limit < bytes);
                let access = |(shard, count): (usize, u64)| {
                    let is_whole = count.saturating_mul(WHOLE_FROM) >= shards[shard].samples();
                    let access =
                        if is_whole && !is_too_large { Access::Whole } else { Access::Ranges };
                    (shard, access)
                };
                Wanted::Counted { shards: counts.into_iter().map(access).collect(), end }
            }
            _ => match (order.settings().order, limit_bytes) {
                (ShuffleOrder::Full, Some(limit)) if limit < bytes => Wanted::Scattered,
                _ => Wanted::All { end },
            },
        }
    }

    /// How a shard is read. One that the stream was not expected to read is not worth keeping.
    pub(super) fn access(&self, shard: usize) -> Access {
        match self {
            Wanted::All { .. } => Access::Whole,
            Wanted::Scattered => Access::Ranges,
            Wanted::Counted { shards, .. } => shards.get(&shard).copied().unwrap_or(Access::Ranges),
        }
    }

    /// The end of the positions.
    pub(super) fn end(&self) -> u64 {
        match self {
            Wanted::All { end } | Wanted::Counted { end, .. } => *end,
            Wanted::Scattered => u64::MAX,
        }
    }
}
