//! Lion's update of masters.

use bytemuck::{Pod, Zeroable};

use super::optimizer::{SplitMaster, THREADS, UPDATED};
use super::sizes::{Access, WIDE_BYTES, blocks};
use super::{exactly, exactly_mut};
use crate::backend::{self, LionStep};
use crate::error::Result;
use crate::float_environment::FloatEnvironment;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver, ElementKind};
use crate::gpu::precision::Precision;
use crate::gpu::source::OPTIMIZER;
use crate::gpu::{Gpu, GpuStream};
use crate::master::MasterMut;
use crate::view::{Slice, SliceMut};

/// `LionUpdate` of optimizer.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct LionUpdate {
    exp_avg: Address,
    gradient: Address,
    elements: u64,
    beta1: f32,
    beta2: f32,
    rest1: f32,
    rest2: f32,
    decay_factor: f32,
    learning_rate: f32,
    gradient_scale: f32,
    padding: u32,
}

/// `Lion<float*>` of optimizer.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Lion {
    parameters: Address,
    update: LionUpdate,
}

/// `Lion<SplitMaster>` of optimizer.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct LionMaster {
    parameters: SplitMaster,
    update: LionUpdate,
}

impl<D: Driver, P: Precision> backend::Lion for Gpu<D, P> {
    fn lion(
        &self,
        stream: &mut GpuStream<D>,
        master: MasterMut<'_, Self>,
        exp_avg: SliceMut<'_, Self, f32>,
        gradient: Slice<'_, Self, f32>,
        step: LionStep,
    ) -> Result<()> {
        const KERNEL: &str = "lion";
        let elements = master.elements();
        exactly_mut(KERNEL, "exp_avg", &exp_avg, elements)?;
        exactly(KERNEL, "gradient", &gradient, elements)?;
        // Values that all elements share are computed here.
        let standard = FloatEnvironment::standard();
        let step = standard.given(step);
        let update = standard.given(LionUpdate {
            exp_avg: exp_avg.address(),
            gradient: gradient.address(),
            elements: elements as u64,
            beta1: step.beta1,
            beta2: step.beta2,
            rest1: 1.0 - step.beta1,
            rest2: 1.0 - step.beta2,
            decay_factor: step.decay_factor,
            learning_rate: step.learning_rate,
            gradient_scale: step.gradient_scale,
            padding: 0,
        });
        let beside = Access::of(WIDE_BYTES, &[(update.exp_avg, 0), (update.gradient, 0)]);
        let launch = blocks(KERNEL, elements.div_ceil(UPDATED), THREADS)?;
        if P::ELEMENT == ElementKind::F32 {
            let parameters = master.rounded.address();
            let access = beside.and(Access::of(WIDE_BYTES, &[(parameters, 0)]));
            let name = access.choose("lion_wide", "lion_single");
            let arguments = Lion { parameters, update };
            // SAFETY: all three have the elements of the master, which is whole in this precision.
            return unsafe { self.launch(stream, &OPTIMIZER, name, launch, arguments) };
        }
        let parameters = SplitMaster::of(&master.rounded, &master.remainder);
        // A pack has as many halves as floats.
        let access = beside.and(parameters.access(WIDE_BYTES / 2));
        let name = access.choose("lion_master_wide", "lion_master_single");
        let arguments = LionMaster { parameters, update };
        // SAFETY: all have the elements of the master, whose halves are equally long.
        unsafe { self.launch(stream, &OPTIMIZER, name, launch, arguments) }
    }
}
