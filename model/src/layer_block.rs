//! The blocks that families are made of, as one kind: a list may hold any of them.
//!
//! [`LayerBlock`] is the one place where kinds of blocks are told apart; kernels and the walk over the list know none.

use tidemill_kernels::{Backend, SliceMut};

use crate::block::{Block, BlockPass, ResidualGradient};
use crate::error::Result;
use crate::mamba::MambaBlock;
use crate::mamba::block::{MambaSaved, MambaScratch};
use crate::trainable::{Device, MicrobatchShape};

/// A block of any kind that families use.
#[derive(Clone, Debug)]
pub enum LayerBlock {
    /// A Mamba block.
    Mamba(MambaBlock),
}

/// What the forward pass of a [`LayerBlock`] leaves for its backward pass.
pub enum LayerSaved<B: Backend> {
    /// Of a Mamba block.
    Mamba(MambaSaved<B>),
}

/// Memory that the blocks of a list use one after the other: that of every kind in it.
pub struct LayerScratch<B: Backend> {
    mamba: MambaScratch<B>,
}

impl<B: Backend> Block<B> for LayerBlock {
    type Saved = LayerSaved<B>;
    type Scratch = LayerScratch<B>;

    fn plan_saved(
        &self,
        device: &mut Device<'_, B>,
        shape: MicrobatchShape,
    ) -> Result<Self::Saved> {
        let Self::Mamba(block) = self;
        Ok(LayerSaved::Mamba(block.plan_saved(device, shape)?))
    }

    fn plan_scratch(
        blocks: &[&Self],
        device: &mut Device<'_, B>,
        shape: MicrobatchShape,
    ) -> Result<Self::Scratch> {
        let mamba: Vec<_> = blocks.iter().map(|Self::Mamba(block)| block).collect();
        Ok(LayerScratch { mamba: Block::plan_scratch(&mamba, device, shape)? })
    }

    fn forward(
        &self,
        device: &mut Device<'_, B>,
        out: &mut B::Buffer<f32>,
        pass: BlockPass<'_, B>,
        saved: &mut Self::Saved,
        scratch: &mut Self::Scratch,
    ) -> Result<()> {
        let (Self::Mamba(block), LayerSaved::Mamba(saved)) = (self, saved);
        block.forward(device, out, pass, saved, &mut scratch.mamba)
    }

    fn backward(
        &self,
        device: &mut Device<'_, B>,
        grad: &mut ResidualGradient<B>,
        lane: SliceMut<'_, B, f32>,
        pass: BlockPass<'_, B>,
        saved: &mut Self::Saved,
        scratch: &mut Self::Scratch,
    ) -> Result<()> {
        let (Self::Mamba(block), LayerSaved::Mamba(saved)) = (self, saved);
        block.backward(device, grad, lane, pass, saved, &mut scratch.mamba)
    }
}
