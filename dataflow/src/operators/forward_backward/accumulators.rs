//! The gradient sums of a worker that holds them until all its lanes are done, and how they collapse along the canonical tree.
//!
//! Lanes run in order. When a lane ends whose left sibling waits, `left = left + lane` at once, and so on upwards:
//! a worker holds few: the nodes that make up its lanes so far, and the one at hand. During the last microbatch of a lane
//! this happens block by block, behind the backward pass; and in that of the last lane the buckets are handed over one by one, so
//! that they are summed over all workers while the rest of the backward still runs. Between two microbatches of a lane its sums rest here.

use std::collections::VecDeque;
use std::ops::Range;

use tidemill_collective::{BucketPlan, Node, Tree};
use tidemill_kernels::{Backend, KernelError, Slice, SliceMut};
use tidemill_model::{Device, GradientSink, Layout, ModelError};

use super::block_order::{BlockOrder, uses_of};
use super::lane_sink::LaneSink;
use crate::cluster::Failure;

/// Receives finished sums.
pub(super) trait Finished<B: Backend> {
    /// The gradients of bucket `bucket` are final in `sums`, which together are all lanes of this worker. Answers whether further
    /// buckets are still wanted.
    fn bucket(
        &mut self,
        device: &mut Device<'_, B>,
        bucket: usize,
        sums: &[(Node, &B::Buffer<f32>)],
    ) -> Result<bool, KernelError>;
}

/// The layout of gradients that the accumulators of every lane share.
pub(super) struct GradientMap<'a> {
    pub(super) layout: &'a Layout,
    pub(super) buckets: &'a BucketPlan,
    pub(super) tree: Tree,
    /// The lanes of this worker, which are neighbours.
    pub(super) lanes: Range<usize>,
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
    /// The lane at hand, between two of its microbatches.
    begun: Option<Accumulator<B>>,
    /// The finished nodes that stay where they are.
    kept: Vec<Accumulator<B>>,
}

impl<B: Backend> Accumulators<B> {
    pub(super) fn new() -> Self {
        Self { waiting: Vec::new(), spare: Vec::new(), begun: None, kept: Vec::new() }
    }

    /// The sums over all lanes, of a worker that has all of them.
    pub(super) fn take_kept(&mut self) -> Option<B::Buffer<f32>> {
        self.kept.pop().map(|kept| kept.gradients)
    }

    /// Takes back the accumulators that were kept, and `sums`, which was taken: none is needed any longer.
    pub(super) fn reuse(&mut self, sums: Option<B::Buffer<f32>>) {
        self.spare.extend(self.kept.drain(..).map(|kept| kept.gradients).chain(sums));
    }

    /// A sink for the next microbatch of lane `lane`: for its first, sums from zero.
    pub(super) fn sink<'a>(
        &'a mut self,
        device: &mut Device<'_, B>,
        map: &'a GradientMap<'a>,
        finished: &'a mut dyn Finished<B>,
        lane: usize,
    ) -> Result<ArenaSink<'a, B>, Failure> {
        let lane = match self.begun.take() {
            Some(lane) => lane,
            None => self.begin(device, map.layout, Node::leaf(lane as u32))?,
        };
        Ok(ArenaSink {
            order: BlockOrder::new(map.layout),
            map,
            finished,
            accumulators: self,
            lane,
            merges: VecDeque::new(),
            closing: None,
        })
    }

    fn begin(
        &mut self,
        device: &mut Device<'_, B>,
        layout: &Layout,
        node: Node,
    ) -> Result<Accumulator<B>, KernelError> {
        let Device { backend, stream } = device;
        let mut gradients = match self.spare.pop() {
            Some(gradients) => gradients,
            None => backend.allocate(stream, layout.gradient_elements())?,
        };
        backend.fill_zero(stream, SliceMut::all(&mut gradients))?;
        Ok(Accumulator { node, gradients })
    }
}

/// The work that follows each block of a lane's last microbatch.
struct Closing {
    /// The node that the lane completes, after all merges.
    node: Node,
    /// Whether that node leaves this worker.
    leaves: bool,
}

/// Where the backward pass of a microbatch leaves its gradients: in an arena of all of them.
pub(super) struct ArenaSink<'a, B: Backend> {
    map: &'a GradientMap<'a>,
    finished: &'a mut dyn Finished<B>,
    accumulators: &'a mut Accumulators<B>,
    lane: Accumulator<B>,
    /// The waiting left siblings that the lane completes, the nearest first.
    merges: VecDeque<Accumulator<B>>,
    closing: Option<Closing>,
    order: BlockOrder,
}

impl<B: Backend> LaneSink<B> for ArenaSink<'_, B> {
    fn close(&mut self) {
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

    fn order(&mut self) -> (&mut BlockOrder, &Layout) {
        (&mut self.order, self.map.layout)
    }

    /// All sums that a lane completed have left, or wait for their right siblings.
    fn end(mut self: Box<Self>) {
        let Some(Closing { node, leaves }) = self.closing else {
            self.accumulators.begun = Some(self.lane);
            return;
        };
        let spare = &mut self.accumulators.spare;
        let sum = match self.merges.pop_back() {
            Some(outermost) => {
                spare.push(self.lane.gradients);
                outermost.gradients
            }
            None => self.lane.gradients,
        };
        spare.extend(self.merges.into_iter().map(|merged| merged.gradients));
        let sum = Accumulator { node, gradients: sum };
        match leaves {
            true => self.accumulators.kept.push(sum),
            false => self.accumulators.waiting.push(sum),
        }
    }
}

impl<B: Backend> ArenaSink<'_, B> {
    fn close_use(
        &mut self,
        device: &mut Device<'_, B>,
        use_index: usize,
    ) -> tidemill_model::Result<()> {
        if self.closing.is_none() {
            return Ok(());
        }
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
        if !is_last_lane {
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

impl<B: Backend> GradientSink<B> for ArenaSink<'_, B> {
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
        self.order.done(block)?;
        let mut uses = uses_of(self.map.layout, block);
        uses.try_for_each(|use_index| self.close_use(device, use_index))?;
        self.close_buckets(device, block)
    }
}
