//! Attention, for training and from a cache of keys and values.

use bytemuck::{Pod, Zeroable};

use super::attention_groups as groups;
use super::sizes::{Access, WIDE_BYTES, blocks, sequences32, size32, stride_bytes};
use super::{KernelName, exactly, exactly_mut, row_stride, row_stride_mut};
use crate::backend::{Attention, AttentionInputs, CachedAttention, KeyValueCache};
use crate::error::{KernelError, Result};
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver, ElementKind, Launch};
use crate::gpu::precision::Precision;
use crate::gpu::source::{
    ATTENTION_BACKWARD, ATTENTION_CACHE, ATTENTION_FORWARD, ATTENTION_FORWARD_SLOPES, Source,
};
use crate::gpu::{Gpu, GpuStream};
use crate::shape::{AttentionShape, SequenceShape};
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

/// Warps of a block; each has a tile of rows.
pub(super) const WARPS: u32 = 4;
/// Rows of a block.
pub(super) const BLOCK_ROWS: usize = 64;
const APPEND_THREADS: u32 = 128;

/// `AttentionInputs` of attention.h.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct Inputs {
    pub(super) q: Address,
    pub(super) k: Address,
    pub(super) v: Address,
    pub(super) slopes: Address,
    starts: Address,
    past: Address,
    pub(super) q_stride: u64,
    pub(super) k_stride: u64,
    pub(super) v_stride: u64,
    pub(super) k_sample: u64,
    pub(super) v_sample: u64,
    pub(super) positions: u32,
    pub(super) keys: u32,
    pub(super) heads: u32,
    pub(super) width: u32,
    window: u32,
    pub(super) tiles: u32,
    pub(super) scale: f32,
    pub(super) wide: u32,
    pub(super) group: u32,
    unused: u32,
}

/// `AttentionForward` of attention_forward.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct Forward {
    out: Address,
    log_sum_exp: Address,
    pub(super) inputs: Inputs,
    out_stride: u64,
    wide_out: u64,
}

/// `AppendToCache` of attention_cache.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Append {
    cache: Address,
    rows: Address,
    past: Address,
    row_stride: u64,
    positions: u32,
    capacity: u32,
    width: u64,
}

/// The widths that heads are padded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gpu) enum HeadWidth {
    Of32,
    Of64,
    Of128,
    Of256,
}

impl HeadWidth {
    /// The narrowest that holds `width`, which is at most 256.
    pub(in crate::gpu) fn of(width: usize) -> Self {
        match width {
            ..=32 => Self::Of32,
            33..=64 => Self::Of64,
            65..=128 => Self::Of128,
            _ => Self::Of256,
        }
    }

    /// The kernels of the forward pass, and those from a cache; `has_slopes` where groups of warps multiply together for heads with
    /// slopes.
    pub(in crate::gpu) fn forward(self, has_slopes: bool) -> &'static Source {
        match self {
            Self::Of64 if has_slopes => &ATTENTION_FORWARD_SLOPES[0],
            Self::Of128 if has_slopes => &ATTENTION_FORWARD_SLOPES[1],
            _ => &ATTENTION_FORWARD[self as usize],
        }
    }

    /// The kernels of the gradients.
    pub(in crate::gpu) fn backward(self) -> &'static Source {
        &ATTENTION_BACKWARD[self as usize]
    }

    /// One of a kernel's variants, by rising width.
    pub(super) fn choose(self, variants: [KernelName; 4]) -> KernelName {
        variants[self as usize]
    }

    /// Whether there are kernels of groups for it.
    fn is_for_groups(self) -> bool {
        matches!(self, Self::Of64 | Self::Of128)
    }

    pub(super) fn columns(self) -> usize {
        32 << self as usize
    }

    /// The shared memory of a block: tiles of keys and of values of 64 rows, or as many as 16 KiB have room for, and the
    /// block's queries where these take no more either; wide warps hold them in registers.
    fn shared_bytes(self, element_bytes: usize, warp: u32) -> usize {
        let rows = BLOCK_ROWS * self.columns() * element_bytes;
        2 * rows.min(16 << 10) + if warp == 32 && rows <= 16 << 10 { rows } else { 0 }
    }
}

/// A launch of attention before it is known where its keys come from: what queries, keys and values have in common.
pub(super) struct Plan {
    pub(super) kernel: KernelName,
    pub(super) shape: AttentionShape,
    pub(super) positions: u32,
}

/// The rows of keys or of values.
#[derive(Clone, Copy)]
struct Side {
    address: Address,
    row_stride: u64,
    /// Elements between samples.
    sample_stride: u64,
}

impl Plan {
    pub(super) fn new(kernel: KernelName, shape: AttentionShape) -> Result<Self> {
        let [_, positions, _] = sequences32(kernel, shape.sequences())?;
        Ok(Self { kernel, shape, positions })
    }

    pub(super) fn rows(&self) -> usize {
        self.shape.sequences().rows()
    }

    pub(super) fn columns(&self) -> usize {
        self.shape.width()
    }

