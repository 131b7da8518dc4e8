//! The gate of SwiGLU.

use tidemill_kernels::Backend;
use tidemill_kernels::reference::gated_silu::{backward, forward};

use super::agreement::{Transcript, assert_close_beside, assert_same_bits, tolerance};
use super::arm::Arm;
use super::device::{Device, Layout, MARGINS, Placed};
use super::inputs::{Inputs, wide};
use super::number::Number;
use super::refusal_case::{Bench, assert_answer, matrix, matrix_mut, wrong_by_one};

/// Rows and columns of the output: of one element, odd, and beyond a block's columns.
const SHAPES: [[usize; 2]; 5] = [[1, 1], [3, 7], [5, 16], [9, 129], [2, 2056]];

/// `[out, out again, gradient]` of `x[rows, 2 n]` and `dout[rows, n]`.
fn run<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    [x, dout]: [&[f32]; 2],
    [rows, width]: [usize; 2],
) -> [Vec<f32>; 3] {
    // The columns before dout are overwritten, whatever they hold.
    let both: Vec<f32> =
        dout.chunks(width).flat_map(|row| [vec![f32::NAN; width], row.to_vec()].concat()).collect();
    let strided = Layout::inside_wider(rows, 2 * width);
    let x = Placed::<B, B::Activation>::new(device, strided, x);
    let mut gradient = Placed::<B, B::Activation>::new(device, strided, &both);
    let mut out = Placed::<B, B::Activation>::poisoned(device, Layout::packed(rows, width));
    let mut again = Placed::<B, B::Activation>::poisoned(device, Layout::inside_wider(rows, width));
    let (backend, stream) = (device.backend, &mut device.stream);
    backend.gated_silu_forward(stream, out.matrix_mut(), x.matrix()).unwrap();
    backend
        .gated_silu_backward(stream, gradient.matrix_mut(), again.matrix_mut(), x.matrix())
        .unwrap();
    [out.read(device), again.read(device), gradient.read(device)]
}

/// Values and gradients agree with the definition, values are the same in both directions, and rows do not depend on other rows.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for (seed, [rows, width]) in SHAPES.into_iter().enumerate() {
        let label = format!("gated_silu [{rows}, {width}] seed {seed}");
        let inputs = &mut Inputs::new(seed as u64);
        let x = inputs.uniform_of::<B::Activation>(2 * rows * width, -6.0, 6.0);
        let dout = inputs.uniform_of::<B::Activation>(rows * width, -1.0, 1.0);
        device.margin = MARGINS[0];
        let [out, again, gradient] = run(&mut device, [&x, &dout], [rows, width]);
        let allowed = tolerance::<B::Activation>(1);
        let values = forward(&wide(&x), width);
        assert_close_beside(&format!("{label} forward"), &out, &values, allowed, 1.0);
        let gradients = backward(&wide(&dout), &wide(&x), width);
        assert_close_beside(&format!("{label} backward"), &gradient, &gradients, allowed, 1.0);
        assert_same_bits(&format!("{label} values again"), &again, &out);
        transcript.record(&label, &out);
        transcript.record(&label, &gradient);
        // The last row alone, unaligned.
        device.margin = MARGINS[1];
        let last = (rows - 1) * width;
        let alone = [&x[2 * last..], &dout[last..]];
        let [alone, _, alone_gradient] = run(&mut device, alone, [1, width]);
        assert_same_bits(&label, &alone, &out[last..]);
        assert_same_bits(&label, &alone_gradient, &gradient[2 * last..]);
    }
    transcript
}

/// Saturated gates, closed and open: no NaN without a NaN in the input, and a NaN for each NaN.
pub fn saturates<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let gates = [100.0, 40.0, 0.0, -40.0, -1e20, f32::NAN];
    let x: Vec<f32> = gates.into_iter().chain([2.0; 6]).collect();
    let x: Vec<f32> = x.into_iter().map(|x| B::Activation::rounded(x).widened()).collect();
    let [out, _, gradient] = run(&mut device, [&x, &[1.0; 6]], [1, 6]);
    assert_same_bits("open", &out[..3], &[200.0, 80.0, 0.0]);
    assert_same_bits("slopes", &gradient[..3], &[2.0, 2.0, 1.0]);
    for y in out[3..5].iter().chain(&gradient[3..5]) {
        assert!(y.abs() < 1e-15, "{out:?}, {gradient:?}");
    }
    assert!(out[5].is_nan() && gradient[5].is_nan());
    transcript.record("gated_silu", &out[..5]);
    transcript
}

/// Shapes that do not fit 5 rows of 4.
pub fn refuses_shapes<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    for (wrong, sizes) in wrong_by_one([5, 4, 5, 8, 5, 8]) {
        let [rows, width, x_rows, x_width, of_rows, of_width] = sizes;
        let (stream, outs) = (&mut bench.device.stream, &mut bench.activation_outs);
        let [out, gradient, ..] = outs;
        let x = matrix(&bench.activations, [x_rows, x_width]);
        let of = matrix_mut(gradient, [of_rows, of_width]);
        let result = backend.gated_silu_backward(stream, of, matrix_mut(out, [rows, width]), x);
        assert_answer("gated_silu_backward", wrong, result);
        let result = backend.gated_silu_forward(stream, matrix_mut(out, [rows, width]), x);
        assert_answer("gated_silu_forward", wrong.filter(|&size| size < 4), result);
    }
    bench.finish();
}
