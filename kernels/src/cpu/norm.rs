//! Norms of rows of the residual stream or of activations: what RMSNorm and layer norm share. Their loops are `rms_norm` and
//! `layer_norm`.

use super::layer_norm::{LayerNormBackward, LayerNormForward};
use super::rms_norm::{RmsNormBackward, RmsNormForward};
use super::rows::{Rows, RowsMut, copy_rows, exactly, exactly_mut};
use super::{Cpu, DeviceStream};
use crate::backend::{Norm, NormGradient, NormGradients, NormInput, NormInputs, NormSaved};
use crate::error::Result;
use crate::shape::{NormKind, NormShape};
use crate::view::{Matrix, MatrixMut, SliceMut};

impl Norm for Cpu {
    fn norm_forward(
        &self,
        stream: &mut DeviceStream,
        y: MatrixMut<'_, Self, f32>,
        statistics: SliceMut<'_, Self, f32>,
        inputs: NormInputs<'_, Self>,
        shape: NormShape,
    ) -> Result<()> {
        let kernel = inputs.check(shape)?;
        let (rows, heads, width) = (shape.grains().rows(), shape.heads(), shape.width());
        let y = RowsMut::new(kernel, "y", y, rows, shape.columns())?;
        let statistics = exactly_mut(kernel, "statistics", statistics, shape.statistics())?;
        let x = input_rows(kernel, inputs.x, shape)?;
        let weight = exactly(kernel, "weight", inputs.weight, width)?;
        let bias = inputs.bias.map(|bias| exactly(kernel, "bias", bias, width)).transpose()?;
        let threads = stream.threads();
        let share = threads.share(rows);
        let (means, reciprocals) = statistics.split_at_mut(means(shape));
        let mut means = means.chunks_mut(share * heads);
        let parts = y.parts(share).zip(reciprocals.chunks_mut(share * heads)).enumerate();
        let parts = parts.map(|(part, (y, reciprocals))| Forward {
            y,
            means: means.next().unwrap_or_default(),
            reciprocals,
            x,
            weight,
            bias,
            first_row: part * share,
            shape,
        });
        match shape.kind() {
            NormKind::RootMeanSquare => {
                threads.for_each(parts, |part| self.dispatch.run(RmsNormForward(part)));
            }
            NormKind::Layer => {
                threads.for_each(parts, |part| self.dispatch.run(LayerNormForward(part)));
            }
        }
        Ok(())
    }

    fn norm_backward(
        &self,
        stream: &mut DeviceStream,
        gradients: NormGradients<'_, Self>,
        saved: NormSaved<'_, Self>,
        shape: NormShape,
    ) -> Result<()> {
        let kernel = gradients.check(&saved.x, shape)?;
        let (grains, normed, width) = (shape.grains(), shape.normed(), shape.width());
        let mut gradient = GradientRows::new(kernel, gradients.x, shape)?;
        let (dx, dy) = gradient.rows(kernel, shape)?;
        let elements = grains.grains() * width;
        let dweight = exactly_mut(kernel, "dweight", gradients.dweight, elements)?;
        let dbias = gradients.dbias.map(|dbias| exactly_mut(kernel, "dbias", dbias, elements));
        let mut dbias = dbias.transpose()?.unwrap_or_default().chunks_exact_mut(width);
        let x = input_rows(kernel, saved.x, shape)?;
        let statistics = exactly(kernel, "statistics", saved.statistics, shape.statistics())?;
        let (means, reciprocals) = statistics.split_at(means(shape));
        let weight = exactly(kernel, "weight", saved.weight, width)?;
        let parts = dx.parts(grains.rows_per_grain()).zip(dweight.chunks_exact_mut(width));
        let parts = parts.enumerate().map(|(grain, (dx, dweight))| Backward {
            dx,
            dweight,
            dbias: dbias.next().unwrap_or_default(),
            dy,
            x,
            means: means.get(normed.range(grain)).unwrap_or_default(),
            reciprocals: &reciprocals[normed.range(grain)],
            weight,
            first_row: grains.range(grain).start,
            heads: shape.heads(),
        });
        let threads = stream.threads();
        match shape.kind() {
            NormKind::RootMeanSquare => {
                threads.for_each(parts, |part| self.dispatch.run(RmsNormBackward(part)));
            }
            NormKind::Layer => {
                threads.for_each(parts, |part| self.dispatch.run(LayerNormBackward(part)));
            }
        }
        gradient.round(kernel, shape)
    }
}

/// The number of means among the statistics; they come first.
fn means(shape: NormShape) -> usize {
    shape.statistics() - shape.normed().rows()
}

/// The forward norm of a part of the rows, from row `first_row` of `x` on.
pub(super) struct Forward<'a> {
    pub(super) y: RowsMut<'a>,
    /// Means of the rows, of a layer norm only.
    pub(super) means: &'a mut [f32],
    pub(super) reciprocals: &'a mut [f32],
    pub(super) x: Rows<'a>,
    pub(super) weight: &'a [f32],
    pub(super) bias: Option<&'a [f32]>,
    pub(super) first_row: usize,
    pub(super) shape: NormShape,
}

/// The gradients of the rows of one grain, whose first in `x` and `dy` is `first_row`.
pub(super) struct Backward<'a> {
    /// Added to; without `dy` it holds dy on entry, and is replaced.
    pub(super) dx: RowsMut<'a>,
    pub(super) dweight: &'a mut [f32],
    /// Empty where it is not asked for.
    pub(super) dbias: &'a mut [f32],
    pub(super) dy: Option<Rows<'a>>,
    pub(super) x: Rows<'a>,
    /// Means of the rows, of a layer norm only.
    pub(super) means: &'a [f32],
    pub(super) reciprocals: &'a [f32],
    pub(super) weight: &'a [f32],
    pub(super) first_row: usize,
    pub(super) heads: usize,
}

/// The rows of x, heads side by side.
fn input_rows<'a>(
    kernel: &'static str,
    x: NormInput<'a, Cpu>,
    shape: NormShape,
) -> Result<Rows<'a>> {
    let (NormInput::Residual(x) | NormInput::Activation(x)) = x;
    Rows::new(kernel, "x", x, shape.grains().rows(), shape.columns())
}

/// The places of dy and dx of a backward norm, checked.
struct GradientRows<'a> {
    dx: MatrixMut<'a, Cpu, f32>,
    rounded: Option<RowsMut<'a>>,
    dy: Option<Rows<'a>>,
}

impl<'a> GradientRows<'a> {
    fn new(
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
    fn rows(
        &mut self,
        kernel: &'static str,
        shape: NormShape,
    ) -> Result<(RowsMut<'_>, Option<Rows<'a>>)> {
        let (rows, columns) = (shape.grains().rows(), shape.columns());
        Ok((RowsMut::new(kernel, "dx", self.dx.reborrow(), rows, columns)?, self.dy))
    }

    /// Copies dx to where it goes in activation precision too.
    fn round(self, kernel: &'static str, shape: NormShape) -> Result<()> {
        let (rows, columns) = (shape.grains().rows(), shape.columns());
        let dx: Matrix<'_, Cpu, f32> = self.dx.as_matrix();
        copy_rows(self.rounded, &Rows::new(kernel, "dx", dx, rows, columns)?, rows);
        Ok(())
    }
}
