//! The gradients of attention where groups of warps multiply together: `attention_backward_groups_kernels.h`.
//!
//! First the deltas of all rows and, with documents, the first key of each query; then one walk, whose blocks take one item of work
//! after the other; then dq from its sums. The order of every sum is fixed: it does not depend on which block takes which item.

use bytemuck::{Pod, Zeroable};

use super::KernelName;
use super::attention::{HeadWidth, Inputs, Plan};
use super::sizes::{Access, WIDE_BYTES, blocks, size32, stride_bytes};
use crate::error::Result;
use crate::gpu::driver::{Address, Driver, Launch, TileMap, TiledRows};
use crate::gpu::precision::Precision;
use crate::gpu::{Gpu, GpuStream, ScratchSlot};
use crate::shape::AttentionShape;

/// Groups that compute; each has its own share of the sums of dq.
const COMPUTING: usize = 2;
/// Threads of a block: the computing groups and one that copies, each of four warps of 32.
const THREADS: u32 = 384;
/// Keys of an item.
const KEY_ROWS: u32 = 128;
/// Floats that a group forms of the sums of dq of a tile.
const GROUP_SUMS: usize = 64 * 64;
const PREPARING_THREADS: u32 = 128;
const PREPARED_ROWS: u32 = 32;
/// Bytes of queries, their gradients and their sums of dq that are walked at a time: what a cache holds beside all else.
const SECTION_BYTES: u64 = 48 << 20;
/// Heads that are walked at a time at least. Items of one head that begin at once would wait for each other's sums.
const LEAST_SECTION: u64 = 8;

/// `groups::Arguments` of attention_backward_groups.h.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Groups {
    q_map: TileMap,
    k_map: TileMap,
    v_map: TileMap,
    dout_map: TileMap,
    dq: Address,
    dk: Address,
    dv: Address,
    dq_sums: Address,
    added: Address,
    dout: Address,
    sums: Address,
    deltas: Address,
    firsts: Address,
    tile_firsts: Address,
    inputs: Inputs,
    gradient_stride: u64,
    dout_stride: u64,
    taken: Address,
    padded: u32,
    query_tiles: u32,
    section: u32,
    pairs: u32,
    by_engine: u32,
    wide_gradients: u32,
}

/// `groups::Preparation`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Preparation {
    sums: Address,
    deltas: Address,
    added: Address,
    firsts: Address,
    taken: Address,
    dout: Address,
    out: Address,
    log_sum_exp: Address,
    inputs: Inputs,
    dout_stride: u64,
    out_stride: u64,
    padded: u32,
    tile_queries: u32,
}

/// `groups::TileFirsts`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct TileFirsts {
    tile_firsts: Address,
    firsts: Address,
    tile_queries: u32,
    unused: u32,
}

/// The inputs that only the backward pass has, and its outputs, all of them checked against the plan.
pub(super) struct BackwardRows {
    /// dq, dk and dv, side by side in rows.
    pub(super) gradients: [Address; 3],
    pub(super) gradient_stride: u64,
    pub(super) dout: Address,
    pub(super) dout_stride: u64,
    pub(super) out: Address,
    pub(super) out_stride: u64,
    pub(super) log_sum_exp: Address,
}

/// The kernels of a head width, and what their blocks take.
struct Kernels {
    walk: KernelName,
    round_dq: KernelName,
    /// Queries of a tile.
    queries: u32,
    columns: usize,
}

impl Kernels {
    fn of(head_width: HeadWidth) -> Self {
        let columns = head_width.columns();
        match head_width {
            HeadWidth::Of64 => Self {
                walk: "attention_backward_groups_64",
                round_dq: "attention_backward_round_dq_64",
                queries: 128,
                columns,
            },
            _ => Self {
                walk: "attention_backward_groups_128",
                round_dq: "attention_backward_round_dq_128",
                queries: 64,
                columns,
            },
        }
    }

    /// `groups::Memory::BYTES`: keys and values, rings of two tiles of queries and of their gradients, ds twice, sums of dq twice; then
    /// sums and deltas of the tiles, steps, the item and what waits to be added, and gates.
    fn shared_bytes(&self) -> usize {
        let (queries, keys) = (self.queries as usize, KEY_ROWS as usize);
        let rows = (2 * keys + 4 * queries) * self.columns + 2 * keys * queries;
        let floats = 2 * COMPUTING * GROUP_SUMS + 4 * queries;
        let messages = 2 * 16 + 16 + 4 * 8;
        let gates = (4 + 3 * 2 * 2) * size_of::<u64>();
        2 * rows + 4 * floats + messages + gates
    }
}

