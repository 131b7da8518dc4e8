//! How likely a model finds a text: the log-probability of every token given the ones before it.
//!
//! Scoring moves [`Sequences`] on, so memory is no larger than generation's, and a token's number depends on the tokens before
//! it alone: to the bit neither on what else is scored, at once or before, nor on where pieces are cut. Of a [`Continuation`] only
//! the tokens at the end are scored: logits are formed for these alone, with the same bits.

use std::ops::Range;

use tidemill_kernels::backend::{ActivationElement, LogitGradient, Output};
use tidemill_kernels::shape::CrossEntropyShape;
use tidemill_kernels::{Backend, IGNORED_TARGET, Slice, SliceMut};

use crate::error::{ModelError, Result};
use crate::generation::{Sequences, table_rows};
use crate::language_model::LanguageModel;
use crate::parameters::Parameters;
use crate::trainable::Device;

/// Rows between scored ones for which logits are formed all the same, as a product more would take longer.
const SKIPPED_ROWS: usize = 16;

/// A text of which the end is scored.
#[derive(Clone, Copy, Debug)]
pub struct Continuation<'t> {
    /// All of it.
    pub tokens: &'t [u32],
    /// The first token that is scored; at least 1.
    pub first: usize,
    /// What is asked of each.
    pub asked: Asked,
}

/// What is asked of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// Its log-probability.
    LogProbability,
    /// Whether it is the likeliest token, too: the first of equal ones, of logits as activations hold them.
    Likeliest,
}

/// What is said of a continuation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ContinuationScore {
    /// The log-probability of each token, in nats.
    pub log_probabilities: Vec<f32>,
    /// Whether each token is the likeliest; empty where that was not asked.
    pub likeliest: Vec<bool>,
}

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
    /// Logits of one row, where it is asked which token is the likeliest.
    host_logits: Vec<B::Activation>,
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
            host_logits: Vec::new(),
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
        let asked = Asked::LogProbability;
        let texts = texts.iter().map(|&tokens| Continuation { tokens, first: 1, asked });
        let texts: Vec<Continuation<'_>> = texts.collect();
        let scores = self.continuations(device, &texts)?;
        Ok(scores.into_iter().map(|score| score.log_probabilities).collect())
    }

    /// The scores of the ends of several texts at once, to the bit those that each has alone.
    ///
    /// # Errors
    /// As [`log_probabilities_of_each`](Self::log_probabilities_of_each); no token that is scored, or one that nothing stands before.
    pub fn continuations(
        &mut self,
        device: &mut Device<'_, B>,
        texts: &[Continuation<'_>],
    ) -> Result<Vec<ContinuationScore>> {
        for Continuation { tokens, first, .. } in texts {
            self.sequences.model().check_text(tokens)?;
            if !(1..tokens.len()).contains(first) {
                let expected = format!("1 to {}", tokens.len() - 1);
                return Err(ModelError::config("first token of a continuation", expected, first));
            }
        }
        let mut order: Vec<usize> = (0..texts.len()).collect();
        order.sort_by_key(|&place| std::cmp::Reverse(texts[place].tokens.len()));
        let mut scores = vec![ContinuationScore::default(); texts.len()];
        if texts.is_empty() {
            return Ok(scores);
        }
        self.sequences.begin(device, texts.len())?;
        let inputs: Vec<&[u32]> = order
            .iter()
            .map(|&place| &texts[place].tokens[..texts[place].tokens.len() - 1])
            .collect();
        self.sequences.check(&inputs)?;
        // Tokens of each text that have entered: as many of each that has some in a piece.
        let mut entered = 0;
        for piece in self.sequences.pieces(&inputs) {
            let positions = piece[0].len();
            let mut targets = vec![Target::NONE; piece.len() * positions];
            let rows = targets.chunks_exact_mut(positions);
            for ((targets, inputs), &place) in rows.zip(&piece).zip(&order) {
                let Continuation { tokens, first, asked } = texts[place];
                let ends = entered + 1..entered + 1 + inputs.len();
                for (target, end) in targets.iter_mut().zip(ends).filter(|(_, end)| *end >= first) {
                    *target = Target { token: tokens[end], asked };
                }
            }
            entered += positions;
            let (losses, likeliest) = self.score_piece(device, &piece, &targets)?;
            let rows = targets.iter().zip(losses.iter().zip(&likeliest));
            for (row, (target, (loss, &likeliest))) in rows.enumerate() {
                if target.token == IGNORED_TARGET {
                    continue;
                }
                let score = &mut scores[order[row / positions]];
                score.log_probabilities.push(-loss);
                if target.asked == Asked::Likeliest {
                    score.likeliest.push(likeliest);
                }
            }
        }
        Ok(scores)
    }

    /// The losses of one piece, `[b, t]`, and whether its targets are the likeliest tokens; both only where they are asked.
    fn score_piece(
        &mut self,
        device: &mut Device<'_, B>,
        inputs: &[&[u32]],
        targets: &[Target],
    ) -> Result<(Vec<f32>, Vec<bool>)> {
        let piece = self.sequences.advance_piece(device, inputs)?;
        let (model, rows) = (self.sequences.model(), piece.rows());
        let (mut losses, mut likeliest) = (vec![0.0; rows], vec![false; rows]);
        let tokens: Vec<u32> = targets.iter().map(|target| target.token).collect();
        let chunks = chunks(&tokens, self.chunk_rows);
        if chunks.is_empty() {
            return Ok((losses, likeliest));
        }
        let (head, table_rows) = (model.head(), table_rows(model));
        let [_, table] = model.head_parameters(self.sequences.parameters())?;
        let normed = self.sequences.normalized_piece(device, &piece)?;
        let Device { backend, stream } = device;
        backend.write(stream, SliceMut::new(&mut self.targets, 0, rows)?, &tokens)?;
        for Range { start, end } in chunks {
            let chunk = end - start;
            backend.matmul(
                stream,
                SliceMut::all(&mut self.logits).matrix(chunk, table_rows)?,
                normed.rows(start, chunk)?,
                table.weight(&head.table, table_rows, head.width)?.transposed(),
                Output::Overwrite,
            )?;
            for row in (start..end).filter(|&row| targets[row].asks_likeliest()) {
                let logits = Slice::new(&self.logits, (row - start) * table_rows, head.vocab_size)?;
                self.host_logits.resize(head.vocab_size, bytemuck::Zeroable::zeroed());
                backend.read(stream, &mut self.host_logits, logits)?;
                let scaled = |logit: &B::Activation| logit.widened() * head.logit_scale;
                likeliest[row] =
                    is_likeliest(self.host_logits.iter().map(scaled), targets[row].token as usize);
            }
            backend.cross_entropy(
                stream,
                SliceMut::new(&mut self.losses, start, chunk)?,
                SliceMut::new(&mut self.logits, 0, chunk * table_rows)?,
                Slice::new(&self.targets, start, chunk)?,
                LogitGradient::None,
                CrossEntropyShape::new(chunk, head.vocab_size, table_rows)?
                    .with_logit_scale(head.logit_scale)?,
            )?;
        }
        backend.read(stream, &mut losses, Slice::new(&self.losses, 0, rows)?)?;
        Ok((losses, likeliest))
    }
}

