//! RMSNorm (Zhang and Sennrich, 2019) over rows of the residual stream, over rows of activations,
//! or over each head of such rows; and the parts that layer norm shares.

use super::Cpu;
use super::device_stream::ComputeThreads;
use super::dispatch::{Dispatch, Kernel};
use super::rows::{Rows, RowsMut, copy_rows, exactly, exactly_mut};
use super::simd::{LANES, Simd};
use crate::backend::{NormGradient, NormInput};
use crate::error::{KernelError, Result};
use crate::shape::NormShape;
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

/// What a norm is of and with.
pub(crate) struct NormInputs<'a> {
    pub(crate) x: NormInput<'a, Cpu>,
    pub(crate) weight: Slice<'a, Cpu, f32>,
    pub(crate) bias: Option<Slice<'a, Cpu, f32>>,
}

/// What the gradients of a norm are formed from.
pub(crate) struct NormSaved<'a> {
    pub(crate) x: NormInput<'a, Cpu>,
    pub(crate) statistics: Slice<'a, Cpu, f32>,
    pub(crate) weight: Slice<'a, Cpu, f32>,
}

impl NormSaved<'_> {
    /// Refuses a gradient of another kind than x.
    pub(crate) fn check_gradient(
        &self,
        kernel: &'static str,
        gradient: &NormGradient<'_, Cpu>,
    ) -> Result<()> {
        if gradient.is_of(&self.x) {
            return Ok(());
        }
        Err(KernelError::shape(kernel, "gradient", "that of the kind of x", "another"))
    }
}

/// The rows of x, heads side by side.
pub(crate) fn input_rows<'a>(
    kernel: &'static str,
    x: NormInput<'a, Cpu>,
    shape: NormShape,
) -> Result<Rows<'a>> {
    let (NormInput::Residual(x) | NormInput::Activation(x)) = x;
    Rows::new(kernel, "x", x, shape.grains().rows(), shape.columns())
}

/// Where a backward norm finds dy and leaves dx, checked.
pub(crate) struct GradientRows<'a> {
    dx: MatrixMut<'a, Cpu, f32>,
    rounded: Option<RowsMut<'a>>,
    dy: Option<Rows<'a>>,
}

impl<'a> GradientRows<'a> {
    pub(crate) fn new(
        kernel: &'static str,
        gradient: NormGradient<'a, Cpu>,
        shape: NormShape,
    ) -> Result<Self> {
        let (rows, columns) = (shape.grains().rows(), shape.columns());
        match gradient {
            NormGradient::Residual { dx, rounded, dy } => {
                let rounded =
                    rounded.map(|rounded| RowsMut::new(kernel, "rounded", rounded, rows, columns));
                let dy = Some(Rows::new(kernel, "dy", dy, rows, columns)?);
                Ok(Self { dx, rounded: rounded.transpose()?, dy })
            }
            NormGradient::InPlace(dx) => Ok(Self { dx, rounded: None, dy: None }),
        }
    }

    /// The rows of dx, and those of dy, which dx holds on entry where there are none.
    pub(crate) fn rows(
        &mut self,
        kernel: &'static str,
        shape: NormShape,
    ) -> Result<(RowsMut<'_>, Option<Rows<'a>>)> {
        let (rows, columns) = (shape.grains().rows(), shape.columns());
        Ok((RowsMut::new(kernel, "dx", self.dx.reborrow(), rows, columns)?, self.dy))
    }

    /// Copies dx to where it goes in activation precision too.
    pub(crate) fn round(self, kernel: &'static str, shape: NormShape) -> Result<()> {
        let (rows, columns) = (shape.grains().rows(), shape.columns());
        let dx: Matrix<'_, Cpu, f32> = self.dx.as_matrix();
        copy_rows(self.rounded, &Rows::new(kernel, "dx", dx, rows, columns)?, rows);
        Ok(())
    }
}

/// The normed rows or heads, and the reciprocal roots of their mean squares.
pub(crate) fn rms_norm_forward(
    threads: &ComputeThreads,
    dispatch: Dispatch,
    y: MatrixMut<'_, Cpu, f32>,
    reciprocal_rms: SliceMut<'_, Cpu, f32>,
    inputs: NormInputs<'_>,
    shape: NormShape,
) -> Result<()> {
    const KERNEL: &str = "rms_norm_forward";
    check_heads(KERNEL, &inputs.x, shape)?;
    let (rows, heads) = (shape.grains().rows(), shape.heads());
    let y = RowsMut::new(KERNEL, "y", y, rows, shape.columns())?;
    let statistics = shape.normed().rows();
    let reciprocal_rms = exactly_mut(KERNEL, "reciprocal_rms", reciprocal_rms, statistics)?;
    let x = input_rows(KERNEL, inputs.x, shape)?;
    let weight = exactly(KERNEL, "weight", inputs.weight, shape.width())?;
    let share = threads.share(rows);
    let parts = y.parts(share).zip(reciprocal_rms.chunks_mut(share * heads)).enumerate();
    let parts = parts.map(|(part, (y, reciprocal_rms))| NormForward {
        y,
        reciprocal_rms,
        x,
        weight,
        first_row: part * share,
        shape,
    });
    threads.for_each(parts, |part| dispatch.run(part));
    Ok(())
}

