//! A worker's part of the exchange, through the communicator that training would use.

use std::ops::Range;
use std::sync::Arc;

use tidemill_collective::communicator::{Communicator, CommunicatorError, Cut, Key};
use tidemill_collective::{BucketOwners, Carry, DEFAULT_WINDOW_BYTES};
use tidemill_kernels::{Backend, FloatEnvironment, KernelError, Slice, SliceMut};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::InputHandle;

use super::Way;
use super::measure::{Exchange, Exchanged, Plan};
use super::values::in_periods;
use crate::cluster::{Failure, WorkerContext, progress};

/// A bucket as one rank sees it.
struct Bucket {
    /// Its elements of the arena.
    range: Range<usize>,
    /// Who owns which of them.
    cut: Cut,
    /// The elements of the arena that this rank owns of it.
    own: Range<usize>,
    /// Where that begins in what this rank owns of all.
    start: usize,
}

/// What a thread exchanges with others.
struct Rank<B: Backend> {
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

/// A worker's part of the exchange.
pub(super) struct Worker<B: Backend> {
    rank: Rank<B>,
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
        let mut compute = backend.device_stream()?;
        // A library orders what it moves by one.
        let streams = if way == Way::Devices { 2 } else { 1 };
        let streams = (0..streams).map(|_| backend.device_stream()).collect::<Result<_, _>>()?;
        let arena = backend.allocate(&mut compute, elements)?;
        let owned = backend.allocate(&mut compute, 0)?;
        let rank =
            Rank { backend, end, way, compute, streams, arena, owned, current: None, round: 0 };
        Ok(Self { rank, _until: until })
    }
}

impl<B: Backend> Exchange for Worker<B> {
    fn way(&self) -> Way {
        self.rank.way
    }

    fn begin(&mut self, _context: &mut WorkerContext<'_>, plan: &Arc<Plan>) -> Result<(), Failure> {
        let buckets = buckets(plan, self.rank.end.rank());
        let owned = buckets.last().map_or(0, |last| last.start + last.own.len());
        if B::elements(&self.rank.owned) < owned {
            self.rank.owned = self.rank.backend.allocate(&mut self.rank.compute, owned)?;
        }
        let Rank { backend, compute, end, arena, .. } = &mut self.rank;
        let values = plan.values.of_worker(end.rank());
        in_periods(&values, B::elements(arena), |start, values| {
            let out = SliceMut::new(arena, start, values.len())?;
            backend.write(compute, out, values)
        })?;
        self.rank.current = Some((Arc::clone(plan), buckets));
        Ok(self.rank.finish()?)
    }

    fn run(
        &mut self,
        context: &mut WorkerContext<'_>,
        what: Exchanged,
        rounds: u64,
    ) -> Result<(), Failure> {
        // The thread waits for others, and this one carries what they send meanwhile.
        let (rank, waker) = (&mut self.rank, std::thread::current());
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                FloatEnvironment::standard().keep();
                let exchanged = rank.exchange(what, rounds);
                waker.unpark();
                exchanged
            });
            let stepped = context.step_while(|| !thread.is_finished());
            // Where the run is over, its communicator is told, so that the thread ends.
            let exchanged = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            stepped?;
            Ok(exchanged?)
        })
    }

    fn clear(&mut self, what: Exchanged) -> Result<(), Failure> {
        let Rank { backend, compute, arena, owned, .. } = &mut self.rank;
        let cleared = match what {
            Exchanged::Sums => owned,
            Exchanged::Gathered => arena,
        };
        backend.fill_zero(compute, SliceMut::all(cleared))?;
        Ok(self.rank.finish()?)
    }

    fn check(&mut self, what: Exchanged) -> Result<(), Failure> {
        let Rank { backend, compute, end, arena, owned, current, .. } = &mut self.rank;
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

    fn exchange(&mut self, what: Exchanged, rounds: u64) -> Result<(), CommunicatorError> {
        for _ in 0..rounds {
            match what {
                Exchanged::Sums => self.sum()?,
                Exchanged::Gathered => self.gather()?,
            }
            self.round += 1;
            progress::moved();
        }
        Ok(self.finish()?)
    }

    fn sum(&mut self) -> Result<(), CommunicatorError> {
        let Self { backend, end, compute, streams, arena, owned, current, round, .. } = self;
        let Some((plan, buckets)) = current else { return Ok(()) };
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
            for (index, Bucket { cut, own, start, .. }) in buckets.iter().enumerate() {
                let out = SliceMut::new(owned, *start, own.len())?;
                let stream = &mut streams[index % turns];
                let key = Key::new(*round, index as u32);
                end.reduce_scatter(backend, stream, key, cut, out)?;
            }
            posting.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn gather(&mut self) -> Result<(), CommunicatorError> {
        let Self { backend, end, streams, arena, owned, current, round, .. } = self;
        let Some((_, buckets)) = current else { return Ok(()) };
        let turns = streams.len();
        for (index, Bucket { cut, own, start, .. }) in buckets.iter().enumerate() {
            let stream = &mut streams[index % turns];
            let key = Key::new(*round, index as u32);
            let values = Slice::new(owned, *start, own.len())?;
            end.updated(backend, stream, key, cut, values)?;
        }
        for (index, Bucket { range, cut, .. }) in buckets.iter().enumerate() {
            let stream = &mut streams[index % turns];
            let key = Key::new(*round, index as u32);
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
        Bucket { range, cut, start: start - own.len(), own }
    };
    plan.training.buckets.buckets().iter().zip(&plan.owners).map(bucket).collect()
}
