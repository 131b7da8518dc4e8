//! How likely a model finds a text: the log-probability of every token given the ones before it.
//!
//! Scoring advances [`Sequences`], so memory is no larger than generation's, and a token's score
//! depends on the tokens before it alone: no bit depends on other texts, scored at the same time or
//! before, or on where pieces are cut. Of a [`Continuation`] only the tokens at its end are scored:
//! the head gets only the rows before these, with the same bits.
//!
//! Only one number and one token for each scored token leave the device. While the host waits for
//! the results of one batch, the device already computes the texts that were
//! [enqueued](Scorer::enqueue) after it.

use tidemill_kernels::backend::{KernelGroup, LogitGradient, Output};
use tidemill_kernels::shape::CrossEntropyShape;
use tidemill_kernels::{Backend, Slice, SliceMut};

use crate::error::{ModelError, Result};
use crate::generation::{Piece, Sequences, table_rows};
use crate::language_model::LanguageModel;
use crate::parameters::Parameters;
use crate::trainable::Device;

/// A text whose end is scored.
#[derive(Clone, Copy, Debug)]
pub struct Continuation<'t> {
    /// The whole text.
    pub tokens: &'t [u32],
    /// The index of the first token that is scored; at least 1.
    pub first: usize,
    /// Which scores are wanted.
    pub asked: Asked,
}

/// Which scores of a token are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// Its log-probability.
    LogProbability,
    /// Its log-probability, and whether it is the most likely token: the first of equal ones, among
    /// logits as activations hold them. No token is, where a logit is not a finite number.
    Likeliest,
}

/// The scores of a continuation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ContinuationScore {
    /// The log-probability of each token, in nats.
    pub log_probabilities: Vec<f32>,
    /// Whether each token is the most likely one; empty where that was not asked for.
    pub likeliest: Vec<bool>,
}

/// Scores texts, several at once.
pub struct Scorer<'m, B: Backend> {
    sequences: Sequences<'m, B>,
    /// Rows whose logits are formed at once.
    chunk_rows: usize,
    /// `logits[rows, v]` of one chunk of a piece.
    logits: B::Buffer<B::Activation>,
    /// `gathered[rows, d]`: the residual stream where it is scored, of one chunk.
    gathered: B::Buffer<f32>,
    /// `places[rows]`: the rows of one piece that are scored.
    places: B::Buffer<u32>,
    /// `targets[rows]`, the tokens that follow them.
    targets: B::Buffer<u32>,
    /// `losses[rows]`
    losses: B::Buffer<f32>,
    /// `likeliest[rows]`, tokens.
    likeliest: B::Buffer<u32>,
    /// Memory of scores that have been read.
    spare: Vec<Results<B>>,
}

/// The results that leave the device.
struct Results<B: Backend> {
    /// The number of scored tokens that there is room for.
    room: usize,
    losses: B::Pinned<f32>,
    likeliest: B::Pinned<u32>,
}

/// Scores that the device is computing.
pub struct PendingScores<B: Backend> {
    /// The number of texts.
    texts: usize,
    /// The scored tokens, in the order of the results.
    targets: Vec<Target>,
    results: Results<B>,
}

