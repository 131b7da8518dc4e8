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
    normalize(block, device, pass, scratch)?;
    project_in(block, device, pass, saved, scratch)?;
    convolve(block, device, pass, saved)?;
    scan(block, device, pass, saved)?;
    normalize_gated(block, device, pass, saved, scratch)?;
    project_out(block, device, out, pass, scratch)
}

/// `scratch.normed = rms_norm(input)`
pub(crate) fn normalize<B: Backend>(
    block: &Mamba2Block,
    device: &mut Device<'_, B>,
    pass: BlockPass<'_, B>,
    scratch: &mut Mamba2Scratch<B>,
) -> Result<()> {
    let pass = block.norm_pass(pass)?;
    let Mamba2Scratch { normed, norm, .. } = scratch;
    let normed = SliceMut::all(normed).matrix(pass.grains.rows(), block.width)?;
    block.norm.forward(device, normed, norm, pass)
}

/// `saved.projected = normed in_proj^T`
fn project_in<B: Backend>(
    block: &Mamba2Block,
    device: &mut Device<'_, B>,
    pass: BlockPass<'_, B>,
    saved: &mut Mamba2Saved<B>,
    scratch: &Mamba2Scratch<B>,
) -> Result<()> {
    let Device { backend, stream } = device;
    let (rows, columns) = (pass.shape.sequences()?.rows(), block.projected_width());
    Ok(backend.matmul(
        stream,
        SliceMut::all(&mut saved.projected).matrix(rows, columns)?,
        Slice::all(&scratch.normed).matrix(rows, block.width)?,
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
    let Mamba2Saved { projected, xbc, gated } = saved;
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
    let Mamba2Scratch { gated_normed, gated_norm, .. } = scratch;
    let normed = SliceMut::all(gated_normed).matrix(pass.grains.rows(), block.inner())?;
    block.gated_norm.forward(device, normed, gated_norm, pass)
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
        Slice::all(&scratch.gated_normed).matrix(rows, block.inner())?,
        out_proj.transposed(),
        None,
    )?)
}
