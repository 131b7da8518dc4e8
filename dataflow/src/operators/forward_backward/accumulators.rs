//! The gradient sums of a worker's lanes, and how they collapse along the canonical tree.
//!
//! Lanes run in order. When a lane ends whose left sibling waits, `left = left + lane` at once, and so on upwards:
//! a worker holds few: the nodes that make up its lanes so far, and the one at hand. During the last microbatch of a lane
//! this happens block by block, behind the backward pass, so that a finished node of the worker's cover leaves in
//! backward order while the rest of the backward still runs.

use std::collections::VecDeque;
use std::ops::Range;

use tidemill_collective::{BucketPlan, ChunkPlan, Node, Tree};
use tidemill_kernels::{Backend, KernelError, MemoryPlace, Slice, SliceMut};
use tidemill_model::{Device, GradientSink, Layout, ModelError};

use crate::cluster::{Failure, progress};
use crate::operators::error::GraphError;

/// Receives what is finished.
pub(super) trait Finished<B: Backend> {
    /// Takes some chunks of one use: their indices and elements. Answers whether anybody still wants more.
    fn chunks(&mut self, use_index: usize, node: Node, chunks: Vec<(usize, Vec<f32>)>) -> bool;

    /// The gradients of bucket `bucket` are final in `sums`, which together are all lanes of this worker. Answers whether anybody
    /// still wants more.
    fn bucket(
        &mut self,
        device: &mut Device<'_, B>,
        bucket: usize,
        sums: &[(Node, &B::Buffer<f32>)],
    ) -> Result<bool, KernelError>;
}

/// What becomes of a finished node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FinishedSums {
    /// It is copied to the host from such memory, so many chunks at a time.
    Copied { from: MemoryPlace, chunks: usize },
    /// It stays where it is until the next step.
    Kept,
}

/// What the accumulators of every lane have in common.
pub(super) struct GradientMap<'a> {
    pub(super) layout: &'a Layout,
    pub(super) chunks: &'a ChunkPlan,
    pub(super) buckets: &'a BucketPlan,
    pub(super) tree: Tree,
    /// The lanes of this worker.
    pub(super) lanes: Range<usize>,
    pub(super) finished: FinishedSums,
}

/// One accumulator: the gradients of all uses, over the lanes of a node.
struct Accumulator<B: Backend> {
    node: Node,
    gradients: B::Buffer<f32>,
}

/// The accumulators of a worker.
pub(super) struct Accumulators<B: Backend> {
    /// Finished nodes that wait for their right sibling, the newest last.
    waiting: Vec<Accumulator<B>>,
    spare: Vec<B::Buffer<f32>>,
    /// The finished nodes that stay where they are.
    kept: Vec<Accumulator<B>>,
}

impl<B: Backend> Accumulators<B> {
    pub(super) fn new() -> Self {
        Self { waiting: Vec::new(), spare: Vec::new(), kept: Vec::new() }
    }

    /// Accumulators that are here, used or not.
    pub(super) fn held(&self) -> usize {
        self.waiting.len() + self.spare.len() + self.kept.len()
    }

    /// The sums over all lanes, of a worker that has all of them.
    pub(super) fn take_kept(&mut self) -> Option<B::Buffer<f32>> {
        self.kept.pop().map(|kept| kept.gradients)
    }

    /// What was kept is no longer needed, nor is `sums`, which was taken.
    pub(super) fn reuse(&mut self, sums: Option<B::Buffer<f32>>) {
        self.spare.extend(self.kept.drain(..).map(|kept| kept.gradients).chain(sums));
    }

    /// A sink for lane `lane`, its accumulator zeroed.
    pub(super) fn begin<'a>(
        &'a mut self,
        device: &mut Device<'_, B>,
        map: &'a GradientMap<'a>,
        finished: &'a mut dyn Finished<B>,
        lane: usize,
    ) -> Result<LaneSink<'a, B>, Failure> {
        let mut gradients = match self.spare.pop() {
            Some(gradients) => gradients,
            None => device.backend.allocate(device.stream, map.layout.gradient_elements())?,
        };
        device.backend.fill_zero(device.stream, SliceMut::all(&mut gradients))?;
        let node = Node::leaf(lane as u32);
        Ok(LaneSink {
            map,
            finished,
            accumulators: self,
            lane: Accumulator { node, gradients },
            merges: VecDeque::new(),
            closing: None,
            expected_block: map.layout.blocks().len(),
            violation: None,
        })
    }
}

