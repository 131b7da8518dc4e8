//! The backward pass of one Mamba-2 block, from its output to its input.
//!
//! Gradients of activations are formed for the whole microbatch at once; gradients of parameters
//! grain by grain, each added to the lane as soon as it is complete.

use tidemill_kernels::backend::{ConvGradients, HeadScanGradients, Output};
use tidemill_kernels::{Backend, MatrixMut, Slice, SliceMut};

use crate::block::{BlockPass, ResidualGradient};
use crate::error::Result;
use crate::mamba::backward::{accumulate, add_weight};
use crate::mamba2::block::{Mamba2Block, Mamba2Gradients, Mamba2Saved, Mamba2Scratch};
use crate::mamba2::forward;
use crate::trainable::Device;

/// `grad` becomes the gradient of the block's input; the gradients of its parameters are added to `lane`.
pub(crate) fn run<B: Backend>(
    block: &Mamba2Block,
    device: &mut Device<'_, B>,
    grad: &mut ResidualGradient<B>,
    lane: SliceMut<'_, B, f32>,
    pass: BlockPass<'_, B>,
    saved: &Mamba2Saved<B>,
    scratch: &mut Mamba2Scratch<B>,
) -> Result<()> {
    let mut backward = Backward { block, lane, pass, saved, scratch };
    backward.project_out(device, grad)?;
    backward.normalize_gated(device)?;
    backward.scan(device)?;
    backward.convolve(device)?;
    backward.project_in(device)?;
    backward.normalize(device, grad)
}

/// The backward pass of one block.
struct Backward<'a, B: Backend> {
    block: &'a Mamba2Block,
    lane: SliceMut<'a, B, f32>,
    pass: BlockPass<'a, B>,
    saved: &'a Mamba2Saved<B>,
    scratch: &'a mut Mamba2Scratch<B>,
}

