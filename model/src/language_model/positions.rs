//! Learned positions: a table of one row for each position of a sample.

use tidemill_kernels::{Backend, Slice, SliceMut};

use super::Place;
use crate::embedding::Embedding;
use crate::error::{ModelError, Result};
use crate::sample::MicrobatchShape;
use crate::trainable::Device;

/// The table of learned positions.
#[derive(Clone, Debug)]
pub struct Positions {
    /// The table.
    pub embedding: Embedding,
    /// The number of positions in the table.
    pub count: usize,
    pub(super) place: Place,
}

impl Positions {
    /// Refuses samples longer than the table.
    pub(super) fn check(&self, positions: usize) -> Result<()> {
        if positions > self.count {
            let expected = format!("at least {positions}, the positions of a sample");
            return Err(ModelError::config("max_seq_len", expected, self.count));
        }
        Ok(())
    }
}

/// `indices[b t]`: the position of every row in its sample.
pub(super) struct PositionIndices<B: Backend> {
    indices: B::Buffer<u32>,
    /// The shape that the buffer was written for; fewer samples read a shorter part of the same
    /// contents.
    written_for: Option<MicrobatchShape>,
}

impl<B: Backend> PositionIndices<B> {
    pub(super) fn plan(device: &mut Device<'_, B>, shape: MicrobatchShape) -> Result<Self> {
        let rows = shape.sequences()?.rows();
        let indices = device.backend.allocate(device.stream, rows)?;
        Ok(Self { indices, written_for: None })
    }

    /// Writes the indices for microbatches of `shape`.
    pub(super) fn upload(
        &mut self,
        device: &mut Device<'_, B>,
        shape: MicrobatchShape,
    ) -> Result<()> {
        let enough = |written: MicrobatchShape| {
            written.positions == shape.positions && written.samples >= shape.samples
        };
        if self.written_for.is_none_or(|written| !enough(written)) {
            let sample = 0..shape.positions as u32;
            let host: Vec<u32> = (0..shape.samples).flat_map(|_| sample.clone()).collect();
            let to = SliceMut::new(&mut self.indices, 0, host.len())?;
            device.backend.write(device.stream, to, &host)?;
            self.written_for = Some(shape);
        }
        Ok(())
    }

    /// `indices[b t]`
    pub(super) fn rows(&self, shape: MicrobatchShape) -> Result<Slice<'_, B, u32>> {
        Ok(Slice::new(&self.indices, 0, shape.sequences()?.rows())?)
    }
}
