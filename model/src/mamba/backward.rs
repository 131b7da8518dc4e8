//! The backward pass of one Mamba block, from its output to its input.
//!
//! Gradients of activations are formed for the whole microbatch at once; gradients of parameters
//! grain by grain, each added to the lane as soon as it is complete.

use std::ops::Range;

use tidemill_kernels::backend::{ConvGradients, Output, ScanGradients, ScanSaved};
use tidemill_kernels::{Backend, Matrix, MatrixMut, Slice, SliceMut};

use crate::block::{BlockPass, ResidualGradient};
use crate::error::Result;
use crate::mamba::block::{MambaBlock, MambaGradients, MambaSaved, MambaScratch, ScanSources};
use crate::mamba::forward;
use crate::trainable::Device;

/// `grad` becomes the gradient of the block's input; the gradients of its parameters are added to `lane`.
pub(crate) fn run<B: Backend>(
    block: &MambaBlock,
    device: &mut Device<'_, B>,
    grad: &mut ResidualGradient<B>,
    lane: SliceMut<'_, B, f32>,
    pass: BlockPass<'_, B>,
    saved: &MambaSaved<B>,
    scratch: &mut MambaScratch<B>,
) -> Result<()> {
    let mut backward = Backward { block, lane, pass, saved, scratch };
    backward.project_out(device, grad)?;
    backward.scan(device)?;
    backward.out_proj_gradient(device, grad)?;
    backward.project_steps(device)?;
    backward.convolve(device)?;
    backward.project_in(device)?;
    backward.normalize(device, grad)
}

/// The backward pass of one block.
struct Backward<'a, B: Backend> {
    block: &'a MambaBlock,
    lane: SliceMut<'a, B, f32>,
    pass: BlockPass<'a, B>,
    saved: &'a MambaSaved<B>,
    scratch: &'a mut MambaScratch<B>,
}

