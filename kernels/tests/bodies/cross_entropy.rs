//! Cross-entropy.

use tidemill_kernels::backend::LogitGradient;
use tidemill_kernels::reference::cross_entropy::forward_backward;
use tidemill_kernels::shape::CrossEntropyShape;
use tidemill_kernels::{Backend, IGNORED_TARGET, KernelError, Slice};

use super::agreement::{
    Transcript, assert_close_beside, assert_each_close, assert_same_bits, tolerance,
};
use super::arm::Arm;
use super::device::{Device, Layout, MARGINS, Placed};
use super::inputs::{Inputs, wide};
use super::number::Number;

/// Logits `[rows, row_stride]` whose padding is poison, and their targets.
#[derive(Clone)]
struct Case {
    logits: Vec<f32>,
    targets: Vec<u32>,
}

impl Case {
    /// Logits within `middle - spread .. middle + spread`; about one target in four is ignored.
    fn new<T: Number>(
        inputs: &mut Inputs,
        shape: CrossEntropyShape,
        middle: f32,
        spread: f32,
    ) -> Self {
        let (rows, vocab_size, row_stride) = (shape.rows(), shape.vocab_size(), shape.row_stride());
        let mut logits =
            inputs.uniform_of::<T>(rows * row_stride, middle - spread, middle + spread);
        for row in logits.chunks_mut(row_stride) {
            row[vocab_size..].fill(f32::POISON);
        }
        let mut targets = inputs.tokens(rows, vocab_size);
        for target in &mut targets {
            if inputs.pick(4) == 0 {
                *target = IGNORED_TARGET;
            }
        }
        Self { logits, targets }
    }
}

/// The losses, and the logits' buffer after the call.
fn run<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    label: &str,
    case: &Case,
    gradient: LogitGradient,
    shape: CrossEntropyShape,
) -> (Vec<f32>, Vec<f32>) {
    let mut logits = Placed::new(device, Layout::range(case.logits.len()), &case.logits);
    let targets = device.upload(&case.targets);
    let mut losses = Placed::poisoned(device, Layout::range(shape.rows()));
    let (backend, stream) = (device.backend, &mut device.stream);
    let (losses_mut, logits_mut) = (losses.slice_mut(), logits.slice_mut());
    backend
        .cross_entropy(stream, losses_mut, logits_mut, Slice::all(&targets), gradient, shape)
        .expect(label);
    (losses.read(device), logits.read(device))
}

fn check_case<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    transcript: &mut Transcript,
    label: &str,
    case: &Case,
    shape: CrossEntropyShape,
) {
    let (losses, dlogits) = run(device, label, case, LogitGradient::InPlace, shape);
    let (only_losses, _) = run(device, label, case, LogitGradient::None, shape);
    assert_same_bits(&format!("{label} without gradient"), &only_losses, &losses);

    let expected = forward_backward(&wide(&case.logits), &case.targets, shape);
    let of_losses = tolerance::<f32>(shape.vocab_size());
    let tolerance = tolerance::<B::Activation>(shape.vocab_size());
    // Row by row, so that a row of large losses hides no error of the other rows.
    for row in 0..shape.rows() {
        let label = format!("{label} row {row}");
        let elements = row * shape.row_stride()..(row + 1) * shape.row_stride();
        let (found, dlogits) = (&dlogits[elements.clone()], &expected.dlogits[elements]);
        // The loss of a target whose probability is near 1 is their small difference, which carries the error of the probability.
        let (loss, expected_loss) = (&losses[row..=row], &expected.losses[row..=row]);
        assert_close_beside(&label, loss, expected_loss, of_losses, 0.1);
        if case.targets[row] == IGNORED_TARGET {
            assert_each_close(&label, found, dlogits, tolerance);
        } else {
            // Only the target's element has a subtraction, from a probability of up to 1.
            let target = case.targets[row] as usize;
            let (before, after) = (&found[..target], &found[target + 1..]);
            // The difference of logits is rounded too; it is up to 88 where its exponential is not zero.
            let of_exponential = tolerance.beside(88.0 * f64::from(f32::EPSILON) / 2.0);
            assert_each_close(&label, before, &dlogits[..target], of_exponential);
            assert_each_close(&label, after, &dlogits[target + 1..], of_exponential);
            let (found, expected) = (&found[target..=target], &dlogits[target..=target]);
            assert_close_beside(&label, found, expected, tolerance, 0.1);
        }
        let zero = if case.targets[row] == IGNORED_TARGET {
            assert_eq!(losses[row].to_bits(), 0, "{label}: the loss of an ignored target");
            found
        } else {
            &found[shape.vocab_size()..]
        };
        assert!(zero.iter().all(|x| x.to_bits() == 0), "{label}: zeros of padding or ignored row");
    }
    transcript.record(label, &losses);
    transcript.record(label, &dlogits);
}

