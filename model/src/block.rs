//! A block: one entry of a model's ordered list, from residual stream to residual stream.
//!
//! The block is the unit of gradient bucket and parameter lease. It owns neither parameters nor
//! activations: the caller passes both for the time of a call, so the same block serves every
//! replica and every microbatch. The values that forward keeps for backward are the block's
//! [`Saved`](Block::Saved), one for each block; memory that a block needs only while it runs is its
//! [`Scratch`](Block::Scratch), which [alike](Block::is_alike) blocks of a model use one after the
//! other.
//!
//! A kind of block is one folder, such as [`mamba`](mod@crate::mamba) or [`transformer`](crate::transformer), of this crate or of another:
//!
//! 1. a struct with the sizes of the block and the places of its tensors, which the constructor
//!    adds to the newest segment of a [`ParameterList`](crate::parameter_list::ParameterList);
//!    [`Linear`](crate::linear::Linear) and [`Norm`](crate::norm::Norm) add their own;
//! 2. [`Block`]: memory, forward and backward;
//! 3. [`Incremental`](crate::generation::Incremental): the same map token by token, for generation
//!    and scores.
//!
//! A block without memory, whose rows do not read each other, is a [`RowMap`] instead of the last two:
//! [`RowBlock`] makes them of it.
//!
//! These make it an [`AnyBlock`], the form in which [`LanguageModel`](crate::LanguageModel)
//! holds blocks of any kinds side by side. `model/tests/own_block` has blocks from outside
//! this crate.

mod any_block;
mod gradient;
pub(crate) mod incremental;
mod row_block;

use std::fmt::Debug;

pub use any_block::{AnyBlock, BlockMemory};
pub(crate) use gradient::BothGradients;
pub use gradient::ResidualGradient;
pub use row_block::{RowBlock, RowMap};
use tidemill_kernels::backend::KernelGroup;
use tidemill_kernels::shape::GrainRows;
use tidemill_kernels::{Backend, Slice, SliceMut};

use crate::error::Result;
use crate::lease::Lease;
use crate::sample::MicrobatchShape;
use crate::trainable::Device;

/// The arguments that forward and backward of one block share.
pub struct BlockPass<'a, B: Backend> {
    /// The parameters of the block's segment.
    pub parameters: Lease<'a, B>,
    /// `input[b t, d]`: the fp32 residual stream as it enters the block. The model keeps it until the
    /// block's backward has run.
    pub input: &'a B::Buffer<f32>,
    /// The shape of this microbatch, no larger than the one that memory was planned for.
    pub shape: MicrobatchShape,
    /// `starts[b t]`: the position in its sample at which the row's document begins, where a sample
    /// holds several documents that do not attend to each other (sequence packing; what others give as
    /// `cu_seqlens`, the starts alone).
    pub starts: Option<Slice<'a, B, u32>>,
}

impl<B: Backend> Clone for BlockPass<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B: Backend> Copy for BlockPass<'_, B> {}

/// The approximate memory of a block for one sample that is a grain by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleBytes {
    /// Bytes of the values that forward keeps for backward.
    pub saved: usize,
    /// Bytes of the memory that alike blocks share, scratch of kernels included.
    pub scratch: usize,
}

/// A kind of block in training.
pub trait Block<B: Backend>: Debug + Send + Sync + 'static {
    /// The values that forward keeps for backward.
    type Saved: Send + 'static;
    /// Memory that alike blocks use one after the other.
    type Scratch: Send + 'static;

    /// Whether memory that was planned for `self` also serves `other`. Alike blocks share their
    /// scratch, the workspace of generation and, where a model runs forward again before backward,
    /// the saved values; blocks that are not alike have memory of their own. The first of the alike
    /// blocks in a list plans for all of them.
    fn is_alike(&self, other: &Self) -> bool {
        let _ = other;
        false
    }

    /// Memory for the values that forward keeps for backward, for microbatches up to `shape`.
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

    /// The approximate memory of one sample of `positions` positions, computed from sizes alone.
    /// The plan of how many samples fit uses it.
    ///
    /// # Errors
    /// No positions, or more than can be counted.
    fn sample_bytes(&self, backend: &B, positions: usize) -> Result<SampleBytes>;

    /// The kernels that the passes launch, as far as they are known beforehand. Devices that
    /// compile kernels compile these in parallel before the first step. The list changes speed
    /// alone: a kernel that is missing is compiled at its first use.
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

    /// Turns the gradient of the block's output into that of its input, in place, and adds the
    /// gradients of its parameters to `lane`, which is laid out as the block's segment. The
    /// gradient of each grain is formed from +0.0 and added whole, grain by grain.
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

/// The scratch memory for the weight gradients of `weights` (pairs of outputs and inputs), for a
/// grain of `positions` rows. The gradients are formed one after the other, so the largest need
/// counts.
pub(crate) fn weights_scratch_bytes<B: Backend>(
    backend: &B,
    weights: &[[usize; 2]],
    positions: usize,
) -> Result<usize> {
    let grains = GrainRows::new(positions, positions)?;
    let bytes = weights.iter().map(|&weight| backend.weight_gradient_scratch_bytes(weight, grains));
    Ok(bytes.max().unwrap_or(0))
}