    /// Columns of keys, and of values.
    pub(super) fn shared_columns(&self) -> usize {
        self.shape.key_value_width()
    }

    pub(super) fn head_width(&self) -> HeadWidth {
        HeadWidth::of(self.shape.head_width())
    }

    /// Blocks of rows in a sample.
    pub(super) fn tiles(&self) -> usize {
        self.shape.sequences().positions().div_ceil(BLOCK_ROWS)
    }

    /// A block for every head of every block of rows.
    pub(super) fn launch(&self, warp: u32, shared_bytes: usize) -> Result<Launch> {
        let all = self.tiles() * self.shape.sequences().samples() * self.shape.heads();
        Ok(Launch { shared_bytes, ..blocks(self.kernel, all, WARPS * warp)? })
    }

    /// Whether heads of rows that are given by their first element and the elements between them are aligned to
    /// `elements` elements of type `A`, at most 16 bytes.
    pub(super) fn access<A>(&self, elements: u64, rows: &[(Address, u64)]) -> Access {
        let bytes = stride_bytes::<A>(elements).min(WIDE_BYTES);
        let mut operands: Vec<_> =
            rows.iter().map(|&(address, stride)| (address, stride_bytes::<A>(stride))).collect();
        operands.push((Address::NULL, stride_bytes::<A>(self.shape.head_width() as u64)));
        Access::of(bytes, &operands)
    }

    fn side<D: Driver, P: Precision>(
        &self,
        what: &'static str,
        matrix: &Matrix<'_, Gpu<D, P>, P::Activation>,
        columns: usize,
    ) -> Result<Side> {
        let row_stride = row_stride(self.kernel, what, matrix, self.rows(), columns)?;
        let sample_stride = row_stride * u64::from(self.positions);
        Ok(Side { address: matrix.address(), row_stride, sample_stride })
    }

    fn inputs<A>(&self, [q, k, v]: [Side; 3], keys: u32, slopes: Address) -> Result<Inputs> {
        let sides = [q, k, v].map(|side| (side.address, side.row_stride));
        let access = self.access::<A>(WIDE_BYTES, &sides);
        let window = self
            .shape
            .window()
            .map_or(u32::MAX, |window| u32::try_from(window.get()).unwrap_or(u32::MAX));
        Ok(Inputs {
            q: q.address,
            k: k.address,
            v: v.address,
            slopes,
            starts: Address::NULL,
            past: Address::NULL,
            q_stride: q.row_stride,
            k_stride: k.row_stride,
            v_stride: v.row_stride,
            k_sample: k.sample_stride,
            v_sample: v.sample_stride,
            positions: self.positions,
            keys,
            heads: size32(self.kernel, "heads", self.shape.heads())?,
            width: size32(self.kernel, "head width", self.shape.head_width())?,
            window,
            tiles: size32(self.kernel, "tiles of rows", self.tiles())?,
            scale: self.shape.scale(),
            wide: u32::from(access == Access::Wide),
            group: size32(self.kernel, "heads", self.shape.group())?,
            unused: 0,
        })
    }

    /// The inputs of forward and backward, their sizes checked.
    pub(super) fn training_inputs<D: Driver, P: Precision>(
        &self,
        inputs: &AttentionInputs<'_, Gpu<D, P>>,
    ) -> Result<Inputs> {
        if let Some(slopes) = &inputs.slopes {
            exactly(self.kernel, "slopes", slopes, self.shape.heads())?;
        }
        if let Some(starts) = &inputs.starts {
            exactly(self.kernel, "starts", starts, self.rows())?;
        }
        let q = self.side("q", &inputs.q, self.columns())?;
        let k = self.side("k", &inputs.k, self.shared_columns())?;
        let v = self.side("v", &inputs.v, self.shared_columns())?;
        let checked =
            self.inputs::<P::Activation>([q, k, v], self.positions, inputs.slopes.address())?;
        Ok(Inputs { starts: inputs.starts.address(), ..checked })
    }
}

/// A cache of `capacity` positions a sample, into which `positions` new ones must fit.
pub(super) fn cache_shape(
    kernel: KernelName,
    samples: usize,
    positions: usize,
    capacity: usize,
) -> Result<SequenceShape> {
    if positions > capacity {
        let expected = format!("at most {capacity}, what the cache holds");
        return Err(KernelError::shape(kernel, "new positions", expected, positions));
    }
    SequenceShape::new(samples, capacity)
}

const FORWARD: [KernelName; 4] = [
    "attention_forward_32",
    "attention_forward_64",
    "attention_forward_128",
    "attention_forward_256",
];

impl<D: Driver, P: Precision> Attention for Gpu<D, P> {
    fn attention_forward(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        log_sum_exp: SliceMut<'_, Self, f32>,
        inputs: AttentionInputs<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        let plan = Plan::new("attention_forward", shape)?;
        exactly_mut(plan.kernel, "log_sum_exp", &log_sum_exp, plan.rows() * shape.heads())?;
        let inputs = plan.training_inputs(&inputs)?;
        // SAFETY: all of them were checked against the shape.
        unsafe { self.launch_attention(stream, &plan, &out, log_sum_exp.address(), inputs) }
    }
}

