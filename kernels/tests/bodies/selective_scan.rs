//! Selective scan over whole sequences.

use tidemill_kernels::Backend;
use tidemill_kernels::backend::{ScanGradients, ScanSaved};
use tidemill_kernels::reference::selective_scan::{backward, forward};
use tidemill_kernels::shape::{ScanShape, SequenceShape};

use super::agreement::{Transcript, assert_close, assert_same_bits, tolerance};
use super::arm::{Arm, Sizes};
use super::device::{Device, Layout, MARGINS, Placed};
use super::documents::{Documents, SAMPLES, poison, rows_of};
use super::inputs::{Inputs, wide};
use super::number::Number;
use super::scan_case::{PlacedInputs, Regime, ScanCase, after_rank};

/// The results of a scan, forward and backward.
pub struct Results {
    out: Vec<f32>,
    /// The forward output, as the backward scan recomputes it.
    regated: Option<Vec<f32>>,
    ddelta_raw: Vec<f32>,
    dx: Vec<f32>,
    dbc: Vec<f32>,
    dz: Vec<f32>,
    da_log: Vec<f32>,
    dd: Vec<f32>,
    ddelta_bias: Vec<f32>,
}

impl Results {
    /// Gradients with an element for each row.
    fn of_rows(&self) -> [(&'static str, &[f32]); 4] {
        [("ddelta_raw", &self.ddelta_raw), ("dx", &self.dx), ("dbc", &self.dbc), ("dz", &self.dz)]
    }

    /// Gradients with an element for each grain and parameter.
    fn of_grains(&self) -> [(&'static str, &[f32]); 3] {
        [("da_log", &self.da_log), ("dd", &self.dd), ("ddelta_bias", &self.ddelta_bias)]
    }

    fn all(&self) -> impl Iterator<Item = (&'static str, &[f32])> {
        self.of_rows().into_iter().chain(self.of_grains())
    }
}

/// Whether the backward scan recomputes the forward output.
#[derive(Clone, Copy, PartialEq)]
pub enum Regated {
    Asked,
    Left,
}

pub fn run<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    label: &str,
    case: &ScanCase,
    shape: ScanShape,
    regated: Regated,
) -> Results {
    let (sequences, channels, states) = (shape.sequences(), shape.channels(), shape.states());
    let (rows, grains) = (sequences.rows(), shape.grains().grains());
    let packed = Layout::packed(rows, channels);
    let inputs = PlacedInputs::new(device, case, shape);
    let dout = Placed::new(device, packed, &case.dout);
    let saved_elements = device.backend.selective_scan_saved_elements(shape);
    let mut saved: Placed<B> = Placed::poisoned(device, Layout::range(saved_elements));
    let mut out = Placed::poisoned(device, packed);
    let mut again = (regated == Regated::Asked).then(|| Placed::poisoned(device, packed));
    let right_half = Layout::columns_of(rows, 2 * channels, channels, channels);
    let mut of_rows = [packed, packed, after_rank(shape), right_half]
        .map(|layout| Placed::poisoned(device, layout));
    let mut of_grains = [channels * states, channels, channels]
        .map(|elements| Placed::poisoned(device, Layout::range(grains * elements)));
    let [ddelta_raw, dx, dbc, dz] = &mut of_rows;
    let [da_log, dd, ddelta_bias] = &mut of_grains;
    let outputs = ScanGradients {
        ddelta_raw: ddelta_raw.matrix_mut(),
        dx: dx.matrix_mut(),
        dbc: dbc.matrix_mut(),
        dz: dz.matrix_mut(),
        da_log: da_log.slice_mut(),
        dd: dd.slice_mut(),
        ddelta_bias: ddelta_bias.slice_mut(),
        regated: again.as_mut().map(Placed::matrix_mut),
    };
    let (backend, stream) = (device.backend, &mut device.stream);
    backend
        .selective_scan_forward(stream, out.matrix_mut(), saved.slice_mut(), inputs.view(), shape)
        .expect(label);
    backend
        .selective_scan_backward(
            stream,
            outputs,
            ScanSaved { dout: dout.matrix(), inputs: inputs.view(), saved: saved.slice() },
            shape,
        )
        .expect(label);
    // This checks only the poison around it: the backend chooses what it saves.
    saved.read(device);
    let [ddelta_raw, dx, dbc, dz] = of_rows.map(|gradient| gradient.read(device));
    let [da_log, dd, ddelta_bias] = of_grains.map(|gradient| gradient.read(device));
    Results {
        out: out.read(device),
        regated: again.map(|again| again.read(device)),
        ddelta_raw,
        dx,
        dbc,
        dz,
        da_log,
        dd,
        ddelta_bias,
    }
}

fn check_case<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    transcript: &mut Transcript,
    seed: u64,
    starts: Option<Vec<u32>>,
    shape: ScanShape,
) {
    let mut inputs = Inputs::new(seed);
    let regime = [Regime::Mild, Regime::Mild, Regime::Saturated][inputs.pick(3)];
    let case = ScanCase { starts, ..ScanCase::new::<B::Activation>(&mut inputs, shape, regime) };
    let label = format!("scan {shape:?} {regime:?} seed {seed}");
    let results = run(device, &label, &case, shape, Regated::Asked);

    let wide_case = case.wide();
    let out = forward(&wide_case.view(), shape);
    let gradients = backward(&wide(&case.dout), &wide_case.view(), shape);
    // A state sums over the whole sample, an output over the states, a parameter's gradient over the grain.
    let terms = shape.states() * shape.grains().rows_per_grain();
    let (of_rows, of_grains) = (tolerance::<B::Activation>(terms), tolerance::<f32>(terms));
    // y may be saved in activation precision, and is then rounded before the gate.
    let after_y = of_rows.rounded_twice();
    assert_close(&format!("{label} out"), &results.out, &out, after_y);
    transcript.record(&label, &results.out);
    let expected = [
        (&gradients.ddelta_raw, of_rows),
        (&gradients.dx, of_rows),
        (&gradients.dbc, of_rows),
        (&gradients.dz, after_y),
        (&gradients.da_log, of_grains),
        (&gradients.dd, of_grains),
        (&gradients.ddelta_bias, of_grains),
    ];
    for ((what, found), (expected, tolerance)) in results.all().zip(expected) {
        let label = format!("{label} {what}");
        assert_close(&label, found, expected, tolerance);
        transcript.record(&label, found);
    }
    if let Some(regated) = &results.regated {
        assert_same_bits(&format!("{label} regated"), regated, &results.out);
    }
}