/// What happens to a block of the lane's last microbatch once it is done.
struct Closing {
    /// The node that the lane completes, after all merges.
    node: Node,
    /// Whether that node leaves this worker.
    leaves: bool,
}

/// Where the backward passes of one lane leave their gradients.
pub(super) struct LaneSink<'a, B: Backend> {
    map: &'a GradientMap<'a>,
    finished: &'a mut dyn Finished<B>,
    accumulators: &'a mut Accumulators<B>,
    lane: Accumulator<B>,
    /// The waiting left siblings that the lane completes, the nearest first.
    merges: VecDeque<Accumulator<B>>,
    closing: Option<Closing>,
    /// One more than the block that has to be done next.
    expected_block: usize,
    violation: Option<GraphError>,
}

impl<B: Backend> LaneSink<'_, B> {
    /// The next backward pass is the lane's last: its blocks are summed and sent as they are done.
    pub(super) fn close(&mut self) {
        let mut node = self.lane.node;
        let (tree, lanes) = (self.map.tree, &self.map.lanes);
        let inside = |node: &Node| lanes.start <= node.lo as usize && node.hi as usize <= lanes.end;
        let mut leaves = true;
        while let Some(parent) = tree.parent(node).filter(inside) {
            let left = |waiting: &Accumulator<B>| Some(waiting.node) == tree.sibling(node);
            if !self.accumulators.waiting.last().is_some_and(left) {
                leaves = false;
                break;
            }
            self.merges.extend(self.accumulators.waiting.pop());
            node = parent;
        }
        self.closing = Some(Closing { node, leaves });
    }

    /// Ends a backward pass: every block must have been done, once, the last first.
    pub(super) fn end_pass(&mut self) -> Result<(), Failure> {
        self.check_order()?;
        let missing = std::mem::replace(&mut self.expected_block, self.map.layout.blocks().len());
        if missing > 0 {
            let name = &self.map.layout.blocks()[missing - 1];
            return Err(GraphError::Model {
                expected: format!("that it finishes block {name} before its backward pass ends"),
                done: "did not".to_owned(),
            }
            .into());
        }
        Ok(())
    }

    /// Says which block was done out of order, if one was.
    pub(super) fn check_order(&mut self) -> Result<(), Failure> {
        self.violation.take().map_or(Ok(()), |violation| Err(violation.into()))
    }

    /// Ends the lane: what it completed either left, or waits for its right sibling.
    pub(super) fn end_lane(mut self) {
        let Some(Closing { node, leaves }) = self.closing else { return };
        let spare = &mut self.accumulators.spare;
        let sum = match self.merges.pop_back() {
            Some(outermost) => {
                spare.push(self.lane.gradients);
                outermost.gradients
            }
            None => self.lane.gradients,
        };
        spare.extend(self.merges.into_iter().map(|merged| merged.gradients));
        match (leaves, self.map.finished) {
            (true, FinishedSums::Copied { .. }) => spare.push(sum),
            (true, FinishedSums::Kept) => {
                self.accumulators.kept.push(Accumulator { node, gradients: sum });
            }
            (false, _) => {
                self.accumulators.waiting.push(Accumulator { node, gradients: sum });
            }
        }
    }

    fn close_use(
        &mut self,
        device: &mut Device<'_, B>,
        use_index: usize,
    ) -> tidemill_model::Result<()> {
        let Some(Closing { node, leaves }) = self.closing else { return Ok(()) };
        let range = self.map.layout.gradient_range(use_index);
        let mut sum = &self.lane.gradients;
        for left in &mut self.merges {
            device.backend.accumulate(
                device.stream,
                SliceMut::new(&mut left.gradients, range.start, range.len())?,
                Slice::new(sum, range.start, range.len())?,
            )?;
            sum = &left.gradients;
        }
        let FinishedSums::Copied { from, chunks: batch } = self.map.finished else { return Ok(()) };
        if !leaves {
            return Ok(());
        }
        let chunks = self.map.chunks.of_segment(self.map.layout.uses()[use_index].segment);
        for first in chunks.clone().step_by(batch.max(1)) {
            let some = first..chunks.end.min(first + batch);
            let sums = Slice::new(sum, range.start, range.len())?;
            let copied = copied_chunks(device, self.map.chunks, from, some, sums)?;
            if !self.finished.chunks(use_index, node, copied) {
                return Err(ModelError::SinkClosed);
            }
        }
        Ok(())
    }

    /// Hands over the buckets that block `block` was the last of, where this is the last lane.
    fn close_buckets(
        &mut self,
        device: &mut Device<'_, B>,
        block: usize,
    ) -> tidemill_model::Result<()> {
        let Some(Closing { node, leaves }) = self.closing else { return Ok(()) };
        let is_last_lane = leaves && node.hi as usize == self.map.lanes.end;
        if self.map.finished != FinishedSums::Kept || !is_last_lane {
            return Ok(());
        }
        let sum = self.merges.back().map_or(&self.lane.gradients, |outermost| &outermost.gradients);
        let before = self.accumulators.kept.iter().map(|kept| (kept.node, &kept.gradients));
        let sums: Vec<_> = before.chain([(node, sum)]).collect();
        let buckets = self.map.buckets.buckets().iter().enumerate();
        for (bucket, _) in buckets.filter(|(_, bucket)| bucket.block == block) {
            if !self.finished.bucket(device, bucket, &sums)? {
                return Err(ModelError::SinkClosed);
            }
        }
        Ok(())
    }
}

