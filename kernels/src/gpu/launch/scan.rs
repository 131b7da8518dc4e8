//! The selective scan: `scan_forward.cu` and `scan_backward.cu` where channels have sixteen states and come in blocks of 32,
//! `scan_any.cu` for every other shape, and `scan_sums.cu` around them.
//!
//! The choice depends on n, e and the device alone; if rows and columns are not aligned, the former
//! kernels read and write elements one by one, with the same bits. Forward saves the states before
//! every sixteenth position and y before the gate, from which backward computes dz and, again, the
//! forward output.

use bytemuck::{Pod, Zeroable};

use crate::backend::{ScanInputs, SelectiveScan};
use crate::error::Result;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver, Launch};
use crate::gpu::launch::scan_work::{Cut, Room, WorkItems};
use crate::gpu::launch::sizes;
use crate::gpu::launch::{
    KernelName, exactly, exactly_mut, row_alignment, row_stride, row_stride_mut,
};
use crate::gpu::precision::Precision;
use crate::gpu::source::{
    SCAN_ANY, SCAN_ANY_DOCUMENTS, SCAN_FORWARD, SCAN_FORWARD_DOCUMENTS, SCAN_SUMS, Source,
};
use crate::gpu::{Gpu, GpuStream, ScratchSlot};
use crate::shape::ScanShape;
use crate::view::{Matrix, MatrixMut, SliceMut};

/// Positions between saved states.
const CHECKPOINT: usize = 16;
/// Channels that share one partial sum of dB and dC.
pub(super) const BLOCK_CHANNELS: usize = 32;
/// Threads of a block that scans.
pub(super) const SCAN_THREADS: usize = 128;
/// Threads of a block of `scan_sums.cu`.
const SUM_THREADS: usize = 256;
/// Packed B and C are padded to a multiple of these.
const PACKED_POSITIONS: usize = 32;
/// Bytes that wide loads and stores are aligned to.
pub(super) const ALIGNMENT: usize = 16;
/// The most and the fewest lanes of a channel in `scan_any.cu`.
const LANES: [usize; 2] = [4, 32];

/// Rows of activations, as in `scan.h`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct Rows {
    pub(super) first: Address,
    pub(super) stride: u64,
}

impl Rows {
    /// No rows: what a kernel is given for an output that was not asked for.
    pub(super) const NONE: Self = Self { first: Address::NULL, stride: 0 };
}

/// `ScanForwardArguments` of `scan.h`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ForwardArguments {
    out: Rows,
    checkpoints: Address,
    y: Address,
    delta_raw: Rows,
    x: Rows,
    z: Rows,
    bc: Rows,
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

/// `PackArguments` of `scan_sums.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct PackArguments {
    packed: Address,
    words: Address,
    bc: Rows,
    samples: u32,
    positions: u32,
    word_count: u32,
    unused: u32,
}

/// The kernels of a direction.
pub(super) struct Kernels {
    pub(super) source: &'static Source,
    pub(super) aligned: KernelName,
    pub(super) unaligned: KernelName,
    /// The kernel for any states.
    pub(super) any: (&'static Source, KernelName),
}

impl Kernels {
    /// The kernel that `plan` takes, and its source.
    pub(super) fn of(&self, plan: &Plan, aligned: bool) -> (&'static Source, KernelName) {
        match (plan.way, aligned) {
            (Way::Any, _) => self.any,
            (Way::Sixteen, true) => (self.source, self.aligned),
            (Way::Sixteen, false) => (self.source, self.unaligned),
        }
    }
}

static FORWARD: Kernels = Kernels {
    source: &SCAN_FORWARD,
    aligned: "scan_forward",
    unaligned: "scan_forward_unaligned",
    any: (&SCAN_ANY, "scan_forward_any"),
};
static FORWARD_DOCUMENTS: Kernels = Kernels {
    source: &SCAN_FORWARD_DOCUMENTS,
    aligned: "scan_forward_documents",
    unaligned: "scan_forward_unaligned_documents",
    any: (&SCAN_ANY_DOCUMENTS, "scan_forward_any_documents"),
};

/// The kernels that scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// The kernels for sixteen states.
    Sixteen,
    /// The kernels for any number of states.
    Any,
}

