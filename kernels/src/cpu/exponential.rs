//! The exponential and its relatives: one polynomial each, the same on every instruction set.
//!
//! Results are never denormal (denormals would slow every later product down): [`exp2_each`] and
//! [`exp`] saturate at 2^-126, which acts as zero in every sum of this crate. NaN stays NaN.
//! Errors, measured against `f64` by the tests below, in units in the last place:
//!
//! | exp2 | exp | sigmoid | x sigmoid(x) | softplus |
//! |---|---|---|---|---|
//! | 2.1 | 0.9 | 2.5 | 2.9 | 3.4 |

use std::f32::consts::LOG2_E;

use super::simd::Simd;

/// Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
const ROUND: f32 = 12_582_912.0;
/// The least argument of [`exp2_each`]: 2^-126 is the least normal number.
const LEAST_POWER: f32 = -126.0;
/// exp(+-87.33) and their reciprocals are normal numbers.
const GREATEST_EXPONENT: f32 = 87.33;

/// 2^f, relative minimax on [-0.5, 0.5]; the second is near ln 2, but not ln 2.
const EXP2: [f32; 6] =
    [1.0, f32::from_bits(0x3f31_7215), 0.240_222_42, 0.055_507_34, 0.009_671_51, 0.001_326_47];
/// e^f, relative minimax on [-ln 2 / 2, ln 2 / 2].
const EXP: [f32; 7] =
    [1.0, 1.0, 0.499_999_93, 0.166_665_21, 0.041_668_39, 0.008_368_71, 0.001_381_46];
/// 2 atanh(s) / s in powers of s^2, on [0, 1/9].
const ATANH: [f32; 5] = [2.0, 0.666_664_2, 0.400_215_27, 0.280_017_94, 0.280_120_5];
/// ln 2 in two parts: the first has few enough bits that its product with an integer is exact.
const LN_2_HIGH: f32 = 0.693_145_75;
const LN_2_LOW: f32 = 1.428_606_8e-6;

/// 2^x of K independent vectors for x <= 127.
///
/// Breadth first: a chain of dependent operations for each vector in turn would starve a
/// processor's scheduler, which sees only about a hundred operations ahead.
#[inline(always)]
pub(crate) fn exp2_each<S: Simd, const K: usize>(s: S, mut x: [S::Vector; K]) -> [S::Vector; K] {
    let round = s.splat(ROUND);
    let mut r = x;
    let mut p = x;
    for x in &mut x {
        *x = s.max(s.splat(LEAST_POWER), *x);
    }
    for i in 0..K {
        r[i] = s.add(x[i], round);
    }
    for i in 0..K {
        p[i] = s.sub(r[i], round);
    }
    for i in 0..K {
        x[i] = s.sub(x[i], p[i]);
    }
    for i in 0..K {
        p[i] = s.mul_add(x[i], s.splat(EXP2[5]), s.splat(EXP2[4]));
    }
    for i in 0..K {
        p[i] = s.mul_add(p[i], x[i], s.splat(EXP2[3]));
    }
    for i in 0..K {
        p[i] = s.mul_add(p[i], x[i], s.splat(EXP2[2]));
    }
    for i in 0..K {
        p[i] = s.mul_add(p[i], x[i], s.splat(EXP2[1]));
    }
    for i in 0..K {
        p[i] = s.mul_add(p[i], x[i], s.splat(EXP2[0]));
    }
    for i in 0..K {
        p[i] = s.scale_by_power(p[i], r[i]);
    }
    p
}

/// e^x, saturating at e^+-87.33.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::Vector) -> S::Vector {
    let x = s.max(s.splat(-GREATEST_EXPONENT), s.min(s.splat(GREATEST_EXPONENT), x));
    let round = s.splat(ROUND);
    let r = s.mul_add(x, s.splat(LOG2_E), round);
    let k = s.sub(r, round);
    let f = s.neg_mul_add(k, s.splat(LN_2_HIGH), x);
    let f = s.neg_mul_add(k, s.splat(LN_2_LOW), f);
    let mut p = s.mul_add(f, s.splat(EXP[6]), s.splat(EXP[5]));
    p = s.mul_add(p, f, s.splat(EXP[4]));
    p = s.mul_add(p, f, s.splat(EXP[3]));
    p = s.mul_add(p, f, s.splat(EXP[2]));
    p = s.mul_add(p, f, s.splat(EXP[1]));
    p = s.mul_add(p, f, s.splat(EXP[0]));
    s.scale_by_power(p, r)
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(s: S, x: S::Vector) -> S::Vector {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.splat(0.0), x))))
}

