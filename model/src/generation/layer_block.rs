//! A list of blocks of any kind, going on: each does so in its own way.

use tidemill_kernels::Backend;

use crate::error::Result;
use crate::generation::incremental::{Incremental, PiecePass, Room};
use crate::generation::mamba::{MambaRows, MambaState};
use crate::layer_block::LayerBlock;
use crate::trainable::Device;

/// What a [`LayerBlock`] remembers.
pub enum LayerState<B: Backend> {
    /// Of a Mamba block.
    Mamba(MambaState<B>),
}

/// Memory that the blocks of a list use one after the other: that of every kind in it.
pub struct LayerRows<B: Backend> {
    mamba: MambaRows<B>,
}

impl<B: Backend> Incremental<B> for LayerBlock {
    type State = LayerState<B>;
    type Workspace = LayerRows<B>;

    fn plan_state(&self, device: &mut Device<'_, B>, room: Room) -> Result<LayerState<B>> {
        let Self::Mamba(block) = self;
        Ok(LayerState::Mamba(block.plan_state(device, room)?))
    }

    fn plan_workspace(
        blocks: &[&Self],
        device: &mut Device<'_, B>,
        room: Room,
    ) -> Result<LayerRows<B>> {
        let mamba: Vec<_> = blocks.iter().map(|Self::Mamba(block)| block).collect();
        Ok(LayerRows { mamba: Incremental::plan_workspace(&mamba, device, room)? })
    }

    fn state_bytes(&self, positions: usize) -> usize {
        let Self::Mamba(block) = self;
        Incremental::<B>::state_bytes(block, positions)
    }

    fn forget(&self, device: &mut Device<'_, B>, state: &mut LayerState<B>) -> Result<()> {
        let (Self::Mamba(block), LayerState::Mamba(state)) = (self, state);
        block.forget(device, state)
    }

    fn keep(
        &self,
        device: &mut Device<'_, B>,
        state: &mut LayerState<B>,
        kept: &[usize],
        room: Room,
    ) -> Result<()> {
        let (Self::Mamba(block), LayerState::Mamba(state)) = (self, state);
        block.keep(device, state, kept, room)
    }

    fn advance(
        &self,
        device: &mut Device<'_, B>,
        residual: &mut B::Buffer<f32>,
        pass: PiecePass<'_, B>,
        state: &mut LayerState<B>,
        workspace: &mut LayerRows<B>,
    ) -> Result<()> {
        let (Self::Mamba(block), LayerState::Mamba(state)) = (self, state);
        block.advance(device, residual, pass, state, &mut workspace.mamba)
    }
}
