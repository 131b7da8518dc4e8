//! Causal convolution and SiLU over whole sequences.

use tidemill_kernels::Backend;
use tidemill_kernels::reference::causal_conv1d::{backward, forward};
use tidemill_kernels::shape::{ConvShape, SequenceShape};

use super::agreement::{
    Transcript, assert_close_beside, assert_each_close, assert_same_bits, tolerance,
};
use super::device::{Device, Layout, Placed};
use super::inputs::{Inputs, wide};

/// The inputs of a convolution, forward and backward.
#[derive(Clone)]
struct Case {
    x: Vec<f32>,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    dout: Vec<f32>,
}

impl Case {
    fn new(inputs: &mut Inputs, shape: ConvShape, magnitude: f32) -> Self {
        let inner = shape.sequences.rows() * shape.channels;
        Self {
            x: inputs.uniform(inner, -magnitude, magnitude),
            weight: inputs.uniform(shape.channels * shape.width, -1.0, 1.0),
            bias: (inputs.pick(3) > 0).then(|| inputs.uniform(shape.channels, -1.0, 1.0)),
            dout: inputs.uniform(inner, -1.0, 1.0),
        }
    }

    /// The case of some samples alone.
    fn samples(&self, samples: std::ops::Range<usize>, shape: ConvShape) -> (Self, ConvShape) {
        let elements = shape.sequences.positions * shape.channels;
        let inside = samples.start * elements..samples.end * elements;
        let case = Self {
            x: self.x[inside.clone()].to_vec(),
            dout: self.dout[inside].to_vec(),
            ..self.clone()
        };
        let sequences = SequenceShape { samples: samples.len(), ..shape.sequences };
        (case, ConvShape { sequences, ..shape })
    }
}

/// The results of a convolution, forward and backward.
struct Results {
    out: Vec<f32>,
    dx: Vec<f32>,
    dweight: Vec<f32>,
    dbias: Option<Vec<f32>>,
}

/// `x` and `dx` lie in the left halves of `xz[b t, 2 e]` and its gradient, as in a Mamba block.
fn run<B: Backend<Activation = f32>>(
    device: &mut Device<'_, B>,
    label: &str,
    case: &Case,
    shape: ConvShape,
) -> Results {
    let (rows, channels) = (shape.sequences.rows(), shape.channels);
    let grains = shape.grains().grains();
    let half = Layout::columns_of(rows, 2 * channels, 0, channels);
    let packed = Layout::packed(rows, channels);
    let x = Placed::new(device, half, &case.x);
    let weight = Placed::new(device, Layout::range(channels * shape.width), &case.weight);
    let bias = case.bias.as_ref().map(|bias| Placed::new(device, Layout::range(channels), bias));
    let bias = || bias.as_ref().map(Placed::slice);
    let dout = Placed::new(device, packed, &case.dout);
    let mut out = Placed::poisoned(device, packed);
    let mut dx = Placed::poisoned(device, half);
    let mut dweight = Placed::poisoned(device, Layout::range(grains * channels * shape.width));
    let mut dbias = bias().map(|_| Placed::poisoned(device, Layout::range(grains * channels)));
    let (backend, stream) = (device.backend, &mut device.stream);
    backend
        .causal_conv1d_silu_forward(
            stream,
            out.matrix_mut(),
            x.matrix(),
            weight.slice(),
            bias(),
            shape,
        )
        .expect(label);
    backend
        .causal_conv1d_silu_backward(
            stream,
            dx.matrix_mut(),
            dweight.slice_mut(),
            dbias.as_mut().map(Placed::slice_mut),
            dout.matrix(),
            x.matrix(),
            weight.slice(),
            bias(),
            shape,
        )
        .expect(label);
    Results {
        out: out.read(device),
        dx: dx.read(device),
        dweight: dweight.read(device),
        dbias: dbias.map(|dbias| dbias.read(device)),
    }
}

fn check_case<B: Backend<Activation = f32>>(
    device: &mut Device<'_, B>,
    transcript: &mut Transcript,
    seed: u64,
    shape: ConvShape,
) {
    let mut inputs = Inputs::new(seed);
    let magnitude = [1.0, 1.0, 20.0][inputs.pick(3)];
    let case = Case::new(&mut inputs, shape, magnitude);
    let label = format!("conv {shape:?} magnitude {magnitude} seed {seed}");
    let results = run(device, &label, &case, shape);

    let (x, weight, dout) = (wide(&case.x), wide(&case.weight), wide(&case.dout));
    let bias = case.bias.as_deref().map(wide);
    let out = forward(&x, &weight, bias.as_deref(), shape);
    let gradients = backward(&dout, &x, &weight, bias.as_deref(), shape);
    let over_taps = tolerance::<f32>(shape.width);
    let over_grain = tolerance::<f32>(shape.grains().rows_per_grain());
    // SiLU is applied to a sum of terms as large as x: their roundings show in every result.
    let terms = f64::from(magnitude);
    for (what, found, expected, tolerance) in [
        ("out", &results.out, &out, over_taps),
        ("dx", &results.dx, &gradients.dx, over_taps),
        ("dweight", &results.dweight, &gradients.dweight, over_grain),
    ] {
        let label = format!("{label} {what}");
        assert_close_beside(&label, found, expected, tolerance, terms);
        transcript.record(&label, found);
    }
    if let Some(dbias) = &results.dbias {
        let label = format!("{label} dbias");
        assert_close_beside(&label, dbias, &gradients.dbias, over_grain, terms);
        transcript.record(&label, dbias);
    }
}

