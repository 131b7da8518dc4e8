//! The speed of a library of collectives alone with the devices of all workers, beside which training's own sums are measured.
//!
//! Its sums are in an order of its own, so they agree with the sums of training within rounding, and must not become weights.

use std::ops::Range;
use std::sync::Arc;

use tidemill_kernels::gpu::collectives::{
    CollectiveLibrary, GroupId, GroupMember, LibraryCollective,
};
use tidemill_kernels::{Backend, Slice, SliceMut};

use super::arena::DeviceArena;
use super::measure::{Arm, Exchange, Exchanged, Look, Memory, Plan};
use crate::cluster::{Failure, WorkerContext};

/// A worker with a device, in a group of all.
pub(super) struct Rank<B: Backend> {
    // Before the member, as enqueued work runs to its end first.
    memory: DeviceArena<B>,
    member: Arc<GroupMember>,
}

/// The buffers of the exchange in progress.
struct Shares<'a, B: Backend> {
    rank: &'a mut Rank<B>,
    buckets: Vec<Bucket>,
}

/// A bucket in equal shares, one for each rank: elements that are left over are not exchanged.
struct Bucket {
    /// Its elements of the arena.
    range: Range<usize>,
    /// The number of elements of a share.
    share: usize,
}

impl<B: Backend> Rank<B> {
    /// Begins to join the group `id` as the worker of `context`, which computes on `backend`, with an arena of so many elements.
    ///
    /// # Errors
    /// An error of the library, or a device that fails or has no room.
    pub(super) fn join(
        context: &WorkerContext<'_>,
        backend: Arc<B>,
        library: &CollectiveLibrary,
        id: GroupId,
        elements: usize,
    ) -> Result<Self, Failure> {
        let rank_of = (context.index(), context.peers());
        let member = Arc::new(backend.join_group(library, id, rank_of)?);
        context.abort().on_abort(GroupMember::abort_handle(&member));
        Ok(Self { memory: DeviceArena::new(backend, elements, 1)?, member })
    }
}

impl<B: Backend> Arm for Rank<B> {
    fn begin<'a>(&'a mut self, plan: &'a Plan) -> Result<Box<dyn Exchange + Send + 'a>, Failure> {
        let ranks = self.member.ranks();
        let buckets = plan.training.buckets.buckets().iter().map(|bucket| {
            let share = bucket.range.len() / ranks;
            Bucket { range: bucket.range.start..bucket.range.start + ranks * share, share }
        });
        let buckets: Vec<_> = buckets.collect();
        self.memory.own(buckets.iter().map(|bucket| bucket.share))?;
        Ok(Box::new(Shares { rank: self, buckets }))
    }
}

impl<B: Backend> Exchange for Shares<'_, B> {
    fn memory(&mut self) -> &mut dyn Memory {
        &mut self.rank.memory
    }

    fn exchange(&mut self, what: Exchanged) -> Result<(), Failure> {
        let Rank { memory, member } = &mut *self.rank;
        let DeviceArena { backend, compute, streams, arena, owned } = memory;
        let ready = backend.record(compute)?;
        for stream in streams {
            backend.wait_for(stream, &ready)?;
            for (Bucket { range, .. }, owned) in self.buckets.iter().zip(&mut *owned) {
                let (what, out, from) = match what {
                    Exchanged::Sums => (
                        LibraryCollective::ReduceScatter,
                        SliceMut::all(owned),
                        Slice::new(arena, range.start, range.len())?,
                    ),
                    Exchanged::Gathered => (
                        LibraryCollective::AllGather,
                        SliceMut::new(arena, range.start, range.len())?,
                        Slice::all(owned),
                    ),
                };
                backend.library_collective(stream, member, what, out, from)?;
            }
        }
        Ok(())
    }

    fn received(&mut self, what: Exchanged, look: &mut Look<'_>) -> Result<(), Failure> {
        let Rank { memory, member } = &mut *self.rank;
        for (index, Bucket { range, share }) in self.buckets.iter().enumerate() {
            let received = match what {
                Exchanged::Sums => {
                    let own = range.start + member.rank() * share;
                    own..own + share
                }
                Exchanged::Gathered => range.clone(),
            };
            memory.show(what, received, index, look)?;
        }
        Ok(())
    }
}
