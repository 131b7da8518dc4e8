//! Products with a stated order over k where groups of warps multiply together: `ordered_groups.h` and
//! `ordered_staged.h`.
//!
//! The copy engine loads both factors, so rows must be aligned; others use the kernels of every
//! device, with the same bits.

use bytemuck::{Pod, Zeroable};

use super::KernelName;
use super::ordered_product::{OrderedProduct, SEGMENT, Sizes};
use super::sizes::{blocks, size32, stride_bytes};
use crate::error::Result;
use crate::gpu::driver::{DeviceProperties, Driver, Launch, TileMap, TiledRows};
use crate::gpu::precision::Precision;
use crate::gpu::source::ORDERED_PRODUCT;
use crate::gpu::{Gpu, GpuStream};

/// Rows that a group multiplies at a time, and its threads.
const GROUP_ROWS: usize = 64;
const GROUP_THREADS: u32 = 128;
/// Threads of a warp.
const WARP: u32 = 32;
/// Bytes of a row of a stage: 64 terms.
const STAGE_ROW_BYTES: usize = 128;
/// Bytes of the gates of a stage.
const GATES_BYTES: usize = 16;
/// Blocks of rows that meet the same columns at about the same time.
const SECTION: u32 = 16;

/// The most rows of the kernels whose weights pass through rings of each warp's own.
const STAGED_ROWS: usize = 8;
/// The most warps of their blocks.
const STAGED_WARPS: usize = 10;
/// Columns of their blocks: few, or what makes two tiles of 16.
const STAGED_COLUMNS: [(KernelName, usize); 2] =
    [("ordered_staged_16", 8), ("ordered_staged_32", 20)];
/// Bytes behind the terms of a row in shared memory.
const PAD_BYTES: usize = 16;
/// Terms and number of the stages of a warp, the best first: whole segments, where there is room.
const STAGES: [(usize, usize); 3] = [(SEGMENT, 1), (128, 3), (128, 2)];

/// `ordered_groups::Arguments` of ordered_groups.h.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct GroupsArguments {
    a_map: TileMap,
    weight_map: TileMap,
    product: OrderedProduct,
    items: u32,
    column_blocks: u32,
    section: u32,
    parts: u32,
}

/// `ordered_staged::Arguments` of ordered_staged.h.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct StagedArguments {
    product: OrderedProduct,
    columns: u32,
    stage_terms: u32,
    stages: u32,
    own_segments: u32,
}

/// Where a block leaves the sums of segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SegmentSums {
    /// Walks over all segments, and adds them.
    Added,
    /// Leaves that of its own segment.
    Apart,
}

/// A kernel of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Groups {
    kernel: KernelName,
    /// Rows of a stage; groups multiply 64 each.
    rows: usize,
    columns: usize,
    stages: usize,
    sums: SegmentSums,
}

const fn groups(kernel: KernelName, [rows, columns]: [usize; 2], stages: usize) -> Groups {
    Groups { kernel, rows, columns, stages, sums: SegmentSums::Added }
}
const fn apart(kernel: KernelName, [rows, columns]: [usize; 2], stages: usize) -> Groups {
    Groups { kernel, rows, columns, stages, sums: SegmentSums::Apart }
}

/// Kernels whose blocks have all rows.
const OF_ALL_ROWS: [Groups; 3] = [
    groups("ordered_groups_16x80", [16, 80], 18),
    groups("ordered_groups_32x80", [32, 80], 15),
    groups("ordered_groups_64x80", [64, 80], 12),
];
/// Kernels of more rows, by falling size of their blocks.
const OF_MORE_ROWS: [Groups; 2] = [
    groups("ordered_groups_128x160", [128, 160], 6),
    groups("ordered_groups_128x80", [128, 80], 8),
];
/// Kernels that leave segments apart.
const WIDE_APART: Groups = apart("ordered_groups_apart_64x192", [64, 192], 3);
const NARROW_APART: Groups = apart("ordered_groups_apart_64x16", [64, 16], 8);

impl Groups {
    fn groups(self) -> usize {
        self.rows.div_ceil(GROUP_ROWS)
    }

    fn row_blocks(self, sizes: Sizes) -> usize {
        sizes.rows.div_ceil(self.groups() * GROUP_ROWS)
    }

    fn column_blocks(self, sizes: Sizes) -> usize {
        sizes.columns.div_ceil(self.columns)
    }

    /// Parts that the segments are divided into.
    fn parts(self, sizes: Sizes) -> usize {
        match self.sums {
            SegmentSums::Added => 1,
            SegmentSums::Apart => sizes.segments,
        }
    }

