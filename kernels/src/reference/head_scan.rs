//! The scan of heads with softplus, skip and gate: the recurrence of Mamba-2 (Dao and Gu, 2024, section 7; `ssd_minimal.py` and
//! `selective_state_update` of the authors' code).
//!
//! The backward holds every state of a head, `h[t, p, n]`, which no kernel would do.

use super::{sigmoid, silu, silu_derivative, softplus};
use crate::shape::HeadScanShape;

/// Inputs of the scan, row-major and contiguous.
#[derive(Clone, Copy, Debug)]
pub struct HeadScanInputs<'a> {
    /// `delta_raw[b t, h]`, before its bias and softplus.
    pub delta_raw: &'a [f64],
    /// `delta_bias[h]`.
    pub delta_bias: &'a [f64],
    /// `x[b t, h p]`.
    pub x: &'a [f64],
    /// `bc[b t, 2 g n]`: B of every group, then C of every group.
    pub bc: &'a [f64],
    /// `z[b t, h p]`: the gate, before SiLU.
    pub z: &'a [f64],
    /// `a_log[h]`.
    pub a_log: &'a [f64],
    /// `d[h]`: the skip.
    pub d: &'a [f64],
    /// The least and the most that delta can be.
    pub delta_limits: [f64; 2],
    /// `starts[b t]`: the position in its sample of the first token of the row's document.
    pub starts: Option<&'a [u32]>,
}

/// Gradients of the scan, one for each input.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadScanGradients {
    /// `ddelta_raw[b t, h]`.
    pub ddelta_raw: Vec<f64>,
    /// `dx[b t, h p]`.
    pub dx: Vec<f64>,
    /// `dbc[b t, 2 g n]`.
    pub dbc: Vec<f64>,
    /// `dz[b t, h p]`.
    pub dz: Vec<f64>,
    /// `da_log[grains, h]`.
    pub da_log: Vec<f64>,
    /// `dd[grains, h]`.
    pub dd: Vec<f64>,
    /// `ddelta_bias[grains, h]`.
    pub ddelta_bias: Vec<f64>,
    /// Sums of the squares of the terms of `da_log`, `dd` and `ddelta_bias`: where terms cancel, their sum is no more exact than
    /// the root of these.
    pub squares: [Vec<f64>; 3],
}

/// The coefficients of one head at one position, and where its elements begin.
struct Step {
    /// First of the head's p elements of x, z and out.
    x: usize,
    /// First of the n elements of its group's B, and of its C.
    b: usize,
    c: usize,
    delta: f64,
    /// The derivative of delta by delta_raw.
    slope: f64,
    decay: f64,
    begins: bool,
}

impl HeadScanInputs<'_> {
    fn check(&self, shape: HeadScanShape) {
        let (rows, heads) = (shape.sequences().rows(), shape.heads());
        assert_eq!(self.delta_raw.len(), rows * heads);
        assert_eq!((self.x.len(), self.z.len()), (rows * shape.width(), rows * shape.width()));
        assert_eq!(self.bc.len(), rows * 2 * shape.groups() * shape.states());
        assert_eq!((self.a_log.len(), self.d.len(), self.delta_bias.len()), (heads, heads, heads));
    }

    fn step(&self, sample: usize, position: usize, head: usize, shape: HeadScanShape) -> Step {
        let row = sample * shape.sequences().positions() + position;
        let (groups, states) = (shape.groups(), shape.states());
        let group = head / (shape.heads() / groups);
        let raw = self.delta_raw[row * shape.heads() + head] + self.delta_bias[head];
        let [least, most] = self.delta_limits;
        let free = softplus(raw);
        let delta = free.clamp(least, most);
        let b = (row * 2 * groups + group) * states;
        Step {
            x: (row * shape.heads() + head) * shape.head_width(),
            b,
            c: b + groups * states,
            delta,
            slope: if (least..=most).contains(&free) { sigmoid(raw) } else { 0.0 },
            decay: (-delta * self.a_log[head].exp()).exp(),
            begins: self.starts.is_some_and(|starts| starts[row] as usize == position),
        }
    }
}

