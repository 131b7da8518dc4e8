//! Layer norm.

use tidemill_kernels::Backend;
use tidemill_kernels::backend::{NormGradient, NormGradients, NormInput, NormInputs, NormSaved};
use tidemill_kernels::reference::layer_norm::{backward, forward};
use tidemill_kernels::shape::{GrainRows, NormShape};

use super::agreement::{Transcript, assert_close, assert_close_beside, tolerance};
use super::arm::Arm;
use super::device::{Device, MARGINS, assert_shape_error};
use super::inputs::{Inputs, wide};
use super::norm_case::{self, Case, Input, Kind, Norm, Results, row_counts, run};
use super::number::Number;
use super::refusal_case::{
    Bench, assert_answer, matrix, matrix_mut, slice, slice_mut, wrong_by_one,
};

const KINDS: [Kind; 3] = [
    Kind { norm: Norm::Layer, input: Input::Residual, biased: true },
    Kind { norm: Norm::Layer, input: Input::Residual, biased: false },
    Kind { norm: Norm::Layer, input: Input::Activation, biased: true },
];

/// Norms of many sizes and magnitudes agree with the definition, forward and backward.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let mut seed = 0;
    for width in [1, 3, 16, 17, 40, 129, 768, 2056, 8200] {
        for (rows, rows_per_grain) in row_counts(device.sizes, width, (50, 40)) {
            for (magnitude, kind) in
                [1.0, 3e4, 1e-2].into_iter().zip(KINDS.into_iter().cycle().skip(rows))
            {
                seed += 1;
                device.margin = MARGINS[seed as usize % 2];
                let grains = GrainRows::new(rows, rows_per_grain).unwrap();
                let shape = NormShape::layer(grains, width, 1e-5).unwrap();
                let label = format!("{kind:?} {shape:?} magnitude {magnitude} seed {seed}");
                let inputs = &mut Inputs::new(seed);
                let case = Case::new::<B::Activation>(inputs, kind, [rows, width], magnitude);
                let results = run(&mut device, &label, kind, &case, shape);
                check::<B>(&mut transcript, &label, kind, &case, &results, shape);
            }
        }
    }
    transcript
}

fn check<B: Backend<Activation: Number>>(
    transcript: &mut Transcript,
    label: &str,
    kind: Kind,
    case: &Case,
    results: &Results,
    shape: NormShape,
) {
    let (rows, width) = (shape.grains().rows(), shape.width());
    let (x, weight, bias) = (wide(&case.x), wide(&case.weight), case.bias.as_deref().map(wide));
    let outputs = forward(&x, &weight, bias.as_deref(), shape);
    let gradients = backward(&wide(&case.dy), &x, &weight, shape);
    let residual = wide(&case.residual);
    let over_row = tolerance::<f32>(width);
    let of_dx = match kind.input {
        Input::Residual => over_row,
        Input::Activation => tolerance::<B::Activation>(width),
    };
    let over_grain = tolerance::<f32>(width.max(shape.grains().rows_per_grain()));
    let [means, reciprocals] = [0, rows].map(|from| &results.statistics[from..from + rows]);
    // The rounding error of the mean, relative to the deviations; rows of one element have no deviations, and eps alone is the divisor.
    let greatest = case.x.iter().fold(0.0_f64, |greatest, x| greatest.max(f64::from(x.abs())));
    for row in 0..rows {
        let inside = row * width..(row + 1) * width;
        let r = outputs.reciprocal_deviations[row];
        let centred = over_row.beside(greatest * r * 2e-7);
        // The terms of dx cancel, completely so in a row of one element.
        let dx: Vec<f64> = inside
            .clone()
            .map(|i| {
                gradients.dx[i] + if kind.input == Input::Residual { residual[i] } else { 0.0 }
            })
            .collect();
        let label = format!("{label} row {row}");
        let of_dx = of_dx.beside(greatest * r * 2e-7);
        assert_close_beside(
            &format!("{label} dx"),
            &results.dx[inside.clone()],
            &dx,
            of_dx,
            2.0 * r,
        );
        let (mean, reciprocal) = (&means[row..=row], &reciprocals[row..=row]);
        assert_close_beside(
            &format!("{label} mean"),
            mean,
            &outputs.means[row..=row],
            over_row,
            greatest,
        );
        assert_close(&format!("{label} reciprocal"), reciprocal, &[r], centred);
        let of_y = tolerance::<B::Activation>(width).beside(greatest * r * 2e-7);
        assert_close_beside(
            &format!("{label} y"),
            &results.y[inside.clone()],
            &outputs.y[inside],
            of_y,
            1.0,
        );
    }
    let steepest =
        outputs.reciprocal_deviations.iter().fold(0.0, |steepest: f64, &r| steepest.max(r));
    let over_grain = over_grain.beside(greatest * steepest * 2e-7);
    assert_close_beside(
        &format!("{label} dweight"),
        &results.dweight,
        &gradients.dweight,
        over_grain,
        1.0,
    );
    transcript.record(label, &results.y);
    transcript.record(label, &results.statistics);
    transcript.record(label, &results.dx);
    transcript.record(label, &results.dweight);
    if let Some(dbias) = &results.dbias {
        assert_close_beside(&format!("{label} dbias"), dbias, &gradients.dbias, over_grain, 1.0);
        transcript.record(label, dbias);
    }
}

