//! The first block of a language model: from tokens to the residual stream.
//!
//! Learned positions have a table and a segment of their own, so that the block has two uses. They
//! run through the same kernels as tokens, with the position of every row in place of its token.

use std::ops::Range;

use tidemill_kernels::backend::Output;
use tidemill_kernels::{Backend, Slice, SliceMut};

use crate::error::Result;
use crate::lease::Lease;
use crate::sample::MicrobatchShape;
use crate::trainable::Device;

/// A table with one row for each token, or for each position: `out[row] = table[index[row]]`.
#[derive(Clone, Debug)]
pub struct Embedding {
    /// The table's place in its segment; rows past the vocabulary are padding.
    pub table: Range<usize>,
    /// d, elements of a row.
    pub width: usize,
}

impl Embedding {
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
