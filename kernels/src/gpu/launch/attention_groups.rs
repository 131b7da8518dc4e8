//! Attention, forward, where groups of warps multiply together: `attention_forward_groups.h`.
//!
//! A block for each multiprocessor takes one item of work after the other; which block takes which
//! changes no bit. If rows are aligned, the copy engine loads them by tile maps, else threads load
//! them, with the same bits.

use bytemuck::{Pod, Zeroable};

use super::KernelName;
use super::attention::{Forward, HeadWidth, Plan};
use super::sizes::{blocks, size32, stride_bytes};
use crate::error::Result;
use crate::gpu::driver::{Address, Driver, Launch, TileMap, TiledRows};
use crate::gpu::precision::Precision;
use crate::gpu::source::Source;
use crate::gpu::stream::ScratchSlot;
use crate::gpu::{Gpu, GpuStream};

/// Elements that a thread stores at once where rows are aligned to them.
pub(super) const STORED_ELEMENTS: u64 = 8;
/// Three groups of four warps of 32.
const THREADS: u32 = 384;
/// Queries of an item.
const ROWS: u32 = 128;
/// Keys or values of a tile.
const KEYS: u32 = 128;
/// The least scale of scores that biases are added to.
const LEAST_SCALE: f32 = 1e-30;
/// `SlopeFactor::ELEMENTS`.
const SLOPE_ELEMENTS: usize = 128;
/// `KeyNumbers::TERMS`.
const KEY_NUMBER_TERMS: usize = 8;
/// `PANEL_ALIGNMENT` of group_product.h: results begin at a multiple of this.
const PANEL_ALIGNMENT: usize = 1024;
/// Bytes of keys and values that are walked at a time: what a cache holds beside all else.
const SECTION_BYTES: u64 = 16 << 20;

/// `groups::Arguments` of attention_groups.h.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Groups {
    q_map: TileMap,
    k_map: TileMap,
    v_map: TileMap,
    attention: Forward,
    taken: Address,
    section: u32,
    pairs: u32,
    by_engine: u32,
    unused: [u32; 3],
}

/// A kernel, and the dynamic shared memory of its block: queries; rings of tiles; gates, marks, the item's description and the factors of
/// biases, for which the kernels without slopes have room too: two slopes and the numbers of a tile's keys; and results on their way out.
fn kernel(head_width: HeadWidth, has_slopes: bool) -> (&'static Source, KernelName, usize) {
    let ([plain, with_slopes], key_stages, value_stages) = match head_width {
        HeadWidth::Of64 => {
            (["attention_forward_groups_64", "attention_forward_groups_slopes_64"], 4, 4)
        }
        _ => (["attention_forward_groups_128", "attention_forward_groups_slopes_128"], 2, 3),
    };
    let name = if has_slopes { with_slopes } else { plain };
    let rows = 2 * ROWS as usize + (key_stages + value_stages) * KEYS as usize;
    let gates = (2 + 2 * key_stages + 3 * value_stages) * size_of::<u64>();
    let gates_and_item = (gates + value_stages * size_of::<u32>()).next_multiple_of(16) + 32;
    let factors = 2 * SLOPE_ELEMENTS + KEYS as usize * KEY_NUMBER_TERMS;
    let state = gates_and_item + factors * size_of::<half::bf16>();
    let tiles = rows * head_width.columns() * size_of::<half::bf16>();
    (head_width.forward(has_slopes), name, tiles + state.next_multiple_of(PANEL_ALIGNMENT))
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// Enqueues the forward kernel of groups.
    ///
    /// # Safety
    /// As for the other: what `forward` names must be as large as `plan` says.
    pub(super) unsafe fn launch_attention_groups(
        &self,
        stream: &mut GpuStream<D>,
        plan: &Plan,
        mut forward: Forward,
    ) -> Result<()> {
        let tiles = forward.inputs.positions.div_ceil(ROWS);
        let pairs = plan.shape.sequences().samples() * plan.shape.heads();
        // The items are counted up to this number, and once more by each block at the end.
        let device = self.driver.properties();
        let items = pairs * tiles as usize;
        size32(plan.kernel, "items of work", items + device.multiprocessors as usize)?;
        forward.inputs.tiles = tiles;
        let has_slopes = forward.inputs.slopes != Address::NULL;
        if has_slopes {
            // Slopes are divided by it. With a smaller one, scores would change no probability either way.
            let scale = forward.inputs.scale;
            forward.inputs.scale = scale.abs().max(LEAST_SCALE).copysign(scale);
        }
        let maps = self.maps(plan, &forward)?;
        let row_bytes = 2 * stride_bytes::<P::Activation>(u64::from(forward.inputs.width));
        let section = SECTION_BYTES / (row_bytes * u64::from(forward.inputs.keys));
        let by_engine = u32::from(maps.is_some());
        let [q_map, k_map, v_map] = maps.unwrap_or_else(Zeroable::zeroed);
        let arguments = Groups {
            q_map,
            k_map,
            v_map,
            attention: forward,
            taken: stream.scratch(&self.driver, ScratchSlot::Taken, size_of::<u32>())?,
            section: section.clamp(1, pairs as u64) as u32,
            pairs: pairs as u32,
            by_engine,
            unused: [0; 3],
        };
        let (source, name, shared_bytes) = kernel(plan.head_width(), has_slopes);
        let resident = items.min(device.multiprocessors as usize);
        let launch = Launch { shared_bytes, ..blocks(plan.kernel, resident, THREADS)? };
        // SAFETY: the caller's; the count is this kernel's alone.
        unsafe { self.launch(stream, source, name, launch, arguments) }
    }

    /// How the copy engine finds queries, keys and values; nothing where it cannot.
    fn maps(&self, plan: &Plan, forward: &Forward) -> Result<Option<[TileMap; 3]>> {
        let inputs = &forward.inputs;
        let bytes = stride_bytes::<P::Activation>;
        let rows =
            |address, rows: u32, heads: usize, row_stride, sample_stride, tile_rows| TiledRows {
                address,
                columns: u64::from(inputs.width),
                rows: u64::from(rows),
                heads: heads as u64,
                samples: plan.shape.sequences().samples() as u64,
                row_bytes: bytes(row_stride),
                head_bytes: bytes(u64::from(inputs.width)),
                sample_bytes: bytes(sample_stride),
                tile_rows,
            };
        let q_sample = inputs.q_stride * u64::from(inputs.positions);
        let (heads, shared) = (plan.shape.heads(), plan.shape.key_value_heads());
        let sides = [
            rows(inputs.q, inputs.positions, heads, inputs.q_stride, q_sample, ROWS),
            rows(inputs.k, inputs.keys, shared, inputs.k_stride, inputs.k_sample, KEYS),
            rows(inputs.v, inputs.keys, shared, inputs.v_stride, inputs.v_sample, KEYS),
        ];
        let is_near =
            |side: &TiledRows| side.row_bytes.max(side.sample_bytes) < TiledRows::MOST_BYTES;
        if inputs.wide == 0 || !sides.iter().all(is_near) {
            return Ok(None);
        }
        let mut maps = [TileMap::zeroed(); 3];
        for (map, side) in maps.iter_mut().zip(&sides) {
            let Some(found) = self.driver.tile_map(side)? else { return Ok(None) };
            *map = found;
        }
        Ok(Some(maps))
    }
}
