//! Where the parameters of a block are, when each worker has what it owns of them.

use std::ops::Range;

use tidemill_collective::{BucketPlan, ChunkPlan};
use tidemill_model::layout::TENSOR_ALIGNMENT_ELEMENTS;
use tidemill_model::{Direction, Layout, PackedTensor, Packing};

use super::plan::{self, TrainingPlan};

/// What comes from one worker, in one piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) worker: usize,
    /// Its elements among what that worker owns.
    pub(super) from: Range<usize>,
    /// Where they go.
    pub(super) to: usize,
}

/// How one use of a segment is gathered: what its block reads, and nothing else.
#[derive(Clone, Debug)]
pub(super) struct GatheredUse {
    pub(super) packing: Packing,
    /// Where its fp32 elements and those of activation precision begin among those of its block.
    pub(super) starts: [usize; 2],
    pub(super) fp32: Vec<Piece>,
    pub(super) activation: Vec<Piece>,
}

/// How every use is gathered.
#[derive(Clone, Debug)]
pub(crate) struct GatherPlan {
    layout: Layout,
    uses: Vec<GatheredUse>,
    /// The most fp32 elements of a block, and of activation precision.
    most: [usize; 2],
}

impl GatherPlan {
    /// That of `layout`, over what `workers` workers own by `plan`.
    pub(crate) fn new(layout: &Layout, plan: &TrainingPlan, workers: usize) -> Self {
        Self::over(layout, (&plan.chunks, &plan.buckets), workers)
    }

    /// That of `layout`, over what `workers` workers own of these buckets of chunks.
    pub(crate) fn over(
        layout: &Layout,
        (chunks, buckets): (&ChunkPlan, &BucketPlan),
        workers: usize,
    ) -> Self {
        let owners = buckets.owners(chunks, workers);
        let mut owned = Vec::new();
        for worker in 0..workers {
            let parts = plan::owned(chunks, &owners, worker).into_iter();
            owned.extend(parts.filter(|p| !p.range.is_empty()).map(|part| (worker, part)));
        }
        owned.sort_by_key(|(_, part)| part.range.start);
        let pieces = |packing: &Packing, base: usize, start: fn(&PackedTensor) -> Option<usize>| {
            let mut pieces: Vec<Piece> = Vec::new();
            for tensor in packing.tensors() {
                let Some(start) = start(tensor) else { continue };
                let first = owned.partition_point(|(_, part)| part.range.end <= tensor.range.start);
                for (worker, part) in &owned[first..] {
                    let inside = tensor.range.start.max(part.range.start)
                        ..tensor.range.end.min(part.range.end);
                    if inside.is_empty() {
                        break;
                    }
                    let from = part.start + inside.start - part.range.start;
                    let to = base + start + inside.start - tensor.range.start;
                    push(&mut pieces, *worker, from..from + inside.len(), to);
                }
            }
            pieces
        };
        let (mut uses, mut most) = (Vec::new(), [0, 0]);
        let (mut block, mut ends) = (None, [0, 0]);
        for (use_index, of_block) in layout.uses().iter().enumerate() {
            if block.replace(of_block.block) != Some(of_block.block) {
                ends = [0, 0];
            }
            let packing = Packing::new(layout, use_index);
            let starts = ends;
            ends[0] += packing.fp32_elements();
            ends[1] += packing.activation_elements();
            most = [most[0].max(ends[0]), most[1].max(ends[1])];
            let fp32 = pieces(&packing, starts[0], |tensor| tensor.fp32_start);
            let activation = pieces(&packing, starts[1], |tensor| tensor.activation_start);
            uses.push(GatheredUse { packing, starts, fp32, activation });
        }
        Self { layout: layout.clone(), uses, most }
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(super) fn use_of(&self, use_index: usize) -> &GatheredUse {
        &self.uses[use_index]
    }

    /// The uses that have to be there once `block` is entered.
    pub(super) fn needed(
        &self,
        (block, direction): (usize, Direction),
    ) -> impl Iterator<Item = usize> {
        self.layout.read_uses(block, direction)
    }

    /// The most fp32 elements of a block, and of activation precision.
    pub(crate) fn most_elements(&self) -> [usize; 2] {
        self.most
    }
}

/// Adds a piece; where it goes on from the last as far apart as that lies, or with no more than padding between, to that.
fn push(pieces: &mut Vec<Piece>, worker: usize, from: Range<usize>, to: usize) {
    if let Some(last) = pieces.last_mut().filter(|last| last.worker == worker)
        && let Some(gap) = from.start.checked_sub(last.from.end)
        && gap < TENSOR_ALIGNMENT_ELEMENTS
        && last.to + last.from.len() + gap == to
    {
        last.from.end = from.end;
        return;
    }
    pieces.push(Piece { worker, from, to });
}

#[cfg(test)]
mod tests {
    use tidemill_model::{Decay, Reading};

