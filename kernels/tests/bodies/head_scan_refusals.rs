//! Shapes that do not fit the scan of heads.

use tidemill_kernels::Backend;
use tidemill_kernels::backend::{DeltaLimits, HeadScanGradients, HeadScanInputs, PieceState};
use tidemill_kernels::shape::{HeadScanShape, HeadScanSizes, SequenceShape};

use super::arm::Arm;
use super::device::assert_shape_error;
use super::number::Number;
use super::refusal_case::{
    Bench, assert_answer, matrix, matrix_mut, slice, slice_mut, wrong_by_one,
};

/// Two groups of two heads of 3 channels, 2 states, in grains of 2.
fn shape(samples: usize, positions: usize) -> HeadScanShape {
    let sizes = HeadScanSizes { heads: 4, head_width: 3, groups: 2, states: 2 };
    HeadScanShape::new(SequenceShape::new(samples, positions).unwrap(), 2, sizes).unwrap()
}

/// Sizes of the inputs: rows and columns of projected and xbc, then delta_bias, a_log, d and starts.
type InputSizes = [usize; 8];

fn input_sizes(rows: usize) -> InputSizes {
    [rows, 36, rows, 20, 4, 4, 4, rows]
}

/// Buffers of zeros for activations, parameters and starts.
struct Zeros<'a, B: Backend>(&'a B::Buffer<B::Activation>, &'a B::Buffer<f32>, &'a B::Buffer<u32>);

impl<'a, B: Backend> Zeros<'a, B> {
    fn inputs(&self, sizes: InputSizes) -> HeadScanInputs<'a, B> {
        HeadScanInputs {
            projected: matrix(self.0, [sizes[0], sizes[1]]),
            xbc: matrix(self.0, [sizes[2], sizes[3]]),
            delta_bias: slice(self.1, sizes[4]),
            a_log: slice(self.1, sizes[5]),
            d: slice(self.1, sizes[6]),
            delta_limits: DeltaLimits::NONE,
            starts: Some(slice(self.2, sizes[7])),
        }
    }
}

/// 3 samples of 4 positions.
pub fn head_scan<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    let shape = shape(3, 4);
    for (wrong, of_inputs) in wrong_by_one(input_sizes(12)) {
        for (wrong_out, out) in wrong_by_one([12, 12]) {
            let zeros = Zeros(&bench.activations, &bench.zeros, &bench.tokens);
            let result = backend.head_scan_forward(
                &mut bench.device.stream,
                matrix_mut(&mut bench.outs[0], out),
                zeros.inputs(of_inputs),
                shape,
            );
            assert_answer("head_scan_forward", wrong.or(wrong_out), result);
        }
    }
    // Rows and columns of dprojected, dxbc and dout, then da_log, dd and ddelta_bias.
    let sizes = [12, 36, 12, 20, 12, 12, 8, 8, 8];
    let mut backward = |sizes: [usize; 9], of_inputs| {
        let zeros = Zeros(&bench.activations, &bench.zeros, &bench.tokens);
        let [dprojected, dxbc, ..] = &mut bench.activation_outs;
        let [da_log, dd, ddelta_bias, ..] = &mut bench.outs;
        let gradients = HeadScanGradients {
            dprojected: matrix_mut(dprojected, [sizes[0], sizes[1]]),
            dxbc: matrix_mut(dxbc, [sizes[2], sizes[3]]),
            da_log: slice_mut(da_log, sizes[6]),
            dd: slice_mut(dd, sizes[7]),
            ddelta_bias: slice_mut(ddelta_bias, sizes[8]),
        };
        let dout = matrix(&bench.zeros, [sizes[4], sizes[5]]);
        let inputs = zeros.inputs(of_inputs);
        backend.head_scan_backward(&mut bench.device.stream, gradients, dout, inputs, shape)
    };
    for (wrong, sizes) in wrong_by_one(sizes) {
        assert_answer("head_scan_backward", wrong, backward(sizes, input_sizes(12)));
    }
    for (wrong, of_inputs) in wrong_by_one(input_sizes(12)) {
        assert_answer("head_scan_backward", wrong, backward(sizes, of_inputs));
    }
    bench.finish();
}

/// Pieces, which have lengths and no starts: 3 of 2 positions.
pub fn head_scan_piece<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    let shape = shape(3, 2);
    let mut piece = |[rows, e, held, lengths]: [usize; 4], of_inputs: InputSizes, documents| {
        let zeros = Zeros(&bench.activations, &bench.zeros, &bench.tokens);
        let inputs = zeros.inputs(of_inputs);
        let starts = if documents { inputs.starts } else { None };
        let [out, state, ..] = &mut bench.outs;
        backend.head_scan_piece(
            &mut bench.device.stream,
            matrix_mut(out, [rows, e]),
            PieceState {
                state: slice_mut(state, held),
                lengths: Some(slice(&bench.tokens, lengths)),
            },
            HeadScanInputs { starts, ..inputs },
            shape,
        )
    };
    let sizes = [6, 12, 72, 3];
    // Starts, the last of the inputs, are not given.
    for (wrong, of_inputs) in wrong_by_one(input_sizes(6)).into_iter().take(15) {
        assert_answer("head_scan_piece", wrong, piece(sizes, of_inputs, false));
    }
    for (wrong, sizes) in wrong_by_one(sizes) {
        assert_answer("head_scan_piece", wrong, piece(sizes, input_sizes(6), false));
    }
    assert_shape_error("a piece of documents", piece(sizes, input_sizes(6), true));
    bench.finish();
}
