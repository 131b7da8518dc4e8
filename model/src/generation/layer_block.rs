//! A list of blocks of any kind, going on: each does so in its own way.

use tidemill_kernels::Backend;
use tidemill_kernels::backend::KernelGroup;

use crate::error::Result;
use crate::generation::incremental::{Incremental, PiecePass, Room};
use crate::generation::mamba::{MambaRows, MambaState};
use crate::generation::transformer::{TransformerRows, TransformerState};
use crate::layer_block::LayerBlock;
use crate::trainable::Device;

/// What a [`LayerBlock`] remembers.
pub enum LayerState<B: Backend> {
    /// Of a Mamba block.
    Mamba(MambaState<B>),
    /// Of a transformer block.
    Transformer(TransformerState<B>),
}

/// Memory that the blocks of a list use one after the other: that of every kind in it.
pub struct LayerRows<B: Backend> {
    mamba: Option<MambaRows<B>>,
    transformer: Option<TransformerRows<B>>,
}

/// Why the kinds of a block, of its state and of the workspace agree.
const PLANNED: &str = "memory was planned for this list of blocks";

impl<B: Backend> Incremental<B> for LayerBlock {
    type State = LayerState<B>;
    type Workspace = LayerRows<B>;

    fn kernels(&self) -> Vec<KernelGroup> {
        match self {
            Self::Mamba(block) => Incremental::<B>::kernels(block.as_ref()),
            Self::Transformer(block) => Incremental::<B>::kernels(block.as_ref()),
        }
    }

    fn plan_state(&self, device: &mut Device<'_, B>, room: Room) -> Result<LayerState<B>> {
        Ok(match self {
            Self::Mamba(block) => LayerState::Mamba(block.plan_state(device, room)?),
            Self::Transformer(block) => LayerState::Transformer(block.plan_state(device, room)?),
        })
    }

    fn plan_workspace(
        blocks: &[&Self],
        device: &mut Device<'_, B>,
        room: Room,
    ) -> Result<LayerRows<B>> {
        let (mambas, transformers) = Self::by_kind(blocks);
        let mut rows = LayerRows { mamba: None, transformer: None };
        if !mambas.is_empty() {
            rows.mamba = Some(Incremental::plan_workspace(&mambas, device, room)?);
        }
        if !transformers.is_empty() {
            rows.transformer = Some(Incremental::plan_workspace(&transformers, device, room)?);
        }
        Ok(rows)
    }

    fn state_bytes(&self, room: Room) -> usize {
        match self {
            Self::Mamba(block) => Incremental::<B>::state_bytes(block.as_ref(), room),
            Self::Transformer(block) => Incremental::<B>::state_bytes(block.as_ref(), room),
        }
    }

    fn forget(&self, device: &mut Device<'_, B>, state: &mut LayerState<B>) -> Result<()> {
        match (self, state) {
            (Self::Mamba(block), LayerState::Mamba(state)) => block.forget(device, state),
            (Self::Transformer(block), LayerState::Transformer(state)) => {
                block.forget(device, state)
            }
            _ => unreachable!("{PLANNED}"),
        }
    }

    fn keep(
        &self,
        device: &mut Device<'_, B>,
        state: &mut LayerState<B>,
        kept: &[usize],
        room: Room,
    ) -> Result<()> {
        match (self, state) {
            (Self::Mamba(block), LayerState::Mamba(state)) => block.keep(device, state, kept, room),
            (Self::Transformer(block), LayerState::Transformer(state)) => {
                block.keep(device, state, kept, room)
            }
            _ => unreachable!("{PLANNED}"),
        }
    }

    fn adopt(
        &self,
        device: &mut Device<'_, B>,
        state: &mut LayerState<B>,
        place: usize,
        from: &LayerState<B>,
        positions: usize,
    ) -> Result<()> {
        match (self, state, from) {
            (Self::Mamba(block), LayerState::Mamba(state), LayerState::Mamba(from)) => {
                block.adopt(device, state, place, from, positions)
            }
            (
                Self::Transformer(block),
                LayerState::Transformer(state),
                LayerState::Transformer(from),
            ) => block.adopt(device, state, place, from, positions),
            _ => unreachable!("{PLANNED}"),
        }
    }

    fn advance(
        &self,
        device: &mut Device<'_, B>,
        residual: &mut B::Buffer<f32>,
        pass: PiecePass<'_, B>,
        state: &mut LayerState<B>,
        workspace: &mut LayerRows<B>,
    ) -> Result<()> {
        match (self, state) {
            (Self::Mamba(block), LayerState::Mamba(state)) => {
                let rows = workspace.mamba.as_mut().expect(PLANNED);
                block.advance(device, residual, pass, state, rows)
            }
            (Self::Transformer(block), LayerState::Transformer(state)) => {
                let rows = workspace.transformer.as_mut().expect(PLANNED);
                block.advance(device, residual, pass, state, rows)
            }
            _ => unreachable!("{PLANNED}"),
        }
    }
}
