//! Cross-entropy of rows of logits.

use super::{LogitGradient, Runtime};
use crate::error::Result;
use crate::shape::CrossEntropyShape;
use crate::view::{Slice, SliceMut};

/// Cross-entropy, and its gradient in place. See the [module](super) for what every kernel promises.
pub trait CrossEntropy: Runtime {
    /// The rows of logits that a language model's head forms at a time, within a grain. Numerics of
    /// the kind of device: a grain of more rows adds up one product of its table's gradient a chunk.
    fn logit_chunk_rows(&self) -> usize;

    /// Cross-entropy of each row: `losses[row] = logsumexp(s logits[row, ..v]) - s logits[row, target]`, s being the shape's
    /// logit scale; 0 where the target is [`IGNORED_TARGET`](super::IGNORED_TARGET). `logits` then holds what `gradient` says.
    fn cross_entropy(
        &self,
        stream: &mut Self::DeviceStream,
        losses: SliceMut<'_, Self, f32>,
        logits: SliceMut<'_, Self, Self::Activation>,
        targets: Slice<'_, Self, u32>,
        gradient: LogitGradient,
        shape: CrossEntropyShape,
    ) -> Result<()>;
}
