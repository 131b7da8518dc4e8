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
            let (xs, x) = x.as_chunks::<LANES>();
            let (weights, weight) = self.weight.as_chunks::<LANES>();
            let (ys, y) = y.as_chunks_mut::<LANES>();
            for ((x, weight), y) in xs.iter().zip(weights).zip(ys) {
                s.store(y, normalize(s, s.load(x), scale, s.load(weight)));
            }
            s.store_row(y, normalize(s, s.load_row(x), scale, s.load_row(weight)));
        }
    }
}

#[inline(always)]
fn normalize<S: Simd>(s: S, x: S::Vector, scale: S::Vector, weight: S::Vector) -> S::Vector {
    s.mul(s.mul(x, scale), weight)
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
            let (xs, x_rest) = x.as_chunks::<LANES>();
            let (dys, dy_rest) = dy.as_chunks::<LANES>();
            let (weights, weight_rest) = self.weight.as_chunks::<LANES>();
            let (dweights, dweight_rest) = self.dweight.as_chunks_mut::<LANES>();
            let mut products = s.splat(0.0);
            for (((x, dy), weight), dweight) in xs.iter().zip(dys).zip(weights).zip(dweights) {
                let xr = s.mul(s.load(x), scale);
                let dy = s.load(dy);
                products = s.mul_add(s.mul(dy, s.load(weight)), xr, products);
                let sum = s.mul_add(dy, xr, s.load(dweight));
                s.store(dweight, sum);
            }
            let xr_rest = s.mul(s.load_row(x_rest), scale);
            let dy_lanes = s.load_row(dy_rest);
            let weight_lanes = s.load_row(weight_rest);
            products = s.mul_add(s.mul(dy_lanes, weight_lanes), xr_rest, products);
            let sum = s.mul_add(dy_lanes, xr_rest, s.load_row(dweight_rest));
            s.store_row(dweight_rest, sum);

            let mean = s.splat(s.sum(products) / x.len() as f32);
            let (dxs, dx_rest) = self.dx.row_mut(row).as_chunks_mut::<LANES>();
            for (((x, dy), weight), dx) in xs.iter().zip(dys).zip(weights).zip(dxs) {
                let xr = s.mul(s.load(x), scale);
                let dxr = s.neg_mul_add(mean, xr, s.mul(s.load(dy), s.load(weight)));
                let sum = s.add(s.load(dx), s.mul(scale, dxr));
                s.store(dx, sum);
            }
            let dxr = s.neg_mul_add(mean, xr_rest, s.mul(dy_lanes, weight_lanes));
            let sum = s.add(s.load_row(dx_rest), s.mul(scale, dxr));
            s.store_row(dx_rest, sum);
        }
    }
}
