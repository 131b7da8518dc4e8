//! A lease: the parameters of one segment, readable for as long as a block runs.
//!
//! A block asks for a tensor by its place in the segment and by the precision in which it reads it;
//! the lease finds it in memory. Whole parameters hold every tensor at its place, in both
//! precisions. A source that holds only the tensors that blocks read keeps the tensors of a use
//! side by side, as a [`Packing`] describes.

use std::ops::Range;

use tidemill_kernels::{Backend, Matrix, Slice};

use crate::error::{ModelError, Result};
use crate::layout::{Layout, Reading, TENSOR_ALIGNMENT_ELEMENTS, Tensor};

/// The parameters of one segment, for as long as a block runs.
pub struct Lease<'a, B: Backend> {
    fp32: Slice<'a, B, f32>,
    activation: Slice<'a, B, B::Activation>,
    /// Where tensors lie in the two memories; `None` where each memory holds the whole segment.
    packing: Option<&'a Packing>,
}

impl<B: Backend> Clone for Lease<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B: Backend> Copy for Lease<'_, B> {}

impl<'a, B: Backend> Lease<'a, B> {
    /// The whole segment: its fp32 masters, and the same elements in activation precision.
    pub fn whole(master: Slice<'a, B, f32>, copies: Slice<'a, B, B::Activation>) -> Self {
        Self { fp32: master, activation: copies, packing: None }
    }

    /// The tensors of one use of a segment, from the start of each memory on, as `packing`
    /// describes. Both memories begin at multiples of [`TENSOR_ALIGNMENT_ELEMENTS`].
    ///
    /// # Errors
    /// Memory that is shorter than the packing.
    pub fn packed(
        packing: &'a Packing,
        fp32: Slice<'a, B, f32>,
        activation: Slice<'a, B, B::Activation>,
    ) -> Result<Self> {
        let fp32 = fp32.sub(0, packing.fp32_elements)?;
        let activation = activation.sub(0, packing.activation_elements)?;
        Ok(Self { fp32, activation, packing: Some(packing) })
    }

    /// The fp32 parameters at `place`, counted inside the segment.
    ///
    /// # Errors
    /// A place outside the segment. In a [packed](Self::packed) lease also a place that covers
    /// neither part of one tensor nor several tensors that are neighbours in memory too, and a
    /// place in a tensor that the layout does not declare to be read in fp32.
    pub fn vector(&self, place: &Range<usize>) -> Result<Slice<'a, B, f32>> {
        let start = match self.packing {
            None => place.start,
            Some(packing) => packing.start(place, "fp32", |tensor| tensor.fp32_start)?,
        };
        Ok(self.fp32.sub(start, place.len())?)
    }

    /// `weight[rows, columns]` at `place`, counted inside the segment, as matrix products read it.
    ///
    /// # Errors
    /// A place outside the segment, or a matrix that is larger than its place. In a
    /// [packed](Self::packed) lease also a place that covers neither part of one tensor nor several
    /// tensors that are neighbours in memory too, and a place in a tensor that the layout does not
    /// declare to be read in activation precision.
    pub fn weight(
        &self,
        place: &Range<usize>,
        rows: usize,
        columns: usize,
    ) -> Result<Matrix<'a, B, B::Activation>> {
        let start = match self.packing {
            None => place.start,
            Some(packing) => {
                packing.start(place, "activation precision", |tensor| tensor.activation_start)?
            }
        };
        Ok(self.activation.sub(start, place.len())?.matrix(rows, columns)?)
    }
}

/// Where the tensors of a use lie in memory that holds only the tensors that its block reads: one
/// memory for each precision, with the tensors read in that precision side by side in arena order.
///
/// Each tensor begins at a multiple of [`TENSOR_ALIGNMENT_ELEMENTS`], as in the arena: matrix
/// libraries choose their algorithms by alignment, and another algorithm gives other bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// The name of the segment, for error messages.
    segment: String,
    tensors: Vec<PackedTensor>,
    fp32_elements: usize,
    activation_elements: usize,
}

/// One tensor of a [`Packing`], padding rows included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedTensor {
    /// Its name in files.
    pub name: String,
    /// Its elements in the parameter arena.
    pub range: Range<usize>,
    /// Its elements counted inside the segment.
    place: Range<usize>,
    /// Its first element in the fp32 memory, where blocks read it in fp32.
    pub fp32_start: Option<usize>,
    /// Its first element in the memory of activation precision, where blocks read it in that
    /// precision.
    pub activation_start: Option<usize>,
}