/// Convolutions of many sizes agree with the definition, forward and backward.
pub fn agrees<B: Backend<Activation = f32>>(backend: &B) -> Transcript {
    let mut device = Device::new(backend);
    let mut transcript = Transcript::default();
    let mut seed = 0;
    for positions in [1, 2, 7, 8, 9, 127, 128, 129] {
        for channels in [1, 3, 16, 17, 40] {
            for width in [1, 2, 4, 5] {
                for samples in [1, 2, 3] {
                    seed += 1;
                    let sequences = SequenceShape::new(samples, positions).unwrap();
                    let samples_per_grain = 1 + seed as usize % 2;
                    let shape =
                        ConvShape::new(sequences, samples_per_grain, channels, width).unwrap();
                    check_case(&mut device, &mut transcript, seed, shape);
                }
            }
        }
    }
    transcript
}

/// With one tap of weight 1 the convolution is SiLU itself: every element is exact to its own size,
/// in both tails.
pub fn silu_agrees<B: Backend<Activation = f32>>(backend: &B) -> Transcript {
    let mut device = Device::new(backend);
    let mut transcript = Transcript::default();
    let positions = 241;
    let sequences = SequenceShape::new(1, positions).unwrap();
    let shape = ConvShape::new(sequences, 1, 1, 1).unwrap();
    let case = Case {
        x: (0..positions).map(|i| (i as f32 - 120.0) * 0.28).collect(),
        weight: vec![1.0],
        bias: None,
        dout: vec![1.0; positions],
    };
    let results = run(&mut device, "silu", &case, shape);
    let x = wide(&case.x);
    let out = forward(&x, &[1.0], None, shape);
    let dx = backward(&wide(&case.dout), &x, &[1.0], None, shape).dx;
    assert_each_close("silu", &results.out, &out, tolerance::<f32>(1));
    assert_each_close("silu'", &results.dx, &dx, tolerance::<f32>(1));
    transcript.record("silu", &results.out);
    transcript.record("silu'", &results.dx);
    transcript
}

/// A sample's bits do not depend on the samples beside it, nor a grain's on the other grains.
pub fn samples_are_independent<B: Backend<Activation = f32>>(backend: &B) -> Transcript {
    let mut device = Device::new(backend);
    let mut transcript = Transcript::default();
    let mut seed = 0;
    for (positions, channels, width) in [(1, 1, 4), (9, 17, 4), (129, 40, 2), (130, 33, 5)] {
        for samples_per_grain in [1, 2] {
            seed += 1;
            let samples = 3;
            let sequences = SequenceShape::new(samples, positions).unwrap();
            let shape = ConvShape::new(sequences, samples_per_grain, channels, width).unwrap();
            let label = format!("conv {shape:?} seed {seed}");
            let case = Case::new(&mut Inputs::new(seed), shape, 1.0);
            let whole = run(&mut device, &label, &case, shape);
            transcript.record(&label, &whole.out);
            transcript.record(&label, &whole.dweight);
            let elements = positions * channels;
            for sample in 0..samples {
                let (alone, alone_shape) = case.samples(sample..sample + 1, shape);
                let part = run(&mut device, &label, &alone, alone_shape);
                let label = format!("{label} sample {sample}");
                let inside = sample * elements..(sample + 1) * elements;
                assert_same_bits(&label, &part.out, &whole.out[inside.clone()]);
                assert_same_bits(&label, &part.dx, &whole.dx[inside]);
            }
            for grain in 0..shape.grains().grains() {
                let first = grain * samples_per_grain;
                let range = first..(first + samples_per_grain).min(samples);
                let (alone, alone_shape) = case.samples(range, shape);
                let part = run(&mut device, &label, &alone, alone_shape);
                let label = format!("{label} grain {grain}");
                let taps = channels * width;
                let dweight = &whole.dweight[grain * taps..(grain + 1) * taps];
                assert_same_bits(&label, &part.dweight, dweight);
                if let (Some(part), Some(whole)) = (&part.dbias, &whole.dbias) {
                    let dbias = &whole[grain * channels..(grain + 1) * channels];
                    assert_same_bits(&label, part, dbias);
                }
            }
        }
    }
    transcript
}