/// One position of one head: moves `h[p, n]` on and answers `y[p]`, the output before the gate.
fn advance(
    h: &mut [f64],
    step: &Step,
    head: usize,
    inputs: &HeadScanInputs<'_>,
    shape: HeadScanShape,
) -> Vec<f64> {
    if step.begins {
        h.fill(0.0);
    }
    let mut y = Vec::new();
    for (channel, h) in h.chunks_mut(shape.states()).enumerate() {
        let x = inputs.x[step.x + channel];
        let mut sum = inputs.d[head] * x;
        for (state, h) in h.iter_mut().enumerate() {
            *h = step.decay * *h + step.delta * x * inputs.bc[step.b + state];
            sum += inputs.bc[step.c + state] * *h;
        }
        y.push(sum);
    }
    y
}

/// `out[b t, h p]`; in head h of group g, for each of its channels:
///
/// ```text
/// delta = clamp(softplus(delta_raw + delta_bias))
/// h_t   = exp(delta_t A) h_{t-1} + delta_t B_t x_t,      A = -exp(a_log), h_0 = 0 for every sample and document
/// y_t   = C_t . h_t + D x_t
/// out_t = y_t * silu(z_t)
/// ```
pub fn forward(inputs: &HeadScanInputs<'_>, shape: HeadScanShape) -> Vec<f64> {
    let samples = shape.sequences().samples();
    let mut state = vec![0.0; samples * shape.width() * shape.states()];
    piece(&mut state, inputs, shape)
}

/// [`forward`] of sequences that go on: `state[b, h p, n]` is moved on.
pub fn piece(state: &mut [f64], inputs: &HeadScanInputs<'_>, shape: HeadScanShape) -> Vec<f64> {
    inputs.check(shape);
    let mut out = vec![0.0; inputs.x.len()];
    let of_heads = state.chunks_mut(shape.head_width() * shape.states()).enumerate();
    for (at, h) in of_heads {
        let (sample, head) = (at / shape.heads(), at % shape.heads());
        for position in 0..shape.sequences().positions() {
            let step = inputs.step(sample, position, head, shape);
            let y = advance(h, &step, head, inputs, shape);
            for (channel, y) in y.into_iter().enumerate() {
                out[step.x + channel] = y * silu(inputs.z[step.x + channel]);
            }
        }
    }
    out
}

/// The gradients of [`forward`], from `dout[b t, h p]`. Backwards in time, with `dy_t = dout_t silu(z_t)` and the decay
/// `s_t = exp(delta_t A)`, sums being over the states n and the channels p of a head:
///
/// ```text
/// dh_t     = C_t dy_t + s_{t+1} dh_{t+1}
/// dC_t     = sum over p, and the heads of a group, of dy_t h_t
/// dB_t     = sum over p, and the heads of a group, of dh_t delta_t x_t
/// dx_t     = D dy_t + delta_t (dh_t . B_t)
/// ddelta_t = A s_t (dh_t . h_{t-1}) + sum over p of x_t (dh_t . B_t),     0 where delta is clamped
/// dA       = sum over t of delta_t s_t (dh_t . h_{t-1}),                  da_log = dA A
/// dD       = sum over t and p of dy_t x_t
/// dz_t     = dout_t y_t silu'(z_t)
/// ddelta_raw = ddelta sigmoid(delta_raw + delta_bias),                    ddelta_bias = its sum over t
/// ```
pub fn backward(
    dout: &[f64],
    inputs: &HeadScanInputs<'_>,
    shape: HeadScanShape,
) -> HeadScanGradients {
    inputs.check(shape);
    assert_eq!(dout.len(), inputs.x.len());
    let of_grains = shape.grains().grains() * shape.heads();
    let mut gradients = HeadScanGradients {
        ddelta_raw: vec![0.0; inputs.delta_raw.len()],
        dx: vec![0.0; dout.len()],
        dbc: vec![0.0; inputs.bc.len()],
        dz: vec![0.0; dout.len()],
        da_log: vec![0.0; of_grains],
        dd: vec![0.0; of_grains],
        ddelta_bias: vec![0.0; of_grains],
        squares: std::array::from_fn(|_| vec![0.0; of_grains]),
    };
    for sample in 0..shape.sequences().samples() {
        for head in 0..shape.heads() {
            backward_head(&mut gradients, [sample, head], dout, inputs, shape);
        }
    }
    gradients
}

