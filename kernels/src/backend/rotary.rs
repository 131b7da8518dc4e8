//! Rotary positions.

use super::{RotaryInputs, Runtime};
use crate::error::Result;
use crate::shape::AttentionShape;
use crate::view::MatrixMut;

/// Rotary positions, and their gradients. See the [module](super) for what every kernel promises.
pub trait Rotary: Runtime {
    /// Rotary positions (RoFormer, Su et al., 2021), halves of a head being the parts of its pairs: `qk[b t, (h + g) p]`, queries beside
    /// keys, of which each pair `x[i], x[i + p / 2]` of each head is turned, in place, by angle i of the row's position:
    ///
    /// ```text
    /// x[i], x[i + p / 2] = x[i] cos - x[i + p / 2] sin,  x[i + p / 2] cos + x[i] sin
    /// ```
    ///
    /// Row i of sample b is at position `past[b] + i - starts[b, i]`.
    ///
    /// # Errors
    /// Heads of an odd width, a table that is too short for the rows (where the host knows their positions; a GPU takes the table's last
    /// for those beyond it), views that do not fit, or a device that fails.
    fn rotary_forward(
        &self,
        stream: &mut Self::DeviceStream,
        qk: MatrixMut<'_, Self, Self::Activation>,
        inputs: RotaryInputs<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()>;

    /// From what [`attention_backward`](super::AttentionBackward::attention_backward) leaves in `dqkv[b t, 3 h p]` to the gradient of the
    /// projections: its first `(h + 2 g) p` columns become those of q, k and v before [`rotary_forward`](Self::rotary_forward), the others are
    /// unspecified. The gradients of keys and values are the sums over the heads of queries that share them, in order in fp32; those of
    /// queries and keys are turned back, by the negative angles.
    ///
    /// # Errors
    /// As [`rotary_forward`](Self::rotary_forward).
    fn rotary_backward(
        &self,
        stream: &mut Self::DeviceStream,
        dqkv: MatrixMut<'_, Self, Self::Activation>,
        inputs: RotaryInputs<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()>;
}