/// Bytes of the scratch memory that one kernel leaves for the next: sums of dq, of rows and their deltas, marks of tiles, first
/// keys of queries and of tiles, and a count. All except the last are multiples of 16, as the copy engine needs for its source and
/// target.
pub(super) fn scratch_parts(head_width: HeadWidth, shape: AttentionShape) -> [usize; 7] {
    let sequences = shape.sequences();
    let (samples, pairs) = (sequences.samples(), sequences.samples() * shape.heads());
    let padded = sequences.positions().next_multiple_of(KEY_ROWS as usize);
    let query_tiles = padded / Kernels::of(head_width).queries as usize;
    [
        pairs * query_tiles * COMPUTING * GROUP_SUMS * size_of::<f32>(),
        pairs * padded * size_of::<f32>(),
        pairs * padded * size_of::<f32>(),
        (pairs * query_tiles * size_of::<u32>()).next_multiple_of(16),
        samples * padded * size_of::<u32>(),
        samples * query_tiles * 2 * size_of::<u32>(),
        size_of::<u32>(),
    ]
}

/// The number of (sample, head) pairs that are walked together, out of `pairs`, each of which takes `walked_bytes`. A power of two:
/// numbers that divide the multiprocessors were measured 10 % slower, since all blocks then stay in step and wait for each other's
/// sums.
fn section(pairs: u64, walked_bytes: u64) -> u32 {
    let most = (SECTION_BYTES / walked_bytes).max(LEAST_SECTION);
    pairs.min(1 << most.ilog2()) as u32
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// Enqueues the kernels of the gradients.
    ///
    /// # Safety
    /// The addresses of `rows` and `inputs` must name memory as large as `plan` says.
    pub(super) unsafe fn launch_attention_backward_groups(
        &self,
        stream: &mut GpuStream<D>,
        plan: &Plan,
        rows: &BackwardRows,
        inputs: Inputs,
        has_starts: bool,
    ) -> Result<()> {
        let kernels = Kernels::of(plan.head_width());
        let sequences = plan.shape.sequences();
        let pairs = sequences.samples() * plan.shape.heads();
        let key_tiles = plan.positions.div_ceil(KEY_ROWS);
        let padded = key_tiles as usize * KEY_ROWS as usize;
        let query_tiles = padded / kernels.queries as usize;
        // The items are counted up to this number, and once more by each block at the end.
        let device = self.driver.properties();
        let items = pairs * key_tiles as usize;
        size32(plan.kernel, "items of work", items + device.multiprocessors as usize)?;
        size32(plan.kernel, "tiles of queries", pairs * query_tiles)?;
        let padded32 = size32(plan.kernel, "padded positions", padded)?;

        let samples = sequences.samples();
        let parts = scratch_parts(plan.head_width(), plan.shape);
        let start = stream.scratch(&self.driver, ScratchSlot::First, parts.iter().sum())?;
        let [dq_sums, sums, deltas, added, firsts, tile_firsts, taken] = {
            let mut from = 0;
            parts.map(|bytes| {
                let place = start.offset(from);
                from += bytes;
                place
            })
        };

        let of_rows = [(rows.dout, rows.dout_stride), (rows.out, rows.out_stride)];
        let access = plan.access::<P::Activation>(WIDE_BYTES, &of_rows);
        let mut of_preparation = inputs;
        of_preparation.wide = u32::from(access == Access::Wide);
        let preparation = Preparation {
            sums,
            deltas,
            added,
            firsts,
            taken,
            dout: rows.dout,
            out: rows.out,
            log_sum_exp: rows.log_sum_exp,
            inputs: of_preparation,
            dout_stride: rows.dout_stride,
            out_stride: rows.out_stride,
            padded: padded32,
            tile_queries: kernels.queries,
        };
        let source = plan.head_width().backward();
        let prepared = pairs * padded / PREPARED_ROWS as usize;
        let launch = blocks(plan.kernel, prepared, PREPARING_THREADS)?;
        // SAFETY: the caller's; there is a sum and a delta for every head of every padded row.
        unsafe { self.launch(stream, source, "attention_backward_prepare", launch, preparation) }?;
        if has_starts {
            let launch = blocks(plan.kernel, samples * query_tiles, device.warp)?;
            let tile_queries = kernels.queries;
            let arguments = TileFirsts { tile_firsts, firsts, tile_queries, unused: 0 };
            let name = "attention_backward_tile_firsts";
            // SAFETY: the caller's; there is a place for every tile of a sample, and a first key for each of its queries.
            unsafe { self.launch(stream, source, name, launch, arguments) }?;
        }

        let mut inputs = inputs;
        inputs.tiles = key_tiles;
        let dout = (rows.dout, rows.dout_stride);
        if plan.access::<P::Activation>(WIDE_BYTES, &[dout]) == Access::Single {
            inputs.wide = 0;
        }
        let maps = self.backward_maps(plan, &inputs, rows, kernels.queries)?;
        let by_engine = u32::from(maps.is_some());
        let [q_map, k_map, v_map, dout_map] = maps.unwrap_or_else(Zeroable::zeroed);
        let walked_bytes =
            stride_bytes::<P::Activation>(4 * kernels.columns as u64) * padded as u64;
        let gradients = rows.gradients.map(|address| (address, rows.gradient_stride));
        let stores = plan.access::<P::Activation>(WIDE_BYTES, &gradients);
        let [dq, dk, dv] = rows.gradients;
        let arguments = Groups {
            q_map,
            k_map,
            v_map,
            dout_map,
            dq,
            dk,
            dv,
            dq_sums,
            added,
            dout: rows.dout,
            sums,
            deltas,
            firsts,
            tile_firsts,
            inputs,
            gradient_stride: rows.gradient_stride,
            dout_stride: rows.dout_stride,
            taken,
            padded: padded32,
            query_tiles: query_tiles as u32,
            section: section(pairs as u64, walked_bytes),
            pairs: pairs as u32,
            by_engine,
            wide_gradients: u32::from(stores == Access::Wide),
        };
        let resident = items.min(device.multiprocessors as usize);
        let launch = Launch {
            shared_bytes: kernels.shared_bytes(),
            ..blocks(plan.kernel, resident, THREADS)?
        };
        // SAFETY: the caller's; the count is taken by one kernel at a time.
        unsafe { self.launch(stream, source, kernels.walk, launch, arguments) }?;
        let launch = Launch {
            shared_bytes: 2 * kernels.queries as usize * kernels.columns,
            ..blocks(plan.kernel, pairs * query_tiles, THREADS * 2 / 3)?
        };
        // SAFETY: as above.
        unsafe { self.launch(stream, source, kernels.round_dq, launch, arguments) }
    }

    /// How the copy engine finds queries, keys, values and gradients of outputs; nothing where it cannot.
    fn backward_maps(
        &self,
        plan: &Plan,
        inputs: &Inputs,
        rows: &BackwardRows,
        queries: u32,
    ) -> Result<Option<[TileMap; 4]>> {
        let bytes = stride_bytes::<P::Activation>;
        let tiled = |address, heads: usize, row_stride, tile_rows| TiledRows {
            address,
            columns: u64::from(inputs.width),
            rows: u64::from(inputs.positions),
            heads: heads as u64,
            samples: plan.shape.sequences().samples() as u64,
            row_bytes: bytes(row_stride),
            head_bytes: bytes(u64::from(inputs.width)),
            sample_bytes: bytes(row_stride * u64::from(inputs.positions)),
            tile_rows,
        };
        let (heads, shared) = (plan.shape.heads(), plan.shape.key_value_heads());
        let sides = [
            tiled(inputs.q, heads, inputs.q_stride, queries),
            tiled(inputs.k, shared, inputs.k_stride, KEY_ROWS),
            tiled(inputs.v, shared, inputs.v_stride, KEY_ROWS),
            tiled(rows.dout, heads, rows.dout_stride, queries),
        ];
        let is_near =
            |side: &TiledRows| side.row_bytes.max(side.sample_bytes) < TiledRows::MOST_BYTES;
        if inputs.wide == 0 || !sides.iter().all(is_near) {
            return Ok(None);
        }
        let mut maps = [TileMap::zeroed(); 4];
        for (map, side) in maps.iter_mut().zip(&sides) {
            let Some(found) = self.driver.tile_map(side)? else { return Ok(None) };
            *map = found;
        }
        Ok(Some(maps))
    }
}