    use super::*;
    use crate::batch::{BatchSettings, MicrobatchMemory};

    /// A table that the first and the last block use, and a block of vectors and matrices between them.
    fn layout() -> Layout {
        let mut layout = Layout::new();
        let table = layout.segment("table");
        layout.tensor("table", &[31, 5], Decay::Decayed, 8);
        let body = layout.segment("body");
        for (name, elements, reading) in [
            ("norm", 5, Reading::Fp32),
            ("first", 50, Reading::Activation),
            ("second", 70, Reading::Activation),
            ("bias", 7, Reading::Fp32),
            ("scale", 9, Reading::Fp32),
        ] {
            let tensor = layout.tensor(name, &[elements], Decay::Exempt, 1);
            layout.set_reading(tensor, reading);
        }
        let first = layout.block("first", &[table]);
        layout.block("body", &[body]);
        let last = layout.block("last", &[table]);
        layout.set_use_reading(first, Reading::Fp32);
        layout.set_use_reading(last, Reading::Activation);
        layout
    }

    /// Every element that a block reads comes from its owner, once, whoever owns what.
    #[test]
    fn every_element_that_is_read_comes_from_its_owner() {
        let layout = layout();
        let settings = BatchSettings { lanes: Some(8), ..BatchSettings::default() };
        let batch = settings.plan(MicrobatchMemory::default()).unwrap();
        for (workers, chunk_elements) in [(1, 16), (2, 16), (3, 32), (8, 16), (8, 1 << 20)] {
            let plan = TrainingPlan::new(batch.clone(), &layout, 4, 1);
            let plan = plan.with_cuts(&layout, chunk_elements, 1);
            let gather = GatherPlan::new(&layout, &plan, workers);
            // What each worker has: the index of its element in the arena.
            let values: Vec<Vec<usize>> = (0..workers)
                .map(|worker| {
                    let mut values = Vec::new();
                    let mut parts = plan.owned(worker, workers);
                    parts.sort_by_key(|part| part.start);
                    parts.into_iter().for_each(|part| values.extend(part.range));
                    values
                })
                .collect();
            for use_index in 0..layout.uses().len() {
                let of_use = gather.use_of(use_index);
                for (pieces, start, of_tensor) in [
                    (&of_use.fp32, of_use.starts[0], false),
                    (&of_use.activation, of_use.starts[1], true),
                ] {
                    let mut found = vec![None; start + 400];
                    for Piece { worker, from, to } in pieces {
                        for (index, value) in values[*worker][from.clone()].iter().enumerate() {
                            assert_eq!(found[to + index].replace(*value), None, "twice");
                        }
                    }
                    for tensor in of_use.packing.tensors() {
                        let first = match of_tensor {
                            true => tensor.activation_start,
                            false => tensor.fp32_start,
                        };
                        let Some(first) = first else { continue };
                        let place = start + first..start + first + tensor.range.len();
                        let expected: Vec<_> = tensor.range.clone().map(Some).collect();
                        assert_eq!(found[place], expected, "{} of {workers}", tensor.name);
                    }
                }
            }
        }
    }

    #[test]
    fn neighbours_come_in_one_piece() {
        let layout = layout();
        let batch = BatchSettings::default().plan(MicrobatchMemory::default()).unwrap();
        let plan = TrainingPlan::new(batch, &layout, 4, 1);
        let gather = GatherPlan::new(&layout, &plan, 1);
        let body = gather.use_of(1);
        assert_eq!((body.fp32.len(), body.activation.len()), (2, 1), "{body:?}");
    }
}
