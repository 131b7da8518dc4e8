//! How much memory the gradients of a lane need, where they leave bucket by bucket as soon as they are final.
//!
//! A bucket needs memory from the first block of a backward pass that adds to it until its owners have read it. So buckets can
//! take turns with a few pieces of memory; but a table that the first and the last block use needs its own, and a bucket that is
//! much larger than the others has its own too, as every piece has to be as large as the largest that it serves. Where a lane
//! has several microbatches, every bucket waits for the last of them, and none can take turns.

use std::ops::Range;

use tidemill_collective::{Bucket, BucketPlan};
use tidemill_model::Layout;

/// Pieces of memory beside those that blocks add to at once: read by others meanwhile.
const READ_MEANWHILE: usize = 2;

/// The buckets that take turns, and their memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BucketMemory {
    buckets: Vec<BucketNeed>,
    /// The pieces that those which take turns share.
    pub(crate) pieces: usize,
    pub(crate) piece_elements: usize,
}

/// The memory that one bucket needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BucketNeed {
    /// The gradients of all its uses, one use after the other.
    pub(crate) elements: usize,
    pub(crate) takes_turns: bool,
    /// The blocks that add to it.
    blocks: Range<usize>,
}

impl BucketMemory {
    /// The memory of `buckets` of `layout`, where a lane has `microbatches` microbatches.
    pub(crate) fn new(layout: &Layout, buckets: &BucketPlan, microbatches: usize) -> Self {
        let need = |bucket: &Bucket| {
            let elements = bucket.slots.len() * bucket.range.len();
            BucketNeed { elements, takes_turns: false, blocks: blocks(layout, bucket) }
        };
        let buckets: Vec<_> = buckets.buckets().iter().map(need).collect();
        let without = Self { buckets, pieces: 0, piece_elements: 0 };
        if microbatches > 1 {
            return without;
        }
        let sizes = without.buckets.iter().map(|bucket| bucket.elements);
        let plans = sizes.map(|elements| without.with_pieces(elements));
        let plans = plans.chain([without.clone()]);
        plans.min_by_key(Self::elements).unwrap_or(without)
    }

    /// The same where buckets of up to `elements` take turns.
    fn with_pieces(&self, elements: usize) -> Self {
        let mut buckets = self.buckets.clone();
        for bucket in &mut buckets {
            bucket.takes_turns = bucket.elements <= elements;
        }
        let turns = || buckets.iter().filter(|bucket| bucket.takes_turns);
        let at_once =
            |block: usize| turns().filter(|bucket| bucket.blocks.contains(&block)).count();
        let blocks = turns().map(|bucket| bucket.blocks.end).max().unwrap_or(0);
        let most = (0..blocks).map(at_once).max().unwrap_or(0);
        let pieces = (most + READ_MEANWHILE).min(turns().count());
        Self { pieces, piece_elements: elements, buckets }
    }

    /// The memory that each bucket needs.
    pub(crate) fn buckets(&self) -> &[BucketNeed] {
        &self.buckets
    }

    /// All elements.
    pub(crate) fn elements(&self) -> usize {
        let own = self.buckets.iter().filter(|bucket| !bucket.takes_turns);
        self.pieces * self.piece_elements + own.map(|bucket| bucket.elements).sum::<usize>()
    }
}

/// The blocks from the first to the last that add to `bucket`.
fn blocks(layout: &Layout, bucket: &Bucket) -> Range<usize> {
    let segments = layout.segments();
    let is_of = |segment: usize| bucket.range.contains(&segments[segment].range.start);
    let uses = layout.uses().iter().filter(|of| is_of(of.segment));
    let last = uses.map(|of| of.block).max().unwrap_or(bucket.block);
    bucket.block..last + 1
}

#[cfg(test)]
mod tests {
    use tidemill_model::Decay;
    use tidemill_model::optimizer::UpdateUnit;

    use super::*;
    use crate::operators::plan::cut;

    /// A table that the first and the last block use, and blocks of as many elements as `blocks` says.
    fn layout(blocks: &[usize]) -> Layout {
        let mut layout = Layout::new();
        let mut segment = |name: String, elements: usize| {
            let segment = layout.segment(name.as_str());
            layout.tensor(format!("{name}.weight"), &[elements], Decay::Exempt, 1);
            segment
        };
        let table = segment("table".to_owned(), 320);
        let segments: Vec<_> =
            blocks.iter().enumerate().map(|(i, &n)| segment(format!("block.{i}"), n)).collect();
        layout.block("first", &[table]);
        for (index, segment) in segments.iter().enumerate() {
            layout.block(format!("block.{index}"), &[*segment]);
        }
        layout.block("last", &[table]);
        layout
    }

    fn memory(blocks: &[usize], microbatches: usize) -> BucketMemory {
        let layout = layout(blocks);
        let (_, buckets) = cut(&layout, UpdateUnit::Element, 16, 1);
        BucketMemory::new(&layout, &buckets, microbatches)
    }

    #[test]
    fn buckets_of_one_block_take_turns() {
        let memory = memory(&[64; 20], 1);
        assert_eq!((memory.pieces, memory.piece_elements), (3, 64));
        assert_eq!(memory.elements(), 3 * 64 + 2 * 320, "and the table's two uses");
        let turns: Vec<_> = memory.buckets().iter().map(|bucket| bucket.takes_turns).collect();
        assert!(turns[..20].iter().all(|&turns| turns) && !turns[20]);
    }

    #[test]
    fn a_large_bucket_has_memory_of_its_own() {
        let memory = memory(&[64, 64, 4096, 64, 64, 64, 64, 64], 1);
        assert_eq!((memory.pieces, memory.piece_elements), (3, 64));
        assert_eq!(memory.elements(), 3 * 64 + 4096 + 2 * 320);
    }

    #[test]
    fn nothing_takes_turns_where_all_wait_or_few_are_there() {
        assert_eq!(memory(&[64; 20], 2).elements(), 20 * 64 + 2 * 320);
        assert_eq!(memory(&[64; 2], 1).elements(), 2 * 64 + 2 * 320);
    }
}
