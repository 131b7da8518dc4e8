//! A block that computes each row of the residual stream from that row alone.
//!
//! Such a block keeps nothing: no values for backward besides its input, which the model holds, no
//! scratch, and no state of earlier tokens. One function therefore defines it in training and in
//! generation. A kind of block is a [`RowMap`], and [`RowBlock`] makes a
//! [`Block`] and an [`Incremental`] of it, with all memory empty:
//!
//! ```
//! # use std::ops::Range;
//! # use tidemill_kernels::{Cpu, SliceMut};
//! # use tidemill_model::block::{BlockPass, ResidualGradient, RowMap};
//! # use tidemill_model::linear::Products;
//! # use tidemill_model::{Device, Lease, Result};
//! /// `out[rows, d] = weight[d] input`
//! #[derive(Debug)]
//! struct Scale {
//!     weight: Range<usize>,
//! }
//!
//! impl RowMap<Cpu> for Scale {
//!     fn width(&self) -> usize {
//!         self.weight.len()
//!     }
//!
//!     fn apply(
//!         &self,
//!         _: &mut Device<'_, Cpu>,
//!         residual: SliceMut<'_, Cpu, f32>,
//!         parameters: Lease<'_, Cpu>,
//!         _: Products,
//!     ) -> Result<()> {
//!         let weight = parameters.vector(&self.weight)?.values();
//!         for row in residual.values().chunks_exact_mut(weight.len()) {
//!             row.iter_mut().zip(weight).for_each(|(x, weight)| *x *= weight);
//!         }
//!         Ok(())
//!     }
//!
//!     fn backward(
//!         &self,
//!         _: &mut Device<'_, Cpu>,
//!         grad: &mut ResidualGradient<Cpu>,
//!         lane: SliceMut<'_, Cpu, f32>,
//!         pass: BlockPass<'_, Cpu>,
//!     ) -> Result<()> {
//!         let (d, grains, grad) = (self.width(), pass.shape.grain_rows()?, grad.gradient_mut());
//!         let weight = pass.parameters.vector(&self.weight)?.values();
//!         let lane = &mut lane.values()[self.weight.clone()];
//!         for grain in 0..grains.grains() {
//!             // From zero for every grain, and added whole.
//!             let mut of_grain = vec![0.0; d];
//!             for at in grains.range(grain).start * d..grains.range(grain).end * d {
//!                 of_grain[at % d] += grad[at] * pass.input[at];
//!                 grad[at] *= weight[at % d];
//!             }
//!             lane.iter_mut().zip(of_grain).for_each(|(lane, gradient)| *lane += gradient);
//!         }
//!         Ok(())
//!     }
//! }
//! ```

use std::fmt::Debug;

use tidemill_kernels::backend::KernelGroup;
use tidemill_kernels::{Backend, Slice, SliceMut};

use super::incremental::{Capacity, Incremental, PiecePass};
use super::{Block, BlockPass, ResidualGradient, SampleBytes};
use crate::error::Result;
use crate::lease::Lease;
use crate::linear::Products;
use crate::sample::MicrobatchShape;
use crate::trainable::Device;

/// A map of the rows of the residual stream, each computed from itself and the parameters.
pub trait RowMap<B: Backend>: Debug + Send + Sync + 'static {
    /// d, elements of a row.
    fn width(&self) -> usize;

    /// The kernels that it launches: see [`Block::kernels`].
    fn kernels(&self) -> Vec<KernelGroup> {
        Vec::new()
    }

    /// Turns `residual[rows, d]` from input into output, in place, with `products` for its matrix
    /// products. A row of the result must depend, to the bit, on that row and `products` alone:
    /// neither on the other rows nor on their number.
    ///
    /// # Errors
    /// Parameters of another layout, or a device that fails.
    fn apply(
        &self,
        device: &mut Device<'_, B>,
        residual: SliceMut<'_, B, f32>,
        parameters: Lease<'_, B>,
        products: Products,
    ) -> Result<()>;

    /// [`Block::backward`]: turns the gradient of the output into that of the input, in place, and
    /// adds the gradients of the parameters to `lane`. The gradient of each grain is formed from
    /// +0.0 and added whole, grain by grain.
    ///
    /// # Errors
    /// Parameters of another layout, or a device that fails.
    fn backward(
        &self,
        device: &mut Device<'_, B>,
        grad: &mut ResidualGradient<B>,
        lane: SliceMut<'_, B, f32>,
        pass: BlockPass<'_, B>,
    ) -> Result<()>;
}

