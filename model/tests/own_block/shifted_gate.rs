//! The block: its parameters, its memory, forward and backward.

mod generation;

use std::ops::Range;

use tidemill_kernels::backend::{GradientSums, KernelGroup, Output, WeightGradient};
use tidemill_kernels::cpu::Buffer;
use tidemill_kernels::shape::GrainRows;
use tidemill_kernels::{Cpu, Runtime, Slice, SliceMut};
use tidemill_model::block::{Block, BlockPass, ResidualGradient, SampleBytes};
use tidemill_model::initialization::Initializer;
use tidemill_model::linear::{Linear, NewLinear, Products};
use tidemill_model::norm::{Norm, NormPass, NormScratch, Normed};
use tidemill_model::parameter_list::{Bias, NewTensor, ParameterList};
use tidemill_model::{Decay, Device, Lease, MicrobatchShape, Reading, Result};

use super::rms_norm;

/// A gated MLP over a token and a share of the one before it:
///
/// ```text
/// n       = rms_norm(input)
/// m[t]    = n[t] + share n[t - 1]             share[d]; nothing is before the first token of a document
/// [u | g] = m up^T + bias                     [b t, f] each
/// out     = input + (u sigmoid(g)) down^T + bias
/// ```
#[derive(Debug)]
pub struct ShiftedGate {
    norm: Norm,
    /// `share[d]`
    share: Range<usize>,
    up: Linear,
    down: Linear,
}

/// The values that forward keeps; backward recomputes the others.
pub struct Saved {
    /// n
    normed: Normed<Cpu>,
    /// `up[b t, 2 f]`
    up: Buffer<f32>,
}

/// Memory that alike blocks use one after the other.
pub struct Scratch {
    norm: NormScratch<Cpu>,
    /// `[b t, d]`
    mixed: Buffer<f32>,
    grad_normed: Buffer<f32>,
    grad_mixed: Buffer<f32>,
    /// `[b t, f]`
    gated: Buffer<f32>,
    grad_gated: Buffer<f32>,
    /// `[b t, 2 f]`
    grad_up: Buffer<f32>,
    /// `[grains, d]`
    share_gradients: Buffer<f32>,
    /// `[grains, 2 f]` or, of `down`, `[grains, d]`
    bias_gradients: Buffer<f32>,
}

impl ShiftedGate {
    pub fn add(parameters: &mut ParameterList, index: usize, [d, f]: [usize; 2]) -> Self {
        let name = |tensor: &str| format!("blocks.{index}.{tensor}");
        let map = |tensor, inputs, outputs| NewLinear {
            name: name(tensor),
            inputs,
            outputs,
            bias: Bias::Present,
            standard_deviation: 0.3,
        };
        Self {
            norm: Norm::add(parameters, rms_norm(name("norm"), d)),
            share: parameters.tensor(NewTensor {
                name: name("share"),
                shape: &[d],
                decay: Decay::Exempt,
                reading: Reading::Fp32,
                initializer: Initializer::Constant(0.5),
            }),
            up: Linear::add(parameters, map("up", d, 2 * f)),
            down: Linear::add(parameters, map("down", f, d)),
        }
    }

    fn width(&self) -> usize {
        self.norm.width
    }

    /// f
    fn gated_width(&self) -> usize {
        self.down.inputs
    }

    /// `share[d]` on the host.
    fn share(&self, device: &mut Device<'_, Cpu>, lease: Lease<'_, Cpu>) -> Result<Vec<f32>> {
        Ok(device.backend.to_vec(device.stream, lease.vector(&self.share)?)?)
    }

    fn norm_pass<'a>(&self, pass: BlockPass<'a, Cpu>) -> Result<NormPass<'a, Cpu>> {
        let grains = pass.shape.grain_rows()?;
        let input = Slice::all(pass.input).matrix(grains.rows(), self.width())?;
        Ok(NormPass { parameters: pass.parameters, input, grains })
    }

    /// `mixed = normed + share` times what is before, of every row.
    fn mix(
        &self,
        device: &mut Device<'_, Cpu>,
        mixed: &mut Buffer<f32>,
        normed: &Buffer<f32>,
        pass: BlockPass<'_, Cpu>,
    ) -> Result<()> {
        let (d, share) = (self.width(), self.share(device, pass.parameters)?);
        let has_before = has_before(device, pass)?;
        let (mixed, normed) = (mixed.as_mut_slice(), normed.as_slice());
        for (row, &has_before) in has_before.iter().enumerate() {
            for (column, share) in share.iter().enumerate() {
                let at = row * d + column;
                let before = if has_before { normed[at - d] } else { 0.0 };
                mixed[at] = share.mul_add(before, normed[at]);
            }
        }
        Ok(())
    }
}

