//! The parameters of a block, gathered from the workers that hold them before it runs, and dropped after it.
//!
//! Two pieces of memory take turns: one has the parameters of the block that runs; the parameters of the next block come into the other
//! meanwhile, on a device stream of their own. They come from where their holders have them: nothing is staged.

use std::sync::Arc;

use tidemill_collective::communicator::Interval;
use tidemill_kernels::{Backend, MemoryPlace, Run, Slice, SliceMut};
use tidemill_model::{BlockWalk, Device, Direction, Lease, ParameterSource, Parameters, Result};

use crate::operators::gather_plan::{FromMember, GatherPlan, GatheredUse};
use crate::operators::queue_trace::QueueTrace;
use crate::operators::span::{GatheredBlocks, Span};

/// Memory for the parameters of a block.
struct Place<B: Backend> {
    fp32: B::Buffer<f32>,
    activation: B::Buffer<B::Activation>,
    /// The uses whose parameters are there or on their way.
    uses: Vec<usize>,
    /// The start and the end of the copies that bring them, until they were waited for.
    coming: Option<Interval<B>>,
    /// Behind all reads of the block that was there before.
    left: Option<B::Event>,
}

/// All of `parts`, from members in ascending order, beginning with the part of the member behind `own`: if all members began with the
/// first, its link would carry all of it, while the others' were idle.
fn behind_first(parts: &[FromMember], own: usize) -> impl Iterator<Item = &FromMember> {
    let (before, behind) = parts.split_at(parts.partition_point(|part| part.member <= own));
    behind.iter().chain(before)
}

/// The two places, which stay from step to step.
pub(super) struct GatheredParameters<B: Backend> {
    /// Which of those that hold the parameters computes with them.
    member: usize,
    plan: GatherPlan,
    stream: B::DeviceStream,
    places: [Place<B>; 2],
    /// Where the block is that was entered last.
    current: usize,
    /// Since it was asked for.
    blocks: GatheredBlocks<B>,
    trace: QueueTrace<B>,
}

impl<B: Backend> GatheredParameters<B> {
    /// The parameters that member `member` gathers.
    pub(super) fn new(device: &mut Device<'_, B>, plan: GatherPlan, member: usize) -> Result<Self> {
        let Device { backend, stream } = device;
        let [fp32, activation] = plan.most_elements();
        let mut place = || -> Result<Place<B>> {
            Ok(Place {
                fp32: backend.allocate(stream, fp32)?,
                activation: backend.allocate(stream, activation)?,
                uses: Vec::new(),
                coming: None,
                left: None,
            })
        };
        let places = [place()?, place()?];
        let (mut stream, blocks) = (backend.device_stream()?, GatheredBlocks::default());
        let trace = QueueTrace::new(*backend, &mut stream, "gathering queue")?;
        Ok(Self { member, plan, stream, places, current: 0, blocks, trace })
    }

    /// The time that gathering took since the last call.
    pub(super) fn take_blocks(&mut self) -> GatheredBlocks<B> {
        std::mem::take(&mut self.blocks)
    }

    /// Waits for all copies, and writes down when they were.
    pub(super) fn finish(&mut self, backend: &B) -> Result<()> {
        let copied = backend.record(&mut self.stream)?;
        backend.wait(&copied)?;
        Ok(self.trace.finish(backend)?)
    }

    /// On which parameters are copied from their holders.
    pub(super) fn stream(&mut self) -> &mut B::DeviceStream {
        &mut self.stream
    }

    /// Forgets all gathered parameters: their holders have changed them.
    pub(super) fn forget(&mut self) {
        self.places.iter_mut().for_each(|place| place.uses.clear());
    }

    /// A source that reads `members`, in their order.
    pub(super) fn source<'a>(
        &'a mut self,
        layout: &'a tidemill_model::Layout,
        members: &'a [Arc<Parameters<B>>],
    ) -> BlockByBlock<'a, B> {
        BlockByBlock { walk: BlockWalk::new(layout), members, gathered: self }
    }
}

/// A source that gathers each block when the model comes to it, and the next one ahead.
pub(super) struct BlockByBlock<'a, B: Backend> {
    walk: BlockWalk<'a>,
    members: &'a [Arc<Parameters<B>>],
    gathered: &'a mut GatheredParameters<B>,
}