/// The block of a [`RowMap`], in training and in generation.
#[derive(Clone, Debug, PartialEq)]
pub struct RowBlock<M>(
    /// What it computes.
    pub M,
);

impl<B: Backend, M: RowMap<B>> Block<B> for RowBlock<M> {
    type Saved = ();
    type Scratch = ();

    /// All have the same memory: none.
    fn is_alike(&self, _: &Self) -> bool {
        true
    }

    fn plan_saved(&self, _: &mut Device<'_, B>, _: MicrobatchShape) -> Result<()> {
        Ok(())
    }

    fn plan_scratch(&self, _: &mut Device<'_, B>, _: MicrobatchShape) -> Result<()> {
        Ok(())
    }

    fn sample_bytes(&self, _: &B, _: usize) -> Result<SampleBytes> {
        Ok(SampleBytes::default())
    }

    fn kernels(&self) -> Vec<KernelGroup> {
        self.0.kernels()
    }

    fn forward(
        &self,
        device: &mut Device<'_, B>,
        out: &mut B::Buffer<f32>,
        pass: BlockPass<'_, B>,
        (): &mut (),
        (): &mut (),
    ) -> Result<()> {
        let elements = pass.shape.sequences()?.rows() * self.0.width();
        let mut out = SliceMut::new(out, 0, elements)?;
        let input = Slice::new(pass.input, 0, elements)?;
        device.backend.copy(device.stream, out.reborrow(), input)?;
        self.0.apply(device, out, pass.parameters, Products::Library)
    }

    fn backward(
        &self,
        device: &mut Device<'_, B>,
        grad: &mut ResidualGradient<B>,
        lane: SliceMut<'_, B, f32>,
        pass: BlockPass<'_, B>,
        (): &mut (),
        (): &mut (),
    ) -> Result<()> {
        self.0.backward(device, grad, lane, pass)
    }
}

impl<B: Backend, M: RowMap<B>> Incremental<B> for RowBlock<M> {
    type State = ();
    type Workspace = ();

    fn generation_kernels(&self) -> Vec<KernelGroup> {
        self.0.kernels()
    }

    fn plan_state(&self, _: &mut Device<'_, B>, _: Capacity) -> Result<()> {
        Ok(())
    }

    fn plan_workspace(&self, _: &mut Device<'_, B>, _: Capacity) -> Result<()> {
        Ok(())
    }

    fn state_bytes(&self, _: Capacity) -> usize {
        0
    }

    fn forget(&self, _: &mut Device<'_, B>, (): &mut ()) -> Result<()> {
        Ok(())
    }

    fn keep(&self, _: &mut Device<'_, B>, (): &mut (), _: &[usize]) -> Result<()> {
        Ok(())
    }

    fn adopt(&self, _: &mut Device<'_, B>, (): &mut (), _: usize, (): &(), _: usize) -> Result<()> {
        Ok(())
    }

    fn advance(
        &self,
        device: &mut Device<'_, B>,
        residual: &mut B::Buffer<f32>,
        pass: PiecePass<'_, B>,
        (): &mut (),
        (): &mut (),
    ) -> Result<()> {
        let residual = SliceMut::new(residual, 0, pass.piece.rows() * self.0.width())?;
        self.0.apply(device, residual, pass.parameters, pass.products)
    }
}
