//! Tensors by name as arrays of the crate `ndarray`: views of the host's memory, which copy nothing.
//!
//! An arena is the array of parameters that [`initialize`](crate::Trainable::initialize) returns,
//! that a graph starts from and that a checkpoint stores; a state of the optimizer with one value
//! for each parameter is an arena too. On the CPU a model reads its parameters and forms its
//! gradients in the same way ([`Lease::array`], [`Layout::gradient_array`]), and slices and matrices
//! of activations are views by [themselves](tidemill_kernels::cpu::arrays). Tensors that are in files
//! are read by name, as arrays of their own ([`TensorFiles::array`]).
//!
//! ```
//! use ndarray::array;
//! use tidemill_model::{Decay, Layout};
//!
//! let mut layout = Layout::new();
//! let segment = layout.segment("map");
//! layout.tensor("weight", &[2, 3], Decay::Decayed, 1);
//! layout.tensor("bias", &[2], Decay::Exempt, 1);
//! layout.block("map", &[segment]);
//!
//! let mut arena = vec![0.0; layout.parameter_elements()];
//! layout.array_mut("bias", &mut arena)?[1] = 0.5;
//! layout.array_mut("weight", &mut arena)?.fill(1.0);
//! assert_eq!(layout.array("bias", &arena)?, array![0.0, 0.5].into_dyn());
//! assert_eq!(layout.array("weight", &arena)?.sum(), 6.0);
//! # Ok::<(), tidemill_model::ModelError>(())
//! ```

use std::ops::Range;

use ndarray::{ArrayD, ArrayViewD, ArrayViewMutD};
use tidemill_kernels::{Cpu, Slice, SliceMut};

use crate::error::{ModelError, Result};
use crate::hugging_face::TensorFiles;
use crate::layout::{Layout, Tensor};
use crate::lease::Lease;

impl Layout {
    /// A view of the tensor `name` in `arena`, in its logical shape: without padding rows.
    ///
    /// # Errors
    /// A name that the layout does not have, or an arena that is not as long as the layout's.
    pub fn array<'a>(&self, name: &str, arena: &'a [f32]) -> Result<ArrayViewD<'a, f32>> {
        let tensor = self.named(name)?;
        self.check_arena(arena)?;
        view(tensor, &arena[tensor.range()])
    }

    /// [`array`](Self::array) as a view that can be written.
    ///
    /// # Errors
    /// As [`array`](Self::array).
    pub fn array_mut<'a>(
        &self,
        name: &str,
        arena: &'a mut [f32],
    ) -> Result<ArrayViewMutD<'a, f32>> {
        let tensor = self.named(name)?;
        self.check_arena(arena)?;
        view_mut(tensor, &mut arena[tensor.range()])
    }

    /// The gradient of the tensor `name` in `accumulator`, in its logical shape. `accumulator`
    /// belongs to one use of the tensor's segment, as a [`GradientSink`](crate::GradientSink) hands
    /// it out.
    ///
    /// # Errors
    /// A name that the layout does not have, or an accumulator whose length is not the segment's.
    pub fn gradient_array<'a>(
        &self,
        name: &str,
        accumulator: SliceMut<'a, Cpu, f32>,
    ) -> Result<ArrayViewMutD<'a, f32>> {
        let (tensor, segment) = (self.named(name)?, self.segment_of(name)?);
        if accumulator.elements() != segment.len() {
            let expected = format!("the {} elements of its segment", segment.len());
            return Err(refusal(name, expected, format!("{} elements", accumulator.elements())));
        }
        view_mut(tensor, &mut accumulator.values()[inside(tensor, &segment)])
    }

    fn named(&self, name: &str) -> Result<&Tensor> {
        let found = self.tensors().iter().find(|tensor| tensor.name == name);
        found.ok_or_else(|| {
            let names: Vec<_> = self.tensors().iter().map(|tensor| &*tensor.name).collect();
            refusal(name, "a tensor of the layout".to_owned(), format!("[{}]", names.join(", ")))
        })
    }

    /// The elements of the segment that holds the tensor `name`.
    fn segment_of(&self, name: &str) -> Result<Range<usize>> {
        let tensor = self.named(name)?;
        let holds = |range: &Range<usize>| range.contains(&tensor.offset);
        let found = self.segments().iter().map(|segment| segment.range.clone()).find(holds);
        found.ok_or_else(|| refusal(name, "elements".to_owned(), "none".to_owned()))
    }

    fn check_arena(&self, arena: &[f32]) -> Result<()> {
        let (expected, found) = (self.parameter_elements(), arena.len());
        if found == expected { Ok(()) } else { Err(ModelError::ArenaSize { expected, found }) }
    }
}

