//! How likely a model finds a text: the log-probability of every token given the ones before it.
//!
//! Scoring moves [`Sequences`] on, so memory is no larger than generation's, and a token's number depends on the tokens before
//! it alone: to the bit neither on what else is scored, at once or before, nor on where pieces are cut.

use tidemill_kernels::backend::{LogitGradient, Output};
use tidemill_kernels::shape::CrossEntropyShape;
use tidemill_kernels::{Backend, IGNORED_TARGET, Slice, SliceMut};

use crate::error::Result;
use crate::generation::{Sequences, table_rows};
use crate::language_model::LanguageModel;
use crate::parameters::Parameters;
use crate::trainable::Device;

/// Scores texts, several at once.
pub struct Scorer<'m, B: Backend> {
    sequences: Sequences<'m, B>,
    /// Rows whose logits are formed at once.
    chunk_rows: usize,
    /// `logits[rows, v]` of one chunk of a piece.
    logits: B::Buffer<B::Activation>,
    /// `targets[b t]` of one piece.
    targets: B::Buffer<u32>,
    /// `losses[b t]` of one piece.
    losses: B::Buffer<f32>,
}

impl<'m, B: Backend> Scorer<'m, B> {
    /// A scorer of up to `sequences` texts at once, each of up to `positions` tokens.
    ///
    /// # Errors
    /// No texts or tokens, or a device without room.
    pub fn new(
        device: &mut Device<'_, B>,
        model: &'m LanguageModel<B>,
        parameters: &'m Parameters<B>,
        sequences: usize,
        positions: usize,
    ) -> Result<Self> {
        let sequences = Sequences::new(device, model, parameters, sequences, positions)?;
        let rows = sequences.room().rows;
        let Device { backend, stream } = device;
        let chunk_rows = backend.logit_chunk_rows().min(rows);
        Ok(Self {
            sequences,
            chunk_rows,
            logits: backend.allocate(stream, chunk_rows * table_rows(model))?,
            targets: backend.allocate(stream, rows)?,
            losses: backend.allocate(stream, rows)?,
        })
    }

    /// `log p(tokens[i + 1] | tokens[..= i])` in nats, for every i: one number fewer than tokens.
    ///
    /// # Errors
    /// Fewer than two tokens, more than there is room for or the model has positions for, a token outside the vocabulary, or a
    /// device that fails.
    pub fn log_probabilities(
        &mut self,
        device: &mut Device<'_, B>,
        tokens: &[u32],
    ) -> Result<Vec<f32>> {
        let scores = self.log_probabilities_of_each(device, &[tokens])?;
        Ok(scores.into_iter().flatten().collect())
    }

    /// [`log_probabilities`](Self::log_probabilities) of several texts at once, to the bit those that each has alone.
    ///
    /// # Errors
    /// As of one; more texts than there is room for.
    pub fn log_probabilities_of_each(
        &mut self,
        device: &mut Device<'_, B>,
        texts: &[&[u32]],
    ) -> Result<Vec<Vec<f32>>> {
        texts.iter().try_for_each(|text| self.sequences.model().check_text(text))?;
        let mut order: Vec<usize> = (0..texts.len()).collect();
        order.sort_by_key(|&place| std::cmp::Reverse(texts[place].len()));
        let mut scores = vec![Vec::new(); texts.len()];
        if texts.is_empty() {
            return Ok(scores);
        }
        self.sequences.begin(device, texts.len())?;
        let inputs: Vec<&[u32]> =
            order.iter().map(|&place| &texts[place][..texts[place].len() - 1]).collect();
        self.sequences.check(&inputs)?;
        for piece in self.sequences.pieces(&inputs) {
            let targets = piece.iter().zip(&order).map(|(inputs, &place)| {
                let first = scores[place].len() + 1;
                &texts[place][first..first + inputs.len()]
            });
            let targets: Vec<&[u32]> = targets.collect();
            let losses = self.losses(device, &piece, &targets)?;
            let losses = losses.chunks_exact(piece[0].len());
            for ((losses, targets), &place) in losses.zip(targets).zip(&order) {
                scores[place].extend(losses[..targets.len()].iter().map(|loss| -loss));
            }
        }
        Ok(scores)
    }

    /// The losses of one piece, `[b, t]`.
    fn losses(
        &mut self,
        device: &mut Device<'_, B>,
        inputs: &[&[u32]],
        targets: &[&[u32]],
    ) -> Result<Vec<f32>> {
        let piece = self.sequences.advance_piece(device, inputs)?;
        let (model, rows) = (self.sequences.model(), piece.rows());
        let (head, table_rows) = (model.head(), table_rows(model));
        let mut packed = vec![IGNORED_TARGET; rows];
        for (row, targets) in packed.chunks_exact_mut(piece.positions()).zip(targets) {
            row[..targets.len()].copy_from_slice(targets);
        }
        let [_, table] = model.head_parameters(self.sequences.parameters())?;
        let normed = self.sequences.normalized_piece(device, &piece)?;
        let Device { backend, stream } = device;
        backend.write(stream, SliceMut::new(&mut self.targets, 0, rows)?, &packed)?;
        for first in (0..rows).step_by(self.chunk_rows) {
            let chunk = self.chunk_rows.min(rows - first);
            backend.matmul(
                stream,
                SliceMut::all(&mut self.logits).matrix(chunk, table_rows)?,
                normed.rows(first, chunk)?,
                table.weight(&head.table, table_rows, head.width)?.transposed(),
                Output::Overwrite,
            )?;
            backend.cross_entropy(
                stream,
                SliceMut::new(&mut self.losses, first, chunk)?,
                SliceMut::new(&mut self.logits, 0, chunk * table_rows)?,
                Slice::new(&self.targets, first, chunk)?,
                LogitGradient::None,
                CrossEntropyShape::new(chunk, head.vocab_size, table_rows)?
                    .with_logit_scale(head.logit_scale)?,
            )?;
        }
        let mut losses = vec![0.0; rows];
        backend.read(stream, &mut losses, Slice::new(&self.losses, 0, rows)?)?;
        Ok(losses)
    }
}
