//! Causal attention (Vaswani et al., 2017) with a window (Child et al., 2019), linear biases
//! (ALiBi, Press et al., 2022) and independent documents.
//!
//! The whole row of a query's scores is computed before its softmax, unlike in any kernel.

use crate::shape::AttentionShape;

/// Inputs of attention, row-major and contiguous.
#[derive(Clone, Copy, Debug)]
pub struct AttentionInputs<'a> {
    /// `q[b t, h p]`.
    pub q: &'a [f64],
    /// `k[b t, g p]`.
    pub k: &'a [f64],
    /// `v[b t, g p]`.
    pub v: &'a [f64],
    /// `slopes[h]`: none are zeros.
    pub slopes: Option<&'a [f64]>,
    /// `starts[b t]`: the position in its sample of the first token of the row's document.
    pub starts: Option<&'a [u32]>,
}

/// The outputs of attention.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionOutputs {
    /// `out[b t, h p]`.
    pub out: Vec<f64>,
    /// `log_sum_exp[b, h, t]`.
    pub log_sum_exp: Vec<f64>,
}

/// Gradients of attention. Where heads of queries share keys and values, each has its own part of their gradients.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionGradients {
    /// `dq[b t, h p]`.
    pub dq: Vec<f64>,
    /// `dk[b t, h p]`.
    pub dk: Vec<f64>,
    /// `dv[b t, h p]`.
    pub dv: Vec<f64>,
}

fn check_lengths(inputs: &AttentionInputs<'_>, shape: AttentionShape) {
    let rows = shape.sequences().rows();
    let elements = rows * shape.width();
    let shared = rows * shape.key_value_width();
    assert_eq!((inputs.q.len(), inputs.k.len(), inputs.v.len()), (elements, shared, shared));
    assert_eq!(inputs.slopes.map_or(shape.heads(), <[f64]>::len), shape.heads());
    assert_eq!(inputs.starts.map_or(rows, <[u32]>::len), rows);
}

/// The first position that a query at `position` sees, of a document that begins at `start`.
fn first_seen(position: usize, start: usize, shape: AttentionShape) -> usize {
    let oldest = shape.window().map_or(0, |window| (position + 1).saturating_sub(window.get()));
    start.max(oldest)
}

/// One head of one sample.
#[derive(Clone, Copy)]
struct Head<'a> {
    inputs: &'a AttentionInputs<'a>,
    shape: AttentionShape,
    sample: usize,
    head: usize,
}

impl Head<'_> {
    /// Where the head's row of a position lies in q and its like.
    fn at(&self, position: usize) -> std::ops::Range<usize> {
        let row = self.sample * self.shape.sequences().positions() + position;
        let first = row * self.shape.width() + self.head * self.shape.head_width();
        first..first + self.shape.head_width()
    }

    /// Where the row of a position lies in k and v.
    fn key_at(&self, position: usize) -> std::ops::Range<usize> {
        let row = self.sample * self.shape.sequences().positions() + position;
        let head = self.head / self.shape.group();
        let first = row * self.shape.key_value_width() + head * self.shape.head_width();
        first..first + self.shape.head_width()
    }

    /// The positions that a query sees.
    fn seen(&self, position: usize) -> std::ops::RangeInclusive<usize> {
        let row = self.sample * self.shape.sequences().positions() + position;
        let start = self.inputs.starts.map_or(0, |starts| starts[row] as usize);
        first_seen(position, start, self.shape)..=position
    }

    /// The scores of a query with everything that it sees.
    fn scores(&self, position: usize) -> Vec<f64> {
        let slope = self.inputs.slopes.map_or(0.0, |slopes| slopes[self.head]);
        let q = &self.inputs.q[self.at(position)];
        let score = |key: usize| {
            let k = &self.inputs.k[self.key_at(key)];
            f64::from(self.shape.scale()) * dot(q, k) - slope * (position - key) as f64
        };
        self.seen(position).map(score).collect()
    }
}

fn dot(left: &[f64], right: &[f64]) -> f64 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