impl<'a> Lease<'a, Cpu> {
    /// The parameters of the tensor `name` of `layout`, in its logical shape: as the block reads
    /// them, in fp32 or in activation precision, which is fp32 on the CPU too.
    ///
    /// # Errors
    /// A name that the layout does not have, a tensor of another segment, or a tensor that the block
    /// does not read.
    pub fn array(&self, layout: &Layout, name: &str) -> Result<ArrayViewD<'a, f32>> {
        let (tensor, segment) = (layout.named(name)?, layout.segment_of(name)?);
        let place = inside(tensor, &segment);
        let values = self.vector(&place).or_else(|refused| -> Result<Slice<'a, Cpu, f32>> {
            let weight = self.weight(&place, 1, place.len()).map_err(|_| refused)?;
            Ok(Slice::new(weight.buffer(), weight.start(), place.len())?)
        });
        view(tensor, values?.values())
    }
}

impl TensorFiles {
    /// The tensor `name` in fp32, read from its file.
    ///
    /// # Errors
    /// A name that the files do not have, or a file that cannot be read.
    pub fn array(&self, name: &str) -> Result<ArrayD<f32>> {
        // Reading a tensor that is missing is the error that says so.
        let shape = self.shape(name).unwrap_or_default();
        let mut values = vec![0.0; shape.iter().product()];
        self.read(name, 0, &mut values)?;
        let misfit = |error: ndarray::ShapeError| {
            refusal(name, format!("shape {shape:?}"), error.to_string())
        };
        ArrayD::from_shape_vec(shape, values).map_err(misfit)
    }
}

/// The logical elements of a tensor, as a range inside its segment.
fn inside(tensor: &Tensor, segment: &Range<usize>) -> Range<usize> {
    let start = tensor.offset - segment.start;
    start..start + tensor.elements()
}

fn view<'a>(tensor: &Tensor, values: &'a [f32]) -> Result<ArrayViewD<'a, f32>> {
    ArrayViewD::from_shape(&*tensor.shape, values).map_err(|error| misfit(tensor, &error))
}

fn view_mut<'a>(tensor: &Tensor, values: &'a mut [f32]) -> Result<ArrayViewMutD<'a, f32>> {
    ArrayViewMutD::from_shape(&*tensor.shape, values).map_err(|error| misfit(tensor, &error))
}

fn misfit(tensor: &Tensor, error: &ndarray::ShapeError) -> ModelError {
    refusal(&tensor.name, format!("shape {:?}", tensor.shape), error.to_string())
}

