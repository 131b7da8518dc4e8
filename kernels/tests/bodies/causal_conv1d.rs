//! Causal convolution and SiLU over whole sequences.

use tidemill_kernels::backend::{ConvGradients, ConvInputs};
use tidemill_kernels::reference::causal_conv1d::{self, backward, forward};
use tidemill_kernels::shape::{ConvShape, SequenceShape};
use tidemill_kernels::{Backend, Slice};

use super::agreement::{
    Transcript, assert_close_beside, assert_each_close, assert_same_bits, tolerance,
};
use super::arm::{Arm, Sizes};
use super::device::{Device, Layout, MARGINS, Placed};
use super::documents::{Documents, SAMPLES, poison, rows_of};
use super::inputs::{Inputs, from_tail_to_tail, wide};
use super::number::{Number, rounded};

/// The inputs of a convolution, forward and backward.
#[derive(Clone)]
struct Case {
    x: Vec<f32>,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    dout: Vec<f32>,
    starts: Option<Vec<u32>>,
}

impl Case {
    fn new<T: Number>(inputs: &mut Inputs, shape: ConvShape, magnitude: f32) -> Self {
        let inner = shape.sequences().rows() * shape.channels();
        Self {
            x: inputs.uniform_of::<T>(inner, -magnitude, magnitude),
            weight: inputs.uniform(shape.channels() * shape.width(), -1.0, 1.0),
            bias: (inputs.pick(3) > 0).then(|| inputs.uniform(shape.channels(), -1.0, 1.0)),
            dout: inputs.uniform_of::<T>(inner, -1.0, 1.0),
            starts: None,
        }
    }

