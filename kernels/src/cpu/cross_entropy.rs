//! Cross-entropy of rows of logits, and its gradient in place.

use super::dispatch::Kernel;
use super::exponential::exp2_each;
use super::rows::{exactly, exactly_mut};
use super::simd::{LANES, Simd};
use super::{Cpu, DeviceStream};
use crate::backend::{self, IGNORED_TARGET, LogitGradient};
use crate::error::{KernelError, Result};
use crate::shape::CrossEntropyShape;
use crate::view::{Slice, SliceMut};

/// Chains of the running greatest and sum: one would wait for its own latency.
const CHAINS: usize = 4;

/// The least power that [`exp2_each`] does not saturate; terms below it are zero.
const LEAST_POWER: f32 = -126.0;

/// The first target that is neither inside the vocabulary nor [`IGNORED_TARGET`] is an error.
fn check_targets(kernel: &'static str, targets: &[u32], vocab_size: usize) -> Result<()> {
    let counted = |&target: &u32| target == IGNORED_TARGET || (target as usize) < vocab_size;
    match targets.iter().position(|target| !counted(target)) {
        None => Ok(()),
        Some(row) => {
            Err(KernelError::TokenOutOfRange { kernel, row, token: targets[row], vocab_size })
        }
    }
}

impl backend::CrossEntropy for Cpu {
    fn logit_chunk_rows(&self) -> usize {
        128
    }

    fn cross_entropy(
        &self,
        stream: &mut DeviceStream,
        losses: SliceMut<'_, Cpu, f32>,
        logits: SliceMut<'_, Cpu, f32>,
        targets: Slice<'_, Cpu, u32>,
        gradient: LogitGradient,
        shape: CrossEntropyShape,
    ) -> Result<()> {
        const KERNEL: &str = "cross_entropy";
        let threads = stream.threads();
        let (rows, vocab_size, row_stride) = (shape.rows(), shape.vocab_size(), shape.row_stride());
        let losses = exactly_mut(KERNEL, "losses", losses, rows)?;
        let logits = exactly_mut(KERNEL, "logits", logits, rows * row_stride)?;
        let targets = exactly(KERNEL, "targets", targets, rows)?;
        check_targets(KERNEL, targets, vocab_size)?;
        let scale = shape.logit_scale();
        let all = CrossEntropy { losses, logits, targets, gradient, vocab_size, row_stride, scale };
        let share = threads.share(rows);
        threads.for_each(all.parts(share), |part| self.dispatch.run(part));
        Ok(())
    }
}

/// Rows of logits `row_stride` apart, of which `vocab_size` count; targets are inside the vocabulary or
/// [`IGNORED_TARGET`].
struct CrossEntropy<'a> {
    losses: &'a mut [f32],
    logits: &'a mut [f32],
    targets: &'a [u32],
    gradient: LogitGradient,
    vocab_size: usize,
    row_stride: usize,
    /// The factor of the logits.
    scale: f32,
}

impl<'a> CrossEntropy<'a> {
    /// Cuts the rows into parts of `rows` rows each; the last may be shorter.
    fn parts(self, rows: usize) -> impl Iterator<Item = CrossEntropy<'a>> {
        let Self { losses, logits, targets, gradient, vocab_size, row_stride, scale } = self;
        losses
            .chunks_mut(rows)
            .zip(logits.chunks_mut(rows * row_stride))
            .zip(targets.chunks(rows))
            .map(move |((losses, logits), targets)| CrossEntropy {
                losses,
                logits,
                targets,
                gradient,
                vocab_size,
                row_stride,
                scale,
            })
    }
}

impl Kernel for CrossEntropy<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = self.logits.chunks_mut(self.row_stride).zip(self.targets).zip(self.losses);
        for ((row, &target), loss) in rows {
            let (logits, padding) = row.split_at_mut(self.vocab_size);
            if target == IGNORED_TARGET {
                *loss = 0.0;
                if self.gradient == LogitGradient::InPlace {
                    row.fill(0.0);
                }
                continue;
            }
            let target = target as usize;
            let scale = s.splat(self.scale);
            if self.scale != 1.0 {
                for logits in logits.chunks_mut(LANES) {
                    s.store_row(logits, s.mul(s.load_row(logits), scale));
                }
            }
            let target_logit = logits[target];
            let greatest = greatest_of(s, logits);
            // The other terms are summed separately: if the target is nearly certain, their part of
            // the loss and its gradient would be lost in the rounding of 1.
            logits[target] = f32::NEG_INFINITY;
            let others = exponentials(s, logits, greatest);
            let [target_term] = terms(s, [s.splat(target_logit)], s.splat(greatest));
            let target_term = s.greatest(target_term);
            let sum = others + target_term;
            *loss = if target_logit == greatest {
                // The term is 1, or NaN if the logit is infinite.
                libm::log1p(f64::from(others / target_term)) as f32
            } else {
                (libm::log(f64::from(sum)) + f64::from(greatest) - f64::from(target_logit)) as f32
            };
            if self.gradient == LogitGradient::InPlace {
                let reciprocal = s.splat(1.0 / sum);
                for logits in logits.chunks_mut(LANES) {
                    s.store_row(logits, s.mul(s.mul(s.load_row(logits), reciprocal), scale));
                }
                logits[target] = -others / sum * self.scale;
                padding.fill(0.0);
            }
        }
    }
}

