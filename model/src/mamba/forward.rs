//! The forward pass of one Mamba block; the steps that backward repeats are functions of their own.

use tidemill_kernels::backend::Output;
use tidemill_kernels::{Backend, Slice, SliceMut};

use crate::block::BlockPass;
use crate::error::Result;
use crate::mamba::block::{MambaBlock, MambaSaved, MambaScratch, ScanSources};
use crate::trainable::Device;

/// `out = input + mixer(norm(input))`
pub(crate) fn run<B: Backend>(
    block: &MambaBlock,
    device: &mut Device<'_, B>,
    out: &mut B::Buffer<f32>,
    pass: BlockPass<'_, B>,
    saved: &mut MambaSaved<B>,
    scratch: &mut MambaScratch<B>,
) -> Result<()> {
    block.norm.forward(device, &mut saved.normed, block.norm_pass(pass)?)?;
    project_in(block, device, pass, saved)?;
    convolve(block, device, pass, saved)?;
    project_steps(block, device, pass, saved)?;
    raw_steps(block, device, pass, saved, scratch)?;
    scan(block, device, pass, saved, scratch)?;
    project_out(block, device, out, pass, scratch)
}

/// `saved.xz = normed in_proj^T`
fn project_in<B: Backend>(
    block: &MambaBlock,
    device: &mut Device<'_, B>,
    pass: BlockPass<'_, B>,
    saved: &mut MambaSaved<B>,
) -> Result<()> {
    let Device { backend, stream } = device;
    let rows = pass.shape.sequences()?.rows();
    let in_proj = pass.parameters.weight(&block.tensors.in_proj, 2 * block.inner, block.width)?;
    Ok(backend.matmul(
        stream,
        SliceMut::all(&mut saved.xz).matrix(rows, 2 * block.inner)?,
        saved.normed.rows(rows)?,
        in_proj.transposed(),
        Output::Overwrite,
    )?)
}

/// `saved.x = silu(conv1d(x))`
fn convolve<B: Backend>(
    block: &MambaBlock,
    device: &mut Device<'_, B>,
    pass: BlockPass<'_, B>,
    saved: &mut MambaSaved<B>,
) -> Result<()> {
    let Device { backend, stream } = device;
    let rows = pass.shape.sequences()?.rows();
    Ok(backend.causal_conv1d_silu_forward(
        stream,
        SliceMut::all(&mut saved.x).matrix(rows, block.inner)?,
        block.conv_inputs(pass, &saved.xz)?,
        block.conv_shape(pass.shape)?,
    )?)
}

/// `saved.dt_bc = x x_proj^T`
fn project_steps<B: Backend>(
    block: &MambaBlock,
    device: &mut Device<'_, B>,
    pass: BlockPass<'_, B>,
    saved: &mut MambaSaved<B>,
) -> Result<()> {
    let Device { backend, stream } = device;
    let rows = pass.shape.sequences()?.rows();
    let columns = block.dt_bc_width();
    Ok(backend.matmul(
        stream,
        SliceMut::all(&mut saved.dt_bc).matrix(rows, columns)?,
        Slice::all(&saved.x).matrix(rows, block.inner)?,
        pass.parameters.weight(&block.tensors.x_proj, columns, block.inner)?.transposed(),
        Output::Overwrite,
    )?)
}

/// `scratch.delta_raw = dt dt_proj^T`; its bias and softplus belong to the scan.
pub(crate) fn raw_steps<B: Backend>(
    block: &MambaBlock,
    device: &mut Device<'_, B>,
    pass: BlockPass<'_, B>,
    saved: &MambaSaved<B>,
    scratch: &mut MambaScratch<B>,
) -> Result<()> {
    let Device { backend, stream } = device;
    let rows = pass.shape.sequences()?.rows();
    let dt_bc = Slice::all(&saved.dt_bc).matrix(rows, block.dt_bc_width())?;
    Ok(backend.matmul(
        stream,
        SliceMut::all(&mut scratch.delta_raw).matrix(rows, block.inner)?,
        dt_bc.columns(0, block.rank)?,
        pass.parameters.weight(&block.tensors.dt_proj, block.inner, block.rank)?.transposed(),
        Output::Overwrite,
    )?)
}

/// `scratch.gated = selective_scan(..)`
fn scan<B: Backend>(
    block: &MambaBlock,
    device: &mut Device<'_, B>,
    pass: BlockPass<'_, B>,
    saved: &mut MambaSaved<B>,
    scratch: &mut MambaScratch<B>,
) -> Result<()> {
    let Device { backend, stream } = device;
    let shape = block.scan_shape(pass.shape)?;
    let elements = backend.selective_scan_saved_elements(shape);
    let MambaScratch { gated, delta_raw, .. } = scratch;
    // The scan writes its own buffer beside the ones that it reads, so that buffer is taken out of
    // `saved` for the call.
    let MambaSaved { xz, x, dt_bc, scan, .. } = saved;
    let inputs = block.scan_inputs(pass, ScanSources { xz, x, dt_bc, delta_raw })?;
    Ok(backend.selective_scan_forward(
        stream,
        SliceMut::all(gated).matrix(shape.sequences().rows(), block.inner)?,
        SliceMut::new(scan, 0, elements)?,
        inputs,
        shape,
    )?)
}

/// `out = input + gated out_proj^T`
fn project_out<B: Backend>(
    block: &MambaBlock,
    device: &mut Device<'_, B>,
    out: &mut B::Buffer<f32>,
    pass: BlockPass<'_, B>,
    scratch: &MambaScratch<B>,
) -> Result<()> {
    let Device { backend, stream } = device;
    let rows = pass.shape.sequences()?.rows();
    let out_proj = pass.parameters.weight(&block.tensors.out_proj, block.width, block.inner)?;
    Ok(backend.matmul_onto(
        stream,
        SliceMut::all(out).matrix(rows, block.width)?,
        Slice::all(pass.input).matrix(rows, block.width)?,
        Slice::all(&scratch.gated).matrix(rows, block.inner)?,
        out_proj.transposed(),
        None,
    )?)
}
