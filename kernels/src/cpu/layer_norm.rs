//! Layer norm (Ba, Kiros and Hinton, 2016) over rows of the residual stream or of activations.
//!
//! A row's mean and variance are two passes, two chains each. Lanes past a row's end hold the mean, so that their
//! deviations are zero.

use super::Cpu;
use super::device_stream::ComputeThreads;
use super::dispatch::{Dispatch, Kernel};
use super::norm::{GradientRows, NormInputs, NormSaved, input_rows};
use super::rows::{Rows, RowsMut, exactly, exactly_mut};
use super::simd::{LANES, Simd};
use crate::backend::NormGradient;
use crate::error::Result;
use crate::shape::NormShape;
use crate::view::{MatrixMut, SliceMut};

/// The normed rows, their means and reciprocal deviations.
pub(crate) fn layer_norm_forward(
    threads: &ComputeThreads,
    dispatch: Dispatch,
    y: MatrixMut<'_, Cpu, f32>,
    statistics: SliceMut<'_, Cpu, f32>,
    inputs: NormInputs<'_>,
    shape: NormShape,
) -> Result<()> {
    const KERNEL: &str = "layer_norm_forward";
    let (rows, width) = (shape.grains().rows(), shape.width());
    shape.check_whole_rows(KERNEL)?;
    let y = RowsMut::new(KERNEL, "y", y, rows, width)?;
    let statistics = exactly_mut(KERNEL, "statistics", statistics, 2 * rows)?;
    let x = input_rows(KERNEL, inputs.x, shape)?;
    let weight = exactly(KERNEL, "weight", inputs.weight, width)?;
    let bias = inputs.bias.map(|bias| exactly(KERNEL, "bias", bias, width)).transpose()?;
    let share = threads.share(rows);
    let (means, reciprocals) = statistics.split_at_mut(rows);
    let statistics = means.chunks_mut(share).zip(reciprocals.chunks_mut(share));
    let parts = y.parts(share).zip(statistics).enumerate();
    let parts = parts.map(|(part, (y, (means, reciprocals)))| LayerNormForward {
        y,
        means,
        reciprocals,
        x,
        weight,
        bias,
        first_row: part * share,
        eps: shape.eps(),
    });
    threads.for_each(parts, |part| dispatch.run(part));
    Ok(())
}

/// `y = (x - mean) reciprocal weight + bias` for the part's rows, whose first in `x` is `first_row`.
struct LayerNormForward<'a> {
    y: RowsMut<'a>,
    means: &'a mut [f32],
    reciprocals: &'a mut [f32],
    x: Rows<'a>,
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    first_row: usize,
    eps: f32,
}

