//! RMSNorm.

use tidemill_kernels::Backend;
use tidemill_kernels::backend::{NormGradient, NormGradients, NormInput, NormInputs, NormSaved};
use tidemill_kernels::reference::rms_norm::{backward, forward};
use tidemill_kernels::shape::{GrainRows, NormShape};

use super::agreement::{Transcript, assert_close, assert_close_beside, tolerance};
use super::arm::Arm;
use super::device::{Device, MARGINS, assert_shape_error};
use super::inputs::{Inputs, wide};
use super::norm_case::{self, Case, Input, Kind, Norm, row_counts, run};
use super::number::Number;
use super::refusal_case::{
    Bench, assert_answer, matrix, matrix_mut, slice, slice_mut, wrong_by_one,
};

const KIND: Kind = Kind { norm: Norm::Rms, input: Input::Residual, biased: false };
/// Whole rows of activations, and heads of them, up to more than a block of a GPU has at once.
const OF_ACTIVATIONS: [Kind; 3] = [
    Kind { norm: Norm::Rms, input: Input::Activation, biased: false },
    Kind { norm: Norm::RmsOfHeads(3), input: Input::Activation, biased: false },
    Kind { norm: Norm::RmsOfHeads(40), input: Input::Activation, biased: false },
];

/// Norms of many sizes and magnitudes agree with the definition, forward and backward.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    const WIDTHS: [usize; 9] = [1, 3, 16, 17, 40, 129, 768, 2056, 8200];
    norms_agree(arm, &WIDTHS, [KIND; 3], (150, 140))
}

/// Norms of activations agree too, over rows and over heads of rows.
pub fn of_activations_agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    const WIDTHS: [usize; 8] = [1, 6, 17, 64, 128, 256, 516, 2056];
    norms_agree(arm, &WIDTHS, OF_ACTIVATIONS, (36, 30))
}

