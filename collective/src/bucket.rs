//! The chunks of a parameter arena in buckets, which are summed, updated and gathered as one.
//!
//! A bucket is a run of whole segments whose gradients become final one after the other in a backward pass, so that the
//! first buckets are summed while the rest of the pass still runs. Its chunks follow each other in the parameter arena, and in
//! every slot of the gradient arena: one kernel goes over all of it. The cut into buckets, and the owners of
//! their parts, change the speed and never the numerics.

use std::ops::Range;

use crate::plan::{ChunkPlan, ChunkStart, PlannedChunk};

/// Elements that a bucket has at least, where there are as many: 16 MiB of fp32, a transfer that takes a link between GPUs
/// much longer than the start of one.
pub const BUCKET_ELEMENTS: usize = 4 << 20;

/// A segment of the parameter arena, for [`BucketPlan::new`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentUses {
    /// Its elements of the parameter arena.
    pub range: Range<usize>,
    /// Each use of it: the block, in forward order, and where the use's slot begins in the gradient arena.
    pub uses: Vec<(usize, usize)>,
}

/// Chunks that are summed, updated and gathered together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Its chunks.
    pub chunks: Range<usize>,
    /// Its elements of the parameter arena.
    pub range: Range<usize>,
    /// Where its gradients begin in the gradient arena, for each use, in order.
    pub slots: Vec<usize>,
    /// The block whose backward pass makes its gradients final.
    pub block: usize,
}

impl Bucket {
    /// Whether `next` goes on where this bucket begins, in the parameter arena and in every slot.
    fn follows(&self, next: &SegmentUses) -> bool {
        let elements = next.range.len();
        let slots = next.uses.iter().map(|&(_, slot)| slot + elements);
        next.range.end == self.range.start && slots.eq(self.slots.iter().copied())
    }
}

/// The buckets of a parameter arena, in the order in which they become final.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketPlan {
    buckets: Vec<Bucket>,
}

impl BucketPlan {
    /// The buckets of `segments`, whose chunks are `chunks`, with `elements` elements each at the least where neighbours
    /// have as many together.
    pub fn new(chunks: &ChunkPlan, segments: &[SegmentUses], elements: usize) -> Self {
        let block = |segment: usize| {
            segments[segment].uses.iter().map(|&(block, _)| block).min().unwrap_or_default()
        };
        let mut order: Vec<usize> = (0..segments.len()).collect();
        order.retain(|&segment| !segments[segment].range.is_empty());
        order.sort_by_key(|&segment| std::cmp::Reverse((block(segment), segment)));
        let mut buckets: Vec<Bucket> = Vec::new();
        for segment in order {
            let SegmentUses { range, uses } = &segments[segment];
            let of_segment = chunks.of_segment(segment);
            match buckets.last_mut() {
                Some(last) if last.range.len() < elements && last.follows(&segments[segment]) => {
                    last.chunks.start = of_segment.start;
                    last.range.start = range.start;
                    last.slots = uses.iter().map(|&(_, slot)| slot).collect();
                    last.block = block(segment);
                }
                _ => buckets.push(Bucket {
                    chunks: of_segment,
                    range: range.clone(),
                    slots: uses.iter().map(|&(_, slot)| slot).collect(),
                    block: block(segment),
                }),
            }
        }
        Self { buckets }
    }

    /// The buckets, in the order in which they become final.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// Which chunks of each bucket each of `ranks` owns: one run of them in order, so that over all buckets every rank owns about
    /// as many elements. A chunk that [goes on](ChunkStart::GoesOn) belongs to the owner of the chunk before.
    pub fn owners(&self, chunks: &ChunkPlan, ranks: usize) -> Vec<BucketOwners> {
        let mut loads = vec![0; ranks];
        let mut so_far = 0;
        let cut = |bucket: &Bucket| {
            so_far += bucket.range.len();
            // The elements that each rank still lacks of an equal share, as parts of this bucket.
            let want = |load: &usize| (so_far / ranks + 1).saturating_sub(*load);
            let wanted: usize = loads.iter().map(want).sum();
            let (mut next, mut had) = (bucket.chunks.start, 0);
            let mut firsts = Vec::with_capacity(ranks + 1);
            for (rank, load) in loads.iter_mut().enumerate() {
                firsts.push(next);
                had += want(load);
                let last = rank + 1 == ranks;
                let end = had as u128 * bucket.range.len() as u128 / wanted as u128;
                let end = bucket.range.start + end as usize;
                while next < bucket.chunks.end {
                    let PlannedChunk { range, start, .. } = &chunks.chunks()[next];
                    let may_end = !last && *start == ChunkStart::Anew;
                    if may_end && range.start + range.len() / 2 >= end {
                        break;
                    }
                    *load += range.len();
                    next += 1;
                }
            }
            firsts.push(next);
            BucketOwners { firsts }
        };
        self.buckets.iter().map(cut).collect()
    }

    /// The owner among `ranks` of each chunk.
    pub fn chunk_owners(&self, chunks: &ChunkPlan, ranks: usize) -> Vec<usize> {
        let mut of_chunks = vec![0; chunks.chunks().len()];
        for owners in self.owners(chunks, ranks) {
            (0..ranks).for_each(|rank| of_chunks[owners.chunks(rank)].fill(rank));
        }
        of_chunks
    }
}

/// The owners of the chunks of a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketOwners {
    /// The first chunk of each rank, then the end.
    firsts: Vec<usize>,
}

