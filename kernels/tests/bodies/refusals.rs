//! Shapes that do not fit: every kernel returns an error, none panics.

use tidemill_kernels::backend::{LogitGradient, Output};
use tidemill_kernels::shape::{CrossEntropyShape, GrainRows};
use tidemill_kernels::{Backend, Matrix, MemoryPlace, Slice, SliceMut};

use super::adamw::step;
use super::arm::Arm;
use super::device::assert_shape_error;
use super::number::Number;
use super::refusal_case::{
    Bench, assert_answer, matrix, matrix_mut, slice, slice_mut, wrong_by_one,
};

/// Matrix products.
pub fn matmul<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    for (wrong, [m, k, n, rows, inner, columns]) in wrong_by_one([3, 4, 5, 3, 4, 5]) {
        let stream = &mut bench.device.stream;
        let (a, b) = (matrix(&bench.activations, [m, k]), matrix(&bench.activations, [inner, n]));
        let out = matrix_mut(&mut bench.activation_outs[0], [rows, columns]);
        assert_answer("matmul", wrong, backend.matmul(stream, out, a, b, Output::Overwrite));
        let out = matrix_mut(&mut bench.outs[0], [rows, columns]);
        // Errors name the same kernel for either type of output.
        assert_answer("matmul", wrong, backend.matmul_f32(stream, out, a, b, Output::Add));
    }
    for (wrong, [rows, columns]) in wrong_by_one([3, 5]) {
        let (a, b) = (matrix(&bench.activations, [3, 4]), matrix(&bench.activations, [4, 5]));
        let out = matrix_mut(&mut bench.outs[0], [3, 5]);
        let base = matrix(&bench.zeros, [rows, columns]);
        let stream = &mut bench.device.stream;
        assert_answer("matmul", wrong, backend.matmul_onto(stream, out, base, a, b, None));
    }
    for (wrong, [bias]) in wrong_by_one([5]) {
        let factors = || (matrix(&bench.activations, [3, 4]), matrix(&bench.activations, [4, 5]));
        let bias = || slice(&bench.zeros, bias);
        let stream = &mut bench.device.stream;
        let (out, base) = (matrix_mut(&mut bench.outs[0], [3, 5]), matrix(&bench.zeros, [3, 5]));
        let (a, b) = factors();
        assert_answer("matmul", wrong, backend.matmul_onto(stream, out, base, a, b, Some(bias())));
        let out = matrix_mut(&mut bench.activation_outs[0], [3, 5]);
        let (a, b) = factors();
        assert_answer("matmul", wrong, backend.matmul_biased(stream, out, a, b, bias()));
    }
    bench.finish();
}

/// Products with a stated order over k.
pub fn ordered_product<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    // Errors of the host name one kernel for all products.
    let kernel = if backend.memory() == MemoryPlace::Host { "matmul" } else { "ordered_matmul" };
    for (wrong, [m, k, n, rows, inner, columns]) in wrong_by_one([3, 4, 5, 3, 4, 5]) {
        let stream = &mut bench.device.stream;
        let a = matrix(&bench.activations, [m, k]);
        let weight = matrix(&bench.activations, [n, inner]);
        let out = matrix_mut(&mut bench.activation_outs[0], [rows, columns]);
        let result = backend.ordered_matmul(stream, out, a, weight, Output::Overwrite);
        assert_answer(kernel, wrong, result);
        let out = matrix_mut(&mut bench.outs[0], [rows, columns]);
        let result = backend.ordered_matmul_f32(stream, out, a, weight, Output::Add);
        assert_answer(kernel, wrong, result);
    }
    bench.finish();
}

/// Products of matrices whose rows or columns overlap, the last of them at the end of its buffer:
/// read with a stride that holds a row, they would be read past the end. A device's matrix library
/// refuses them; the host's reads them as they are.
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
    // Uses of 7 elements within 21: some past the end, some that overflow, and some that overlap.
    for (first, others, elements) in [
        (15, &[] as &[_], 7),
        (0, &[15], 7),
        (usize::MAX, &[], 7),
        (0, &[7, usize::MAX], 7),
        (0, &[7], usize::MAX),
        (0, &[0], 7),
        (7, &[13], 7),
        (7, &[1], 7),
        (0, &[7, 14, 8], 7),
    ] {
        let (stream, sums) = (&mut bench.device.stream, slice_mut(&mut bench.outs[0], 21));
        let result = backend.mean_gradient(stream, sums, first, others, elements, 3.0);
        assert_answer("mean_gradient", Some(first), result);
    }
    for (first, others, elements) in [(14, &[7, 0], 7), (21, &[21, 0], 0)] {
        let (stream, sums) = (&mut bench.device.stream, slice_mut(&mut bench.outs[0], 21));
        backend.mean_gradient(stream, sums, first, others, elements, 3.0).unwrap();
    }
    let x = slice(&bench.zeros, 7);
    for ends in [&[] as &[_], &[6], &[8], &[4, 3, 7], &[8, 7], &[usize::MAX, 7]] {
        let mut out = backend.allocate::<f64>(&mut bench.device.stream, ends.len()).unwrap();
        let out = SliceMut::all(&mut out);
        let result = backend.sums_of_squares(&mut bench.device.stream, out, x, ends);
        assert_shape_error("sums_of_squares", result);
    }
    for sums in [0, 2] {
        let mut out = backend.allocate::<f64>(&mut bench.device.stream, sums).unwrap();
        let out = SliceMut::all(&mut out);
        let result = backend.sums_of_squares(&mut bench.device.stream, out, x, &[7]);
        assert_shape_error("sums_of_squares", result);
    }
    for (wrong, [parameters, exp_avg, exp_avg_sq, gradient]) in wrong_by_one([7, 7, 7, 7]) {
        let [parameters_out, exp_avg_out, exp_avg_sq_out, ..] = &mut bench.outs;
        let result = backend.adamw(
            &mut bench.device.stream,
            slice_mut(parameters_out, parameters),
            [slice_mut(exp_avg_out, exp_avg), slice_mut(exp_avg_sq_out, exp_avg_sq)],
            slice(&bench.zeros, gradient),
            step(1),
        );
        assert_answer("adamw", wrong, result);
    }
    bench.finish();
}
