//! Selective scan over whole sequences.

use tidemill_kernels::Backend;
use tidemill_kernels::reference::selective_scan::{backward, forward};
use tidemill_kernels::shape::{ScanShape, SequenceShape};

use super::agreement::{Transcript, assert_close, assert_same_bits, tolerance};
use super::device::{Device, Layout, Placed};
use super::inputs::{Inputs, wide};
use super::scan_case::{PlacedInputs, Regime, ScanCase};

/// The results of a scan, forward and backward.
struct Results {
    out: Vec<f32>,
    /// What the backward scan gives as the forward output.
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
}

/// Whether the backward scan is asked for the forward output again.
#[derive(Clone, Copy, PartialEq)]
enum Regated {
    Asked,
    Left,
}

fn run<B: Backend<Activation = f32>>(
    device: &mut Device<'_, B>,
    label: &str,
    case: &ScanCase,
    shape: ScanShape,
    regated: Regated,
) -> Results {
    let ScanShape { sequences, channels, states, .. } = shape;
    let (rows, grains) = (sequences.rows(), shape.grains().grains());
    let packed = Layout::packed(rows, channels);
    let inputs = PlacedInputs::new(device, case, shape);
    let dout = Placed::new(device, packed, &case.dout);
    let saved_elements = device.backend.selective_scan_saved_elements(shape);
    let mut saved = Placed::poisoned(device, Layout::range(saved_elements));
    let mut out = Placed::poisoned(device, packed);
    let mut again = (regated == Regated::Asked).then(|| Placed::poisoned(device, packed));
    let mut gradients = [
        packed,
        packed,
        Layout::columns_of(rows, 2 * states + 5, 5, 2 * states),
        Layout::columns_of(rows, 2 * channels, channels, channels),
        Layout::range(grains * channels * states),
        Layout::range(grains * channels),
        Layout::range(grains * channels),
    ]
    .map(|layout| Placed::poisoned(device, layout));
    let [ddelta_raw, dx, dbc, dz, da_log, dd, ddelta_bias] = &mut gradients;
    let outputs = tidemill_kernels::backend::ScanGradients {
        ddelta_raw: ddelta_raw.matrix_mut(),
        dx: dx.matrix_mut(),
        dbc: dbc.matrix_mut(),
        dz: dz.matrix_mut(),
        da_log: da_log.slice_mut(),
        dd: dd.slice_mut(),
        ddelta_bias: ddelta_bias.slice_mut(),
    };
    let (backend, stream) = (device.backend, &mut device.stream);
    backend
        .selective_scan_forward(stream, out.matrix_mut(), saved.slice_mut(), inputs.view(), shape)
        .expect(label);
    backend
        .selective_scan_backward(
            stream,
            outputs,
            again.as_mut().map(Placed::matrix_mut),
            dout.matrix(),
            inputs.view(),
            saved.slice(),
            shape,
        )
        .expect(label);
    // Only what lies around it: what is saved is the backend's own matter.
    saved.read(device);
    let [ddelta_raw, dx, dbc, dz, da_log, dd, ddelta_bias] =
        gradients.map(|gradient| gradient.read(device));
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

fn check_case<B: Backend<Activation = f32>>(
    device: &mut Device<'_, B>,
    transcript: &mut Transcript,
    seed: u64,
    shape: ScanShape,
) {
    let mut inputs = Inputs::new(seed);
    let regime = [Regime::Mild, Regime::Mild, Regime::Saturated][inputs.pick(3)];
    let case = ScanCase::new(&mut inputs, shape, regime);
    let label = format!("scan {shape:?} {regime:?} seed {seed}");
    let results = run(device, &label, &case, shape, Regated::Asked);

    let wide_case = case.wide();
    let out = forward(&wide_case.view(), shape);
    let gradients = backward(&wide(&case.dout), &wide_case.view(), shape);
    let expected = [
        &gradients.ddelta_raw,
        &gradients.dx,
        &gradients.dbc,
        &gradients.dz,
        &gradients.da_log,
        &gradients.dd,
        &gradients.ddelta_bias,
    ];
    // A state sums the whole sample, an output the states, a parameter's gradient the grain.
    let tolerance = tolerance::<f32>(shape.states * shape.grains().rows_per_grain());
    assert_close(&format!("{label} out"), &results.out, &out, tolerance);
    transcript.record(&label, &results.out);
    for ((what, found), expected) in
        results.of_rows().into_iter().chain(results.of_grains()).zip(expected)
    {
        let label = format!("{label} {what}");
        assert_close(&label, found, expected, tolerance);
        transcript.record(&label, found);
    }
    if let Some(regated) = &results.regated {
        assert_same_bits(&format!("{label} regated"), regated, &results.out);
    }
}

/// Scans of many sizes agree with the definition, forward and backward.
pub fn agrees<B: Backend<Activation = f32>>(backend: &B) -> Transcript {
    let mut device = Device::new(backend);
    let mut transcript = Transcript::default();
    let mut seed = 0;
    for positions in [1, 2, 7, 8, 9, 127, 128, 129] {
        for channels in [1, 3, 16, 17, 40] {
            for states in [1, 3, 8, 16, 17] {
                seed += 1;
                let samples = 1 + seed as usize % 3;
                let samples_per_grain = 1 + seed as usize / 3 % 2;
                let sequences = SequenceShape::new(samples, positions).unwrap();
                let shape = ScanShape::new(sequences, samples_per_grain, channels, states).unwrap();
                check_case(&mut device, &mut transcript, seed, shape);
            }
        }
    }
    transcript
}

/// A sample's bits do not depend on the samples beside it, nor a grain's on the other grains, nor
/// gradients on whether the forward output is asked for again.
pub fn samples_are_independent<B: Backend<Activation = f32>>(backend: &B) -> Transcript {
    let mut device = Device::new(backend);
    let mut transcript = Transcript::default();
    let mut seed = 0;
    for (positions, channels, states) in [(1, 1, 1), (9, 17, 3), (129, 40, 16), (66, 33, 17)] {
        for samples_per_grain in [1, 2] {
            seed += 1;
            let samples = 3;
            let sequences = SequenceShape::new(samples, positions).unwrap();
            let shape = ScanShape::new(sequences, samples_per_grain, channels, states).unwrap();
            let label = format!("scan {shape:?} seed {seed}");
            let case = ScanCase::new(&mut Inputs::new(seed), shape, Regime::Mild);
            let whole = run(&mut device, &label, &case, shape, Regated::Asked);
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
