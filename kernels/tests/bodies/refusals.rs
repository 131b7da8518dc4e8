//! Shapes that do not fit: every kernel answers them with an error, none panics.

use tidemill_kernels::backend::{AdamWStep, ConvInputs, LogitGradient, Output, ScanInputs};
use tidemill_kernels::shape::{
    ConvShape, CrossEntropyShape, GrainRows, NormShape, ScanShape, SequenceShape,
};
use tidemill_kernels::{Backend, Element, Matrix, MatrixMut, MemoryPlace, Slice, SliceMut};

use super::arm::Arm;
use super::device::{Device, assert_shape_error};
use super::number::Number;

/// `[rows, columns]` of a buffer of zeros.
pub fn matrix<B: Backend, T: Element>(
    buffer: &B::Buffer<T>,
    [rows, columns]: [usize; 2],
) -> Matrix<'_, B, T> {
    Matrix::new(buffer, 0, rows, columns, columns, 1).unwrap()
}

pub fn matrix_mut<B: Backend, T: Element>(
    buffer: &mut B::Buffer<T>,
    [rows, columns]: [usize; 2],
) -> MatrixMut<'_, B, T> {
    MatrixMut::new(buffer, 0, rows, columns, columns).unwrap()
}

pub fn slice<B: Backend, T: Element>(buffer: &B::Buffer<T>, elements: usize) -> Slice<'_, B, T> {
    Slice::new(buffer, 0, elements).unwrap()
}

pub fn slice_mut<B: Backend, T: Element>(
    buffer: &mut B::Buffer<T>,
    elements: usize,
) -> SliceMut<'_, B, T> {
    SliceMut::new(buffer, 0, elements).unwrap()
}

/// The sizes of a call with one of them, in turn, made wrong: none (a call that must succeed), then
/// each dimension one larger and one smaller.
pub fn wrong_by_one<const N: usize>(sizes: [usize; N]) -> Vec<(Option<usize>, [usize; N])> {
    let mut cases = vec![(None, sizes)];
    for i in 0..N {
        for wrong in [sizes[i] + 1, sizes[i] - 1] {
            let mut sizes = sizes;
            sizes[i] = wrong;
            cases.push((Some(i), sizes));
        }
    }
    cases
}

#[track_caller]
pub fn assert_answer(kernel: &str, wrong: Option<usize>, result: tidemill_kernels::Result<()>) {
    match wrong {
        None => result.expect(kernel),
        Some(i) => assert_shape_error(&format!("{kernel}, size {i} wrong"), result),
    }
}

/// A device with zeros for every operand.
pub struct Bench<'a, B: Backend> {
    pub device: Device<'a, B>,
    pub outs: [B::Buffer<f32>; 4],
    pub activation_outs: [B::Buffer<B::Activation>; 5],
    pub zeros: B::Buffer<f32>,
    pub activations: B::Buffer<B::Activation>,
    pub tokens: B::Buffer<u32>,
}

impl<'a, B: Backend<Activation: Number>> Bench<'a, B> {
    pub fn new(arm: &'a Arm<B>) -> Self {
        let mut device = Device::new(arm);
        let none = B::Activation::rounded(0.0);
        Self {
            outs: [(); 4].map(|()| device.upload(&[0.0; 4096])),
            activation_outs: [(); 5].map(|()| device.upload(&[none; 4096])),
            zeros: device.upload(&[0.0; 4096]),
            activations: device.upload(&[none; 4096]),
            tokens: device.upload(&[0; 4096]),
            device,
        }
    }

    /// Calls that were answered must have run, too.
    pub fn finish(mut self) {
        self.device.download(&self.outs[0]);
    }
}

/// Matrix products.
pub fn matmul<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    for (wrong, [m, k, n, rows, inner, columns]) in wrong_by_one([3, 4, 5, 3, 4, 5]) {
        let stream = &mut bench.device.stream;
        let (a, b) = (matrix(&bench.activations, [m, k]), matrix(&bench.activations, [inner, n]));
        let out = matrix_mut(&mut bench.activation_outs[0], [rows, columns]);
        assert_answer("matmul", wrong, backend.matmul(stream, out, a, b, Output::Overwrite));
        let out = matrix_mut(&mut bench.outs[0], [rows, columns]);
        assert_answer("matmul_f32", wrong, backend.matmul_f32(stream, out, a, b, Output::Add));
    }
    bench.finish();
}

