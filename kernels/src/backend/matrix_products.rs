//! Matrix products.

use super::{Output, Runtime};
use crate::error::Result;
use crate::view::{Matrix, MatrixMut, Slice};

/// Products of matrices, whose order over k is the matrix library's. See the [module](super) for what every kernel promises.
pub trait MatrixProducts: Runtime {
    /// `out[m, n] (+)= a[m, k] b[k, n]` with an activation output.
    ///
    /// Each element is a chain of fused multiply-adds over k that depends on k alone: neither on m, n, nor on the element's place.
    fn matmul(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        a: Matrix<'_, Self, Self::Activation>,
        b: Matrix<'_, Self, Self::Activation>,
        output: Output,
    ) -> Result<()>;

    /// [`matmul`](Self::matmul) with an fp32 output: the residual stream and gradients of weights.
    fn matmul_f32(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        a: Matrix<'_, Self, Self::Activation>,
        b: Matrix<'_, Self, Self::Activation>,
        output: Output,
    ) -> Result<()>;

    /// `out[m, n] = base[m, n] + a[m, k] b[k, n] + bias[n]` in fp32, with the bits of a copy of `base` that
    /// [`matmul_f32`](Self::matmul_f32) adds to and [`add_bias_f32`](super::Bias::add_bias_f32) after it. Rows of `base` are as far apart as
    /// those of `out`.
    fn matmul_onto(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        base: Matrix<'_, Self, f32>,
        a: Matrix<'_, Self, Self::Activation>,
        b: Matrix<'_, Self, Self::Activation>,
        bias: Option<Slice<'_, Self, f32>>,
    ) -> Result<()>;

    /// `out[m, n] = a[m, k] b[k, n] + bias[n]` with an activation output. The sum is rounded once where the matrix library adds the bias,
    /// which is then rounded to activations; else the product is rounded before the bias is added.
    fn matmul_biased(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        a: Matrix<'_, Self, Self::Activation>,
        b: Matrix<'_, Self, Self::Activation>,
        bias: Slice<'_, Self, f32>,
    ) -> Result<()>;
}