impl BucketOwners {
    /// The chunks of `rank`.
    pub fn chunks(&self, rank: usize) -> Range<usize> {
        self.firsts[rank]..self.firsts[rank + 1]
    }

    /// The elements of the parameter arena of `rank`.
    pub fn range(&self, chunks: &ChunkPlan, rank: usize) -> Range<usize> {
        let owned = &chunks.chunks()[self.chunks(rank)];
        match (owned.first(), owned.last()) {
            (Some(first), Some(last)) => first.range.start..last.range.end,
            _ => 0..0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table that the first and the last block use, four blocks of one segment each, and a norm beside the table's second use.
    fn segments() -> Vec<SegmentUses> {
        let segment = |range, uses: &[(usize, usize)]| SegmentUses { range, uses: uses.to_vec() };
        vec![
            segment(0..300, &[(0, 0), (5, 730)]),
            segment(300..400, &[(1, 300)]),
            segment(400..500, &[(2, 400)]),
            segment(500..620, &[(3, 500)]),
            segment(620..720, &[(4, 620)]),
            segment(720..730, &[(5, 720)]),
        ]
    }

    fn plan(elements: usize) -> (ChunkPlan, BucketPlan) {
        let chunks = ChunkPlan::with_chunk_elements(segments().into_iter().map(|s| s.range), 64);
        let buckets = BucketPlan::new(&chunks, &segments(), elements);
        (chunks, buckets)
    }

    #[test]
    fn neighbours_that_become_final_in_turn_are_one_bucket() {
        let (chunks, plan) = plan(200);
        let found: Vec<_> = plan
            .buckets()
            .iter()
            .map(|bucket| (bucket.range.clone(), bucket.slots.clone(), bucket.block))
            .collect();
        let expected = [
            // 10 and 100 and 120 elements are the first 200; then those that are left before the table, which has two slots.
            (500..730, vec![500], 3),
            (300..500, vec![300], 1),
            (0..300, vec![0, 730], 0),
        ];
        assert_eq!(found, expected);
        let covered: Vec<_> = plan
            .buckets()
            .iter()
            .rev()
            .flat_map(|bucket| chunks.chunks()[bucket.chunks.clone()].to_vec())
            .collect();
        assert_eq!(covered, chunks.chunks(), "every chunk once");
    }

    #[test]
    fn a_bucket_of_one_element_is_a_segment() {
        let (_, plan) = plan(1);
        let blocks: Vec<_> = plan.buckets().iter().map(|bucket| bucket.block).collect();
        assert_eq!(blocks, [5, 4, 3, 2, 1, 0]);
    }

    #[test]
    fn owners_have_runs_of_chunks_and_about_as_much_each() {
        for elements in [1, 200, 10_000] {
            let (chunks, plan) = plan(elements);
            for ranks in 1..9 {
                let owners = plan.owners(&chunks, ranks);
                let mut loads = vec![0; ranks];
                for (bucket, owners) in plan.buckets().iter().zip(&owners) {
                    assert_eq!(owners.chunks(0).start, bucket.chunks.start);
                    assert_eq!(owners.chunks(ranks - 1).end, bucket.chunks.end);
                    for (rank, load) in loads.iter_mut().enumerate() {
                        assert!(
                            rank == 0 || owners.chunks(rank - 1).end == owners.chunks(rank).start
                        );
                        let range = owners.range(&chunks, rank);
                        let of_chunks = chunks.chunks()[owners.chunks(rank)].iter();
                        assert_eq!(range.len(), of_chunks.map(|chunk| chunk.range.len()).sum());
                        *load += range.len();
                    }
                }
                for (chunk, owner) in plan.chunk_owners(&chunks, ranks).into_iter().enumerate() {
                    assert!(owners.iter().any(|owners| owners.chunks(owner).contains(&chunk)));
                }
                assert_eq!(loads.iter().sum::<usize>(), 730);
                let (least, most) = (loads.iter().min().unwrap(), loads.iter().max().unwrap());
                assert!(most - least <= 2 * 64, "{elements}, {ranks}: {loads:?}");
            }
        }
    }

    /// A tensor of many chunks that has one owner goes to one rank, and the others get more of the rest.
    #[test]
    fn whole_tensors_have_one_owner() {
        let tensors = |segment: usize, range: Range<usize>| match segment {
            0 => vec![0, 200, 280],
            3 => vec![500, 580],
            _ => vec![range.start],
        };
        let ranges = segments().into_iter().enumerate();
        let ranges = ranges.map(|(index, it)| (it.range.clone(), tensors(index, it.range)));
        let chunks = ChunkPlan::of_whole_tensors(ranges, 64);
        for elements in [1, 200, 10_000] {
            let plan = BucketPlan::new(&chunks, &segments(), elements);
            for ranks in 1..9 {
                let owners = plan.chunk_owners(&chunks, ranks);
                for (index, chunk) in chunks.chunks().iter().enumerate() {
                    let goes_on = chunk.start == ChunkStart::GoesOn;
                    assert!(!goes_on || owners[index] == owners[index - 1], "{chunk:?}");
                }
                let of = |rank| {
                    let owned = chunks.chunks().iter().zip(&owners);
                    owned.filter(|it| *it.1 == rank).map(|it| it.0.range.len()).sum::<usize>()
                };
                assert_eq!((0..ranks).map(of).sum::<usize>(), 730);
                let most = (0..ranks).map(of).max().unwrap();
                assert!(most <= 730 / ranks + 2 * 200, "{elements}, {ranks}: {most}");
                assert!(ranks < 2 || most < 730, "more than one rank owns something");
            }
        }
    }
}
