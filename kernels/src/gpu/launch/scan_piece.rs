//! The selective scan of pieces of sequences, for generation.

use bytemuck::{Pod, Zeroable};

use crate::backend::ScanInputs;
use crate::error::{KernelError, Result};
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::launch::scan::{CheckedRows, Rows};
use crate::gpu::launch::{exactly, exactly_mut};
use crate::gpu::precision::Precision;
use crate::gpu::source::SCAN_ANY;
use crate::gpu::{Gpu, GpuStream};
use crate::shape::ScanShape;
use crate::view::{MatrixMut, Slice, SliceMut};

/// Dynamic shared memory of a block of `scan_piece`.
const SHARED_BYTES: usize = 14336;

/// `ScanPieceArguments` of `scan_any.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Arguments {
    out: Rows,
    state: Address,
    lengths: Address,
    delta_raw: Rows,
    x: Rows,
    z: Rows,
    bc: Rows,
    delta_bias: Address,
    a_log: Address,
    d: Address,
    samples: u32,
    positions: u32,
    channels: u32,
    states: u32,
    lanes: u32,
    unused: u32,
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    pub(in crate::gpu) fn launch_selective_scan_piece(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        state: SliceMut<'_, Self, f32>,
        lengths: Option<Slice<'_, Self, u32>>,
        inputs: ScanInputs<'_, Self>,
        shape: ScanShape,
    ) -> Result<()> {
        let plan = self.scan_plan("selective_scan_piece", shape)?;
        if inputs.starts.is_some() {
            return Err(KernelError::shape(plan.kernel, "starts", "none in a piece", "some"));
        }
        let samples = shape.sequences().samples();
        exactly_mut(plan.kernel, "state", &state, samples * shape.channels() * shape.states())?;
        if let Some(lengths) = &lengths {
            exactly(plan.kernel, "lengths", lengths, samples)?;
        }
        let is_step = plan.positions == 1 && lengths.is_none();
        let mut rows = CheckedRows::new(plan);
        let out = rows.write("out", &out)?;
        let inputs = rows.inputs(&inputs)?;
        let arguments = Arguments {
            out,
            state: state.address(),
            lengths: lengths.address(),
            delta_raw: inputs.delta_raw,
            x: inputs.x,
            z: inputs.z,
            bc: inputs.bc,
            delta_bias: inputs.delta_bias,
            a_log: inputs.a_log,
            d: inputs.d,
            samples: plan.samples,
            positions: plan.positions,
            channels: plan.channels,
            states: plan.states,
            lanes: plan.lanes,
            unused: 0,
        };
        let (name, launch) = if is_step {
            let channels = samples * shape.channels();
            ("scan_step", plan.launch(channels.div_ceil(plan.slots()), 0)?)
        } else {
            let blocks = samples * shape.channels().div_ceil(plan.slots());
            ("scan_piece", plan.launch(blocks, SHARED_BYTES)?)
        };
        // SAFETY: `CheckedRows` has checked all rows, and state and lengths have their exact sizes.
        unsafe { self.launch(stream, &SCAN_ANY, name, launch, arguments) }
    }
}
