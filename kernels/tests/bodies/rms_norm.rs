//! RMSNorm.

use tidemill_kernels::Backend;
use tidemill_kernels::reference::rms_norm::{backward, forward};
use tidemill_kernels::shape::{GrainRows, NormShape};

use super::agreement::{Transcript, assert_close, assert_close_beside, tolerance};
use super::arm::Arm;
use super::device::{Device, MARGINS};
use super::inputs::{Inputs, wide};
use super::norm_case::{self, Case, Input, Kind, Norm, row_counts, run};
use super::number::Number;

const KIND: Kind = Kind { norm: Norm::Rms, input: Input::Residual, biased: false };

/// Norms of many sizes and magnitudes agree with the definition, forward and backward.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let mut seed = 0;
    for width in [1, 3, 16, 17, 40, 129, 768, 2056, 8200] {
        for (rows, rows_per_grain) in row_counts(device.sizes, width, (150, 140)) {
            for magnitude in [1.0, 3e4, 1e-4] {
                seed += 1;
                device.margin = MARGINS[seed as usize % 2];
                let grains = GrainRows::new(rows, rows_per_grain).unwrap();
                let shape = NormShape::rms(grains, width, 1e-5).unwrap();
                let label = format!("rms_norm {shape:?} magnitude {magnitude} seed {seed}");
                let inputs = &mut Inputs::new(seed);
                let case = Case::new::<B::Activation>(inputs, KIND, [rows, width], magnitude);
                let results = run(&mut device, &label, KIND, &case, shape);

                let (x, weight) = (wide(&case.x), wide(&case.weight));
                let outputs = forward(&x, &weight, shape);
                let gradients = backward(&wide(&case.dy), &x, &weight, shape);
                let residual = wide(&case.residual);
                let dx: Vec<f64> =
                    residual.iter().zip(&gradients.dx).map(|(r, dx)| r + dx).collect();
                let over_row = tolerance::<f32>(width);
                let over_grain = tolerance::<f32>(width.max(rows_per_grain));
                // The two terms of dx cancel: wholly, where a row has one element.
                for row in 0..rows {
                    let label = format!("{label} dx row {row}");
                    let row_of_terms = 1.5 * outputs.reciprocal_rms[row];
                    let inside = row * width..(row + 1) * width;
                    let (found, expected) = (&results.dx[inside.clone()], &dx[inside]);
                    assert_close_beside(&label, found, expected, over_row, row_of_terms);
                }
                transcript.record(&label, &results.dx);
                for (what, found, expected, tolerance) in [
                    ("y", &results.y, &outputs.y, tolerance::<B::Activation>(width)),
                    ("reciprocal_rms", &results.statistics, &outputs.reciprocal_rms, over_row),
                    ("dweight", &results.dweight, &gradients.dweight, over_grain),
                ] {
                    let label = format!("{label} {what}");
                    assert_close(&label, found, expected, tolerance);
                    transcript.record(&label, found);
                }
            }
        }
    }
    transcript
}

/// [`norm_case::rows_are_independent`] of RMSNorm.
pub fn rows_are_independent<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    norm_case::rows_are_independent(arm, [KIND; 3])
}
