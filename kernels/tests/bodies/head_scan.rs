//! The scan of heads over whole sequences.

use tidemill_kernels::Backend;
use tidemill_kernels::reference::head_scan::{backward, forward};
use tidemill_kernels::shape::HeadScanShape;

use super::agreement::{
    Transcript, assert_close, assert_close_beside, assert_same_bits, tolerance,
};
use super::arm::Arm;
use super::device::{Device, MARGINS};
use super::documents::{Documents, SAMPLES, poison, rows_of};
use super::head_scan_case::{HeadScanCase, run, shape_of, with_sequences};
use super::inputs::Inputs;
use super::number::Number;
use super::scan_case::Regime;

/// More than a sum's terms come to beside a decay: a step of up to 32, A of up to 17, a state and its gradient.
const MOST_FACTORS: f64 = 1e12;

fn check_case<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    transcript: &mut Transcript,
    seed: u64,
    starts: Option<Vec<u32>>,
    shape: HeadScanShape,
) {
    let mut inputs = Inputs::new(seed);
    let regime = [Regime::Mild, Regime::Mild, Regime::Saturated][inputs.pick(3)];
    let case =
        HeadScanCase { starts, ..HeadScanCase::new::<B::Activation>(&mut inputs, shape, regime) };
    let label = format!("head scan {shape:?} {regime:?} limits {:?} seed {seed}", case.limits);
    check(device, transcript, &label, &case, shape);
}

fn check<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    transcript: &mut Transcript,
    label: &str,
    case: &HeadScanCase,
    shape: HeadScanShape,
) {
    let results = run(device, label, case, shape);
    let wide = case.wide();
    let expected = forward(&wide.view(), shape);
    // A state sums over the whole sample, an output over the states, a parameter's gradient over the grain and the channels of its head.
    let terms = shape.states() * shape.grains().rows_per_grain();
    // Backends of bf16 split states, weights and gradients into two bf16: each factor of a term has an error of 2^-18.
    let of_factors = if B::Activation::ROUNDING > 0.0 { 8.0 * 2_f64.powi(-18) } else { 0.0 };
    let of_sums = tolerance::<f32>(terms).beside(of_factors);
    assert_close(&format!("{label} out"), &results.out, &expected, of_sums);
    transcript.record(label, &results.out);
    let gradients = backward(&wide.of_rows[4], &wide.view(), shape);
    let of_rows = [&gradients.ddelta_raw, &gradients.dx, &gradients.dbc, &gradients.dz];
    let of_grains = [&gradients.da_log, &gradients.dd, &gradients.ddelta_bias];
    let of_elements = tolerance::<B::Activation>(terms).beside(of_factors);
    // GPUs take a decay below the smallest normal number for zero.
    let [row, grain] = [of_elements, of_sums].map(|each| each.underflowing(MOST_FACTORS));
    let terms = gradients.squares.each_ref().map(|squares| {
        let mean = squares.iter().sum::<f64>() / squares.len() as f64;
        mean.sqrt()
    });
    let of_rows = of_rows.map(|x| (x, row, 0.0)).into_iter();
    let expected =
        of_rows.chain(std::array::from_fn::<_, 3, _>(|i| (of_grains[i], grain, terms[i])));
    for ((what, found), (expected, tolerance, terms)) in results.gradients().zip(expected) {
        let label = format!("{label} {what}");
        assert_close_beside(&label, found, expected, tolerance, terms);
        transcript.record(&label, found);
    }
}

/// Scans of many sizes agree with the definition, forward and backward.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let heads = [[1, 1, 1, 1], [2, 3, 1, 8], [3, 16, 3, 16], [4, 17, 2, 17], [2, 40, 2, 3]];
    let mut full = Vec::new();
    for positions in [1, 2, 7, 8, 9, 15, 16, 17, 127, 128, 129] {
        full.extend(heads.map(|heads| (positions, heads)));
    }
    // Lengths around multiples of every chunk length, with the sizes of real models and with others.
    let small = vec![
        (1, [1, 1, 1, 1]),
        (7, [2, 3, 1, 8]),
        (9, [3, 16, 3, 16]),
        (17, [4, 17, 2, 17]),
        (33, [2, 64, 1, 128]),
        (65, [1, 96, 1, 20]),
        (130, [2, 5, 2, 33]),
        (257, [2, 8, 1, 16]),
        (2, [1, 256, 1, 5]),
        (3, [1, 2, 1, 256]),
    ];
    full.extend(small.iter());
    for (seed, (positions, heads)) in device.sizes.choose(full, small).into_iter().enumerate() {
        device.margin = MARGINS[seed % 2];
        let shape = shape_of([1 + seed % 3, positions], 1 + seed / 3 % 2, heads);
        check_case(&mut device, &mut transcript, seed as u64, None, shape);
    }
    transcript
}

/// Long samples agree with the definition, forward and backward: with decays that forget a position at once, with decays that remember
/// the whole sample, and with decays in between.
pub fn long_samples_agree<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let positions = device.sizes.choose(vec![2048], vec![1030])[0];
    let shape = shape_of([1, positions], 1, [1, 4, 1, 3]);
    for (seed, (a_log, limits)) in [
        (2.8, [0.5, 0.6]),
        (2.8, [1.5, 2.0]),
        (2.8, [0.0, f32::INFINITY]),
        (-7.0, [0.0, f32::INFINITY]),
        (0.0, [0.001, 0.5]),
    ]
    .into_iter()
    .enumerate()
    {
        let mut inputs = Inputs::new(5000 + seed as u64);
        let case = HeadScanCase::new::<B::Activation>(&mut inputs, shape, Regime::Mild);
        let case = HeadScanCase { a_log: vec![a_log], limits, ..case };
        let label = format!("long head scan, a_log {a_log}, limits {limits:?}");
        check(&mut device, &mut transcript, &label, &case, shape);
    }
    transcript
}