/// The sizes of a scan as kernels count them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) kernel: KernelName,
    pub(super) shape: ScanShape,
    pub(super) way: Way,
    pub(super) samples: u32,
    pub(super) positions: u32,
    pub(super) channels: u32,
    pub(super) states: u32,
    /// Lanes of a channel in `scan_any.cu`.
    pub(super) lanes: u32,
}

/// `size` as kernels count it.
pub(super) fn count(kernel: KernelName, what: &'static str, size: usize) -> Result<u32> {
    sizes::size32(kernel, what, size)
}

impl Plan {
    fn rows(&self) -> usize {
        self.shape.sequences().rows()
    }

    /// `blocks` blocks which scan.
    pub(super) fn launch(&self, blocks: usize, shared_bytes: usize) -> Result<Launch> {
        let launch = sizes::blocks(self.kernel, blocks, SCAN_THREADS as u32)?;
        Ok(Launch { shared_bytes, ..launch })
    }

    /// A thread for each of `items`.
    pub(super) fn launch_items(&self, items: usize) -> Result<Launch> {
        sizes::blocks(self.kernel, items.div_ceil(SUM_THREADS), SUM_THREADS as u32)
    }

    /// Channels that a block of `scan_any.cu` has at once.
    pub(super) fn slots(&self) -> usize {
        SCAN_THREADS / self.lanes as usize
    }
}

/// The addresses of the values that forward saves for backward.
pub(super) struct Saved {
    /// `[b, ceil(t / 16), e, n]`
    pub(super) checkpoints: Address,
    /// `y[b t, e]`, activations.
    pub(super) y: Address,
}

fn checkpoint_elements(shape: ScanShape) -> usize {
    let chunks = shape.sequences().positions().div_ceil(CHECKPOINT);
    shape.sequences().samples() * chunks * shape.channels() * shape.states()
}

impl Saved {
    /// Both are aligned, wherever the caller's range begins.
    pub(super) fn new(range: Address, shape: ScanShape) -> Self {
        let aligned = |address: Address| Address(address.0.next_multiple_of(ALIGNMENT as u64));
        let checkpoints = aligned(range);
        let y = aligned(checkpoints.offset(checkpoint_elements(shape) * size_of::<f32>()));
        Self { checkpoints, y }
    }

    fn elements(shape: ScanShape, activation_bytes: usize) -> usize {
        let y_bytes = shape.sequences().rows() * shape.channels() * activation_bytes;
        let padding = 2 * (ALIGNMENT / size_of::<f32>() - 1);
        padding + checkpoint_elements(shape) + y_bytes.div_ceil(size_of::<f32>())
    }
}

/// The inputs of the scan, their shapes checked.
pub(super) struct CheckedInputs {
    pub(super) delta_raw: Rows,
    pub(super) x: Rows,
    pub(super) z: Rows,
    pub(super) bc: Rows,
    pub(super) delta_bias: Address,
    pub(super) a_log: Address,
    pub(super) d: Address,
}

/// Rows whose shapes were checked, and whether all of them let a kernel read and write 16 bytes at once.
pub(super) struct CheckedRows {
    plan: Plan,
    pub(super) aligned: bool,
}

impl CheckedRows {
    pub(super) fn new(plan: Plan) -> Self {
        Self { plan, aligned: true }
    }

    fn add<P: Precision>(&mut self, first: Address, start: usize, stride: u64) -> Rows {
        let bytes = size_of::<P::Activation>();
        self.aligned &= row_alignment(start, stride as usize, bytes, ALIGNMENT) == ALIGNMENT;
        Rows { first, stride }
    }

    /// `matrix[b t, e]`
    pub(super) fn read<D: Driver, P: Precision>(
        &mut self,
        what: &'static str,
        matrix: &Matrix<'_, Gpu<D, P>, P::Activation>,
    ) -> Result<Rows> {
        let plan = &self.plan;
        let stride = row_stride(plan.kernel, what, matrix, plan.rows(), plan.shape.channels())?;
        Ok(self.add::<P>(matrix.address(), matrix.start, stride))
    }

