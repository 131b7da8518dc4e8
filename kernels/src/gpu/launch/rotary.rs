//! Rotary positions and their gradients.

use bytemuck::{Pod, Zeroable};

use super::sizes::{Access, WIDE_BYTES, blocks, sequences32, size32, stride_bytes};
use super::{KernelName, exactly, row_stride_mut};
use crate::backend::{Rotary, RotaryInputs};
use crate::error::Result;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::source::ROTARY;
use crate::gpu::{Gpu, GpuStream};
use crate::shape::AttentionShape;
use crate::view::MatrixMut;

const THREADS: usize = 128;
/// Heads that a thread turns: `IN_FLIGHT` of rotary.cu.
const HEADS: usize = 4;

/// `Rotary` of rotary.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Arguments {
    rows: Address,
    table: Address,
    starts: Address,
    past: Address,
    row_stride: u64,
    row_count: u64,
    positions: u32,
    limit: u32,
    half: u32,
    heads: u32,
    shared_heads: u32,
    unused: u32,
}

/// A kernel in one direction, by its accesses.
struct Kernel {
    name: KernelName,
    wide: KernelName,
    single: KernelName,
}

impl<D: Driver, P: Precision> Rotary for Gpu<D, P> {
    fn rotary_forward(
        &self,
        stream: &mut GpuStream<D>,
        qk: MatrixMut<'_, Self, P::Activation>,
        inputs: RotaryInputs<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        let kernel = Kernel {
            name: "rotary_forward",
            wide: "rotary_forward_wide",
            single: "rotary_forward_single",
        };
        let (rows, heads) = (shape.sequences().rows(), shape.heads() + shape.key_value_heads());
        let columns = shape.width() + shape.key_value_width();
        let placed = (qk.address(), row_stride_mut(kernel.name, "qk", &qk, rows, columns)?);
        let threads = rows.saturating_mul(parts::<P>(shape)).saturating_mul(heads.div_ceil(HEADS));
        let blocks = threads.div_ceil(THREADS);
        // SAFETY: the rows were checked, and a thread turns pairs of its own.
        unsafe { self.launch_rotary(stream, kernel, placed, blocks, inputs, shape) }
    }

    fn rotary_backward(
        &self,
        stream: &mut GpuStream<D>,
        dqkv: MatrixMut<'_, Self, P::Activation>,
        inputs: RotaryInputs<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        let kernel = Kernel {
            name: "rotary_backward",
            wide: "rotary_backward_wide",
            single: "rotary_backward_single",
        };
        let (rows, columns) = (shape.sequences().rows(), 3 * shape.width());
        let placed = (dqkv.address(), row_stride_mut(kernel.name, "dqkv", &dqkv, rows, columns)?);
        // Tasks for each part of a row: keys with values, then each HEADS heads of queries.
        let tasks = 1 + shape.heads().div_ceil(HEADS);
        let blocks = rows.saturating_mul(parts::<P>(shape)).div_ceil(THREADS).saturating_mul(tasks);
        // SAFETY: the rows were checked; no two threads have the same elements.
        unsafe { self.launch_rotary(stream, kernel, placed, blocks, inputs, shape) }
    }
}

/// Pairs of a head that a thread has: `PAIRS` of rotary.cu.
fn pairs<P: Precision>() -> usize {
    WIDE_BYTES as usize / size_of::<P::Activation>()
}

/// Parts of a head that are a thread's.
fn parts<P: Precision>(shape: AttentionShape) -> usize {
    (shape.head_width() / 2).div_ceil(pairs::<P>())
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// Launches `grid` blocks of a kernel.
    ///
    /// # Safety
    /// The rows must be as many and as wide as `kernel` takes them for `shape`, and `grid` the blocks that it needs for them.
    unsafe fn launch_rotary(
        &self,
        stream: &mut GpuStream<D>,
        Kernel { name: kernel, wide, single }: Kernel,
        (rows, row_stride): (Address, u64),
        grid: usize,
        inputs: RotaryInputs<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        let sequences = shape.sequences();
        shape.check_rotary(kernel, inputs.table.elements)?;
        if let Some(starts) = &inputs.starts {
            exactly(kernel, "starts", starts, sequences.rows())?;
        }
        if let Some(past) = &inputs.past {
            exactly(kernel, "past", past, sequences.samples())?;
        }
        let [_, positions, row_count] = sequences32(kernel, sequences)?;
        let limit = inputs.table.elements / shape.head_width();
        let arguments = Arguments {
            rows,
            table: inputs.table.address(),
            starts: inputs.starts.address(),
            past: inputs.past.address(),
            row_stride,
            row_count: u64::from(row_count),
            positions,
            limit: size32(kernel, "positions of the table", limit)?,
            half: size32(kernel, "head width", shape.head_width() / 2)?,
            heads: size32(kernel, "heads", shape.heads())?,
            shared_heads: size32(kernel, "heads", shape.key_value_heads())?,
            unused: 0,
        };
        let row_bytes = stride_bytes::<P::Activation>(row_stride);
        let access = match (shape.head_width() / 2).is_multiple_of(pairs::<P>()) {
            true => Access::of(WIDE_BYTES, &[(rows, row_bytes), (arguments.table, 0)]),
            false => Access::Single,
        };
        let launch = blocks(kernel, grid, THREADS as u32)?;
        // SAFETY: the caller's; no entry past the table is read.
        unsafe { self.launch(stream, &ROTARY, access.choose(wide, single), launch, arguments) }
    }
}
