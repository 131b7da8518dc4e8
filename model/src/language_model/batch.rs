//! A microbatch on the device: tokens in, losses out.

use tidemill_kernels::{Backend, IGNORED_TARGET, Slice, SliceMut};

use crate::error::{ModelError, Result};
use crate::sample::{Microbatch, MicrobatchShape, UNCOUNTED};
use crate::trainable::{Device, GrainLoss};

/// Tokens, targets and losses of one microbatch.
pub(super) struct Batch<B: Backend> {
    planned: MicrobatchShape,
    tokens: B::Buffer<u32>,
    targets: B::Buffer<u32>,
    losses: B::Buffer<f32>,
    /// Allocated at the first request for the likeliest tokens.
    likeliest: Option<B::Buffer<u32>>,
    starts: B::Buffer<u32>,
    host_tokens: Vec<u32>,
    host_targets: Vec<u32>,
    /// Empty where a sample is one document.
    host_starts: Vec<u32>,
}

/// The rows of a microbatch as the head takes them.
pub(super) struct BatchRows<'a, B: Backend> {
    /// `targets[b t]`
    pub(super) targets: Slice<'a, B, u32>,
    /// `losses[b t]`, to be written.
    pub(super) losses: &'a mut B::Buffer<f32>,
    /// `likeliest[b t]`, to be written; `None` where it was not allocated.
    pub(super) likeliest: Option<&'a mut B::Buffer<u32>>,
}

impl<B: Backend> Batch<B> {
    pub(super) fn plan(device: &mut Device<'_, B>, shape: MicrobatchShape) -> Result<Self> {
        let Device { backend, stream } = device;
        let rows = shape.sequences()?.rows();
        Ok(Self {
            planned: shape,
            tokens: backend.allocate(stream, rows)?,
            targets: backend.allocate(stream, rows)?,
            losses: backend.allocate(stream, rows)?,
            likeliest: None,
            starts: backend.allocate(stream, rows)?,
            host_tokens: Vec::with_capacity(rows),
            host_targets: Vec::with_capacity(rows),
            host_starts: Vec::new(),
        })
    }

    /// Checks the tokens of `microbatch` and moves them to the device.
    pub(super) fn upload(
        &mut self,
        device: &mut Device<'_, B>,
        microbatch: Microbatch<'_>,
        vocab_size: usize,
    ) -> Result<()> {
        self.check_shape(microbatch)?;
        self.host_tokens.clear();
        self.host_targets.clear();
        self.host_starts.clear();
        for (sample, row) in microbatch.samples.iter().enumerate() {
            let outside = |&token: &u32| input(token) as usize >= vocab_size;
            if let Some(position) = row.iter().position(outside) {
                return Err(ModelError::Token {
                    what: format!("sample {sample} of the microbatch, position {position}"),
                    token: row[position],
                    vocab_size,
                });
            }
            let inputs = row[..microbatch.positions].iter();
            self.host_tokens.extend(inputs.map(|&token| input(token)));
            match microbatch.document_end {
                None => self.host_targets.extend(row[1..].iter().map(|&token| target(token))),
                Some(end) => self.cut_documents(row, end),
            }
        }
        let Device { backend, stream } = device;
        let rows = self.host_tokens.len();
        backend.write(stream, SliceMut::new(&mut self.tokens, 0, rows)?, &self.host_tokens)?;
        backend.write(stream, SliceMut::new(&mut self.targets, 0, rows)?, &self.host_targets)?;
        if microbatch.document_end.is_some() {
            backend.write(stream, SliceMut::new(&mut self.starts, 0, rows)?, &self.host_starts)?;
        }
        Ok(())
    }

    /// The targets of a sample, and the position at which each row's document begins; a document
    /// ends with the token `end`.
    fn cut_documents(&mut self, sample: &[u32], end: u32) {
        let mut start = 0;
        for (position, pair) in sample.windows(2).enumerate() {
            self.host_starts.push(start);
            if pair[0] & !UNCOUNTED == end {
                self.host_targets.push(IGNORED_TARGET);
                start = position as u32 + 1;
            } else {
                self.host_targets.push(target(pair[1]));
            }
        }
    }

    fn check_shape(&self, microbatch: Microbatch<'_>) -> Result<()> {
        let (shape, planned) = (microbatch.shape(), self.planned);
        let (rows, grains) = (shape.grain_rows()?, planned.grain_rows()?);
        for (what, expected, found) in [
            ("rows of a microbatch", grains.rows(), rows.rows()),
            ("grains of a microbatch", grains.grains(), rows.grains()),
        ] {
            if found > expected {
                return Err(ModelError::Microbatch {
                    what,
                    expected: format!("at most {expected}, as planned"),
                    found,
                });
            }
        }
        let tokens = shape.positions + 1;
        match microbatch.samples.iter().find(|sample| sample.len() != tokens) {
            None => Ok(()),
            Some(sample) => Err(ModelError::Microbatch {
                what: "tokens of a sample",
                expected: format!("positions + 1 = {tokens}"),
                found: sample.len(),
            }),
        }
    }

