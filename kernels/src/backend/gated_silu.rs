//! The gate of SwiGLU.

use super::Runtime;
use crate::error::Result;
use crate::view::{Matrix, MatrixMut};

/// SiLU of a gate times its other half, and the gradients. See the [module](super) for what every kernel promises.
pub trait GatedSilu: Runtime {
    /// `out[rows, n] = silu(gate) up` of `x[rows, 2 n] = [gate | up]`, silu(g) being `g / (1 + e^-g)`: the gate of SwiGLU (Shazeer, 2020).
    fn gated_silu_forward(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        x: Matrix<'_, Self, Self::Activation>,
    ) -> Result<()>;

    /// `gradient[rows, 2 n]`, whose columns from n on hold the gradient of [`gated_silu_forward`](Self::gated_silu_forward)'s output,
    /// becomes that of x; and, of the same pass, `out[rows, n]` with the bits of forward.
    fn gated_silu_backward(
        &self,
        stream: &mut Self::DeviceStream,
        gradient: MatrixMut<'_, Self, Self::Activation>,
        out: MatrixMut<'_, Self, Self::Activation>,
        x: Matrix<'_, Self, Self::Activation>,
    ) -> Result<()>;
}