    /// Results of a block's size, by parts of the segments.
    fn items(self, sizes: Sizes) -> usize {
        self.row_blocks(sizes) * self.column_blocks(sizes) * self.parts(sizes)
    }

    /// Groups, and a warp that copies; behind several groups it has a group's threads around it.
    fn threads(self) -> u32 {
        match self.groups() {
            1 => GROUP_THREADS + WARP,
            groups => GROUP_THREADS * (groups as u32 + 1),
        }
    }

    /// `Memory::BYTES` of ordered_groups.h. A group reads 64 rows of the last stage too.
    fn shared_bytes(self) -> usize {
        let stage = (self.rows + self.columns) * STAGE_ROW_BYTES;
        let gates = self.stages * GATES_BYTES;
        let read = self.groups() * GROUP_ROWS * STAGE_ROW_BYTES;
        self.stages * stage + gates + read.saturating_sub(stage + gates)
    }
}

/// A kernel whose weights pass through rings of each warp's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Staged {
    kernel: KernelName,
    columns: usize,
    warps: usize,
    own_segments: usize,
    stage_terms: usize,
    stages: usize,
    shared_bytes: usize,
}

impl Staged {
    /// The narrowest blocks of which no multiprocessor has two, if there are any, with the most memory for weights on their way.
    fn new(device: &DeviceProperties, sizes: Sizes) -> Option<Self> {
        let Sizes { rows, columns, segments } = sizes;
        if rows > STAGED_ROWS {
            return None;
        }
        let fits =
            |&(_, own): &(_, usize)| columns.div_ceil(own) <= device.multiprocessors as usize;
        let (kernel, columns) = STAGED_COLUMNS.into_iter().find(fits)?;
        let own_segments = segments.div_ceil(STAGED_WARPS);
        let warps = segments.div_ceil(own_segments);
        let row_bytes = |terms: usize| terms * 2 + PAD_BYTES;
        let staged = |(stage_terms, stages): (usize, usize)| {
            let gates = (warps * stages * size_of::<u64>()).next_multiple_of(16);
            let weights = stages * columns * row_bytes(stage_terms);
            let of_a = own_segments * rows * row_bytes(SEGMENT);
            let sums = segments * rows * columns * size_of::<f32>();
            let shared_bytes = gates + warps * (weights + of_a) + sums;
            Self { kernel, columns, warps, own_segments, stage_terms, stages, shared_bytes }
        };
        let has_room = |plan: &Self| plan.shared_bytes <= device.shared_bytes_per_block;
        STAGES.into_iter().map(staged).find(has_room)
    }
}

/// A kernel and how its blocks share a product. All give an element the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Groups(Groups),
    Staged(Staged),
}

impl Plan {
    /// Blocks as large as leaves two thirds of the multiprocessors at work, of more than 64 rows those of 64 by 80 down to a third of
    /// them, and segments apart where columns are too few for that: the fastest on an H200, of the shapes of Mamba 2.8b. The bytes that
    /// a multiprocessor reads a cycle bound them: more blocks of 64 by 48, two of which share a multiprocessor, take longer.
    pub(super) fn new(device: &DeviceProperties, sizes: Sizes) -> Self {
        let multiprocessors = device.multiprocessors as usize;
        let fills = |groups: &Groups, thirds| 3 * groups.items(sizes) >= thirds * multiprocessors;
        let is_enough = |groups: &Groups, thirds| sizes.segments == 1 || fills(groups, thirds);
        let is_of_all_rows = |groups: &Groups| sizes.rows <= groups.rows;
        let added = match OF_ALL_ROWS.into_iter().find(is_of_all_rows) {
            Some(groups) => Some(groups).filter(|groups| is_enough(groups, 2)),
            None => {
                let by_size = OF_MORE_ROWS.into_iter().find(|groups| fills(groups, 2));
                let [.., small] = OF_ALL_ROWS;
                by_size.or(Some(small).filter(|groups| is_enough(groups, 1)))
            }
        };
        if let Some(groups) = added {
            return Self(Kind::Groups(groups));
        }
        if let Some(staged) = Staged::new(device, sizes) {
            return Self(Kind::Staged(staged));
        }
        // Wide blocks read rows less often, but need a third of the multiprocessors to have work.
        let is_wide = 4 * sizes.columns > WIDE_APART.columns
            && 3 * WIDE_APART.items(sizes) >= multiprocessors;
        Self(Kind::Groups(if is_wide { WIDE_APART } else { NARROW_APART }))
    }

