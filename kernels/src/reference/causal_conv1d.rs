//! Causal depthwise convolution and SiLU (the short convolution of Gu and Dao, 2023, section 3.4).

use super::{silu, silu_derivative};
use crate::shape::ConvShape;

/// The gradients of the convolution.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvGradients {
    /// `dx[b t, e]`.
    pub dx: Vec<f64>,
    /// `dweight[grains, e, k]`.
    pub dweight: Vec<f64>,
    /// `dbias[grains, e]`, whether or not there is a bias.
    pub dbias: Vec<f64>,
}

/// The inputs of the convolution, row-major and contiguous.
#[derive(Clone, Copy, Debug)]
pub struct ConvInputs<'a> {
    /// `x[b t, e]`.
    pub x: &'a [f64],
    /// `weight[e, k]`.
    pub weight: &'a [f64],
    /// `bias[e]`.
    pub bias: Option<&'a [f64]>,
    /// `starts[b t]`: the position in its sample of the first token of the row's document.
    pub starts: Option<&'a [u32]>,
}

/// The row that tap `tap` reads at `position` of the sample that begins with row `first`, if it lies inside the document.
fn source(
    first: usize,
    position: usize,
    tap: usize,
    inputs: &ConvInputs<'_>,
    shape: ConvShape,
) -> Option<usize> {
    let source = (position + tap).checked_sub(shape.width() - 1)?;
    let start = inputs.starts.map_or(0, |starts| starts[first + position] as usize);
    (source >= start).then_some(first + source)
}

/// The convolution before SiLU, `[b t, e]`.
fn convolved(inputs: &ConvInputs<'_>, shape: ConvShape) -> Vec<f64> {
    let ConvInputs { x, weight, bias, .. } = *inputs;
    let (sequences, channels, width) = (shape.sequences(), shape.channels(), shape.width());
    assert_eq!((x.len(), weight.len()), (sequences.rows() * channels, channels * width));
    let mut out = vec![0.0; x.len()];
    for sample in 0..sequences.samples() {
        let first = sample * sequences.positions();
        for position in 0..sequences.positions() {
            for channel in 0..channels {
                let mut sum = bias.map_or(0.0, |bias| bias[channel]);
                for tap in 0..width {
                    if let Some(source) = source(first, position, tap, inputs, shape) {
                        sum += weight[channel * width + tap] * x[source * channels + channel];
                    }
                }
                out[(first + position) * channels + channel] = sum;
            }
        }
    }
    out
}

/// `out[b t, e] = silu(bias[e] + sum over j of weight[e, j] x[row - (k - 1) + j])`, rows before a
/// sample's first, or a document's, being zero.
pub fn forward(inputs: &ConvInputs<'_>, shape: ConvShape) -> Vec<f64> {
    convolved(inputs, shape).into_iter().map(silu).collect()
}

/// The gradients of [`forward`], from `dout[b t, e]`.
pub fn backward(dout: &[f64], inputs: &ConvInputs<'_>, shape: ConvShape) -> ConvGradients {
    let ConvInputs { x, weight, .. } = *inputs;
    let (sequences, channels, width) = (shape.sequences(), shape.channels(), shape.width());
    assert_eq!(dout.len(), x.len());
    let convolved = convolved(inputs, shape);
    let grains = shape.grains().grains();
    let mut dx = vec![0.0; x.len()];
    let mut dweight = vec![0.0; grains * channels * width];
    let mut dbias = vec![0.0; grains * channels];
    for sample in 0..sequences.samples() {
        let grain = sample / shape.samples_per_grain();
        let first = sample * sequences.positions();
        for position in 0..sequences.positions() {
            for channel in 0..channels {
                let out = (first + position) * channels + channel;
                let gradient = dout[out] * silu_derivative(convolved[out]);
                dbias[grain * channels + channel] += gradient;
                for tap in 0..width {
                    if let Some(source) = source(first, position, tap, inputs, shape) {
                        let input = source * channels + channel;
                        dx[input] += gradient * weight[channel * width + tap];
                        dweight[(grain * channels + channel) * width + tap] += gradient * x[input];
                    }
                }
            }
        }
    }
    ConvGradients { dx, dweight, dbias }
}