fn refusal(name: &str, expected: String, found: String) -> ModelError {
    ModelError::ParameterAccess { attempt: format!("viewing the tensor {name}"), expected, found }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use ndarray::{Array2, array};
    use safetensors::Dtype;
    use safetensors::tensor::TensorView;
    use tidemill_kernels::cpu::Buffer;
    use tidemill_kernels::{Cpu, Runtime};

    use super::*;
    use crate::layout::{Decay, Direction, Reading};
    use crate::lease::Packing;
    use crate::parameter_source::ParameterSource;
    use crate::parameters::Parameters;
    use crate::trainable::Device;

    /// One segment with a vector, then a segment with a table of three rows, padded to eight, and a
    /// vector behind it.
    fn layout() -> Layout {
        let mut layout = Layout::new();
        let first = layout.segment("first");
        layout.tensor("first", &[2], Decay::Exempt, 1);
        let second = layout.segment("second");
        let table = layout.tensor("table", &[3, 2], Decay::Decayed, 8);
        layout.tensor("vector", &[5], Decay::Exempt, 1);
        (0..3).for_each(|tensor| layout.set_reading(tensor, Reading::Fp32));
        assert_eq!(layout.tensors()[table].stored_elements, 16);
        layout.block("only", &[first, second]);
        layout
    }

    #[test]
    fn views_are_where_the_arena_has_the_tensors() {
        let layout = layout();
        let mut arena: Vec<f32> = (0..layout.parameter_elements()).map(|at| at as f32).collect();
        for tensor in layout.tensors() {
            let found = layout.array(&tensor.name, &arena).unwrap();
            assert_eq!(found.shape(), tensor.shape);
            assert!(found.iter().eq(&arena[tensor.range()]), "{}", tensor.name);
        }
        layout.array_mut("table", &mut arena).unwrap()[[2, 1]] = -1.0;
        assert_eq!(arena[layout.tensors()[1].offset + 5], -1.0);
    }

    #[test]
    fn a_model_reads_and_adds_by_name() {
        let layout = layout();
        let arena: Vec<f32> = (0..layout.parameter_elements()).map(|at| at as f32).collect();
        let backend = Cpu::new(NonZeroUsize::MIN).unwrap();
        let mut stream = backend.device_stream().unwrap();
        let mut device = Device { backend: &backend, stream: &mut stream };
        let parameters = Parameters::from_host(&mut device, &layout, &arena).unwrap();
        let mut source = parameters.source(&layout);
        source.enter(&mut device, 0, Direction::Backward).unwrap();
        let vector = source.lease(1).unwrap().array(&layout, "vector").unwrap();
        assert_eq!(vector, layout.array("vector", &arena).unwrap());
        // A tensor of the other segment.
        assert!(source.lease(0).unwrap().array(&layout, "vector").is_err());

        let mut sum = backend.allocate(&mut stream, layout.segments()[1].range.len()).unwrap();
        let table: Array2<f32> = array![[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]];
        let accumulator = SliceMut::all(&mut sum);
        let mut gradient = layout.gradient_array("table", accumulator).unwrap();
        gradient += &table;
        assert_eq!(sum[..6], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert!(sum[6..].iter().all(|&value| value == 0.0));
    }

    /// Memory that holds each tensor only in the precision in which its block reads it.
    #[test]
    fn a_packed_lease_has_weights_as_arrays_too() {
        let mut layout = Layout::new();
        let segment = layout.segment("only");
        for (name, shape, reading) in [
            ("vector", &[5][..], Reading::Fp32),
            ("matrix", &[3, 7], Reading::Activation),
            ("table", &[5, 3], Reading::Both),
            ("unread", &[2, 3], Reading::Activation),
        ] {
            let tensor = layout.tensor(name, shape, Decay::Exempt, 1);
            layout.set_reading(tensor, reading);
        }
        layout.block("block", &[segment]);
        // A use reads all tensors of its segment, so a segment of fewer stands for one that reads less.
        let mut fewer = Layout::new();
        let segment = fewer.segment("only");
        for tensor in &layout.tensors()[..3] {
            let index = fewer.tensor(&tensor.name, &tensor.shape, Decay::Exempt, 1);
            fewer.set_reading(index, tensor.reading);
        }
        fewer.block("block", &[segment]);
        let packing = Packing::new(&fewer, 0);
        let numbers = |first: usize, elements: usize| {
            let numbers: Vec<_> = (first..first + elements).map(|at| at as f32).collect();
            Buffer::copy_of(&numbers).unwrap()
        };
        let fp32 = numbers(0, packing.fp32_elements());
        let activation = numbers(100, packing.activation_elements());
        let lease: Lease<'_, Cpu> =
            Lease::packed(&packing, Slice::all(&fp32), Slice::all(&activation)).unwrap();
        let first = |name| lease.array(&layout, name).unwrap().first().copied();
        assert_eq!(
            [first("vector"), first("matrix"), first("table")],
            [0.0, 100.0, 16.0].map(Some)
        );
        let matrix = lease.array(&layout, "matrix").unwrap();
        assert_eq!(
            matrix,
            Array2::from_shape_fn((3, 7), |(i, j)| (100 + 7 * i + j) as f32).into_dyn()
        );
        let refused = lease.array(&layout, "unread").unwrap_err().to_string();
        assert!(
            refused.ends_with("in fp32: expected elements of one tensor, found others"),
            "{refused}"
        );
    }

    #[test]
    fn tensors_are_read_from_files_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let values: Vec<u8> = (0..15_u16).flat_map(|at| f32::from(at).to_le_bytes()).collect();
        let matrix = TensorView::new(Dtype::F32, vec![5, 3], &values).unwrap();
        let scalar = TensorView::new(Dtype::F32, vec![], &values[8..12]).unwrap();
        safetensors::serialize_to_file([("matrix", matrix), ("scalar", scalar)], None, &path)
            .unwrap();
        let files = TensorFiles::open_folder(folder.path()).unwrap();
        let expected = Array2::from_shape_fn((5, 3), |(i, j)| (3 * i + j) as f32).into_dyn();
        assert_eq!(files.array("matrix").unwrap(), expected);
        assert_eq!(files.array("scalar").unwrap(), ndarray::arr0(2.0).into_dyn());
        let missing = files.array("matrices").unwrap_err().to_string();
        assert!(missing.contains("tensor matrices is missing"), "{missing}");
    }

    #[test]
    fn wrong_names_and_lengths_are_named() {
        let layout = layout();
        let message = |error: ModelError| error.to_string();
        let arena = vec![0.0; layout.parameter_elements()];
        let expected = "viewing the tensor tabel: expected a tensor of the layout, found [first, table, vector]";
        assert_eq!(message(layout.array("tabel", &arena).unwrap_err()), expected);
        let short = message(layout.array("table", &arena[1..]).unwrap_err());
        assert!(short.starts_with("the parameter arena has 47 elements, expected 48"), "{short}");
        let mut buffer = Buffer::zeroed(16).unwrap();
        let other = layout.gradient_array("table", SliceMut::all(&mut buffer)).unwrap_err();
        assert!(
            message(other).ends_with("expected the 32 elements of its segment, found 16 elements")
        );
    }
}
