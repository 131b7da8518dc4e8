//! Which parameters a worker holds, and where.

use std::ops::Range;

use tidemill_kernels::Backend;
use tidemill_kernels::backend::ActivationElement;

use crate::layout::{Layout, TENSOR_ALIGNMENT_ELEMENTS};

/// The part of a requested range that is held: its elements, and where the first of them lies.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Piece {
    range: Range<usize>,
    start: usize,
}

/// Parts of the parameter arena, side by side in its order. Where activations are not fp32, the
/// tensors of these parts that blocks read in fp32 are held a second time, side by side in a memory
/// of their own: the fp32 memory.
///
/// In either memory, elements that are consecutive in the arena and held are consecutive too. In
/// the fp32 memory each piece of a tensor begins at a multiple of [`TENSOR_ALIGNMENT_ELEMENTS`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    parts: Vec<Piece>,
    elements: usize,
    /// The pieces of the fp32 memory; `None` where activations are fp32, so that everything is held
    /// once.
    vectors: Option<Vec<Piece>>,
    vector_elements: usize,
}

impl Held {
    /// All parameters of `layout`.
    pub fn whole<B: Backend>(layout: &Layout) -> Self {
        Self::parts::<B>(layout, std::iter::once(0..layout.parameter_elements()))
    }

    /// The parts `parts` of `layout`, which are disjoint.
    pub fn parts<B: Backend>(
        layout: &Layout,
        parts: impl IntoIterator<Item = Range<usize>>,
    ) -> Self {
        let mut ranges: Vec<_> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        ranges.sort_by_key(|range| range.start);
        let (mut parts, mut elements) = (Vec::<Piece>::new(), 0);
        for range in ranges {
            let start = elements;
            elements += range.len();
            match parts.last_mut().filter(|last| last.range.end == range.start) {
                Some(last) => last.range.end = range.end,
                None => parts.push(Piece { range, start }),
            }
        }
        let mut held = Self { parts, elements, vectors: None, vector_elements: 0 };
        if B::Activation::REMAINDERS == 0 {
            return held;
        }
        let (mut vectors, mut end) = (Vec::new(), 0_usize);
        for tensor in layout.tensors().iter().filter(|tensor| tensor.reading.is_fp32()) {
            for range in held.within(&tensor.stored_range()) {
                let start = end;
                end = (start + range.len()).next_multiple_of(TENSOR_ALIGNMENT_ELEMENTS);
                vectors.push(Piece { range, start });
            }
        }
        (held.vectors, held.vector_elements) = (Some(vectors), end);
        held
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// The number of elements of the fp32 memory, padding included.
    pub fn vector_elements(&self) -> usize {
        self.vector_elements
    }

    /// The parts, as ranges of the arena and in its order.
    pub fn ranges(&self) -> impl Iterator<Item = &Range<usize>> {
        self.parts.iter().map(|part| &part.range)
    }

    /// The held pieces of elements `range` of the arena.
    pub fn within<'a>(
        &'a self,
        range: &Range<usize>,
    ) -> impl Iterator<Item = Range<usize>> + use<'a> {
        within(&self.parts, range).map(|(range, _)| range)
    }

    /// Where elements `range` of the arena lie; `None` where not all of them are held side by side.
    /// An empty range is always held.
    pub fn place(&self, range: &Range<usize>) -> Option<Range<usize>> {
        place(&self.parts, range)
    }

    /// Where elements `range` of the arena lie in the [memory](crate::Parameters::in_fp32) that
    /// blocks read in fp32; `None` as above, or where they are not elements of one tensor that the
    /// layout declares to be read in fp32.
    pub fn fp32_place(&self, range: &Range<usize>) -> Option<Range<usize>> {
        place(self.vectors.as_ref().unwrap_or(&self.parts), range)
    }

    /// The pieces of elements `range` of the arena that the fp32 memory holds, and where.
    pub(crate) fn vectors<'a>(
        &'a self,
        range: &Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, usize)> + use<'a> {
        within(self.vectors.as_deref().unwrap_or(&[]), range)
    }

    /// The range of the fp32 memory that holds elements `range` of the arena, padding between them
    /// included.
    pub fn vector_range(&self, range: &Range<usize>) -> Range<usize> {
        let vectors = self.vectors.as_deref().unwrap_or(&[]);
        let place = |element: usize| {
            let next = vectors.partition_point(|piece| piece.range.end <= element);
            match vectors.get(next) {
                Some(piece) => piece.start + element.saturating_sub(piece.range.start),
                None => self.vector_elements,
            }
        };
        place(range.start)..place(range.end)
    }
}

