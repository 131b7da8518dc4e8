//! RMSNorm (Zhang and Sennrich, 2019) over rows of the residual stream.

use super::dispatch::Kernel;
use super::rows::{Rows, RowsMut};
use super::simd::{LANES, Simd};

/// `y = x * reciprocal_rms * weight` for the part's rows, whose first in `x` is `first_row`.
pub(crate) struct NormForward<'a> {
    pub(crate) y: RowsMut<'a>,
    pub(crate) reciprocal_rms: &'a mut [f32],
    pub(crate) x: Rows<'a>,
    pub(crate) weight: &'a [f32],
    pub(crate) first_row: usize,
    pub(crate) eps: f32,
}

impl Kernel for NormForward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        for (row, reciprocal_rms) in self.reciprocal_rms.iter_mut().enumerate() {
            let x = self.x.row(self.first_row + row);
            // Two chains: one would wait for its own latency.
            let mut squares = [s.splat(0.0); 2];
            for pair in x.chunks(2 * LANES) {
                let v = s.load_row(pair);
                squares[0] = s.mul_add(v, v, squares[0]);
                if pair.len() > LANES {
                    let v = s.load_row(&pair[LANES..]);
                    squares[1] = s.mul_add(v, v, squares[1]);
                }
            }
            let mean = s.sum(s.add(squares[0], squares[1])) / x.len() as f32;
            *reciprocal_rms = 1.0 / (mean + self.eps).sqrt();
            let scale = s.splat(*reciprocal_rms);
            let y = self.y.row_mut(row);
            let blocks = x.chunks(LANES).zip(self.weight.chunks(LANES)).zip(y.chunks_mut(LANES));
            for ((x, weight), y) in blocks {
                s.store_row(y, s.mul(s.mul(s.load_row(x), scale), s.load_row(weight)));
            }
        }
    }
}

/// The gradients of the rows of one grain, whose first in `x` and `dy` is `first_row`:
///
/// ```text
/// xr = x * reciprocal_rms;   dweight = sum over rows of dy * xr
/// dx += reciprocal_rms * (dy * weight - xr * mean(dy * weight * xr))
/// ```
pub(crate) struct NormBackward<'a> {
    pub(crate) dx: RowsMut<'a>,
    pub(crate) dweight: &'a mut [f32],
    pub(crate) dy: Rows<'a>,
    pub(crate) x: Rows<'a>,
    pub(crate) reciprocal_rms: &'a [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) first_row: usize,
}

impl Kernel for NormBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        self.dweight.fill(0.0);
        for (row, &reciprocal_rms) in self.reciprocal_rms.iter().enumerate() {
            let x = self.x.row(self.first_row + row);
            let dy = self.dy.row(self.first_row + row);
            let scale = s.splat(reciprocal_rms);
            let mut products = s.splat(0.0);
            let blocks = x
                .chunks(LANES)
                .zip(dy.chunks(LANES))
                .zip(self.weight.chunks(LANES))
                .zip(self.dweight.chunks_mut(LANES));
            for (((x, dy), weight), dweight) in blocks {
                let xr = s.mul(s.load_row(x), scale);
                let dy = s.load_row(dy);
                products = s.mul_add(s.mul(dy, s.load_row(weight)), xr, products);
                s.store_row(dweight, s.mul_add(dy, xr, s.load_row(dweight)));
            }
            let mean = s.splat(s.sum(products) / x.len() as f32);
            let blocks = x
                .chunks(LANES)
                .zip(dy.chunks(LANES))
                .zip(self.weight.chunks(LANES))
                .zip(self.dx.row_mut(row).chunks_mut(LANES));
            for (((x, dy), weight), dx) in blocks {
                let xr = s.mul(s.load_row(x), scale);
                let dxr = s.neg_mul_add(mean, xr, s.mul(s.load_row(dy), s.load_row(weight)));
                s.store_row(dx, s.add(s.load_row(dx), s.mul(scale, dxr)));
            }
        }
    }
}
