//! One token of every sequence.

use tidemill_kernels::{Backend, Slice, SliceMut};

use super::Sequences;
use crate::block::incremental::Piece;
use crate::error::{ModelError, Result};
use crate::linear::Products;
use crate::trainable::Device;

/// How a step of one token for every sequence is enqueued.
pub(super) enum Step<G> {
    /// No step has run yet with this number of sequences and the present scratch memory.
    New,
    /// One step has run, so that scratch memory has its final size.
    Ran,
    /// As one recorded graph.
    Recorded(G),
    /// Kernel by kernel, on a device without graphs.
    Enqueued,
}

impl<B: Backend> Sequences<'_, B> {
    /// Adds the chosen token of each sequence.
    ///
    /// # Errors
    /// A number of tokens that is not that of the sequences; else as [`advance`](Self::advance).
    pub fn write(&mut self, device: &mut Device<'_, B>, tokens: &[u32]) -> Result<()> {
        if tokens.len() != self.lengths.len() {
            return Err(ModelError::Microbatch {
                what: "chosen tokens",
                expected: self.lengths.len().to_string(),
                found: tokens.len(),
            });
        }
        if tokens.is_empty() {
            return Ok(());
        }
        let rows: Vec<&[u32]> = tokens.chunks(1).collect();
        self.check(&rows)?;
        let piece = self.enter(device, &rows)?;
        self.step(device, &piece)
    }

    /// Adds to each sequence its token in `rows.tokens`, where the device has just chosen it.
    pub(super) fn write_chosen(&mut self, device: &mut Device<'_, B>) -> Result<()> {
        self.step_back_where_full();
        let piece = Piece::new(self.lengths.iter().map(|_| 1));
        self.enter_positions(device, &piece)?;
        self.step(device, &piece)
    }

    /// Makes room for a step, which computes all sequences: a full sequence, which must end with the
    /// token that is added, or have ended, computes its last position once more.
    pub(crate) fn step_back_where_full(&mut self) {
        let positions = self.capacity.positions;
        for length in self.lengths.iter_mut().filter(|length| **length as usize >= positions) {
            *length -= 1;
        }
    }

    fn step(&mut self, device: &mut Device<'_, B>, piece: &Piece) -> Result<()> {
        self.run_step(device, piece)?;
        self.lengths.iter_mut().for_each(|length| *length += 1);
        Ok(())
    }

    /// The kernels and buffers are the same for every token, so they
    /// are recorded once and then enqueued together.
    fn run_step(&mut self, device: &mut Device<'_, B>, piece: &Piece) -> Result<()> {
        if let Step::Recorded(graph) = &self.step {
            return Ok(device.backend.replay(device.stream, graph)?);
        }
        if let Step::Ran = self.step {
            let backend = device.backend;
            // Recording passes on only the errors of the kernels inside, which are the model's.
            let mut failed = Ok(());
            let recorded = backend.record_graph(device.stream, &mut |stream| {
                failed = self.run_step_kernels(&mut Device { backend, stream }, piece);
                Ok(())
            });
            failed?;
            if let Some(graph) = recorded? {
                backend.replay(device.stream, &graph)?;
                self.step = Step::Recorded(graph);
                return Ok(());
            }
            self.step = Step::Enqueued;
        }
        if let Step::New = self.step {
            self.step = Step::Ran;
        }
        self.run_step_kernels(device, piece)
    }

    fn run_step_kernels(&mut self, device: &mut Device<'_, B>, piece: &Piece) -> Result<()> {
        self.run(device, piece, Products::Ordered)?;
        let elements = piece.sequences() * self.model.width();
        let newest = SliceMut::new(&mut self.newest, 0, elements)?;
        let from = Slice::new(&self.rows.residual, 0, elements)?;
        Ok(device.backend.copy(device.stream, newest, from)?)
    }
}
