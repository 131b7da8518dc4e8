//! Tensors by name as ndarray views of the host's memory: nothing is copied.
//!
//! An arena is the array of parameters that [`initialize`](crate::Trainable::initialize) returns,
//! that a graph starts from and that a checkpoint stores; a state of the optimizer with one value
//! for each parameter is an arena too. On the CPU a model reads its parameters and forms its
//! gradients in the same way:
//! parameters and forms its gradients in the same way:
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

use ndarray::{ArrayViewD, ArrayViewMutD};
use tidemill_kernels::{Cpu, SliceMut};

use crate::error::{ModelError, Result};
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
    /// The parameters of the tensor `name` of `layout`, in fp32 and in its logical shape.
    ///
    /// # Errors
    /// A name that the layout does not have, a tensor of another segment, or a tensor that blocks
    /// do not read in fp32.
    pub fn array(&self, layout: &Layout, name: &str) -> Result<ArrayViewD<'a, f32>> {
        let (tensor, segment) = (layout.named(name)?, layout.segment_of(name)?);
        view(tensor, self.vector(&inside(tensor, &segment))?.values())
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
    use tidemill_kernels::{Cpu, Runtime};

    use super::*;
    use crate::layout::{Decay, Reading};
    use crate::parameter_source::{Direction, ParameterSource};
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

    #[test]
    fn wrong_names_and_lengths_are_named() {
        let layout = layout();
        let message = |error: ModelError| error.to_string();
        let arena = vec![0.0; layout.parameter_elements()];
        let expected = "viewing the tensor tabel: expected a tensor of the layout, found [first, table, vector]";
        assert_eq!(message(layout.array("tabel", &arena).unwrap_err()), expected);
        let short = message(layout.array("table", &arena[1..]).unwrap_err());
        assert!(short.starts_with("the parameter arena has 47 elements, expected 48"), "{short}");
        let mut buffer = tidemill_kernels::cpu::Buffer::zeroed(16).unwrap();
        let other = layout.gradient_array("table", SliceMut::all(&mut buffer)).unwrap_err();
        assert!(
            message(other).ends_with("expected the 32 elements of its segment, found 16 elements")
        );
    }
}
