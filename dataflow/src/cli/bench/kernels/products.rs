//! Matrix products of a Mamba block: in_proj, x_proj, dt_proj and out_proj.

use tidemill_kernels::backend::Output;
use tidemill_kernels::shape::GrainRows;
use tidemill_kernels::{Backend, Slice, SliceMut};

use super::SequenceSize;
use super::measure::{Bench, Measured, Measurement, Work};

/// Rows of a grain whose weight gradients are measured.
const GRAIN_ROWS: [usize; 4] = [1024, 2048, 4096, 8192];

/// Grains of a call that has several.
const GRAINS: usize = 4;

/// `[columns, terms]` of each product's weight.
fn weights(size: SequenceSize) -> [[usize; 2]; 4] {
    let (d, e) = (size.width(), size.inner);
    let rank = d.div_ceil(16);
    [[2 * e, d], [rank + 2 * size.states, e], [e, rank], [d, e]]
}

/// `out[rows, n] = input[rows, k] weight[n, k]^T`
pub(super) fn forward<B: Backend>(bench: &mut Bench<'_, B>, size: SequenceSize) -> Measured {
    let rows = size.rows();
    let mut measured = Vec::new();
    for [n, k] in weights(size) {
        let (input, weight) = (bench.activations(rows * k)?, bench.activations(n * k)?);
        let mut out = bench.room::<B::Activation>(rows * n)?;
        let milliseconds = bench.milliseconds(|backend, stream| {
            let out = SliceMut::all(&mut out).matrix(rows, n)?;
            let input = Slice::all(&input).matrix(rows, k)?;
            let weight = Slice::all(&weight).matrix(n, k)?.transposed();
            backend.matmul(stream, out, input, weight, Output::Overwrite)
        })?;
        let bytes = bench.activation_bytes() * (rows * k + n * k + rows * n) as f64;
        measured.push(Measurement {
            kernel: "matmul",
            direction: "forward",
            shape: format!("({rows}, {n}, {k})"),
            work: Work { bytes, operations: 2.0 * (rows * n) as f64 * k as f64 },
            milliseconds,
        });
    }
    Ok(measured)
}

/// `lane[n, k] += grad_out[rows, n]^T input[rows, k]` for each grain, for grains of several lengths: one, and several in one call.
pub(super) fn weight_gradients<B: Backend>(
    bench: &mut Bench<'_, B>,
    size: SequenceSize,
) -> Measured {
    let mut measured = Vec::new();
    for [n, k] in weights(size) {
        for grain_rows in GRAIN_ROWS.into_iter().filter(|&rows| rows <= size.rows()) {
            for count in [1, GRAINS].into_iter().filter(|count| count * grain_rows <= size.rows()) {
                let rows = count * grain_rows;
                let (grad_out, input) =
                    (bench.activations(rows * n)?, bench.activations(rows * k)?);
                let mut lane = bench.room::<f32>(n * k)?;
                let grains = GrainRows::new(rows, grain_rows)?;
                let milliseconds = bench.milliseconds(|backend, stream| {
                    let lane = SliceMut::all(&mut lane).matrix(n, k)?;
                    let grad_out = Slice::all(&grad_out).matrix(rows, n)?;
                    let input = Slice::all(&input).matrix(rows, k)?;
                    backend.weight_gradient_add(stream, lane, grad_out, input, grains)
                })?;
                let read = bench.activation_bytes() * (rows * n + rows * k) as f64;
                let bytes = read + 8.0 * (n * k) as f64;
                let shape = match count {
                    1 => format!("({n}, {k}, grain {grain_rows})"),
                    _ => format!("({n}, {k}, {count} grains {grain_rows})"),
                };
                measured.push(Measurement {
                    kernel: "weight_gradient",
                    direction: "backward",
                    shape,
                    work: Work { bytes, operations: 2.0 * (rows * n) as f64 * k as f64 },
                    milliseconds,
                });
            }
        }
    }
    Ok(measured)
}