impl<B: Backend> Backward<'_, B> {
    fn rows(&self) -> Result<usize> {
        Ok(self.pass.shape.sequences()?.rows())
    }

    /// `gradients.gated_normed = grad out_proj`, and the gradient of out_proj.
    fn project_out(
        &mut self,
        device: &mut Device<'_, B>,
        grad: &mut ResidualGradient<B>,
    ) -> Result<()> {
        let (rows, block, inner) = (self.rows()?, self.block, self.block.inner());
        forward::normalize_gated(block, device, self.pass, self.saved, self.scratch)?;
        let grad = grad.rounded(device, rows, block.width)?;
        let place = &block.tensors.out_proj;
        device.backend.matmul(
            device.stream,
            SliceMut::all(&mut self.scratch.gradients.gated_normed).matrix(rows, inner)?,
            grad,
            self.pass.parameters.weight(place, block.width, inner)?,
            Output::Overwrite,
        )?;
        let input = self.scratch.gated_normed.rows(rows)?;
        add_weight(device, &mut self.lane, place, self.pass, [grad, input])
    }

    /// From `gradients.gated_normed` to `gradients.gated`.
    fn normalize_gated(&mut self, device: &mut Device<'_, B>) -> Result<()> {
        let (rows, block, inner) = (self.rows()?, self.block, self.block.inner());
        let Mamba2Scratch { gated_normed, gated_norm, gradients, .. } = &mut *self.scratch;
        let Mamba2Gradients { gated_normed: gradient_of_norm, gated, .. } = gradients;
        // The kernel adds to its output. No residual branch goes around this norm, so the output
        // starts from zero.
        let gradient = SliceMut::new(gated.gradient_mut(), 0, rows * inner)?;
        device.backend.fill_zero(device.stream, gradient)?;
        block.gated_norm.backward(
            device,
            gated,
            &mut self.lane,
            Slice::all(gradient_of_norm).matrix(rows, inner)?,
            (gated_normed, gated_norm),
            block.gated_norm_pass(self.pass, &self.saved.gated)?,
        )
    }

    /// From `gradients.gated` to the gradients of the scan's inputs.
    fn scan(&mut self, device: &mut Device<'_, B>) -> Result<()> {
        let (block, saved, pass) = (self.block, self.saved, self.pass);
        let sequences = pass.shape.sequences()?;
        let shape = block.scan_shape(sequences, pass.shape.samples_per_grain)?;
        let (rows, of_grains) = (sequences.rows(), shape.grains().grains() * shape.heads());
        let (projected, c) = (block.projected_width(), block.conv_width());
        let sources = [
            Slice::all(&saved.projected).matrix(rows, projected)?,
            Slice::all(&saved.xbc).matrix(rows, c)?,
        ];
        let gradients = &mut self.scratch.gradients;
        device.backend.head_scan_backward(
            device.stream,
            HeadScanGradients {
                dprojected: SliceMut::all(&mut gradients.projected).matrix(rows, projected)?,
                dxbc: SliceMut::all(&mut gradients.xbc).matrix(rows, c)?,
                da_log: SliceMut::new(&mut gradients.a_log, 0, of_grains)?,
                dd: SliceMut::new(&mut gradients.d, 0, of_grains)?,
                ddelta_bias: SliceMut::new(&mut gradients.dt_bias, 0, of_grains)?,
            },
            Slice::all(gradients.gated.gradient()).matrix(rows, block.inner())?,
            block.scan_inputs(pass.parameters, sources, pass.starts)?,
            shape,
        )?;
        let grains = shape.grains().grains();
        for (place, gradient) in [
            (&block.tensors.a_log, &gradients.a_log),
            (&block.tensors.d, &gradients.d),
            (&block.tensors.dt_bias, &gradients.dt_bias),
        ] {
            accumulate(device, &mut self.lane, place, gradient, grains)?;
        }
        Ok(())
    }

    /// From the gradient of the convolution's output to its columns of `gradients.projected`.
    fn convolve(&mut self, device: &mut Device<'_, B>) -> Result<()> {
        let (block, tensors, pass) = (self.block, &self.block.tensors, self.pass);
        let sequences = pass.shape.sequences()?;
        let shape = block.conv_shape(sequences, pass.shape.samples_per_grain)?;
        let (rows, grains) = (sequences.rows(), shape.grains().grains());
        let (columns, c) = (block.projected_width(), block.conv_width());
        let projected = Slice::all(&self.saved.projected).matrix(rows, columns)?;
        let inputs = block.conv_inputs(pass.parameters, projected, pass.starts)?;
        let gradients = &mut self.scratch.gradients;
        let Mamba2Gradients { projected, xbc, conv_weight, conv_bias, .. } = gradients;
        let dprojected: MatrixMut<'_, B, _> = SliceMut::all(projected).matrix(rows, columns)?;
        let dbias = match inputs.bias {
            Some(_) => Some(SliceMut::new(conv_bias, 0, grains * c)?),
            None => None,
        };
        device.backend.causal_conv1d_silu_backward(
            device.stream,
            ConvGradients {
                dx: dprojected.columns(block.inner(), c)?,
                dweight: SliceMut::new(conv_weight, 0, grains * c * block.taps)?,
                dbias,
            },
            Slice::all(&*xbc).matrix(rows, c)?,
            inputs,
            shape,
        )?;
        accumulate(device, &mut self.lane, &tensors.conv_weight, conv_weight, grains)?;
        if let Some(place) = &tensors.conv_bias {
            accumulate(device, &mut self.lane, place, conv_bias, grains)?;
        }
        Ok(())
    }

    /// `gradients.normed = gradients.projected in_proj`, and the gradient of in_proj.
    fn project_in(&mut self, device: &mut Device<'_, B>) -> Result<()> {
        let (rows, block, columns) = (self.rows()?, self.block, self.block.projected_width());
        let place = &block.tensors.in_proj;
        let gradients = &mut self.scratch.gradients;
        let grad_out = Slice::all(&gradients.projected).matrix(rows, columns)?;
        device.backend.matmul(
            device.stream,
            SliceMut::all(&mut gradients.normed).matrix(rows, block.width)?,
            grad_out,
            self.pass.parameters.weight(place, columns, block.width)?,
            Output::Overwrite,
        )?;
        let input = self.saved.normed.rows(rows)?;
        add_weight(device, &mut self.lane, place, self.pass, [grad_out, input])
    }

    /// Adds the gradient through the norm to `grad`, which so far holds that of the residual
    /// branch.
    fn normalize(
        &mut self,
        device: &mut Device<'_, B>,
        grad: &mut ResidualGradient<B>,
    ) -> Result<()> {
        let (rows, block) = (self.rows()?, self.block);
        let Mamba2Scratch { norm, gradients, .. } = &mut *self.scratch;
        block.norm.backward(
            device,
            grad,
            &mut self.lane,
            Slice::all(&gradients.normed).matrix(rows, block.width)?,
            (&self.saved.normed, norm),
            block.norm_pass(self.pass)?,
        )
    }
}
