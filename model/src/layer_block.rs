//! The blocks that families are made of, as one kind: a list may hold any of them.
//!
//! [`LayerBlock`] is the one place where kinds of blocks are told apart; kernels and the walk over the list know none.

use tidemill_kernels::backend::KernelGroup;
use tidemill_kernels::{Backend, SliceMut};

use crate::block::{Block, BlockPass, ResidualGradient};
use crate::error::Result;
use crate::mamba::MambaBlock;
use crate::mamba::block::{MambaSaved, MambaScratch};
use crate::trainable::{Device, MicrobatchShape};
use crate::transformer::TransformerBlock;
use crate::transformer::block::{TransformerSaved, TransformerScratch};

/// A block of any kind that families use.
#[derive(Clone, Debug, PartialEq)]
pub enum LayerBlock {
    /// A Mamba block.
    Mamba(Box<MambaBlock>),
    /// Attention and an MLP.
    Transformer(Box<TransformerBlock>),
}

/// What the forward pass of a [`LayerBlock`] leaves for its backward pass.
pub enum LayerSaved<B: Backend> {
    /// Of a Mamba block.
    Mamba(MambaSaved<B>),
    /// Of a transformer block.
    Transformer(TransformerSaved<B>),
}

/// Memory that the blocks of a list use one after the other: that of every kind in it.
pub struct LayerScratch<B: Backend> {
    mamba: Option<MambaScratch<B>>,
    transformer: Option<TransformerScratch<B>>,
}

/// Why the kinds of a block, of what it saved and of the scratch agree.
const PLANNED: &str = "memory was planned for this list of blocks";

impl LayerBlock {
    /// The blocks of each kind, in order.
    pub(crate) fn by_kind<'a>(
        blocks: &[&'a Self],
    ) -> (Vec<&'a MambaBlock>, Vec<&'a TransformerBlock>) {
        let (mut mambas, mut transformers) = (Vec::new(), Vec::new());
        for block in blocks {
            match block {
                Self::Mamba(block) => mambas.push(block.as_ref()),
                Self::Transformer(block) => transformers.push(block.as_ref()),
            }
        }
        (mambas, transformers)
    }
}

impl<B: Backend> Block<B> for LayerBlock {
    type Saved = LayerSaved<B>;
    type Scratch = LayerScratch<B>;

    fn plan_saved(
        &self,
        device: &mut Device<'_, B>,
        shape: MicrobatchShape,
    ) -> Result<Self::Saved> {
        Ok(match self {
            Self::Mamba(block) => LayerSaved::Mamba(block.plan_saved(device, shape)?),
            Self::Transformer(block) => LayerSaved::Transformer(block.plan_saved(device, shape)?),
        })
    }

    fn plan_scratch(
        blocks: &[&Self],
        device: &mut Device<'_, B>,
        shape: MicrobatchShape,
    ) -> Result<Self::Scratch> {
        let (mambas, transformers) = Self::by_kind(blocks);
        let mut scratch = LayerScratch { mamba: None, transformer: None };
        if !mambas.is_empty() {
            scratch.mamba = Some(Block::plan_scratch(&mambas, device, shape)?);
        }
        if !transformers.is_empty() {
            scratch.transformer = Some(Block::plan_scratch(&transformers, device, shape)?);
        }
        Ok(scratch)
    }

    fn kernels(&self) -> Vec<KernelGroup> {
        match self {
            Self::Mamba(block) => Block::<B>::kernels(block.as_ref()),
            Self::Transformer(block) => Block::<B>::kernels(block.as_ref()),
        }
    }

    fn shares_saved(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Mamba(block), Self::Mamba(other)) => {
                Block::<B>::shares_saved(block.as_ref(), other)
            }
            (Self::Transformer(block), Self::Transformer(other)) => {
                Block::<B>::shares_saved(block.as_ref(), other)
            }
            _ => false,
        }
    }

    fn forward(
        &self,
        device: &mut Device<'_, B>,
        out: &mut B::Buffer<f32>,
        pass: BlockPass<'_, B>,
        saved: &mut Self::Saved,
        scratch: &mut Self::Scratch,
    ) -> Result<()> {
        match (self, saved) {
            (Self::Mamba(block), LayerSaved::Mamba(saved)) => {
                let scratch = scratch.mamba.as_mut().expect(PLANNED);
                block.forward(device, out, pass, saved, scratch)
            }
            (Self::Transformer(block), LayerSaved::Transformer(saved)) => {
                let scratch = scratch.transformer.as_mut().expect(PLANNED);
                block.forward(device, out, pass, saved, scratch)
            }
            _ => unreachable!("{PLANNED}"),
        }
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
        match (self, saved) {
            (Self::Mamba(block), LayerSaved::Mamba(saved)) => {
                let scratch = scratch.mamba.as_mut().expect(PLANNED);
                block.backward(device, grad, lane, pass, saved, scratch)
            }
            (Self::Transformer(block), LayerSaved::Transformer(saved)) => {
                let scratch = scratch.transformer.as_mut().expect(PLANNED);
                block.backward(device, grad, lane, pass, saved, scratch)
            }
            _ => unreachable!("{PLANNED}"),
        }
    }
}
