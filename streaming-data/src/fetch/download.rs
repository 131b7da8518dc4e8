//! One shard from the store into the cache.

use std::{collections::HashMap, io, sync::Arc};

use super::{
    prefetcher::{Fetched, Prefetcher},
    registry::{Ranks, UpcomingUses},
};
use crate::{
    cache::disk::{Admission, Eviction, Priority, ShardCache},
    error::DataError,
    shard::FETCHES,
};

impl Prefetcher {
    /// Asks the cache to admit a shard.
    pub(super) fn admit(
        &self,
        cache: &ShardCache,
        shard: usize,
        priority: Priority,
    ) -> Result<Admission, DataError> {
        cache.admit(&self.keys[shard], priority, || UpcomingUses::of(cache.folder()))
    }

    /// Evicts a shard where the disk is full, though the limit is not reached.
    fn evict_on_full_disk(
        &self,
        cache: &ShardCache,
        priority: Priority,
    ) -> Result<Eviction, DataError> {
        if cache.limit_bytes().is_none() {
            // Without a limit nothing in the folder is evicted.
            return Ok(Eviction::Impossible);
        }
        match cache.evict_one(priority, || UpcomingUses::of(cache.folder()))? {
            // A shard that is not needed yet can wait.
            Eviction::Impossible if matches!(priority, Priority::Ahead { .. }) => {
                Ok(Eviction::Pending)
            }
            freed => Ok(freed),
        }
    }

    /// Downloads a shard, where it was admitted.
    pub(super) fn fetch(
        &self,
        cache: &ShardCache,
        shard: usize,
        priority: Priority,
        mut admission: Admission,
    ) -> Result<Fetched, DataError> {
        let entry = &self.shards.shards()[shard];
        let mut downloads = 0;
        loop {
            let mut part = match admission {
                Admission::Granted(part) => part,
                Admission::InProgress => return Ok(Fetched::InProgress),
                Admission::Full => return Ok(Fetched::CacheFull),
            };
            let download = self
                .folder
                .download(entry.name(), entry.version(), None, |bytes| part.write(bytes));
            match download {
                Ok(()) => {}
                Err(DataError::Io { source, .. }) if is_full(&source) => {
                    drop(part);
                    match self.evict_on_full_disk(cache, priority)? {
                        Eviction::Done => admission = self.admit(cache, shard, priority)?,
                        Eviction::Pending => return Ok(Fetched::CacheFull),
                        Eviction::Impossible => {
                            let io = DataError::io("keep a shard in cache", cache.folder());
                            return Err(io(source));
                        }
                    }
                    continue;
                }
                Err(error) => return Err(entry.error_of(error)),
            }
            match cache.complete(part, entry)? {
                Ok(file) => return Ok(Fetched::Done(Arc::new(file))),
                Err(wrong) => {
                    downloads += 1;
                    if downloads == FETCHES {
                        return Err(wrong);
                    }
                    admission = self.admit(cache, shard, priority)?;
                }
            }
        }
    }

    /// How many other shards are needed before each.
    pub(super) fn ranks(&self) -> Ranks {
        let (ranks, position) = {
            let state = self.lock();
            (state.ranks.clone(), state.position.unwrap_or(0))
        };
        if let Some(ranks) = ranks {
            return ranks;
        }
        let mut ranks = HashMap::with_capacity(self.keys.len());
        // Within two epochs every shard is needed.
        for (rank, need) in self.upcoming(position).take(2 * self.keys.len()).enumerate() {
            ranks.entry(need).or_insert(rank as u64);
            if ranks.len() == self.keys.len() {
                break;
            }
        }
        let ranks = Arc::new(ranks);
        let mut state = self.lock();
        if state.position.unwrap_or(0) == position {
            state.ranks = Some(Arc::clone(&ranks));
        }
        ranks
    }
}

/// Whether the disk is full.
fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded)
}
