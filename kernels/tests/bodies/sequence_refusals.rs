//! Shapes that do not fit the kernels over positions: every kernel returns an error, none panics.

use tidemill_kernels::backend::{
    ConvGradients, ConvInputs, PieceState, ScanGradients, ScanInputs, ScanSaved,
};
use tidemill_kernels::shape::{ConvShape, ScanShape, SequenceShape};
use tidemill_kernels::{Backend, Result};

use super::arm::Arm;
use super::device::assert_shape_error;
use super::number::Number;
use super::refusal_case::{
    Bench, assert_answer, matrix, matrix_mut, slice, slice_mut, wrong_by_one,
};

/// Convolution of 3 samples of 4 positions in grains of 2; 5 channels, 3 taps.
pub fn causal_conv1d<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    let sequences = SequenceShape::new(3, 4).unwrap();
    let shape = ConvShape::new(sequences, 2, 5, 3).unwrap();
    for (wrong, [rows, channels, x_rows, x_channels, weight, bias, starts]) in
        wrong_by_one([12, 5, 12, 5, 15, 5, 12])
    {
        let stream = &mut bench.device.stream;
        let out = matrix_mut(&mut bench.activation_outs[0], [rows, channels]);
        let inputs = ConvInputs {
            x: matrix(&bench.activations, [x_rows, x_channels]),
            weight: slice(&bench.zeros, weight),
            bias: Some(slice(&bench.zeros, bias)),
            starts: Some(slice(&bench.tokens, starts)),
        };
        let result = backend.causal_conv1d_silu_forward(stream, out, inputs, shape);
        assert_answer("causal_conv1d_silu_forward", wrong, result);
    }
    let sizes = [12, 5, 30, 10, 12, 5, 12, 5, 15, 5, 12];
    for (wrong, sizes) in wrong_by_one(sizes) {
        let [rows, e, dweight_size, dbias_size, dout_rows, dout_e, ..] = sizes;
        let [.., x_rows, x_e, weight, bias, starts] = sizes;
        let stream = &mut bench.device.stream;
        let [dweight, dbias, ..] = &mut bench.outs;
        let result = backend.causal_conv1d_silu_backward(
            stream,
            ConvGradients {
                dx: matrix_mut(&mut bench.activation_outs[0], [rows, e]),
                dweight: slice_mut(dweight, dweight_size),
                dbias: Some(slice_mut(dbias, dbias_size)),
            },
            matrix(&bench.activations, [dout_rows, dout_e]),
            ConvInputs {
                x: matrix(&bench.activations, [x_rows, x_e]),
                weight: slice(&bench.zeros, weight),
                bias: Some(slice(&bench.zeros, bias)),
                starts: Some(slice(&bench.tokens, starts)),
            },
            shape,
        );
        assert_answer("causal_conv1d_silu_backward", wrong, result);
    }
    for (with_bias, with_dbias) in [(true, false), (false, true)] {
        let stream = &mut bench.device.stream;
        let [dweight, dbias, ..] = &mut bench.outs;
        let result = backend.causal_conv1d_silu_backward(
            stream,
            ConvGradients {
                dx: matrix_mut(&mut bench.activation_outs[0], [12, 5]),
                dweight: slice_mut(dweight, 30),
                dbias: with_dbias.then(|| slice_mut(dbias, 10)),
            },
            matrix(&bench.activations, [12, 5]),
            ConvInputs {
                x: matrix(&bench.activations, [12, 5]),
                weight: slice(&bench.zeros, 15),
                bias: with_bias.then(|| slice(&bench.zeros, 5)),
                starts: None,
            },
            shape,
        );
        assert_shape_error("a bias without its gradient, or the reverse", result);
    }
    bench.finish();
}