/// Whether the row before belongs to the same document, of every row.
fn has_before(device: &mut Device<'_, Cpu>, pass: BlockPass<'_, Cpu>) -> Result<Vec<bool>> {
    let rows = pass.shape.sequences()?.rows();
    let starts = match pass.starts {
        Some(starts) => device.backend.to_vec(device.stream, starts)?,
        None => vec![0; rows],
    };
    let position = |row: usize| row % pass.shape.positions;
    Ok((0..rows).map(|row| position(row) > starts[row] as usize).collect())
}

fn sigmoid(x: f32) -> f32 {
    (1.0 + (-x).exp()).recip()
}

/// `gated[rows, f] = u sigmoid(g)` of `up[rows, 2 f]`
fn gate(gated: &mut Buffer<f32>, up: &Buffer<f32>, rows: usize, f: usize) {
    let up = up.as_slice()[..rows * 2 * f].chunks_exact(2 * f);
    for (gated, up) in gated.as_mut_slice().chunks_exact_mut(f).zip(up) {
        let (u, g) = up.split_at(f);
        for (gated, (u, &g)) in gated.iter_mut().zip(u.iter().zip(g)) {
            *gated = u * sigmoid(g);
        }
    }
}

impl Block<Cpu> for ShiftedGate {
    type Saved = Saved;
    type Scratch = Scratch;

    fn is_alike(&self, other: &Self) -> bool {
        [self.width(), self.gated_width()] == [other.width(), other.gated_width()]
    }

    fn plan_saved(&self, device: &mut Device<'_, Cpu>, shape: MicrobatchShape) -> Result<Saved> {
        let rows = shape.sequences()?.rows();
        let normed = self.norm.plan_normed(device, rows)?;
        let up = device.backend.allocate(device.stream, rows * 2 * self.gated_width())?;
        Ok(Saved { normed, up })
    }

    fn plan_scratch(
        &self,
        device: &mut Device<'_, Cpu>,
        shape: MicrobatchShape,
    ) -> Result<Scratch> {
        let grains = shape.grain_rows()?;
        let (rows, d, f) = (grains.rows(), self.width(), self.gated_width());
        let norm = self.norm.plan_scratch(device, grains)?;
        let mut allocate = |elements| device.backend.allocate(device.stream, elements);
        Ok(Scratch {
            norm,
            mixed: allocate(rows * d)?,
            grad_normed: allocate(rows * d)?,
            grad_mixed: allocate(rows * d)?,
            gated: allocate(rows * f)?,
            grad_gated: allocate(rows * f)?,
            grad_up: allocate(rows * 2 * f)?,
            share_gradients: allocate(grains.grains() * d)?,
            bias_gradients: allocate(grains.grains() * d.max(2 * f))?,
        })
    }

    fn sample_bytes(&self, backend: &Cpu, positions: usize) -> Result<SampleBytes> {
        let (d, f) = (self.width(), self.gated_width());
        let grain = GrainRows::new(positions, positions)?;
        let weights = [[2 * f, d], [d, f]];
        let of_weights = weights.map(|weight| backend.weight_gradient_scratch_bytes(weight, grain));
        Ok(SampleBytes {
            saved: positions * (self.norm.row_bytes(4) + 4 * 2 * f),
            scratch: 4 * (positions * (3 * d + 4 * f) + 2 * d + d.max(2 * f))
                + of_weights[0].max(of_weights[1]),
        })
    }

    fn kernels(&self) -> Vec<KernelGroup> {
        vec![self.norm.kernels(), KernelGroup::Bias]
    }

