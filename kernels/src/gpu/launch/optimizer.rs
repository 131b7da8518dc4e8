//! Updates of parameters: AdamW, and the copies of the masters in activation precision.

use bytemuck::{Pod, Zeroable};

use super::sizes::{Access, WIDE_BYTES, blocks};
use super::{exactly, exactly_mut};
use crate::backend::AdamWStep;
use crate::error::Result;
use crate::float_environment::FloatEnvironment;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::source::OPTIMIZER;
use crate::gpu::{Gpu, GpuStream};
use crate::view::{Slice, SliceMut};

const THREADS: u32 = 256;
/// Elements that a block of `adamw` updates: four a thread.
const UPDATED: usize = 4 * THREADS as usize;
/// Elements that a block of `round` rounds: eight a thread.
const ROUNDED: usize = 8 * THREADS as usize;

/// `AdamW` of optimizer.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct AdamW {
    parameters: Address,
    exp_avg: Address,
    exp_avg_sq: Address,
    gradient: Address,
    elements: u64,
    beta1: f32,
    beta2: f32,
    rest1: f32,
    rest2: f32,
    eps: f32,
    decay_factor: f32,
    step_size: f32,
    root_correction2: f32,
    gradient_scale: f32,
    padding: u32,
}

/// `Round` of optimizer.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Round {
    out: Address,
    from: Address,
    elements: u64,
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// One update of a chunk.
    pub(in crate::gpu) fn launch_adamw(
        &self,
        stream: &mut GpuStream<D>,
        parameters: SliceMut<'_, Self, f32>,
        exp_avg: SliceMut<'_, Self, f32>,
        exp_avg_sq: SliceMut<'_, Self, f32>,
        gradient: Slice<'_, Self, f32>,
        step: AdamWStep,
    ) -> Result<()> {
        const KERNEL: &str = "adamw";
        let elements = parameters.elements;
        exactly_mut(KERNEL, "exp_avg", &exp_avg, elements)?;
        exactly_mut(KERNEL, "exp_avg_sq", &exp_avg_sq, elements)?;
        exactly(KERNEL, "gradient", &gradient, elements)?;
        // What all elements have in common is computed here.
        let _standard = FloatEnvironment::standard();
        let arguments = AdamW {
            parameters: parameters.address(),
            exp_avg: exp_avg.address(),
            exp_avg_sq: exp_avg_sq.address(),
            gradient: gradient.address(),
            elements: elements as u64,
            beta1: step.beta1,
            beta2: step.beta2,
            rest1: 1.0 - step.beta1,
            rest2: 1.0 - step.beta2,
            eps: step.eps,
            decay_factor: step.decay_factor,
            step_size: step.learning_rate / step.bias_correction1,
            root_correction2: step.bias_correction2.sqrt(),
            gradient_scale: step.gradient_scale,
            padding: 0,
        };
        let operands =
            [arguments.parameters, arguments.exp_avg, arguments.exp_avg_sq, arguments.gradient]
                .map(|address| (address, 0));
        let name = Access::of(WIDE_BYTES, &operands).choose("adamw_wide", "adamw_single");
        let launch = blocks(KERNEL, elements.div_ceil(UPDATED), THREADS)?;
        // SAFETY: all four have as many elements.
        unsafe { self.launch(stream, &OPTIMIZER, name, launch, arguments) }
    }

    /// `out = from`, rounded to the activation type.
    pub(in crate::gpu) fn launch_round(
        &self,
        stream: &mut GpuStream<D>,
        out: SliceMut<'_, Self, P::Activation>,
        from: Slice<'_, Self, f32>,
    ) -> Result<()> {
        const KERNEL: &str = "round";
        let elements = out.elements;
        exactly(KERNEL, "from", &from, elements)?;
        let arguments =
            Round { out: out.address(), from: from.address(), elements: elements as u64 };
        let operands = [(arguments.out, 0), (arguments.from, 0)];
        let name = Access::of(WIDE_BYTES, &operands).choose("round_wide", "round_single");
        let launch = blocks(KERNEL, elements.div_ceil(ROUNDED), THREADS)?;
        // SAFETY: both have as many elements.
        unsafe { self.launch(stream, &OPTIMIZER, name, launch, arguments) }
    }
}
