//! Activations within limits.

use super::Runtime;
use crate::error::Result;
use crate::view::{Matrix, MatrixMut};

/// Clamps, and their gradients. See the [module](super) for what every kernel promises.
pub trait Clamp: Runtime {
    /// `out[rows, n]` is x, but not beyond `limit` and its negative; a NaN stays.
    ///
    /// # Errors
    /// A limit that is not a finite number above zero, beside shapes that do not fit.
    fn clamp(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        x: Matrix<'_, Self, Self::Activation>,
        limit: f32,
    ) -> Result<()>;

    /// Sets `dx[rows, n]` to zero where |x| is above `limit`; elsewhere it stays.
    ///
    /// # Errors
    /// As [`clamp`](Self::clamp).
    fn clamp_backward(
        &self,
        stream: &mut Self::DeviceStream,
        dx: MatrixMut<'_, Self, Self::Activation>,
        x: Matrix<'_, Self, Self::Activation>,
        limit: f32,
    ) -> Result<()>;
}
