//! The likeliest token of each row of logits.

use super::Runtime;
use crate::error::Result;
use crate::view::{Matrix, SliceMut};

/// The likeliest tokens of rows. See the [module](super) for what every kernel promises.
pub trait Likeliest: Runtime {
    /// `tokens[row]` is the lowest column of the greatest of `scale logits[row, column]`, or [`NO_TOKEN`](super::NO_TOKEN) where one of the row's is
    /// no finite number.
    ///
    /// # Errors
    /// More or fewer tokens than rows, columns that are not contiguous, or a device that fails.
    fn likeliest(
        &self,
        stream: &mut Self::DeviceStream,
        tokens: SliceMut<'_, Self, u32>,
        logits: Matrix<'_, Self, f32>,
        scale: f32,
    ) -> Result<()>;

    /// [`likeliest`](Self::likeliest) of logits as activations hold them, with its errors.
    fn likeliest_of_activations(
        &self,
        stream: &mut Self::DeviceStream,
        tokens: SliceMut<'_, Self, u32>,
        logits: Matrix<'_, Self, Self::Activation>,
        scale: f32,
    ) -> Result<()>;
}