fn norms_agree<B: Backend<Activation: Number>>(
    arm: &Arm<B>,
    widths: &[usize],
    kinds: [Kind; 3],
    many: (usize, usize),
) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let mut seed = 0;
    for &width in widths {
        for (rows, rows_per_grain) in row_counts(device.sizes, width, many) {
            for (magnitude, kind) in
                [1.0, 3e4, 1e-4].into_iter().zip(kinds.into_iter().cycle().skip(rows))
            {
                seed += 1;
                device.margin = MARGINS[seed as usize % 2];
                let grains = GrainRows::new(rows, rows_per_grain).unwrap();
                let shape = kind.norm.shape(grains, width);
                let label = format!("{kind:?} {shape:?} magnitude {magnitude} seed {seed}");
                let inputs = &mut Inputs::new(seed);
                let case = Case::new::<B::Activation>(inputs, kind, [rows, width], magnitude);
                let results = run(&mut device, &label, kind, &case, shape);

                let (x, weight) = (wide(&case.x), wide(&case.weight));
                let outputs = forward(&x, &weight, shape);
                let gradients = backward(&wide(&case.dy), &x, &weight, shape);
                let over_row = tolerance::<f32>(width);
                let over_grain = tolerance::<f32>(width.max(rows_per_grain * shape.heads()));
                let (residual, of_dx) = match kind.input {
                    Input::Residual => (wide(&case.residual), over_row),
                    Input::Activation => (vec![0.0; x.len()], tolerance::<B::Activation>(width)),
                };
                let dx: Vec<f64> =
                    residual.iter().zip(&gradients.dx).map(|(r, dx)| r + dx).collect();
                // The two terms of dx cancel, completely so in a row of one element.
                for (row, reciprocal_rms) in outputs.reciprocal_rms.iter().enumerate() {
                    let label = format!("{label} dx row {row}");
                    let row_of_terms = 1.5 * reciprocal_rms;
                    let inside = row * width..(row + 1) * width;
                    let (found, expected) = (&results.dx[inside.clone()], &dx[inside]);
                    assert_close_beside(&label, found, expected, of_dx, row_of_terms);
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

/// [`norm_case::many_rows_are_independent`] of RMSNorm.
pub fn many_rows_are_independent<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    norm_case::many_rows_are_independent(arm, [KIND; 3])
}

/// [`norm_case::rows_are_independent`] of RMSNorm of activations, and of their heads.
pub fn rows_of_activations_are_independent<B: Backend<Activation: Number>>(
    arm: &Arm<B>,
) -> Transcript {
    norm_case::rows_are_independent(arm, OF_ACTIVATIONS)
}

/// Shapes that do not fit a norm of 5 rows of 4, or of 3 heads of 4, in grains of 2; heads of the residual stream; and gradients whose
/// kind differs from their input's.
pub fn refuses_shapes<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    let grains = GrainRows::new(5, 2).unwrap();
    for (input, heads) in [(Input::Residual, 1), (Input::Activation, 3), (Input::Residual, 3)] {
        let shape = NormShape::rms_of_heads(grains, heads, 4, 1e-5).unwrap();
        let is_run = (input, heads) != (Input::Residual, 3);
        let columns = heads * 4;
        for (wrong, sizes) in wrong_by_one([5, columns, 5, columns, 5 * heads, 4]) {
            let [rows, width, x_rows, x_width, reciprocal, weight] = sizes;
            let inputs = NormInputs {
                x: match input {
                    Input::Residual => NormInput::Residual(matrix(&bench.zeros, [x_rows, x_width])),
                    Input::Activation => {
                        NormInput::Activation(matrix(&bench.activations, [x_rows, x_width]))
                    }
                },
                weight: slice(&bench.zeros, weight),
                bias: None,
            };
            let result = backend.norm_forward(
                &mut bench.device.stream,
                matrix_mut(&mut bench.activation_outs[0], [rows, width]),
                slice_mut(&mut bench.outs[0], reciprocal),
                inputs,
                shape,
            );
            match is_run {
                true => assert_answer("rms_norm_forward", wrong, result),
                false => assert_shape_error("heads of the residual stream", result),
            }
        }
        let right = [5, columns, 3 * 4, 5, columns, 5 * heads, 4, 5, columns, 5, columns];
        for (gradient, (wrong, sizes)) in [Input::Residual, Input::Activation]
            .into_iter()
            .flat_map(|gradient| wrong_by_one(right).into_iter().map(move |of| (gradient, of)))
        {
            let [rows, width, dweight, x_rows, x_width, reciprocal, weight, ..] = sizes;
            let [.., dy_rows, dy_width, rounded_rows, rounded_width] = sizes;
            let [dx, dweight_out, ..] = &mut bench.outs;
            let copy = &mut bench.activation_outs[0];
            let gradients = NormGradients {
                x: match gradient {
                    Input::Residual => NormGradient::Residual {
                        dx: matrix_mut(dx, [rows, width]),
                        rounded: Some(matrix_mut(copy, [rounded_rows, rounded_width])),
                        dy: matrix(&bench.activations, [dy_rows, dy_width]),
                    },
                    Input::Activation => NormGradient::InPlace(matrix_mut(copy, [rows, width])),
                },
                dweight: slice_mut(dweight_out, dweight),
                dbias: None,
            };
            let saved = NormSaved {
                x: match input {
                    Input::Residual => NormInput::Residual(matrix(&bench.zeros, [x_rows, x_width])),
                    Input::Activation => {
                        NormInput::Activation(matrix(&bench.activations, [x_rows, x_width]))
                    }
                },
                statistics: slice(&bench.zeros, reciprocal),
                weight: slice(&bench.zeros, weight),
            };
            let result = backend.norm_backward(&mut bench.device.stream, gradients, saved, shape);
            // A gradient in place has neither dy nor a copy of dx.
            let wrong = wrong.filter(|&size| gradient == Input::Residual || size < 7);
            match is_run && gradient == input {
                true => assert_answer("rms_norm_backward", wrong, result),
                false => assert_shape_error("heads or a gradient of another kind", result),
            }
        }
    }
    bench.finish();
}

/// RMSNorm has no bias, and so no gradient of a bias.
pub fn refuses_a_bias<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    let shape = NormShape::rms(GrainRows::new(5, 2).unwrap(), 4, 1e-5).unwrap();
    let x = || NormInput::Residual(matrix(&bench.zeros, [5, 4]));
    let inputs =
        NormInputs { x: x(), weight: slice(&bench.zeros, 4), bias: Some(slice(&bench.zeros, 4)) };
    let (y, stream) = (&mut bench.activation_outs[0], &mut bench.device.stream);
    let [statistics, dx, dweight, dbias, ..] = &mut bench.outs;
    let y = matrix_mut(y, [5, 4]);
    let result = backend.norm_forward(stream, y, slice_mut(statistics, 5), inputs, shape);
    assert_shape_error("a bias of RMSNorm", result);
    let gradients = NormGradients {
        x: NormGradient::Residual {
            dx: matrix_mut(dx, [5, 4]),
            rounded: None,
            dy: matrix(&bench.activations, [5, 4]),
        },
        dweight: slice_mut(dweight, 3 * 4),
        dbias: Some(slice_mut(dbias, 3 * 4)),
    };
    let saved =
        NormSaved { x: x(), statistics: slice(&bench.zeros, 5), weight: slice(&bench.zeros, 4) };
    let result = backend.norm_backward(stream, gradients, saved, shape);
    assert_shape_error("a gradient of a bias of RMSNorm", result);
    bench.finish();
}
