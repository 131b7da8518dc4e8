//! The exchange of workers whose devices a communicator connects.

use std::ops::Range;
use std::sync::Arc;

use tidemill_collective::BucketOwners;
use tidemill_collective::communicator::{Communicator, CommunicatorError, Cut, Part, Update};
use tidemill_kernels::{Backend, KernelError, Shared, Slice, SliceMut};

use super::Way;
use super::measure::{Exchange, Exchanged, Plan};
use super::values::in_periods;
use crate::cluster::{Failure, WorkerContext};

/// A bucket as one rank sees it.
struct Bucket {
    /// Its elements of the arena.
    range: Range<usize>,
    /// Who owns which of them.
    cut: Cut,
    /// The elements of the arena that each rank owns of it.
    owned: Vec<Vec<Range<usize>>>,
    /// Those that this rank owns.
    own: Range<usize>,
    /// Where that begins in what this rank owns of all.
    start: usize,
}

/// A worker with a device.
pub(super) struct Rank<B: Backend> {
    /// Where the sums would have been computed, and are final long before they are needed: so it is in training, but for the
    /// last buckets of a step.
    compute: B::DeviceStream,
    /// Buckets take turns on them: while one of them ends or begins, the other keeps the link busy. Dropped before what they
    /// read, as they run to their end first.
    streams: Vec<B::DeviceStream>,
    backend: Arc<B>,
    end: Box<dyn Communicator<B>>,
    way: Way,
    arena: B::Buffer<f32>,
    owned: B::Buffer<f32>,
    current: Option<(Arc<Plan>, Vec<Bucket>)>,
    /// Rounds so far, of all sizes: by it the others know what is told of.
    round: u64,
}

impl<B: Backend> Rank<B> {
    /// The worker of `context`, which computes on `backend`, with an arena of so many elements.
    ///
    /// # Errors
    /// A device that fails, or has no room.
    pub(super) fn new(
        context: &WorkerContext<'_>,
        backend: Arc<B>,
        end: Box<dyn Communicator<B>>,
        elements: usize,
        way: Way,
    ) -> Result<Self, Failure> {
        let others = end.abort_handle();
        context.abort().on_abort(others);
        let mut compute = backend.device_stream()?;
        // A library orders what it moves by one.
        let streams = if way == Way::Devices { 2 } else { 1 };
        let streams = (0..streams).map(|_| backend.device_stream()).collect::<Result<_, _>>()?;
        let arena = backend.allocate(&mut compute, elements)?;
        let owned = backend.allocate(&mut compute, 0)?;
        Ok(Self { backend, end, way, compute, streams, arena, owned, current: None, round: 0 })
    }
}

impl<B: Backend> Exchange for Rank<B> {
    fn way(&self) -> Way {
        self.way
    }

    fn begin(&mut self, _context: &mut WorkerContext<'_>, plan: &Arc<Plan>) -> Result<(), Failure> {
        let buckets = buckets(plan, self.end.rank());
        let owned = buckets.last().map_or(0, |last| last.start + last.own.len());
        if B::elements(&self.owned) < owned {
            self.owned = self.backend.allocate(&mut self.compute, owned)?;
        }
        let Self { backend, compute, arena, .. } = self;
        let values = plan.values.of_worker(self.end.rank());
        in_periods(&values, B::elements(arena), |start, values| {
            let out = SliceMut::new(arena, start, values.len())?;
            backend.write(compute, out, values)
        })?;
        self.current = Some((Arc::clone(plan), buckets));
        Ok(self.finish()?)
    }

    fn run(
        &mut self,
        _context: &mut WorkerContext<'_>,
        what: Exchanged,
        rounds: u64,
    ) -> Result<(), Failure> {
        for _ in 0..rounds {
            match what {
                Exchanged::Sums => self.sum()?,
                Exchanged::Gathered => self.gather()?,
            }
            self.round += 1;
        }
        Ok(self.finish()?)
    }

    fn clear(&mut self, what: Exchanged) -> Result<(), Failure> {
        let Self { backend, compute, arena, owned, .. } = self;
        let cleared = match what {
            Exchanged::Sums => owned,
            Exchanged::Gathered => arena,
        };
        backend.fill_zero(compute, SliceMut::all(cleared))?;
        Ok(self.finish()?)
    }