    /// `tokens[b t]`
    pub(super) fn tokens(&self, shape: MicrobatchShape) -> Result<Slice<'_, B, u32>> {
        Ok(Slice::new(&self.tokens, 0, shape.sequences()?.rows())?)
    }

    /// `starts[b t]`, where samples hold several documents.
    pub(super) fn starts(&self, shape: MicrobatchShape) -> Result<Option<Slice<'_, B, u32>>> {
        if self.host_starts.is_empty() {
            return Ok(None);
        }
        Ok(Some(Slice::new(&self.starts, 0, shape.sequences()?.rows())?))
    }

    /// The head's input and output.
    pub(super) fn rows(&mut self, shape: MicrobatchShape) -> Result<BatchRows<'_, B>> {
        let Self { targets, losses, likeliest, .. } = self;
        let targets = Slice::new(targets, 0, shape.sequences()?.rows())?;
        Ok(BatchRows { targets, losses, likeliest: likeliest.as_mut() })
    }

    /// Allocates the likeliest token of every row.
    pub(super) fn make_likeliest(&mut self, device: &mut Device<'_, B>) -> Result<()> {
        if self.likeliest.is_none() {
            let rows = self.planned.sequences()?.rows();
            self.likeliest = Some(device.backend.allocate(device.stream, rows)?);
        }
        Ok(())
    }

    /// For each grain, whether the most likely token is the target at every counted row; waits for
    /// the device.
    pub(super) fn read_greedy(
        &self,
        device: &mut Device<'_, B>,
        microbatch: Microbatch<'_>,
    ) -> Result<Vec<bool>> {
        let Some(likeliest) = &self.likeliest else { return Ok(Vec::new()) };
        let mut tokens = vec![0; microbatch.shape().sequences()?.rows()];
        let rows = tokens.len();
        device.backend.read(device.stream, &mut tokens, Slice::new(likeliest, 0, rows)?)?;
        let rows = microbatch.samples_per_grain.saturating_mul(microbatch.positions);
        let is_greedy = |(tokens, targets): (&[u32], &[u32])| {
            let mut rows = tokens.iter().zip(targets);
            rows.all(|(token, target)| *target == IGNORED_TARGET || token == target)
        };
        Ok(tokens.chunks(rows).zip(self.host_targets.chunks(rows)).map(is_greedy).collect())
    }

    /// The loss of every row; waits for the device.
    pub(super) fn read_losses(
        &self,
        device: &mut Device<'_, B>,
        shape: MicrobatchShape,
    ) -> Result<Vec<f32>> {
        let Device { backend, stream } = device;
        let mut losses = vec![0.0; shape.sequences()?.rows()];
        let rows = losses.len();
        backend.read(stream, &mut losses, Slice::new(&self.losses, 0, rows)?)?;
        Ok(losses)
    }

    /// The targets of the microbatch that was uploaded last.
    pub(super) fn host_targets(&self) -> &[u32] {
        &self.host_targets
    }
}

/// A token of a sample as an input.
fn input(token: u32) -> u32 {
    if token == IGNORED_TARGET { 0 } else { token & !UNCOUNTED }
}

/// A token of a sample as a target.
fn target(token: u32) -> u32 {
    if token & UNCOUNTED == 0 { token } else { IGNORED_TARGET }
}

/// The counted rows of `microbatch`: the rows whose target is counted.
pub(super) fn counted_tokens(microbatch: Microbatch<'_>) -> u64 {
    let pairs = microbatch.samples.iter().flat_map(|sample| sample.windows(2));
    let is_counted = |pair: &&[u32]| {
        target(pair[1]) != IGNORED_TARGET
            && microbatch.document_end.is_none_or(|end| pair[0] & !UNCOUNTED != end)
    };
    pairs.filter(is_counted).count() as u64
}

/// Sums the losses of counted rows grain by grain.
pub(super) fn grain_losses(
    losses: &[f32],
    targets: &[u32],
    microbatch: Microbatch<'_>,
) -> Vec<GrainLoss> {
    let rows = microbatch.samples_per_grain.saturating_mul(microbatch.positions);
    let grains = losses.chunks(rows).zip(targets.chunks(rows));
    grains.map(|(losses, targets)| GrainLoss::default().with_rows(losses, targets)).collect()
}

impl GrainLoss {
    /// Adds the losses of counted rows, in f64 and in row order.
    pub(super) fn with_rows(self, losses: &[f32], targets: &[u32]) -> Self {
        let counted = losses.iter().zip(targets).filter(|(_, target)| **target != IGNORED_TARGET);
        counted.fold(self, |sum, (&loss, _)| Self {
            loss_sum: sum.loss_sum + f64::from(loss),
            tokens: sum.tokens + 1,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grain_in_pieces_has_the_loss_of_a_whole() {
        // The magnitudes of these losses differ so much that the order of addition changes the sum.
        let magnitude = |row: i32| [1e9_f32, 1.0, 1e-7][row as usize % 3];
        let losses: Vec<f32> = (0..40).map(|row| magnitude(row) / (row + 3) as f32).collect();
        let targets: Vec<u32> = (0..40).map(|row| [7, IGNORED_TARGET][row / 13 % 2]).collect();
        let whole = GrainLoss::default().with_rows(&losses, &targets);
        for rows in [1, 7, 39] {
            let pieces = losses.chunks(rows).zip(targets.chunks(rows));
            let found = pieces.fold(GrainLoss::default(), |so_far, (losses, targets)| {
                so_far.with_rows(losses, targets)
            });
            assert_eq!(found, whole);
        }
        // Summing each part by itself gives another result, so the test can tell the two orders
        // apart.
        let apart = losses.chunks(7).zip(targets.chunks(7));
        let apart = apart.map(|(losses, targets)| GrainLoss::default().with_rows(losses, targets));
        assert_ne!(apart.fold(0.0, |sum, piece| sum + piece.loss_sum), whole.loss_sum);
    }
}