/// The gradients of both parameters over a grain of more than 512 runs of 16 rows, and over a short one behind it.
pub fn long_grains_agree<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let (rows, width, kind) = (8_330, 5, KINDS[0]);
    let shape = NormShape::layer(GrainRows::new(rows, 8_250).unwrap(), width, 1e-5).unwrap();
    let label = format!("{kind:?} {shape:?}");
    let case = Case::new::<B::Activation>(&mut Inputs::new(1), kind, [rows, width], 1.0);
    let results = run(&mut device, &label, kind, &case, shape);
    check::<B>(&mut transcript, &label, kind, &case, &results, shape);
    transcript
}

/// [`norm_case::rows_are_independent`] of layer norms.
pub fn rows_are_independent<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    norm_case::rows_are_independent(arm, KINDS)
}

/// [`norm_case::many_rows_are_independent`] of layer norms.
pub fn many_rows_are_independent<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    norm_case::many_rows_are_independent(arm, KINDS)
}

/// Shapes that do not fit a norm of 5 rows of 4 in grains of 2, and gradients of another kind than their input.
pub fn refuses_shapes<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    let shape = NormShape::layer(GrainRows::new(5, 2).unwrap(), 4, 1e-5).unwrap();
    for (wrong, sizes) in wrong_by_one([5, 4, 5, 4, 10, 4, 4]) {
        let [rows, width, x_rows, x_width, statistics, weight, bias] = sizes;
        for input in [Input::Residual, Input::Activation] {
            let inputs = NormInputs {
                x: match input {
                    Input::Residual => NormInput::Residual(matrix(&bench.zeros, [x_rows, x_width])),
                    Input::Activation => {
                        NormInput::Activation(matrix(&bench.activations, [x_rows, x_width]))
                    }
                },
                weight: slice(&bench.zeros, weight),
                bias: Some(slice(&bench.zeros, bias)),
            };
            let result = backend.norm_forward(
                &mut bench.device.stream,
                matrix_mut(&mut bench.activation_outs[0], [rows, width]),
                slice_mut(&mut bench.outs[0], statistics),
                inputs,
                shape,
            );
            assert_answer("layer_norm_forward", wrong, result);
        }
    }
    for (wrong, sizes) in wrong_by_one([5, 4, 5, 4, 12, 12, 10, 4, 5, 4, 5, 4]) {
        let (of_residual, dy) = ([sizes[0], sizes[1]], [sizes[8], sizes[9]]);
        let rounded = [sizes[10], sizes[11]];
        for (gradient, input) in [
            (Input::Residual, Input::Residual),
            (Input::Activation, Input::Activation),
            (Input::Residual, Input::Activation),
            (Input::Activation, Input::Residual),
        ] {
            let [dx, dweight, dbias, ..] = &mut bench.outs;
            let gradients = NormGradients {
                x: match gradient {
                    Input::Residual => NormGradient::Residual {
                        dx: matrix_mut(dx, of_residual),
                        rounded: Some(matrix_mut(&mut bench.activation_outs[0], rounded)),
                        dy: matrix(&bench.activations, dy),
                    },
                    Input::Activation => NormGradient::InPlace(matrix_mut(
                        &mut bench.activation_outs[0],
                        of_residual,
                    )),
                },
                dweight: slice_mut(dweight, sizes[4]),
                dbias: Some(slice_mut(dbias, sizes[5])),
            };
            let saved = NormSaved {
                x: match input {
                    Input::Residual => {
                        NormInput::Residual(matrix(&bench.zeros, [sizes[2], sizes[3]]))
                    }
                    Input::Activation => {
                        NormInput::Activation(matrix(&bench.activations, [sizes[2], sizes[3]]))
                    }
                },
                statistics: slice(&bench.zeros, sizes[6]),
                weight: slice(&bench.zeros, sizes[7]),
            };
            let result = backend.norm_backward(&mut bench.device.stream, gradients, saved, shape);
            // A gradient in place has neither dy nor a copy of dx.
            let wrong = wrong.filter(|&size| gradient == Input::Residual || size < 8);
            if gradient == input {
                assert_answer("layer_norm_backward", wrong, result);
            } else {
                assert_shape_error("a gradient of another kind than x", result);
            }
        }
    }
    bench.finish();
}
