//! The backward pass of one transformer block, from its output to its input.
//!
//! Gradients of activations are formed for the whole microbatch at once; gradients of parameters
//! grain by grain, each added to the lane as soon as it is complete.

use tidemill_kernels::backend::{AttentionInputs, AttentionSaved, Output};
use tidemill_kernels::{Backend, Matrix, Slice, SliceMut};

use crate::block::{BlockPass, ResidualGradient};
use crate::error::Result;
use crate::linear::Linear;
use crate::trainable::Device;
use crate::transformer::block::{
    TransformerBlock, TransformerGradients, TransformerSaved, TransformerScratch,
};
use crate::transformer::forward;
use crate::transformer::mlp::MlpBackward;
use crate::transformer::query_key_value::{Places, Rows};

/// `grad` becomes the gradient of the block's input; the gradients of its parameters are added to `lane`.
pub(crate) fn run<B: Backend>(
    block: &TransformerBlock,
    device: &mut Device<'_, B>,
    grad: &mut ResidualGradient<B>,
    lane: SliceMut<'_, B, f32>,
    pass: BlockPass<'_, B>,
    saved: &TransformerSaved<B>,
    scratch: &mut TransformerScratch<B>,
) -> Result<()> {
    let rows = Rows { parameters: pass.parameters, grains: pass.shape.grain_rows()? };
    let mut backward = Backward { block, lane, pass, rows, saved, scratch };
    backward.project_down(device, grad)?;
    backward.project_up(device, grad)?;
    backward.project_out(device, grad)?;
    backward.attend(device)?;
    backward.project_in(device, grad)
}

/// The backward pass of one block.
struct Backward<'a, B: Backend> {
    block: &'a TransformerBlock,
    lane: SliceMut<'a, B, f32>,
    pass: BlockPass<'a, B>,
    rows: Rows<'a, B>,
    saved: &'a TransformerSaved<B>,
    scratch: &'a mut TransformerScratch<B>,
}

