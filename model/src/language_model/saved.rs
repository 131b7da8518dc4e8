//! What blocks leave for backward, kept for all of them or formed again.

use serde::{Deserialize, Serialize};
use tidemill_kernels::Backend;

use crate::block::Block;
use crate::error::Result;
use crate::trainable::{Device, MicrobatchShape};

/// Whether what blocks leave for backward is kept or formed again. Memory, never numerics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Every block keeps its own.
    #[default]
    None,
    /// Blocks that are alike share the memory of one: each runs forward once more before its backward pass.
    Block,
}

/// What the blocks of a model left for backward.
pub(super) struct SavedBlocks<S> {
    slots: Vec<S>,
    /// The slot of each block, and the block whose forward pass filled each slot last.
    slot_of: Vec<usize>,
    filled_by: Vec<Option<usize>>,
}

impl<S> SavedBlocks<S> {
    pub(super) fn plan<B: Backend, Body: Block<B, Saved = S>>(
        bodies: &[Body],
        recompute: Recompute,
        device: &mut Device<'_, B>,
        shape: MicrobatchShape,
    ) -> Result<Self> {
        let (mut slots, mut owners, mut slot_of) = (Vec::new(), Vec::<&Body>::new(), Vec::new());
        for body in bodies {
            let shared = match recompute {
                Recompute::None => None,
                Recompute::Block => owners.iter().position(|owner| owner.shares_saved(body)),
            };
            slot_of.push(shared.unwrap_or(slots.len()));
            if shared.is_none() {
                slots.push(body.plan_saved(device, shape)?);
                owners.push(body);
            }
        }
        Ok(Self { filled_by: vec![None; slots.len()], slots, slot_of })
    }

    /// Where block `layer` leaves what it saves.
    pub(super) fn fill(&mut self, layer: usize) -> &mut S {
        let slot = self.slot_of[layer];
        self.filled_by[slot] = Some(layer);
        &mut self.slots[slot]
    }

    /// Whether another block has written over what block `layer` left.
    pub(super) fn is_lost(&self, layer: usize) -> bool {
        self.filled_by[self.slot_of[layer]] != Some(layer)
    }
}