/// Products of matrices whose rows or columns overlap, the last of them at the end of its buffer: read with a stride that
/// holds a row, they would be read past it. A matrix library of a device's refuses them; the host's reads them as they are.
pub fn overlapping_matmul<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    let [rows, terms] = [3, 4];
    let square = matrix(&bench.activations, [terms, terms]);
    for stride in [0, 1, terms - 1] {
        let start = 4096 - (rows - 1) * stride - terms;
        let a = Matrix::new(&bench.activations, start, rows, terms, stride, 1).unwrap();
        for (a, b) in [(a, square), (square, a.transposed())] {
            let [out_rows, out_columns] = [a.shape()[0], b.shape()[1]];
            let out = matrix_mut(&mut bench.activation_outs[0], [out_rows, out_columns]);
            let stream = &mut bench.device.stream;
            let result = backend.matmul(stream, out, a, b, Output::Overwrite);
            match backend.memory() {
                MemoryPlace::Host => result.unwrap(),
                MemoryPlace::Device => assert_shape_error("rows that overlap", result),
            }
        }
    }
    // A single row may have any stride.
    let a = Matrix::new(&bench.activations, 4096 - terms, 1, terms, 0, 1).unwrap();
    let out = matrix_mut(&mut bench.activation_outs[0], [1, terms]);
    backend.matmul(&mut bench.device.stream, out, a, square, Output::Overwrite).unwrap();
    bench.finish();
}

/// Embedding: out and dout `[rows, d]`, tokens `[rows]`, table `[v, d]`.
pub fn embedding<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    for (wrong, [rows, width, tokens, table_width]) in wrong_by_one([4, 3, 4, 3]) {
        let stream = &mut bench.device.stream;
        let tokens = Slice::new(&bench.tokens, 0, tokens).unwrap();
        let out = matrix_mut(&mut bench.outs[0], [rows, width]);
        let table = matrix(&bench.zeros, [6, table_width]);
        let result = backend.embedding_forward(stream, out, table, tokens, Output::Overwrite);
        assert_answer("embedding_forward", wrong, result);
        let lane = matrix_mut(&mut bench.outs[0], [6, table_width]);
        let dout = matrix(&bench.zeros, [rows, width]);
        let grains = GrainRows::new(4, 2).unwrap();
        let result = backend.embedding_backward_add(stream, lane, dout, tokens, grains);
        assert_answer("embedding_backward_add", wrong, result);
    }
    bench.finish();
}

/// RMSNorm of 5 rows of 4 in grains of 2.
pub fn rms_norm<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    let shape = NormShape::new(GrainRows::new(5, 2).unwrap(), 4, 1e-5).unwrap();
    for (wrong, [rows, width, x_rows, x_width, reciprocal, weight]) in
        wrong_by_one([5, 4, 5, 4, 5, 4])
    {
        let stream = &mut bench.device.stream;
        let result = backend.rms_norm_forward(
            stream,
            matrix_mut(&mut bench.activation_outs[0], [rows, width]),
            slice_mut(&mut bench.outs[0], reciprocal),
            matrix(&bench.zeros, [x_rows, x_width]),
            slice(&bench.zeros, weight),
            shape,
        );
        assert_answer("rms_norm_forward", wrong, result);
    }
    let sizes = [5, 4, 3 * 4, 5, 4, 5, 4, 5, 4];
    for (wrong, [rows, width, dweight, dy_rows, dy_width, x_rows, x_width, reciprocal, weight]) in
        wrong_by_one(sizes)
    {
        let stream = &mut bench.device.stream;
        let [dx, dweight_out, ..] = &mut bench.outs;
        let result = backend.rms_norm_backward(
            stream,
            matrix_mut(dx, [rows, width]),
            slice_mut(dweight_out, dweight),
            matrix(&bench.activations, [dy_rows, dy_width]),
            matrix(&bench.zeros, [x_rows, x_width]),
            slice(&bench.zeros, reciprocal),
            slice(&bench.zeros, weight),
            shape,
        );
        assert_answer("rms_norm_backward", wrong, result);
    }
    bench.finish();
}

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
            matrix_mut(&mut bench.activation_outs[0], [rows, e]),
            slice_mut(dweight, dweight_size),
            Some(slice_mut(dbias, dbias_size)),
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
            matrix_mut(&mut bench.activation_outs[0], [12, 5]),
            slice_mut(dweight, 30),
            with_dbias.then(|| slice_mut(dbias, 10)),
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