/// [`backward`] of one head of one sample, added to `gradients`.
fn backward_head(
    gradients: &mut HeadScanGradients,
    [sample, head]: [usize; 2],
    dout: &[f64],
    inputs: &HeadScanInputs<'_>,
    shape: HeadScanShape,
) {
    let (positions, states) = (shape.sequences().positions(), shape.states());
    let grain_head = sample / shape.samples_per_grain() * shape.heads() + head;
    let elements = shape.head_width() * states;
    // The states before and after each position, and y.
    let mut walked = Vec::new();
    let mut now = vec![0.0; elements];
    for position in 0..positions {
        let step = inputs.step(sample, position, head, shape);
        let before = if step.begins { vec![0.0; elements] } else { now.clone() };
        let y = advance(&mut now, &step, head, inputs, shape);
        walked.push((before, now.clone(), y));
    }
    let a = -inputs.a_log[head].exp();
    // s_{t+1} dh_{t+1}: what reaches a state from its future.
    let mut from_future = vec![0.0; elements];
    for position in (0..positions).rev() {
        let step = inputs.step(sample, position, head, shape);
        let (before, after, y) = &walked[position];
        let mut ddelta = 0.0;
        for (channel, y) in y.iter().enumerate() {
            let at = step.x + channel;
            let (x, z) = (inputs.x[at], inputs.z[at]);
            let dy = dout[at] * silu(z);
            gradients.dz[at] = dout[at] * y * silu_derivative(z);
            gradients.dd[grain_head] += dy * x;
            gradients.squares[1][grain_head] += (dy * x).powi(2);
            gradients.dx[at] = inputs.d[head] * dy;
            for state in 0..states {
                let (b, c) = (step.b + state, step.c + state);
                let element = channel * states + state;
                let dh = inputs.bc[c] * dy + from_future[element];
                let of_decay = step.decay * dh * before[element];
                gradients.dbc[c] += dy * after[element];
                gradients.dbc[b] += dh * step.delta * x;
                gradients.dx[at] += step.delta * dh * inputs.bc[b];
                let (by_decay, by_input) = (a * of_decay, x * dh * inputs.bc[b]);
                ddelta += by_decay + by_input;
                gradients.da_log[grain_head] += step.delta * by_decay;
                gradients.squares[0][grain_head] += (step.delta * by_decay).powi(2);
                gradients.squares[2][grain_head] +=
                    step.slope.powi(2) * (by_decay.powi(2) + by_input.powi(2));
                from_future[element] = if step.begins { 0.0 } else { step.decay * dh };
            }
        }
        let row = sample * positions + position;
        gradients.ddelta_raw[row * shape.heads() + head] = ddelta * step.slope;
        gradients.ddelta_bias[grain_head] += ddelta * step.slope;
    }
}

#[cfg(test)]
mod tests {
    use super::super::central_difference::{check_gradient, dot, wave};
    use super::*;
    use crate::shape::{HeadScanSizes, SequenceShape};

    /// The inputs of a scan, owned: `[delta_raw, delta_bias, x, bc, z, a_log, d]`.
    type Owned = [Vec<f64>; 7];

