//! Sums of gradients: host functions on plain slices, and the kernels over them.

use super::dispatch::{Dispatch, Kernel};
use super::rows::{elements, elements_mut, exactly_mut};
use super::simd::{LANES, Simd};
use super::{Cpu, DeviceStream};
use crate::backend::{GradientSums, check_uses};
use crate::error::{KernelError, Result};
use crate::view::{Slice, SliceMut};

/// Elements that a thread sums at a time: few enough for the sum to stay in the nearest cache while
/// all terms are added.
const PIECE: usize = 4096;

/// `out[i] = out[i] + x[i]`.
///
/// # Panics
/// Slices of different lengths.
pub fn add_assign(out: &mut [f32], x: &[f32]) {
    assert_eq!(out.len(), x.len(), "add_assign needs slices of one length");
    Dispatch::best().run(AddAssign { out, x });
}

/// [`add_assign`] as a kernel.
pub(crate) struct AddAssign<'a> {
    pub(crate) out: &'a mut [f32],
    pub(crate) x: &'a [f32],
}

impl Kernel for AddAssign<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (outs, out) = self.out.as_chunks_mut::<LANES>();
        let (xs, x) = self.x.as_chunks::<LANES>();
        for (out, x) in outs.iter_mut().zip(xs) {
            let sum = s.add(s.load(out), s.load(x));
            s.store(out, sum);
        }
        let sum = s.add(s.load_row(out), s.load_row(x));
        s.store_row(out, sum);
    }
}

impl GradientSums for Cpu {
    fn accumulate(
        &self,
        stream: &mut DeviceStream,
        lane: SliceMut<'_, Cpu, f32>,
        gradients: Slice<'_, Cpu, f32>,
    ) -> Result<()> {
        let threads = stream.threads();
        let (lane, gradients) = (elements_mut(lane), elements(gradients));
        let width = lane.len();
        if width == 0 || !gradients.len().is_multiple_of(width) {
            return Err(KernelError::shape(
                "accumulate",
                "gradients",
                format!("a multiple of the lane's {width} elements"),
                gradients.len(),
            ));
        }
        let share = threads.share(width.div_ceil(PIECE)) * PIECE;
        threads.for_each(lane.chunks_mut(share).enumerate(), |(part, lane)| {
            for (piece, lane) in lane.chunks_mut(PIECE).enumerate() {
                let first = part * share + piece * PIECE;
                for gradient in gradients.chunks_exact(width) {
                    let x = &gradient[first..][..lane.len()];
                    self.dispatch.run(AddAssign { out: &mut *lane, x });
                }
            }
        });
        Ok(())
    }

    fn mean_gradient(
        &self,
        _: &mut DeviceStream,
        sums: SliceMut<'_, Cpu, f32>,
        first: usize,
        others: &[usize],
        elements: usize,
        count: f32,
    ) -> Result<()> {
        let sums = elements_mut(sums);
        check_uses(first, others, elements, sums.len())?;
        self.dispatch.run(MeanGradient { sums, first, others, elements, count });
        Ok(())
    }

    fn sums_of_squares(
        &self,
        stream: &mut DeviceStream,
        out: SliceMut<'_, Cpu, f64>,
        x: Slice<'_, Cpu, f32>,
        ends: &[usize],
    ) -> Result<()> {
        const KERNEL: &str = "sums_of_squares";
        let (x, sums) = (elements(x), exactly_mut(KERNEL, "out", out, ends.len())?);
        let last = ends.last().copied().unwrap_or(0);
        if last != x.len() {
            return Err(KernelError::shape(KERNEL, "the last end", x.len(), last));
        }
        let mut ranges = Vec::with_capacity(ends.len());
        let mut start = 0;
        for (&end, sum) in ends.iter().zip(sums) {
            let Some(range) = x.get(start..end) else {
                let expected = format!("an end from {start} to {}", x.len());
                return Err(KernelError::shape(KERNEL, "ends", expected, end));
            };
            ranges.push((range, sum));
            start = end;
        }
        stream.threads().for_each(ranges.into_iter(), |(range, sum)| {
            *sum = self.dispatch.run(SumOfSquares(range))
        });
        Ok(())
    }
}

/// [`mean_gradient`], where every use lies inside `sums`.
struct MeanGradient<'a> {
    sums: &'a mut [f32],
    first: usize,
    others: &'a [usize],
    elements: usize,
    count: f32,
}

impl Kernel for MeanGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let count = s.splat(self.count);
        for start in (0..self.elements).step_by(LANES) {
            let width = LANES.min(self.elements - start);
            let mut sum = s.load_row(&self.sums[self.first + start..][..width]);
            for other in self.others {
                sum = s.add(sum, s.load_row(&self.sums[other + start..][..width]));
            }
            s.store_row(&mut self.sums[self.first + start..][..width], s.div(sum, count));
        }
    }
}

/// The sum of squares of a slice: sixteen chains in `f64`, then one tree.
struct SumOfSquares<'a>(&'a [f32]);

impl Kernel for SumOfSquares<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f64 {
        let mut sums = s.zero_doubles();
        for x in self.0.chunks(LANES) {
            sums = s.add_squares(sums, s.load_row(x));
        }
        let mut lanes = s.doubles(sums);
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
        }
        lanes[0]
    }
}
