//! A worker's part of the exchange, through the communicator that training would use.

use std::ops::Range;
use std::sync::Arc;

use tidemill_collective::communicator::{
    Communicator, CommunicatorError, Cut, Key, ReduceScatter, Values, ValuesMut,
};
use tidemill_collective::{BucketOwners, Carry, DEFAULT_WINDOW_BYTES};
use tidemill_kernels::{Backend, Slice, SliceMut};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::InputHandle;

use super::Way;
use super::arena::DeviceArena;
use super::measure::{Arm, Exchange, Exchanged, Look, Memory, Plan};
use crate::cluster::{Failure, WorkerContext};

/// Device streams that devices exchange by which read each other's memory.
const STREAMS: usize = 4;
/// Buckets that are summed together, where they can be.
const TOGETHER: usize = 8;

/// A bucket as one rank sees it.
struct Bucket {
    /// Its elements of the arena.
    range: Range<usize>,
    /// Which worker owns which of them.
    cut: Cut,
    /// The elements of the arena that this rank owns of it.
    own: Range<usize>,
}

/// The connection of a thread to the others.
struct Rank<B: Backend> {
    memory: DeviceArena<B>,
    end: Box<dyn Communicator<B>>,
    /// Rounds so far, of all sizes; the number identifies the round to the other ranks.
    round: u64,
}

/// The buckets of the exchange in progress.
struct Buckets<'a, B: Backend> {
    rank: &'a mut Rank<B>,
    plan: &'a Plan,
    buckets: Vec<Bucket>,
}

/// A worker's part of the exchange.
pub(super) struct Worker<B: Backend> {
    rank: Rank<B>,
    way: Way,
    /// Open for as long as anything is carried through timely.
    _until: InputHandle<u64, CapacityContainerBuilder<Vec<()>>>,
}

impl<B: Backend> Worker<B> {
    /// The worker of `context`, which computes on `backend`, with an arena of so many elements.
    ///
    /// # Errors
    /// A device that fails, or has no room.
    pub(super) fn new(
        context: &mut WorkerContext<'_>,
        backend: Arc<B>,
        mut end: Box<dyn Communicator<B>>,
        elements: usize,
        mut way: Way,
    ) -> Result<Self, Failure> {
        let others = end.abort_handle();
        context.abort().on_abort(others);
        let mut until = InputHandle::new();
        if let Some(courier) = end.courier() {
            way = Way::Host;
            context.dataflow::<u64, _, _>(|scope| {
                until.to_stream(scope).carry(courier, DEFAULT_WINDOW_BYTES);
            });
        }
        // Buckets take turns on several streams: while one of them ends or begins, others keep the link busy. A library orders its
        // moves by one stream.
        let streams = if way == Way::Devices { STREAMS } else { 1 };
        let memory = DeviceArena::new(backend, elements, streams)?;
        Ok(Self { rank: Rank { memory, end, round: 0 }, way, _until: until })
    }

    /// Which way bytes go.
    pub(super) fn way(&self) -> Way {
        self.way
    }
}

impl<B: Backend> Arm for Worker<B> {
    fn begin<'a>(&'a mut self, plan: &'a Plan) -> Result<Box<dyn Exchange + Send + 'a>, Failure> {
        let rank = &mut self.rank;
        let buckets = buckets(plan, rank.end.rank());
        rank.memory.own(buckets.iter().map(|bucket| bucket.own.len()))?;
        Ok(Box::new(Buckets { rank, plan, buckets }))
    }
}

