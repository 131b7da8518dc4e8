//! The parameter arena cut into chunks.
//!
//! A chunk is carried by one message; one worker reduces it, updates it and keeps its optimizer state: the owner by the
//! [`BucketPlan`](crate::bucket::BucketPlan). Chunks start at fixed offsets of their segment, so the sums of squares over them (the canonical gradient norm) depend on
//! no worker; the chunk size is therefore numerics, while the owner of a chunk is not.

use std::ops::Range;

/// Elements of a chunk: 256 KiB of fp32, below timely's slabs of 1 MiB and large enough that the cost of
/// a message does not show.
pub const CHUNK_ELEMENTS: usize = 65_536;

/// One chunk of the parameter arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedChunk {
    /// The segment that it is a part of.
    pub segment: usize,
    /// Its elements of the parameter arena.
    pub range: Range<usize>,
    /// The start of the chunk.
    pub start: ChunkStart,
}

/// The start of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkStart {
    /// Something whose owner may be another than that of the chunk before.
    Anew,
    /// More of a tensor that begins in a chunk before and has one owner.
    GoesOn,
}

/// All chunks of a parameter arena, in arena order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkPlan {
    chunks: Vec<PlannedChunk>,
    /// The first chunk of each segment, then the number of chunks.
    first: Vec<usize>,
    /// The first element of each segment.
    starts: Vec<usize>,
}

impl ChunkPlan {
    /// The chunks of `segments`, ranges of the parameter arena in order.
    pub fn new(segments: impl IntoIterator<Item = Range<usize>>) -> Self {
        Self::with_chunk_elements(segments, CHUNK_ELEMENTS)
    }

    /// [`new`](Self::new) with chunks of `chunk_elements`: other chunks give another norm in its
    /// last bits.
    ///
    /// # Panics
    /// When `chunk_elements` is 0.
    pub fn with_chunk_elements(
        segments: impl IntoIterator<Item = Range<usize>>,
        chunk_elements: usize,
    ) -> Self {
        assert!(chunk_elements > 0, "a chunk has at least one element");
        let (mut chunks, mut first, mut starts) = (Vec::new(), Vec::new(), Vec::new());
        for (segment, range) in segments.into_iter().enumerate() {
            first.push(chunks.len());
            starts.push(range.start);
            chunks.extend(range.clone().step_by(chunk_elements).map(|start| PlannedChunk {
                segment,
                range: start..range.end.min(start + chunk_elements),
                start: ChunkStart::Anew,
            }));
        }
        first.push(chunks.len());
        Self { chunks, first, starts }
    }

    /// As [`with_chunk_elements`](Self::with_chunk_elements) where every tensor has one owner. A chunk is several whole tensors, as many
    /// as have room, or a part of one. Each of `segments` is given with where its tensors begin, in order.
    ///
    /// # Panics
    /// When `chunk_elements` is 0.
    pub fn of_whole_tensors(
        segments: impl IntoIterator<Item = (Range<usize>, Vec<usize>)>,
        chunk_elements: usize,
    ) -> Self {
        assert!(chunk_elements > 0, "a chunk has at least one element");
        let (mut chunks, mut first, mut starts) = (Vec::new(), Vec::new(), Vec::new());
        for (segment, (range, tensors)) in segments.into_iter().enumerate() {
            first.push(chunks.len());
            starts.push(range.start);
            // Padding before the first tensor belongs to that tensor.
            let begins = std::iter::once(range.start).chain(tensors.iter().skip(1).copied());
            let ends = tensors.iter().skip(1).copied().chain([range.end]);
            for (begin, end) in begins.zip(ends).filter(|(begin, end)| begin < end) {
                match chunks.last_mut() {
                    Some(PlannedChunk { segment: of, range: last, .. })
                        if *of == segment && end - last.start <= chunk_elements =>
                    {
                        last.end = end;
                    }
                    _ => chunks.extend((begin..end).step_by(chunk_elements).map(|at| {
                        let start = if at == begin { ChunkStart::Anew } else { ChunkStart::GoesOn };
                        let range = at..end.min(at + chunk_elements);
                        PlannedChunk { segment, range, start }
                    })),
                }
            }
        }
        first.push(chunks.len());
        Self { chunks, first, starts }
    }

    /// The chunks, in arena order.
    pub fn chunks(&self) -> &[PlannedChunk] {
        &self.chunks
    }

    /// The indices of the chunks of `segment`.
    pub fn of_segment(&self, segment: usize) -> Range<usize> {
        self.first[segment]..self.first[segment + 1]
    }

    /// The range of `chunk` counted from the start of its segment: its place in a gradient
    /// slot.
    pub fn in_segment(&self, chunk: usize) -> Range<usize> {
        let PlannedChunk { segment, range, .. } = &self.chunks[chunk];
        let start = self.starts[*segment];
        range.start - start..range.end - start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_every_segment_at_fixed_offsets() {
        let plan = ChunkPlan::with_chunk_elements([0..250, 250..250, 250..266, 266..466], 100);
        let ranges: Vec<_> = plan.chunks().iter().map(|chunk| chunk.range.clone()).collect();
        assert_eq!(ranges, [0..100, 100..200, 200..250, 250..266, 266..366, 366..466]);
        assert_eq!(plan.of_segment(0), 0..3);
        assert_eq!(plan.of_segment(1), 3..3);
        assert_eq!(plan.of_segment(3), 4..6);
        assert_eq!(plan.in_segment(2), 200..250);
        assert_eq!(plan.in_segment(5), 100..200);
    }

    #[test]
    fn chunks_of_whole_tensors_end_where_tensors_do_or_inside_of_one() {
        let segments = [
            (0..250, vec![0, 16, 48, 64]),
            (250..250, vec![]),
            (250..266, vec![250]),
            (266..500, vec![266, 466]),
        ];
        let plan = ChunkPlan::of_whole_tensors(segments.clone(), 100);
        let found: Vec<_> = plan.chunks().iter().map(|it| (it.range.clone(), it.start)).collect();
        use ChunkStart::{Anew, GoesOn};
        let expected = [
            (0..64, Anew),
            (64..164, Anew),
            (164..250, GoesOn),
            (250..266, Anew),
            (266..366, Anew),
            (366..466, GoesOn),
            (466..500, Anew),
        ];
        assert_eq!(found, expected);
        assert_eq!([0, 1, 2, 3].map(|it| plan.of_segment(it)), [0..3, 3..3, 3..4, 4..7]);
        let all = ChunkPlan::of_whole_tensors(segments, 1000);
        let ranges: Vec<_> = all.chunks().iter().map(|chunk| chunk.range.clone()).collect();
        assert_eq!(ranges, [0..250, 250..266, 266..500], "and never across segments");
    }
}
