//! RMSNorm and layer norm.

use super::Runtime;
use crate::error::{KernelError, Result};
use crate::shape::{NormKind, NormShape};
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

/// The rows that a norm is of.
pub enum NormInput<'a, B: Runtime> {
    /// `x[rows, d]` of the fp32 residual stream.
    Residual(Matrix<'a, B, f32>),
    /// `x[rows, h d]` of activations.
    Activation(Matrix<'a, B, B::Activation>),
}

/// The inputs of a norm: rows and parameters.
pub struct NormInputs<'a, B: Runtime> {
    /// The rows that are normed.
    pub x: NormInput<'a, B>,
    /// `weight[d]`
    pub weight: Slice<'a, B, f32>,
    /// `bias[d]`, which a layer norm may have and RMSNorm has not.
    pub bias: Option<Slice<'a, B, f32>>,
}

/// The places of dy and dx of a backward norm, of the same kind as the [`NormInput`].
pub enum NormGradient<'a, B: Runtime> {
    /// For [`NormInput::Residual`]: dy and dx are separate.
    Residual {
        /// `dx[rows, d]` is added to.
        dx: MatrixMut<'a, B, f32>,
        /// A copy of the new `dx[rows, d]` in activation precision, where it is wanted.
        rounded: Option<MatrixMut<'a, B, B::Activation>>,
        /// `dy[rows, d]`
        dy: Matrix<'a, B, B::Activation>,
    },
    /// For [`NormInput::Activation`]: the matrix holds `dy[rows, h d]` on entry and dx afterwards.
    InPlace(MatrixMut<'a, B, B::Activation>),
}

/// Outputs of a backward norm.
pub struct NormGradients<'a, B: Runtime> {
    /// The gradient of x.
    pub x: NormGradient<'a, B>,
    /// `dweight[grains, d]`, over all heads of a grain's rows.
    pub dweight: SliceMut<'a, B, f32>,
    /// `dbias[grains, d]`, where it is asked for: of a layer norm alone.
    pub dbias: Option<SliceMut<'a, B, f32>>,
}

/// The inputs from which the gradients of a norm are computed.
pub struct NormSaved<'a, B: Runtime> {
    /// The input of the forward pass.
    pub x: NormInput<'a, B>,
    /// The statistics that the forward pass saved.
    pub statistics: Slice<'a, B, f32>,
    /// The weight of the forward pass.
    pub weight: Slice<'a, B, f32>,
}

/// Norms of rows, or of their heads. See the [module](super) for what every kernel promises.
pub trait Norm: Runtime {
    /// The norm of every row of x, or of every head of rows of activations where the shape has several; those of the residual stream are
    /// refused. It is the shape's [kind](NormShape::kind) of norm:
    ///
    /// ```text
    /// RMSNorm (Zhang and Sennrich, 2019):     y = x r weight,                   r = (mean(x^2) + eps)^-1/2
    /// layer norm (Ba, Kiros and Hinton, 2016): y = (x - mean) r weight + bias,   r = (variance + eps)^-1/2
    /// ```
    ///
    /// the variance being biased and of two passes. Writes `y[rows, h d]`, and `statistics[1 or 2, rows, h]`: the means of a layer norm,
    /// then r.
    ///
    /// # Errors
    /// A bias of RMSNorm, heads of the residual stream, views that do not fit the shape, or a device that fails.
    fn norm_forward(
        &self,
        stream: &mut Self::DeviceStream,
        y: MatrixMut<'_, Self, Self::Activation>,
        statistics: SliceMut<'_, Self, f32>,
        inputs: NormInputs<'_, Self>,
        shape: NormShape,
    ) -> Result<()>;

    /// The gradients of x, of the weight and, where asked for, of the bias.
    ///
    /// # Errors
    /// A gradient of another kind than x, and as [`norm_forward`](Self::norm_forward).
    fn norm_backward(
        &self,
        stream: &mut Self::DeviceStream,
        gradients: NormGradients<'_, Self>,
        saved: NormSaved<'_, Self>,
        shape: NormShape,
    ) -> Result<()>;
}

/// Asks a norm of x to be one that kernels have.
fn check<B: Runtime>(
    kernel: &'static str,
    x: &NormInput<'_, B>,
    has_bias: bool,
    shape: NormShape,
) -> Result<()> {
    if has_bias && shape.kind() == NormKind::RootMeanSquare {
        return Err(KernelError::shape(kernel, "bias", "none of RMSNorm", "some"));
    }
    if shape.heads() > 1 && matches!(x, NormInput::Residual(_)) {
        let found = format!("{} heads a row", shape.heads());
        let expected = "whole rows, but in RMSNorm of activations";
        return Err(KernelError::shape(kernel, "shape", expected, found));
    }
    Ok(())
}

impl<B: Runtime> NormInputs<'_, B> {
    /// Checks the inputs of [`Norm::norm_forward`]; returns the kernel's name in errors.
    pub(crate) fn check(&self, shape: NormShape) -> Result<&'static str> {
        let [kernel, _] = shape.kind().kernels();
        check(kernel, &self.x, self.bias.is_some(), shape)?;
        Ok(kernel)
    }
}

impl<B: Runtime> NormGradients<'_, B> {
    /// Checks the gradients of [`Norm::norm_backward`]; returns the kernel's name in errors.
    pub(crate) fn check(&self, x: &NormInput<'_, B>, shape: NormShape) -> Result<&'static str> {
        let [_, kernel] = shape.kind().kernels();
        check(kernel, x, self.dbias.is_some(), shape)?;
        let of_residual = matches!(self.x, NormGradient::Residual { .. });
        if of_residual == matches!(x, NormInput::Residual(_)) {
            return Ok(kernel);
        }
        Err(KernelError::shape(kernel, "gradient", "that of the kind of x", "another"))
    }
}