impl<B: Backend> Exchange for Buckets<'_, B> {
    fn memory(&mut self) -> &mut dyn Memory {
        &mut self.rank.memory
    }

    fn ready(&mut self, what: Exchanged) -> Result<(), Failure> {
        let memory = &mut self.rank.memory;
        memory.clear(what)?;
        if what == Exchanged::Sums {
            return Ok(());
        }
        // The part that this rank owns is present before the rest is gathered, as its parameters are in training.
        let DeviceArena { backend, compute, arena, owned, .. } = memory;
        for (Bucket { own, .. }, owned) in self.buckets.iter().zip(owned) {
            let out = SliceMut::new(arena, own.start, own.len())?;
            backend.copy(compute, out, Slice::all(owned))?;
        }
        memory.finish()
    }

    fn exchange(&mut self, what: Exchanged) -> Result<(), Failure> {
        match what {
            Exchanged::Sums => self.sum()?,
            Exchanged::Gathered => self.gather()?,
        }
        drop(self.rank.end.take_cost());
        self.rank.round += 1;
        Ok(())
    }

    fn received(&mut self, what: Exchanged, look: &mut Look<'_>) -> Result<(), Failure> {
        let Rank { memory, end, .. } = &mut *self.rank;
        for (index, Bucket { range, cut, own }) in self.buckets.iter().enumerate() {
            if what == Exchanged::Sums {
                memory.show(what, own.clone(), index, look)?;
                continue;
            }
            for peer in (0..cut.ranks()).filter(|&peer| peer != end.rank()) {
                let part = cut.of_rank(peer);
                let part = range.start + part.start..range.start + part.end;
                memory.show(what, part, index, look)?;
            }
        }
        Ok(())
    }
}

impl<B: Backend> Buckets<'_, B> {
    fn sum(&mut self) -> Result<(), CommunicatorError> {
        let Self { rank: Rank { memory, end, round }, plan, buckets } = self;
        let DeviceArena { backend, compute, streams, arena, owned } = memory;
        let nodes = plan.values.nodes(end.rank()).iter();
        let nodes: Vec<_> = nodes.map(|&node| (node, &*arena)).collect();
        let post = end.post();
        // As in training, where a device thread does so while others are summed.
        std::thread::scope(|scope| {
            let posting = scope.spawn(|| {
                let post_one = |(bucket, Bucket { range, .. }): (usize, &Bucket)| {
                    let key = Key::new(*round, bucket as u32);
                    let uses = std::slice::from_ref(range);
                    post.sums(backend, compute, key, &nodes, uses)
                };
                buckets.iter().enumerate().try_for_each(post_one)
            });
            let turns = streams.len();
            let summed =
                buckets.iter().zip(&mut *owned).enumerate().map(|(index, (bucket, out))| {
                    let (key, out) = (Key::new(*round, index as u32), SliceMut::all(out));
                    ReduceScatter { key, cut: &bucket.cut, out }
                });
            let mut summed = summed.peekable();
            for turn in 0.. {
                if summed.peek().is_none() {
                    break;
                }
                let together = summed.by_ref().take(TOGETHER).collect();
                end.reduce_scatter_each(backend, &mut streams[turn % turns], together)?;
            }
            posting.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn gather(&mut self) -> Result<(), CommunicatorError> {
        let Self { rank: Rank { memory, end, round }, buckets, .. } = self;
        let DeviceArena { backend, streams, arena, owned, .. } = memory;
        let turns = streams.len();
        for (index, (Bucket { cut, .. }, owned)) in buckets.iter().zip(owned).enumerate() {
            let stream = &mut streams[index % turns];
            let key = Key::new(*round, index as u32);
            end.updated(backend, stream, key, cut, Values::Fp32(Slice::all(owned)))?;
        }
        for (index, Bucket { range, cut, .. }) in buckets.iter().enumerate() {
            let stream = &mut streams[index % turns];
            let key = Key::new(*round, index as u32);
            let out = SliceMut::new(arena, range.start, range.len())?;
            end.gather(backend, stream, key, cut, ValuesMut::Fp32(out))?;
        }
        Ok(())
    }
}

/// The buckets of `plan`, in order, as `rank` sees them.
fn buckets(plan: &Plan, rank: usize) -> Vec<Bucket> {
    let (chunks, workers) = (&plan.training.chunks, plan.values.workers());
    let bucket = |(bucket, owners): (&tidemill_collective::Bucket, &BucketOwners)| {
        let owned: Vec<_> = (0..workers).map(|rank| owners.range(chunks, rank)).collect();
        let ends = owned.iter().scan(0, |end, of_rank| {
            *end += of_rank.len();
            Some(*end)
        });
        let (range, cut, own) =
            (bucket.range.clone(), Cut::at(ends.collect()), owned[rank].clone());
        Bucket { range, cut, own }
    };
    plan.training.buckets.buckets().iter().zip(&plan.owners).map(bucket).collect()
}