/// One position of the convolution.
pub fn causal_conv1d_step<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    for (wrong, sizes) in wrong_by_one([3, 5, 30, 3, 5, 15, 5]) {
        let [rows, e, state_size, x_rows, x_e, weight, bias] = sizes;
        let shape = ConvShape::new(SequenceShape::new(3, 1).unwrap(), 1, 5, 3).unwrap();
        let stream = &mut bench.device.stream;
        let result = backend.causal_conv1d_silu_step(
            stream,
            matrix_mut(&mut bench.activation_outs[0], [rows, e]),
            slice_mut(&mut bench.outs[0], state_size),
            matrix(&bench.activations, [x_rows, x_e]),
            slice(&bench.zeros, weight),
            Some(slice(&bench.zeros, bias)),
            shape,
        );
        assert_answer("causal_conv1d_silu_step", wrong, result);
    }
    let shape = ConvShape::new(SequenceShape::new(3, 2).unwrap(), 1, 5, 3).unwrap();
    let result = backend.causal_conv1d_silu_step(
        &mut bench.device.stream,
        matrix_mut(&mut bench.activation_outs[0], [6, 5]),
        slice_mut(&mut bench.outs[0], 30),
        matrix(&bench.activations, [6, 5]),
        slice(&bench.zeros, 15),
        None,
        shape,
    );
    assert_shape_error("a step of two positions", result);
    bench.finish();
}

/// Sizes of a scan's inputs: rows and columns of delta_raw, x, bc and z, then delta_bias, a_log, d
/// and starts.
type ScanSizes = [usize; 12];

fn scan_sizes(shape: ScanShape) -> ScanSizes {
    let (rows, e, n) = (shape.sequences().rows(), shape.channels(), shape.states());
    [rows, e, rows, e, rows, 2 * n, rows, e, e, e * n, e, rows]
}

/// Buffers of zeros that a scan's activations, parameters and starts lie in.
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
        assert_answer("selective_scan_backward inputs", wrong, result);
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
) -> tidemill_kernels::Result<()> {
    let backend = bench.device.backend;
    let saved = bench.device.upload(&vec![0.0; saved_elements]);
    let [ddelta_raw, dx, dbc, dz, regated] = &mut bench.activation_outs;
    let [da_log, dd, ddelta_bias, ..] = &mut bench.outs;
    let zeros = ScanZeros(&bench.activations, &bench.zeros, &bench.tokens);
    let gradients = tidemill_kernels::backend::ScanGradients {
        ddelta_raw: matrix_mut(ddelta_raw, [sizes[0], sizes[1]]),
        dx: matrix_mut(dx, [sizes[2], sizes[3]]),
        dbc: matrix_mut(dbc, [sizes[4], sizes[5]]),
        dz: matrix_mut(dz, [sizes[6], sizes[7]]),
        da_log: slice_mut(da_log, sizes[12]),
        dd: slice_mut(dd, sizes[13]),
        ddelta_bias: slice_mut(ddelta_bias, sizes[14]),
    };
    backend.selective_scan_backward(
        &mut bench.device.stream,
        gradients,
        Some(matrix_mut(regated, [sizes[8], sizes[9]])),
        matrix(&bench.activations, [sizes[10], sizes[11]]),
        zeros.inputs(inputs),
        slice(&saved, saved_elements),
        shape,
    )
}

