//! One shard from the store into the cache.

use std::{collections::HashMap, io, sync::Arc};

use super::{
    crew::{Crew, Fetched},
    neighbours::{Ranks, Upcoming},
};
use crate::{
    cache::disk::{Freed, Room, ShardCache, Urgency},
    error::DataError,
    shard::FETCHES,
};

impl Crew {
    /// Makes room for a shard in the cache.
    pub(super) fn make_room(
        &self,
        cache: &ShardCache,
        shard: usize,
        urgency: Urgency,
    ) -> Result<Room, DataError> {
        cache.begin(&self.keys[shard], urgency, || Upcoming::of(cache.folder()))
    }

    /// Makes room on a disk that is full, though the limit is not reached.
    fn make_room_on_disk(&self, cache: &ShardCache, urgency: Urgency) -> Result<Freed, DataError> {
        if cache.limit_bytes().is_none() {
            // What others put into the folder, and keep there, is theirs.
            return Ok(Freed::None);
        }
        match cache.drop_one(urgency, || Upcoming::of(cache.folder()))? {
            // What is not needed yet can wait.
            Freed::None if matches!(urgency, Urgency::Ahead { .. }) => Ok(Freed::Later),
            freed => Ok(freed),
        }
    }

    /// Downloads a shard for which room was made, where it was.
    pub(super) fn fetch(
        &self,
        cache: &ShardCache,
        shard: usize,
        urgency: Urgency,
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
            let download = self
                .folder
                .download(entry.name(), entry.version(), None, |bytes| part.write(bytes));
            match download {
                Ok(()) => {}
                Err(DataError::Io { source, .. }) if is_full(&source) => {
                    drop(part);
                    match self.make_room_on_disk(cache, urgency)? {
                        Freed::One => room = self.make_room(cache, shard, urgency)?,
                        Freed::Later => return Ok(Fetched::NoRoom),
                        Freed::None => {
                            let io = DataError::io("keep a shard in cache", cache.folder());
                            return Err(io(source));
                        }
                    }
                    continue;
                }
                Err(error) => return Err(entry.error_of(error)),
            }
            match cache.land(part, entry)? {
                Ok(file) => return Ok(Fetched::Landed(Arc::new(file))),
                Err(wrong) => {
                    downloads += 1;
                    if downloads == FETCHES {
                        return Err(wrong);
                    }
                    room = self.make_room(cache, shard, urgency)?;
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
