//! The gate of SwiGLU (Shazeer, 2020) and its gradients: one loop, which forms gradients where there are some.

use super::dispatch::{Dispatch, Kernel};
use super::exponential::sigmoid;
use super::rows::{Rows, RowsMut};
use super::simd::{LANES, Simd};
use super::{Cpu, DeviceStream};
use crate::backend::GatedSilu;
use crate::error::Result;
use crate::view::{Matrix, MatrixMut};

impl GatedSilu for Cpu {
    fn gated_silu_forward(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        x: Matrix<'_, Self, f32>,
    ) -> Result<()> {
        gated_silu("gated_silu_forward", stream, self.dispatch, (out, None), x)
    }

    fn gated_silu_backward(
        &self,
        stream: &mut DeviceStream,
        gradient: MatrixMut<'_, Self, f32>,
        out: MatrixMut<'_, Self, f32>,
        x: Matrix<'_, Self, f32>,
    ) -> Result<()> {
        gated_silu("gated_silu_backward", stream, self.dispatch, (out, Some(gradient)), x)
    }
}

fn gated_silu(
    kernel: &'static str,
    stream: &mut DeviceStream,
    dispatch: Dispatch,
    (out, gradient): (MatrixMut<'_, Cpu, f32>, Option<MatrixMut<'_, Cpu, f32>>),
    x: Matrix<'_, Cpu, f32>,
) -> Result<()> {
    let (rows, width) = (out.rows, out.columns);
    let both = width.saturating_mul(2);
    let x = Rows::new(kernel, "x", x, rows, both)?;
    let gradient = gradient.map(|gradient| RowsMut::new(kernel, "gradient", gradient, rows, both));
    let out = RowsMut::new(kernel, "out", out, rows, width)?;
    let threads = stream.threads();
    let share = threads.share(rows);
    let mut gradients = gradient.transpose()?.map(|gradient| gradient.parts(share));
    let parts = out.parts(share).enumerate().map(|(part, out)| {
        let first_row = part * share;
        let gradient = gradients.as_mut().and_then(Iterator::next);
        Gate { out, gradient, x, first_row, rows: share.min(rows - first_row), width }
    });
    threads.for_each(parts, |part| dispatch.run(part));
    Ok(())
}

/// The part's rows, whose first of x is `first_row`.
struct Gate<'a> {
    out: RowsMut<'a>,
    gradient: Option<RowsMut<'a>>,
    x: Rows<'a>,
    first_row: usize,
    rows: usize,
    width: usize,
}

impl Kernel for Gate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let one = s.splat(1.0);
        for row in 0..self.rows {
            let (gate, up) = self.x.row(self.first_row + row).split_at(self.width);
            let mut gradient = match &mut self.gradient {
                Some(gradient) => Some(gradient.row_mut(row).split_at_mut(self.width)),
                None => None,
            };
            for (block, out) in self.out.row_mut(row).chunks_mut(LANES).enumerate() {
                let first = block * LANES;
                let (gate, up) = (s.load_row(&gate[first..]), s.load_row(&up[first..]));
                let share = sigmoid(s, gate);
                let silu = s.mul(gate, share);
                s.store_row(out, s.mul(silu, up));
                let Some((dgate, dup)) = &mut gradient else { continue };
                let (dgate, dup) = (&mut dgate[first..], &mut dup[first..]);
                let dout = s.load_row(dup);
                let slope = s.mul(share, s.mul_add(gate, s.sub(one, share), one));
                s.store_row(dgate, s.mul(s.mul(dout, up), slope));
                s.store_row(dup, s.mul(dout, silu));
            }
        }
    }
}
