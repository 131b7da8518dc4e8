//! Gradients of weights.

use super::Runtime;
use crate::error::Result;
use crate::shape::GrainRows;
use crate::view::{Matrix, MatrixMut};

/// Gradients of weights, added to a lane grain by grain. See the [module](super) for what every kernel promises.
pub trait WeightGradient: Runtime {
    /// For each grain in order: `lane[m, k] += grad_out^T input` over the grain's rows of `grad_out[rows, m]` and `input[rows, k]`: the
    /// gradient of a weight. The grain's product is formed from +0.0 and added with one rounding.
    ///
    /// On GPUs the product of a grain of a weight of at most 2^20 elements is the sum of the products of its parts, in ascending
    /// order in fp32: parts of 4,096 rows, or where that were more than 16, of a sixteenth of the rows rounded up to a multiple of 64;
    /// the last may be shorter.
    fn weight_gradient_add(
        &self,
        stream: &mut Self::DeviceStream,
        lane: MatrixMut<'_, Self, f32>,
        grad_out: Matrix<'_, Self, Self::Activation>,
        input: Matrix<'_, Self, Self::Activation>,
        grains: GrainRows,
    ) -> Result<()>;

    /// The bytes that [`weight_gradient_add`](Self::weight_gradient_add) of a `weight[m, k]` takes of the device's memory beside its
    /// arguments, and that a stream keeps for its next kernels.
    fn weight_gradient_scratch_bytes(&self, weight: [usize; 2], grains: GrainRows) -> usize;
}
