//! The checked shape of the scan of heads.

use super::{GrainRows, PADDING, SequenceShape, at_least_one, countable};
use crate::error::{KernelError, Result};

const KERNEL: &str = "head_scan";

/// The sizes of the scan of heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadScanSizes {
    /// h, each with a decay of its own.
    pub heads: usize,
    /// p, the channels of a head; e = h p.
    pub head_width: usize,
    /// g, groups of neighbouring heads that share B and C.
    pub groups: usize,
    /// n, the states of a channel.
    pub states: usize,
}

/// The scan of Mamba-2 (Dao and Gu, 2024).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadScanShape {
    sequences: SequenceShape,
    samples_per_grain: usize,
    sizes: HeadScanSizes,
}

impl HeadScanShape {
    /// A scan of `sizes`.
    ///
    /// # Errors
    /// A size of zero, heads of more than 256 channels, more than 256 states, groups that do not divide the heads, or more
    /// elements than can be counted.
    pub fn new(
        sequences: SequenceShape,
        samples_per_grain: usize,
        sizes: HeadScanSizes,
    ) -> Result<Self> {
        let HeadScanSizes { heads, head_width, groups, states } = sizes;
        at_least_one(KERNEL, "samples per grain", samples_per_grain)?;
        at_least_one(KERNEL, "heads", heads)?;
        for (what, size) in [("head width", head_width), ("states", states)] {
            if !(1..=256).contains(&size) {
                return Err(KernelError::shape(KERNEL, what, "1 to 256", size));
            }
        }
        if groups == 0 || !heads.is_multiple_of(groups) {
            let expected = format!("a divisor of the {heads} heads");
            return Err(KernelError::shape(KERNEL, "groups", expected, groups));
        }
        // The buffers of kernels have positions, channels and states rounded up to whole tiles.
        let [t, p, n] =
            [sequences.positions(), head_width, states].map(|size| size.saturating_add(PADDING));
        countable(KERNEL, "elements", &[sequences.samples(), t, heads, p, n])?;
        let samples = samples_per_grain.min(sequences.samples());
        Ok(Self { sequences, samples_per_grain: samples, sizes })
    }

    /// b and t.
    pub fn sequences(self) -> SequenceShape {
        self.sequences
    }

    /// Samples of every grain but perhaps the last; at most b.
    pub fn samples_per_grain(self) -> usize {
        self.samples_per_grain
    }

    /// h.
    pub fn heads(self) -> usize {
        self.sizes.heads
    }

    /// p, the channels of a head.
    pub fn head_width(self) -> usize {
        self.sizes.head_width
    }

    /// e = h p, the channels of all heads.
    pub fn width(self) -> usize {
        self.sizes.heads * self.sizes.head_width
    }

    /// g, the groups of heads that share B and C.
    pub fn groups(self) -> usize {
        self.sizes.groups
    }

    /// n, the states of a channel.
    pub fn states(self) -> usize {
        self.sizes.states
    }

    /// 2 g n, the columns of B and C of all groups.
    pub fn bc_width(self) -> usize {
        2 * self.sizes.groups * self.sizes.states
    }

    /// c = e + 2 g n, the columns of x, B and C.
    pub fn xbc_width(self) -> usize {
        self.width() + self.bc_width()
    }

    /// e + c + h, the columns of z, of what becomes x, B and C, and of the raw step sizes.
    pub fn projected_width(self) -> usize {
        self.width() + self.xbc_width() + self.sizes.heads
    }

    /// The grains, counted in rows.
    pub fn grains(self) -> GrainRows {
        GrainRows {
            rows: self.sequences.rows(),
            rows_per_grain: self.samples_per_grain * self.sequences.positions,
        }
    }
}
