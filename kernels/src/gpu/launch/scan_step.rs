//! One position of the selective scan, for generation.

use bytemuck::{Pod, Zeroable};

use crate::backend::ScanInputs;
use crate::error::{KernelError, Result};
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::launch::exactly_mut;
use crate::gpu::launch::scan::{CheckedRows, Rows};
use crate::gpu::precision::Precision;
use crate::gpu::source::SCAN_ANY;
use crate::gpu::{Gpu, GpuStream};
use crate::shape::ScanShape;
use crate::view::{MatrixMut, SliceMut};

/// `StepArguments` of `scan_any.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct StepArguments {
    out: Rows,
    state: Address,
    delta_raw: Rows,
    x: Rows,
    z: Rows,
    bc: Rows,
    delta_bias: Address,
    a_log: Address,
    d: Address,
    samples: u32,
    channels: u32,
    states: u32,
    lanes: u32,
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    pub(in crate::gpu) fn launch_selective_scan_step(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        state: SliceMut<'_, Self, f32>,
        inputs: ScanInputs<'_, Self>,
        shape: ScanShape,
    ) -> Result<()> {
        let plan = self.scan_plan("selective_scan_step", shape)?;
        if plan.positions != 1 {
            return Err(KernelError::shape(plan.kernel, "positions", 1, plan.positions));
        }
        if inputs.starts.is_some() {
            let expected = "none for a single position";
            return Err(KernelError::shape(plan.kernel, "starts", expected, "some"));
        }
        let all_channels = shape.sequences().samples() * shape.channels();
        exactly_mut(plan.kernel, "state", &state, all_channels * shape.states())?;
        let mut rows = CheckedRows::new(plan);
        let out = rows.write("out", &out)?;
        let inputs = rows.inputs(&inputs)?;
        let arguments = StepArguments {
            out,
            state: state.address(),
            delta_raw: inputs.delta_raw,
            x: inputs.x,
            z: inputs.z,
            bc: inputs.bc,
            delta_bias: inputs.delta_bias,
            a_log: inputs.a_log,
            d: inputs.d,
            samples: plan.samples,
            channels: plan.channels,
            states: plan.states,
            lanes: plan.lanes,
        };
        let launch = plan.launch(all_channels.div_ceil(plan.slots()), 0)?;
        // SAFETY: `CheckedRows` has checked all rows, and the state has its exact size.
        unsafe { self.launch(stream, &SCAN_ANY, "scan_step", launch, arguments) }
    }
}
