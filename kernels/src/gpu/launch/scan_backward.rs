//! The backward selective scan: the walk, which leaves partial sums in scratch memory, and their sums in order.

use bytemuck::{Pod, Zeroable};

use crate::backend::{ScanGradients, ScanSaved, SelectiveScan, SelectiveScanBackward};
use crate::error::Result;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::launch::scan::{
    BACKWARD_BLOCKS_BY_REGISTERS, BLOCK_CHANNELS, CheckedRows, Kernels, Plan, Rows, Saved, Way,
    backward_shared_bytes, count, packed_bytes,
};
use crate::gpu::launch::scan_work::{Cut, Room, WorkItems};
use crate::gpu::launch::{KernelName, exactly, exactly_mut};
use crate::gpu::precision::Precision;
use crate::gpu::source::{
    SCAN_ANY, SCAN_ANY_DOCUMENTS, SCAN_BACKWARD, SCAN_BACKWARD_DOCUMENTS, SCAN_SUMS, Source,
};
use crate::gpu::{Gpu, GpuStream, ScratchSlot};
use crate::shape::ScanShape;

/// `ScanBackwardArguments` of `scan.h`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct BackwardArguments {
    ddelta_raw: Rows,
    dx: Rows,
    dz: Rows,
    regated: Rows,
    dbc: Address,
    parameters: Address,
    carried: Address,
    dout: Rows,
    delta_raw: Rows,
    x: Rows,
    z: Rows,
    bc: Rows,
    checkpoints: Address,
    y: Address,
    packed_bc: Address,
    delta_bias: Address,
    a_log: Address,
    d: Address,
    work: WorkItems,
    positions: u32,
    channels: u32,
    states: u32,
    lanes: u32,
    start_bits: Address,
}

static BACKWARD: Kernels = Kernels {
    source: &SCAN_BACKWARD,
    aligned: "scan_backward",
    unaligned: "scan_backward_unaligned",
    any: (&SCAN_ANY, "scan_backward_any"),
};
static BACKWARD_DOCUMENTS: Kernels = Kernels {
    source: &SCAN_BACKWARD_DOCUMENTS,
    aligned: "scan_backward_documents",
    unaligned: "scan_backward_unaligned_documents",
    any: (&SCAN_ANY_DOCUMENTS, "scan_backward_any_documents"),
};

/// `SumDbcArguments` of `scan_sums.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct SumDbcArguments {
    dbc: Rows,
    partials: Address,
    elements: u64,
    positions: u32,
    states: u32,
    blocks: u32,
    order: u32,
}

/// `Order` of `scan_sums.cu`.
const PLAIN: u32 = 0;
const PACKED: u32 = 1;

/// `SumSamplesArguments` of `scan_sums.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct SumSamplesArguments {
    pub(super) da_log: Address,
    pub(super) dd: Address,
    pub(super) ddelta_bias: Address,
    pub(super) partials: Address,
    pub(super) state_elements: u64,
    pub(super) channels: u32,
    pub(super) samples: u32,
    pub(super) samples_per_grain: u32,
    pub(super) grains: u32,
}

/// Shared memory of a block of `scan_backward_any`, in bytes.
fn backward_any_shared_bytes(warp: u32) -> usize {
    if warp == 32 { 40960 } else { 32768 }
}

impl<D: Driver, P: Precision> SelectiveScanBackward for Gpu<D, P> {
    fn selective_scan_scratch_bytes(&self, shape: ScanShape) -> usize {
        // All but the values that segments of a chain hand to each other.
        let (dbc, parameters) = partial_bytes(shape);
        let is_packed = self.is_scan_of_sixteen(shape.channels(), shape.states());
        dbc + parameters + if is_packed { packed_bytes(shape) } else { 0 }
    }

