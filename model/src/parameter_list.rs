//! How a model writes down its parameters: a layout and, beside each tensor, where its first values come from.

use std::ops::Range;

use crate::initialization::Initializer;
use crate::layout::{Decay, Layout};

/// A tensor that a model adds to its newest segment.
#[derive(Clone, Debug)]
pub struct NewTensor<'a> {
    /// The name in Hugging Face files.
    pub name: String,
    /// The logical shape, as files hold it.
    pub shape: &'a [usize],
    /// Whether weight decay applies.
    pub decay: Decay,
    /// Where its first values come from.
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
        let NewTensor { name, shape, decay, initializer } = tensor;
        self.initializers.push(initializer);
        let index = self.layout.tensor(name, shape, decay, row_multiple);
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

    /// The layout so far.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The initial parameter arena: a pure function of `seed`; the padding is zero.
    pub fn initialize(&self, seed: u64) -> Vec<f32> {
        let mut arena = vec![0.0; self.layout.parameter_elements()];
        for (tensor, initializer) in self.layout.tensors().iter().zip(&self.initializers) {
            initializer.fill(&mut arena, tensor, seed);
        }
        arena
    }
}
