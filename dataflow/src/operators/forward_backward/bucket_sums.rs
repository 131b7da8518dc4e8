//! The gradients of the lane at hand, where finished lanes are added by their owners: a bucket leaves as soon as it is final, and
//! its memory serves again once it was read.

use std::collections::VecDeque;

use tidemill_collective::communicator::Reading;
use tidemill_collective::{BucketPlan, Node};
use tidemill_kernels::{Backend, SliceMut};
use tidemill_model::{Device, GradientSink, Layout, ModelError};

use super::block_order::{BlockOrder, uses_of};
use super::lane_sink::LaneSink;
use crate::cluster::progress::{self, Phase};
use crate::operators::bucket_memory::BucketMemory;
use crate::operators::job_thread::Stopped;

/// Takes the gradients of a lane to their owners.
pub(super) trait Departing<B: Backend> {
    /// The gradients of bucket `bucket` over the lane of `node` are final in `sums`.
    fn bucket(
        &mut self,
        device: &mut Device<'_, B>,
        bucket: usize,
        node: Node,
        sums: &B::Buffer<f32>,
    ) -> Result<Option<Reading<B>>, Stopped>;
}

/// Memory for the gradients of a bucket.
struct Piece<B: Backend> {
    gradients: B::Buffer<f32>,
    /// The sums that were posted to other workers, which may still read them.
    reading: Option<Reading<B>>,
}

/// The place of a use.
struct Place {
    bucket: usize,
    start: usize,
    elements: usize,
}

/// The memory of a worker's buckets.
pub(super) struct BucketSums<B: Backend> {
    memory: BucketMemory,
    /// The place of each use.
    places: Vec<Place>,
    /// The memory of each bucket that takes no turns, or that blocks add to now.
    held: Vec<Option<Piece<B>>>,
    /// Whether blocks add to each bucket now.
    is_open: Vec<bool>,
    /// Pieces of buckets that take turns, the one that left first in front.
    left: VecDeque<Piece<B>>,
    /// Number of pieces of buckets that take turns.
    pieces: usize,
    /// Memory for a use without elements.
    nothing: Option<B::Buffer<f32>>,
}

impl<B: Backend> BucketSums<B> {
    pub(super) fn new(layout: &Layout, buckets: &BucketPlan, memory: BucketMemory) -> Self {
        let places = (0..layout.uses().len()).map(|use_index| place(layout, buckets, use_index));
        let count = buckets.buckets().len();
        Self {
            places: places.collect(),
            held: (0..count).map(|_| None).collect(),
            is_open: vec![false; count],
            left: VecDeque::new(),
            pieces: 0,
            nothing: None,
            memory,
        }
    }

    /// A sink for the next microbatch of the lane of `node`: for its first, sums from zero.
    pub(super) fn sink<'a>(
        &'a mut self,
        device: &mut Device<'_, B>,
        (layout, buckets): (&'a Layout, &'a BucketPlan),
        departing: &'a mut dyn Departing<B>,
        node: Node,
    ) -> Result<BucketSink<'a, B>, Stopped> {
        let order = BlockOrder::new(layout);
        if self.nothing.is_none() {
            self.nothing = Some(device.backend.allocate(device.stream, 0)?);
        }
        let mut sink = BucketSink {
            sums: self,
            layout,
            buckets,
            departing,
            node,
            is_last: false,
            order,
            stopped: None,
        };
        // Which a later microbatch finds open.
        sink.open(device, layout.blocks().len() - 1)?;
        Ok(sink)
    }

    /// Zeros for a bucket, in memory that has no reader any more.
    fn open(&mut self, device: &mut Device<'_, B>, bucket: usize) -> Result<(), Stopped> {
        let Device { backend, stream } = device;
        let need = &self.memory.buckets()[bucket];
        let mut piece = match self.held[bucket].take() {
            Some(piece) => piece,
            None => {
                let elements = match need.takes_turns {
                    true => self.memory.piece_elements,
                    false => need.elements,
                };
                let is_full = need.takes_turns && self.pieces >= self.memory.pieces;
                match is_full.then(|| self.left.pop_front()).flatten() {
                    Some(piece) => piece,
                    None => {
                        self.pieces += usize::from(need.takes_turns);
                        Piece { gradients: backend.allocate(stream, elements)?, reading: None }
                    }
                }
            }
        };
        if let Some(reading) = piece.reading.take() {
            // Others read it once they have as much, and may be far behind.
            let _waiting = progress::during(Phase::WaitingForWorkers);
            reading.end(backend, stream).map_err(Stopped::of)?;
        }
        let out = SliceMut::new(&mut piece.gradients, 0, need.elements)?;
        backend.fill_zero(stream, out)?;
        self.held[bucket] = Some(piece);
        self.is_open[bucket] = true;
        Ok(())
    }
}