/// Positions, channels and states of a scan.
fn sizes(sizes: Sizes) -> Vec<[usize; 3]> {
    let mut full = Vec::new();
    for positions in [1, 2, 7, 8, 9, 127, 128, 129] {
        for channels in [1, 3, 16, 17, 40] {
            full.extend([1, 3, 8, 16, 17].map(|states| [positions, channels, states]));
        }
    }
    // Lengths around multiples of every chunk length, with the sizes of real models and with others.
    let mut small = vec![[2, 3, 8], [7, 17, 3], [8, 40, 16], [9, 16, 17], [33, 96, 16]];
    let others = [[1, 1], [3, 16], [16, 3], [17, 17], [40, 8], [2, 256], [1, 16]];
    for (positions, [channels, states]) in
        [1, 127, 128, 129, 192, 256, 1000].into_iter().zip(others)
    {
        small.extend([[positions, 32, 16], [positions, channels, states]]);
    }
    small.push([129, 64, 16]);
    full.extend(small.iter());
    sizes.choose(full, small)
}

/// Scans of many sizes agree with the definition, forward and backward.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for (seed, [positions, channels, states]) in sizes(device.sizes).into_iter().enumerate() {
        device.margin = MARGINS[seed % 2];
        let samples = 1 + seed % 3;
        let samples_per_grain = 1 + seed / 3 % 2;
        let sequences = SequenceShape::new(samples, positions).unwrap();
        let shape = ScanShape::new(sequences, samples_per_grain, channels, states).unwrap();
        check_case(&mut device, &mut transcript, seed as u64, None, shape);
    }
    transcript
}

/// A sample's bits do not depend on the other samples, nor a grain's on the other grains, nor
/// gradients on whether the backward scan recomputes the forward output.
pub fn samples_are_independent<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let mut seed = 0;
    let full = vec![[1, 1, 1], [9, 17, 3], [67, 32, 16], [129, 40, 16], [66, 33, 17]];
    let small = vec![[9, 17, 3], [67, 32, 16], [18, 33, 17]];
    for [positions, channels, states] in device.sizes.choose(full, small) {
        for samples_per_grain in [1, 2] {
            seed += 1;
            let samples = 3;
            let sequences = SequenceShape::new(samples, positions).unwrap();
            let shape = ScanShape::new(sequences, samples_per_grain, channels, states).unwrap();
            let label = format!("scan {shape:?} seed {seed}");
            let case = ScanCase::new::<B::Activation>(&mut Inputs::new(seed), shape, Regime::Mild);
            device.margin = MARGINS[1];
            let unaligned = run(&mut device, &label, &case, shape, Regated::Asked);
            device.margin = MARGINS[0];
            let whole = run(&mut device, &label, &case, shape, Regated::Asked);
            assert_same_bits(&label, &unaligned.out, &whole.out);
            for ((what, found), (_, whole)) in unaligned.all().zip(whole.all()) {
                assert_same_bits(&format!("{label} unaligned {what}"), found, whole);
            }
            transcript.record(&label, &whole.out);
            transcript.record(&label, &whole.da_log);
            let mut assert_parts = |range: std::ops::Range<usize>, regated: Regated| {
                let (alone, alone_shape) = case.samples(range.clone(), shape);
                let part = run(&mut device, &label, &alone, alone_shape, regated);
                let of_samples = |values: &[f32]| -> Vec<f32> {
                    let elements = values.len() / samples;
                    values[range.start * elements..range.end * elements].to_vec()
                };
                let label = format!("{label} samples {range:?}");
                assert_same_bits(&label, &part.out, &of_samples(&whole.out));
                for ((what, found), (_, whole)) in part.of_rows().iter().zip(whole.of_rows()) {
                    assert_same_bits(&format!("{label} {what}"), found, &of_samples(whole));
                }
                part
            };
            for sample in 0..samples {
                assert_parts(sample..sample + 1, Regated::Asked);
            }
            for grain in 0..shape.grains().grains() {
                let first = grain * samples_per_grain;
                let range = first..(first + samples_per_grain).min(samples);
                let part = assert_parts(range, Regated::Left);
                for ((what, found), (_, whole)) in part.of_grains().iter().zip(whole.of_grains()) {
                    let elements = found.len();
                    let expected = &whole[grain * elements..(grain + 1) * elements];
                    assert_same_bits(&format!("{label} grain {grain} {what}"), found, expected);
                }
            }
        }
    }
    transcript
}

