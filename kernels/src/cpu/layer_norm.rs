//! Layer norm (Ba, Kiros and Hinton, 2016) of rows.
//!
//! A row's mean and variance are two passes, two chains each. Lanes past a row's end hold the mean, so that their
//! deviations are zero.

use super::dispatch::Kernel;
use super::norm::{Backward, Forward};
use super::simd::{LANES, Simd};

/// `y = (x - mean) reciprocal weight + bias` for the part's rows, whose first in `x` is `first_row`.
pub(super) struct LayerNormForward<'a>(pub(super) Forward<'a>);

impl Kernel for LayerNormForward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Forward { mut y, means, reciprocals, x, weight, bias, first_row, shape } = self.0;
        for (row, (mean, reciprocal)) in means.iter_mut().zip(reciprocals).enumerate() {
            let x = x.row(first_row + row);
            *mean = mean_of(s, x);
            let center = s.splat(*mean);
            *reciprocal = 1.0 / (variance_of(s, x, *mean) + shape.eps()).sqrt();
            let scale = s.splat(*reciprocal);
            let y = y.row_mut(row);
            for (block, (x, y)) in x.chunks(LANES).zip(y.chunks_mut(LANES)).enumerate() {
                let first = block * LANES;
                let normed = s.mul(s.sub(s.load_row(x), center), scale);
                let weight = s.load_row(&weight[first..]);
                let scaled = match bias {
                    Some(bias) => s.mul_add(normed, weight, s.load_row(&bias[first..])),
                    None => s.mul(normed, weight),
                };
                s.store_row(y, scaled);
            }
        }
    }
}

#[inline(always)]
fn mean_of<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut sums = [s.splat(0.0); 2];
    for pair in x.chunks(2 * LANES) {
        for (sum, x) in sums.iter_mut().zip(pair.chunks(LANES)) {
            *sum = s.add(*sum, s.load_row(x));
        }
    }
    s.sum(s.add(sums[0], sums[1])) / x.len() as f32
}

#[inline(always)]
fn variance_of<S: Simd>(s: S, x: &[f32], mean: f32) -> f32 {
    let mut squares = [s.splat(0.0); 2];
    for pair in x.chunks(2 * LANES) {
        for (sum, x) in squares.iter_mut().zip(pair.chunks(LANES)) {
            let deviation = s.sub(s.load_row_or(x, mean), s.splat(mean));
            *sum = s.mul_add(deviation, deviation, *sum);
        }
    }
    s.sum(s.add(squares[0], squares[1])) / x.len() as f32
}

/// The gradients of the rows of one grain, whose first in `x` and `dy` is `first_row`:
///
/// ```text
/// n = (x - mean) reciprocal;   g = dy weight
/// dx = reciprocal (g - mean(g) - n mean(g n))
/// dweight = sum over rows of dy n;   dbias = sum over rows of dy
/// ```
pub(super) struct LayerNormBackward<'a>(pub(super) Backward<'a>);

impl Kernel for LayerNormBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Backward {
            mut dx, dweight, dbias, dy, x, means, reciprocals, weight, first_row, ..
        } = self.0;
        dweight.fill(0.0);
        dbias.fill(0.0);
        for (row, (&mean, &reciprocal)) in means.iter().zip(reciprocals).enumerate() {
            let x = x.row(first_row + row);
            let given = dy.map(|dy| dy.row(first_row + row));
            let dx = dx.row_mut(row);
            let scale = s.splat(reciprocal);
            let normed =
                |first: usize| s.mul(s.sub(s.load_row_or(&x[first..], mean), s.splat(mean)), scale);
            let mut sum = s.splat(0.0);
            let mut products = s.splat(0.0);
            for first in (0..x.len()).step_by(LANES) {
                let n = normed(first);
                let dy = s.load_row(&given.unwrap_or(&*dx)[first..]);
                let g = s.mul(dy, s.load_row(&weight[first..]));
                sum = s.add(sum, g);
                products = s.mul_add(g, n, products);
                let dweight = &mut dweight[first..];
                let of_weight = s.mul_add(dy, n, s.load_row(dweight));
                s.store_row(dweight, of_weight);
                if !dbias.is_empty() {
                    let dbias = &mut dbias[first..];
                    let of_bias = s.add(s.load_row(dbias), dy);
                    s.store_row(dbias, of_bias);
                }
            }
            let mean_of_g = s.splat(s.sum(sum) / x.len() as f32);
            let mean_of_products = s.splat(s.sum(products) / x.len() as f32);
            for first in (0..x.len()).step_by(LANES) {
                let dx = &mut dx[first..];
                let held = s.load_row(dx);
                let dy = given.map_or(held, |dy| s.load_row(&dy[first..]));
                let g = s.mul(dy, s.load_row(&weight[first..]));
                let centred = s.sub(g, mean_of_g);
                let gradient =
                    s.mul(scale, s.neg_mul_add(mean_of_products, normed(first), centred));
                s.store_row(dx, if given.is_some() { s.add(held, gradient) } else { gradient });
            }
        }
    }
}
