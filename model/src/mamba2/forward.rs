//! The forward pass of one Mamba-2 block; the steps that backward repeats are functions of their
//! own.

use tidemill_kernels::backend::Output;
use tidemill_kernels::{Backend, Slice, SliceMut};

use crate::block::BlockPass;
use crate::error::Result;
use crate::mamba2::block::{Mamba2Block, Mamba2Saved, Mamba2Scratch};
use crate::trainable::Device;

/// `out = input + mixer(norm(input))`
pub(crate) fn run<B: Backend>(
    block: &Mamba2Block,
    device: &mut Device<'_, B>,
    out: &mut B::Buffer<f32>,
    pass: BlockPass<'_, B>,
    saved: &mut Mamba2Saved<B>,
    scratch: &mut Mamba2Scratch<B>,
) -> Result<()> {
    block.norm.forward(device, &mut saved.normed, block.norm_pass(pass)?)?;
    project_in(block, device, pass, saved)?;
    convolve(block, device, pass, saved)?;
    scan(block, device, pass, saved)?;
    normalize_gated(block, device, pass, saved, scratch)?;
    project_out(block, device, out, pass, scratch)
}

/// `saved.projected = normed in_proj^T`
fn project_in<B: Backend>(
    block: &Mamba2Block,
    device: &mut Device<'_, B>,
    pass: BlockPass<'_, B>,
    saved: &mut Mamba2Saved<B>,
) -> Result<()> {
    let Device { backend, stream } = device;
    let (rows, columns) = (pass.shape.sequences()?.rows(), block.projected_width());
    Ok(backend.matmul(
        stream,
        SliceMut::all(&mut saved.projected).matrix(rows, columns)?,
        saved.normed.rows(rows)?,
        pass.parameters.weight(&block.tensors.in_proj, columns, block.width)?.transposed(),
        Output::Overwrite,
    )?)
}

/// `saved.xbc = silu(conv1d(..))`
fn convolve<B: Backend>(
    block: &Mamba2Block,
    device: &mut Device<'_, B>,
    pass: BlockPass<'_, B>,
    saved: &mut Mamba2Saved<B>,
) -> Result<()> {
    let Device { backend, stream } = device;
    let sequences = pass.shape.sequences()?;
    let Mamba2Saved { projected, xbc, .. } = saved;
    let projected = Slice::all(&*projected).matrix(sequences.rows(), block.projected_width())?;
    Ok(backend.causal_conv1d_silu_forward(
        stream,
        SliceMut::all(xbc).matrix(sequences.rows(), block.conv_width())?,
        block.conv_inputs(pass.parameters, projected, pass.starts)?,
        block.conv_shape(sequences, pass.shape.samples_per_grain)?,
    )?)
}

/// `saved.gated = head_scan(..)`
fn scan<B: Backend>(
    block: &Mamba2Block,
    device: &mut Device<'_, B>,
    pass: BlockPass<'_, B>,
    saved: &mut Mamba2Saved<B>,
) -> Result<()> {
    let Device { backend, stream } = device;
    let sequences = pass.shape.sequences()?;
    let rows = sequences.rows();
    let Mamba2Saved { projected, xbc, gated, .. } = saved;
    let projected = Slice::all(&*projected).matrix(rows, block.projected_width())?;
    let xbc = Slice::all(&*xbc).matrix(rows, block.conv_width())?;
    Ok(backend.head_scan_forward(
        stream,
        SliceMut::all(gated).matrix(rows, block.inner())?,
        block.scan_inputs(pass.parameters, [projected, xbc], pass.starts)?,
        block.scan_shape(sequences, pass.shape.samples_per_grain)?,
    )?)
}

/// `scratch.gated_normed = rms_norm(gated)`
pub(crate) fn normalize_gated<B: Backend>(
    block: &Mamba2Block,
    device: &mut Device<'_, B>,
    pass: BlockPass<'_, B>,
    saved: &Mamba2Saved<B>,
    scratch: &mut Mamba2Scratch<B>,
) -> Result<()> {
    let pass = block.gated_norm_pass(pass, &saved.gated)?;
    block.gated_norm.forward(device, &mut scratch.gated_normed, pass)
}

/// `out = input + gated_normed out_proj^T`
fn project_out<B: Backend>(
    block: &Mamba2Block,
    device: &mut Device<'_, B>,
    out: &mut B::Buffer<f32>,
    pass: BlockPass<'_, B>,
    scratch: &Mamba2Scratch<B>,
) -> Result<()> {
    let Device { backend, stream } = device;
    let rows = pass.shape.sequences()?.rows();
    let out_proj = pass.parameters.weight(&block.tensors.out_proj, block.width, block.inner())?;
    Ok(backend.matmul_onto(
        stream,
        SliceMut::all(out).matrix(rows, block.width)?,
        Slice::all(pass.input).matrix(rows, block.width)?,
        scratch.gated_normed.rows(rows)?,
        out_proj.transposed(),
        None,
    )?)
}