    fn forward(
        &self,
        device: &mut Device<'_, Cpu>,
        out: &mut Buffer<f32>,
        pass: BlockPass<'_, Cpu>,
        saved: &mut Saved,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let (rows, d, f) = (pass.shape.sequences()?.rows(), self.width(), self.gated_width());
        let Scratch { mixed, gated, .. } = scratch;
        self.norm.forward(device, &mut saved.normed, self.norm_pass(pass)?)?;
        self.mix(device, mixed, saved.normed.buffer(), pass)?;
        let up = SliceMut::all(&mut saved.up).matrix(rows, 2 * f)?;
        let mixed = Slice::all(&*mixed).matrix(rows, d)?;
        self.up.forward(device, Products::Library, up, mixed, pass.parameters)?;
        gate(gated, &saved.up, rows, f);
        let out = SliceMut::all(out).matrix(rows, d)?;
        let input = Slice::all(pass.input).matrix(rows, d)?;
        let gated = Slice::all(&*gated).matrix(rows, f)?;
        self.down.forward_onto(device, out, input, gated, pass.parameters)
    }

    fn backward(
        &self,
        device: &mut Device<'_, Cpu>,
        grad: &mut ResidualGradient<Cpu>,
        mut lane: SliceMut<'_, Cpu, f32>,
        pass: BlockPass<'_, Cpu>,
        saved: &mut Saved,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let grains = pass.shape.grain_rows()?;
        let (rows, d, f) = (grains.rows(), self.width(), self.gated_width());
        let Scratch { norm, mixed, gated, bias_gradients, .. } = scratch;
        let normed = saved.normed.buffer();
        self.mix(device, mixed, normed, pass)?;
        gate(gated, &saved.up, rows, f);

        let grad_out = grad.rounded(device, rows, d)?;
        let sides = [grad_out, Slice::all(&*gated).matrix(rows, f)?];
        self.down.backward_parameters(device, &mut lane, sides, bias_gradients, grains)?;
        let grad_gated = SliceMut::all(&mut scratch.grad_gated).matrix(rows, f)?;
        let output = Output::Overwrite;
        self.down.backward_input(device, grad_gated, grad_out, pass.parameters, output)?;

        let grad_up = scratch.grad_up.as_mut_slice()[..rows * 2 * f].chunks_exact_mut(2 * f);
        let (up, grad_gated) = (saved.up.as_slice(), scratch.grad_gated.as_slice());
        for (row, grad_up) in grad_up.enumerate() {
            for column in 0..f {
                let [u, g] = [0, f].map(|half| up[row * 2 * f + half + column]);
                let (grad, gate) = (grad_gated[row * f + column], sigmoid(g));
                grad_up[column] = grad * gate;
                grad_up[f + column] = grad * u * gate * (1.0 - gate);
            }
        }
        let grad_up = Slice::all(&scratch.grad_up).matrix(rows, 2 * f)?;
        let sides = [grad_up, Slice::all(&*mixed).matrix(rows, d)?];
        self.up.backward_parameters(device, &mut lane, sides, bias_gradients, grains)?;
        let grad_mixed = SliceMut::all(&mut scratch.grad_mixed).matrix(rows, d)?;
        self.up.backward_input(device, grad_mixed, grad_up, pass.parameters, output)?;

        let (share, has_before) = (self.share(device, pass.parameters)?, has_before(device, pass)?);
        let grad_mixed = scratch.grad_mixed.as_slice();
        let grad_normed = scratch.grad_normed.as_mut_slice();
        let of_share = scratch.share_gradients.as_mut_slice();
        grad_normed[..rows * d].copy_from_slice(&grad_mixed[..rows * d]);
        of_share[..grains.grains() * d].fill(0.0);
        for grain in 0..grains.grains() {
            let of_share = &mut of_share[grain * d..][..d];
            for row in grains.range(grain).filter(|&row| has_before[row]) {
                for column in 0..d {
                    let (at, before) = (row * d + column, (row - 1) * d + column);
                    of_share[column] += grad_mixed[at] * normed.as_slice()[before];
                    grad_normed[before] += grad_mixed[at] * share[column];
                }
            }
        }
        let place = lane.reborrow().sub(self.share.start, d)?;
        let of_share = Slice::new(&scratch.share_gradients, 0, grains.grains() * d)?;
        device.backend.accumulate(device.stream, place, of_share)?;
        let grad_normed = Slice::all(&scratch.grad_normed).matrix(rows, d)?;
        let norm = (&saved.normed, norm);
        self.norm.backward(device, grad, &mut lane, grad_normed, norm, self.norm_pass(pass)?)
    }
}