/// Pieces of the convolution, which have lengths and no starts.
pub fn causal_conv1d_piece<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    let shape = ConvShape::new(SequenceShape::new(3, 2).unwrap(), 1, 5, 3).unwrap();
    let mut piece = |[rows, e, state, lengths, x_rows, x_e, weight, bias]: [usize; 8], starts| {
        let [out, held, ..] = &mut bench.activation_outs;
        backend.causal_conv1d_silu_piece(
            &mut bench.device.stream,
            matrix_mut(out, [rows, e]),
            PieceState {
                state: slice_mut(held, state),
                lengths: Some(slice(&bench.tokens, lengths)),
            },
            ConvInputs {
                x: matrix(&bench.activations, [x_rows, x_e]),
                weight: slice(&bench.zeros, weight),
                bias: Some(slice(&bench.zeros, bias)),
                starts: (starts > 0).then(|| slice(&bench.tokens, starts)),
            },
            shape,
        )
    };
    let sizes = [6, 5, 30, 3, 6, 5, 15, 5];
    for (wrong, sizes) in wrong_by_one(sizes) {
        assert_answer("causal_conv1d_silu_piece", wrong, piece(sizes, 0));
    }
    assert_shape_error("a piece of documents", piece(sizes, 6));
    bench.finish();
}

/// Sizes of a scan's inputs: rows and columns of delta_raw, x, bc and z, then delta_bias, a_log, d
/// and starts.
type ScanSizes = [usize; 12];

fn scan_sizes(shape: ScanShape) -> ScanSizes {
    let (rows, e, n) = (shape.sequences().rows(), shape.channels(), shape.states());
    [rows, e, rows, e, rows, 2 * n, rows, e, e, e * n, e, rows]
}

/// Buffers of zeros for a scan's activations, parameters and starts.
struct ScanZeros<'a, B: Backend>(
    &'a B::Buffer<B::Activation>,
    &'a B::Buffer<f32>,
    &'a B::Buffer<u32>,
);

impl<'a, B: Backend> ScanZeros<'a, B> {
    fn inputs(&self, sizes: ScanSizes) -> ScanInputs<'a, B> {
        ScanInputs {
            delta_raw: matrix(self.0, [sizes[0], sizes[1]]),
            x: matrix(self.0, [sizes[2], sizes[3]]),
            bc: matrix(self.0, [sizes[4], sizes[5]]),
            z: matrix(self.0, [sizes[6], sizes[7]]),
            delta_bias: slice(self.1, sizes[8]),
            a_log: slice(self.1, sizes[9]),
            d: slice(self.1, sizes[10]),
            starts: Some(slice(self.2, sizes[11])),
        }
    }
}

/// Scan of 3 samples of 4 positions in grains of 2; 5 channels of 2 states.
pub fn selective_scan<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    let shape = ScanShape::new(SequenceShape::new(3, 4).unwrap(), 2, 5, 2).unwrap();
    let saved_elements = backend.selective_scan_saved_elements(shape);
    for (wrong, inputs) in wrong_by_one(scan_sizes(shape)) {
        for (wrong_out, [rows, e]) in wrong_by_one([12, 5]) {
            let zeros = ScanZeros(&bench.activations, &bench.zeros, &bench.tokens);
            let result = backend.selective_scan_forward(
                &mut bench.device.stream,
                matrix_mut(&mut bench.activation_outs[0], [rows, e]),
                slice_mut(&mut bench.outs[0], saved_elements),
                zeros.inputs(inputs),
                shape,
            );
            assert_answer("selective_scan_forward", wrong.or(wrong_out), result);
        }
    }
    let zeros = ScanZeros(&bench.activations, &bench.zeros, &bench.tokens);
    let result = backend.selective_scan_forward(
        &mut bench.device.stream,
        matrix_mut(&mut bench.activation_outs[0], [12, 5]),
        slice_mut(&mut bench.outs[0], saved_elements - 1),
        zeros.inputs(scan_sizes(shape)),
        shape,
    );
    assert_shape_error("saved too small, forward", result);

    for (wrong, inputs) in wrong_by_one(scan_sizes(shape)).into_iter().skip(1) {
        let result = scan_backward(&mut bench, BACKWARD_SIZES, saved_elements, inputs, shape);
        assert_answer("selective_scan_backward", wrong, result);
    }
    for (wrong, sizes) in wrong_by_one(BACKWARD_SIZES) {
        let inputs = scan_sizes(shape);
        let result = scan_backward(&mut bench, sizes, saved_elements, inputs, shape);
        assert_answer("selective_scan_backward", wrong, result);
    }
    let result =
        scan_backward(&mut bench, BACKWARD_SIZES, saved_elements - 1, scan_sizes(shape), shape);
    assert_shape_error("saved too small, backward", result);
    bench.finish();
}