/// Scans over documents agree with the definition, forward and backward.
pub fn documents_agree<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let mut full = Vec::new();
    for positions in [1, 2, 3, 31, 64, 65, 130, 300] {
        full.extend([
            [positions, 32, 16],
            [positions, 17, 16],
            [positions, 3, 5],
            [positions, 1, 40],
        ]);
    }
    let small =
        vec![[1, 32, 16], [2, 3, 8], [33, 17, 17], [97, 64, 16], [130, 5, 3], [300, 32, 16]];
    let sizes = device.sizes.choose(full, small);
    for (seed, [positions, channels, states]) in sizes.into_iter().enumerate() {
        device.margin = MARGINS[seed % 2];
        let documents = Documents::new(&mut Inputs::new(3000 + seed as u64), positions);
        let grain = 1 + seed % 3;
        let shape = ScanShape::new(documents.sequences(), grain, channels, states).unwrap();
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
    let full = vec![[1, 1, 1], [37, 17, 3], [67, 32, 16], [130, 32, 16], [66, 33, 17]];
    let sizes = device.sizes.choose(full, vec![[19, 17, 3], [37, 32, 16]]);
    for (seed, [positions, channels, states]) in sizes.into_iter().enumerate() {
        device.margin = MARGINS[seed % 2];
        let documents = Documents::new(&mut Inputs::new(4000 + seed as u64), positions);
        let shape = ScanShape::new(documents.sequences(), 2, channels, states).unwrap();
        let label = format!("scan {shape:?} seed {seed}");
        let mut inputs = Inputs::new(seed as u64);
        let case = ScanCase::new::<B::Activation>(&mut inputs, shape, Regime::Mild);
        let whole = run(&mut device, &label, &case, shape, Regated::Asked);
        let starts = Some(vec![0; SAMPLES * positions]);
        let told = ScanCase { starts, ..case.clone() };
        let told = run(&mut device, &label, &told, shape, Regated::Asked);
        assert_same_bits(&label, &told.out, &whole.out);
        for ((what, found), (_, whole)) in told.all().zip(whole.all()) {
            assert_same_bits(&format!("{label} {what}"), found, whole);
            transcript.record(what, found);
        }
        for first in [0, 1] {
            let (kept, others) = documents.every_second(first);
            let mut beside = ScanCase { starts: Some(documents.starts()), ..case.clone() };
            let ScanCase { delta_raw, x, z, dout, bc, .. } = &mut beside;
            for of_rows in [delta_raw, x, z, dout] {
                poison::<B::Activation>(of_rows, &others, channels);
            }
            poison::<B::Activation>(bc, &others, 2 * states);
            let found = run(&mut device, &label, &beside, shape, Regated::Asked);
            for rows in kept {
                let label = format!("{label} rows {rows:?}");
                let alone = case.rows(&rows, shape);
                let sequences = SequenceShape::new(1, rows.len()).unwrap();
                let shape = ScanShape::new(sequences, 1, channels, states).unwrap();
                let alone = run(&mut device, &label, &alone, shape, Regated::Left);
                let outs = [found.out.as_slice(), found.regated.as_deref().unwrap()];
                for out in outs {
                    assert_same_bits(&label, &rows_of(out, &rows, channels), &alone.out);
                }
                for ((what, found), (_, alone)) in found.of_rows().iter().zip(alone.of_rows()) {
                    let columns = found.len() / (SAMPLES * positions);
                    let found = rows_of(found, &rows, columns);
                    assert_same_bits(&format!("{label} {what}"), &found, alone);
                }
            }
        }
    }
    transcript
}
