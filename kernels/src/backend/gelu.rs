//! GELU of biased rows.

use super::{Gelu, GeluGradients, Runtime};
use crate::error::Result;
use crate::shape::GrainRows;
use crate::view::{Matrix, MatrixMut, Slice};

/// GELU, its gradients and those of the bias before it. See the [module](super) for what every kernel promises.
pub trait BiasedGelu: Runtime {
    /// `out[rows, n] = gelu(x + bias)`
    fn gelu_forward(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        x: Matrix<'_, Self, Self::Activation>,
        bias: Option<Slice<'_, Self, f32>>,
        gelu: Gelu,
    ) -> Result<()>;

    /// `gradient[rows, n]` times `gelu'(x + bias)`, in its place; and, of the same pass over x, `gelu(x + bias)` with the bits of
    /// [`gelu_forward`](Self::gelu_forward) and `dbias[grains, n]` with those of [`bias_backward`](super::Bias::bias_backward).
    fn gelu_backward(
        &self,
        stream: &mut Self::DeviceStream,
        gradients: GeluGradients<'_, Self>,
        x: Matrix<'_, Self, Self::Activation>,
        bias: Option<Slice<'_, Self, f32>>,
        grains: GrainRows,
        gelu: Gelu,
    ) -> Result<()>;
}
