//! The causal convolution with SiLU.

use super::{ConvGradients, ConvInputs, PieceState, Runtime};
use crate::error::Result;
use crate::shape::ConvShape;
use crate::view::{Matrix, MatrixMut};

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
}

/// The gradients of [`CausalConv1d`].
pub trait CausalConv1dBackward: Runtime {
    /// The gradients of [`causal_conv1d_silu_forward`](CausalConv1d::causal_conv1d_silu_forward), whose values are formed again from `x`,
    /// given `dout[b t, e]`.
    fn causal_conv1d_silu_backward(
        &self,
        stream: &mut Self::DeviceStream,
        gradients: ConvGradients<'_, Self>,
        dout: Matrix<'_, Self, Self::Activation>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()>;
}

/// [`CausalConv1d`] of pieces of sequences.
pub trait CausalConv1dPiece: Runtime {
    /// [`causal_conv1d_silu_forward`](CausalConv1d::causal_conv1d_silu_forward) of sequences that go on, for generation:
    /// `piece.state[b, k - 1, e]` holds the inputs before the first position, oldest first.
    fn causal_conv1d_silu_piece(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        piece: PieceState<'_, Self, Self::Activation>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()>;
}
