//! The forward pass of one transformer block; the steps that backward and generation repeat are
//! functions of their own.

use std::ops::Range;

use tidemill_kernels::backend::AttentionInputs;
use tidemill_kernels::{Backend, Matrix, MatrixMut, Slice, SliceMut};

use crate::block::BlockPass;
use crate::error::Result;
use crate::linear::{Linear, Products};
use crate::norm::{Norm, NormPass, Normed};
use crate::trainable::Device;
use crate::transformer::block::{TransformerBlock, TransformerSaved, TransformerScratch};
use crate::transformer::query_key_value::{Places, Rows};

/// `out = middle + mlp(norm_2(middle))`, where `middle = input + attention(norm_1(input))`
pub(crate) fn run<B: Backend>(
    block: &TransformerBlock,
    device: &mut Device<'_, B>,
    out: &mut B::Buffer<f32>,
    pass: BlockPass<'_, B>,
    saved: &mut TransformerSaved<B>,
    scratch: &mut TransformerScratch<B>,
) -> Result<()> {
    let (grains, width) = (pass.shape.grain_rows()?, block.width());
    let rows = Rows { parameters: pass.parameters, grains };
    let TransformerScratch { query_key_value, activated, .. } = scratch;
    normalize(&block.norm_1, device, &mut saved.normed_1, pass.input, rows)?;
    let normed = saved.normed_1.rows(grains.rows())?;
    project(block, device, Products::Library, &mut saved.qkv, normed, rows)?;
    let shape = block.attention_shape(pass.shape)?;
    let places = Places { starts: pass.starts, past: None };
    query_key_value.prepare(block, device, &saved.qkv, rows, places, shape)?;
    query_key_value.turn(block, device, &mut saved.qkv, places, shape)?;
    let [q, k, v] = query_key_value.matrices(block, &saved.qkv, grains.rows())?;
    let slopes = saved.slopes.as_ref().map(Slice::all);
    device.backend.attention_forward(
        device.stream,
        SliceMut::all(&mut saved.attended).matrix(grains.rows(), block.attention.width())?,
        SliceMut::new(&mut saved.log_sum_exp, 0, grains.rows() * block.attention.heads)?,
        AttentionInputs { q, k, v, slopes, starts: pass.starts },
        shape,
    )?;
    let input = Slice::all(pass.input).matrix(grains.rows(), width)?;
    let attended = Slice::all(&saved.attended).matrix(grains.rows(), block.attention.width())?;
    let middle = SliceMut::all(&mut saved.middle).matrix(grains.rows(), width)?;
    block.out_proj.forward_onto(device, middle, input, attended, pass.parameters)?;

    normalize(&block.norm_2, device, &mut saved.normed_2, &saved.middle, rows)?;
    let normed = saved.normed_2.rows(grains.rows())?;
    let (mlp, parameters) = (&block.mlp, pass.parameters);
    let mut up = SliceMut::all(&mut saved.up).matrix(grains.rows(), mlp.up_width())?;
    mlp.project(device, Products::Library, up.reborrow(), normed, parameters)?;
    let mut activated = SliceMut::all(activated).matrix(grains.rows(), mlp.width())?;
    mlp.activate(device, activated.reborrow(), up.as_matrix(), parameters)?;
    let middle = Slice::all(&saved.middle).matrix(grains.rows(), width)?;
    let out = SliceMut::all(out).matrix(grains.rows(), width)?;
    mlp.down_proj.forward_onto(device, out, middle, activated.as_matrix(), parameters)
}

/// `normed = norm(input)`
pub(crate) fn normalize<B: Backend>(
    norm: &Norm,
    device: &mut Device<'_, B>,
    normed: &mut Normed<B>,
    input: &B::Buffer<f32>,
    rows: Rows<'_, B>,
) -> Result<()> {
    norm.forward(device, normed, norm_pass(norm, input, rows)?)
}

/// The norm over `input[b t, d]`.
pub(crate) fn norm_pass<'a, B: Backend>(
    norm: &Norm,
    input: &'a B::Buffer<f32>,
    rows: Rows<'a, B>,
) -> Result<NormPass<'a, B>> {
    let Rows { parameters, grains } = rows;
    let input = Slice::all(input).matrix(grains.rows(), norm.width)?;
    Ok(NormPass { parameters, input, grains })
}

/// `qkv = normed projections^T + bias`
pub(crate) fn project<B: Backend>(
    block: &TransformerBlock,
    device: &mut Device<'_, B>,
    products: Products,
    qkv: &mut B::Buffer<B::Activation>,
    normed: Matrix<'_, B, B::Activation>,
    rows: Rows<'_, B>,
) -> Result<()> {
    let count = rows.grains.rows();
    // The ordered product computes each element in a fixed order, whatever else the call computes,
    // so one call for all maps gives the same bits. The library's product gives no such guarantee.
    if products == Products::Ordered
        && let Some(all) = side_by_side(&block.projections)
    {
        let outputs = block.attention.projected_width();
        let qkv = SliceMut::all(qkv).matrix(count, outputs)?;
        let weight = rows.parameters.weight(&all, outputs, block.width())?;
        return products.multiply(device, qkv, normed, weight);
    }
    let mut first = 0;
    for map in &block.projections {
        let qkv: MatrixMut<'_, B, _> =
            SliceMut::all(&mut *qkv).matrix(count, block.attention.projected_width())?;
        let out = qkv.columns(first, map.outputs)?;
        map.forward(device, products, out, normed, rows.parameters)?;
        first += map.outputs;
    }
    Ok(())
}

/// The weights of several maps as one matrix, if they have no biases and each begins where the one
/// before it ends.
fn side_by_side(maps: &[Linear]) -> Option<Range<usize>> {
    let [first, .., last] = maps else { return None };
    let are_neighbours = maps.windows(2).all(|pair| pair[0].weight.end == pair[1].weight.start);
    let have_biases = maps.iter().any(|map| map.bias.is_some());
    (are_neighbours && !have_biases).then_some(first.weight.start..last.weight.end)
}