#[inline(always)]
fn greatest_of<S: Simd>(s: S, logits: &[f32]) -> f32 {
    let mut greatest = [s.splat(f32::NEG_INFINITY); CHAINS];
    for logits in logits.chunks(CHAINS * LANES) {
        for (greatest, logits) in greatest.iter_mut().zip(logits.chunks(LANES)) {
            *greatest = s.max(*greatest, s.load_row_or(logits, f32::NEG_INFINITY));
        }
    }
    let [a, b, c, d] = greatest;
    s.greatest(s.max(s.max(a, b), s.max(c, d)))
}

/// Replaces each logit by `e^(logit - greatest)` and answers their sum.
#[inline(always)]
fn exponentials<S: Simd>(s: S, logits: &mut [f32], greatest: f32) -> f32 {
    let greatest = s.splat(greatest);
    let mut sums = [s.splat(0.0); CHAINS];
    let (whole, rest) = logits.as_chunks_mut::<{ CHAINS * LANES }>();
    for logits in whole {
        let mut x = [greatest; CHAINS];
        for (x, logits) in x.iter_mut().zip(logits.chunks_exact(LANES)) {
            *x = s.load_row(logits);
        }
        let x = terms(s, x, greatest);
        for ((x, logits), sum) in x.into_iter().zip(logits.chunks_exact_mut(LANES)).zip(&mut sums) {
            s.store_row(logits, x);
            *sum = s.add(*sum, x);
        }
    }
    for (logits, sum) in rest.chunks_mut(LANES).zip(&mut sums) {
        let [x] = terms(s, [s.load_row_or(logits, f32::NEG_INFINITY)], greatest);
        s.store_row(logits, x);
        *sum = s.add(*sum, x);
    }
    let [a, b, c, d] = sums;
    s.sum(s.add(s.add(a, b), s.add(c, d)))
}

/// `e^(x - greatest)`: zero where the result is too small for a normal number, and NaN for NaN.
#[inline(always)]
fn terms<S: Simd, const K: usize>(
    s: S,
    mut x: [S::Vector; K],
    greatest: S::Vector,
) -> [S::Vector; K] {
    for x in &mut x {
        *x = s.mul(s.sub(*x, greatest), s.splat(std::f32::consts::LOG2_E));
    }
    let mut terms = exp2_each(s, x);
    for (term, x) in terms.iter_mut().zip(x) {
        let above = s.sub(x, s.splat(LEAST_POWER));
        *term = s.select_by_sign(above, *term, s.mul(*term, s.splat(0.0)));
    }
    terms
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::dispatch::Dispatch;

    fn loss(logits: &[f32], target: u32) -> f32 {
        let mut losses = [0.0];
        let (vocab_size, row_stride) = (logits.len(), logits.len());
        Dispatch::best().run(CrossEntropy {
            losses: &mut losses,
            logits: &mut logits.to_vec(),
            targets: &[target],
            gradient: LogitGradient::InPlace,
            vocab_size,
            row_stride,
            scale: 1.0,
        });
        losses[0]
    }

    #[test]
    fn a_logit_that_is_no_number_shows_in_the_loss() {
        for bad in [f32::NAN, f32::INFINITY] {
            for vocab_size in [1, 3, 70, 200] {
                for place in [0, vocab_size / 2, vocab_size - 1] {
                    let mut logits = vec![0.5; vocab_size];
                    logits[place] = bad;
                    for target in [0, place] {
                        let loss = loss(&logits, target as u32);
                        assert!(!loss.is_finite(), "{bad} of {vocab_size} at {place}: loss {loss}");
                    }
                }
            }
        }
    }
}
