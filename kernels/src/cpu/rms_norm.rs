//! RMSNorm (Zhang and Sennrich, 2019) of rows, or of their heads, each by itself.

use super::dispatch::Kernel;
use super::norm::{Backward, Forward};
use super::simd::{LANES, Simd};

/// `y = x * reciprocal_rms * weight` for the heads of the part's rows, whose first in `x` is `first_row`.
pub(super) struct RmsNormForward<'a>(pub(super) Forward<'a>);

impl Kernel for RmsNormForward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Forward { mut y, reciprocals, x, weight, first_row, shape, .. } = self.0;
        let width = shape.width();
        for (row, of_heads) in reciprocals.chunks_exact_mut(shape.heads()).enumerate() {
            let x = x.row(first_row + row).chunks_exact(width);
            let y = y.row_mut(row).chunks_exact_mut(width);
            for ((x, y), reciprocal_rms) in x.zip(y).zip(of_heads) {
                *reciprocal_rms = reciprocal_rms_of(s, x, shape.eps());
                let scale = s.splat(*reciprocal_rms);
                let (xs, x) = x.as_chunks::<LANES>();
                let (weights, weight) = weight.as_chunks::<LANES>();
                let (ys, y) = y.as_chunks_mut::<LANES>();
                for ((x, weight), y) in xs.iter().zip(weights).zip(ys) {
                    s.store(y, normalize(s, s.load(x), scale, s.load(weight)));
                }
                s.store_row(y, normalize(s, s.load_row(x), scale, s.load_row(weight)));
            }
        }
    }
}

#[inline(always)]
fn reciprocal_rms_of<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
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
    1.0 / (mean + eps).sqrt()
}

#[inline(always)]
fn normalize<S: Simd>(s: S, x: S::Vector, scale: S::Vector, weight: S::Vector) -> S::Vector {
    s.mul(s.mul(x, scale), weight)
}

/// The gradients of the heads of the rows of one grain, whose first in `x` and `dy` is `first_row`:
///
/// ```text
/// xr = x * reciprocal_rms;   dweight = sum over rows of dy * xr
/// dx += reciprocal_rms * (dy * weight - xr * mean(dy * weight * xr))
/// ```
pub(super) struct RmsNormBackward<'a>(pub(super) Backward<'a>);

impl Kernel for RmsNormBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Backward { mut dx, dweight, dy, x, reciprocals, weight, first_row, heads, .. } = self.0;
        dweight.fill(0.0);
        let width = weight.len();
        for (row, of_heads) in reciprocals.chunks_exact(heads).enumerate() {
            let x = x.row(first_row + row).chunks_exact(width);
            let mut dys = dy.map(|dy| dy.row(first_row + row).chunks_exact(width));
            let dx = dx.row_mut(row).chunks_exact_mut(width);
            for ((x, dx), &reciprocal_rms) in x.zip(dx).zip(of_heads) {
                let dy = dys.as_mut().and_then(Iterator::next);
                let head = Head { x, weight, reciprocal_rms };
                head.backward(s, dx, dweight, dy);
            }
        }
    }
}

/// A head, or a row that is one.
struct Head<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    reciprocal_rms: f32,
}

impl Head<'_> {
    #[inline(always)]
    fn backward<S: Simd>(self, s: S, dx: &mut [f32], dweight: &mut [f32], given: Option<&[f32]>) {
        let scale = s.splat(self.reciprocal_rms);
        let (xs, x_rest) = self.x.as_chunks::<LANES>();
        let (dys, dy_rest) = given.unwrap_or(&*dx).as_chunks::<LANES>();
        let (weights, weight_rest) = self.weight.as_chunks::<LANES>();
        let (dweights, dweight_rest) = dweight.as_chunks_mut::<LANES>();
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

        let mean = s.splat(s.sum(products) / self.x.len() as f32);
        let gradient = |xr, dy, weight| s.mul(scale, s.neg_mul_add(mean, xr, s.mul(dy, weight)));
        let dys = given.map(|dy| dy.as_chunks::<LANES>().0);
        let (dxs, dx_rest) = dx.as_chunks_mut::<LANES>();
        for (i, ((x, weight), dx)) in xs.iter().zip(weights).zip(dxs).enumerate() {
            let (xr, held) = (s.mul(s.load(x), scale), s.load(dx));
            let dy = dys.map_or(held, |dys| s.load(&dys[i]));
            let gradient = gradient(xr, dy, s.load(weight));
            s.store(dx, if given.is_some() { s.add(held, gradient) } else { gradient });
        }
        let gradient = gradient(xr_rest, dy_lanes, weight_lanes);
        let held = s.load_row(dx_rest);
        s.store_row(dx_rest, if given.is_some() { s.add(held, gradient) } else { gradient });
    }
}