    /// The case of some samples alone.
    fn samples(&self, samples: std::ops::Range<usize>, shape: ConvShape) -> (Self, ConvShape) {
        let elements = shape.sequences().positions() * shape.channels();
        let inside = samples.start * elements..samples.end * elements;
        let case = Self {
            x: self.x[inside.clone()].to_vec(),
            dout: self.dout[inside].to_vec(),
            starts: self.starts.as_ref().map(|starts| {
                let positions = shape.sequences().positions();
                starts[samples.start * positions..samples.end * positions].to_vec()
            }),
            ..self.clone()
        };
        let sequences = SequenceShape::new(samples.len(), shape.sequences().positions()).unwrap();
        let (grain, channels) = (shape.samples_per_grain(), shape.channels());
        (case, ConvShape::new(sequences, grain, channels, shape.width()).unwrap())
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
fn run<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    label: &str,
    case: &Case,
    shape: ConvShape,
) -> Results {
    let (rows, channels) = (shape.sequences().rows(), shape.channels());
    let grains = shape.grains().grains();
    let half = Layout::columns_of(rows, 2 * channels, 0, channels);
    let packed = Layout::packed(rows, channels);
    let x = Placed::new(device, half, &case.x);
    let weight = Placed::new(device, Layout::range(channels * shape.width()), &case.weight);
    let bias = case.bias.as_ref().map(|bias| Placed::new(device, Layout::range(channels), bias));
    let bias = || bias.as_ref().map(Placed::slice);
    let starts = case.starts.as_ref().map(|starts| device.upload(starts));
    let inputs = || ConvInputs {
        x: x.matrix(),
        weight: weight.slice(),
        bias: bias(),
        starts: starts.as_ref().map(Slice::all),
    };
    let dout = Placed::new(device, packed, &case.dout);
    let mut out = Placed::poisoned(device, packed);
    let mut dx = Placed::poisoned(device, half);
    let mut dweight = Placed::poisoned(device, Layout::range(grains * channels * shape.width()));
    let mut dbias = bias().map(|_| Placed::poisoned(device, Layout::range(grains * channels)));
    let (backend, stream) = (device.backend, &mut device.stream);
    backend.causal_conv1d_silu_forward(stream, out.matrix_mut(), inputs(), shape).expect(label);
    backend
        .causal_conv1d_silu_backward(
            stream,
            ConvGradients {
                dx: dx.matrix_mut(),
                dweight: dweight.slice_mut(),
                dbias: dbias.as_mut().map(Placed::slice_mut),
            },
            dout.matrix(),
            inputs(),
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

fn check_case<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    transcript: &mut Transcript,
    seed: u64,
    starts: Option<Vec<u32>>,
    shape: ConvShape,
) {
    let mut inputs = Inputs::new(seed);
    let magnitude = [1.0, 1.0, 20.0][inputs.pick(3)];
    let case = Case { starts, ..Case::new::<B::Activation>(&mut inputs, shape, magnitude) };
    let label = format!("conv {shape:?} magnitude {magnitude} seed {seed}");
    let results = run(device, &label, &case, shape);

    let (x, weight, dout) = (wide(&case.x), wide(&case.weight), wide(&case.dout));
    let bias = case.bias.as_deref().map(wide);
    let inputs = causal_conv1d::ConvInputs {
        x: &x,
        weight: &weight,
        bias: bias.as_deref(),
        starts: case.starts.as_deref(),
    };
    let out = forward(&inputs, shape);
    let gradients = backward(&dout, &inputs, shape);
    let over_taps = tolerance::<B::Activation>(shape.width());
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

/// Sizes of a convolution.
#[derive(Clone, Copy)]
struct Size {
    positions: usize,
    channels: usize,
    width: usize,
    samples: usize,
}

fn sizes(sizes: Sizes) -> Vec<Size> {
    let (mut full, mut small) = (Vec::new(), Vec::new());
    for positions in [1, 2, 7, 8, 9, 127, 128, 129] {
        for channels in [1, 3, 16, 17, 40] {
            for width in [1, 2, 4, 5] {
                for samples in [1, 2, 3] {
                    full.push(Size { positions, channels, width, samples });
                }
            }
        }
    }
    // Long sequences, and the maximal numbers of channels and taps.
    for (positions, channels, width) in
        [(192, 64, 4), (256, 96, 4), (1000, 8, 4), (1000, 3, 3), (33, 1032, 4), (31, 5, 16)]
    {
        full.push(Size { positions, channels, width, samples: 2 });
        small.push(Size { positions, channels, width, samples: 2 });
    }
    for positions in [1, 2, 9, 127, 128, 129] {
        for (channels, width) in [(1, 4), (17, 5), (40, 4), (16, 1), (3, 2)] {
            small.push(Size { positions, channels, width, samples: 1 + positions % 3 });
        }
    }
    sizes.choose(full, small)
}

/// Convolutions of many sizes agree with the definition, forward and backward.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for (seed, size) in sizes(device.sizes).into_iter().enumerate() {
        device.margin = MARGINS[seed % 2];
        let sequences = SequenceShape::new(size.samples, size.positions).unwrap();
        let shape = ConvShape::new(sequences, 1 + seed % 2, size.channels, size.width).unwrap();
        check_case(&mut device, &mut transcript, seed as u64, None, shape);
    }
    transcript
}

/// With one tap of weight 1 the convolution is SiLU itself: every element is exact to its own size,
/// in both tails.
pub fn silu_agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let positions = 241;
    let sequences = SequenceShape::new(1, positions).unwrap();
    let shape = ConvShape::new(sequences, 1, 1, 1).unwrap();
    let case = Case {
        x: rounded::<B::Activation>(&from_tail_to_tail(positions)),
        weight: vec![1.0],
        bias: None,
        dout: vec![1.0; positions],
        starts: None,
    };
    let results = run(&mut device, "silu", &case, shape);
    let x = wide(&case.x);
    let inputs = causal_conv1d::ConvInputs { x: &x, weight: &[1.0], bias: None, starts: None };
    let out = forward(&inputs, shape);
    let dx = backward(&wide(&case.dout), &inputs, shape).dx;
    assert_each_close("silu", &results.out, &out, tolerance::<B::Activation>(1));
    assert_each_close("silu'", &results.dx, &dx, tolerance::<B::Activation>(1));
    transcript.record("silu", &results.out);
    transcript.record("silu'", &results.dx);
    transcript
}

