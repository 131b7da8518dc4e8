//! Lion over a chunk of parameters.

use super::dispatch::Kernel;
use super::rows::{elements_mut, exactly, exactly_mut};
use super::simd::{LANES, Simd};
use super::{Cpu, DeviceStream};
use crate::backend::{self, LionStep};
use crate::error::Result;
use crate::master::MasterMut;
use crate::view::{Slice, SliceMut};

/// 2^75, twice: what makes the smallest number above 0 one above 1.
const LARGE: f32 = f32::from_bits((127 + 75) << 23);

impl backend::Lion for Cpu {
    fn lion(
        &self,
        stream: &mut DeviceStream,
        master: MasterMut<'_, Cpu>,
        exp_avg: SliceMut<'_, Cpu, f32>,
        gradient: Slice<'_, Cpu, f32>,
        step: LionStep,
    ) -> Result<()> {
        const KERNEL: &str = "lion";
        let threads = stream.threads();
        let parameters = elements_mut(master.rounded);
        let count = parameters.len();
        let exp_avg = exactly_mut(KERNEL, "exp_avg", exp_avg, count)?;
        let gradient = exactly(KERNEL, "gradient", gradient, count)?;
        let share = threads.share(count.div_ceil(LANES)) * LANES;
        let parts = parameters.chunks_mut(share).zip(exp_avg.chunks_mut(share));
        let parts = parts.zip(gradient.chunks(share));
        let parts = parts.map(|((parameters, exp_avg), gradient)| Lion {
            parameters,
            exp_avg,
            gradient,
            step,
        });
        threads.for_each(parts, |part| self.dispatch.run(part));
        Ok(())
    }
}

/// One update; all slices have one length.
struct Lion<'a> {
    parameters: &'a mut [f32],
    exp_avg: &'a mut [f32],
    gradient: &'a [f32],
    step: LionStep,
}

/// The sign of x: -1, 0 or 1; NaN for NaN.
#[inline(always)]
fn sign<S: Simd>(s: S, x: S::Vector) -> S::Vector {
    let (one, large) = (s.splat(1.0), s.splat(LARGE));
    // If either operand is a NaN, the comparison is false and the second operand is taken.
    let magnitude = s.min(one, s.mul(s.mul(s.abs(x), large), large));
    s.mul(s.select_by_sign(x, one, s.splat(-1.0)), magnitude)
}

impl Kernel for Lion<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let step = self.step;
        let [beta1, beta2] = [step.beta1, step.beta2].map(|beta| s.splat(beta));
        let [rest1, rest2] = [step.beta1, step.beta2].map(|beta| s.splat(1.0 - beta));
        let decay = s.splat(step.decay_factor);
        let learning_rate = s.splat(step.learning_rate);
        let scale = s.splat(step.gradient_scale);
        let rows = self
            .parameters
            .chunks_mut(LANES)
            .zip(self.exp_avg.chunks_mut(LANES))
            .zip(self.gradient.chunks(LANES));
        for ((p, m), g) in rows {
            let gradient = s.mul(s.load_row(g), scale);
            let average = s.load_row(m);
            let direction = s.mul_add(average, beta1, s.mul(gradient, rest1));
            s.store_row(m, s.mul_add(average, beta2, s.mul(gradient, rest2)));
            let decayed = s.mul(s.load_row(p), decay);
            s.store_row(p, s.neg_mul_add(learning_rate, sign(s, direction), decayed));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::InstructionSet;
    use crate::cpu::dispatch::Dispatch;

    struct Signs<'a>(&'a mut [f32]);

    impl Kernel for Signs<'_> {
        type Output = ();

        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for row in self.0.chunks_mut(LANES) {
                s.store_row(row, sign(s, s.load_row(row)));
            }
        }
    }

    #[test]
    fn the_sign_of_every_kind_of_number() {
        let _standard = crate::FloatEnvironment::standard();
        let above = [f32::from_bits(1), f32::MIN_POSITIVE, 1e-20, 1.0, f32::MAX, f32::INFINITY];
        let numbers: Vec<f32> =
            above.iter().flat_map(|&x| [x, -x]).chain([0.0, -0.0, f32::NAN]).collect();
        for dispatch in InstructionSet::ALL.into_iter().flat_map(Dispatch::new) {
            let mut signs = numbers.clone();
            dispatch.run(Signs(&mut signs));
            for (sign, number) in signs.iter().zip(&numbers) {
                let expected = if *number == 0.0 { *number } else { number.signum() };
                assert_eq!(sign.is_nan(), number.is_nan());
                assert!(number.is_nan() || sign.to_bits() == expected.to_bits(), "{number:e}");
            }
        }
    }
}
