//! Rotary positions and their gradients.

use bytemuck::{Pod, Zeroable};

use super::sizes::{blocks, sequences32, size32};
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

impl<D: Driver, P: Precision> Rotary for Gpu<D, P> {
    fn rotary_forward(
        &self,
        stream: &mut GpuStream<D>,
        qk: MatrixMut<'_, Self, P::Activation>,
        inputs: RotaryInputs<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        const KERNEL: KernelName = "rotary_forward";
        let columns = shape.width() + shape.key_value_width();
        let row_stride = row_stride_mut(KERNEL, "qk", &qk, shape.sequences().rows(), columns)?;
        let pairs = columns / 2;
        let rows = (qk.address(), row_stride);
        // SAFETY: the rows were checked, and a thread turns a pair of its own.
        unsafe { self.launch_rotary(stream, KERNEL, rows, pairs, inputs, shape) }
    }

    fn rotary_backward(
        &self,
        stream: &mut GpuStream<D>,
        dqkv: MatrixMut<'_, Self, P::Activation>,
        inputs: RotaryInputs<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        const KERNEL: KernelName = "rotary_backward";
        let (rows, columns) = (shape.sequences().rows(), 3 * shape.width());
        let row_stride = row_stride_mut(KERNEL, "dqkv", &dqkv, rows, columns)?;
        let rows = (dqkv.address(), row_stride);
        // SAFETY: the rows were checked, and a thread has the same pair of all heads of a row.
        unsafe { self.launch_rotary(stream, KERNEL, rows, shape.head_width() / 2, inputs, shape) }
    }
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// A thread for each of `pairs` pairs of each row.
    ///
    /// # Safety
    /// The rows must be as many and as wide as `kernel` takes them for `shape`.
    unsafe fn launch_rotary(
        &self,
        stream: &mut GpuStream<D>,
        kernel: KernelName,
        (rows, row_stride): (Address, u64),
        pairs: usize,
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
        let threads = sequences.rows().saturating_mul(pairs);
        let launch = blocks(kernel, threads.div_ceil(THREADS), THREADS as u32)?;
        // SAFETY: the caller's; no entry past the table is read.
        unsafe { self.launch(stream, &ROTARY, kernel, launch, arguments) }
    }
}
