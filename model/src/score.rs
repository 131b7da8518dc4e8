//! How likely a model finds a text: the log-probability of every token given the ones before it.
//!
//! Scoring uses the recurrence of [`generation`](crate::generation), so memory is the same for any length, and a token's
//! number depends on the tokens before it alone: not on what else is scored, nor on where pieces are cut.

use tidemill_kernels::backend::{LogitGradient, Output};
use tidemill_kernels::shape::CrossEntropyShape;
use tidemill_kernels::{Backend, Slice, SliceMut};

use crate::error::{ModelError, Result};
use crate::generation::{PIECE_POSITIONS, Recurrence};
use crate::mamba::Mamba;
use crate::trainable::{Device, Parameters};

/// Scores one text after the other.
pub struct Scorer<'m, B: Backend> {
    recurrence: Recurrence<'m, B>,
    /// `logits[t, v]` of one piece.
    logits: B::Buffer<B::Activation>,
    /// `targets[t]`
    targets: B::Buffer<u32>,
    /// `losses[t]`
    losses: B::Buffer<f32>,
}

impl<'m, B: Backend> Scorer<'m, B> {
    /// A scorer of a model.
    ///
    /// # Errors
    /// A device without room.
    pub fn new(
        device: &mut Device<'_, B>,
        model: &'m Mamba,
        parameters: &'m Parameters<B>,
    ) -> Result<Self> {
        let recurrence = Recurrence::new(device, model, parameters, 1)?;
        let table_rows = model.head().table.len() / model.width();
        let Device { backend, stream } = device;
        Ok(Self {
            recurrence,
            logits: backend.allocate(stream, PIECE_POSITIONS * table_rows)?,
            targets: backend.allocate(stream, PIECE_POSITIONS)?,
            losses: backend.allocate(stream, PIECE_POSITIONS)?,
        })
    }

    /// `log p(tokens[i + 1] | tokens[..= i])` in nats, for every i: one number fewer than tokens.
    ///
    /// # Errors
    /// Fewer than two tokens, a token outside the vocabulary, or a device that fails.
    pub fn log_probabilities(
        &mut self,
        device: &mut Device<'_, B>,
        tokens: &[u32],
    ) -> Result<Vec<f32>> {
        let vocab_size = self.recurrence.model().vocab_size();
        if tokens.len() < 2 {
            return Err(ModelError::config("tokens", "at least 2", tokens.len()));
        }
        if let Some(index) = tokens.iter().position(|token| *token as usize >= vocab_size) {
            let what = format!("position {index}");
            return Err(ModelError::Token { what, token: tokens[index], vocab_size });
        }
        self.recurrence.reset(device)?;
        let mut log_probabilities = Vec::with_capacity(tokens.len() - 1);
        let (inputs, targets) = (&tokens[..tokens.len() - 1], &tokens[1..]);
        for (inputs, targets) in inputs.chunks(PIECE_POSITIONS).zip(targets.chunks(PIECE_POSITIONS))
        {
            self.recurrence.advance(device, inputs)?;
            let losses = self.losses(device, targets)?;
            log_probabilities.extend(losses.iter().map(|loss| -loss));
        }
        Ok(log_probabilities)
    }

    /// The losses of the newest piece.
    fn losses(&mut self, device: &mut Device<'_, B>, targets: &[u32]) -> Result<Vec<f32>> {
        let (model, rows) = (self.recurrence.model(), targets.len());
        let head = model.head();
        let table_rows = head.table.len() / head.width;
        let [_, table] = model.head_parameters(self.recurrence.parameters())?;
        let normed = self.recurrence.normalized_piece(device)?;
        let Device { backend, stream } = device;
        backend.write(stream, SliceMut::new(&mut self.targets, 0, rows)?, targets)?;
        backend.matmul(
            stream,
            SliceMut::all(&mut self.logits).matrix(rows, table_rows)?,
            normed,
            table.weight(&head.table, table_rows, head.width)?.transposed(),
            Output::Overwrite,
        )?;
        backend.cross_entropy(
            stream,
            SliceMut::new(&mut self.losses, 0, rows)?,
            SliceMut::new(&mut self.logits, 0, rows * table_rows)?,
            Slice::new(&self.targets, 0, rows)?,
            LogitGradient::None,
            CrossEntropyShape::new(rows, head.vocab_size, table_rows)?,
        )?;
        let mut losses = vec![0.0; rows];
        backend.read(stream, &mut losses, Slice::new(&self.losses, 0, rows)?)?;
        Ok(losses)
    }
}