/// `sum += factor * row`.
fn add_scaled(sum: &mut [f64], factor: f64, row: &[f64]) {
    for (sum, x) in sum.iter_mut().zip(row) {
        *sum += factor * x;
    }
}

/// `log(sum of exp(scores))`, without overflow.
fn log_sum_exp(scores: &[f64]) -> f64 {
    let greatest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    greatest + scores.iter().map(|score| (score - greatest).exp()).sum::<f64>().ln()
}

/// `out[b t, h p]` and `log_sum_exp[b, h, t]`:
///
/// ```text
/// s_ij  = scale q_i . k_j - slope (i - j)        j from max(start_i, i - window + 1) to i
/// out_i = sum over j of exp(s_ij - log_sum_exp_i) v_j,    log_sum_exp_i = log(sum over j of exp(s_ij))
/// ```
pub fn forward(inputs: &AttentionInputs<'_>, shape: AttentionShape) -> AttentionOutputs {
    check_lengths(inputs, shape);
    let mut out = vec![0.0; inputs.q.len()];
    let mut sums = Vec::new();
    for sample in 0..shape.sequences().samples() {
        for head in 0..shape.heads() {
            let head = Head { inputs, shape, sample, head };
            for position in 0..shape.sequences().positions() {
                let scores = head.scores(position);
                let sum = log_sum_exp(&scores);
                for (key, score) in head.seen(position).zip(scores) {
                    let v = &inputs.v[head.key_at(key)];
                    add_scaled(&mut out[head.at(position)], (score - sum).exp(), v);
                }
                sums.push(sum);
            }
        }
    }
    AttentionOutputs { out, log_sum_exp: sums }
}