/// `(softplus(x), sigmoid(x))`: ln(1 + e^x) and its derivative, from one exponential.
#[inline(always)]
pub(crate) fn softplus_and_slope<S: Simd>(s: S, x: S::Vector) -> (S::Vector, S::Vector) {
    let one = s.splat(1.0);
    let zero = s.splat(0.0);
    let u = exp(s, s.sub(zero, s.abs(x)));
    // ln(1 + u) = 2 atanh(u / (u + 2)), which keeps full precision for small u.
    let q = s.div(u, s.add(u, s.splat(2.0)));
    let q2 = s.mul(q, q);
    let mut p = s.mul_add(q2, s.splat(ATANH[4]), s.splat(ATANH[3]));
    p = s.mul_add(p, q2, s.splat(ATANH[2]));
    p = s.mul_add(p, q2, s.splat(ATANH[1]));
    p = s.mul_add(p, q2, s.splat(ATANH[0]));
    let softplus = s.mul_add(p, q, s.max(zero, x));
    let slope = s.div(s.select_by_sign(x, one, u), s.add(one, u));
    (softplus, slope)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::dispatch::{Dispatch, Kernel};
    use crate::cpu::simd::LANES;
    use crate::cpu::{Cpu, InstructionSet};
    use std::num::NonZeroUsize;

    #[derive(Clone, Copy, Debug)]
    enum Function {
        Exp2,
        Exp,
        Sigmoid,
        Silu,
        Softplus,
        SoftplusSlope,
    }

    struct Map<'a>(Function, &'a [f32]);

    impl Kernel for Map<'_> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Vec<f32> {
            let mut out = vec![f32::NAN; self.1.len()];
            for (out, x) in out.chunks_mut(LANES).zip(self.1.chunks(LANES)) {
                let x = s.load_row(x);
                let y = match self.0 {
                    Function::Exp2 => exp2_each(s, [x])[0],
                    Function::Exp => exp(s, x),
                    Function::Sigmoid => sigmoid(s, x),
                    Function::Silu => s.mul(x, sigmoid(s, x)),
                    Function::Softplus => softplus_and_slope(s, x).0,
                    Function::SoftplusSlope => softplus_and_slope(s, x).1,
                };
                s.store_row(out, y);
            }
            out
        }
    }

    /// Numbers in a range, and all that is special.
    fn arguments(range: f32) -> Vec<f32> {
        let count = 200_001;
        let mut x: Vec<f32> =
            (0..count).map(|i| range * (2.0 * i as f32 / (count - 1) as f32 - 1.0)).collect();
        x.extend((0..1000).map(|i| 1e-6 * i as f32));
        x
    }

    fn best(function: Function, x: &[f32]) -> Vec<f32> {
        Dispatch::best().run(Map(function, x))
    }

    /// The greatest error in units in the last place of the exact result.
    fn greatest_error(function: Function, range: f32, exact: impl Fn(f64) -> f64) -> f64 {
        let x = arguments(range);
        let found = best(function, &x);
        let errors = x.iter().zip(&found).map(|(&x, &found)| {
            let exact = exact(f64::from(x));
            let ulp = f64::from(f32::EPSILON) * exact.abs().log2().floor().exp2();
            let least = f64::from(f32::EPSILON) * f64::from(f32::MIN_POSITIVE);
            (f64::from(found) - exact).abs() / ulp.max(least)
        });
        errors.fold(0.0, f64::max)
    }

    #[test]
    fn errors_are_the_documented_ones() {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
        for (function, error, allowed) in [
            (Function::Exp2, greatest_error(Function::Exp2, 126.0, f64::exp2), 2.1),
            (Function::Exp, greatest_error(Function::Exp, 87.0, f64::exp), 1.0),
            (Function::Sigmoid, greatest_error(Function::Sigmoid, 86.0, sigmoid), 2.6),
            (Function::Silu, greatest_error(Function::Silu, 86.0, |x| x * sigmoid(x)), 3.0),
            (Function::Softplus, greatest_error(Function::Softplus, 86.0, softplus), 3.5),
            (Function::SoftplusSlope, greatest_error(Function::SoftplusSlope, 86.0, sigmoid), 2.6),
        ] {
            assert!(error <= allowed, "{function:?}: {error} ulp over {allowed}");
            assert!(error > 0.1, "{function:?}: {error} ulp: too good to be measured");
        }
    }

    #[test]
    fn extremes_saturate_and_nan_stays() {
        let extremes = [-f32::INFINITY, -1e30, -300.0, f32::NAN, 0.0, -0.0];
        for function in [Function::Exp2, Function::Exp, Function::Sigmoid, Function::Softplus] {
            let y = best(function, &extremes);
            for (x, y) in extremes.into_iter().zip(y) {
                assert_eq!(x.is_nan(), y.is_nan(), "{function:?}({x}) = {y}");
                assert!(!y.is_subnormal(), "{function:?}({x}) = {y:e}");
                assert!(x >= -300.0 || x.is_nan() || y < 1e-37, "{function:?}({x}) = {y:e}");
            }
        }
        let above = best(Function::Softplus, &[100.0, 3e38]);
        assert_eq!(above, [100.0, 3e38]);
        assert_eq!(best(Function::Sigmoid, &[100.0, f32::INFINITY]), [1.0, 1.0]);
    }

    #[test]
    fn instruction_sets_give_the_same_bits() {
        let x = arguments(130.0);
        let one = NonZeroUsize::MIN;
        for function in [
            Function::Exp2,
            Function::Exp,
            Function::Sigmoid,
            Function::Silu,
            Function::Softplus,
            Function::SoftplusSlope,
        ] {
            let portable = Dispatch::new(InstructionSet::Portable).unwrap().run(Map(function, &x));
            for set in InstructionSet::ALL {
                let Ok(cpu) = Cpu::with_instruction_set(one, set) else { continue };
                let found = cpu.dispatch.run(Map(function, &x));
                for ((x, found), expected) in x.iter().zip(found).zip(&portable) {
                    assert_eq!(found.to_bits(), expected.to_bits(), "{function:?}({x}) on {set:?}");
                }
            }
        }
    }
}