impl Packing {
    /// The tensors that the block of use `use_index` of `layout` reads of its segment.
    ///
    /// # Panics
    /// When the layout has no such use.
    pub fn new(layout: &Layout, use_index: usize) -> Self {
        let segment = &layout.segments()[layout.uses()[use_index].segment];
        let (mut fp32_elements, mut activation_elements) = (0, 0);
        let packed = |(tensor, reading): (&Tensor, Reading)| {
            let next = |end: &mut usize| {
                let start = *end;
                *end = (start + tensor.stored_elements).next_multiple_of(TENSOR_ALIGNMENT_ELEMENTS);
                start
            };
            let start = tensor.offset - segment.range.start;
            PackedTensor {
                name: tensor.name.clone(),
                range: tensor.stored_range(),
                place: start..start + tensor.stored_elements,
                fp32_start: reading.is_fp32().then(|| next(&mut fp32_elements)),
                activation_start: reading.is_activation().then(|| next(&mut activation_elements)),
            }
        };
        let tensors = layout.reads(use_index).map(packed).collect();
        Self { segment: segment.name.clone(), tensors, fp32_elements, activation_elements }
    }

    /// The packing of a whole segment: in the memory of activation precision every tensor has the
    /// offset that it has in the segment; the fp32 memory holds only the tensors that any block reads
    /// in fp32, one after the other.
    ///
    /// # Panics
    /// When the layout has no such segment.
    pub fn of_segment(layout: &Layout, segment: usize) -> Self {
        let segment = &layout.segments()[segment];
        let mut fp32_elements = 0;
        let packed = |tensor: &Tensor| {
            let start = tensor.offset - segment.range.start;
            let fp32_start = tensor.reading.is_fp32().then(|| {
                let start = fp32_elements;
                let end: usize = start + tensor.stored_elements;
                fp32_elements = end.next_multiple_of(TENSOR_ALIGNMENT_ELEMENTS);
                start
            });
            PackedTensor {
                name: tensor.name.clone(),
                range: tensor.stored_range(),
                place: start..start + tensor.stored_elements,
                fp32_start,
                activation_start: Some(start),
            }
        };
        let tensors = layout.tensors()[segment.tensors.clone()].iter().map(packed).collect();
        let activation_elements = segment.range.len();
        Self { segment: segment.name.clone(), tensors, fp32_elements, activation_elements }
    }

    /// The tensors, in arena order.
    pub fn tensors(&self) -> &[PackedTensor] {
        &self.tensors
    }

    /// Elements of the fp32 memory.
    pub fn fp32_elements(&self) -> usize {
        self.fp32_elements
    }

    /// Elements of the memory of activation precision.
    pub fn activation_elements(&self) -> usize {
        self.activation_elements
    }

    /// Where the elements at `place` of the segment begin in the memory of `precision`; `start_of`
    /// gives the first element of a tensor in that memory.
    fn start(
        &self,
        place: &Range<usize>,
        precision: &str,
        start_of: impl Fn(&PackedTensor) -> Option<usize>,
    ) -> Result<usize> {
        let first = self.tensors.partition_point(|tensor| tensor.place.end <= place.start);
        let tensor = self.tensors.get(first).filter(|tensor| tensor.place.start <= place.start);
        let Some((start, tensor)) = tensor.and_then(&start_of).zip(tensor) else {
            return Err(self.refuse(place, precision, tensor));
        };
        // Tensors that are neighbours in this memory and in the segment count as one.
        let mut end = tensor.place.end;
        for next in &self.tensors[first + 1..] {
            let is_neighbour = next.place.start == end
                && start_of(next) == Some(start + (end - tensor.place.start));
            if end >= place.end || !is_neighbour {
                break;
            }
            end = next.place.end;
        }
        if end < place.end {
            return Err(self.refuse(place, precision, None));
        }
        Ok(start + (place.start - tensor.place.start))
    }

