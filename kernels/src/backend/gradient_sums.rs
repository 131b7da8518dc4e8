//! Sums of gradients, their means, and sums of their squares.

use super::Runtime;
use crate::error::Result;
use crate::view::{Slice, SliceMut};

/// Sums and means of gradients, between the backward pass and the update. See the [module](super) for what every kernel promises.
pub trait GradientSums: Runtime {
    /// `lane[i] = lane[i] + gradients[g, i]` for each grain g in order; `gradients` is
    /// `[grains, lane.elements]`.
    fn accumulate(
        &self,
        stream: &mut Self::DeviceStream,
        lane: SliceMut<'_, Self, f32>,
        gradients: Slice<'_, Self, f32>,
    ) -> Result<()>;

    /// The mean gradient of a chunk of parameters, from the sums of its uses, in the place of the first:
    /// `sums[first + i] = (sums[first + i] + sums[others[0] + i] + ...) / count` for i below `elements`. All else in `sums` stays.
    ///
    /// `count` is the number of counted tokens as the nearest `f32`: itself to 2^24, above it off by one in 2^24 parts at the
    /// most. It is the same on every worker, so that no bit depends on which worker divides.
    ///
    /// # Errors
    /// A use that leaves `sums`, or overlaps another.
    fn mean_gradient(
        &self,
        stream: &mut Self::DeviceStream,
        sums: SliceMut<'_, Self, f32>,
        first: usize,
        others: &[usize],
        elements: usize,
        count: f32,
    ) -> Result<()>;

    /// `out[i]` = the sum of squares of range i of `x`: the ranges follow each other and end at `ends`, `0..ends[0]`,
    /// `ends[0]..ends[1]` and so on; the last end is `x.elements()`. Each is formed in f64 over a
    /// fixed tree that depends on the range's length alone.
    fn sums_of_squares(
        &self,
        stream: &mut Self::DeviceStream,
        out: SliceMut<'_, Self, f64>,
        x: Slice<'_, Self, f32>,
        ends: &[usize],
    ) -> Result<()>;
}
