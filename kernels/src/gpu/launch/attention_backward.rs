//! The gradients of attention: the deltas of all rows, then a walk for those of queries, and one or two for those of keys and
//! values.

use bytemuck::{Pod, Zeroable};

use super::attention::{BLOCK_ROWS, HeadWidth, Inputs, Plan, WARPS};
use super::attention_backward_groups as groups;
use super::sizes::{Access, WIDE_BYTES, blocks, size32};
use super::{KernelName, exactly, row_stride, row_stride_mut};
use crate::backend::{AttentionBackward, AttentionSaved};
use crate::error::Result;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::{Gpu, GpuStream, ScratchSlot};
use crate::shape::AttentionShape;
use crate::view::MatrixMut;

/// `AttentionBackward` of attention_backward.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Backward {
    dq: Address,
    dk: Address,
    dv: Address,
    dout: Address,
    sums: Address,
    deltas: Address,
    inputs: Inputs,
    gradient_stride: u64,
    dout_stride: u64,
    padded: u32,
    wide_gradients: u32,
}

/// `AttentionDeltas` of attention_backward.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Deltas {
    sums: Address,
    deltas: Address,
    dout: Address,
    out: Address,
    log_sum_exp: Address,
    dout_stride: u64,
    out_stride: u64,
    positions: u32,
    padded: u32,
    heads: u32,
    width: u32,
}

const OF_QUERIES: [KernelName; 4] = [
    "attention_backward_q_32",
    "attention_backward_q_64",
    "attention_backward_q_128",
    "attention_backward_q_256",
];

/// The kernels that a head width takes: those of the widest heads have no room for both gradients of a key.
fn kernels(head_width: HeadWidth) -> &'static [KernelName] {
    match head_width {
        HeadWidth::Of32 => &["attention_backward_kv_32"],
        HeadWidth::Of64 => &["attention_backward_kv_64"],
        HeadWidth::Of128 => &["attention_backward_kv_128"],
        HeadWidth::Of256 => &["attention_backward_k_256", "attention_backward_v_256"],
    }
}

/// The shared memory of a block: two tiles of the rows that it walks and their sums and deltas, twice where copies overlap
/// with arithmetic, and its own rows of two matrices where they take at most 16 KiB each; wide warps hold them in registers.
fn shared_bytes(head_width: HeadWidth, element_bytes: usize, warp: u32) -> usize {
    let row = head_width.columns() * element_bytes;
    let walked_rows = if row <= 256 { 32 } else { 16 };
    let stages = if warp == 32 { 2 } else { 1 };
    let own_rows = if warp == 32 && row <= 256 { BLOCK_ROWS } else { 0 };
    stages * 2 * walked_rows * (row + size_of::<f32>()) + 2 * own_rows * row
}

/// Bytes of the sums of rows, and of their deltas; rows are padded to whole blocks, so that no walk asks where they end.
fn sums_bytes(shape: AttentionShape) -> usize {
    let sequences = shape.sequences();
    let padded = sequences.positions().next_multiple_of(BLOCK_ROWS);
    sequences.samples() * shape.heads() * padded * size_of::<f32>()
}

impl<D: Driver, P: Precision> AttentionBackward for Gpu<D, P> {
    fn attention_scratch_bytes(&self, shape: AttentionShape) -> usize {
        let head_width = HeadWidth::of(shape.head_width());
        match self.takes_groups(head_width) {
            true => groups::scratch_parts(head_width, shape).iter().sum(),
            false => 2 * sums_bytes(shape),
        }
    }

    fn attention_backward(
        &self,
        stream: &mut GpuStream<D>,
        dqkv: MatrixMut<'_, Self, P::Activation>,
        AttentionSaved { dout, inputs, out, log_sum_exp }: AttentionSaved<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        let plan = Plan::new("attention_backward", shape)?;
        let (rows, columns) = (plan.rows(), plan.columns());
        exactly(plan.kernel, "log_sum_exp", &log_sum_exp, rows * shape.heads())?;
        let gradient_stride = row_stride_mut(plan.kernel, "dqkv", &dqkv, rows, 3 * columns)?;
        let dout_stride = row_stride(plan.kernel, "dout", &dout, rows, columns)?;
        let out_stride = row_stride(plan.kernel, "out", &out, rows, columns)?;
        let has_starts = inputs.starts.is_some();
        let mut inputs = plan.training_inputs(&inputs)?;
        let third = |i: usize| dqkv.address().offset(i * columns * size_of::<P::Activation>());
        if self.takes_groups(plan.head_width()) {
            let rows = groups::BackwardRows {
                gradients: [third(0), third(1), third(2)],
                gradient_stride,
                dout: dout.address(),
                dout_stride,
                out: out.address(),
                out_stride,
                log_sum_exp: log_sum_exp.address(),
            };
            // SAFETY: all of them were checked against the shape.
            return unsafe {
                self.launch_attention_backward_groups(stream, &plan, &rows, inputs, has_starts)
            };
        }
        let dout_access =
            plan.access::<P::Activation>(WIDE_BYTES, &[(dout.address(), dout_stride)]);
        if dout_access == Access::Single {
            inputs.wide = 0;
        }

        let padded = plan.tiles() * BLOCK_ROWS;
        let heads_of_all = shape.sequences().samples() * shape.heads();
        let sums_bytes = sums_bytes(shape);
        let sums = stream.scratch(&self.driver, ScratchSlot::First, 2 * sums_bytes)?;
        let deltas = sums.offset(sums_bytes);
        let warp = self.driver.properties().warp;
        let arguments = Deltas {
            sums,
            deltas,
            dout: dout.address(),
            out: out.address(),
            log_sum_exp: log_sum_exp.address(),
            dout_stride,
            out_stride,
            positions: plan.positions,
            padded: size32(plan.kernel, "padded positions", padded)?,
            heads: size32(plan.kernel, "heads", shape.heads())?,
            width: size32(plan.kernel, "head width", shape.head_width())?,
        };
        let source = plan.head_width().backward();
        let launch = blocks(plan.kernel, heads_of_all * padded / WARPS as usize, WARPS * warp)?;
        // SAFETY: all was checked against the shape; there is a sum and a delta for every head of every padded row.
        unsafe { self.launch(stream, source, "attention_deltas", launch, arguments) }?;

        let access = plan.access::<P::Activation>(2, &[(dqkv.address(), gradient_stride)]);
        let arguments = Backward {
            dq: third(0),
            dk: third(1),
            dv: third(2),
            dout: dout.address(),
            sums,
            deltas,
            inputs,
            gradient_stride,
            dout_stride,
            padded: arguments.padded,
            wide_gradients: u32::from(access == Access::Wide),
        };
        let head_width = plan.head_width();
        let shared_bytes = shared_bytes(head_width, size_of::<P::Activation>(), warp);
        let launch = plan.launch(warp, shared_bytes)?;
        for &name in [head_width.choose(OF_QUERIES)].iter().chain(kernels(head_width)) {
            // SAFETY: as above; `dqkv` was checked too.
            unsafe { self.launch(stream, source, name, launch, arguments) }?;
        }
        Ok(())
    }
}
