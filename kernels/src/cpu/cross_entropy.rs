//! Cross-entropy of rows of logits, and its gradient in place.

use super::dispatch::Kernel;
use super::exponential::exp2;
use super::simd::{LANES, Simd};
use crate::backend::{IGNORED_TARGET, LogitGradient};

/// Chains of the running greatest and sum: one would wait for its own latency.
const CHAINS: usize = 4;

/// Powers below 2^-100 are taken as that: beside the greatest, which is 1, no sum can tell, and the
/// probability stays a normal number.
const LEAST_POWER: f32 = -100.0;

/// Rows of logits `row_stride` apart, of which `vocab_size` count; targets are inside the vocabulary or
/// [`IGNORED_TARGET`].
pub(crate) struct CrossEntropy<'a> {
    pub(crate) losses: &'a mut [f32],
    pub(crate) logits: &'a mut [f32],
    pub(crate) targets: &'a [u32],
    pub(crate) gradient: LogitGradient,
    pub(crate) vocab_size: usize,
    pub(crate) row_stride: usize,
}

impl<'a> CrossEntropy<'a> {
    /// Parts of `rows` rows each, the last of what is left.
    pub(crate) fn parts(self, rows: usize) -> impl Iterator<Item = CrossEntropy<'a>> {
        let Self { losses, logits, targets, gradient, vocab_size, row_stride } = self;
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
            let target_logit = logits[target];
            let greatest = greatest_of(s, logits);
            let sum = exponentials(s, logits, greatest);
            // The greatest's own term is 1, so the logarithm is of a number of at least 1.
            let log_sum = f64::from(sum).ln() + f64::from(greatest);
            *loss = (log_sum - f64::from(target_logit)) as f32;
            if self.gradient == LogitGradient::InPlace {
                let reciprocal = s.splat(1.0 / sum);
                for logits in logits.chunks_mut(LANES) {
                    s.store_row(logits, s.mul(s.load_row(logits), reciprocal));
                }
                logits[target] -= 1.0;
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
    let log2_e = s.splat(std::f32::consts::LOG2_E);
    let least = s.splat(LEAST_POWER);
    let mut sums = [s.splat(0.0); CHAINS];
    for logits in logits.chunks_mut(CHAINS * LANES) {
        for (sum, logits) in sums.iter_mut().zip(logits.chunks_mut(LANES)) {
            let power = s.mul(s.sub(s.load_row(logits), greatest), log2_e);
            let term = exp2(s, s.max(least, power));
            s.store_row(logits, term);
            *sum = s.add(*sum, s.keep_first(term, logits.len()));
        }
    }
    let [a, b, c, d] = sums;
    s.sum(s.add(s.add(a, b), s.add(c, d)))
}
