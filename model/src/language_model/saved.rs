//! The values that blocks keep for backward: saved for all blocks, or recomputed.

use serde::{Deserialize, Serialize};
use tidemill_kernels::Backend;

use super::block_list::BlockList;
use crate::block::BlockMemory;
use crate::error::Result;
use crate::sample::MicrobatchShape;
use crate::trainable::Device;

/// Whether the values that blocks need for backward are kept or recomputed. This changes memory
/// use, never numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Every block keeps its own values.
    #[default]
    None,
    /// Alike blocks share the memory of one: each runs forward once more before its backward pass.
    Block,
}

/// The saved values of the blocks of a model.
pub(super) struct SavedBlocks {
    slots: Vec<BlockMemory>,
    /// The slot of each block, and the block whose forward pass filled each slot last.
    slot_of: Vec<usize>,
    filled_by: Vec<Option<usize>>,
}

impl SavedBlocks {
    pub(super) fn plan<B: Backend>(
        blocks: &BlockList<B>,
        recompute: Recompute,
        device: &mut Device<'_, B>,
        shape: MicrobatchShape,
    ) -> Result<Self> {
        let all = blocks.as_slice();
        let (slots, slot_of): (Result<Vec<_>>, _) = match recompute {
            Recompute::None => (
                all.iter().map(|block| block.plan_saved(device, shape)).collect(),
                (0..all.len()).collect(),
            ),
            Recompute::Block => (
                blocks.firsts().map(|block| block.plan_saved(device, shape)).collect(),
                (0..all.len()).map(|index| blocks.kind(index)).collect(),
            ),
        };
        let slots = slots?;
        Ok(Self { filled_by: vec![None; slots.len()], slots, slot_of })
    }

    /// The memory in which block `index` saves its values.
    pub(super) fn fill(&mut self, index: usize) -> &mut BlockMemory {
        let slot = self.slot_of[index];
        self.filled_by[slot] = Some(index);
        &mut self.slots[slot]
    }

    /// Whether another block has overwritten the saved values of block `index`.
    pub(super) fn is_lost(&self, index: usize) -> bool {
        self.filled_by[self.slot_of[index]] != Some(index)
    }
}