    /// `matrix[b t, e]`
    pub(super) fn write<D: Driver, P: Precision>(
        &mut self,
        what: &'static str,
        matrix: &MatrixMut<'_, Gpu<D, P>, P::Activation>,
    ) -> Result<Rows> {
        let plan = &self.plan;
        let stride = row_stride_mut(plan.kernel, what, matrix, plan.rows(), plan.shape.channels())?;
        Ok(self.add::<P>(matrix.address(), matrix.start, stride))
    }

    /// `matrix[b t, 2 n]`, which may lie anywhere.
    pub(super) fn write_dbc<D: Driver, P: Precision>(
        &self,
        matrix: &MatrixMut<'_, Gpu<D, P>, P::Activation>,
    ) -> Result<Rows> {
        let plan = &self.plan;
        let columns = 2 * plan.shape.states();
        let stride = row_stride_mut(plan.kernel, "dbc", matrix, plan.rows(), columns)?;
        Ok(Rows { first: matrix.address(), stride })
    }

    pub(super) fn inputs<D: Driver, P: Precision>(
        &mut self,
        inputs: &ScanInputs<'_, Gpu<D, P>>,
    ) -> Result<CheckedInputs> {
        let Plan { kernel, shape, .. } = self.plan;
        let (channels, states) = (shape.channels(), shape.states());
        exactly(kernel, "delta_bias", &inputs.delta_bias, channels)?;
        exactly(kernel, "a_log", &inputs.a_log, channels * states)?;
        exactly(kernel, "d", &inputs.d, channels)?;
        let stride = row_stride(kernel, "bc", &inputs.bc, self.plan.rows(), 2 * states)?;
        Ok(CheckedInputs {
            delta_raw: self.read("delta_raw", &inputs.delta_raw)?,
            x: self.read("x", &inputs.x)?,
            z: self.read("z", &inputs.z)?,
            bc: Rows { first: inputs.bc.address(), stride },
            delta_bias: inputs.delta_bias.address(),
            a_log: inputs.a_log.address(),
            d: inputs.d.address(),
        })
    }
}

/// Shared memory of a block of `scan_forward.cu`, and of `scan_piece.cu`, in bytes; `static_assert`ed in `scan_walk.h`.
pub(super) fn forward_shared_bytes(warp: u32, activation_bytes: usize) -> usize {
    if warp == 32 { 39696 + 6144 * activation_bytes } else { 9744 }
}
/// Blocks of either that the registers of a compute unit of AMD's are enough for, as `.ci/kernels` prints it.
const FORWARD_BLOCKS_BY_REGISTERS: usize = 6;
pub(super) const BACKWARD_BLOCKS_BY_REGISTERS: usize = 4;
/// Shared memory of a block of `scan_forward_any`, and of `scan_piece_any`, in bytes.
pub(super) const FORWARD_ANY_SHARED_BYTES: usize = 14336;

/// Shared memory of a block of `scan_backward.cu`, in bytes; `static_assert`ed there.
pub(super) fn backward_shared_bytes(warp: u32, activation_bytes: usize) -> usize {
    if warp == 32 { 48400 + 3072 * activation_bytes } else { 17808 }
}

/// Rows of packed B and C.
fn packed_rows(shape: ScanShape) -> usize {
    let sequences = shape.sequences();
    sequences.samples() * sequences.positions().next_multiple_of(PACKED_POSITIONS)
}

/// Bytes of packed B and C.
pub(super) fn packed_bytes(shape: ScanShape) -> usize {
    packed_rows(shape) * 2 * shape.states() * size_of::<f32>()
}

impl<D: Driver, P: Precision> SelectiveScan for Gpu<D, P> {
    fn selective_scan_saved_elements(&self, shape: ScanShape) -> usize {
        Saved::elements(shape, size_of::<P::Activation>())
    }

