//! Products with a stated order over k.

use bytemuck::{Pod, Zeroable};

use super::sizes::{Access, WIDE_BYTES, blocks, size32, stride_bytes};
use super::{KernelName, ordered_groups, row_stride, row_stride_mut};
use crate::backend::{Element, OrderedProducts, Output};
use crate::error::{KernelError, Result};
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, DeviceProperties, Driver, ElementKind, Launch};
use crate::gpu::precision::Precision;
use crate::gpu::source::ORDERED_PRODUCT;
use crate::gpu::{Gpu, GpuStream, ScratchSlot};
use crate::view::{Matrix, MatrixMut};

const KERNEL: KernelName = "ordered_matmul";

/// Terms of a segment of k: `SEGMENT` of ordered_product.h.
pub(super) const SEGMENT: usize = 512;
/// Terms that a lane has of a row at a time: 16 bytes of bf16.
const CHUNK: usize = 8;

/// The most rows that kernels of few rows are given, in blocks of at most 16.
const FEW_ROWS: usize = 32;
/// The most warps of their blocks.
const FEW_WARPS: usize = 10;
/// The most sums of segments of columns that a block holds: `HELD_SEGMENTS` of ordered_product.cu.
const HELD_SEGMENTS: usize = 40;

/// Threads of a block of tiles, and of one that adds segments.
const THREADS: u32 = 256;
/// Rows and columns of a block of tiles.
const TILES: [usize; 2] = [64, 128];
/// Terms that such a block has of each row at a time.
const STEP_TERMS: usize = 64;
/// Rows and columns of a block of fp32, and the terms of each at a time.
const FP32_SIDE: usize = 64;
const FP32_STEP_TERMS: usize = 16;

/// `OrderedProduct` of ordered_product.h.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct OrderedProduct {
    pub(super) out: Address,
    pub(super) segment_sums: Address,
    pub(super) a: Address,
    pub(super) weight: Address,
    pub(super) out_stride: u64,
    pub(super) a_stride: u64,
    pub(super) weight_stride: u64,
    pub(super) group_of_warp: u64,
    pub(super) rows: u32,
    pub(super) columns: u32,
    pub(super) terms: u32,
    pub(super) segments: u32,
    pub(super) adds: u32,
    pub(super) out_is_fp32: u32,
    pub(super) pairs: u32,
    pub(super) groups: u32,
    pub(super) walkers: u32,
    pub(super) row_blocks: u32,
    pub(super) zero: u32,
    pub(super) padding: u32,
}

impl OrderedProduct {
    pub(super) fn sizes(&self) -> Sizes {
        let [rows, columns, segments] =
            [self.rows, self.columns, self.segments].map(|size| size as usize);
        Sizes { rows, columns, segments }
    }
}

/// The sizes of a product: m, n and the segments of k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) segments: usize,
}

/// The most rows of which products of one segment are formed by single warps where groups could form them: on an H200 a token of Mamba
/// 2.8b takes 1 to 2 % less so.
pub(super) const ROWS_OF_WARPS: usize = 2;

/// A kernel and how its blocks share a product. All kernels give an element the same bits, so the choice may follow from
/// anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    kernel: KernelName,
    row_blocks: usize,
    column_blocks: usize,
    threads: u32,
    shared_bytes: usize,
    /// Groups of columns of a few rows that a block has.
    groups: usize,
    /// Warps that share the segments of each.
    walkers: usize,
    /// Whether a block has one segment alone, to be added to the others afterwards.
    split: bool,
}

impl Plan {
    fn new(device: &DeviceProperties, element: ElementKind, access: Access, sizes: Sizes) -> Self {
        let Sizes { rows, segments, .. } = sizes;
        if element == ElementKind::F32 {
            let shared_bytes = 2 * FP32_SIDE * (FP32_STEP_TERMS + 1) * size_of::<f32>();
            return Self::tiles(device, "ordered_tiles_fp32", [FP32_SIDE; 2], shared_bytes, sizes);
        }
        if access == Access::Wide && rows <= FEW_ROWS && segments <= HELD_SEGMENTS {
            return Self::few(device, sizes);
        }
        let stages = if device.warp == 32 { 3 } else { 2 };
        let [tile_rows, tile_columns] = TILES;
        let shared_bytes = stages * (tile_rows + tile_columns) * STEP_TERMS * 2;
        let kernel = access.choose("ordered_tiles_wide", "ordered_tiles_single");
        Self::tiles(device, kernel, TILES, shared_bytes, sizes)
    }

