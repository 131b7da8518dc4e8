//! Where the parameters of a block are, when several workers hold them together.

use std::ops::Range;

use tidemill_kernels::Run;
use tidemill_model::layout::TENSOR_ALIGNMENT_ELEMENTS;
use tidemill_model::{Direction, Held, Layout, PackedTensor, Packing};

/// The elements that come from one of the workers that hold the parameters together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FromMember {
    /// The number of the worker among them.
    pub(super) member: usize,
    /// Which elements of its memory, and where they go.
    pub(super) runs: Vec<Run>,
}

impl FromMember {
    pub(super) fn elements(&self) -> usize {
        self.runs.iter().map(|run| run.from.len()).sum()
    }
}

/// How one use of a segment is gathered: the elements that its block reads, and nothing else.
#[derive(Clone, Debug)]
pub(super) struct GatheredUse {
    pub(super) packing: Packing,
    /// Where its fp32 elements and its elements of activation precision begin, within those of its block.
    pub(super) starts: [usize; 2],
    pub(super) fp32: Vec<FromMember>,
    pub(super) activation: Vec<FromMember>,
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
    /// The plan for `layout`, whose parameters `members` hold.
    pub(crate) fn new(layout: &Layout, members: &[Held]) -> Self {
        type Place = fn(&Held, &Range<usize>) -> Option<Range<usize>>;
        type Start = fn(&PackedTensor) -> Option<usize>;
        let of_members = |packing: &Packing, base: usize, start: Start, place: Place| {
            let of_member = |(member, held): (usize, &Held)| {
                let mut runs = Vec::new();
                for tensor in packing.tensors() {
                    let Some(start) = start(tensor) else { continue };
                    for inside in held.within(&tensor.range) {
                        let to = base + start + inside.start - tensor.range.start;
                        let from = place(held, &inside);
                        runs.extend(from.map(|from| Run { from, to }));
                    }
                }
                FromMember { member, runs: joined(runs) }
            };
            let of_members = members.iter().enumerate().map(of_member);
            of_members.filter(|of| !of.runs.is_empty()).collect::<Vec<_>>()
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
            let fp32 =
                of_members(&packing, starts[0], |tensor| tensor.fp32_start, Held::fp32_place);
            let activation =
                of_members(&packing, starts[1], |tensor| tensor.activation_start, Held::place);
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

/// The same runs; one that goes on from the one before it as far apart as that lies, or with no more than padding between, with that.
fn joined(runs: Vec<Run>) -> Vec<Run> {
    let mut joined: Vec<Run> = Vec::new();
    for run in runs {
        if let Some(last) = joined.last_mut()
            && let Some(gap) = run.from.start.checked_sub(last.from.end)
            && gap < TENSOR_ALIGNMENT_ELEMENTS
            && last.to + last.from.len() + gap == run.to
        {
            last.from.end = run.from.end;
            continue;
        }
        joined.push(run);
    }
    joined
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use tidemill_collective::communicator::Holders;
    use tidemill_kernels::emulator::Emulator;
    use tidemill_kernels::{Backend, Bf16, Cpu, Gpu};
    use tidemill_model::{Decay, Reading};

    use super::*;
    use crate::batch::{BatchSettings, MicrobatchMemory};
    use crate::operators::plan::TrainingPlan;

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

    /// The memory that `holders` among `workers` workers have of the test's layout, and by member the arena's element at each place of its
    /// memory of activation precision and of the one that is read in fp32.
    fn held_by<B: Backend>(
        (workers, members): (usize, usize),
        chunk_elements: usize,
    ) -> (Vec<Held>, Vec<[Vec<usize>; 2]>) {
        let layout = layout();
        let settings = BatchSettings { lanes: Some(8), ..BatchSettings::default() };
        let batch = settings.plan(MicrobatchMemory::default()).unwrap();
        let plan = TrainingPlan::new(batch, &layout, 4, 1).with_cuts(&layout, chunk_elements, 1);
        let holders = Holders::together(NonZeroUsize::new(members).unwrap());
        let held = |member| plan.held::<B>(&layout, holders, (member, workers));
        let held: Vec<_> = (0..members).map(held).collect();
        let memories = held.iter().map(|held| {
            let mut memories = [vec![usize::MAX; held.elements()], Vec::new()];
            memories[1] = vec![usize::MAX; held.elements().max(held.vector_elements())];
            for range in held.ranges() {
                for element in range.clone() {
                    let one = element..element + 1;
                    memories[0][held.place(&one).unwrap().start] = element;
                    let place = held.fp32_place(&one);
                    place.into_iter().for_each(|place| memories[1][place.start] = element);
                }
            }
            memories
        });
        let memories = memories.collect();
        (held, memories)
    }

    /// Every element that a block reads comes from one that holds it, once, for any owners and any precision.
    #[test]
    fn every_element_that_is_read_comes_from_its_holder() {
        every_element_comes::<Cpu>();
        every_element_comes::<Gpu<Emulator, Bf16>>();
    }

    fn every_element_comes<B: Backend>() {
        let layout = layout();
        for (workers, members, chunk_elements) in [
            (1, 1, 16),
            (2, 2, 16),
            (3, 3, 32),
            (8, 8, 16),
            (8, 8, 1 << 20),
            (6, 3, 16),
            (8, 2, 16),
            (4, 1, 16),
        ] {
            let (held, memories) = held_by::<B>((workers, members), chunk_elements);
            let all: usize = held.iter().map(Held::elements).sum();
            assert_eq!(all, layout.parameter_elements(), "each holds its part and no more");
            let gather = GatherPlan::new(&layout, &held);
            for use_index in 0..layout.uses().len() {
                let of_use = gather.use_of(use_index);
                for (of_members, start, is_fp32) in [
                    (&of_use.fp32, of_use.starts[0], true),
                    (&of_use.activation, of_use.starts[1], false),
                ] {
                    let mut found = vec![None; start + 400];
                    for FromMember { member, runs } in of_members {
                        for Run { from, to } in runs {
                            let memory = &memories[*member][usize::from(is_fp32)];
                            for (index, value) in memory[from.clone()].iter().enumerate() {
                                assert_eq!(found[to + index].replace(*value), None, "twice");
                            }
                        }
                    }
                    for tensor in of_use.packing.tensors() {
                        let first = match is_fp32 {
                            true => tensor.fp32_start,
                            false => tensor.activation_start,
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
    fn neighbours_come_in_one_run() {
        let layout = layout();
        let runs = |of: &[FromMember]| of.iter().map(|of| of.runs.len()).collect::<Vec<_>>();
        let body = |held| GatherPlan::new(&layout, &[held]).use_of(1).clone();
        let once = body(Held::whole::<Cpu>(&layout));
        assert_eq!((runs(&once.fp32), runs(&once.activation)), (vec![2], vec![1]), "{once:?}");
        // Vectors that have a second copy are side by side in it.
        let twice = body(Held::whole::<Gpu<Emulator, Bf16>>(&layout));
        assert_eq!((runs(&twice.fp32), runs(&twice.activation)), (vec![1], vec![1]), "{twice:?}");
    }
}
