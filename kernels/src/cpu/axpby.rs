//! Scaled sums of elements.

use super::dispatch::Kernel;
use super::rows::{self, elements_mut};
use super::simd::{LANES, Simd};
use super::{Cpu, DeviceStream};
use crate::backend::{Elementwise, Values, ValuesMut, check_axpby};
use crate::error::Result;

impl Elementwise for Cpu {
    fn axpby(
        &self,
        stream: &mut DeviceStream,
        out: ValuesMut<'_, Self>,
        keep: f32,
        factor: f32,
        x: Values<'_, Self>,
    ) -> Result<()> {
        let elements = check_axpby(&out, &x)?;
        let (ValuesMut::Fp32(out) | ValuesMut::Activations(out)) = out;
        let (Values::Fp32(x) | Values::Activations(x)) = x;
        let threads = stream.threads();
        let share = threads.share(elements.div_ceil(LANES)) * LANES;
        let parts = elements_mut(out).chunks_mut(share).zip(rows::elements(x).chunks(share));
        let parts = parts.map(|(out, x)| Axpby { out, keep, factor, x });
        threads.for_each(parts, |part| self.dispatch.run(part));
        Ok(())
    }
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
