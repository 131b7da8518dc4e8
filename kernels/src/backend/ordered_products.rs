//! Matrix products in a stated order.

use super::{Output, Runtime};
use crate::error::Result;
use crate::view::{Matrix, MatrixMut};

/// Products of matrices whose order over k is stated, for generation. See the [module](super) for what every kernel promises.
pub trait OrderedProducts: Runtime {
    /// `out[m, n] (+)= a[m, k] weight[n, k]^T` with an activation output, in an order over k that is stated: the product of
    /// generation, fast for a few rows and for many.
    ///
    /// The bits of an element follow from its row of `a`, its row of `weight` and k alone; m, n and the places of the operands
    /// change none. k is cut into segments (of 512 terms on GPUs, 256 on the CPU). A segment's sum begins with +0.0, and has its
    /// terms added in ascending order by fused multiply-adds, or, of bf16 on GPUs, 16 consecutive ones at a time by matrix cores,
    /// with zeros past k. Sums of segments are added in ascending order in fp32; the former value of `out` is added to the whole
    /// (the CPU adds segments to it one after the other), which is rounded once.
    ///
    /// # Errors
    /// Shapes that do not fit one another, rows that are not contiguous, no terms, or a device that fails.
    fn ordered_matmul(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        a: Matrix<'_, Self, Self::Activation>,
        weight: Matrix<'_, Self, Self::Activation>,
        output: Output,
    ) -> Result<()>;

    /// [`ordered_matmul`](Self::ordered_matmul) with an fp32 output: the residual stream and logits.
    ///
    /// # Errors
    /// As there.
    fn ordered_matmul_f32(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        a: Matrix<'_, Self, Self::Activation>,
        weight: Matrix<'_, Self, Self::Activation>,
        output: Output,
    ) -> Result<()>;
}