impl<B: Backend> Backward<'_, B> {
    /// From the gradient of the output to that of `up`, which overwrites the gradient of
    /// `activated`.
    fn project_down(
        &mut self,
        device: &mut Device<'_, B>,
        grad: &mut ResidualGradient<B>,
    ) -> Result<()> {
        let Self { block, rows, saved, .. } = *self;
        let TransformerScratch { activated, gradients, .. } = &mut *self.scratch;
        let TransformerGradients { activated: gradient, bias, .. } = gradients;
        let (mlp, count) = (&block.mlp, rows.grains.rows());
        let grad_out = grad.rounded(device, count, block.width())?;
        let grad_up = SliceMut::all(gradient).matrix(count, mlp.up_width())?;
        let activated = SliceMut::all(activated).matrix(count, mlp.width())?;
        let up = Slice::all(&saved.up).matrix(count, mlp.up_width())?;
        let pass = &mut MlpBackward { rows, lane: self.lane.reborrow(), bias_gradients: bias };
        mlp.backward_down(device, grad_up, activated, grad_out, up, pass)
    }

    /// From the gradient of `up` to that of `middle`.
    fn project_up(
        &mut self,
        device: &mut Device<'_, B>,
        grad: &mut ResidualGradient<B>,
    ) -> Result<()> {
        let Self { block, rows, saved, .. } = *self;
        let (count, width) = (rows.grains.rows(), block.width());
        let TransformerScratch { norm, gradients, .. } = &mut *self.scratch;
        let TransformerGradients { normed: grad_normed, activated: grad_up, bias, .. } = gradients;
        let input = saved.normed_2.rows(count)?;
        let mlp = &block.mlp;
        let grad_up = Slice::all(&*grad_up).matrix(count, mlp.up_width())?;
        let grad_input = SliceMut::all(&mut *grad_normed).matrix(count, width)?;
        let pass = &mut MlpBackward { rows, lane: self.lane.reborrow(), bias_gradients: bias };
        mlp.backward_up(device, grad_input, grad_up, input, pass)?;
        block.norm_2.backward(
            device,
            grad,
            &mut self.lane,
            Slice::all(&*grad_normed).matrix(count, width)?,
            (&saved.normed_2, norm),
            forward::norm_pass(&block.norm_2, &saved.middle, rows)?,
        )
    }

    /// From the gradient of `middle` to that of attention's output.
    fn project_out(
        &mut self,
        device: &mut Device<'_, B>,
        grad: &mut ResidualGradient<B>,
    ) -> Result<()> {
        let Self { block, rows, saved, .. } = *self;
        let (count, width) = (rows.grains.rows(), block.attention.width());
        let grad_out = grad.rounded(device, count, block.width())?;
        let TransformerGradients { attended, bias, .. } = &mut self.scratch.gradients;
        let map = &block.out_proj;
        let out = SliceMut::all(attended).matrix(count, width)?;
        map.backward_input(device, out, grad_out, rows.parameters, Output::Overwrite)?;
        let sides = [grad_out, Slice::all(&saved.attended).matrix(count, width)?];
        map.backward_parameters(device, &mut self.lane, sides, bias, rows.grains)
    }

    /// From the gradient of attention's output to that of the projections' product.
    fn attend(&mut self, device: &mut Device<'_, B>) -> Result<()> {
        let Self { block, rows, saved, pass, .. } = *self;
        let (count, width) = (rows.grains.rows(), block.attention.width());
        let TransformerScratch { query_key_value, gradients, .. } = &mut *self.scratch;
        let TransformerGradients { attended, qkv, .. } = gradients;
        let shape = block.attention_shape(pass.shape)?;
        let places = Places { starts: pass.starts, past: None };
        query_key_value.prepare(block, device, &saved.qkv, rows, places, shape)?;
        let [q, k, v] = query_key_value.matrices(block, &saved.qkv, count)?;
        let slopes = saved.slopes.as_ref().map(Slice::all);
        device.backend.attention_backward(
            device.stream,
            SliceMut::all(&mut *qkv).matrix(count, 3 * width)?,
            AttentionSaved {
                dout: Slice::all(&*attended).matrix(count, width)?,
                inputs: AttentionInputs { q, k, v, slopes, starts: pass.starts },
                out: Slice::all(&saved.attended).matrix(count, width)?,
                log_sum_exp: Slice::new(&saved.log_sum_exp, 0, count * block.attention.heads)?,
            },
            shape,
        )?;
        query_key_value.turn_back(block, device, qkv, pass.starts, shape)?;
        query_key_value.backward(block, device, qkv, &mut self.lane, &saved.qkv, rows)
    }

    /// From the gradient of the projections' product to that of the input.
    fn project_in(
        &mut self,
        device: &mut Device<'_, B>,
        grad: &mut ResidualGradient<B>,
    ) -> Result<()> {
        let Self { block, rows, pass, saved, .. } = *self;
        let (count, width) = (rows.grains.rows(), block.width());
        let TransformerScratch { norm, gradients, .. } = &mut *self.scratch;
        let input = saved.normed_1.rows(count)?;
        let TransformerGradients { normed: grad_normed, qkv, bias, .. } = gradients;
        let grad_qkv: Matrix<'_, B, _> =
            Slice::all(&*qkv).matrix(count, 3 * block.attention.width())?;
        let (mut first, mut output) = (0, Output::Overwrite);
        for map in &block.projections {
            let Linear { outputs, .. } = *map;
            let grad_out = grad_qkv.columns(first, outputs)?;
            let sides = [grad_out, input];
            map.backward_parameters(device, &mut self.lane, sides, bias, rows.grains)?;
            let out = SliceMut::all(&mut *grad_normed).matrix(count, width)?;
            map.backward_input(device, out, grad_out, rows.parameters, output)?;
            (first, output) = (first + outputs, Output::Add);
        }
        block.norm_1.backward(
            device,
            grad,
            &mut self.lane,
            Slice::all(&*grad_normed).matrix(count, width)?,
            (&saved.normed_1, norm),
            forward::norm_pass(&block.norm_1, pass.input, rows)?,
        )
    }
}