/// Losses and gradients of many sizes and magnitudes agree with the definition.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let mut seed = 0;
    // Wider than any block of threads, and wider than the part of a row that a thread holds.
    let vocab_sizes = vec![1, 5, 15, 16, 17, 259, 2056, 20_001];
    let (rows, paddings) = (vec![1, 2, 7, 33], vec![0, 1, 5, 16]);
    for vocab_size in vocab_sizes {
        for padding in device.sizes.choose(paddings.clone(), vec![0, 5]) {
            let rows = if vocab_size > 259 { vec![2] } else { rows.clone() };
            for rows in device.sizes.choose(rows, vec![3]) {
                for (middle, spread) in [(0.0, 2.0), (0.0, 40.0), (500.0, 3.0), (-500.0, 300.0)] {
                    seed += 1;
                    device.margin = MARGINS[seed as usize % 2];
                    let shape =
                        CrossEntropyShape::new(rows, vocab_size, vocab_size + padding).unwrap();
                    let label =
                        format!("cross-entropy {shape:?} logits {middle}+-{spread} seed {seed}");
                    let case =
                        Case::new::<B::Activation>(&mut Inputs::new(seed), shape, middle, spread);
                    check_case(&mut device, &mut transcript, &label, &case, shape);
                }
            }
        }
    }
    for (scale, vocab_size) in [(0.125, 259), (3.0, 30), (0.3, 2056)] {
        let shape = CrossEntropyShape::new(3, vocab_size, vocab_size + 5).unwrap();
        let shape = shape.with_logit_scale(scale).unwrap();
        let label = format!("cross-entropy {shape:?}");
        let case = Case::new::<B::Activation>(&mut Inputs::new(7), shape, 0.0, 4.0);
        check_case(&mut device, &mut transcript, &label, &case, shape);
    }
    let shape = CrossEntropyShape::new(3, 17, 20).unwrap();
    let mut case = Case::new::<B::Activation>(&mut Inputs::new(0), shape, 0.0, 1.0);
    case.targets.fill(IGNORED_TARGET);
    check_case(&mut device, &mut transcript, "cross-entropy, all ignored", &case, shape);
    transcript
}

/// A row's bits depend neither on the other rows nor on the padding.
pub fn rows_are_independent<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let (rows, vocab_size, row_stride) = (9, 259, 272);
    let shape = CrossEntropyShape::new(rows, vocab_size, row_stride).unwrap();
    let case = Case::new::<B::Activation>(&mut Inputs::new(1), shape, 0.0, 5.0);
    let whole = run(&mut device, "whole", &case, LogitGradient::InPlace, shape);
    transcript.record("losses", &whole.0);
    transcript.record("dlogits", &whole.1);
    for row in 0..rows {
        for alone_stride in [vocab_size, row_stride, row_stride + 7] {
            let label = format!("cross-entropy row {row} row stride {alone_stride}");
            let alone = CrossEntropyShape::new(1, vocab_size, alone_stride).unwrap();
            let mut logits = case.logits[row * row_stride..][..vocab_size].to_vec();
            logits.resize(alone_stride, f32::POISON);
            let part = Case { logits, targets: vec![case.targets[row]] };
            let (losses, dlogits) = run(&mut device, &label, &part, LogitGradient::InPlace, alone);
            assert_same_bits(&label, &losses, &whole.0[row..=row]);
            let expected = &whole.1[row * row_stride..][..vocab_size];
            assert_same_bits(&label, &dlogits[..vocab_size], expected);
        }
    }
    transcript
}

/// A target outside the vocabulary, even inside the padding, is reported with its row.
pub fn refuses_targets_out_of_range<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let backend = &arm.backend;
    for target in [5, 7, 8, u32::MAX - 1] {
        for gradient in [LogitGradient::None, LogitGradient::InPlace] {
            let mut device = Device::new(arm);
            let shape = CrossEntropyShape::new(3, 5, 8).unwrap();
            let mut logits = Placed::new(&mut device, Layout::range(24), &[0.5; 24]);
            let targets = device.upload(&[IGNORED_TARGET, target, 4]);
            let mut losses = Placed::poisoned(&mut device, Layout::range(3));
            let result = backend.cross_entropy(
                &mut device.stream,
                losses.slice_mut(),
                logits.slice_mut(),
                Slice::all(&targets),
                gradient,
                shape,
            );
            match device.error_of(result) {
                KernelError::TokenOutOfRange { row: 1, token, vocab_size: 5, .. } => {
                    assert_eq!(token, target);
                }
                other => panic!("expected target {target} out of range, found {other:?}"),
            }
        }
    }
}
