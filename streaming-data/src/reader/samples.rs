//! Positions of a mixture to samples: which pieces of which row groups hold them, each decoded once
//! and kept until it has gone out of use.

use std::ops::Range;

use super::{
    DecoderSettings, Sample,
    queue::BatchRule,
    worker_pool::{Bounds, IfBusy, Progress, Work},
};
use crate::{
    cache::memory::BoundedCache,
    data_set::Place,
    error::DataError,
    fetch::Fetcher,
    order::{
        SampleId,
        mixture::{MixedSample, Mixture},
    },
    shard::{DecodedTokens, Scratch},
};

/// Samples are handed over in batches of about this size.
const BATCH_BYTES: usize = 128 << 10;

/// See the [module](self).
pub(super) struct Samples {
    mixture: Mixture,
    /// Where the shards of each part come from.
    fetchers: Vec<Fetcher>,
    /// Keyed by part of the mixture and place.
    decoded: BoundedCache<(usize, Place), DecodedTokens>,
}

impl Samples {
    /// The samples of a mixture, and how many may wait within the memory bound. `positions` are
    /// those that will be read, where they are known.
    pub(super) fn new(
        mixture: Mixture,
        settings: DecoderSettings,
        positions: Option<Range<u64>>,
    ) -> Result<(Samples, Bounds), DataError> {
        let memory_bytes = settings.memory_bytes;
        let fetchers = (0..mixture.parts().len())
            .map(|part| {
                let positions = positions.as_ref().map(|range| mixture.positions_of(part, range));
                let (data_set, order) = (mixture.data_set(part), mixture.order(part));
                Fetcher::new(data_set.all(), order, positions, settings.threads.get())
            })
            .collect::<Result<_, _>>()?;
        let sample_bytes = size_of::<Sample>() + (mixture.seq_len() + 1) * size_of::<u32>();
        let waiting_bytes = memory_bytes / 4;
        // Under a small memory bound batches become smaller before they become fewer.
        let batch_bytes = BATCH_BYTES.min(waiting_bytes / 4);
        let batch_samples = (batch_bytes / sample_bytes).clamp(1, 64);
        let bounds = Bounds {
            batch: BatchRule { samples: batch_samples as u64, ends_with_range: false },
            batches: waiting_bytes / (batch_samples * sample_bytes),
        };
        let decoded = BoundedCache::new(memory_bytes - waiting_bytes);
        Ok((Samples { mixture, fetchers, decoded }, bounds))
    }

    /// Begins to read the ranges that remote samples need, several requests at once.
    fn begin_to_fetch(&self, positions: impl Iterator<Item = u64>) -> Result<(), DataError> {
        let mixed: Vec<MixedSample> = positions.map(|at| self.mixture.sample_at(at)).collect();
        for (part, fetcher) in self.fetchers.iter().enumerate().filter(|(_, f)| f.is_remote()) {
            let of_part = mixed.iter().filter(|mixed| mixed.part == part);
            let wanted: Vec<SampleId> = of_part.map(|mixed| mixed.sample).collect();
            // A row group that is read by ranges is one piece.
            fetcher.begin(&wanted, |shard, group| {
                self.decoded.holds(&(part, Place { shard, group, piece: 0 }))
            })?;
        }
        Ok(())
    }

    pub(super) fn mixture(&self) -> &Mixture {
        &self.mixture
    }
}

impl Work for Samples {
    type Item = Sample;
    type Scratch = Scratch;

    fn begin(&self, reader: u64, positions: &[Range<u64>]) {
        let (Some(first), Some(last)) = (positions.first(), positions.last()) else { return };
        for (part, fetcher) in self.fetchers.iter().enumerate().filter(|(_, f)| f.is_remote()) {
            fetcher.begin_batch(reader, self.mixture.positions_of(part, &(first.start..last.end)));
        }
    }

    fn end(&self, reader: u64, positions: &[Range<u64>]) {
        let Some(first) = positions.first() else { return };
        for (part, fetcher) in self.fetchers.iter().enumerate().filter(|(_, f)| f.is_remote()) {
            fetcher.end_batch(reader, self.mixture.positions_of(part, first).start);
        }
    }

    fn remove_reader(&self, reader: u64) {
        self.fetchers.iter().for_each(|fetcher| fetcher.remove_reader(reader));
    }

    fn close(&self) {
        self.fetchers.iter().for_each(Fetcher::close);
    }

    fn make(
        &self,
        positions: &[Range<u64>],
        scratch: &mut Scratch,
        samples: &mut Vec<Sample>,
        if_busy: IfBusy,
        is_older_ready: &dyn Fn() -> bool,
    ) -> Result<Progress, DataError> {
        let positions = || positions.iter().cloned().flatten().skip(samples.len());
        // A batch that is begun keeps its shards in the cache, so remote batches are not deferred: there
        // are never more of them than threads.
        let is_remote = self.fetchers.iter().any(Fetcher::is_remote);
        let may_defer = if_busy == IfBusy::Defer && !is_remote;
        if is_remote {
            self.begin_to_fetch(positions())?;
        }
        let positions: Vec<u64> = positions().collect();
        samples.reserve(positions.len());
        for position in positions {
            let MixedSample { part, sample: id, .. } = self.mixture.sample_at(position);
            let (data_set, fetcher) = (self.mixture.data_set(part), &self.fetchers[part]);
            let footer = data_set.all().footer(id.shard, fetcher)?;
            let (group, first_row) = footer.group_of(id.row);
            let row = id.row - first_row;
            let pieces = data_set.pieces(id.shard, &footer, group, fetcher, scratch)?;
            let mut tokens = Vec::with_capacity(data_set.seq_len() + 1);
            for piece in pieces.of_row(row) {
                let place = Place { shard: id.shard, group, piece };
                let load = || data_set.decode(place, &footer, &pieces, fetcher, scratch);
                let decoded = if may_defer {
                    let loads = self.decoded.loads();
                    // A sample that was begun is finished.
                    let yields = tokens.is_empty() && is_older_ready();
                    match self.decoded.try_get_or_load((part, place), !yields, load)? {
                        Some(decoded) => decoded,
                        None if yields => return Ok(Progress::Yields),
                        None => return Ok(Progress::Waits { loads }),
                    }
                } else {
                    self.decoded.get_or_load((part, place), load)?
                };
                decoded.copy_to(data_set.places_of(row), &mut tokens);
            }
            samples.push(Sample { position, tokens });
        }
        Ok(Progress::Made)
    }

    fn loads(&self) -> u64 {
        self.decoded.loads()
    }
}