/// A token that is scored.
#[derive(Clone, Copy)]
struct Target {
    /// The index of its text.
    text: usize,
    token: u32,
    asked: Asked,
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
        device.backend.prepare(&[KernelGroup::CrossEntropy])?;
        let rows = sequences.capacity().rows;
        let Device { backend, stream } = device;
        let chunk_rows = backend.logit_chunk_rows().min(rows);
        Ok(Self {
            sequences,
            chunk_rows,
            logits: backend.allocate(stream, chunk_rows * table_rows(model))?,
            gathered: backend.allocate(stream, chunk_rows * model.head().width)?,
            places: backend.allocate(stream, rows)?,
            targets: backend.allocate(stream, rows)?,
            losses: backend.allocate(stream, rows)?,
            likeliest: backend.allocate(stream, rows)?,
            spare: Vec::new(),
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
    /// As [`log_probabilities`](Self::log_probabilities); more texts than there is room for.
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
    /// As [`log_probabilities_of_each`](Self::log_probabilities_of_each); a continuation without
    /// scored tokens, or one whose first scored token has no token before it.
    pub fn continuations(
        &mut self,
        device: &mut Device<'_, B>,
        texts: &[Continuation<'_>],
    ) -> Result<Vec<ContinuationScore>> {
        let pending = self.enqueue(device, texts)?;
        self.finish(device, pending)
    }

    /// Enqueues the scoring of several texts and returns at once: [`finish`](Self::finish) waits
    /// for the results. Several such batches may be in flight.
    ///
    /// # Errors
    /// As [`continuations`](Self::continuations).
    pub fn enqueue(
        &mut self,
        device: &mut Device<'_, B>,
        texts: &[Continuation<'_>],
    ) -> Result<PendingScores<B>> {
        for Continuation { tokens, first, .. } in texts {
            self.sequences.model().check_text(tokens)?;
            if !(1..tokens.len()).contains(first) {
                let expected = format!("1 to {}", tokens.len() - 1);
                return Err(ModelError::config("first token of a continuation", expected, first));
            }
        }
        let scored = texts.iter().map(|text| text.tokens.len() - text.first).sum();
        let results = self.results(device, scored)?;
        let mut pending = PendingScores { texts: texts.len(), targets: Vec::new(), results };
        if texts.is_empty() {
            return Ok(pending);
        }
        let mut order: Vec<usize> = (0..texts.len()).collect();
        order.sort_by_key(|&place| std::cmp::Reverse(texts[place].tokens.len()));
        self.sequences.begin(device, texts.len())?;
        let inputs: Vec<&[u32]> = order
            .iter()
            .map(|&place| &texts[place].tokens[..texts[place].tokens.len() - 1])
            .collect();
        self.sequences.check(&inputs)?;
        // The tokens of each text that have entered. Each piece adds equally many for every text
        // that has tokens in it.
        let mut entered = 0;
        for inputs in self.sequences.pieces(&inputs) {
            let piece = self.sequences.advance_piece(device, &inputs)?;
            let (mut places, before) = (Vec::new(), pending.targets.len());
            for (row, (inputs, &text)) in inputs.iter().zip(&order).enumerate() {
                let Continuation { tokens, first, asked } = texts[text];
                for position in first.saturating_sub(entered + 1)..inputs.len() {
                    places.push((row * piece.positions() + position) as u32);
                    let token = tokens[entered + 1 + position];
                    pending.targets.push(Target { text, token, asked });
                }
            }
            entered += piece.positions();
            let targets = &pending.targets[before..];
            self.score_rows(device, &piece, &places, targets)?;
            let Results { losses, likeliest, .. } = &mut pending.results;
            let Device { backend, stream } = device;
            let of_piece = Slice::new(&self.losses, 0, places.len())?;
            backend.read_async(stream, losses, before, of_piece)?;
            let of_piece = Slice::new(&self.likeliest, 0, places.len())?;
            backend.read_async(stream, likeliest, before, of_piece)?;
        }
        Ok(pending)
    }

    /// Waits for the scores that were enqueued first, and returns them.
    ///
    /// # Errors
    /// A device that fails.
    pub fn finish(
        &mut self,
        device: &mut Device<'_, B>,
        pending: PendingScores<B>,
    ) -> Result<Vec<ContinuationScore>> {
        let PendingScores { texts, targets, results } = pending;
        let mut scores = vec![ContinuationScore::default(); texts];
        let losses = device.backend.pinned_values(&results.losses)?;
        let likeliest = device.backend.pinned_values(&results.likeliest)?;
        for ((target, loss), &likeliest) in targets.iter().zip(losses).zip(likeliest) {
            let score = &mut scores[target.text];
            score.log_probabilities.push(-loss);
            if target.asked == Asked::Likeliest {
                score.likeliest.push(likeliest == target.token);
            }
        }
        self.spare.push(results);
        Ok(scores)
    }

    /// Memory for this many scored tokens.
    fn results(&mut self, device: &mut Device<'_, B>, scored: usize) -> Result<Results<B>> {
        if let Some(place) = self.spare.iter().position(|results| results.room >= scored) {
            return Ok(self.spare.swap_remove(place));
        }
        // Spare memory that is too small for these scores would only be searched in vain from now on.
        self.spare.clear();
        let room = scored.max(self.sequences.capacity().rows);
        let (losses, likeliest) = (device.backend.pinned(room)?, device.backend.pinned(room)?);
        Ok(Results { room, losses, likeliest })
    }

    /// Computes the losses of some rows of one piece and, where they are wanted, the most likely
    /// tokens.
    fn score_rows(
        &mut self,
        device: &mut Device<'_, B>,
        piece: &Piece,
        places: &[u32],
        targets: &[Target],
    ) -> Result<()> {
        if places.is_empty() {
            return Ok(());
        }
        let model = self.sequences.model();
        let (head, table_rows, rows) = (model.head(), table_rows(model), places.len());
        let [_, table] = model.head_parameters(self.sequences.parameters())?;
        let tokens: Vec<u32> = targets.iter().map(|target| target.token).collect();
        let Device { backend, stream } = device;
        backend.write(stream, SliceMut::new(&mut self.places, 0, rows)?, places)?;
        backend.write(stream, SliceMut::new(&mut self.targets, 0, rows)?, &tokens)?;
        for (index, targets) in targets.chunks(self.chunk_rows).enumerate() {
            let (start, chunk) = (index * self.chunk_rows, targets.len());
            let places = Slice::new(&self.places, start, chunk)?;
            let normed =
                self.sequences.normalized_rows(device, piece, places, &mut self.gathered)?;
            let Device { backend, stream } = device;
            backend.matmul(
                stream,
                SliceMut::all(&mut self.logits).matrix(chunk, table_rows)?,
                normed,
                table.weight(&head.table, table_rows, head.width)?.transposed(),
                Output::Overwrite,
            )?;
            if targets.iter().any(|target| target.asked == Asked::Likeliest) {
                let likeliest = SliceMut::new(&mut self.likeliest, start, chunk)?;
                let logits = Slice::new(&self.logits, 0, chunk * table_rows)?;
                let logits = logits.matrix(chunk, table_rows)?.columns(0, head.vocab_size)?;
                backend.likeliest_of_activations(stream, likeliest, logits, head.logit_scale)?;
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
        Ok(())
    }
}
