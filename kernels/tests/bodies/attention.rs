//! Causal attention over whole sequences.

use tidemill_kernels::Backend;
use tidemill_kernels::reference::attention::{backward, forward};
use tidemill_kernels::shape::AttentionShape;

use super::agreement::{
    Transcript, assert_close_beside, assert_close_to_sums, assert_same_bits, tolerance,
};
use super::arm::{Arm, Sizes};
use super::attention_case::{AttentionCase, Results, attention_shape, run};
use super::device::{Device, MARGINS};
use super::inputs::{Inputs, wide};
use super::number::{Number, rounded};

fn check_case<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    transcript: &mut Transcript,
    label: &str,
    case: &AttentionCase,
    shape: AttentionShape,
) {
    let results = run(device, label, case, shape);
    let wide_case = case.wide();
    let outputs = forward(&wide_case.view(), shape);
    let gradients = backward(&wide(&case.dout), &wide_case.view(), shape);
    // A score sums over the head, an output over the positions. Where activations are rounded, probabilities and their gradients may
    // be rounded too, and `out` is rounded before the backward pass reads it.
    let terms = shape.head_width().max(shape.sequences().positions());
    let of_rows = tolerance::<B::Activation>(terms).rounded_twice().beside(B::Activation::ROUNDING);
    let of_sums = tolerance::<f32>(terms);
    // The gradient of a score is the difference of two sums over the head, which cancel if a query
    // attends to few keys.
    let scores = (shape.head_width() as f64).sqrt() / 3.0;
    let of_scores = 2.0 * f64::from(shape.scale()).abs() * scores;
    // Sums over positions are as exact as the probabilities.
    let sizes = case.of_sizes();
    let (wide_dout, wide_sizes) = (wide(&sizes.dout), sizes.wide());
    let size_of_out = forward(&wide_sizes.view(), shape).out;
    let size_of_dv = backward(&wide_dout, &wide_sizes.view(), shape).dv;
    for (what, found, expected, sizes) in [
        ("out", &results.out, &outputs.out, &size_of_out),
        ("dv", &results.dv, &gradients.dv, &size_of_dv),
    ] {
        assert_close_to_sums(&format!("{label} {what}"), found, expected, of_rows, sizes);
    }
    for (what, found, expected, tolerance, terms) in [
        ("dq", &results.dq, &gradients.dq, of_rows, of_scores),
        ("dk", &results.dk, &gradients.dk, of_rows, of_scores),
        ("log_sum_exp", &results.log_sum_exp, &outputs.log_sum_exp, of_sums, 1.0),
    ] {
        assert_close_beside(&format!("{label} {what}"), found, expected, tolerance, terms);
    }
    for (what, found) in results.all() {
        transcript.record(&format!("{label} {what}"), found);
    }
}

/// Positions and head widths.
fn sizes(sizes: Sizes) -> Vec<[usize; 2]> {
    let positions = [1, 2, 63, 64, 65, 127, 129, 200];
    let widths = [1, 5, 16, 40, 64, 80, 128, 256];
    let full: Vec<_> = positions.into_iter().flat_map(|t| widths.map(|p| [t, p])).collect();
    // Every second combination: half of the head widths for each number of positions.
    let every_second = |(place, size): (usize, &[usize; 2])| {
        (place % 2 == place / widths.len() % 2).then_some(*size)
    };
    let half = full.iter().enumerate().filter_map(every_second).collect();
    let full = sizes.choose_for_gpu(full, half);
    let small = vec![[1, 5], [2, 64], [65, 16], [70, 40], [130, 1], [33, 80], [3, 128], [2, 256]];
    sizes.choose(full, small)
}