/// A sample's bits do not depend on the other samples or on the layout of rows, nor a grain's on the other grains.
pub fn samples_are_independent<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let full =
        vec![(1, [1, 1, 1, 1]), (9, [4, 17, 2, 3]), (67, [2, 32, 1, 16]), (70, [3, 5, 3, 40])];
    let small = vec![(9, [4, 17, 2, 3]), (35, [2, 16, 1, 16])];
    for (seed, (positions, heads)) in device.sizes.choose(full, small).into_iter().enumerate() {
        for grain in [1, 2] {
            let samples = 3;
            let shape = shape_of([samples, positions], grain, heads);
            let label = format!("head scan {shape:?} seed {seed}");
            let mut inputs = Inputs::new(seed as u64);
            let case = HeadScanCase::new::<B::Activation>(&mut inputs, shape, Regime::Mild);
            device.margin = MARGINS[1];
            let unaligned = run(&mut device, &label, &case, shape);
            device.margin = MARGINS[0];
            let whole = run(&mut device, &label, &case, shape);
            assert_same_bits(&label, &unaligned.out, &whole.out);
            transcript.record(&label, &whole.out);
            for ((what, found), (_, whole)) in unaligned.gradients().zip(whole.gradients()) {
                assert_same_bits(&format!("{label} unaligned {what}"), found, whole);
                transcript.record(what, whole);
            }
            for index in 0..samples.div_ceil(grain) {
                let range = index * grain..((index + 1) * grain).min(samples);
                let rows = range.start * positions..range.end * positions;
                let alone = with_sequences(shape, [range.len(), positions], grain);
                let part = run(&mut device, &label, &case.rows(&rows, shape), alone);
                let label = format!("{label} grain {index}");
                assert_same_bits(&label, &part.out, &rows_of(&whole.out, &rows, shape.width()));
                for ((what, found), (_, whole)) in part.of_rows.iter().zip(&whole.of_rows) {
                    let expected = rows_of(whole, &rows, whole.len() / (samples * positions));
                    assert_same_bits(&format!("{label} {what}"), found, &expected);
                }
                for ((what, found), (_, whole)) in part.of_grains.iter().zip(&whole.of_grains) {
                    let expected = &whole[index * found.len()..][..found.len()];
                    assert_same_bits(&format!("{label} {what}"), found, expected);
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
    let heads = [[2, 16, 1, 16], [3, 17, 3, 5], [1, 3, 1, 40]];
    let mut full = Vec::new();
    for positions in [1, 2, 3, 31, 64, 65, 130] {
        full.extend(heads.map(|heads| (positions, heads)));
    }
    let small = vec![(1, heads[0]), (3, heads[1]), (33, heads[1]), (130, heads[2]), (65, heads[0])];
    for (seed, (positions, heads)) in device.sizes.choose(full, small).into_iter().enumerate() {
        device.margin = MARGINS[seed % 2];
        let documents = Documents::new(&mut Inputs::new(3000 + seed as u64), positions);
        let shape = shape_of([SAMPLES, positions], 1 + seed % 3, heads);
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
    let full =
        vec![(1, [1, 1, 1, 1]), (37, [2, 17, 2, 3]), (67, [2, 32, 1, 16]), (300, [1, 5, 1, 7])];
    let sizes = device.sizes.choose(full, vec![(19, [2, 17, 2, 3]), (150, [1, 3, 1, 16])]);
    for (seed, (positions, heads)) in sizes.into_iter().enumerate() {
        device.margin = MARGINS[seed % 2];
        let documents = Documents::new(&mut Inputs::new(4000 + seed as u64), positions);
        let shape = shape_of([SAMPLES, positions], 2, heads);
        let label = format!("head scan {shape:?} seed {seed}");
        let mut inputs = Inputs::new(seed as u64);
        let case = HeadScanCase::new::<B::Activation>(&mut inputs, shape, Regime::Mild);
        let whole = run(&mut device, &label, &case, shape);
        let starts = Some(vec![0; SAMPLES * positions]);
        let told = run(&mut device, &label, &HeadScanCase { starts, ..case.clone() }, shape);
        assert_same_bits(&label, &told.out, &whole.out);
        for ((what, found), (_, whole)) in told.gradients().zip(whole.gradients()) {
            assert_same_bits(&format!("{label} {what}"), found, whole);
            transcript.record(what, found);
        }
        for first in [0, 1] {
            let (kept, others) = documents.every_second(first);
            let mut beside = HeadScanCase { starts: Some(documents.starts()), ..case.clone() };
            for (values, columns) in beside.of_rows.iter_mut().zip(HeadScanCase::columns(shape)) {
                poison::<B::Activation>(values, &others, columns);
            }
            let found = run(&mut device, &label, &beside, shape);
            for rows in kept {
                let label = format!("{label} rows {rows:?}");
                let alone = with_sequences(shape, [1, rows.len()], 1);
                let alone = run(&mut device, &label, &case.rows(&rows, shape), alone);
                assert_same_bits(&label, &rows_of(&found.out, &rows, shape.width()), &alone.out);
                for ((what, found), (_, alone)) in found.of_rows.iter().zip(&alone.of_rows) {
                    let columns = found.len() / (SAMPLES * positions);
                    let found = rows_of(found, &rows, columns);
                    assert_same_bits(&format!("{label} {what}"), &found, alone);
                }
            }
        }
    }
    transcript
}