    /// Blocks of warps that read weights once, straight into registers: several groups of columns each where there are more
    /// than multiprocessors.
    fn few(device: &DeviceProperties, Sizes { rows, columns, segments }: Sizes) -> Self {
        let tile_columns = if device.warp == 32 { 8 } else { 16 };
        let walkers = segments.div_ceil(segments.div_ceil(FEW_WARPS));
        // The fastest choices on an H100, for the shapes of Mamba and GPT-Neo.
        let block_rows = if rows <= 8 { 8 } else { 16 };
        let warps = rows.div_ceil(block_rows) * columns.div_ceil(tile_columns) * walkers;
        let most_warps = FEW_WARPS * device.multiprocessors as usize;
        let all_resident = warps <= 2 * most_warps;
        let (kernel, group_columns) = match (block_rows, all_resident) {
            (8, true) if walkers > 1 && warps <= most_warps => {
                ("ordered_few_8_whole", tile_columns)
            }
            (8, true) => ("ordered_few_8_deep", tile_columns),
            (8, false) if walkers <= FEW_WARPS / 2 => ("ordered_few_8_deep", tile_columns),
            (8, false) => ("ordered_few_8", tile_columns),
            (_, true) => ("ordered_few_16_deep", tile_columns),
            (_, false) => ("ordered_few_16", 16),
        };
        let (row_blocks, column_groups) =
            (rows.div_ceil(block_rows), columns.div_ceil(group_columns));
        let most_groups = (FEW_WARPS / walkers).min(HELD_SEGMENTS / segments);
        let resident = row_blocks * column_groups / device.multiprocessors as usize;
        let groups = resident.clamp(1, most_groups);
        Self {
            kernel,
            row_blocks,
            column_blocks: column_groups.div_ceil(groups),
            threads: device.warp * (groups * walkers) as u32,
            shared_bytes: HELD_SEGMENTS * block_rows * group_columns * size_of::<f32>(),
            groups,
            walkers,
            split: false,
        }
    }

    /// The group of each warp of a block, in four bits.
    fn group_of_warp(&self) -> u64 {
        let warps = 0..self.groups * self.walkers;
        warps.fold(0, |all, warp| all | ((warp / self.walkers) as u64) << (4 * warp))
    }

    /// Blocks of a number of rows and columns, which walk over all segments unless most multiprocessors had none.
    fn tiles(
        device: &DeviceProperties,
        kernel: KernelName,
        [rows, columns]: [usize; 2],
        shared_bytes: usize,
        sizes: Sizes,
    ) -> Self {
        let (row_blocks, column_blocks) =
            (sizes.rows.div_ceil(rows), sizes.columns.div_ceil(columns));
        let others = row_blocks * column_blocks - 1;
        Self {
            kernel,
            row_blocks,
            column_blocks,
            threads: THREADS,
            shared_bytes,
            groups: 0,
            walkers: 0,
            split: others * 3 < device.multiprocessors as usize && sizes.segments > 1,
        }
    }
}

impl<D: Driver, P: Precision> OrderedProducts for Gpu<D, P> {
    fn ordered_matmul(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        a: Matrix<'_, Self, P::Activation>,
        weight: Matrix<'_, Self, P::Activation>,
        output: Output,
    ) -> Result<()> {
        self.launch_ordered_product(stream, out, a, weight, output)
    }

    fn ordered_matmul_f32(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, f32>,
        a: Matrix<'_, Self, P::Activation>,
        weight: Matrix<'_, Self, P::Activation>,
        output: Output,
    ) -> Result<()> {
        self.launch_ordered_product(stream, out, a, weight, output)
    }
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// `out[m, n] (+)= a[m, k] weight[n, k]^T`
    fn launch_ordered_product<T: Element>(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, T>,
        a: Matrix<'_, Self, P::Activation>,
        weight: Matrix<'_, Self, P::Activation>,
        output: Output,
    ) -> Result<()> {
        let [m, k, n] = [a.rows, a.columns, weight.rows];
        let out_stride = row_stride_mut(KERNEL, "out", &out, m, n)?;
        let a_stride = row_stride(KERNEL, "a", &a, m, k)?;
        let weight_stride = row_stride(KERNEL, "weight", &weight, n, k)?;
        if m == 0 || n == 0 {
            return Ok(());
        }
        if k == 0 {
            return Err(KernelError::shape(KERNEL, "terms", "at least 1", 0));
        }
        let operand = |address, stride| (address, stride_bytes::<P::Activation>(stride));
        let operands = [operand(a.address(), a_stride), operand(weight.address(), weight_stride)];
        let access = match k.is_multiple_of(CHUNK) {
            true => Access::of(WIDE_BYTES, &operands),
            false => Access::Single,
        };
        let out_operand = (out.address(), stride_bytes::<T>(out_stride));
        let pairs = Access::of(2 * size_of::<T>() as u64, &[out_operand]);
        let sizes = Sizes { rows: m, columns: n, segments: k.div_ceil(SEGMENT) };
        let device = self.driver.properties();
        let plan = Plan::new(device, P::ELEMENT, access, sizes);
        // Threads of groups store two neighbours of a row, and the copy engine needs aligned rows.
        let by_groups = device.group_products
            && P::ELEMENT == ElementKind::Bf16
            && access.and(pairs) == Access::Wide
            && n.is_multiple_of(2)
            && !(m <= ROWS_OF_WARPS && sizes.segments == 1);
        let of_groups = by_groups.then(|| ordered_groups::Plan::new(device, sizes));
        let mut product = OrderedProduct {
            out: out.address(),
            segment_sums: Address::NULL,
            a: a.address(),
            weight: weight.address(),
            out_stride,
            a_stride,
            weight_stride,
            group_of_warp: 0,
            rows: size32(KERNEL, "rows", m)?,
            columns: size32(KERNEL, "columns", n)?,
            terms: size32(KERNEL, "terms", k)?,
            segments: sizes.segments as u32,
            adds: u32::from(output == Output::Add),
            out_is_fp32: u32::from(size_of::<T>() == size_of::<f32>()),
            pairs: u32::from(pairs == Access::Wide),
            groups: 0,
            walkers: 0,
            row_blocks: 0,
            zero: 0,
            padding: 0,
        };
        if let Some(plan) = of_groups {
            if plan.is_split() {
                product.segment_sums = self.room_for_segments(stream, sizes)?;
            }
            // SAFETY: out, a and weight were checked against one another, and their alignment here; there is room for a sum of every
            // element and segment where blocks leave these.
            if unsafe { self.launch_ordered_groups(stream, KERNEL, plan, product)? } {
                return self.add_segments(stream, product);
            }
            product.segment_sums = Address::NULL;
        }
        if plan.split {
            product.segment_sums = self.room_for_segments(stream, sizes)?;
        }
        product.group_of_warp = plan.group_of_warp();
        product.groups = plan.groups as u32;
        product.walkers = plan.walkers as u32;
        product.row_blocks = plan.row_blocks as u32;
        let launch = blocks(KERNEL, plan.row_blocks * plan.column_blocks, plan.threads)?
            .early(product.rows as usize);
        let depth = if plan.split { product.segments } else { 1 };
        let launch =
            Launch { grid: [launch.grid[0], depth, 1], shared_bytes: plan.shared_bytes, ..launch };
        // SAFETY: as above, of any alignment.
        unsafe { self.launch(stream, &ORDERED_PRODUCT, plan.kernel, launch, product)? };
        self.add_segments(stream, product)
    }