impl<B: Backend> BlockByBlock<'_, B> {
    /// Brings the parameters that a block reads to `place`.
    fn bring(&mut self, backend: &B, entered: (usize, Direction), place: usize) -> Result<()> {
        let GatheredParameters { member: own, plan, stream, places, blocks, trace, .. } =
            &mut *self.gathered;
        let place = &mut places[place];
        place.uses.clear();
        if let Some(left) = place.left.take() {
            backend.wait_for(stream, &left)?;
        }
        let from = backend.record_timed(stream)?;
        let mut read = |of: &FromMember, bytes: usize| {
            blocks.bytes += if of.member == *own { 0 } else { (of.elements() * bytes) as u64 };
        };
        for use_index in plan.needed(entered) {
            let GatheredUse { fp32, activation, .. } = plan.use_of(use_index);
            for of in behind_first(fp32, *own) {
                read(of, size_of::<f32>());
                for Run { from, to } in &of.runs {
                    let values = self.members[of.member].in_fp32(from.clone())?;
                    let out = SliceMut::new(&mut place.fp32, *to, from.len())?;
                    backend.copy(stream, out, values)?;
                }
            }
            for of in behind_first(activation, *own) {
                read(of, size_of::<B::Activation>());
                for Run { from, to } in &of.runs {
                    let values = self.members[of.member].rounded(from.clone())?;
                    let out = SliceMut::new(&mut place.activation, *to, from.len())?;
                    backend.copy(stream, out, values)?;
                }
            }
            place.uses.push(use_index);
        }
        let coming = Interval { from, to: backend.record_timed(stream)? };
        trace.note(backend, "gathering parameters", &coming)?;
        place.coming = Some(coming);
        Ok(())
    }

    /// Where all that is read of a block is, or is on its way to.
    fn place_of(&self, entered: (usize, Direction)) -> Option<usize> {
        let GatheredParameters { plan, places, .. } = &*self.gathered;
        let is_there = |place: &Place<B>| plan.needed(entered).all(|of| place.uses.contains(&of));
        places.iter().position(is_there)
    }

    /// The block that follows, where that is known.
    fn next(&self, (block, direction): (usize, Direction)) -> Option<(usize, Direction)> {
        let last = self.gathered.plan.layout().blocks().len() - 1;
        match direction {
            Direction::Forward => (block < last).then_some((block + 1, direction)),
            Direction::Backward => block.checked_sub(1).map(|before| (before, direction)),
        }
    }
}

impl<B: Backend> ParameterSource<B> for BlockByBlock<'_, B> {
    fn enter(
        &mut self,
        device: &mut Device<'_, B>,
        block: usize,
        direction: Direction,
    ) -> Result<()> {
        self.walk.enter(block, direction)?;
        let Device { backend, stream } = device;
        let (entered, before) = ((block, direction), self.gathered.current);
        let found = self.place_of(entered);
        // All reads of the block before are enqueued.
        let left = backend.record_timed(stream)?;
        if found != Some(before) {
            self.gathered.places[before].left = Some(left.clone());
        }
        let place = match found {
            Some(place) => place,
            None => {
                self.bring(backend, entered, 1 - before)?;
                1 - before
            }
        };
        self.gathered.current = place;
        if let Some(came) = self.gathered.places[place].coming.take() {
            backend.wait_for(stream, &came.to)?;
            // In the host's memory this thread has copied it, and computed nothing meanwhile.
            let awaited = match backend.memory() {
                MemoryPlace::Host => came.from.clone(),
                MemoryPlace::Device => left,
            };
            self.gathered.blocks.push(backend, Span { interval: came, awaited })?;
        }
        match self.next(entered) {
            Some(next) if self.place_of(next).is_none() => self.bring(backend, next, 1 - place),
            _ => Ok(()),
        }
    }

    fn lease(&self, use_index: usize) -> Result<Lease<'_, B>> {
        self.walk.of_entered(use_index)?;
        let GatheredParameters { plan, places, current, .. } = &*self.gathered;
        let place = &places[*current];
        let GatheredUse { packing, starts: [fp32, activation], .. } = plan.use_of(use_index);
        let rest = |held: usize, start: usize| held.saturating_sub(start);
        let fp32 = Slice::new(&place.fp32, *fp32, rest(B::elements(&place.fp32), *fp32))?;
        let held = B::elements(&place.activation);
        let activation = Slice::new(&place.activation, *activation, rest(held, *activation))?;
        Lease::packed(packing, fp32, activation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_begin_with_different_ones() {
        let parts = [0, 1, 3].map(|member| FromMember { member, runs: Vec::new() });
        let of = |own| behind_first(&parts, own).map(|part| part.member).collect::<Vec<_>>();
        assert_eq!(of(0), [1, 3, 0]);
        assert_eq!(of(1), [3, 0, 1]);
        assert_eq!(of(2), [3, 0, 1]);
        assert_eq!(of(3), [0, 1, 3]);
    }
}
