//! How the blocks of the scans for sixteen states share out their work: `ScanTurns` of `scan.h`.
//!
//! 32 channels of a sample are a chain, cut into segments. A chain needs no cut where every multiprocessor has as many of them
//! as any other; where it has not, or where the last blocks would run alone, segments let the others help. How a
//! chain is cut changes no bit, so it may follow from the size of the batch and of the device.

use bytemuck::{Pod, Zeroable};

use crate::error::Result;
use crate::gpu::driver::Address;
use crate::gpu::launch::KernelName;
use crate::gpu::launch::scan::{BLOCK_CHANNELS, SCAN_THREADS, count};
use crate::shape::ScanShape;

/// Segments are whole tiles of either kernel.
const TILE: usize = 32;
/// Blocks of either kernel that a multiprocessor has room for, or should have where there are turns to wait for.
const RESIDENT_BLOCKS: usize = 3;
/// Segments of a chain where some multiprocessors would have a chain more than others.
const UNEVEN_SEGMENTS: usize = 16;
/// Segments of a chain, backward, where there are more chains than blocks at once.
const MANY_SEGMENTS: usize = 4;
/// Numbers that a thread hands on to its chain's next turn.
const CARRIED: usize = 16;

/// `ScanTurns` of `scan.h`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct Turns {
    words: Address,
    chains: u32,
    segments: u32,
    positions: u32,
    unused: u32,
}

impl Turns {
    /// For the kernels of any states, which take none.
    pub(super) const NONE: Self =
        Self { words: Address::NULL, chains: 0, segments: 0, positions: 0, unused: 0 };
}

/// How chains are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) chains: usize,
    segments: usize,
    /// Positions of a segment.
    positions: usize,
}

impl Cut {
    pub(super) fn forward(shape: ScanShape, multiprocessors: usize) -> Self {
        Self::new(shape, multiprocessors, 1)
    }

    pub(super) fn backward(shape: ScanShape, multiprocessors: usize) -> Self {
        Self::new(shape, multiprocessors, MANY_SEGMENTS)
    }

    /// `many`: segments where chains are more than blocks at once.
    fn new(shape: ScanShape, multiprocessors: usize, many: usize) -> Self {
        let chains = shape.sequences().samples() * shape.channels().div_ceil(BLOCK_CHANNELS);
        let wanted = if chains > RESIDENT_BLOCKS * multiprocessors {
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

    /// Turns in all.
    pub(super) fn turn_count(self) -> usize {
        self.chains * self.segments
    }

    /// Blocks of a forward scan, each of which takes turns until there are none. Where turns wait for others, every
    /// multiprocessor has equally many blocks and no more than needed, so that those which wait are spread evenly.
    pub(super) fn forward_blocks(self, multiprocessors: usize) -> usize {
        let rounds = self.chains.div_ceil(multiprocessors);
        if rounds > RESIDENT_BLOCKS {
            return self.turn_count();
        }
        self.turn_count().min(rounds * multiprocessors)
    }

    /// Bytes of what turns hand on.
    pub(super) fn carried_bytes(self) -> usize {
        let chains = if self.segments > 1 { self.chains } else { 0 };
        chains * SCAN_THREADS * CARRIED * size_of::<f32>()
    }

    pub(super) fn turns(self, kernel: KernelName, words: Address) -> Result<Turns> {
        count(kernel, "turns", self.turn_count())?;
        Ok(Turns {
            words,
            chains: count(kernel, "chains", self.chains)?,
            segments: count(kernel, "segments", self.segments)?,
            positions: count(kernel, "positions of a segment", self.positions)?,
            unused: 0,
        })
    }
}
