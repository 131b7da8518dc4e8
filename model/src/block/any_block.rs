//! A block of any kind, behind one object-safe trait: the element type of a model's list of blocks.
//!
//! Each kind of block has its own types of memory, which the trait cannot name. Here they are a
//! [`BlockMemory`], allocated when memory is planned, so that a call costs a downcast and no
//! allocation.

use std::any::Any;
use std::fmt::Debug;

use tidemill_kernels::backend::KernelGroup;
use tidemill_kernels::{Backend, SliceMut};

use super::incremental::{Capacity, Incremental, PiecePass};
use super::{Block, BlockPass, ResidualGradient, SampleBytes};
use crate::error::Result;
use crate::sample::MicrobatchShape;
use crate::trainable::Device;

/// The memory of a block, whose type only its kind knows.
pub struct BlockMemory(Box<dyn Any + Send>);

/// The message of the panic where a memory belongs to another kind of block.
const PLANNED: &str = "memory that a block of this kind has planned";

impl BlockMemory {
    fn new(memory: impl Send + 'static) -> Self {
        Self(Box::new(memory))
    }

    fn get<T: 'static>(&self) -> &T {
        self.0.downcast_ref().expect(PLANNED)
    }

    fn get_mut<T: 'static>(&mut self) -> &mut T {
        self.0.downcast_mut().expect(PLANNED)
    }
}

