//! The elementwise kernels of a transformer block: GELU, the gate of SwiGLU, and the biases of linear layers.

use tidemill_kernels::backend::{Gelu, GeluGradients};
use tidemill_kernels::shape::GrainRows;
use tidemill_kernels::{Backend, Slice, SliceMut};

use super::SequenceSize;
use super::measure::{Bench, Measured, Measurement, Work};

/// Both kinds, over the width of an MLP, with the bias of the product before.
pub(super) fn gelu<B: Backend>(bench: &mut Bench<'_, B>, size: SequenceSize) -> Measured {
    let (rows, f) = (size.rows(), 4 * size.width());
    let grains = GrainRows::new(rows, size.positions)?;
    let (x, mut gradient) = (bench.activations(rows * f)?, bench.activations(rows * f)?);
    let mut dbias = bench.room::<f32>(grains.grains() * f)?;
    let bias = bench.floats(f, [-0.5, 0.5])?;
    let mut out = bench.room::<B::Activation>(rows * f)?;
    let elements = bench.activation_bytes() * (rows * f) as f64;
    let mut measured = Vec::new();
    for (gelu, kind) in [(Gelu::Erf, "erf"), (Gelu::Tanh, "tanh")] {
        let line = |direction, matrices: f64, milliseconds| Measurement {
            kernel: "gelu",
            direction,
            shape: format!("({rows}, {f}), {kind}"),
            work: Work::bytes(matrices * elements),
            milliseconds,
        };
        let forward = bench.milliseconds(|backend, stream| {
            let out = SliceMut::all(&mut out).matrix(rows, f)?;
            let x = Slice::all(&x).matrix(rows, f)?;
            backend.gelu_forward(stream, out, x, Some(Slice::all(&bias)), gelu)
        })?;
        let backward = bench.milliseconds(|backend, stream| {
            let gradients = GeluGradients {
                gradient: SliceMut::all(&mut gradient).matrix(rows, f)?,
                out: SliceMut::all(&mut out).matrix(rows, f)?,
                dbias: Some(SliceMut::all(&mut dbias)),
            };
            let x = Slice::all(&x).matrix(rows, f)?;
            backend.gelu_backward(stream, gradients, x, Some(Slice::all(&bias)), grains, gelu)
        })?;
        measured.extend([line("forward", 2.0, forward), line("backward", 4.0, backward)]);
    }
    Ok(measured)
}

/// The gate of SwiGLU, over the width of an MLP.
pub(super) fn gated_silu<B: Backend>(bench: &mut Bench<'_, B>, size: SequenceSize) -> Measured {
    let (rows, f) = (size.rows(), 4 * size.width());
    let (x, mut gradient) = (bench.activations(rows * 2 * f)?, bench.activations(rows * 2 * f)?);
    let mut out = bench.room::<B::Activation>(rows * f)?;
    let elements = bench.activation_bytes() * (rows * f) as f64;
    let line = |direction, matrices: f64, milliseconds| Measurement {
        kernel: "gated_silu",
        direction,
        shape: format!("({rows}, {f})"),
        work: Work::bytes(matrices * elements),
        milliseconds,
    };
    let forward = bench.milliseconds(|backend, stream| {
        let out = SliceMut::all(&mut out).matrix(rows, f)?;
        backend.gated_silu_forward(stream, out, Slice::all(&x).matrix(rows, 2 * f)?)
    })?;
    let backward = bench.milliseconds(|backend, stream| {
        let gradient = SliceMut::all(&mut gradient).matrix(rows, 2 * f)?;
        let out = SliceMut::all(&mut out).matrix(rows, f)?;
        backend.gated_silu_backward(stream, gradient, out, Slice::all(&x).matrix(rows, 2 * f)?)
    })?;
    Ok(vec![line("forward", 3.0, forward), line("backward", 6.0, backward)])
}

/// Added to queries, keys and values and to the fp32 residual stream; its gradient.
pub(super) fn bias<B: Backend>(bench: &mut Bench<'_, B>, size: SequenceSize) -> Measured {
    let (rows, d) = (size.rows(), size.width());
    let n = 3 * d;
    let grains = GrainRows::new(rows, size.positions)?;
    let bias = bench.floats(n, [-1e-3, 1e-3])?;
    let mut out = bench.activations(rows * n)?;
    let mut residual = bench.floats(rows * d, [-1.0, 1.0])?;
    let mut dbias = bench.room::<f32>(grains.grains() * n)?;
    let forward = bench.milliseconds(|backend, stream| {
        let out = SliceMut::all(&mut out).matrix(rows, n)?;
        backend.add_bias(stream, out, Slice::all(&bias))
    })?;
    let forward_f32 = bench.milliseconds(|backend, stream| {
        let out = SliceMut::all(&mut residual).matrix(rows, d)?;
        backend.add_bias_f32(stream, out, Slice::all(&bias).sub(0, d)?)
    })?;
    let backward = bench.milliseconds(|backend, stream| {
        let dout = Slice::all(&out).matrix(rows, n)?;
        backend.bias_backward(stream, SliceMut::all(&mut dbias), dout, grains)
    })?;
    let line = |direction, shape, work, milliseconds| Measurement {
        kernel: "bias",
        direction,
        shape,
        work: Work::bytes(work),
        milliseconds,
    };
    let elements = bench.activation_bytes() * (rows * n) as f64;
    let gradient = 4.0 * (grains.grains() * n) as f64;
    let of_residual = format!("({rows}, {d}), residual");
    Ok(vec![
        line("forward", format!("({rows}, {n})"), 2.0 * elements, forward),
        line("forward", of_residual, 8.0 * (rows * d) as f64, forward_f32),
        line("backward", format!("({rows}, {n})"), elements + gradient, backward),
    ])
}