    fn selective_scan_forward(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        saved: SliceMut<'_, Self, f32>,
        inputs: ScanInputs<'_, Self>,
        shape: ScanShape,
    ) -> Result<()> {
        let plan = self.scan_plan("selective_scan_forward", shape)?;
        exactly_mut(plan.kernel, "saved", &saved, self.selective_scan_saved_elements(shape))?;
        let mut rows = CheckedRows::new(plan);
        let out = rows.write("out", &out)?;
        let start_bits =
            self.document_start_bits(stream, plan.kernel, inputs.starts, shape.sequences())?;
        let inputs = rows.inputs(&inputs)?;
        let Saved { checkpoints, y } = Saved::new(saved.address(), shape);
        let device = self.driver().properties();
        let shared_bytes = forward_shared_bytes(device.warp, size_of::<P::Activation>());
        let room = Room::new(device, shared_bytes, FORWARD_BLOCKS_BY_REGISTERS);
        let cut = Cut::forward(shape, room);
        let (packed_bc, work) = self.pack_bc(stream, inputs.bc, &plan, cut)?;
        let arguments = ForwardArguments {
            out,
            checkpoints,
            y,
            delta_raw: inputs.delta_raw,
            x: inputs.x,
            z: inputs.z,
            bc: inputs.bc,
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
        let kernels = start_bits.choose(&FORWARD, &FORWARD_DOCUMENTS);
        let (source, name) = kernels.of(&plan, rows.aligned);
        if plan.way == Way::Any {
            let blocks = shape.sequences().samples() * shape.channels().div_ceil(plan.slots());
            let launch = plan.launch(blocks, FORWARD_ANY_SHARED_BYTES)?;
            // SAFETY: `CheckedRows` has checked all rows, and saved has its exact size; the start bits are this shape's.
            return unsafe { self.launch(stream, source, name, launch, arguments) };
        }
        let launch = plan.launch(cut.forward_blocks(room), shared_bytes)?;
        // SAFETY: as above; B and C were packed, and work items counted, for this shape.
        unsafe { self.launch(stream, source, name, launch, arguments) }
    }
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// Whether the kernels for sixteen states scan this many channels and states.
    pub(in crate::gpu) fn is_scan_of_sixteen(&self, channels: usize, states: usize) -> bool {
        let device = self.driver().properties();
        let activation_bytes = size_of::<P::Activation>();
        let most = forward_shared_bytes(device.warp, activation_bytes)
            .max(backward_shared_bytes(device.warp, activation_bytes));
        states == 16
            && channels.is_multiple_of(BLOCK_CHANNELS)
            && most <= device.shared_bytes_per_block
    }

    pub(super) fn scan_plan(&self, kernel: KernelName, shape: ScanShape) -> Result<Plan> {
        let (sequences, channels, states) = (shape.sequences(), shape.channels(), shape.states());
        let [samples, positions, _] = sizes::sequences32(kernel, sequences)?;
        let is_scan_of_sixteen = self.is_scan_of_sixteen(channels, states);
        Ok(Plan {
            kernel,
            shape,
            way: if is_scan_of_sixteen { Way::Sixteen } else { Way::Any },
            samples,
            positions,
            channels: count(kernel, "channels", channels)?,
            states: count(kernel, "states", states)?,
            lanes: states.next_power_of_two().clamp(LANES[0], LANES[1]) as u32,
        })
    }

    /// B and C as the kernels for sixteen states read them, and the counters of `cut`'s work items, in the first scratch
    /// slot.
    pub(super) fn pack_bc(
        &self,
        stream: &mut GpuStream<D>,
        bc: Rows,
        plan: &Plan,
        cut: Cut,
    ) -> Result<(Address, WorkItems)> {
        if plan.way == Way::Any {
            return Ok((Address::NULL, WorkItems::NONE));
        }
        let rows = packed_rows(plan.shape);
        let bytes = packed_bytes(plan.shape);
        let word_count = 1 + cut.chains;
        let word_bytes = word_count * size_of::<u32>();
        let packed = stream.scratch(self.driver(), ScratchSlot::First, bytes + word_bytes)?;
        let words = packed.offset(bytes);
        let Plan { kernel, samples, positions, .. } = *plan;
        let arguments = PackArguments {
            packed,
            words,
            bc,
            samples,
            positions,
            word_count: count(kernel, "chains", word_count)?,
            unused: 0,
        };
        let items = (rows * plan.shape.states() / 2).max(word_count);
        // SAFETY: bc was checked by `CheckedRows`, and the scratch memory holds it packed, and the words.
        unsafe {
            self.launch(stream, &SCAN_SUMS, "scan_pack", plan.launch_items(items)?, arguments)
        }?;
        Ok((packed, cut.work_items(plan.kernel, words)?))
    }
}