    /// Whether segments are left to be added to one another afterwards.
    pub(super) fn is_split(self) -> bool {
        matches!(self.0, Kind::Groups(Groups { sums: SegmentSums::Apart, .. }))
    }
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// Whether the launch was enqueued: where the copy engine does not find the rows, it was not.
    ///
    /// # Safety
    /// The memory of `product` must be as large as its sizes say, its rows aligned to 16 bytes, and those of `out` to pairs.
    pub(super) unsafe fn launch_ordered_groups(
        &self,
        stream: &mut GpuStream<D>,
        kernel: KernelName,
        plan: Plan,
        product: OrderedProduct,
    ) -> Result<bool> {
        let sizes = product.sizes();
        let groups = match plan.0 {
            Kind::Groups(groups) => groups,
            Kind::Staged(staged) => {
                let arguments = StagedArguments {
                    product: OrderedProduct { walkers: staged.warps as u32, ..product },
                    columns: staged.columns as u32,
                    stage_terms: staged.stage_terms as u32,
                    stages: staged.stages as u32,
                    own_segments: staged.own_segments as u32,
                };
                let grid = sizes.columns.div_ceil(staged.columns);
                let launch = blocks(kernel, grid, WARP * staged.warps as u32)?.early(sizes.rows);
                let launch = Launch { shared_bytes: staged.shared_bytes, ..launch };
                // SAFETY: the caller's.
                unsafe {
                    self.launch(stream, &ORDERED_PRODUCT, staged.kernel, launch, arguments)?;
                }
                return Ok(true);
            }
        };
        let rows = |address, rows, stride, tile_rows: usize| {
            let row_bytes = stride_bytes::<P::Activation>(stride);
            // With a single row, the row stride is not used.
            let row_bytes = if rows == 1 { u64::from(product.terms) * 2 } else { row_bytes };
            TiledRows {
                address,
                columns: u64::from(product.terms),
                rows: u64::from(rows),
                heads: 1,
                samples: 1,
                row_bytes,
                head_bytes: row_bytes,
                sample_bytes: row_bytes,
                tile_rows: tile_rows as u32,
            }
        };
        let sides = [
            rows(product.a, product.rows, product.a_stride, groups.rows),
            rows(product.weight, product.columns, product.weight_stride, groups.columns),
        ];
        let mut maps = [TileMap::zeroed(); 2];
        for (map, side) in maps.iter_mut().zip(&sides) {
            if side.row_bytes >= TiledRows::MOST_BYTES {
                return Ok(false);
            }
            let Some(found) = self.driver.tile_map(side)? else { return Ok(false) };
            *map = found;
        }
        let [a_map, weight_map] = maps;
        let items = groups.items(sizes);
        let arguments = GroupsArguments {
            a_map,
            weight_map,
            product: OrderedProduct { row_blocks: groups.row_blocks(sizes) as u32, ..product },
            items: size32(kernel, "blocks of results", items)?,
            column_blocks: groups.column_blocks(sizes) as u32,
            section: SECTION,
            parts: groups.parts(sizes) as u32,
        };
        // For the largest results, blocks take several items one after the other: the next item's
        // terms are loaded while the last one's results are stored.
        let resident = match groups == OF_MORE_ROWS[0] {
            true => items.min(self.driver.properties().multiprocessors as usize),
            false => items,
        };
        let launch = blocks(kernel, resident, groups.threads())?.early(sizes.rows);
        let launch = Launch { shared_bytes: groups.shared_bytes(), ..launch };
        // SAFETY: the caller's.
        unsafe { self.launch(stream, &ORDERED_PRODUCT, groups.kernel, launch, arguments)? };
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Terms that the kernels of rings multiply at a time.
    const ROUND_TERMS: usize = 32;

    fn device() -> DeviceProperties {
        DeviceProperties {
            backend: "a test",
            name: String::new(),
            architecture: String::new(),
            warp: 32,
            multiprocessors: 132,
            group_products: true,
            shared_bytes_per_block: 227 << 10,
            matrix_library: String::new(),
            collective_library: None,
        }
    }

    fn kernel(rows: usize, columns: usize, terms: usize) -> KernelName {
        let sizes = Sizes { rows, columns, segments: terms.div_ceil(SEGMENT) };
        match Plan::new(&device(), sizes).0 {
            Kind::Groups(groups) => groups.kernel,
            Kind::Staged(staged) => staged.kernel,
        }
    }

    /// The kernels that were measured to be fastest, or within a few percent of that, for the products of Mamba 2.8b.
    #[test]
    fn products_of_mamba_take_what_is_fast() {
        let in_proj = |rows| kernel(rows, 10240, 2560);
        let x_proj = |rows| kernel(rows, 192, 5120);
        let dt_proj = |rows| kernel(rows, 5120, 160);
        let out_proj = |rows| kernel(rows, 2560, 5120);
        let head = |rows| kernel(rows, 50280, 2560);
        for rows in [1, 4, 8, 9, 16] {
            let of_few = [in_proj(rows), dt_proj(rows), head(rows)];
            assert_eq!(of_few, ["ordered_groups_16x80"; 3], "{rows} rows");
        }
        for rows in [1, 8] {
            assert_eq!(x_proj(rows), "ordered_staged_16");
            assert_eq!(out_proj(rows), "ordered_staged_32");
        }
        for rows in [9, 16, 32, 64] {
            assert_eq!(x_proj(rows), "ordered_groups_apart_64x16");
            assert_eq!(out_proj(rows), "ordered_groups_apart_64x192");
        }
        assert_eq!(in_proj(32), "ordered_groups_32x80");
        assert_eq!(in_proj(64), "ordered_groups_64x80");
        assert_eq!(in_proj(128), "ordered_groups_128x80");
        assert_eq!(dt_proj(128), "ordered_groups_64x80");
        assert_eq!(out_proj(128), "ordered_groups_64x80");
        assert_eq!(x_proj(128), "ordered_groups_apart_64x16");
        assert_eq!(in_proj(4096), "ordered_groups_128x160");
        assert_eq!(head(1024), "ordered_groups_128x160");
    }

    /// GPT-Neo 2.7B: all of q, k and v at once, what comes after attention, and the two of its MLP.
    #[test]
    fn products_of_gpt_neo_take_what_is_fast() {
        for rows in [1, 16] {
            assert_eq!(kernel(rows, 7680, 2560), "ordered_groups_16x80");
            assert_eq!(kernel(rows, 10240, 2560), "ordered_groups_16x80");
        }
        assert_eq!(kernel(1, 2560, 2560), "ordered_staged_32");
        assert_eq!(kernel(1, 2560, 10240), "ordered_staged_32");
        assert_eq!(kernel(64, 2560, 2560), "ordered_groups_apart_64x192");
        assert_eq!(kernel(64, 2560, 10240), "ordered_groups_apart_64x192");
        assert_eq!(kernel(128, 2560, 10240), "ordered_groups_64x80");
    }

    #[test]
    fn every_plan_fits_its_kernel() {
        let shapes = [1, 8, 48, 192, 2560, 5120, 7680, 10240, 50280];
        for rows in [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 1024, 16384] {
            for columns in shapes {
                for terms in [8_usize, 160, 512, 520, 2560, 5120, 10240, 20480] {
                    let sizes = Sizes { rows, columns, segments: terms.div_ceil(SEGMENT) };
                    let plan = Plan::new(&device(), sizes);
                    let label = format!("{sizes:?}: {plan:?}");
                    match plan.0 {
                        Kind::Groups(groups) => {
                            assert!(groups.shared_bytes() <= 227 << 10, "{label}");
                            // A row that a block reads beyond its own is a row of no other block.
                            assert!(
                                rows <= groups.rows || groups.rows % GROUP_ROWS == 0,
                                "{label}"
                            );
                            // Rows are blocks of the second dimension where segments are added.
                            assert!(!plan.is_split() || rows < 1 << 16, "{label}");
                        }
                        Kind::Staged(staged) => {
                            assert!(rows <= STAGED_ROWS && sizes.segments > 1, "{label}");
                            assert!(staged.shared_bytes <= 227 << 10, "{label}");
                            assert!(staged.warps <= STAGED_WARPS, "{label}");
                            let shared = staged.warps * staged.own_segments;
                            assert!(shared >= sizes.segments, "{label}");
                            assert_eq!(staged.stage_terms % ROUND_TERMS, 0, "{label}");
                            let tiles = if staged.kernel == "ordered_staged_16" { 1 } else { 2 };
                            assert!(staged.columns <= tiles * 16, "{label}");
                        }
                    }
                }
            }
        }
    }

    /// Two blocks that leave segments apart share a multiprocessor.
    #[test]
    fn two_blocks_fit_where_the_kernel_says_so() {
        for groups in [WIDE_APART, NARROW_APART] {
            assert!(2 * (groups.shared_bytes() + 1024) <= 228 << 10, "{groups:?}");
        }
    }
}
