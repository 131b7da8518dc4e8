//! One shard from the store into the cache.

use std::{collections::HashMap, io, sync::Arc};

use super::{
    crew::{Crew, Fetched},
    neighbours::{Ranks, Upcoming},
};
use crate::{
    error::DataError,
    shard::FETCHES,
    shard_cache::{Room, ShardCache},
};

impl Crew {
    /// Makes room for a shard in the cache, dropping only what is needed later than `before`.
    pub(super) fn make_room(
        &self,
        cache: &ShardCache,
        shard: usize,
        before: u64,
    ) -> Result<Room, DataError> {
        cache.begin(&self.keys[shard], before, &Upcoming::of(cache.folder()))
    }

    /// Downloads a shard for which room was made, where it was.
    pub(super) fn fetch(
        &self,
        cache: &ShardCache,
        shard: usize,
        before: u64,
        mut room: Room,
    ) -> Result<Fetched, DataError> {
        let entry = &self.shards.shards()[shard];
        let mut downloads = 0;
        loop {
            let mut part = match room {
                Room::Part(part) => part,
                Room::OnItsWay => return Ok(Fetched::OnItsWay),
                Room::None => return Ok(Fetched::NoRoom),
            };
            let download =
                self.folder.download(entry.name(), entry.version(), |bytes| part.write(bytes));
            match download {
                Ok(()) => {}
                Err(DataError::Io { source, .. }) if is_full(&source) => {
                    drop(part);
                    // With a limit the folder is ours to keep small.
                    let future = Upcoming::of(cache.folder());
                    if cache.limit_bytes().is_some() && cache.drop_one(&future)? {
                        room = self.make_room(cache, shard, before)?;
                        continue;
                    }
                    let io = DataError::io("keep a shard in cache", cache.folder());
                    return Err(io(source));
                }
                Err(error) => return Err(entry.error_of(error)),
            }
            match cache.land(part, entry.path())? {
                Ok(file) => return Ok(Fetched::Landed(Arc::new(file))),
                Err(found) => {
                    downloads += 1;
                    if downloads == FETCHES {
                        return Err(entry.wrong_hash(found));
                    }
                    room = self.make_room(cache, shard, before)?;
                }
            }
        }
    }

    /// In which order the shards are needed next.
    pub(super) fn ranks(&self) -> Ranks {
        let (ranks, position) = {
            let state = self.lock();
            (state.ranks.clone(), state.position.unwrap_or(0))
        };
        if let Some(ranks) = ranks {
            return ranks;
        }
        let mut ranks = HashMap::with_capacity(self.keys.len());
        // Within two epochs every shard stands there.
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

/// Whether there is no room on the disk.
fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded)
}
