//! Selective scan with softplus, skip and gate (Gu and Dao, 2023, algorithm 2; `selective_scan_ref`
//! of the authors' code).
//!
//! The backward holds every state of a channel, `h[t, n]`, unlike any kernel.

use super::{sigmoid, silu, silu_derivative, softplus};
use crate::shape::ScanShape;

/// Inputs of the scan, row-major and contiguous.
#[derive(Clone, Copy, Debug)]
pub struct ScanInputs<'a> {
    /// `delta_raw[b t, e]`, before its bias and softplus.
    pub delta_raw: &'a [f64],
    /// `delta_bias[e]`.
    pub delta_bias: &'a [f64],
    /// `x[b t, e]`.
    pub x: &'a [f64],
    /// `bc[b t, 2 n]`: B, then C.
    pub bc: &'a [f64],
    /// `z[b t, e]`: the gate, before SiLU.
    pub z: &'a [f64],
    /// `a_log[e, n]`.
    pub a_log: &'a [f64],
    /// `d[e]`: the skip.
    pub d: &'a [f64],
    /// `starts[b t]`: the position in its sample of the first token of the row's document.
    pub starts: Option<&'a [u32]>,
}

impl ScanInputs<'_> {
    /// Whether a document begins at `position` of the sample that begins with row `first`.
    fn begins(&self, first: usize, position: usize) -> bool {
        self.starts.is_some_and(|starts| starts[first + position] as usize == position)
    }
}

/// Gradients of the scan, one for each input.
#[derive(Clone, Debug, PartialEq)]
pub struct ScanGradients {
    /// `ddelta_raw[b t, e]`.
    pub ddelta_raw: Vec<f64>,
    /// `dx[b t, e]`.
    pub dx: Vec<f64>,
    /// `dbc[b t, 2 n]`.
    pub dbc: Vec<f64>,
    /// `dz[b t, e]`.
    pub dz: Vec<f64>,
    /// `da_log[grains, e, n]`.
    pub da_log: Vec<f64>,
    /// `dd[grains, e]`.
    pub dd: Vec<f64>,
    /// `ddelta_bias[grains, e]`.
    pub ddelta_bias: Vec<f64>,
}

fn check_lengths(inputs: &ScanInputs<'_>, shape: ScanShape) {
    let (sequences, channels, states) = (shape.sequences(), shape.channels(), shape.states());
    let inner = sequences.rows() * channels;
    assert_eq!((inputs.delta_raw.len(), inputs.x.len(), inputs.z.len()), (inner, inner, inner));
    assert_eq!(inputs.bc.len(), sequences.rows() * 2 * states);
    assert_eq!(inputs.a_log.len(), channels * states);
    assert_eq!((inputs.delta_bias.len(), inputs.d.len()), (channels, channels));
}

/// One position of one channel: moves `h[n]` on and returns y, the output before the gate.
fn advance(
    h: &mut [f64],
    row: usize,
    channel: usize,
    inputs: &ScanInputs<'_>,
    shape: ScanShape,
) -> f64 {
    let (channels, states) = (shape.channels(), shape.states());
    let at = row * channels + channel;
    let delta = softplus(inputs.delta_raw[at] + inputs.delta_bias[channel]);
    let (b, c) = inputs.bc[row * 2 * states..(row + 1) * 2 * states].split_at(states);
    let mut y = inputs.d[channel] * inputs.x[at];
    for state in 0..states {
        let a = -inputs.a_log[channel * states + state].exp();
        h[state] = (delta * a).exp() * h[state] + delta * b[state] * inputs.x[at];
        y += c[state] * h[state];
    }
    y
}

/// `out[b t, e]`:
///
/// ```text
/// delta = softplus(delta_raw + delta_bias)
/// h_t   = exp(delta_t A) h_{t-1} + delta_t B_t x_t,      A = -exp(a_log), h_0 = 0 for every sample and document
/// y_t   = C_t . h_t + D x_t
/// out_t = y_t * silu(z_t)
/// ```
pub fn forward(inputs: &ScanInputs<'_>, shape: ScanShape) -> Vec<f64> {
    check_lengths(inputs, shape);
    let (sequences, channels, states) = (shape.sequences(), shape.channels(), shape.states());
    let mut out = vec![0.0; inputs.x.len()];
    for sample in 0..sequences.samples() {
        for channel in 0..channels {
            let mut h = vec![0.0; states];
            let first = sample * sequences.positions();
            for position in 0..sequences.positions() {
                if inputs.begins(first, position) {
                    h.fill(0.0);
                }
                let row = first + position;
                let at = row * channels + channel;
                out[at] = advance(&mut h, row, channel, inputs, shape) * silu(inputs.z[at]);
            }
        }
    }
    out
}

