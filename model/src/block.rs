//! A block: one entry of a model's ordered list, from residual stream to residual stream.
//!
//! The block is the unit of gradient bucket and parameter lease. It owns no parameters and no activations: both are lent
//! for the time of a call, so the same block serves every replica and every microbatch. What forward leaves for
//! backward is the block's [`Saved`](Block::Saved), one for each block; what it needs only while it runs is
//! [`Scratch`](Block::Scratch), which all blocks of a model use one after the other.

use tidemill_kernels::backend::KernelGroup;
use tidemill_kernels::{Backend, Matrix, MatrixMut, Slice, SliceMut};

use crate::error::Result;
use crate::lease::Lease;
use crate::trainable::{Device, MicrobatchShape};

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

/// One entry of a model's ordered list of blocks.
pub trait Block<B: Backend>: Send + Sync + 'static {
    /// What forward leaves for backward.
    type Saved: Send;
    /// Memory that blocks use one after the other.
    type Scratch: Send;

    /// Memory for what forward leaves for backward, for microbatches up to `shape`.
    ///
    /// # Errors
    /// A shape that the block cannot take, or a device without room.
    fn plan_saved(&self, device: &mut Device<'_, B>, shape: MicrobatchShape)
    -> Result<Self::Saved>;

    /// Memory that `blocks`, at least one, use one after the other, for microbatches up to `shape`.
    ///
    /// # Errors
    /// A shape that a block cannot take, or a device without room.
    fn plan_scratch(
        blocks: &[&Self],
        device: &mut Device<'_, B>,
        shape: MicrobatchShape,
    ) -> Result<Self::Scratch>;

    /// Whether what forward leaves of `other` fits into memory planned for `self`, microbatch by microbatch: models that
    /// run forward again before backward keep that memory once.
    fn shares_saved(&self, other: &Self) -> bool;

    /// What its passes launch, as far as it is known before: devices that compile kernels compile these side by side. It is speed alone.
    fn kernels(&self) -> Vec<KernelGroup> {
        Vec::new()
    }

    /// Writes `out[b t, d]`, the residual stream as it leaves the block.
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
    /// parameters to `lane`, which is laid out as the block's segment.
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

/// The gradient of the residual stream: fp32, with a copy in activation precision for matrix products where these
/// differ.
pub struct ResidualGradient<B: Backend> {
    gradient: B::Buffer<f32>,
    copy: B::ComputeWeights,
    /// The first elements of which the copy is that of the gradient as it is now.
    rounded: usize,
}

/// [`ResidualGradient`] on its way through a kernel.
pub(crate) struct BothGradients<'a, B: Backend> {
    /// `gradient[rows, columns]`
    pub(crate) gradient: MatrixMut<'a, B, f32>,
    /// The same in activation precision, where that differs.
    pub(crate) rounded: Option<MatrixMut<'a, B, B::Activation>>,
}

impl<B: Backend> ResidualGradient<B> {
    /// Room for `elements` elements.
    pub(crate) fn new(device: &mut Device<'_, B>, elements: usize) -> Result<Self> {
        let Device { backend, stream } = device;
        Ok(Self {
            gradient: backend.allocate(stream, elements)?,
            copy: backend.compute_weights(stream, elements)?,
            rounded: 0,
        })
    }

    /// The fp32 gradient.
    pub fn gradient(&self) -> &B::Buffer<f32> {
        &self.gradient
    }

    /// The fp32 gradient, to be changed.
    pub fn gradient_mut(&mut self) -> &mut B::Buffer<f32> {
        self.rounded = 0;
        &mut self.gradient
    }

    /// `gradient[rows, columns]` for a kernel that changes all of it, and its copy in activation precision, where there is one, in
    /// which the kernel leaves what it has become.
    pub(crate) fn both_mut(&mut self, rows: usize, columns: usize) -> Result<BothGradients<'_, B>> {
        self.rounded = rows * columns;
        let copy = B::copies_mut(&mut self.copy);
        let rounded = copy.map(|copy| SliceMut::all(copy).matrix(rows, columns));
        let gradient = SliceMut::all(&mut self.gradient).matrix(rows, columns)?;
        Ok(BothGradients { gradient, rounded: rounded.transpose()? })
    }

    /// `gradient[rows, columns]` in activation precision, as it is now.
    ///
    /// # Errors
    /// A matrix larger than the gradient, or a device that fails.
    pub fn rounded(
        &mut self,
        device: &mut Device<'_, B>,
        rows: usize,
        columns: usize,
    ) -> Result<Matrix<'_, B, B::Activation>> {
        let Device { backend, stream } = device;
        let (copy, gradient) = (&mut self.copy, &self.gradient);
        if self.rounded != rows * columns {
            backend.refresh_compute_weights(stream, copy, gradient, 0, rows * columns)?;
            self.rounded = rows * columns;
        }
        let buffer = B::compute_buffer(&self.gradient, &self.copy);
        Ok(Slice::all(buffer).matrix(rows, columns)?)
    }
}