/// One position of the scan, which has no starts.
pub fn selective_scan_step<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    let shape = ScanShape::new(SequenceShape::new(3, 1).unwrap(), 1, 5, 2).unwrap();
    let mut step = |shape: ScanShape, [rows, e, held]: [usize; 3], inputs: ScanSizes| {
        let zeros = ScanZeros(&bench.activations, &bench.zeros, &bench.tokens);
        backend.selective_scan_step(
            &mut bench.device.stream,
            matrix_mut(&mut bench.activation_outs[0], [rows, e]),
            slice_mut(&mut bench.outs[0], held),
            ScanInputs { starts: None, ..zeros.inputs(inputs) },
            shape,
        )
    };
    for (wrong, inputs) in wrong_by_one(scan_sizes(shape)).into_iter().take(23) {
        assert_answer("selective_scan_step inputs", wrong, step(shape, [3, 5, 30], inputs));
    }
    for (wrong, sizes) in wrong_by_one([3, 5, 30]) {
        assert_answer("selective_scan_step", wrong, step(shape, sizes, scan_sizes(shape)));
    }
    let two = ScanShape::new(SequenceShape::new(3, 2).unwrap(), 1, 5, 2).unwrap();
    assert_shape_error("a step of two positions", step(two, [6, 5, 30], scan_sizes(two)));
    bench.finish();
}

/// Cross-entropy of 3 rows of 5 logits, 8 apart.
pub fn cross_entropy<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    let shape = CrossEntropyShape::new(3, 5, 8).unwrap();
    for (wrong, [losses, logits, targets]) in wrong_by_one([3, 24, 3]) {
        let result = backend.cross_entropy(
            &mut bench.device.stream,
            slice_mut(&mut bench.outs[0], losses),
            slice_mut(&mut bench.activation_outs[0], logits),
            Slice::new(&bench.tokens, 0, targets).unwrap(),
            LogitGradient::InPlace,
            shape,
        );
        assert_answer("cross_entropy", wrong, result);
    }
    bench.finish();
}

/// Gradients of a weight `[5, 4]` from 6 rows.
pub fn weight_gradient<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    let sizes = [5, 4, 6, 5, 6, 4, 6];
    for (wrong, [m, k, grad_rows, grad_width, input_rows, input_width, rows]) in wrong_by_one(sizes)
    {
        let result = backend.weight_gradient_add(
            &mut bench.device.stream,
            matrix_mut(&mut bench.outs[0], [m, k]),
            matrix(&bench.activations, [grad_rows, grad_width]),
            matrix(&bench.activations, [input_rows, input_width]),
            GrainRows::new(rows, 4).unwrap(),
        );
        assert_answer("weight_gradient_add", wrong, result);
    }
    bench.finish();
}

/// Sums of gradients, and AdamW.
pub fn updates<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    for (wrong, [lane, gradients]) in wrong_by_one([7, 21]) {
        let stream = &mut bench.device.stream;
        let lane = slice_mut(&mut bench.outs[0], lane);
        let result = backend.accumulate(stream, lane, slice(&bench.zeros, gradients));
        assert_answer("accumulate", wrong, result);
    }
    for (wrong, [out, first, second]) in wrong_by_one([7, 7, 7]) {
        let stream = &mut bench.device.stream;
        let out = slice_mut(&mut bench.outs[0], out);
        let uses = [slice(&bench.zeros, first), slice(&bench.zeros, second)];
        assert_answer("mean_gradient", wrong, backend.mean_gradient(stream, out, &uses, 3.0));
    }
    let out = slice_mut(&mut bench.outs[0], 7);
    let result = backend.mean_gradient(&mut bench.device.stream, out, &[], 3.0);
    assert_shape_error("the mean of no uses", result);
    let x = slice(&bench.zeros, 7);
    for ends in [&[] as &[_], &[6], &[8], &[4, 3, 7], &[8, 7], &[usize::MAX, 7]] {
        let result = backend.sums_of_squares(&mut bench.device.stream, x, ends);
        assert_shape_error("sums_of_squares", result.map(drop));
    }
    let step = AdamWStep {
        learning_rate: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        decay_factor: 1.0,
        bias_correction1: 0.1,
        bias_correction2: 0.05,
        gradient_scale: 1.0,
    };
    for (wrong, [parameters, exp_avg, exp_avg_sq, gradient]) in wrong_by_one([7, 7, 7, 7]) {
        let [parameters_out, exp_avg_out, exp_avg_sq_out, ..] = &mut bench.outs;
        let result = backend.adamw(
            &mut bench.device.stream,
            slice_mut(parameters_out, parameters),
            slice_mut(exp_avg_out, exp_avg),
            slice_mut(exp_avg_sq_out, exp_avg_sq),
            slice(&bench.zeros, gradient),
            step,
        );
        assert_answer("adamw", wrong, result);
    }
    bench.finish();
}
