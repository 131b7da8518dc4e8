//! The first block of a language model: from tokens to the residual stream.
//!
//! Learned positions have a table and a segment of their own, so that the block has two uses. They
//! run through the same kernels as tokens, with the position of every row in place of its token.

use std::ops::Range;

use tidemill_kernels::backend::Output;
use tidemill_kernels::{Backend, Slice, SliceMut};

use crate::error::Result;
use crate::initialization::Initializer;
use crate::layout::{Decay, Reading};
use crate::lease::Lease;
use crate::parameter_list::{NewTensor, ParameterList};
use crate::sample::MicrobatchShape;
use crate::trainable::Device;

/// Rows of tables are padded to a multiple of this in memory, so that no matrix product has a ragged edge.
pub const VOCABULARY_ROW_MULTIPLE: usize = 8;

/// A table with one row for each token, or for each position: `out[row] = table[index[row]]`.
#[derive(Clone, Debug)]
pub struct Embedding {
    /// The table's place in its segment; rows past the vocabulary are padding.
    pub table: Range<usize>,
    /// d, elements of a row.
    pub width: usize,
}

/// The table of an [`Embedding`] that is to be added.
#[derive(Clone, Copy, Debug)]
pub struct NewEmbedding<'a> {
    /// Its name in files.
    pub name: &'a str,
    /// Tokens or positions.
    pub rows: usize,
    /// d, elements of a row.
    pub width: usize,
    /// How blocks read it: [`forward`](Embedding::forward) in fp32, a head in activations.
    pub reading: Reading,
    /// The standard deviation of the initial elements, normal around 0.
    pub standard_deviation: f64,
}

impl Embedding {
    /// Adds the table to the newest segment, with rows behind its own up to a multiple of [`VOCABULARY_ROW_MULTIPLE`].
    ///
    /// # Panics
    /// When no segment is open.
    pub fn add(parameters: &mut ParameterList, embedding: NewEmbedding<'_>) -> Self {
        let NewEmbedding { name, rows, width, reading, standard_deviation } = embedding;
        let tensor = NewTensor {
            name: name.to_owned(),
            shape: &[rows, width],
            decay: Decay::Decayed,
            reading,
            initializer: Initializer::Normal { standard_deviation },
        };
        Self { table: parameters.padded_tensor(tensor, VOCABULARY_ROW_MULTIPLE), width }
    }

    /// Writes the rows of `indices[b t]` to the residual stream `out[b t, d]`, or adds them to it.
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn forward<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        out: &mut B::Buffer<f32>,
        parameters: Lease<'_, B>,
        indices: Slice<'_, B, u32>,
        output: Output,
    ) -> Result<()> {
        let Device { backend, stream } = device;
        let out = SliceMut::all(out).matrix(indices.elements(), self.width)?;
        let table = parameters.vector(&self.table)?.matrix(self.rows(), self.width)?;
        Ok(backend.embedding_forward(stream, out, table, indices, output)?)
    }

    /// Adds the gradient of the table to `lane`, laid out as the table's segment, grain by grain.
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn backward<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        lane: SliceMut<'_, B, f32>,
        grad: &B::Buffer<f32>,
        indices: Slice<'_, B, u32>,
        shape: MicrobatchShape,
    ) -> Result<()> {
        let Device { backend, stream } = device;
        let lane = lane.sub(self.table.start, self.table.len())?.matrix(self.rows(), self.width)?;
        let grad = Slice::all(grad).matrix(indices.elements(), self.width)?;
        let grains = shape.grain_rows()?;
        Ok(backend.embedding_backward_add(stream, lane, grad, indices, grains)?)
    }

    /// Rows of the table, padding included.
    pub fn rows(&self) -> usize {
        self.table.len() / self.width
    }
}
