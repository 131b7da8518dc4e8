//! The approximate memory of a sample in a workspace, from sizes alone.

use tidemill_kernels::Backend;

use super::{LanguageModel, Recompute};
use crate::error::Result;

impl<B: Backend> LanguageModel<B> {
    /// The approximate memory of one sample of `positions` positions in a workspace, where the
    /// sample is a grain by itself: the values that each block keeps for its backward pass, and the
    /// scratch of the block that needs most.
    ///
    /// # Errors
    /// No positions, or more than can be counted.
    pub fn sample_bytes(&self, backend: &B, positions: usize) -> Result<usize> {
        let blocks = self.blocks.as_slice();
        let (mut total, mut scratch) =
            (blocks.len() * positions * self.width() * size_of::<f32>(), 0);
        let mut is_planned = vec![false; blocks.len()];
        for (index, block) in blocks.iter().enumerate() {
            let bytes = block.sample_bytes(backend, positions)?;
            let slot = match self.recompute {
                Recompute::None => index,
                Recompute::Block => self.blocks.kind(index),
            };
            if !std::mem::replace(&mut is_planned[slot], true) {
                total += bytes.saved;
            }
            scratch = scratch.max(bytes.scratch);
        }
        Ok(total + scratch)
    }
}