    /// Memory for the sums of segments, each apart.
    fn room_for_segments(&self, stream: &mut GpuStream<D>, sizes: Sizes) -> Result<Address> {
        let elements = sizes.rows * sizes.columns;
        let bytes = sizes.segments.saturating_mul(elements * size_of::<f32>());
        stream.scratch(&self.driver, ScratchSlot::First, bytes)
    }

    /// Adds the segments that blocks have left apart, if they have.
    fn add_segments(&self, stream: &mut GpuStream<D>, product: OrderedProduct) -> Result<()> {
        if product.segment_sums == Address::NULL {
            return Ok(());
        }
        let columns = product.columns as usize;
        // Threads add one element each, or two neighbours.
        let in_pairs = P::ELEMENT == ElementKind::Bf16 && columns.is_multiple_of(2);
        let (kernel, own) =
            if in_pairs { ("ordered_add_pairs", 2) } else { ("ordered_add_segments", 1) };
        let launch = blocks(KERNEL, columns.div_ceil(own * THREADS as usize), THREADS)?
            .early(product.rows as usize);
        let launch = Launch { grid: [launch.grid[0], product.rows, 1], ..launch };
        // SAFETY: as for the kernel before; rows are few where segments are apart.
        unsafe { self.launch(stream, &ORDERED_PRODUCT, kernel, launch, product) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(warp: u32) -> DeviceProperties {
        DeviceProperties {
            backend: "a test",
            name: String::new(),
            architecture: String::new(),
            warp,
            multiprocessors: 132,
            group_products: false,
            shared_bytes_per_block: 64 << 10,
            matrix_library: String::new(),
            collective_library: None,
        }
    }

    /// The kernel, threads and whether segments are blocks' for the products of Mamba 2.8b.
    #[test]
    fn blocks_fit_and_warps_share_all_segments() {
        for warp in [32, 64] {
            for (rows, columns, segments) in [
                (1, 10240, 5),
                (1, 2560, 10),
                (8, 192, 10),
                (1, 5120, 1),
                (16, 2560, 10),
                (32, 50280, 5),
                (9, 8, 40),
            ] {
                let sizes = Sizes { rows, columns, segments };
                let plan = Plan::new(&device(warp), ElementKind::Bf16, Access::Wide, sizes);
                assert!(plan.kernel.starts_with("ordered_few"), "{sizes:?}: {plan:?}");
                let warps = plan.groups * plan.walkers;
                assert_eq!(plan.threads as usize, warps * warp as usize, "{sizes:?}: {plan:?}");
                assert!(warps <= FEW_WARPS && plan.groups * segments <= HELD_SEGMENTS, "{plan:?}");
                assert!(plan.shared_bytes <= 48 << 10, "{sizes:?}: {plan:?}");
                assert!(!plan.split);
            }
        }
    }

    #[test]
    fn segments_are_of_blocks_apart_where_blocks_are_few() {
        let plan = |rows, columns, segments| {
            let sizes = Sizes { rows, columns, segments };
            Plan::new(&device(32), ElementKind::Bf16, Access::Wide, sizes)
        };
        assert!(plan(64, 2560, 10).split && plan(128, 2560, 10).split);
        assert!(
            !plan(64, 5120, 1).split && !plan(64, 7680, 5).split && !plan(4096, 2560, 10).split
        );
    }
}
