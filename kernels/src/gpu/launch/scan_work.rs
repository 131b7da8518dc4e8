//! How the blocks of the scans for sixteen states divide their work: `ScanWorkItems` of `scan.h`.
//!
//! 32 channels of a sample are a chain, cut into segments. Chains need no cut if every
//! multiprocessor has equally many of them; otherwise, or if the last blocks would run alone,
//! segments let idle multiprocessors help. The cut of a chain changes no bit, so it may depend on
//! the size of the batch and of the device.

use bytemuck::{Pod, Zeroable};

use crate::error::Result;
use crate::gpu::driver::{Address, DeviceProperties};
use crate::gpu::launch::KernelName;
use crate::gpu::launch::scan::{BLOCK_CHANNELS, SCAN_THREADS, count};
use crate::shape::ScanShape;

/// Segments are whole tiles of either kernel.
const TILE: usize = 32;
/// Segments of a chain where some multiprocessors would have a chain more than others.
const UNEVEN_SEGMENTS: usize = 16;
/// Segments of a chain, backward, where there are more chains than blocks at once.
const MANY_SEGMENTS: usize = 4;
/// Numbers that a thread hands on to its chain's next segment.
const CARRIED: usize = 16;

/// `ScanWorkItems` of `scan.h`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct WorkItems {
    words: Address,
    chains: u32,
    segments: u32,
    positions: u32,
    unused: u32,
}

impl WorkItems {
    /// For the kernels of any states, which do not take work items.
    pub(super) const NONE: Self =
        Self { words: Address::NULL, chains: 0, segments: 0, positions: 0, unused: 0 };
}

/// The number of blocks that run on a device at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) multiprocessors: usize,
    /// Blocks that a multiprocessor has room for, or should have where segments wait for each other.
    pub(super) resident_blocks: usize,
}

impl Room {
    /// For blocks of `shared_bytes`, whose registers alone would let `by_registers` of them share a compute unit of AMD's,
    /// where a block may have all the shared memory that its unit has.
    pub(super) fn new(device: &DeviceProperties, shared_bytes: usize, by_registers: usize) -> Self {
        let resident_blocks = match device.warp {
            // An NVIDIA multiprocessor has registers for three blocks of 128 threads with 168 registers each.
            32 => 3,
            _ => (device.shared_bytes_per_block / shared_bytes).clamp(1, by_registers),
        };
        Self { multiprocessors: device.multiprocessors as usize, resident_blocks }
    }
}

/// The cut of chains into segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) chains: usize,
    segments: usize,
    /// Positions of a segment.
    positions: usize,
}

impl Cut {
    pub(super) fn forward(shape: ScanShape, room: Room) -> Self {
        Self::new(shape, room, 1)
    }

    pub(super) fn backward(shape: ScanShape, room: Room) -> Self {
        Self::new(shape, room, MANY_SEGMENTS)
    }

    /// `many`: segments where chains are more than blocks at once.
    fn new(shape: ScanShape, room: Room, many: usize) -> Self {
        let Room { multiprocessors, resident_blocks } = room;
        let chains = shape.sequences().samples() * shape.channels().div_ceil(BLOCK_CHANNELS);
        let wanted = if chains > resident_blocks * multiprocessors {
            many
        } else if chains <= multiprocessors || chains.is_multiple_of(multiprocessors) {
            1
        } else {
            UNEVEN_SEGMENTS
        };
        let all = shape.sequences().positions();
        let positions = all.div_ceil(wanted).next_multiple_of(TILE);
        Self { chains, segments: all.div_ceil(positions), positions }
    }

    pub(super) fn item_count(self) -> usize {
        self.chains * self.segments
    }

    /// Blocks of a forward scan, each of which takes work items until none is left. Where items wait for others, every
    /// multiprocessor has equally many blocks and no more than needed, so that waiting blocks are spread evenly.
    pub(super) fn forward_blocks(self, room: Room) -> usize {
        let rounds = self.chains.div_ceil(room.multiprocessors);
        if rounds > room.resident_blocks {
            return self.item_count();
        }
        self.item_count().min(rounds * room.multiprocessors)
    }

    /// Bytes of the values that segments hand on.
    pub(super) fn carried_bytes(self) -> usize {
        let chains = if self.segments > 1 { self.chains } else { 0 };
        chains * SCAN_THREADS * CARRIED * size_of::<f32>()
    }

    pub(super) fn work_items(self, kernel: KernelName, words: Address) -> Result<WorkItems> {
        count(kernel, "turns", self.item_count())?;
        Ok(WorkItems {
            words,
            chains: count(kernel, "chains", self.chains)?,
            segments: count(kernel, "segments", self.segments)?,
            positions: count(kernel, "positions of a segment", self.positions)?,
            unused: 0,
        })
    }
}
