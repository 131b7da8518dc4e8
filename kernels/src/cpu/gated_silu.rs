//! The gate of SwiGLU (Shazeer, 2020) and its gradients.

use super::Cpu;
use super::device_stream::ComputeThreads;
use super::dispatch::{Dispatch, Kernel};
use super::exponential::sigmoid;
use super::rows::{Rows, RowsMut};
use super::simd::{LANES, Simd};
use crate::error::Result;
use crate::view::{Matrix, MatrixMut};

/// `out[rows, n] = silu(gate) up` of `x[rows, 2 n]`.
pub(crate) fn gated_silu_forward(
    threads: &ComputeThreads,
    dispatch: Dispatch,
    out: MatrixMut<'_, Cpu, f32>,
    x: Matrix<'_, Cpu, f32>,
) -> Result<()> {
    const KERNEL: &str = "gated_silu_forward";
    let (rows, width) = (out.rows, out.columns);
    let x = Rows::new(KERNEL, "x", x, rows, width.saturating_mul(2))?;
    let out = RowsMut::new(KERNEL, "out", out, rows, width)?;
    let share = threads.share(rows);
    let parts = out.parts(share).enumerate().map(|(part, out)| {
        let first_row = part * share;
        Forward { out, x, first_row, rows: share.min(rows - first_row), width }
    });
    threads.for_each(parts, |part| dispatch.run(part));
    Ok(())
}

/// `gradient[rows, 2 n]` from that of the output in its columns from n on, and `out` again.
pub(crate) fn gated_silu_backward(
    threads: &ComputeThreads,
    dispatch: Dispatch,
    gradient: MatrixMut<'_, Cpu, f32>,
    out: MatrixMut<'_, Cpu, f32>,
    x: Matrix<'_, Cpu, f32>,
) -> Result<()> {
    const KERNEL: &str = "gated_silu_backward";
    let (rows, width) = (out.rows, out.columns);
    let x = Rows::new(KERNEL, "x", x, rows, width.saturating_mul(2))?;
    let gradient = RowsMut::new(KERNEL, "gradient", gradient, rows, width.saturating_mul(2))?;
    let out = RowsMut::new(KERNEL, "out", out, rows, width)?;
    let share = threads.share(rows);
    let parts = gradient.parts(share).zip(out.parts(share)).enumerate();
    let parts = parts.map(|(part, (gradient, out))| {
        let first_row = part * share;
        let forward = Forward { out, x, first_row, rows: share.min(rows - first_row), width };
        Backward { gradient, forward }
    });
    threads.for_each(parts, |part| dispatch.run(part));
    Ok(())
}

/// The part's rows, whose first of x is `first_row`.
struct Forward<'a> {
    out: RowsMut<'a>,
    x: Rows<'a>,
    first_row: usize,
    rows: usize,
    width: usize,
}

impl Kernel for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        for row in 0..self.rows {
            let (gate, up) = self.x.row(self.first_row + row).split_at(self.width);
            for (block, out) in self.out.row_mut(row).chunks_mut(LANES).enumerate() {
                let gate = s.load_row(&gate[block * LANES..]);
                let up = s.load_row(&up[block * LANES..]);
                s.store_row(out, s.mul(s.mul(gate, sigmoid(s, gate)), up));
            }
        }
    }
}

struct Backward<'a> {
    gradient: RowsMut<'a>,
    forward: Forward<'a>,
}

impl Kernel for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { mut gradient, forward: Forward { mut out, x, first_row, rows, width } } = self;
        let one = s.splat(1.0);
        for row in 0..rows {
            let (gate, up) = x.row(first_row + row).split_at(width);
            let (dgate, dup) = gradient.row_mut(row).split_at_mut(width);
            let blocks = out.row_mut(row).chunks_mut(LANES).zip(dgate.chunks_mut(LANES));
            let blocks = blocks.zip(dup.chunks_mut(LANES)).enumerate();
            for (block, ((out, dgate), dup)) in blocks {
                let gate = s.load_row(&gate[block * LANES..]);
                let up = s.load_row(&up[block * LANES..]);
                let dout = s.load_row(dup);
                let share = sigmoid(s, gate);
                let silu = s.mul(gate, share);
                let slope = s.mul(share, s.mul_add(gate, s.sub(one, share), one));
                s.store_row(out, s.mul(silu, up));
                s.store_row(dgate, s.mul(s.mul(dout, up), slope));
                s.store_row(dup, s.mul(dout, silu));
            }
        }
    }
}
