//! Shapes of attention that do not fit.

use tidemill_kernels::backend::{AttentionInputs, AttentionSaved, KeyValueCache};
use tidemill_kernels::{Backend, Slice};

use super::arm::Arm;
use super::attention_case::attention_shape;
use super::device::assert_shape_error;
use super::number::Number;
use super::refusal_case::{
    Bench, assert_answer, matrix, matrix_mut, slice, slice_mut, wrong_by_one,
};

/// Rows and columns of q, k and v, then the elements of slopes and starts.
type InputSizes = [usize; 8];

/// For 3 samples of 4 positions, with 2 heads of width 5.
const INPUT_SIZES: InputSizes = [12, 10, 12, 10, 12, 10, 2, 12];

fn inputs<'a, B: Backend<Activation: Number>>(
    activations: &'a B::Buffer<B::Activation>,
    parameters: &'a B::Buffer<f32>,
    starts: &'a B::Buffer<u32>,
    sizes: InputSizes,
) -> AttentionInputs<'a, B> {
    AttentionInputs {
        q: matrix(activations, [sizes[0], sizes[1]]),
        k: matrix(activations, [sizes[2], sizes[3]]),
        v: matrix(activations, [sizes[4], sizes[5]]),
        slopes: Some(slice(parameters, sizes[6])),
        starts: Some(slice(starts, sizes[7])),
    }
}

/// Attention over whole sequences.
pub fn whole<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    let shape = attention_shape([3, 4], [2, 5], 0.5, None);
    for (wrong, sizes) in wrong_by_one(INPUT_SIZES) {
        for (wrong_out, [rows, columns, sums]) in wrong_by_one([12, 10, 24]) {
            let result = backend.attention_forward(
                &mut bench.device.stream,
                matrix_mut(&mut bench.activation_outs[0], [rows, columns]),
                slice_mut(&mut bench.outs[0], sums),
                inputs(&bench.activations, &bench.zeros, &bench.tokens, sizes),
                shape,
            );
            assert_answer("attention_forward", wrong.or(wrong_out), result);
        }
        for (wrong_out, out_sizes) in wrong_by_one([12, 30, 12, 10, 12, 10, 24]) {
            let [rows, columns, dout_rows, dout_columns, out_rows, out_columns, sums] = out_sizes;
            let result = backend.attention_backward(
                &mut bench.device.stream,
                matrix_mut(&mut bench.activation_outs[0], [rows, columns]),
                AttentionSaved {
                    dout: matrix(&bench.activations, [dout_rows, dout_columns]),
                    inputs: inputs(&bench.activations, &bench.zeros, &bench.tokens, sizes),
                    out: matrix(&bench.activations, [out_rows, out_columns]),
                    log_sum_exp: slice(&bench.zeros, sums),
                },
                shape,
            );
            assert_answer("attention_backward", wrong.or(wrong_out), result);
        }
    }
    bench.finish();
}

/// Attention over a cache of 6 positions for 3 samples.
pub fn cached<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    for (wrong, [cache, rows, columns, past]) in wrong_by_one([3 * 6 * 10, 6, 10, 3]) {
        let result = backend.append_to_cache(
            &mut bench.device.stream,
            slice_mut(&mut bench.activation_outs[0], cache),
            matrix(&bench.activations, [rows, columns]),
            slice(&bench.tokens, past),
            6,
        );
        assert_answer("append_to_cache", wrong, result);
    }
    let result = backend.append_to_cache(
        &mut bench.device.stream,
        slice_mut(&mut bench.activation_outs[0], 3 * 6 * 10),
        matrix(&bench.activations, [21, 10]),
        slice(&bench.tokens, 3),
        6,
    );
    assert_shape_error("more new positions than a cache holds", result);

    let shape = attention_shape([3, 2], [2, 5], 0.5, None);
    let sizes = [6, 10, 6, 10, 180, 180, 3, 2];
    for (wrong, [rows, columns, q_rows, q_columns, keys, values, past, slopes]) in
        wrong_by_one(sizes)
    {
        let cache = KeyValueCache {
            keys: slice(&bench.activations, keys),
            values: slice(&bench.activations, values),
            capacity: 6,
            past: Slice::new(&bench.tokens, 0, past).unwrap(),
            slopes: Some(slice(&bench.zeros, slopes)),
        };
        let result = backend.attention_cached(
            &mut bench.device.stream,
            matrix_mut(&mut bench.activation_outs[0], [rows, columns]),
            matrix(&bench.activations, [q_rows, q_columns]),
            cache,
            shape,
        );
        assert_answer("attention_cached", wrong, result);
    }
    let cache = KeyValueCache {
        keys: slice(&bench.activations, 30),
        values: slice(&bench.activations, 30),
        capacity: 1,
        past: slice(&bench.tokens, 3),
        slopes: None,
    };
    let result = backend.attention_cached(
        &mut bench.device.stream,
        matrix_mut(&mut bench.activation_outs[0], [6, 10]),
        matrix(&bench.activations, [6, 10]),
        cache,
        shape,
    );
    assert_shape_error("more new positions than a cache holds", result);
    bench.finish();
}
