//! The causal convolution with SiLU.

use super::{ConvInputs, Runtime};
use crate::error::Result;
use crate::shape::ConvShape;
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

/// A depthwise causal convolution over positions, and SiLU. See the [module](super) for what every kernel promises.
pub trait CausalConv1d: Runtime {
    /// `out[b t, e] = silu(bias[e] + sum over j of weight[e, j] x[row - (k - 1) + j])`, rows before
    /// a sample's first, or a document's, being zero. `x` may be strided.
    fn causal_conv1d_silu_forward(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()>;

    /// Writes `dx[b t, e]` (may be strided), `dweight[grains, e, k]` and `dbias[grains, e]`; the
    /// convolution is recomputed from `x`. `dbias` is present exactly when `bias` is.
    #[allow(clippy::too_many_arguments)]
    fn causal_conv1d_silu_backward(
        &self,
        stream: &mut Self::DeviceStream,
        dx: MatrixMut<'_, Self, Self::Activation>,
        dweight: SliceMut<'_, Self, f32>,
        dbias: Option<SliceMut<'_, Self, f32>>,
        dout: Matrix<'_, Self, Self::Activation>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()>;

    /// [`causal_conv1d_silu_forward`](Self::causal_conv1d_silu_forward) of sequences that go on, for generation: `state[b, e, k - 1]`
    /// holds the inputs before the first position, oldest first, and is moved on behind the last. Of sample i there are the first
    /// `lengths[i]` positions, all of them where there are no lengths; rows behind these are neither read nor written.
    ///
    /// How a sequence is cut into pieces changes no bit, nor does what else is in the batch. Documents are not told.
    fn causal_conv1d_silu_piece(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        state: SliceMut<'_, Self, f32>,
        lengths: Option<Slice<'_, Self, u32>>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()>;
}