    fn view(owned: &Owned) -> HeadScanInputs<'_> {
        let [delta_raw, delta_bias, x, bc, z, a_log, d] = owned;
        // A part of the steps is outside of the limits.
        let delta_limits = [0.4, 1.1];
        HeadScanInputs { delta_raw, delta_bias, x, bc, z, a_log, d, delta_limits, starts: None }
    }

    fn shape_of(samples: usize, positions: usize, [h, p, g, n]: [usize; 4]) -> HeadScanShape {
        let sequences = SequenceShape::new(samples, positions).unwrap();
        let sizes = HeadScanSizes { heads: h, head_width: p, groups: g, states: n };
        HeadScanShape::new(sequences, 2, sizes).unwrap()
    }

    fn inputs(shape: HeadScanShape) -> Owned {
        let (rows, heads) = (shape.sequences().rows(), shape.heads());
        let inner = rows * shape.width();
        let bc = rows * 2 * shape.groups() * shape.states();
        let sizes = [rows * heads, heads, inner, bc, inner, heads, heads];
        std::array::from_fn(|i| wave(i as f64, sizes[i]))
    }

    #[test]
    fn backward_agrees_with_central_differences() {
        for (positions, sizes) in [(1, [1, 1, 1, 1]), (5, [4, 2, 2, 3]), (3, [3, 1, 1, 5])] {
            let shape = shape_of(3, positions, sizes);
            let point = inputs(shape);
            let dout = wave(9.0, point[2].len());
            // Documents of one and two positions.
            let starts: Vec<u32> =
                (0..shape.sequences().rows()).map(|row| [0, 1, 1, 3, 3][row % positions]).collect();
            let starts = Some(starts.as_slice());
            let gradients = backward(&dout, &HeadScanInputs { starts, ..view(&point) }, shape);
            let with = |input: usize, values: &[f64]| {
                let mut moved = point.clone();
                moved[input] = values.to_vec();
                forward(&HeadScanInputs { starts, ..view(&moved) }, shape)
            };
            let of_rows = [
                ("ddelta_raw", 0, &gradients.ddelta_raw),
                ("dx", 2, &gradients.dx),
                ("dbc", 3, &gradients.dbc),
                ("dz", 4, &gradients.dz),
            ];
            for (name, input, gradient) in of_rows {
                check_gradient(name, &point[input], gradient, |x| dot(&with(input, x), &dout));
            }
            let of_parameters = [
                ("ddelta_bias", 1, &gradients.ddelta_bias),
                ("da_log", 5, &gradients.da_log),
                ("dd", 6, &gradients.dd),
            ];
            for (name, input, gradient) in of_parameters {
                for (grain, gradient) in gradient.chunks(point[input].len()).enumerate() {
                    let rows = shape.grains().range(grain);
                    let inside = rows.start * shape.width()..rows.end * shape.width();
                    check_gradient(name, &point[input], gradient, |x| {
                        dot(&with(input, x)[inside.clone()], &dout[inside.clone()])
                    });
                }
            }
        }
    }

    /// Steps on both sides of both limits, so that a gradient which ignores one of them is seen.
    #[test]
    fn some_steps_are_clamped() {
        let shape = shape_of(3, 5, [4, 2, 2, 3]);
        let point = inputs(shape);
        let free = point[0].iter().enumerate().map(|(i, raw)| softplus(raw + point[1][i % 4]));
        let free: Vec<f64> = free.collect();
        let [least, most] = view(&point).delta_limits;
        assert!(free.iter().any(|&free| free < least) && free.iter().any(|&free| free > most));
        assert!(free.iter().any(|free| (least..=most).contains(free)));
    }

    /// Two heads of one channel are two channels of the selective scan, one state each, where the step is not clamped.
    #[test]
    fn heads_of_one_channel_are_channels_of_the_selective_scan() {
        let shape = shape_of(2, 4, [3, 1, 1, 2]);
        let owned = inputs(shape);
        let [delta_raw, delta_bias, x, bc, z, a_log, d] = &owned;
        let free = HeadScanInputs { delta_limits: [0.0, f64::INFINITY], ..view(&owned) };
        let of_states: Vec<f64> = a_log.iter().flat_map(|&a_log| [a_log; 2]).collect();
        let scan = super::super::selective_scan::ScanInputs {
            delta_raw,
            delta_bias,
            x,
            bc,
            z,
            a_log: &of_states,
            d,
            starts: None,
        };
        let scan_shape = crate::shape::ScanShape::new(shape.sequences(), 2, 3, 2).unwrap();
        let expected = super::super::selective_scan::forward(&scan, scan_shape);
        for (out, expected) in forward(&free, shape).iter().zip(expected) {
            assert!((out - expected).abs() < 1e-12);
        }
    }
}
