//! Positions of a mixture to samples: which pieces of which row groups hold them, each decoded once
//! and kept until it has gone out of use.

use std::ops::Range;

use super::{
    Sample,
    queue::BatchRule,
    workshop::{Bounds, Work},
};
use crate::{
    cache::BoundedCache,
    data_set::Place,
    error::DataError,
    mixture::Mixture,
    shard::{DecodedTokens, Scratch},
};

/// Samples are handed over in batches of about this size.
const BATCH_BYTES: usize = 128 << 10;

/// See the [module](self).
pub(super) struct Samples {
    mixture: Mixture,
    /// By part of the mixture.
    decoded: BoundedCache<(usize, Place), DecodedTokens>,
}

impl Samples {
    /// The samples of a mixture, and how many may wait, within a bound on memory.
    pub(super) fn new(mixture: Mixture, memory_bytes: usize) -> (Samples, Bounds) {
        let sample_bytes = size_of::<Sample>() + (mixture.seq_len() + 1) * size_of::<u32>();
        let waiting_bytes = memory_bytes / 4;
        // A small bound makes small batches before it makes few.
        let batch_bytes = BATCH_BYTES.min(waiting_bytes / 4);
        let batch_samples = (batch_bytes / sample_bytes).clamp(1, 64);
        let bounds = Bounds {
            batch: BatchRule { samples: batch_samples as u64, ends_with_range: false },
            batches: waiting_bytes / (batch_samples * sample_bytes),
        };
        let decoded = BoundedCache::new(memory_bytes - waiting_bytes);
        (Samples { mixture, decoded }, bounds)
    }

    pub(super) fn mixture(&self) -> &Mixture {
        &self.mixture
    }
}

impl Work for Samples {
    type Item = Sample;
    type Scratch = Scratch;

    fn make(
        &self,
        positions: &[Range<u64>],
        scratch: &mut Scratch,
    ) -> Result<Vec<Sample>, DataError> {
        let count = positions.iter().map(|range| range.end - range.start).sum::<u64>();
        let mut samples = Vec::with_capacity(count as usize);
        for position in positions.iter().cloned().flatten() {
            let mixed = self.mixture.sample_at(position);
            let (data_set, id) = (self.mixture.data_set(mixed.part), mixed.sample);
            let footer = data_set.footer(id.shard)?;
            let (group, first_row) = footer.group_of(id.row);
            let row = id.row - first_row;
            let pieces = data_set.pieces(id.shard, &footer, group, scratch)?;
            let mut tokens = Vec::with_capacity(data_set.seq_len() + 1);
            for piece in pieces.of_row(row) {
                let place = Place { shard: id.shard, group, piece };
                let decoded = self.decoded.get_or_load((mixed.part, place), || {
                    data_set.decode(place, &footer, &pieces, scratch)
                })?;
                decoded.copy_to(data_set.places_of(row), &mut tokens);
            }
            samples.push(Sample { position, tokens });
        }
        Ok(samples)
    }
}
