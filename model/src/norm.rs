//! The norms of a model: root mean square (Zhang and Sennrich, 2019).
//!
//! ```text
//! normed = x (mean(x^2) + eps)^-1/2 weight
//! ```
//!
//! A [`Norm`] knows where its parameters stand in their segment; blocks and head run it over the rows of the residual stream.
//! Statistics are formed again before a backward pass wherever the norm is, so all norms of a width share one
//! [`NormScratch`].

use std::ops::Range;

use tidemill_kernels::shape::{GrainRows, NormShape};
use tidemill_kernels::{Backend, Matrix, MatrixMut, Slice, SliceMut};

use crate::error::Result;
use crate::trainable::{Device, Lease};

/// A norm over rows of one width.
#[derive(Clone, Debug)]
pub struct Norm {
    /// `weight[d]` in its segment.
    pub weight: Range<usize>,
    /// d, elements of a row.
    pub width: usize,
    /// Added to the mean square before the root.
    pub eps: f32,
}

/// Memory of norms while they run, one after the other.
pub struct NormScratch<B: Backend> {
    /// `statistics[b t]`: what forward leaves for backward.
    statistics: B::Buffer<f32>,
    /// `gradients[grains, d]` of the weight.
    gradients: B::Buffer<f32>,
}

/// What a pass of a norm is given.
pub struct NormPass<'a, B: Backend> {
    /// The segment that holds the norm.
    pub parameters: Lease<'a, B>,
    /// `input[rows, d]`
    pub input: Matrix<'a, B, f32>,
    /// The rows, and how they divide into grains.
    pub grains: GrainRows,
}

impl Norm {
    /// Memory for up to `grains`.
    pub(crate) fn plan<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        grains: GrainRows,
    ) -> Result<NormScratch<B>> {
        let Device { backend, stream } = device;
        Ok(NormScratch {
            statistics: backend.allocate(stream, grains.rows())?,
            gradients: backend.allocate(stream, grains.grains() * self.width)?,
        })
    }

    fn shape(&self, grains: GrainRows) -> Result<NormShape> {
        Ok(NormShape::new(grains, self.width, self.eps)?)
    }

    /// Writes `normed[rows, d]`.
    pub(crate) fn forward<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        normed: MatrixMut<'_, B, B::Activation>,
        scratch: &mut NormScratch<B>,
        pass: NormPass<'_, B>,
    ) -> Result<()> {
        Ok(device.backend.rms_norm_forward(
            device.stream,
            normed,
            SliceMut::new(&mut scratch.statistics, 0, pass.grains.rows())?,
            pass.input,
            pass.parameters.vector(&self.weight)?,
            self.shape(pass.grains)?,
        )?)
    }

    /// Adds the gradient of the input to `grad[rows, d]`, and those of the parameters to `lane`, laid out as their
    /// segment. The scratch is as [`forward`](Self::forward) left it for the same input.
    pub(crate) fn backward<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        grad: MatrixMut<'_, B, f32>,
        lane: &mut SliceMut<'_, B, f32>,
        grad_normed: Matrix<'_, B, B::Activation>,
        scratch: &mut NormScratch<B>,
        pass: NormPass<'_, B>,
    ) -> Result<()> {
        let Device { backend, stream } = device;
        let elements = pass.grains.grains() * self.width;
        backend.rms_norm_backward(
            stream,
            grad,
            SliceMut::new(&mut scratch.gradients, 0, elements)?,
            grad_normed,
            pass.input,
            Slice::new(&scratch.statistics, 0, pass.grains.rows())?,
            pass.parameters.vector(&self.weight)?,
            self.shape(pass.grains)?,
        )?;
        let lane = lane.reborrow().sub(self.weight.start, self.weight.len())?;
        Ok(backend.accumulate(stream, lane, Slice::new(&scratch.gradients, 0, elements)?)?)
    }
}
