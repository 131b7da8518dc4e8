//! Attention of one new position of each sequence, which enters its cache: a block for each chunk of keys of each head, and then
//! one for each head.

use bytemuck::{Pod, Zeroable};

use super::attention::{Plan, cache_shape};
use super::sizes::{Access, WIDE_BYTES, blocks, sequences32, size32};
use super::{KernelName, exactly, exactly_mut, row_stride, row_stride_mut};
use crate::backend::{AttentionStep, GrowingCache};
use crate::error::{KernelError, Result};
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::source::ATTENTION_STEP;
use crate::gpu::{Gpu, GpuStream, ScratchSlot};
use crate::shape::AttentionShape;
use crate::view::{Matrix, MatrixMut};

/// Keys of a block.
const CHUNK: usize = 128;
const THREADS: u32 = 128;
/// Columns of a lane.
const COLUMNS: usize = 8;

/// `AttentionStep` of attention_step.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Step {
    parts: Address,
    keys: Address,
    values: Address,
    q: Address,
    k: Address,
    v: Address,
    slopes: Address,
    past: Address,
    q_stride: u64,
    k_stride: u64,
    v_stride: u64,
    capacity: u32,
    heads: u32,
    width: u32,
    window: u32,
    chunks: u32,
    scale: f32,
    wide: u32,
    group: u32,
}

/// `AttentionStepSums` of attention_step.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Sums {
    out: Address,
    parts: Address,
    past: Address,
    out_stride: u64,
    capacity: u32,
    heads: u32,
    width: u32,
    window: u32,
    chunks: u32,
    unused: u32,
}

const KERNELS: [KernelName; 4] =
    ["attention_step_32", "attention_step_64", "attention_step_128", "attention_step_256"];

/// The most chunks of a cache of `capacity` positions in which one query attends to keys.
fn chunks(capacity: usize, window: Option<usize>) -> usize {
    let all = capacity.div_ceil(CHUNK);
    // The first key of the window may be the last of a chunk.
    window.map_or(all, |window| all.min(window.saturating_sub(1).div_ceil(CHUNK) + 1))
}

impl<D: Driver, P: Precision> AttentionStep for Gpu<D, P> {
    fn attention_step(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        [q, k, v]: [Matrix<'_, Self, P::Activation>; 3],
        cache: GrowingCache<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        let plan = Plan::new("attention_step", shape)?;
        let (samples, heads) = (shape.sequences().samples(), shape.heads());
        if shape.sequences().positions() != 1 {
            let found = shape.sequences().positions();
            return Err(KernelError::shape(plan.kernel, "new positions", "1", found));
        }
        let cached = cache_shape(plan.kernel, samples, 1, cache.capacity)?;
        let [_, capacity, _] = sequences32(plan.kernel, cached)?;
        let elements = cached.rows() * plan.shared_columns();
        exactly_mut(plan.kernel, "keys", &cache.keys, elements)?;
        exactly_mut(plan.kernel, "values", &cache.values, elements)?;
        exactly(plan.kernel, "past", &cache.past, samples)?;
        if let Some(slopes) = &cache.slopes {
            exactly(plan.kernel, "slopes", slopes, heads)?;
        }
        let stride = |what, matrix: &Matrix<'_, Self, P::Activation>, columns| {
            row_stride(plan.kernel, what, matrix, plan.rows(), columns)
        };
        let q_stride = stride("q", &q, plan.columns())?;
        let k_stride = stride("k", &k, plan.shared_columns())?;
        let v_stride = stride("v", &v, plan.shared_columns())?;
        let out_stride = row_stride_mut(plan.kernel, "out", &out, plan.rows(), plan.columns())?;
        let cache_stride = plan.shared_columns() as u64;
        let (keys, values) = (cache.keys.address(), cache.values.address());
        let rows = [
            (q.address(), q_stride),
            (k.address(), k_stride),
            (v.address(), v_stride),
            (keys, cache_stride),
            (values, cache_stride),
        ];
        let is_wide = plan.access::<P::Activation>(WIDE_BYTES, &rows) == Access::Wide
            && shape.head_width().is_multiple_of(COLUMNS);
        let window = shape.window().map(std::num::NonZeroUsize::get);
        let chunks = chunks(cache.capacity, window);
        let parts = samples * heads * chunks * (shape.head_width() + 2) * size_of::<f32>();
        let parts = stream.scratch(self.driver(), ScratchSlot::First, parts)?;
        let arguments = Step {
            parts,
            keys,
            values,
            q: q.address(),
            k: k.address(),
            v: v.address(),
            slopes: cache.slopes.address(),
            past: cache.past.address(),
            q_stride,
            k_stride,
            v_stride,
            capacity,
            heads: size32(plan.kernel, "heads", heads)?,
            width: size32(plan.kernel, "head width", shape.head_width())?,
            window: window.map_or(u32::MAX, |window| u32::try_from(window).unwrap_or(u32::MAX)),
            chunks: size32(plan.kernel, "chunks of keys", chunks)?,
            scale: shape.scale(),
            wide: is_wide.into(),
            group: size32(plan.kernel, "heads", shape.group())?,
        };
        let name = plan.head_width().choose(KERNELS);
        let launch = blocks(plan.kernel, samples * heads * chunks, THREADS)?.early(samples);
        // SAFETY: all were checked against the shape, and the scratch memory has room for the parts of every block; no position past
        // the capacity is read or written.
        unsafe { self.launch(stream, &ATTENTION_STEP, name, launch, arguments) }?;
        let Step { capacity, heads: of_sample, width, window, chunks, past, .. } = arguments;
        let arguments = Sums {
            out: out.address(),
            parts,
            past,
            out_stride,
            capacity,
            heads: of_sample,
            width,
            window,
            chunks,
            unused: 0,
        };
        let launch = blocks(plan.kernel, samples * heads, THREADS)?.early(samples);
        // SAFETY: as above; the parts are those that were just formed.
        unsafe { self.launch(stream, &ATTENTION_STEP, "attention_step_sums", launch, arguments) }
    }
}