/// One position of [`forward`] for each sample: `out[b, e]` from `x[b, e]`; `state[b, k - 1, e]`
/// holds the inputs before it, oldest first, and is moved on.
pub fn step(
    state: &mut [f64],
    x: &[f64],
    weight: &[f64],
    bias: Option<&[f64]>,
    shape: ConvShape,
) -> Vec<f64> {
    let (channels, width) = (shape.channels(), shape.width());
    assert_eq!(shape.sequences().positions(), 1);
    assert_eq!(state.len(), x.len() * (width - 1));
    let mut out = Vec::new();
    for (i, &newest) in x.iter().enumerate() {
        let (sample, channel) = (i / channels, i % channels);
        let place = |tap| (sample * (width - 1) + tap) * channels + channel;
        let mut window: Vec<f64> = (0..width - 1).map(|tap| state[place(tap)]).collect();
        window.push(newest);
        for (tap, &input) in window[1..].iter().enumerate() {
            state[place(tap)] = input;
        }
        let taps = &weight[channel * width..(channel + 1) * width];
        let products = taps.iter().zip(&window).map(|(weight, x)| weight * x);
        out.push(silu(bias.map_or(0.0, |bias| bias[channel]) + products.sum::<f64>()));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::central_difference::{check_gradient, dot, wave};
    use super::*;
    use crate::shape::SequenceShape;

    fn shape(samples: usize, positions: usize, channels: usize, width: usize) -> ConvShape {
        let sequences = SequenceShape::new(samples, positions).unwrap();
        ConvShape::new(sequences, 2, channels, width).unwrap()
    }

    /// Documents of one sample begin at `starts`; the others are one document each.
    fn starts(shape: ConvShape, sample: usize, starts: &[u32]) -> Vec<u32> {
        let positions = shape.sequences().positions();
        let mut all = vec![0; shape.sequences().rows()];
        for (position, start) in all[sample * positions..][..positions].iter_mut().enumerate() {
            *start = starts
                .iter()
                .copied()
                .filter(|&start| start as usize <= position)
                .max()
                .unwrap_or(0);
        }
        all
    }

    #[test]
    fn backward_agrees_with_central_differences() {
        for (positions, channels, width) in [(1, 1, 1), (5, 3, 4), (2, 3, 5)] {
            let shape = shape(3, positions, channels, width);
            let rows = shape.sequences().rows();
            let (x, dout) = (wave(1.0, rows * channels), wave(4.0, rows * channels));
            let (weight, bias) = (wave(2.0, channels * width), wave(3.0, channels));
            let of_documents = starts(shape, 1, &[1, 2]);
            let of_documents = Some(of_documents.as_slice());
            for (bias, starts) in [(None, of_documents), (Some(bias.as_slice()), None)] {
                let inputs = ConvInputs { x: &x, weight: &weight, bias, starts };
                let gradients = backward(&dout, &inputs, shape);
                check_gradient("dx", &x, &gradients.dx, |x| {
                    dot(&forward(&ConvInputs { x, ..inputs }, shape), &dout)
                });
                for grain in 0..shape.grains().grains() {
                    let rows = shape.grains().range(grain);
                    let inside = rows.start * channels..rows.end * channels;
                    let dweight =
                        &gradients.dweight[grain * channels * width..][..channels * width];
                    check_gradient("dweight", &weight, dweight, |weight| {
                        let out = forward(&ConvInputs { weight, ..inputs }, shape);
                        dot(&out[inside.clone()], &dout[inside.clone()])
                    });
                    let Some(bias) = bias else { continue };
                    let dbias = &gradients.dbias[grain * channels..][..channels];
                    check_gradient("dbias", bias, dbias, |bias| {
                        let out = forward(&ConvInputs { bias: Some(bias), ..inputs }, shape);
                        dot(&out[inside.clone()], &dout[inside.clone()])
                    });
                }
            }
        }
    }

    #[test]
    fn steps_agree_with_the_whole_sequence() {
        for width in [1, 2, 4, 5] {
            let (samples, positions, channels) = (2, 7, 3);
            let whole = shape(samples, positions, channels, width);
            let one = shape(samples, 1, channels, width);
            let x = wave(1.0, samples * positions * channels);
            let (weight, bias) = (wave(2.0, channels * width), wave(3.0, channels));
            let inputs = ConvInputs { x: &x, weight: &weight, bias: Some(&bias), starts: None };
            let out = forward(&inputs, whole);
            let mut state = vec![0.0; samples * channels * (width - 1)];
            for position in 0..positions {
                let rows = |all: &[f64]| -> Vec<f64> {
                    let row = |sample| (sample * positions + position) * channels;
                    (0..samples).flat_map(|b| all[row(b)..row(b) + channels].to_vec()).collect()
                };
                let stepped = step(&mut state, &rows(&x), &weight, Some(&bias), one);
                for (stepped, out) in stepped.iter().zip(rows(&out)) {
                    assert!((stepped - out).abs() < 1e-14);
                }
            }
        }
    }

    #[test]
    fn the_last_tap_meets_the_present() {
        let shape = shape(1, 2, 1, 2);
        let (x, weight) = ([1.0, 10.0], [2.0, 3.0]);
        let inputs = ConvInputs { x: &x, weight: &weight, bias: None, starts: None };
        let out = forward(&inputs, shape);
        assert_eq!(out, [silu(3.0), silu(32.0)]);
        let starts = starts(shape, 0, &[1]);
        let out = forward(&ConvInputs { starts: Some(&starts), ..inputs }, shape);
        assert_eq!(out, [silu(3.0), silu(30.0)]);
    }
}