impl Kernel for LayerNormForward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let statistics = self.means.iter_mut().zip(self.reciprocals);
        for (row, (mean, reciprocal)) in statistics.enumerate() {
            let x = self.x.row(self.first_row + row);
            *mean = mean_of(s, x);
            let center = s.splat(*mean);
            *reciprocal = 1.0 / (variance_of(s, x, *mean) + self.eps).sqrt();
            let scale = s.splat(*reciprocal);
            let y = self.y.row_mut(row);
            for (block, (x, y)) in x.chunks(LANES).zip(y.chunks_mut(LANES)).enumerate() {
                let first = block * LANES;
                let normed = s.mul(s.sub(s.load_row(x), center), scale);
                let weight = s.load_row(&self.weight[first..]);
                let scaled = match self.bias {
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

/// The gradients of the parameters, `[grains, d]` each.
pub(crate) struct ParameterGradients<'a> {
    pub(crate) dweight: SliceMut<'a, Cpu, f32>,
    pub(crate) dbias: Option<SliceMut<'a, Cpu, f32>>,
}

/// The gradient of x, where `gradient` says; those of the parameters for each grain.
pub(crate) fn layer_norm_backward(
    threads: &ComputeThreads,
    dispatch: Dispatch,
    gradient: NormGradient<'_, Cpu>,
    parameters: ParameterGradients<'_>,
    saved: NormSaved<'_>,
    shape: NormShape,
) -> Result<()> {
    const KERNEL: &str = "layer_norm_backward";
    let (grains, width) = (shape.grains(), shape.width());
    let rows = grains.rows();
    shape.check_whole_rows(KERNEL)?;
    saved.check_gradient(KERNEL, &gradient)?;
    let mut gradient = GradientRows::new(KERNEL, gradient, shape)?;
    let (sums, dy) = gradient.rows(KERNEL, shape)?;
    let elements = grains.grains() * width;
    let dweight = exactly_mut(KERNEL, "dweight", parameters.dweight, elements)?;
    let dbias = parameters.dbias.map(|dbias| exactly_mut(KERNEL, "dbias", dbias, elements));
    let mut dbias = dbias.transpose()?.map(|dbias| dbias.chunks_exact_mut(width));
    let x = input_rows(KERNEL, saved.x, shape)?;
    let statistics = exactly(KERNEL, "statistics", saved.statistics, 2 * rows)?;
    let (means, reciprocals) = statistics.split_at(rows);
    let weight = exactly(KERNEL, "weight", saved.weight, width)?;
    let parts = sums.parts(grains.rows_per_grain()).zip(dweight.chunks_exact_mut(width));
    let parts = parts.enumerate().map(|(grain, (dx, dweight))| LayerNormBackward {
        dx,
        dweight,
        dbias: dbias.as_mut().and_then(Iterator::next).unwrap_or_default(),
        dy,
        x,
        means: &means[grains.range(grain)],
        reciprocals: &reciprocals[grains.range(grain)],
        weight,
        first_row: grains.range(grain).start,
    });
    threads.for_each(parts, |part| dispatch.run(part));
    gradient.round(KERNEL, shape)
}

/// The gradients of the rows of one grain, whose first in `x` and `dy` is `first_row`:
///
/// ```text
/// n = (x - mean) reciprocal;   g = dy weight
/// dx = reciprocal (g - mean(g) - n mean(g n))
/// dweight = sum over rows of dy n;   dbias = sum over rows of dy
/// ```
struct LayerNormBackward<'a> {
    /// Added to; without `dy` it holds dy on entry, and is replaced.
    dx: RowsMut<'a>,
    dweight: &'a mut [f32],
    /// Empty where it is not asked for.
    dbias: &'a mut [f32],
    dy: Option<Rows<'a>>,
    x: Rows<'a>,
    means: &'a [f32],
    reciprocals: &'a [f32],
    weight: &'a [f32],
    first_row: usize,
}

impl Kernel for LayerNormBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        self.dweight.fill(0.0);
        self.dbias.fill(0.0);
        for (row, (&mean, &reciprocal)) in self.means.iter().zip(self.reciprocals).enumerate() {
            let x = self.x.row(self.first_row + row);
            let given = self.dy.map(|dy| dy.row(self.first_row + row));
            let dx = self.dx.row_mut(row);
            let scale = s.splat(reciprocal);
            let normed =
                |first: usize| s.mul(s.sub(s.load_row_or(&x[first..], mean), s.splat(mean)), scale);
            let mut sum = s.splat(0.0);
            let mut products = s.splat(0.0);
            for first in (0..x.len()).step_by(LANES) {
                let n = normed(first);
                let dy = s.load_row(&given.unwrap_or(&*dx)[first..]);
                let g = s.mul(dy, s.load_row(&self.weight[first..]));
                sum = s.add(sum, g);
                products = s.mul_add(g, n, products);
                let dweight = &mut self.dweight[first..];
                let of_weight = s.mul_add(dy, n, s.load_row(dweight));
                s.store_row(dweight, of_weight);
                if !self.dbias.is_empty() {
                    let dbias = &mut self.dbias[first..];
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
                let g = s.mul(dy, s.load_row(&self.weight[first..]));
                let centred = s.sub(g, mean_of_g);
                let gradient =
                    s.mul(scale, s.neg_mul_add(mean_of_products, normed(first), centred));
                s.store_row(dx, if given.is_some() { s.add(held, gradient) } else { gradient });
            }
        }
    }
}