/// The gradient of x, where `gradient` says; that of the weight for each grain.
pub(crate) fn rms_norm_backward(
    threads: &ComputeThreads,
    dispatch: Dispatch,
    gradient: NormGradient<'_, Cpu>,
    dweight: SliceMut<'_, Cpu, f32>,
    saved: NormSaved<'_>,
    shape: NormShape,
) -> Result<()> {
    const KERNEL: &str = "rms_norm_backward";
    check_heads(KERNEL, &saved.x, shape)?;
    saved.check_gradient(KERNEL, &gradient)?;
    let (grains, normed, width) = (shape.grains(), shape.normed(), shape.width());
    let mut gradient = GradientRows::new(KERNEL, gradient, shape)?;
    let (sums, dy) = gradient.rows(KERNEL, shape)?;
    let dweight = exactly_mut(KERNEL, "dweight", dweight, grains.grains() * width)?;
    let x = input_rows(KERNEL, saved.x, shape)?;
    let statistics = normed.rows();
    let reciprocal_rms = exactly(KERNEL, "reciprocal_rms", saved.statistics, statistics)?;
    let weight = exactly(KERNEL, "weight", saved.weight, width)?;
    let parts = sums.parts(grains.rows_per_grain()).zip(dweight.chunks_exact_mut(width));
    let parts = parts.enumerate().map(|(grain, (dx, dweight))| NormBackward {
        dx,
        dweight,
        dy,
        x,
        reciprocal_rms: &reciprocal_rms[normed.range(grain)],
        weight,
        first_row: grains.range(grain).start,
        heads: shape.heads(),
    });
    threads.for_each(parts, |part| dispatch.run(part));
    gradient.round(KERNEL, shape)
}

/// Rows of the residual stream are normed whole.
fn check_heads(kernel: &'static str, x: &NormInput<'_, Cpu>, shape: NormShape) -> Result<()> {
    match x {
        NormInput::Residual(_) => shape.check_whole_rows(kernel),
        NormInput::Activation(_) => Ok(()),
    }
}

/// `y = x * reciprocal_rms * weight` for the heads of the part's rows, whose first in `x` is `first_row`.
struct NormForward<'a> {
    y: RowsMut<'a>,
    reciprocal_rms: &'a mut [f32],
    x: Rows<'a>,
    weight: &'a [f32],
    first_row: usize,
    shape: NormShape,
}

impl Kernel for NormForward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (heads, width) = (self.shape.heads(), self.shape.width());
        for (row, of_heads) in self.reciprocal_rms.chunks_exact_mut(heads).enumerate() {
            let x = self.x.row(self.first_row + row).chunks_exact(width);
            let y = self.y.row_mut(row).chunks_exact_mut(width);
            for ((x, y), reciprocal_rms) in x.zip(y).zip(of_heads) {
                *reciprocal_rms = reciprocal_rms_of(s, x, self.shape.eps());
                let scale = s.splat(*reciprocal_rms);
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
}

#[inline(always)]
fn reciprocal_rms_of<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
    // Two chains, as a single one would wait for the latency of its additions.
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
struct NormBackward<'a> {
    /// Added to; without `dy` it holds dy on entry, and is replaced.
    dx: RowsMut<'a>,
    dweight: &'a mut [f32],
    dy: Option<Rows<'a>>,
    x: Rows<'a>,
    reciprocal_rms: &'a [f32],
    weight: &'a [f32],
    first_row: usize,
    heads: usize,
}

impl Kernel for NormBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        self.dweight.fill(0.0);
        let width = self.weight.len();
        for (row, of_heads) in self.reciprocal_rms.chunks_exact(self.heads).enumerate() {
            let x = self.x.row(self.first_row + row).chunks_exact(width);
            let mut dys = self.dy.map(|dy| dy.row(self.first_row + row).chunks_exact(width));
            let dx = self.dx.row_mut(row).chunks_exact_mut(width);
            for ((x, dx), &reciprocal_rms) in x.zip(dx).zip(of_heads) {
                let dy = dys.as_mut().and_then(Iterator::next);
                let head = Head { x, weight: self.weight, reciprocal_rms };
                head.backward(s, dx, self.dweight, dy);
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