/// The gradients of [`forward`]'s `out`, from `dout[b t, h p]`. With `P_ij = exp(s_ij - log_sum_exp_i)`:
///
/// ```text
/// dv_j  = sum over i of P_ij dout_i
/// ds_ij = P_ij (dout_i . v_j - dout_i . out_i)
/// dq_i  = scale (sum over j of ds_ij k_j),    dk_j = scale (sum over i of ds_ij q_i)
/// ```
pub fn backward(
    dout: &[f64],
    inputs: &AttentionInputs<'_>,
    shape: AttentionShape,
) -> AttentionGradients {
    let AttentionOutputs { out, .. } = forward(inputs, shape);
    assert_eq!(dout.len(), out.len());
    let zeros = vec![0.0; out.len()];
    let mut gradients = AttentionGradients { dq: zeros.clone(), dk: zeros.clone(), dv: zeros };
    let scale = f64::from(shape.scale());
    for sample in 0..shape.sequences().samples() {
        for head in 0..shape.heads() {
            let head = Head { inputs, shape, sample, head };
            for position in 0..shape.sequences().positions() {
                let scores = head.scores(position);
                let sum = log_sum_exp(&scores);
                let at = head.at(position);
                let mean = dot(&dout[at.clone()], &out[at.clone()]);
                for (key, score) in head.seen(position).zip(scores) {
                    let probability = (score - sum).exp();
                    let (key, shared) = (head.at(key), head.key_at(key));
                    add_scaled(&mut gradients.dv[key.clone()], probability, &dout[at.clone()]);
                    let dv = dot(&dout[at.clone()], &inputs.v[shared.clone()]);
                    let ds = scale * probability * (dv - mean);
                    add_scaled(&mut gradients.dq[at.clone()], ds, &inputs.k[shared]);
                    add_scaled(&mut gradients.dk[key], ds, &inputs.q[at.clone()]);
                }
            }
        }
    }
    gradients
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::super::central_difference::{check_gradient, dot, wave};
    use super::*;
    use crate::shape::SequenceShape;

    #[test]
    fn backward_agrees_with_central_differences() {
        let (samples, positions) = (2, 5);
        let sequences = SequenceShape::new(samples, positions).unwrap();
        let slopes = [0.5, 0.125];
        let starts = [0, 0, 2, 2, 2, 0, 1, 1, 1, 4];
        for (heads, width, scale, window) in
            [(1, 1, 1.0, None), (2, 3, 0.7, None), (2, 2, -0.9, Some(3)), (1, 4, 0.5, Some(1))]
        {
            let window = window.and_then(NonZeroUsize::new);
            let shape = AttentionShape::new(sequences, heads, width, scale, window).unwrap();
            for (slopes, starts) in [
                (None, None),
                (Some(&slopes[..heads]), None),
                (None, Some(&starts[..])),
                (Some(&slopes[..heads]), Some(&starts[..])),
            ] {
                let elements = sequences.rows() * shape.width();
                let point: [Vec<f64>; 3] = std::array::from_fn(|i| wave(i as f64, elements));
                let dout = wave(9.0, elements);
                let view = |[q, k, v]: [&[f64]; 3]| forward_of(q, k, v, slopes, starts, shape).out;
                let [q, k, v] = &point;
                let inputs = AttentionInputs { q, k, v, slopes, starts };
                let gradients = backward(&dout, &inputs, shape);
                let of_inputs =
                    [("dq", &gradients.dq), ("dk", &gradients.dk), ("dv", &gradients.dv)];
                for (input, (name, gradient)) in of_inputs.into_iter().enumerate() {
                    check_gradient(name, &point[input], gradient, |moved| {
                        let mut all = [q.as_slice(), k, v];
                        all[input] = moved;
                        dot(&view(all), &dout)
                    });
                }
            }
        }
    }

    fn forward_of(
        q: &[f64],
        k: &[f64],
        v: &[f64],
        slopes: Option<&[f64]>,
        starts: Option<&[u32]>,
        shape: AttentionShape,
    ) -> AttentionOutputs {
        forward(&AttentionInputs { q, k, v, slopes, starts }, shape)
    }

    /// Two positions of one head: equal scores, then scores apart by a bias.
    #[test]
    fn attention_by_hand() {
        let sequences = SequenceShape::new(1, 2).unwrap();
        let shape = AttentionShape::new(sequences, 1, 1, 1.0, None).unwrap();
        let plain = forward_of(&[1.0, 0.0], &[3.0, 5.0], &[2.0, 4.0], None, None, shape);
        assert_eq!(plain.out[0], 2.0);
        assert!((plain.out[1] - 3.0).abs() < 1e-15);
        assert!((plain.log_sum_exp[0] - 3.0).abs() < 1e-15);
        assert!((plain.log_sum_exp[1] - 2.0_f64.ln()).abs() < 1e-15);

        // exp(-ln 3) = 1 / 3: the older value weighs a quarter.
        let slopes = [3.0_f64.ln()];
        let biased = forward_of(&[1.0, 0.0], &[3.0, 5.0], &[2.0, 4.0], Some(&slopes), None, shape);
        assert!((biased.out[1] - (0.25 * 2.0 + 0.75 * 4.0)).abs() < 1e-15);
    }

    #[test]
    fn windows_and_documents_hide_what_is_older() {
        let sequences = SequenceShape::new(1, 4).unwrap();
        let ones = [1.0; 4];
        let v = [1.0, 10.0, 100.0, 1000.0];
        let out = |window, starts| {
            let window = NonZeroUsize::new(window);
            let shape = AttentionShape::new(sequences, 1, 1, 1.0, window).unwrap();
            forward_of(&ones, &ones, &v, None, starts, shape).out
        };
        let assert_means = |found: Vec<f64>, expected: [f64; 4]| {
            for (found, expected) in found.into_iter().zip(expected) {
                assert!((found - expected).abs() < 1e-12 * expected, "{found} {expected}");
            }
        };
        assert_means(out(0, None), [1.0, 5.5, 37.0, 277.75]);
        assert_means(out(1, None), v);
        assert_means(out(2, None), [1.0, 5.5, 55.0, 550.0]);
        assert_means(out(0, Some(&[0, 0, 2, 2])), [1.0, 5.5, 100.0, 550.0]);
        assert_means(out(2, Some(&[0, 1, 1, 1])), [1.0, 10.0, 55.0, 550.0]);
    }
}