/// Rows and columns of ddelta_raw, dx, dbc, dz, regated and dout, then da_log, dd, ddelta_bias.
const BACKWARD_SIZES: [usize; 15] = [12, 5, 12, 5, 12, 4, 12, 5, 12, 5, 12, 5, 20, 10, 10];

fn scan_backward<B: Backend<Activation: Number>>(
    bench: &mut Bench<'_, B>,
    sizes: [usize; 15],
    saved_elements: usize,
    inputs: ScanSizes,
    shape: ScanShape,
) -> Result<()> {
    let backend = bench.device.backend;
    let saved = bench.device.upload(&vec![0.0; saved_elements]);
    let [ddelta_raw, dx, dbc, dz, regated] = &mut bench.activation_outs;
    let [da_log, dd, ddelta_bias, ..] = &mut bench.outs;
    let zeros = ScanZeros(&bench.activations, &bench.zeros, &bench.tokens);
    let gradients = ScanGradients {
        ddelta_raw: matrix_mut(ddelta_raw, [sizes[0], sizes[1]]),
        dx: matrix_mut(dx, [sizes[2], sizes[3]]),
        dbc: matrix_mut(dbc, [sizes[4], sizes[5]]),
        dz: matrix_mut(dz, [sizes[6], sizes[7]]),
        da_log: slice_mut(da_log, sizes[12]),
        dd: slice_mut(dd, sizes[13]),
        regated: Some(matrix_mut(regated, [sizes[8], sizes[9]])),
        ddelta_bias: slice_mut(ddelta_bias, sizes[14]),
    };
    backend.selective_scan_backward(
        &mut bench.device.stream,
        gradients,
        ScanSaved {
            dout: matrix(&bench.activations, [sizes[10], sizes[11]]),
            inputs: zeros.inputs(inputs),
            saved: slice(&saved, saved_elements),
        },
        shape,
    )
}

/// Pieces of the scan, which have lengths and no starts.
pub fn selective_scan_piece<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    let shape = ScanShape::new(SequenceShape::new(3, 2).unwrap(), 1, 5, 2).unwrap();
    let mut piece = |[rows, e, held, lengths]: [usize; 4], inputs: ScanSizes, documents| {
        let zeros = ScanZeros(&bench.activations, &bench.zeros, &bench.tokens);
        let inputs = zeros.inputs(inputs);
        let starts = if documents { inputs.starts } else { None };
        backend.selective_scan_piece(
            &mut bench.device.stream,
            matrix_mut(&mut bench.activation_outs[0], [rows, e]),
            PieceState {
                state: slice_mut(&mut bench.outs[0], held),
                lengths: Some(slice(&bench.tokens, lengths)),
            },
            ScanInputs { starts, ..inputs },
            shape,
        )
    };
    let sizes = [6, 5, 30, 3];
    for (wrong, inputs) in wrong_by_one(scan_sizes(shape)).into_iter().take(23) {
        assert_answer("selective_scan_piece", wrong, piece(sizes, inputs, false));
    }
    for (wrong, sizes) in wrong_by_one(sizes) {
        assert_answer("selective_scan_piece", wrong, piece(sizes, scan_sizes(shape), false));
    }
    assert_shape_error("a piece of documents", piece(sizes, scan_sizes(shape), true));
    bench.finish();
}