/// Chunks `chunks` of the use whose sums are `sums`.
fn copied_chunks<B: Backend>(
    device: &mut Device<'_, B>,
    plan: &ChunkPlan,
    from: MemoryPlace,
    chunks: Range<usize>,
    sums: Slice<'_, B, f32>,
) -> tidemill_model::Result<Vec<(usize, Vec<f32>)>> {
    let place = |chunk| plan.in_segment(chunk);
    let Device { backend, stream } = device;
    match from {
        MemoryPlace::Host => chunks
            .map(|chunk| {
                let Range { start, end } = place(chunk);
                Ok((chunk, backend.to_vec(stream, sums.sub(start, end - start)?)?))
            })
            .collect(),
        // Waiting for a device takes longer than copying a chunk: they are read together and cut here.
        MemoryPlace::Device => {
            let (start, end) = (place(chunks.start).start, place(chunks.end - 1).end);
            let values = backend.to_vec(stream, sums.sub(start, end - start)?)?;
            let cut = |chunk| {
                let inside = place(chunk);
                (chunk, values[inside.start - start..inside.end - start].to_vec())
            };
            Ok(chunks.map(cut).collect())
        }
    }
}

impl<B: Backend> GradientSink<B> for LaneSink<'_, B> {
    fn accumulator(&mut self, use_index: usize) -> SliceMut<'_, B, f32> {
        let range = self.map.layout.gradient_range(use_index);
        // `begin` allocated the layout's gradient arena, which holds the slot of every use.
        SliceMut::new(&mut self.lane.gradients, range.start, range.len())
            .expect("an accumulator holds every use of its layout")
    }

    fn block_done(
        &mut self,
        device: &mut Device<'_, B>,
        block: usize,
    ) -> tidemill_model::Result<()> {
        if block + 1 != self.expected_block {
            let due = self.expected_block.checked_sub(1);
            let due = due.map_or("the end of the pass".to_owned(), |due| format!("block {due}"));
            self.violation.get_or_insert_with(|| GraphError::Model {
                expected: due,
                done: format!("finished block {block}"),
            });
            return Err(ModelError::SinkClosed);
        }
        self.expected_block = block;
        progress::moved();
        let uses = self.map.layout.uses();
        let first = uses.partition_point(|use_| use_.block < block);
        let end = uses.partition_point(|use_| use_.block <= block);
        (first..end).try_for_each(|use_index| self.close_use(device, use_index))?;
        self.close_buckets(device, block)
    }
}
