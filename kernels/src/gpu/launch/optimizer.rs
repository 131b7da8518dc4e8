//! Updates of parameters: AdamW, and masters rounded to activation precision, split and joined.

use bytemuck::{Pod, Zeroable};

use super::sizes::{Access, WIDE_BYTES, blocks};
use super::{KernelName, exactly, exactly_mut};
use crate::backend::{self, AdamWStep, Masters};
use crate::error::Result;
use crate::float_environment::FloatEnvironment;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver, ElementKind};
use crate::gpu::precision::Precision;
use crate::gpu::source::OPTIMIZER;
use crate::gpu::{Gpu, GpuStream};
use crate::master::{Master, MasterMut, Run, check_runs};
use crate::view::{Slice, SliceMut};

pub(super) const THREADS: u32 = 256;
/// Elements that a block updates: four a thread.
pub(super) const UPDATED: usize = 4 * THREADS as usize;
/// Elements that a block converts: eight a thread.
const CONVERTED: usize = 8 * THREADS as usize;
/// `RUNS` of optimizer.cu.
const RUNS: usize = 64;

/// `Update` of optimizer.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Update {
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

/// `AdamW<float*>` of optimizer.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct AdamW {
    parameters: Address,
    update: Update,
}

/// `SplitMaster` of optimizer.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct SplitMaster {
    rounded: Address,
    remainder: Address,
}

/// `AdamW<SplitMaster>` of optimizer.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct AdamWMaster {
    parameters: SplitMaster,
    update: Update,
}

/// `Round` of optimizer.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Round {
    out: Address,
    from: Address,
    elements: u64,
}

/// `Split` of optimizer.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Split {
    out: SplitMaster,
    from: Address,
    elements: u64,
}

/// `Join` of optimizer.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Join {
    out: Address,
    from: SplitMaster,
    count: u64,
    runs: [JoinedRun; RUNS],
}

/// `JoinedRun` of optimizer.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct JoinedRun {
    from: u64,
    to: u64,
    elements: u64,
    end_block: u64,
}

impl Update {
    /// The arguments of an update of `elements` parameters, except the parameters themselves; checks the sizes.
    fn new<D: Driver, P: Precision>(
        kernel: KernelName,
        elements: usize,
        [exp_avg, exp_avg_sq]: [SliceMut<'_, Gpu<D, P>, f32>; 2],
        gradient: Slice<'_, Gpu<D, P>, f32>,
        step: AdamWStep,
    ) -> Result<Self> {
        exactly_mut(kernel, "exp_avg", &exp_avg, elements)?;
        exactly_mut(kernel, "exp_avg_sq", &exp_avg_sq, elements)?;
        exactly(kernel, "gradient", &gradient, elements)?;
        // Values that all elements share are computed here.
        let standard = FloatEnvironment::standard();
        let step = standard.given(step);
        Ok(standard.given(Self {
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
        }))
    }

    /// Which loads the operands beside the parameters allow.
    fn access(&self) -> Access {
        let operands = [self.exp_avg, self.exp_avg_sq, self.gradient].map(|address| (address, 0));
        Access::of(WIDE_BYTES, &operands)
    }
}

impl SplitMaster {
    pub(super) fn of(rounded: &impl Place, remainder: &impl Place) -> Self {
        Self { rounded: rounded.address(), remainder: remainder.address() }
    }

    /// The masters from the one at `start` on.
    fn after(self, start: usize) -> Self {
        let [rounded, remainder] =
            [self.rounded, self.remainder].map(|half| half.offset(start * size_of::<u16>()));
        Self { rounded, remainder }
    }