    #[cold]
    fn refuse(
        &self,
        place: &Range<usize>,
        precision: &str,
        tensor: Option<&PackedTensor>,
    ) -> ModelError {
        let (what, expected, found) = match tensor {
            None => (format!("elements {place:?}"), "elements of one tensor", "others"),
            Some(PackedTensor { name, .. }) => {
                let declared = "a precision in which the layout says that it is read";
                (format!("tensor {name}"), declared, "another")
            }
        };
        ModelError::ParameterAccess {
            attempt: format!("reading {what} of segment {} in {precision}", self.segment),
            expected: expected.to_owned(),
            found: found.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use tidemill_kernels::{Cpu, Runtime};

    use super::*;
    use crate::layout::Decay;

    /// Three tensors: read in fp32, in activation precision, and in both.
    fn layout() -> Layout {
        let mut layout = Layout::new();
        let segment = layout.segment("only");
        for (name, shape, reading) in [
            ("vector", &[5][..], Reading::Fp32),
            ("matrix", &[3, 7], Reading::Activation),
            ("table", &[5, 4], Reading::Both),
        ] {
            let tensor = layout.tensor(name, shape, Decay::Exempt, 8);
            layout.set_reading(tensor, reading);
        }
        layout.block("block", &[segment]);
        layout
    }

    #[test]
    fn a_packing_holds_each_tensor_in_what_it_is_read_in() {
        let packing = Packing::new(&layout(), 0);
        let found: Vec<_> = packing
            .tensors()
            .iter()
            .map(|tensor| (tensor.range.clone(), tensor.fp32_start, tensor.activation_start))
            .collect();
        // Rows padded to 8, and tensors to 16 elements.
        let table = (80..112, Some(16), Some(64));
        assert_eq!(found, [(0..8, Some(0), None), (16..72, None, Some(0)), table]);
        assert_eq!((packing.fp32_elements(), packing.activation_elements()), (48, 96));
    }

    #[test]
    fn a_packed_lease_has_what_the_segment_has_at_the_same_places() {
        let (packing, backend) = (Packing::new(&layout(), 0), Cpu::new(NonZeroUsize::MIN).unwrap());
        let stream = &mut backend.device_stream().unwrap();
        let [mut fp32, activation] = [48, 96].map(|n| backend.allocate(stream, n).unwrap());
        for (index, value) in fp32.as_mut_slice().iter_mut().enumerate() {
            *value = index as f32;
        }
        let lease: Lease<'_, Cpu> =
            Lease::packed(&packing, Slice::all(&fp32), Slice::all(&activation)).unwrap();
        let mut values = |place| backend.to_vec(stream, lease.vector(&place).unwrap()).unwrap();
        assert_eq!(values(1..3), [1.0, 2.0]);
        assert_eq!(values(84..86), [20.0, 21.0]);
        lease.weight(&(18..20), 1, 2).expect("a part of the matrix");
        lease.weight(&(80..100), 5, 4).expect("the table");

        let refused = |answer: Result<()>| answer.expect_err("not declared").to_string();
        assert_eq!(
            refused(lease.vector(&(16..20)).map(|_| ())),
            "reading tensor matrix of segment only in fp32: expected a precision in which the layout says that it is read, \
             found another"
        );
        assert_eq!(
            refused(lease.weight(&(0..5), 1, 5).map(|_| ())),
            "reading tensor vector of segment only in activation precision: expected a precision in which the layout says \
             that it is read, found another"
        );
        for place in [4..20, 8..9, 100..113] {
            let message = refused(lease.vector(&place).map(|_| ()));
            let expected = "of segment only in fp32: expected elements of one tensor, found others";
            assert!(message.ends_with(expected), "{place:?}: {message}");
        }
        let short = Lease::<Cpu>::packed(&packing, Slice::all(&activation), Slice::all(&fp32));
        assert!(short.is_err(), "96 and 48 elements are not 48 and 96");
    }

    #[test]
    fn neighbours_are_one_place() {
        let mut layout = Layout::new();
        let segment = layout.segment("only");
        for (name, shape, reading) in [
            ("q", &[4, 8][..], Reading::Activation),
            ("k", &[4, 8], Reading::Activation),
            ("bias", &[16], Reading::Fp32),
            ("v", &[4, 8], Reading::Activation),
            ("short", &[3], Reading::Activation),
            ("last", &[4, 4], Reading::Activation),
        ] {
            let tensor = layout.tensor(name, shape, Decay::Exempt, 1);
            layout.set_reading(tensor, reading);
        }
        layout.block("block", &[segment]);
        let (packing, backend) = (Packing::new(&layout, 0), Cpu::new(NonZeroUsize::MIN).unwrap());
        let stream = &mut backend.device_stream().unwrap();
        let fp32 = backend.allocate(stream, packing.fp32_elements()).unwrap();
        let mut activation = backend.allocate(stream, packing.activation_elements()).unwrap();
        for (index, value) in activation.as_mut_slice().iter_mut().enumerate() {
            *value = index as f32;
        }
        let lease: Lease<'_, Cpu> =
            Lease::packed(&packing, Slice::all(&fp32), Slice::all(&activation)).unwrap();
        let both = lease.weight(&(0..64), 8, 8).expect("q and k");
        assert_eq!((both.start(), both.shape()), (0, [8, 8]));
        assert_eq!(lease.weight(&(80..112), 4, 8).expect("v alone").start(), 64);
        // With a tensor between them that lies elsewhere, and with padding between them.
        for place in [32..112, 112..144] {
            lease.weight(&place, 1, place.len()).map(|_| ()).expect_err("no neighbours");
        }
    }
}
