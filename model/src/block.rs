//! A block: one entry of a model's ordered list, from residual stream to residual stream.
//!
//! The block is the unit of gradient bucket and parameter lease. It owns no parameters and no activations: both are lent
//! for the time of a call, so the same block serves every replica and every microbatch. What forward leaves for
//! backward is the block's [`Saved`](Block::Saved), one for each block; what it needs only while it runs is
//! [`Scratch`](Block::Scratch), which alike blocks of a model use one after the other.
//!
//! A kind of block is one folder, such as [`mamba`](mod@crate::mamba) or [`transformer`](crate::transformer), of this crate or of another:
//!
//! 1. a struct that holds sizes and the places of its tensors, which its constructor adds to the newest segment of a
//!    [`ParameterList`](crate::parameter_list::ParameterList); [`Linear`](crate::linear::Linear) and [`Norm`](crate::norm::Norm) add theirs;
//! 2. [`Block`]: memory, forward and backward;
//! 3. [`Incremental`](crate::generation::Incremental): the same map token by token, for generation and scores.
//!
//! That makes it an [`AnyBlock`], which is how [`LanguageModel`](crate::LanguageModel) holds blocks, of any kinds side by side.
//! `model/tests/own_block` has a block from outside this crate.

mod any_block;
mod gradient;

use std::fmt::Debug;

pub use any_block::{AnyBlock, BlockMemory};
pub(crate) use gradient::BothGradients;
pub use gradient::ResidualGradient;
use tidemill_kernels::backend::KernelGroup;
use tidemill_kernels::shape::GrainRows;
use tidemill_kernels::{Backend, Slice, SliceMut};

use crate::error::Result;
use crate::lease::Lease;
use crate::sample::MicrobatchShape;
use crate::trainable::Device;

/// What forward and backward of one block are given.
pub struct BlockPass<'a, B: Backend> {
    /// The parameters of the block's segment.
    pub parameters: Lease<'a, B>,
    /// `input[b t, d]`: the fp32 residual stream as it enters the block. The model keeps it until the
    /// block's backward has run.
    pub input: &'a B::Buffer<f32>,
    /// The microbatch at hand, no larger than the one that memory was planned for.
    pub shape: MicrobatchShape,
    /// `starts[b t]`: the position in its sample of the first token of the row's document, where samples hold several that see
    /// nothing of each other.
    pub starts: Option<Slice<'a, B, u32>>,
}

impl<B: Backend> Clone for BlockPass<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B: Backend> Copy for BlockPass<'_, B> {}

/// About what one sample, a grain by itself, needs of a block's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleBytes {
    /// Bytes of what forward leaves for backward.
    pub saved: usize,
    /// Bytes of what alike blocks use one after the other, scratch of kernels included.
    pub scratch: usize,
}

/// What a kind of block does in training.
pub trait Block<B: Backend>: Debug + Send + Sync + 'static {
    /// What forward leaves for backward.
    type Saved: Send + 'static;
    /// Memory that alike blocks use one after the other.
    type Scratch: Send + 'static;

    /// Whether memory that was planned for `self` serves `other`: scratch, what forward leaves microbatch by microbatch where models run
    /// forward again before backward, and the workspace of generation. Where it does not, each has its own. The first of a list's alike blocks
    /// plans for all of them.
    fn is_alike(&self, other: &Self) -> bool {
        let _ = other;
        false
    }

    /// Memory for what forward leaves for backward, for microbatches up to `shape`.
    ///
    /// # Errors
    /// A shape that the block cannot take, or a device without room.
    fn plan_saved(&self, device: &mut Device<'_, B>, shape: MicrobatchShape)
    -> Result<Self::Saved>;

    /// Memory that alike blocks use one after the other, for microbatches up to `shape`.
    ///
    /// # Errors
    /// A shape that the block cannot take, or a device without room.
    fn plan_scratch(
        &self,
        device: &mut Device<'_, B>,
        shape: MicrobatchShape,
    ) -> Result<Self::Scratch>;

    /// About what one sample of `positions` positions takes of both, from sizes alone: how many fit is decided by it.
    ///
    /// # Errors
    /// No positions, or more than can be counted.
    fn sample_bytes(&self, backend: &B, positions: usize) -> Result<SampleBytes>;

    /// What its passes launch, as far as it is known before: devices that compile kernels compile these side by side. It is speed alone.
    fn kernels(&self) -> Vec<KernelGroup> {
        Vec::new()
    }

    /// Writes `out[b t, d]`, the residual stream as it leaves the block. A row may depend on rows of its own sample alone.
    ///
    /// # Errors
    /// A device that fails.
    fn forward(
        &self,
        device: &mut Device<'_, B>,
        out: &mut B::Buffer<f32>,
        pass: BlockPass<'_, B>,
        saved: &mut Self::Saved,
        scratch: &mut Self::Scratch,
    ) -> Result<()>;

    /// Turns the gradient of the block's output into that of its input, in place, and adds the gradients of its
    /// parameters to `lane`, which is laid out as the block's segment: each grain's formed from +0.0 and added whole, grain by grain.
    ///
    /// # Errors
    /// A device that fails.
    fn backward(
        &self,
        device: &mut Device<'_, B>,
        grad: &mut ResidualGradient<B>,
        lane: SliceMut<'_, B, f32>,
        pass: BlockPass<'_, B>,
        saved: &mut Self::Saved,
        scratch: &mut Self::Scratch,
    ) -> Result<()>;
}

/// The scratch memory of the weight gradient that takes most of it, of those of `weights` (outputs and inputs), for a grain of `positions` rows:
/// they are formed one after the other.
pub(crate) fn weights_scratch_bytes<B: Backend>(
    backend: &B,
    weights: &[[usize; 2]],
    positions: usize,
) -> Result<usize> {
    let grains = GrainRows::new(positions, positions)?;
    let bytes = weights.iter().map(|&weight| backend.weight_gradient_scratch_bytes(weight, grains));
    Ok(bytes.max().unwrap_or(0))
}