/// Where the backward pass of a microbatch leaves its gradients: bucket by bucket.
pub(super) struct BucketSink<'a, B: Backend> {
    sums: &'a mut BucketSums<B>,
    layout: &'a Layout,
    buckets: &'a BucketPlan,
    departing: &'a mut dyn Departing<B>,
    node: Node,
    /// Whether it is the last of its lane.
    is_last: bool,
    order: BlockOrder,
    /// The reason why the pass ended.
    stopped: Option<Stopped>,
}

impl<B: Backend> BucketSink<'_, B> {
    /// Opens the buckets that block `block` adds to.
    fn open(&mut self, device: &mut Device<'_, B>, block: usize) -> Result<(), Stopped> {
        for use_index in uses_of(self.layout, block) {
            let Place { bucket, elements, .. } = self.sums.places[use_index];
            if elements > 0 && !self.sums.is_open[bucket] {
                self.sums.open(device, bucket)?;
            }
        }
        Ok(())
    }

    /// Hands over the buckets that block `block` was the last of.
    fn leave(&mut self, device: &mut Device<'_, B>, block: usize) -> Result<(), Stopped> {
        for (bucket, _) in
            self.buckets.buckets().iter().enumerate().filter(|(_, bucket)| bucket.block == block)
        {
            let Some(mut piece) = self.sums.held[bucket].take() else { continue };
            let reading = self.departing.bucket(device, bucket, self.node, &piece.gradients)?;
            piece.reading = reading;
            self.sums.is_open[bucket] = false;
            match self.sums.memory.buckets()[bucket].takes_turns {
                true => self.sums.left.push_back(piece),
                false => self.sums.held[bucket] = Some(piece),
            }
        }
        Ok(())
    }
}

impl<B: Backend> LaneSink<B> for BucketSink<'_, B> {
    fn close(&mut self) {
        self.is_last = true;
    }

    fn order(&mut self) -> (&mut BlockOrder, &Layout) {
        (&mut self.order, self.layout)
    }

    fn stopped(&mut self) -> Option<Stopped> {
        self.stopped.take()
    }

    fn end(self: Box<Self>) {}
}

impl<B: Backend> GradientSink<B> for BucketSink<'_, B> {
    fn accumulator(&mut self, use_index: usize) -> SliceMut<'_, B, f32> {
        let Place { bucket, start, elements } = self.sums.places[use_index];
        let held = self.sums.held.get_mut(bucket).and_then(Option::as_mut);
        let gradients = match elements {
            0 => self.sums.nothing.as_mut(),
            _ => held.map(|piece| &mut piece.gradients),
        };
        // The buckets of a block are opened when the block behind it is done, or the lane begins.
        let gradients = gradients.expect("a block adds to open buckets");
        SliceMut::new(gradients, start, elements).expect("a bucket holds its uses")
    }

    fn block_done(
        &mut self,
        device: &mut Device<'_, B>,
        block: usize,
    ) -> tidemill_model::Result<()> {
        self.order.done(block)?;
        let mut next = || {
            if self.is_last {
                self.leave(device, block)?;
            }
            block.checked_sub(1).map_or(Ok(()), |before| self.open(device, before))
        };
        next().map_err(|stopped| {
            self.stopped = Some(stopped);
            ModelError::SinkClosed
        })
    }
}

fn place(layout: &Layout, buckets: &BucketPlan, use_index: usize) -> Place {
    let of = &layout.uses()[use_index];
    let range = &layout.segments()[of.segment].range;
    let elements = range.len();
    for (bucket, planned) in buckets.buckets().iter().enumerate() {
        let Some(inside) = range.start.checked_sub(planned.range.start) else { continue };
        let slot = planned.slots.iter().position(|slot| slot + inside == of.gradient_offset);
        if let (true, Some(index)) = (planned.range.contains(&range.start), slot) {
            return Place { bucket, start: index * planned.range.len() + inside, elements };
        }
    }
    Place { bucket: 0, start: 0, elements: 0 }
}