    fn selective_scan_backward(
        &self,
        stream: &mut GpuStream<D>,
        gradients: ScanGradients<'_, Self>,
        ScanSaved { dout, inputs, saved }: ScanSaved<'_, Self>,
        shape: ScanShape,
    ) -> Result<()> {
        let plan = self.scan_plan("selective_scan_backward", shape)?;
        let (kernel, grains) = (plan.kernel, shape.grains().grains());
        let (channels, states) = (shape.channels(), shape.states());
        let mut rows = CheckedRows::new(plan);
        exactly_mut(kernel, "da_log", &gradients.da_log, grains * channels * states)?;
        exactly_mut(kernel, "dd", &gradients.dd, grains * channels)?;
        exactly_mut(kernel, "ddelta_bias", &gradients.ddelta_bias, grains * channels)?;
        exactly(kernel, "saved", &saved, self.selective_scan_saved_elements(shape))?;
        let dbc = rows.write_dbc(&gradients.dbc)?;
        let ddelta_raw = rows.write("ddelta_raw", &gradients.ddelta_raw)?;
        let dx = rows.write("dx", &gradients.dx)?;
        let dz = rows.write("dz", &gradients.dz)?;
        let regated = match &gradients.regated {
            Some(regated) => rows.write("regated", regated)?,
            None => Rows::NONE,
        };
        let dout = rows.read("dout", &dout)?;
        let start_bits =
            self.document_start_bits(stream, kernel, inputs.starts, shape.sequences())?;
        let inputs = rows.inputs(&inputs)?;

        let Saved { checkpoints, y } = Saved::new(saved.address(), shape);
        let (dbc_bytes, parameter_bytes) = partial_bytes(shape);
        let device = self.driver().properties();
        let shared_bytes = backward_shared_bytes(device.warp, size_of::<P::Activation>());
        let room = Room::new(device, shared_bytes, BACKWARD_BLOCKS_BY_REGISTERS);
        let cut = Cut::backward(shape, room);
        let (packed_bc, work) = self.pack_bc(stream, inputs.bc, &plan, cut)?;
        let partial_dbc = stream.scratch(self.driver(), ScratchSlot::Second, dbc_bytes)?;
        let third_bytes = parameter_bytes + cut.carried_bytes();
        let carried = stream.scratch(self.driver(), ScratchSlot::Third, third_bytes)?;
        let parameters = carried.offset(cut.carried_bytes());
        let arguments = BackwardArguments {
            ddelta_raw,
            dx,
            dz,
            regated,
            dbc: partial_dbc,
            parameters,
            carried,
            dout,
            delta_raw: inputs.delta_raw,
            x: inputs.x,
            z: inputs.z,
            bc: inputs.bc,
            checkpoints,
            y,
            packed_bc,
            delta_bias: inputs.delta_bias,
            a_log: inputs.a_log,
            d: inputs.d,
            work,
            positions: plan.positions,
            channels: plan.channels,
            states: plan.states,
            lanes: plan.lanes,
            start_bits: start_bits.address(),
        };
        let kernels = start_bits.choose(&BACKWARD, &BACKWARD_DOCUMENTS);
        self.walk_back(stream, &plan, kernels.of(&plan, rows.aligned), cut, arguments)?;
        self.sum_dbc(stream, &plan, dbc, partial_dbc)?;
        let sums = SumSamplesArguments {
            da_log: gradients.da_log.address(),
            dd: gradients.dd.address(),
            ddelta_bias: gradients.ddelta_bias.address(),
            partials: parameters,
            state_elements: (channels * states) as u64,
            channels: plan.channels,
            samples: plan.samples,
            samples_per_grain: count(kernel, "samples per grain", shape.samples_per_grain())?,
            grains: count(kernel, "grains", grains)?,
        };
        let launch = plan.launch_items(grains * channels * (states + 2))?;
        // SAFETY: gradients were checked against the shape, and each sample has its partial sums.
        unsafe { self.launch(stream, &SCAN_SUMS, "scan_sum_samples", launch, sums) }
    }
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    fn walk_back(
        &self,
        stream: &mut GpuStream<D>,
        plan: &Plan,
        (source, name): (&'static Source, KernelName),
        cut: Cut,
        arguments: BackwardArguments,
    ) -> Result<()> {
        let warp = self.driver().properties().warp;
        if plan.way == Way::Any {
            let shape = plan.shape;
            let blocks = shape.sequences().samples() * shape.channels().div_ceil(BLOCK_CHANNELS);
            let launch = plan.launch(blocks, backward_any_shared_bytes(warp))?;
            // SAFETY: `CheckedRows` has checked all rows, and scratch memory has the sizes of `partial_bytes`; the
            // start bits are this shape's.
            return unsafe { self.launch(stream, source, name, launch, arguments) };
        }
        let shared_bytes = backward_shared_bytes(warp, size_of::<P::Activation>());
        let launch = plan.launch(cut.item_count(), shared_bytes)?;
        // SAFETY: as above; `Cut` counts the values that segments hand on.
        unsafe { self.launch(stream, source, name, launch, arguments) }
    }

    /// `dbc[b t, 2 n]` from the partial sums of each block of channels.
    fn sum_dbc(
        &self,
        stream: &mut GpuStream<D>,
        plan: &Plan,
        dbc: Rows,
        partials: Address,
    ) -> Result<()> {
        let (sequences, channels, states) =
            (plan.shape.sequences(), plan.shape.channels(), plan.shape.states());
        let elements = sequences.rows() * 2 * states;
        let arguments = SumDbcArguments {
            dbc,
            partials,
            elements: elements as u64,
            positions: plan.positions,
            states: plan.states,
            blocks: count(plan.kernel, "blocks", channels.div_ceil(BLOCK_CHANNELS))?,
            order: if plan.way == Way::Sixteen { PACKED } else { PLAIN },
        };
        let launch = plan.launch_items(elements)?;
        // SAFETY: dbc was checked, and its partial sums are those of `partial_bytes`.
        unsafe { self.launch(stream, &SCAN_SUMS, "scan_sum_dbc", launch, arguments) }
    }
}

/// Bytes of the partial sums of dB and dC, one for 32 channels of a sample, and of the parameters' gradients of each
/// sample.
fn partial_bytes(shape: ScanShape) -> (usize, usize) {
    let (sequences, channels, states) = (shape.sequences(), shape.channels(), shape.states());
    let blocks = channels.div_ceil(BLOCK_CHANNELS);
    let dbc = sequences.rows() * blocks * 2 * states;
    let parameters = sequences.samples() * channels * (states + 2);
    (dbc * size_of::<f32>(), parameters * size_of::<f32>())
}