/// The gradients of [`forward`], from `dout[b t, e]`. Backwards in time, with
/// `dy_t = dout_t silu(z_t)` and the decay `s_t = exp(delta_t A)`:
///
/// ```text
/// dh_t     = C_t dy_t + s_{t+1} dh_{t+1}
/// dC_t     = sum over channels of dy_t h_t
/// dB_t     = sum over channels of dh_t delta_t x_t
/// dx_t     = D dy_t + delta_t (dh_t . B_t)
/// ddelta_t = dh_t . (A s_t h_{t-1} + B_t x_t)
/// dA       = sum over t of dh_t delta_t s_t h_{t-1},     da_log = dA A
/// dD       = sum over t of dy_t x_t
/// dz_t     = dout_t y_t silu'(z_t)
/// ddelta_raw = ddelta sigmoid(delta_raw + delta_bias),   ddelta_bias = its sum over t
/// ```
pub fn backward(dout: &[f64], inputs: &ScanInputs<'_>, shape: ScanShape) -> ScanGradients {
    check_lengths(inputs, shape);
    assert_eq!(dout.len(), inputs.x.len());
    let (sequences, channels, states) = (shape.sequences(), shape.channels(), shape.states());
    let grains = shape.grains().grains();
    let mut gradients = ScanGradients {
        ddelta_raw: vec![0.0; dout.len()],
        dx: vec![0.0; dout.len()],
        dbc: vec![0.0; inputs.bc.len()],
        dz: vec![0.0; dout.len()],
        da_log: vec![0.0; grains * channels * states],
        dd: vec![0.0; grains * channels],
        ddelta_bias: vec![0.0; grains * channels],
    };
    for sample in 0..sequences.samples() {
        for channel in 0..channels {
            backward_channel(&mut gradients, sample, channel, dout, inputs, shape);
        }
    }
    gradients
}

/// [`backward`] of one channel of one sample, added to `gradients`.
fn backward_channel(
    gradients: &mut ScanGradients,
    sample: usize,
    channel: usize,
    dout: &[f64],
    inputs: &ScanInputs<'_>,
    shape: ScanShape,
) {
    let (sequences, channels, states) = (shape.sequences(), shape.channels(), shape.states());
    let grain_channel = sample / shape.samples_per_grain() * channels + channel;
    let first = sample * sequences.positions();
    // The states before and after each position.
    let mut h = Vec::new();
    let mut y = Vec::new();
    let mut now = vec![0.0; states];
    for position in 0..sequences.positions() {
        if inputs.begins(first, position) {
            now.fill(0.0);
        }
        let before = now.clone();
        y.push(advance(&mut now, first + position, channel, inputs, shape));
        h.push([before, now.clone()]);
    }
    // s_{t+1} dh_{t+1}: the part of a state's gradient that comes from later positions.
    let mut from_future = vec![0.0; states];
    for position in (0..sequences.positions()).rev() {
        let row = first + position;
        let at = row * channels + channel;
        let (x, z) = (inputs.x[at], inputs.z[at]);
        let raw = inputs.delta_raw[at] + inputs.delta_bias[channel];
        let delta = softplus(raw);
        let dy = dout[at] * silu(z);
        gradients.dz[at] = dout[at] * y[position] * silu_derivative(z);
        gradients.dd[grain_channel] += dy * x;
        let mut dx = inputs.d[channel] * dy;
        let mut ddelta = 0.0;
        for state in 0..states {
            let (b_at, c_at) = (row * 2 * states + state, row * 2 * states + states + state);
            let a = -inputs.a_log[channel * states + state].exp();
            let decay = (delta * a).exp();
            let [before, after] = [h[position][0][state], h[position][1][state]];
            let dh = inputs.bc[c_at] * dy + from_future[state];
            gradients.dbc[c_at] += dy * after;
            gradients.dbc[b_at] += dh * delta * x;
            dx += dh * delta * inputs.bc[b_at];
            ddelta += dh * (a * decay * before + inputs.bc[b_at] * x);
            gradients.da_log[grain_channel * states + state] += dh * delta * decay * before * a;
            from_future[state] = decay * dh;
        }
        if inputs.begins(first, position) {
            from_future.fill(0.0);
        }
        gradients.dx[at] = dx;
        gradients.ddelta_raw[at] = ddelta * sigmoid(raw);
        gradients.ddelta_bias[grain_channel] += ddelta * sigmoid(raw);
    }
}