/// The token that follows a row, and what is asked of it.
#[derive(Clone, Copy)]
struct Target {
    token: u32,
    asked: Asked,
}

impl Target {
    /// Nothing is asked.
    const NONE: Self = Self { token: IGNORED_TARGET, asked: Asked::LogProbability };

    fn asks_likeliest(self) -> bool {
        self.token != IGNORED_TARGET && self.asked == Asked::Likeliest
    }
}

/// Rows whose logits are formed at once, `most` at most: from one that is scored to another.
fn chunks(targets: &[u32], most: usize) -> Vec<Range<usize>> {
    let mut chunks: Vec<Range<usize>> = Vec::new();
    let scored = (0..targets.len()).filter(|&row| targets[row] != IGNORED_TARGET);
    for row in scored {
        match chunks.last_mut() {
            Some(chunk) if row - chunk.end < SKIPPED_ROWS && row < chunk.start + most => {
                chunk.end = row + 1;
            }
            _ => chunks.push(row..row + 1),
        }
    }
    chunks
}

/// Whether `token` is the first of the greatest logits; not where one that it is compared with is no number.
fn is_likeliest(logits: impl Iterator<Item = f32> + Clone, token: usize) -> bool {
    let Some(own) = logits.clone().nth(token) else { return false };
    logits.enumerate().all(|(other, logit)| if other < token { logit < own } else { logit <= own })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOT: u32 = IGNORED_TARGET;

    #[test]
    fn logits_are_formed_from_scored_rows_to_scored_rows() {
        assert!(chunks(&[NOT; 5], 4).is_empty());
        assert_eq!(chunks(&[NOT, 1, NOT, 2, 3, 4, NOT], 4), [1..5, 5..6]);
        assert_eq!(chunks(&[1; 7], 3), [0..3, 3..6, 6..7]);
        let mut apart = vec![NOT; 40];
        for row in [2, 2 + SKIPPED_ROWS, 3 + 2 * SKIPPED_ROWS] {
            apart[row] = 1;
        }
        assert_eq!(chunks(&apart, 30), [2..19, 35..36]);
        assert_eq!(chunks(&apart, 10), [2..3, 18..19, 35..36]);
    }

    #[test]
    fn the_first_of_equal_logits_is_the_likeliest() {
        let is = |logits: &[f32], token| is_likeliest(logits.iter().copied(), token);
        let logits = [1.0, 3.0, 3.0, -2.0];
        assert_eq!(
            [0, 1, 2, 3, 4].map(|token| is(&logits, token)),
            [false, true, false, false, false]
        );
        assert!(!is(&[1.0, f32::NAN, 3.0], 2) && !is(&[f32::NAN], 0));
    }
}
