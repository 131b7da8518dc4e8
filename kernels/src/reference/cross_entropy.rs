//! Cross-entropy of rows of logits against targets.

use crate::backend::IGNORED_TARGET;
use crate::shape::CrossEntropyShape;

/// The outputs of cross-entropy: the losses and their gradient.
#[derive(Clone, Debug, PartialEq)]
pub struct CrossEntropyOutputs {
    /// `losses[rows]`, in nats; 0 where the target is ignored.
    pub losses: Vec<f64>,
    /// `dlogits[rows, row_stride]` of the sum of the losses; 0 in the padding and in ignored rows.
    pub dlogits: Vec<f64>,
}

/// With s the shape's logit scale: `losses[row] = logsumexp(s logits[row, ..v]) - s logits[row, target]` and, of their sum,
/// `dlogits = s (softmax - one_hot(target))`; `logits[rows, row_stride]`, whose padding is not read.
pub fn forward_backward(
    logits: &[f64],
    targets: &[u32],
    shape: CrossEntropyShape,
) -> CrossEntropyOutputs {
    let (rows, vocab_size, row_stride) = (shape.rows(), shape.vocab_size(), shape.row_stride());
    assert_eq!((logits.len(), targets.len()), (rows * row_stride, rows));
    let scale = f64::from(shape.logit_scale());
    let mut outputs =
        CrossEntropyOutputs { losses: vec![0.0; rows], dlogits: vec![0.0; logits.len()] };
    for row in 0..rows {
        if targets[row] == IGNORED_TARGET {
            continue;
        }
        let target = targets[row] as usize;
        let logits = &logits[row * row_stride..][..vocab_size];
        let logits: Vec<f64> = logits.iter().map(|logit| scale * logit).collect();
        let largest = logits.iter().fold(f64::NEG_INFINITY, |largest, &l| largest.max(l));
        let total: f64 = logits.iter().map(|logit| (logit - largest).exp()).sum();
        outputs.losses[row] = largest + total.ln() - logits[target];
        for (token, logit) in logits.iter().enumerate() {
            let probability = (logit - largest).exp() / total;
            let one_hot = if token == target { 1.0 } else { 0.0 };
            outputs.dlogits[row * row_stride + token] = scale * (probability - one_hot);
        }
    }
    outputs
}

#[cfg(test)]
mod tests {
    use super::super::central_difference::{check_gradient, wave};
    use super::*;

    #[test]
    fn the_gradient_agrees_with_central_differences() {
        for (vocab_size, scale) in [(1, 1.0), (5, 1.0), (5, 0.3)] {
            let shape = CrossEntropyShape::new(4, vocab_size, vocab_size + 2).unwrap();
            let shape = shape.with_logit_scale(scale).unwrap();
            let last = vocab_size as u32 - 1;
            let targets = [last, IGNORED_TARGET, 0, last / 2];
            let logits: Vec<f64> =
                wave(1.0, 4 * shape.row_stride()).iter().map(|l| 3.0 * l).collect();
            let dlogits = forward_backward(&logits, &targets, shape).dlogits;
            check_gradient("dlogits", &logits, &dlogits, |logits| {
                forward_backward(logits, &targets, shape).losses.iter().sum()
            });
        }
    }

    #[test]
    fn equal_logits_cost_the_logarithm_of_the_vocabulary() {
        let shape = CrossEntropyShape::new(1, 7, 7).unwrap();
        let loss = forward_backward(&[500.0; 7], &[3], shape).losses[0];
        assert!((loss - 7.0_f64.ln()).abs() < 1e-12);
    }
}