impl<D: Driver, P: Precision> CachedAttention for Gpu<D, P> {
    fn attention_cached(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        q: Matrix<'_, Self, P::Activation>,
        cache: KeyValueCache<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        let plan = Plan::new("attention_cached", shape)?;
        let samples = shape.sequences().samples();
        // The cache is a sequence too.
        let cached =
            cache_shape(plan.kernel, samples, shape.sequences().positions(), cache.capacity)?;
        let [_, capacity, _] = sequences32(plan.kernel, cached)?;
        let elements = cached.rows() * plan.shared_columns();
        exactly(plan.kernel, "keys", &cache.keys, elements)?;
        exactly(plan.kernel, "values", &cache.values, elements)?;
        exactly(plan.kernel, "past", &cache.past, samples)?;
        if let Some(slopes) = &cache.slopes {
            exactly(plan.kernel, "slopes", slopes, shape.heads())?;
        }
        let row_stride = plan.shared_columns() as u64;
        let side = |slice: &Slice<'_, Self, P::Activation>| Side {
            address: slice.address(),
            row_stride,
            sample_stride: row_stride * u64::from(capacity),
        };
        let sides = [plan.side("q", &q, plan.columns())?, side(&cache.keys), side(&cache.values)];
        let inputs = plan.inputs::<P::Activation>(sides, capacity, cache.slopes.address())?;
        let inputs = Inputs { past: cache.past.address(), ..inputs };
        // SAFETY: all of them were checked against the shape; no key past the capacity is read.
        unsafe { self.launch_attention(stream, &plan, &out, Address::NULL, inputs) }
    }

    fn append_to_cache(
        &self,
        stream: &mut GpuStream<D>,
        cache: SliceMut<'_, Self, P::Activation>,
        rows: Matrix<'_, Self, P::Activation>,
        past: Slice<'_, Self, u32>,
        capacity: usize,
    ) -> Result<()> {
        const KERNEL: KernelName = "append_to_cache";
        let [all_rows, width] = rows.shape();
        let samples = past.elements();
        if samples == 0 || !all_rows.is_multiple_of(samples) {
            let expected = format!("a multiple of {samples} samples");
            return Err(KernelError::shape(KERNEL, "rows", expected, all_rows));
        }
        if all_rows == 0 {
            return Ok(());
        }
        let cached = cache_shape(KERNEL, samples, all_rows / samples, capacity)?;
        let [_, capacity, cache_rows] = sequences32(KERNEL, cached)?;
        exactly_mut(KERNEL, "cache", &cache, cache_rows as usize * width)?;
        let arguments = Append {
            cache: cache.address(),
            rows: rows.address(),
            past: past.address(),
            row_stride: row_stride(KERNEL, "rows", &rows, all_rows, width)?,
            positions: size32(KERNEL, "positions", all_rows / samples)?,
            capacity,
            width: width as u64,
        };
        let launch = blocks(KERNEL, all_rows, APPEND_THREADS)?;
        // SAFETY: rows and cache were checked against one another; no position past the capacity is written.
        unsafe { self.launch(stream, &ATTENTION_CACHE, KERNEL, launch, arguments) }
    }
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// Whether groups of warps multiply together for these heads.
    pub(in crate::gpu) fn takes_groups(&self, head_width: HeadWidth) -> bool {
        let has_groups = self.driver.properties().group_products;
        has_groups && P::ELEMENT == ElementKind::Bf16 && head_width.is_for_groups()
    }

    /// Enqueues the forward kernel.
    ///
    /// # Safety
    /// The inputs and `log_sum_exp` must be as large as `plan` says.
    unsafe fn launch_attention(
        &self,
        stream: &mut GpuStream<D>,
        plan: &Plan,
        out: &MatrixMut<'_, Self, P::Activation>,
        log_sum_exp: Address,
        inputs: Inputs,
    ) -> Result<()> {
        let out_stride = row_stride_mut(plan.kernel, "out", out, plan.rows(), plan.columns())?;
        let stores = |elements| {
            let access = plan.access::<P::Activation>(elements, &[(out.address(), out_stride)]);
            u64::from(access == Access::Wide)
        };
        let arguments =
            Forward { out: out.address(), log_sum_exp, inputs, out_stride, wide_out: stores(2) };
        let head_width = plan.head_width();
        if self.takes_groups(head_width) {
            let arguments = Forward { wide_out: stores(groups::STORED_ELEMENTS), ..arguments };
            // SAFETY: as below.
            return unsafe { self.launch_attention_groups(stream, plan, arguments) };
        }
        let warp = self.driver.properties().warp;
        let shared_bytes = head_width.shared_bytes(size_of::<P::Activation>(), warp);
        let launch = plan.launch(warp, shared_bytes)?;
        // SAFETY: `out` was just checked; the caller guarantees the validity of the rest.
        unsafe {
            let name = head_width.choose(FORWARD);
            self.launch(stream, head_width.forward(false), name, launch, arguments)
        }
    }
}