/// Attention of many sizes agrees with the definition, forward and backward.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let windows = [None, Some(1), Some(3), None, Some(64), Some(100), Some(1000)];
    // Scores as in a model that trains, and softmaxes dominated by one term.
    let scales = [1.0, -1.0, 8.0];
    for (seed, [positions, width]) in sizes(device.sizes).into_iter().enumerate() {
        device.margin = MARGINS[seed % 2];
        let mut inputs = Inputs::new(seed as u64);
        let scale = scales[seed % 3] / (width as f32).sqrt();
        let heads = [1, 3, 2][seed % 3];
        let samples = 1 + seed % 2;
        let window = windows[seed % 7];
        let shape = attention_shape([samples, positions], [heads, width], scale, window);
        let mut case = AttentionCase::new::<B::Activation>(&mut inputs, shape);
        if seed / 2 % 2 == 0 {
            case = case.with_slopes(shape);
        }
        if seed % 5 < 2 {
            case = case.with_documents(&mut inputs, shape, [3, 40][seed % 5]);
        }
        let [biases, documents] = [case.slopes.is_some(), case.starts.is_some()];
        let label = format!("{shape:?} biases {biases} documents {documents} seed {seed}");
        check_case(&mut device, &mut transcript, &label, &case, shape);
    }
    // Biases alone.
    let shape = attention_shape([2, 20], [2, 48], 0.0, None);
    let case = AttentionCase::new::<B::Activation>(&mut Inputs::new(50), shape).with_slopes(shape);
    check_case(&mut device, &mut transcript, "a scale of 0", &case, shape);
    transcript
}

/// Walks over more tiles of keys than a block holds at once agree with the definition.
pub fn long_walks_agree<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let full = vec![([2, 1100], [3, 128]), ([1, 1300], [2, 64])];
    let small = vec![([1, 400], [1, 128])];
    for (seed, (rows, heads)) in device.sizes.choose_for_gpu(full, small).into_iter().enumerate() {
        let shape = attention_shape(rows, heads, 1.0 / (heads[1] as f32).sqrt(), None);
        let mut inputs = Inputs::new(seed as u64);
        let case = AttentionCase::new::<B::Activation>(&mut inputs, shape).with_slopes(shape);
        let label = format!("{shape:?} seed {seed}");
        check_case(&mut device, &mut transcript, &label, &case, shape);
    }
    transcript
}

/// The results of some samples, first positions and heads, from `[b t, h p]`.
fn part_of(
    values: &[f32],
    [samples, positions, heads]: [std::ops::Range<usize>; 3],
    shape: AttentionShape,
) -> Vec<f32> {
    let (t, p) = (shape.sequences().positions(), shape.head_width());
    let rows = samples.flat_map(|b| positions.clone().map(move |i| b * t + i));
    let columns = heads.start * p..heads.end * p;
    rows.flat_map(|row| &values[row * shape.width()..][columns.clone()]).copied().collect()
}

/// Shapes whose sequences end inside tiles and at their edges: samples and positions, heads and their width, window.
fn independence_shapes(sizes: Sizes) -> Vec<AttentionShape> {
    let full = vec![
        ([3, 200], [3, 64], None),
        ([2, 129], [3, 40], Some(70)),
        ([2, 65], [2, 5], Some(3)),
        ([2, 192], [2, 128], None),
    ];
    let small =
        vec![([2, 70], [2, 16], None), ([2, 66], [2, 5], Some(3)), ([1, 150], [2, 40], Some(70))];
    let shapes = sizes.choose(full, small).into_iter();
    let scale = |width: usize| 1.0 / (width as f32).sqrt();
    shapes
        .map(|(rows, heads, window)| attention_shape(rows, heads, scale(heads[1]), window))
        .collect()
}