/// A block of any kind; every [`Block`] that is [`Incremental`] is one. The contract of each
/// method, errors included, is documented at the method of those traits that it names.
///
/// # Panics
/// Every method that takes a [`BlockMemory`] panics if a block of another kind has planned it.
pub trait AnyBlock<B: Backend>: Debug + Send + Sync + 'static {
    /// The block itself, of its own type.
    fn as_any(&self) -> &dyn Any;

    /// Whether both are of one kind and [alike](Block::is_alike).
    fn is_alike(&self, other: &dyn AnyBlock<B>) -> bool;

    /// [`Block::plan_saved`]
    fn plan_saved(&self, device: &mut Device<'_, B>, shape: MicrobatchShape)
    -> Result<BlockMemory>;

    /// [`Block::plan_scratch`]
    fn plan_scratch(
        &self,
        device: &mut Device<'_, B>,
        shape: MicrobatchShape,
    ) -> Result<BlockMemory>;

    /// [`Block::sample_bytes`]
    fn sample_bytes(&self, backend: &B, positions: usize) -> Result<SampleBytes>;

    /// [`Block::kernels`]
    fn kernels(&self) -> Vec<KernelGroup>;

    /// [`Block::forward`]
    fn forward(
        &self,
        device: &mut Device<'_, B>,
        out: &mut B::Buffer<f32>,
        pass: BlockPass<'_, B>,
        saved: &mut BlockMemory,
        scratch: &mut BlockMemory,
    ) -> Result<()>;

    /// [`Block::backward`]
    fn backward(
        &self,
        device: &mut Device<'_, B>,
        grad: &mut ResidualGradient<B>,
        lane: SliceMut<'_, B, f32>,
        pass: BlockPass<'_, B>,
        saved: &mut BlockMemory,
        scratch: &mut BlockMemory,
    ) -> Result<()>;

    /// [`Incremental::generation_kernels`]
    fn generation_kernels(&self) -> Vec<KernelGroup>;

    /// [`Incremental::plan_state`]
    fn plan_state(&self, device: &mut Device<'_, B>, capacity: Capacity) -> Result<BlockMemory>;

    /// [`Incremental::plan_workspace`]
    fn plan_workspace(&self, device: &mut Device<'_, B>, capacity: Capacity)
    -> Result<BlockMemory>;

    /// [`Incremental::state_bytes`]
    fn state_bytes(&self, capacity: Capacity) -> usize;

    /// [`Incremental::forget`]
    fn forget(&self, device: &mut Device<'_, B>, state: &mut BlockMemory) -> Result<()>;

    /// [`Incremental::keep`]
    fn keep(
        &self,
        device: &mut Device<'_, B>,
        state: &mut BlockMemory,
        kept: &[usize],
    ) -> Result<()>;

    /// [`Incremental::adopt`]
    fn adopt(
        &self,
        device: &mut Device<'_, B>,
        state: &mut BlockMemory,
        place: usize,
        from: &BlockMemory,
        positions: usize,
    ) -> Result<()>;

    /// [`Incremental::advance`]
    fn advance(
        &self,
        device: &mut Device<'_, B>,
        residual: &mut B::Buffer<f32>,
        pass: PiecePass<'_, B>,
        state: &mut BlockMemory,
        workspace: &mut BlockMemory,
    ) -> Result<()>;
}

impl<B: Backend, K: Block<B> + Incremental<B>> AnyBlock<B> for K {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn is_alike(&self, other: &dyn AnyBlock<B>) -> bool {
        other.as_any().downcast_ref().is_some_and(|other| Block::<B>::is_alike(self, other))
    }

    fn plan_saved(
        &self,
        device: &mut Device<'_, B>,
        shape: MicrobatchShape,
    ) -> Result<BlockMemory> {
        Ok(BlockMemory::new(Block::plan_saved(self, device, shape)?))
    }

    fn plan_scratch(
        &self,
        device: &mut Device<'_, B>,
        shape: MicrobatchShape,
    ) -> Result<BlockMemory> {
        Ok(BlockMemory::new(Block::plan_scratch(self, device, shape)?))
    }

    fn sample_bytes(&self, backend: &B, positions: usize) -> Result<SampleBytes> {
        Block::sample_bytes(self, backend, positions)
    }

    fn kernels(&self) -> Vec<KernelGroup> {
        Block::<B>::kernels(self)
    }

    fn forward(
        &self,
        device: &mut Device<'_, B>,
        out: &mut B::Buffer<f32>,
        pass: BlockPass<'_, B>,
        saved: &mut BlockMemory,
        scratch: &mut BlockMemory,
    ) -> Result<()> {
        Block::forward(self, device, out, pass, saved.get_mut(), scratch.get_mut())
    }

    fn backward(
        &self,
        device: &mut Device<'_, B>,
        grad: &mut ResidualGradient<B>,
        lane: SliceMut<'_, B, f32>,
        pass: BlockPass<'_, B>,
        saved: &mut BlockMemory,
        scratch: &mut BlockMemory,
    ) -> Result<()> {
        Block::backward(self, device, grad, lane, pass, saved.get_mut(), scratch.get_mut())
    }

    fn generation_kernels(&self) -> Vec<KernelGroup> {
        Incremental::<B>::generation_kernels(self)
    }

    fn plan_state(&self, device: &mut Device<'_, B>, capacity: Capacity) -> Result<BlockMemory> {
        Ok(BlockMemory::new(Incremental::plan_state(self, device, capacity)?))
    }

    fn plan_workspace(
        &self,
        device: &mut Device<'_, B>,
        capacity: Capacity,
    ) -> Result<BlockMemory> {
        Ok(BlockMemory::new(Incremental::plan_workspace(self, device, capacity)?))
    }

    fn state_bytes(&self, capacity: Capacity) -> usize {
        Incremental::<B>::state_bytes(self, capacity)
    }

    fn forget(&self, device: &mut Device<'_, B>, state: &mut BlockMemory) -> Result<()> {
        Incremental::forget(self, device, state.get_mut())
    }

    fn keep(
        &self,
        device: &mut Device<'_, B>,
        state: &mut BlockMemory,
        kept: &[usize],
    ) -> Result<()> {
        Incremental::keep(self, device, state.get_mut(), kept)
    }

    fn adopt(
        &self,
        device: &mut Device<'_, B>,
        state: &mut BlockMemory,
        place: usize,
        from: &BlockMemory,
        positions: usize,
    ) -> Result<()> {
        Incremental::adopt(self, device, state.get_mut(), place, from.get(), positions)
    }

    fn advance(
        &self,
        device: &mut Device<'_, B>,
        residual: &mut B::Buffer<f32>,
        pass: PiecePass<'_, B>,
        state: &mut BlockMemory,
        workspace: &mut BlockMemory,
    ) -> Result<()> {
        Incremental::advance(self, device, residual, pass, state.get_mut(), workspace.get_mut())
    }
}
