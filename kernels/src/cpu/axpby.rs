//! Scaled sums of elements.

use super::device_stream::ComputeThreads;
use super::dispatch::{Dispatch, Kernel};
use super::simd::{LANES, Simd};

/// `out = keep out + factor x`, of slices of one length.
pub(crate) fn axpby(
    threads: &ComputeThreads,
    dispatch: Dispatch,
    out: &mut [f32],
    keep: f32,
    factor: f32,
    x: &[f32],
) {
    let share = threads.share(out.len().div_ceil(LANES)) * LANES;
    let parts = out.chunks_mut(share).zip(x.chunks(share));
    let parts = parts.map(|(out, x)| Axpby { out, keep, factor, x });
    threads.for_each(parts, |part| dispatch.run(part));
}

struct Axpby<'a> {
    out: &'a mut [f32],
    keep: f32,
    factor: f32,
    x: &'a [f32],
}

impl Kernel for Axpby<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (keep, factor) = (s.splat(self.keep), s.splat(self.factor));
        let overwrites = self.keep == 0.0;
        for (out, x) in self.out.chunks_mut(LANES).zip(self.x.chunks(LANES)) {
            let scaled = s.mul(s.load_row(x), factor);
            let sum = if overwrites { scaled } else { s.mul_add(s.load_row(out), keep, scaled) };
            s.store_row(out, sum);
        }
    }
}