/// The overlap of `pieces` with `range`, and where it lies.
fn within<'a>(
    pieces: &'a [Piece],
    range: &Range<usize>,
) -> impl Iterator<Item = (Range<usize>, usize)> + use<'a> {
    let Range { start, end } = *range;
    let first = pieces.partition_point(|piece| piece.range.end <= start);
    let inside = pieces[first..].iter().take_while(move |piece| piece.range.start < end);
    inside.map(move |piece| {
        let inside = start.max(piece.range.start)..end.min(piece.range.end);
        let at = piece.start + inside.start - piece.range.start;
        (inside, at)
    })
}

fn place(pieces: &[Piece], range: &Range<usize>) -> Option<Range<usize>> {
    if range.is_empty() {
        return Some(0..0);
    }
    let (inside, start) = within(pieces, range).next()?;
    (inside == *range).then(|| start..start + range.len())
}

#[cfg(test)]
mod tests {
    use tidemill_kernels::emulator::Emulator;
    use tidemill_kernels::{Bf16, Cpu, Gpu};

    use super::*;
    use crate::layout::{Decay, Reading};

    type InBf16 = Gpu<Emulator, Bf16>;

    /// A table that is read in both precisions, a vector, a matrix, and two vectors.
    fn layout() -> Layout {
        let mut layout = Layout::new();
        let only = layout.segment("only");
        for (name, elements, reading) in [
            ("table", 40, Reading::Both),
            ("norm", 5, Reading::Fp32),
            ("matrix", 60, Reading::Activation),
            ("bias", 17, Reading::Fp32),
            ("scale", 3, Reading::Fp32),
        ] {
            let tensor = layout.tensor(name, &[elements], Decay::Exempt, 1);
            layout.set_reading(tensor, reading);
        }
        layout.block("only", &[only]);
        layout
    }

    #[test]
    fn what_is_held_stands_side_by_side_in_the_order_of_the_arena() {
        // The five tensors begin at 0, 48, 64, 128 and 160.
        let held = Held::parts::<InBf16>(&layout(), [140..165, 0..8, 8..20, 32..60, 30..30]);
        assert_eq!(held.ranges().cloned().collect::<Vec<_>>(), [0..20, 32..60, 140..165]);
        assert_eq!(held.elements(), 73);
        let places = [0..20, 7..9, 32..60, 40..41, 141..165, 5..5];
        let places = places.map(|range| held.place(&range));
        let expected = [0..20, 7..9, 20..48, 28..29, 49..73, 0..0];
        assert_eq!(places, expected.map(Some));
        for range in [19..33, 20..32, 20..21, 60..61, 139..141, 164..166] {
            assert_eq!(held.place(&range), None, "{range:?}");
        }
        let within: Vec<_> = held.within(&(10..155)).collect();
        assert_eq!(within, [10..20, 32..60, 140..155]);

        // Two pieces of the table, the norm, the end of the bias, and the scale.
        assert_eq!(held.fp32_place(&(0..20)), Some(0..20));
        assert_eq!(held.fp32_place(&(32..40)), Some(32..40));
        assert_eq!(held.fp32_place(&(48..53)), Some(48..53));
        assert_eq!(held.fp32_place(&(142..145)), Some(66..69));
        assert_eq!(held.fp32_place(&(39..49)), None, "two tensors");
        assert_eq!(held.fp32_place(&(53..54)), None, "padding");
        assert_eq!(
            held.vectors(&(15..50)).collect::<Vec<_>>(),
            [(15..20, 15), (32..40, 32), (48..50, 48)]
        );
        // Elements that are neighbours in the arena are neighbours in the fp32 memory, and every
        // element has a place.
        let cuts = [0, 8, 20, 32, 50, 60, 140, 144, 165, 176];
        let mut end = 0;
        for cut in cuts.windows(2) {
            let vectors = held.vector_range(&(cut[0]..cut[1]));
            assert_eq!(vectors.start, end, "{cut:?}");
            end = vectors.end;
        }
        assert_eq!((end, held.vector_elements()), (96, 96));
    }

    #[test]
    fn where_activations_are_fp32_everything_is_there_once() {
        let held = Held::parts::<Cpu>(&layout(), std::iter::once(40..60));
        assert_eq!((held.elements(), held.vector_elements()), (20, 0));
        assert_eq!(held.fp32_place(&(48..53)), Some(8..13));
        assert_eq!(held.vectors(&(0..176)).count(), 0);
        assert_eq!(held.vector_range(&(0..176)), 0..0);
    }
}