    /// Which loads of `bytes` bytes both halves allow.
    pub(super) fn access(self, bytes: u64) -> Access {
        Access::of(bytes, &[(self.rounded, 0), (self.remainder, 0)])
    }
}

impl<D: Driver, P: Precision> backend::AdamW for Gpu<D, P> {
    fn adamw(
        &self,
        stream: &mut GpuStream<D>,
        parameters: SliceMut<'_, Self, f32>,
        moments: [SliceMut<'_, Self, f32>; 2],
        gradient: Slice<'_, Self, f32>,
        step: AdamWStep,
    ) -> Result<()> {
        const KERNEL: &str = "adamw";
        let update = Update::new(KERNEL, parameters.elements, moments, gradient, step)?;
        // SAFETY: the update has the elements of the parameters.
        unsafe { self.update_whole(stream, KERNEL, parameters.address(), update) }
    }

    fn adamw_master(
        &self,
        stream: &mut GpuStream<D>,
        master: MasterMut<'_, Self>,
        moments: [SliceMut<'_, Self, f32>; 2],
        gradient: Slice<'_, Self, f32>,
        step: AdamWStep,
    ) -> Result<()> {
        const KERNEL: &str = "adamw_master";
        let elements = master.elements();
        let update = Update::new(KERNEL, elements, moments, gradient, step)?;
        if P::ELEMENT == ElementKind::F32 {
            // SAFETY: the update has the elements of the master, which is whole in this precision.
            return unsafe { self.update_whole(stream, KERNEL, master.rounded.address(), update) };
        }
        let parameters = SplitMaster::of(&master.rounded, &master.remainder);
        // A pack has as many halves as floats.
        let access = update.access().and(parameters.access(WIDE_BYTES / 2));
        let name = access.choose("adamw_master_wide", "adamw_master_single");
        let launch = blocks(KERNEL, elements.div_ceil(UPDATED), THREADS)?;
        let arguments = AdamWMaster { parameters, update };
        // SAFETY: the update has the elements of the master, whose halves are equally long.
        unsafe { self.launch(stream, &OPTIMIZER, name, launch, arguments) }
    }
}

impl<D: Driver, P: Precision> Masters for Gpu<D, P> {
    fn split_master(
        &self,
        stream: &mut GpuStream<D>,
        out: MasterMut<'_, Self>,
        from: Slice<'_, Self, f32>,
    ) -> Result<()> {
        const KERNEL: &str = "split_master";
        let elements = out.elements();
        exactly(KERNEL, "from", &from, elements)?;
        let from = from.address();
        if P::ELEMENT == ElementKind::F32 {
            // SAFETY: both have as many elements; rounding to fp32 copies.
            return unsafe { self.round(stream, KERNEL, out.rounded.address(), from, elements) };
        }
        let out = SplitMaster::of(&out.rounded, &out.remainder);
        let access = Access::of(WIDE_BYTES, &[(from, 0)]).and(out.access(WIDE_BYTES));
        let name = access.choose("split_master_wide", "split_master_single");
        let launch = blocks(KERNEL, elements.div_ceil(CONVERTED), THREADS)?;
        let arguments = Split { out, from, elements: elements as u64 };
        // SAFETY: all three have as many elements.
        unsafe { self.launch(stream, &OPTIMIZER, name, launch, arguments) }
    }

    fn join_master(
        &self,
        stream: &mut GpuStream<D>,
        out: SliceMut<'_, Self, f32>,
        from: Master<'_, Self>,
        runs: &[Run],
    ) -> Result<()> {
        const KERNEL: &str = "join_master";
        check_runs(runs, from.elements(), out.elements)?;
        let out = out.address();
        if P::ELEMENT == ElementKind::F32 {
            for Run { from: run, to } in runs.iter().filter(|run| !run.from.is_empty()) {
                let out = out.offset(to * size_of::<f32>());
                let from = from.rounded.address().offset(run.start * size_of::<f32>());
                // SAFETY: the run lies inside both, of fp32; rounding to fp32 copies.
                unsafe { self.round(stream, KERNEL, out, from, run.len()) }?;
            }
            return Ok(());
        }
        let from = SplitMaster::of(&from.rounded, &from.remainder);
        let runs: Vec<&Run> = runs.iter().filter(|run| !run.from.is_empty()).collect();
        for runs in runs.chunks(RUNS) {
            let access = runs.iter().fold(Access::Wide, |access, run| {
                let out = out.offset(run.to * size_of::<f32>());
                let from = from.after(run.from.start);
                access.and(Access::of(WIDE_BYTES, &[(out, 0)])).and(from.access(WIDE_BYTES))
            });
            let mut arguments =
                Join { out, from, count: runs.len() as u64, runs: [JoinedRun::zeroed(); RUNS] };
            let mut end_block = 0;
            for (Run { from, to }, place) in runs.iter().zip(&mut arguments.runs) {
                end_block += from.len().div_ceil(CONVERTED);
                *place = JoinedRun {
                    from: from.start as u64,
                    to: *to as u64,
                    elements: from.len() as u64,
                    end_block: end_block as u64,
                };
            }
            let name = access.choose("join_master_wide", "join_master_single");
            let launch = blocks(KERNEL, end_block, THREADS)?;
            // SAFETY: the runs lie inside all three.
            unsafe { self.launch(stream, &OPTIMIZER, name, launch, arguments) }?;
        }
        Ok(())
    }
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// One update of fp32 parameters, for `kernel`.
    ///
    /// # Safety
    /// `parameters` names the elements that `update` says, which nothing else has borrowed.
    unsafe fn update_whole(
        &self,
        stream: &mut GpuStream<D>,
        kernel: KernelName,
        parameters: Address,
        update: Update,
    ) -> Result<()> {
        let access = update.access().and(Access::of(WIDE_BYTES, &[(parameters, 0)]));
        let name = access.choose("adamw_wide", "adamw_single");
        let launch = blocks(kernel, (update.elements as usize).div_ceil(UPDATED), THREADS)?;
        // SAFETY: the caller guarantees the elements of `parameters`, and `Update::new` has checked those of the other buffers.
        unsafe { self.launch(stream, &OPTIMIZER, name, launch, AdamW { parameters, update }) }
    }

    /// `out = from`, rounded to the activation type.
    pub(in crate::gpu) fn launch_round(
        &self,
        stream: &mut GpuStream<D>,
        out: SliceMut<'_, Self, P::Activation>,
        from: Slice<'_, Self, f32>,
    ) -> Result<()> {
        const KERNEL: &str = "round";
        exactly(KERNEL, "from", &from, out.elements)?;
        // SAFETY: both have as many elements, of the types that are rounded to and from.
        unsafe { self.round(stream, KERNEL, out.address(), from.address(), out.elements) }
    }

    /// `out = from`, rounded to the activation type, for `kernel`.
    ///
    /// # Safety
    /// `out` names `elements` elements of the activation type, which nothing else has borrowed, and `from` as many of fp32.
    pub(in crate::gpu) unsafe fn round(
        &self,
        stream: &mut GpuStream<D>,
        kernel: KernelName,
        out: Address,
        from: Address,
        elements: usize,
    ) -> Result<()> {
        let access = Access::of(WIDE_BYTES, &[(out, 0), (from, 0)]);
        let name = access.choose("round_wide", "round_single");
        let launch = blocks(kernel, elements.div_ceil(CONVERTED), THREADS)?;
        let arguments = Round { out, from, elements: elements as u64 };
        // SAFETY: the caller guarantees the validity of both.
        unsafe { self.launch(stream, &OPTIMIZER, name, launch, arguments) }
    }
}