/// One position of [`forward`] for each sample: `out[b, e]`; `shape.sequences.positions` is 1 and
/// `state[b, e, n]` is moved on.
pub fn step(state: &mut [f64], inputs: &ScanInputs<'_>, shape: ScanShape) -> Vec<f64> {
    check_lengths(inputs, shape);
    assert_eq!(shape.sequences().positions(), 1);
    assert_eq!(state.len(), inputs.x.len() * shape.states());
    let mut out = Vec::new();
    for (at, h) in state.chunks_mut(shape.states()).enumerate() {
        let (sample, channel) = (at / shape.channels(), at % shape.channels());
        out.push(advance(h, sample, channel, inputs, shape) * silu(inputs.z[at]));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::central_difference::{check_gradient, dot, wave};
    use super::*;
    use crate::shape::SequenceShape;

    /// The inputs of a scan, owned: `[delta_raw, delta_bias, x, bc, z, a_log, d]`.
    type Owned = [Vec<f64>; 7];

    fn view(owned: &Owned) -> ScanInputs<'_> {
        let [delta_raw, delta_bias, x, bc, z, a_log, d] = owned;
        ScanInputs { delta_raw, delta_bias, x, bc, z, a_log, d, starts: None }
    }

    fn scan_shape(samples: usize, positions: usize, channels: usize, states: usize) -> ScanShape {
        let sequences = SequenceShape::new(samples, positions).unwrap();
        ScanShape::new(sequences, 2, channels, states).unwrap()
    }

    fn inputs(shape: ScanShape) -> Owned {
        let (sequences, channels, states) = (shape.sequences(), shape.channels(), shape.states());
        let inner = sequences.rows() * channels;
        let sizes = [
            inner,
            channels,
            inner,
            sequences.rows() * 2 * states,
            inner,
            channels * states,
            channels,
        ];
        std::array::from_fn(|i| wave(i as f64, sizes[i]))
    }

    #[test]
    fn backward_agrees_with_central_differences() {
        for (positions, channels, states) in [(1, 1, 1), (5, 3, 2), (3, 2, 5)] {
            let shape = scan_shape(3, positions, channels, states);
            let point = inputs(shape);
            let dout = wave(9.0, point[2].len());
            // Documents of one and two positions.
            let starts: Vec<u32> =
                (0..shape.sequences().rows()).map(|row| [0, 1, 1, 3, 3][row % positions]).collect();
            let starts = Some(starts.as_slice());
            let gradients = backward(&dout, &ScanInputs { starts, ..view(&point) }, shape);
            let with = |input: usize, values: &[f64]| {
                let mut moved = point.clone();
                moved[input] = values.to_vec();
                forward(&ScanInputs { starts, ..view(&moved) }, shape)
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
                    let inside = rows.start * channels..rows.end * channels;
                    check_gradient(name, &point[input], gradient, |x| {
                        dot(&with(input, x)[inside.clone()], &dout[inside.clone()])
                    });
                }
            }
        }
    }

    #[test]
    fn steps_agree_with_the_whole_sequence() {
        let (positions, channels, states) = (7, 3, 2);
        let whole = scan_shape(1, positions, channels, states);
        let one = scan_shape(1, 1, channels, states);
        let owned = inputs(whole);
        let all = view(&owned);
        let out = forward(&all, whole);
        let mut state = vec![0.0; channels * states];
        for row in 0..positions {
            let inner = row * channels..(row + 1) * channels;
            let inputs = ScanInputs {
                delta_raw: &all.delta_raw[inner.clone()],
                x: &all.x[inner.clone()],
                bc: &all.bc[row * 2 * states..(row + 1) * 2 * states],
                z: &all.z[inner.clone()],
                ..all
            };
            assert_eq!(step(&mut state, &inputs, one), out[inner]);
        }
    }

    /// With a decay of nothing, two positions of one state add up.
    #[test]
    fn a_scan_by_hand() {
        let shape = scan_shape(1, 2, 1, 1);
        let inputs = ScanInputs {
            delta_raw: &[0.0, 0.0],
            delta_bias: &[0.0],
            x: &[1.0, 10.0],
            bc: &[2.0, 1.0, 3.0, 5.0],
            z: &[1.0, 1.0],
            a_log: &[f64::NEG_INFINITY],
            d: &[7.0],
            starts: None,
        };
        let delta = 2.0_f64.ln();
        let expected =
            [7.0 + 2.0 * delta, 70.0 + 5.0 * (2.0 + 30.0) * delta].map(|y| y * silu(1.0));
        for (out, expected) in forward(&inputs, shape).iter().zip(expected) {
            assert!((out - expected).abs() < 1e-12 * expected);
        }
        let of_documents = ScanInputs { starts: Some(&[0, 1]), ..inputs };
        let expected = (70.0 + 5.0 * 30.0 * delta) * silu(1.0);
        assert!((forward(&of_documents, shape)[1] - expected).abs() < 1e-12 * expected);
    }
}
