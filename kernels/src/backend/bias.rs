//! Biases of rows.

use super::Runtime;
use crate::error::Result;
use crate::shape::GrainRows;
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

/// Biases, and their gradients. See the [module](super) for what every kernel promises.
pub trait Bias: Runtime {
    /// `out[rows, n] += bias[n]`
    fn add_bias(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        bias: Slice<'_, Self, f32>,
    ) -> Result<()>;

    /// [`add_bias`](Self::add_bias) of an fp32 matrix.
    fn add_bias_f32(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        bias: Slice<'_, Self, f32>,
    ) -> Result<()>;

    /// `dbias[grains, n]`: the sums of each grain's rows of `dout[rows, n]`.
    fn bias_backward(
        &self,
        stream: &mut Self::DeviceStream,
        dbias: SliceMut<'_, Self, f32>,
        dout: Matrix<'_, Self, Self::Activation>,
        grains: GrainRows,
    ) -> Result<()>;
}