impl<B: Backend> Backward<'_, B> {
    fn rows(&self) -> Result<usize> {
        Ok(self.pass.shape.sequences()?.rows())
    }

    /// `gradients.gated = grad out_proj`
    fn project_out(
        &mut self,
        device: &mut Device<'_, B>,
        grad: &mut ResidualGradient<B>,
    ) -> Result<()> {
        let (rows, block) = (self.rows()?, self.block);
        let grad = grad.rounded(device, rows, block.width)?;
        let parameters = self.pass.parameters;
        Ok(device.backend.matmul(
            device.stream,
            SliceMut::all(&mut self.scratch.gradients.gated).matrix(rows, block.inner)?,
            grad,
            parameters.weight(&block.tensors.out_proj, block.width, block.inner)?,
            Output::Overwrite,
        )?)
    }

    /// From `gradients.gated` to the gradients of the scan's inputs; `gated` is recomputed on the
    /// way.
    fn scan(&mut self, device: &mut Device<'_, B>) -> Result<()> {
        let (rows, block, saved) = (self.rows()?, self.block, self.saved);
        forward::raw_steps(block, device, self.pass, saved, self.scratch)?;
        let shape = block.scan_shape(self.pass.shape)?;
        let (grains, inner) = (shape.grains().grains(), block.inner);
        let Device { backend, stream } = device;
        let elements = backend.selective_scan_saved_elements(shape);
        let MambaScratch { delta_raw, gated, gradients, .. } = &mut *self.scratch;
        let sources =
            ScanSources { xz: &saved.xz, x: &saved.x, dt_bc: &saved.dt_bc, delta_raw: &*delta_raw };
        let dxz: MatrixMut<'_, B, _> = SliceMut::all(&mut gradients.xz).matrix(rows, 2 * inner)?;
        let ddt_bc: MatrixMut<'_, B, _> =
            SliceMut::all(&mut gradients.dt_bc).matrix(rows, block.dt_bc_width())?;
        backend.selective_scan_backward(
            stream,
            ScanGradients {
                ddelta_raw: SliceMut::all(&mut gradients.delta_raw).matrix(rows, inner)?,
                dx: SliceMut::all(&mut gradients.x).matrix(rows, inner)?,
                dbc: ddt_bc.columns(block.rank, 2 * block.states)?,
                dz: dxz.columns(inner, inner)?,
                da_log: SliceMut::new(&mut gradients.a_log, 0, grains * inner * block.states)?,
                dd: SliceMut::new(&mut gradients.channels, 0, grains * inner)?,
                ddelta_bias: SliceMut::new(&mut gradients.dt_bias, 0, grains * inner)?,
                regated: Some(SliceMut::all(gated).matrix(rows, inner)?),
            },
            ScanSaved {
                dout: Slice::all(&gradients.gated).matrix(rows, inner)?,
                inputs: block.scan_inputs(self.pass, sources)?,
                saved: Slice::new(&saved.scan, 0, elements)?,
            },
            shape,
        )?;
        let MambaGradients { a_log, channels, dt_bias, .. } = &self.scratch.gradients;
        for (place, gradient) in [
            (&block.tensors.a_log, a_log),
            (&block.tensors.d, channels),
            (&block.tensors.dt_bias, dt_bias),
        ] {
            accumulate(device, &mut self.lane, place, gradient, grains)?;
        }
        Ok(())
    }

    fn out_proj_gradient(
        &mut self,
        device: &mut Device<'_, B>,
        grad: &mut ResidualGradient<B>,
    ) -> Result<()> {
        let (rows, block) = (self.rows()?, self.block);
        let grad_out = grad.rounded(device, rows, block.width)?;
        let input = Slice::all(&self.scratch.gated).matrix(rows, block.inner)?;
        add_weight(device, &mut self.lane, &block.tensors.out_proj, self.pass, [grad_out, input])
    }

    /// Through dt_proj and x_proj, to the gradient of the convolution's output.
    fn project_steps(&mut self, device: &mut Device<'_, B>) -> Result<()> {
        let (rows, block, saved) = (self.rows()?, self.block, self.saved);
        let parameters = self.pass.parameters;
        let (inner, rank, columns) = (block.inner, block.rank, block.dt_bc_width());
        let MambaGradients { delta_raw, dt_bc, x, .. } = &mut self.scratch.gradients;
        let ddelta_raw = Slice::all(delta_raw).matrix(rows, inner)?;
        let ddt_bc: MatrixMut<'_, B, _> = SliceMut::all(dt_bc).matrix(rows, columns)?;
        device.backend.matmul(
            device.stream,
            ddt_bc.columns(0, rank)?,
            ddelta_raw,
            parameters.weight(&block.tensors.dt_proj, inner, rank)?,
            Output::Overwrite,
        )?;
        let grad_out = Slice::all(dt_bc).matrix(rows, columns)?;
        device.backend.matmul(
            device.stream,
            SliceMut::all(x).matrix(rows, inner)?,
            grad_out,
            parameters.weight(&block.tensors.x_proj, columns, inner)?,
            Output::Add,
        )?;
        let dt = Slice::all(&saved.dt_bc).matrix(rows, columns)?.columns(0, rank)?;
        let (tensors, sides) = (&block.tensors, [ddelta_raw, dt]);
        add_weight(device, &mut self.lane, &tensors.dt_proj, self.pass, sides)?;
        let sides = [grad_out, Slice::all(&saved.x).matrix(rows, inner)?];
        add_weight(device, &mut self.lane, &tensors.x_proj, self.pass, sides)
    }

    /// From the gradient of the convolution's output to the left half of `gradients.xz`.
    fn convolve(&mut self, device: &mut Device<'_, B>) -> Result<()> {
        let (rows, block, inner) = (self.rows()?, self.block, self.block.inner);
        let tensors = &block.tensors;
        let shape = block.conv_shape(self.pass.shape)?;
        let grains = shape.grains().grains();
        let inputs = block.conv_inputs(self.pass, &self.saved.xz)?;
        let MambaGradients { xz, x: dout, conv_weight, channels, .. } = &mut self.scratch.gradients;
        let dxz: MatrixMut<'_, B, _> = SliceMut::all(xz).matrix(rows, 2 * inner)?;
        let dbias = match inputs.bias {
            Some(_) => Some(SliceMut::new(channels, 0, grains * inner)?),
            None => None,
        };
        device.backend.causal_conv1d_silu_backward(
            device.stream,
            ConvGradients {
                dx: dxz.columns(0, inner)?,
                dweight: SliceMut::new(conv_weight, 0, grains * inner * block.taps)?,
                dbias,
            },
            Slice::all(dout).matrix(rows, inner)?,
            inputs,
            shape,
        )?;
        let MambaGradients { conv_weight, channels, .. } = &self.scratch.gradients;
        accumulate(device, &mut self.lane, &tensors.conv_weight, conv_weight, grains)?;
        if let Some(place) = &tensors.conv_bias {
            accumulate(device, &mut self.lane, place, channels, grains)?;
        }
        Ok(())
    }

    /// `gradients.normed = gradients.xz in_proj`
    fn project_in(&mut self, device: &mut Device<'_, B>) -> Result<()> {
        let (rows, block) = (self.rows()?, self.block);
        let place = &block.tensors.in_proj;
        let gradients = &mut self.scratch.gradients;
        let grad_out = Slice::all(&gradients.xz).matrix(rows, 2 * block.inner)?;
        device.backend.matmul(
            device.stream,
            SliceMut::all(&mut gradients.normed).matrix(rows, block.width)?,
            grad_out,
            self.pass.parameters.weight(place, 2 * block.inner, block.width)?,
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
        let MambaScratch { norm, gradients, .. } = &mut *self.scratch;
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

/// Adds `grad_out^T input` to the weight at `place`, grain by grain.
pub(crate) fn add_weight<B: Backend>(
    device: &mut Device<'_, B>,
    lane: &mut SliceMut<'_, B, f32>,
    place: &Range<usize>,
    pass: BlockPass<'_, B>,
    [grad_out, input]: [Matrix<'_, B, B::Activation>; 2],
) -> Result<()> {
    let (rows, columns) = (grad_out.shape()[1], input.shape()[1]);
    let lane = lane.reborrow().sub(place.start, place.len())?.matrix(rows, columns)?;
    let grains = pass.shape.grain_rows()?;
    Ok(device.backend.weight_gradient_add(device.stream, lane, grad_out, input, grains)?)
}

/// Adds `gradients[grains, ..]` to the tensor at `place`, grain by grain.
pub(crate) fn accumulate<B: Backend>(
    device: &mut Device<'_, B>,
    lane: &mut SliceMut<'_, B, f32>,
    place: &Range<usize>,
    gradients: &B::Buffer<f32>,
    grains: usize,
) -> Result<()> {
    let lane = lane.reborrow().sub(place.start, place.len())?;
    let gradients = Slice::new(gradients, 0, grains * place.len())?;
    Ok(device.backend.accumulate(device.stream, lane, gradients)?)
}
