//! Which worker writes which part of a checkpoint.

use std::collections::BTreeSet;
use std::sync::Arc;

use tidemill_collective::{Chunk, ChunkHeader, Part, StatePart};
use timely::communication::Push;
use timely::dataflow::channels::Message;
use timely::dataflow::channels::pact::DistributorPact;
use timely::dataflow::channels::pushers::exchange::Distributor;

use crate::operators::trainers::Place;

/// Which worker writes each part of each chunk: worker 0 all of them, unless it is said otherwise. The same on every worker. They are
/// counted as those that [train](crate::operators::Trainers) are.
#[derive(Clone, Debug, Default)]
pub struct StateWriters {
    /// The writing worker of each chunk of each part; `None` where worker 0 writes everything.
    workers: Option<Arc<Vec<Vec<u32>>>>,
}

impl StateWriters {
    /// The writers by part, in the order of [`StatePart::all`], and by chunk.
    pub fn new(workers: Vec<Vec<u32>>) -> Self {
        Self { workers: Some(Arc::new(workers)) }
    }

    /// The worker that writes a part of a chunk.
    pub fn writer(&self, part: StatePart, chunk: usize) -> usize {
        let workers = self.workers.as_ref().and_then(|workers| workers.get(part.index()));
        workers.and_then(|workers| workers.get(chunk)).map_or(0, |&worker| worker as usize)
    }

    /// The worker that `header` goes to.
    pub(super) fn of(&self, header: &ChunkHeader) -> usize {
        match header.part {
            Part::State(part) => self.writer(part, header.chunk as usize),
            _ => 0,
        }
    }

    /// All that write anything but worker 0.
    pub(super) fn others(&self) -> BTreeSet<usize> {
        let workers = self.workers.iter().flat_map(|workers| workers.iter().flatten());
        workers.map(|&worker| worker as usize).filter(|&worker| worker > 0).collect()
    }

    /// How many parts of `chunks` chunks a worker writes, where the optimizer has `states` states.
    pub(super) fn expected(&self, worker: usize, states: usize, chunks: usize) -> usize {
        let all = StatePart::all(states);
        all.map(|part| (0..chunks).filter(|&it| self.writer(part, it) == worker).count()).sum()
    }

    /// Sends whole chunks to the workers that write them, whichever their headers name.
    pub(super) fn pact(
        &self,
        place: Place,
    ) -> DistributorPact<impl FnOnce(usize) -> ByWriter + use<>> {
        let by_writer = ByWriter { writers: self.clone(), place };
        DistributorPact(move |_peers| by_writer)
    }
}

pub(super) struct ByWriter {
    writers: StateWriters,
    place: Place,
}

impl Distributor<Chunk> for ByWriter {
    fn partition<T: Clone, P: Push<Message<T, Chunk>>>(
        &mut self,
        container: &mut Chunk,
        time: &T,
        pushers: &mut [P],
    ) {
        // A chunk without a header goes to worker 0, which reports it as an error.
        let writer = container.header().map_or(0, |header| self.writers.of(header));
        Message::push_at(container, time.clone(), &mut pushers[self.place.worker(writer)]);
    }

    fn flush<T: Clone, P: Push<Message<T, Chunk>>>(&mut self, _time: &T, _pushers: &mut [P]) {}
}