/// A sample's bits do not depend on the other samples, nor a grain's on the other grains.
pub fn samples_are_independent<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let mut seed = 0;
    for (positions, channels, width) in [(1, 1, 4), (9, 17, 4), (129, 40, 2), (130, 33, 5)] {
        for samples_per_grain in [1, 2] {
            seed += 1;
            let samples = 3;
            let sequences = SequenceShape::new(samples, positions).unwrap();
            let shape = ConvShape::new(sequences, samples_per_grain, channels, width).unwrap();
            let label = format!("conv {shape:?} seed {seed}");
            let case = Case::new::<B::Activation>(&mut Inputs::new(seed), shape, 1.0);
            device.margin = MARGINS[1];
            let unaligned = run(&mut device, &label, &case, shape);
            device.margin = MARGINS[0];
            let whole = run(&mut device, &label, &case, shape);
            assert_same_bits(&label, &unaligned.out, &whole.out);
            assert_same_bits(&label, &unaligned.dx, &whole.dx);
            assert_same_bits(&label, &unaligned.dweight, &whole.dweight);
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

/// Positions, channels and taps of convolutions over documents.
fn sizes_of_documents(sizes: Sizes) -> Vec<[usize; 3]> {
    let mut full = Vec::new();
    for positions in [1, 2, 3, 31, 64, 65, 130, 300] {
        full.extend([
            [positions, 40, 4],
            [positions, 17, 4],
            [positions, 3, 2],
            [positions, 5, 16],
        ]);
    }
    let small = vec![[1, 3, 4], [33, 64, 4], [64, 5, 16], [130, 17, 5], [300, 40, 4], [300, 3, 2]];
    sizes.choose(full, small)
}

/// Convolutions over documents agree with the definition, forward and backward.
pub fn documents_agree<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let sizes = sizes_of_documents(device.sizes);
    for (seed, [positions, channels, width]) in sizes.into_iter().enumerate() {
        device.margin = MARGINS[seed % 2];
        let documents = Documents::new(&mut Inputs::new(1000 + seed as u64), positions);
        let grain = 1 + seed % 3;
        let shape = ConvShape::new(documents.sequences(), grain, channels, width).unwrap();
        let starts = Some(documents.starts());
        check_case(&mut device, &mut transcript, seed as u64, starts, shape);
    }
    transcript
}

/// A document's rows have the bits of a sample that holds only this document, whatever the neighbouring documents hold; and
/// samples of one document have the bits of samples without documents.
pub fn documents_are_independent<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let full = vec![[1, 3, 4], [37, 17, 2], [129, 40, 4], [130, 5, 6]];
    let small = vec![[37, 17, 2], [70, 64, 4], [66, 3, 6]];
    let sizes = device.sizes.choose(full, small);
    for (seed, [positions, channels, width]) in sizes.into_iter().enumerate() {
        device.margin = MARGINS[seed % 2];
        let documents = Documents::new(&mut Inputs::new(2000 + seed as u64), positions);
        let shape = ConvShape::new(documents.sequences(), 2, channels, width).unwrap();
        let label = format!("conv {shape:?} seed {seed}");
        let case = Case::new::<B::Activation>(&mut Inputs::new(seed as u64), shape, 1.0);
        let whole = run(&mut device, &label, &case, shape);
        let starts = Some(vec![0; SAMPLES * positions]);
        let told = run(&mut device, &label, &Case { starts, ..case.clone() }, shape);
        assert_same_bits(&label, &told.out, &whole.out);
        assert_same_bits(&label, &told.dx, &whole.dx);
        assert_same_bits(&label, &told.dweight, &whole.dweight);
        transcript.record(&label, &told.dx);
        for first in [0, 1] {
            let (kept, others) = documents.every_second(first);
            let mut beside = Case { starts: Some(documents.starts()), ..case.clone() };
            poison::<B::Activation>(&mut beside.x, &others, channels);
            poison::<B::Activation>(&mut beside.dout, &others, channels);
            let found = run(&mut device, &label, &beside, shape);
            for rows in kept {
                let label = format!("{label} rows {rows:?}");
                let alone = Case {
                    x: rows_of(&case.x, &rows, channels),
                    dout: rows_of(&case.dout, &rows, channels),
                    ..case.clone()
                };
                let sequences = SequenceShape::new(1, rows.len()).unwrap();
                let shape = ConvShape::new(sequences, 1, channels, width).unwrap();
                let alone = run(&mut device, &label, &alone, shape);
                assert_same_bits(&label, &rows_of(&found.out, &rows, channels), &alone.out);
                assert_same_bits(&label, &rows_of(&found.dx, &rows, channels), &alone.dx);
            }
        }
    }
    transcript
}