    fn check(&mut self, what: Exchanged) -> Result<(), Failure> {
        let Self { backend, compute, end, arena, owned, current, .. } = self;
        let Some((plan, buckets)) = current else { return Ok(()) };
        let rank = end.rank();
        let mut compare = |of_arena: Range<usize>, from| -> Result<(), Failure> {
            let found = backend.to_vec(compute, from)?;
            match plan.values.difference(of_arena.start, &found) {
                None => Ok(()),
                Some(difference) => Err(plan.wrong(what, rank, difference).into()),
            }
        };
        for Bucket { range, cut, own, start, .. } in buckets {
            match what {
                Exchanged::Sums => {
                    compare(own.clone(), Slice::new(owned, *start, own.len())?)?;
                }
                Exchanged::Gathered => {
                    for peer in (0..cut.ranks()).filter(|&peer| peer != rank) {
                        let part = cut.of_rank(peer);
                        let part = range.start + part.start..range.start + part.end;
                        compare(part.clone(), Slice::new(arena, part.start, part.len())?)?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl<B: Backend> Rank<B> {
    /// Waits for all that was enqueued.
    fn finish(&mut self) -> Result<(), KernelError> {
        for stream in std::iter::once(&mut self.compute).chain(&mut self.streams) {
            self.backend.wait(&self.backend.record(stream)?)?;
        }
        Ok(())
    }

    fn sum(&mut self) -> Result<(), CommunicatorError> {
        let Self { backend, end, compute, streams, arena, owned, current, round, .. } = self;
        let Some((plan, buckets)) = current else { return Ok(()) };
        let ready = backend.record(compute)?;
        let sums = share::<B>(arena, end.rank())?;
        let nodes = plan.values.nodes(end.rank()).iter();
        let parts: Vec<_> = nodes.map(|&node| Part { node, sums: sums.clone() }).collect();
        let post = end.post();
        for bucket in 0..buckets.len() {
            post.sums(*round, bucket as u32, &parts, &ready)?;
        }
        let turns = streams.len();
        for (index, Bucket { owned: of_ranks, own, start, .. }) in buckets.iter().enumerate() {
            let out = SliceMut::new(owned, *start, own.len())?;
            let (key, stream) = ((*round, index as u32), &mut streams[index % turns]);
            end.reduce_scatter(backend, stream, key, of_ranks, out)?;
        }
        Ok(())
    }

    fn gather(&mut self) -> Result<(), CommunicatorError> {
        let Self { backend, end, compute, streams, arena, owned, current, round, .. } = self;
        let Some((_, buckets)) = current else { return Ok(()) };
        let ready = backend.record(compute)?;
        let values = share::<B>(owned, end.rank())?;
        for (index, &Bucket { start, .. }) in buckets.iter().enumerate() {
            let update = Update { values: values.clone(), start };
            end.updated((*round, index as u32), update, &ready)?;
        }
        let turns = streams.len();
        for (index, Bucket { range, cut, .. }) in buckets.iter().enumerate() {
            let (key, stream) = ((*round, index as u32), &mut streams[index % turns]);
            let out = SliceMut::new(arena, range.start, range.len())?;
            end.gather(backend, stream, key, cut, out)?;
        }
        Ok(())
    }
}

/// The buckets of `plan`, in order, as `rank` sees them.
fn buckets(plan: &Plan, rank: usize) -> Vec<Bucket> {
    let (chunks, workers) = (&plan.training.chunks, plan.values.workers());
    let mut start = 0;
    let bucket = |(bucket, owners): (&tidemill_collective::Bucket, &BucketOwners)| {
        let owned: Vec<_> = (0..workers).map(|rank| owners.range(chunks, rank)).collect();
        let ends = owned.iter().scan(0, |end, of_rank| {
            *end += of_rank.len();
            Some(*end)
        });
        let (range, cut, own) =
            (bucket.range.clone(), Cut::at(ends.collect()), owned[rank].clone());
        start += own.len();
        let owned = owned.into_iter().map(|range| vec![range]).collect();
        Bucket { range, cut, owned, start: start - own.len(), own }
    };
    plan.training.buckets.buckets().iter().zip(&plan.owners).map(bucket).collect()
}

/// `buffer` for others to read. Ranks whose memory is not shared have no ends between them.
fn share<B: Backend>(
    buffer: &B::Buffer<f32>,
    rank: usize,
) -> Result<Shared<B, f32>, CommunicatorError> {
    B::share(buffer).ok_or(CommunicatorError::OutOfReach { rank, peer: rank })
}