/// The bits of a sample and a head do not depend on other samples and heads, the bits of a query do not depend on how many
/// positions follow, and no result depends on alignment.
pub fn rows_are_independent<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for (seed, shape) in independence_shapes(device.sizes).into_iter().enumerate() {
        let label = format!("{shape:?} seed {seed}");
        let mut inputs = Inputs::new(seed as u64);
        let mut case = AttentionCase::new::<B::Activation>(&mut inputs, shape).with_slopes(shape);
        if seed % 2 == 1 {
            case = case.with_documents(&mut inputs, shape, 30);
        }
        device.margin = MARGINS[1];
        let unaligned = run(&mut device, &label, &case, shape);
        device.margin = MARGINS[0];
        let whole = run(&mut device, &label, &case, shape);
        unaligned.assert_same_bits(&format!("{label} unaligned"), &whole);
        transcript.record(&label, &whole.out);
        let (samples, positions) = (shape.sequences().samples(), shape.sequences().positions());
        let (all_samples, all_positions, all_heads) = (0..samples, 0..positions, 0..shape.heads());
        let mut parts = vec![];
        parts.extend((0..samples).map(|b| [b..b + 1, all_positions.clone(), all_heads.clone()]));
        parts.extend(
            (0..shape.heads()).map(|h| [all_samples.clone(), all_positions.clone(), h..h + 1]),
        );
        for shorter in [1, 17, 64, positions - 1] {
            parts.push([all_samples.clone(), 0..shorter, all_heads.clone()]);
        }
        for part in parts {
            let [samples, positions, heads] = part.clone();
            let (alone, alone_shape) = case.part(samples, positions, heads, shape);
            let found = run(&mut device, &label, &alone, alone_shape);
            let label = format!("{label} of {part:?}");
            let shorter = part[1] != all_positions;
            for ((what, found), (_, whole)) in found.of_rows().into_iter().zip(whole.of_rows()) {
                // Later queries contribute to the gradients of keys and values.
                if !(shorter && ["dk", "dv"].contains(&what)) {
                    let expected = part_of(whole, part.clone(), shape);
                    assert_same_bits(&format!("{label} {what}"), found, &expected);
                }
            }
        }
    }
    transcript
}

/// Sequences of one document have the bits of sequences without documents.
pub fn one_document_is_none<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for shape in independence_shapes(device.sizes) {
        let label = format!("{shape:?}");
        let case = AttentionCase::new::<B::Activation>(&mut Inputs::new(5), shape);
        let none = run(&mut device, &label, &case, shape);
        let starts = Some(vec![0; shape.sequences().rows()]);
        let one = run(&mut device, &label, &AttentionCase { starts, ..case }, shape);
        one.assert_same_bits(&label, &none);
        transcript.record(&label, &none.out);
    }
    transcript
}

/// Changes every input at some positions of `case`, and asserts that only the results of queries that
/// attend to them change.
fn assert_unseen<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    label: &str,
    case: &AttentionCase,
    shape: AttentionShape,
    expected: &Results,
    is_changed: impl Fn(usize) -> bool,
    replacement: f32,
) {
    let (rows, t, width) = (shape.sequences().rows(), shape.sequences().positions(), shape.width());
    let changed_row = |row: usize| is_changed(row % t);
    let changed = |values: &[f32]| -> Vec<f32> {
        let factor = B::Activation::rounded(replacement).widened();
        let values = values.iter().enumerate();
        values.map(|(i, &x)| if changed_row(i / width) { factor * x } else { x }).collect()
    };
    let other = AttentionCase {
        q: changed(&case.q),
        k: changed(&case.k),
        v: changed(&case.v),
        dout: changed(&case.dout),
        ..case.clone()
    };
    let other = AttentionCase {
        q: rounded::<B::Activation>(&other.q),
        k: rounded::<B::Activation>(&other.k),
        v: rounded::<B::Activation>(&other.v),
        dout: rounded::<B::Activation>(&other.dout),
        ..other
    };
    let found = run(device, label, &other, shape);
    let queries: Vec<bool> =
        (0..rows).map(|row| !changed_row(row) && !case.seen(row, shape).any(&is_changed)).collect();
    let mut keys = vec![true; rows];
    for row in 0..rows {
        for key in case.seen(row, shape) {
            keys[row / t * t + key] &= queries[row];
        }
    }
    assert!(queries.contains(&true), "{label}: every query sees what changed");
    assert!(queries.contains(&false), "{label}: nothing changed");
    for ((what, found), (_, expected)) in found.of_rows().into_iter().zip(expected.of_rows()) {
        let unchanged = if what == "dk" || what == "dv" { &keys } else { &queries };
        for row in (0..rows).filter(|&row| unchanged[row]) {
            let at = row * width..(row + 1) * width;
            let label = format!("{label} {what} of row {row}");
            assert_same_bits(&label, &found[at.clone()], &expected[at]);
        }
    }
    for (i, (found, expected)) in found.log_sum_exp.iter().zip(&expected.log_sum_exp).enumerate() {
        let row = i / (shape.heads() * t) * t + i % t;
        if queries[row] {
            assert_eq!(found.to_bits(), expected.to_bits(), "{label} log_sum_exp {i}");
        }
    }
}

