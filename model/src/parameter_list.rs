//! How a model declares its parameters: a layout, and the initializer of each tensor.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use tidemill_kernels::FloatEnvironment;

use crate::initialization::Initializer;
use crate::layout::{Decay, Layout, Passes, Reading};

/// The number of elements above which drawing a tensor on another thread pays.
const ELEMENTS_PER_THREAD: usize = 1 << 18;

/// Whether a map or a norm has a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    /// It has none.
    Absent,
    /// It has one.
    Present,
}

impl Bias {
    /// [`Present`](Self::Present) where `present`.
    pub fn when(present: bool) -> Self {
        if present { Self::Present } else { Self::Absent }
    }
}

/// A tensor that a model adds to its newest segment.
#[derive(Clone, Debug)]
pub struct NewTensor<'a> {
    /// The name in Hugging Face files.
    pub name: String,
    /// The logical shape, as files hold it.
    pub shape: &'a [usize],
    /// Whether weight decay applies.
    pub decay: Decay,
    /// In which precisions blocks read it, over all uses.
    pub reading: Reading,
    /// The initializer of its values.
    pub initializer: Initializer,
}

/// A [`Layout`] under construction, with an [`Initializer`] for every tensor.
#[derive(Debug, Default)]
pub struct ParameterList {
    layout: Layout,
    initializers: Vec<Initializer>,
}

impl ParameterList {
    /// An empty list; add segments with their tensors, then blocks.
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens a new segment; the tensors added next belong to it. Returns its index.
    pub fn segment(&mut self, name: impl Into<String>) -> usize {
        self.layout.segment(name)
    }

    /// Adds a tensor to the newest segment. Returns the range of its stored elements, counted inside the segment.
    ///
    /// # Panics
    /// When no segment is open.
    pub fn tensor(&mut self, tensor: NewTensor<'_>) -> Range<usize> {
        self.padded_tensor(tensor, 1)
    }

    /// [`tensor`](Self::tensor), its rows padded to a multiple of `row_multiple` in memory.
    ///
    /// # Panics
    /// When no segment is open.
    pub fn padded_tensor(&mut self, tensor: NewTensor<'_>, row_multiple: usize) -> Range<usize> {
        let NewTensor { name, shape, decay, reading, initializer } = tensor;
        self.initializers.push(initializer);
        let index = self.layout.tensor(name, shape, decay, row_multiple);
        self.layout.set_reading(index, reading);
        let segment =
            self.layout.segments().last().expect("a segment is opened before its tensors");
        let stored = &self.layout.tensors()[index];
        let start = stored.offset - segment.range.start;
        start..start + stored.stored_elements
    }

    /// Appends a block that uses `segments`, in forward order. Returns the index of its first use.
    pub fn block(&mut self, name: impl Into<String>, segments: &[usize]) -> usize {
        self.layout.block(name, segments)
    }

    /// Declares in which precision one block reads the tensors of one segment:
    /// [`Layout::set_use_reading`].
    ///
    /// # Panics
    /// When the layout has no such use.
    pub fn set_use_reading(&mut self, use_index: usize, reading: Reading) {
        self.layout.set_use_reading(use_index, reading);
    }

    /// Declares in which passes one block reads one segment: [`Layout::set_use_passes`].
    ///
    /// # Panics
    /// When the layout has no such use.
    pub fn set_use_passes(&mut self, use_index: usize, passes: Passes) {
        self.layout.set_use_passes(use_index, passes);
    }

    /// The layout so far.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The initial parameter arena: a pure function of `seed`; the padding is zero.
    ///
    /// Each tensor draws from a stream of its own, so any thread may draw any tensor.
    pub fn initialize(&self, seed: u64) -> Vec<f32> {
        let mut arena = vec![0.0; self.layout.parameter_elements()];
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let threads = (arena.len() / ELEMENTS_PER_THREAD).clamp(1, cores);
        let (mut rest, mut passed) = (&mut arena[..], 0);
        let parts = self.layout.tensors().iter().zip(&self.initializers).map(|part| {
            let (tensor, _) = part;
            let (_, from) = std::mem::take(&mut rest).split_at_mut(tensor.offset - passed);
            let (out, after) = from.split_at_mut(tensor.elements());
            (rest, passed) = (after, tensor.range().end);
            (part, out)
        });
        let parts = Mutex::new(parts);
        let fill = || {
            // The caller's thread may belong to an embedder, and threads started from it inherit
            // its floating-point environment.
            let _standard = FloatEnvironment::standard();
            // A panic in another thread leaves the iterator between two tensors; a panic in the
            // iterator itself ends this thread too.
            let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
            while let Some(((tensor, initializer), out)) = next() {
                initializer.fill(out, tensor, seed);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(fill);
            }
            fill();
        });
        arena
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each tensor equals the same tensor drawn by itself, and the padding is zero.
    #[test]
    fn tensors_draw_apart() {
        let mut list = ParameterList::new();
        for (segment, rows) in [1001, 3, 700].into_iter().enumerate() {
            list.segment(format!("segment {segment}"));
            for name in ["a", "b"] {
                let tensor = NewTensor {
                    name: format!("{segment}.{name}"),
                    shape: &[rows, 333],
                    decay: Decay::Decayed,
                    reading: Reading::Activation,
                    initializer: Initializer::Normal { standard_deviation: 2.0 },
                };
                list.padded_tensor(tensor, 8);
            }
        }
        let arena = list.initialize(5);
        assert!(arena.len() > 4 * ELEMENTS_PER_THREAD, "several threads draw");
        let mut expected = vec![0.0_f32; arena.len()];
        for (tensor, initializer) in list.layout.tensors().iter().zip(&list.initializers) {
            initializer.fill(&mut expected[tensor.range()], tensor, 5);
        }
        assert!(arena.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}