/// `replacement` multiplies the masked elements.
fn check_unseen<B: Backend<Activation: Number>>(arm: &Arm<B>, replacement: f32) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let full = vec![([2, 200], [2, 64]), ([1, 129], [1, 40]), ([1, 150], [1, 5])];
    let small = vec![([1, 70], [1, 16]), ([1, 140], [1, 40])];
    for (rows, heads) in device.sizes.choose(full, small) {
        let t = rows[1];
        for window in [None, Some(3), Some(40)] {
            let shape = attention_shape(rows, heads, 0.3, window);
            let label = format!("{shape:?} times {replacement}");
            let case = AttentionCase::new::<B::Activation>(&mut Inputs::new(7), shape);
            let expected = run(&mut device, &label, &case, shape);
            transcript.record(&label, &expected.out);
            for from in [t / 3, t / 2 + 1, t - 1] {
                let label = format!("{label}: later than {from}");
                let is_changed = |i| i >= from;
                assert_unseen(
                    &mut device,
                    &label,
                    &case,
                    shape,
                    &expected,
                    is_changed,
                    replacement,
                );
            }
            if window.is_some() {
                for until in [1, t / 4, t / 3] {
                    let label = format!("{label}: earlier than {until}");
                    let is_changed = |i| i < until;
                    assert_unseen(
                        &mut device,
                        &label,
                        &case,
                        shape,
                        &expected,
                        is_changed,
                        replacement,
                    );
                }
            }
            // Two documents of a few positions, two longer ones, and one of the remaining positions.
            let ends = [5, 7, t / 3, t / 2];
            let start = |position: usize| {
                ends.into_iter().filter(|&end| end <= position).max().unwrap_or(0) as u32
            };
            let starts: Vec<u32> = (0..rows[0] * t).map(|row| start(row % t)).collect();
            let case = AttentionCase { starts: Some(starts), ..case };
            let expected = run(&mut device, &label, &case, shape);
            for end in ends {
                let label = format!("{label}: documents until {end}");
                let is_changed = |i| i < end;
                assert_unseen(
                    &mut device,
                    &label,
                    &case,
                    shape,
                    &expected,
                    is_changed,
                    replacement,
                );
            }
            let label = format!("{label}: a document in the middle");
            let is_changed = |i| (7..t / 3).contains(&i);
            assert_unseen(&mut device, &label, &case, shape, &expected, is_changed, replacement);
        }
    }
    transcript
}

/// Later positions, positions older than the window and other documents change no bit.
pub fn the_unseen_changes_nothing<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    check_unseen(arm, -64.0)
}

/// NaN at later positions, at positions older than the window and in other documents does not spread.
pub fn unseen_nan_stays<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    check_unseen(arm, f32::NAN)
}

/// A value that is not finite shows in its column of every query that attends to it, and in no other
/// element.
pub fn values_that_are_not_finite_are_seen<B: Backend<Activation: Number>>(
    arm: &Arm<B>,
) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let full = vec![([2, 300], [2, 64]), ([1, 290], [1, 128]), ([1, 100], [2, 20])];
    let small = vec![([1, 140], [1, 40])];
    for (rows, heads) in device.sizes.choose(full, small) {
        let (t, p) = (rows[1], heads[1]);
        for window in [None, Some(30)] {
            let shape = attention_shape(rows, heads, 0.3, window);
            let case = AttentionCase::new::<B::Activation>(&mut Inputs::new(3), shape);
            let expected = run(&mut device, "finite", &case, shape).out;
            transcript.record(&format!("{shape:?}"), &expected);
            for (key, value) in [(3, f32::INFINITY), (t - 9, f32::NAN)] {
                let (label, column) = (format!("{shape:?} {value} at {key}"), key % p);
                let mut other = case.clone();
                other.v[key * shape.width() + column] = value;
                let found = run(&mut device, &label, &other, shape).out;
                for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let (row, of_row) = (i / shape.width(), i % shape.width());
                    let sees = row < t && case.seen(row, shape).contains(&key);
                    if sees && of_row == column {
                        assert!(!found.is_finite(), "{label}: row {row} found {found}");
                    } else {
                        let label = format!("{label}: row {row}, column {of_row}");
                        assert_same_bits(&label, &[*found], &[*expected]);
                    }
                }
            }
        }
    }
    transcript
}
