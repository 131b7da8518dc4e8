//! GELU (Hendrycks and Gimpel, 2016) and its derivative.
//!
//! The normal distribution is computed from the scaled tail, which keeps full precision far from
//! zero, where erf would cancel (Shepherd and Laframboise, 1981):
//!
//! ```text
//! Phi(-t) = exp(-t^2 / 2) R(t),   R(t) = u P(u),   u = 1 / (1 + t / 4),   t >= 0
//! ```
//!
//! with P a relative minimax polynomial of degree nine on [0, 1], found by Remez' exchange: 3.4e-8. The same exponential
//! makes the density, so that value and derivative cost one.

use super::exponential::{exp, sigmoid};
use super::row_map::{Arguments, MapInputs, Operation, map_rows};
use super::rows::{RowsMut, exactly_mut};
use super::simd::Simd;
use super::{Cpu, DeviceStream};
use crate::backend::{Bias, BiasedGelu, Gelu, GeluGradients};
use crate::error::Result;
use crate::shape::GrainRows;
use crate::view::{Matrix, MatrixMut, Slice};

/// P, the constant first.
const TAIL: [f32; 10] = [
    0.099_735_566,
    0.099_736_43,
    0.093_466_36,
    0.081_603_09,
    0.058_975_27,
    0.063_698_746,
    -0.031_716_872,
    0.095_596_41,
    -0.080_876_94,
    0.019_781_923,
];
/// 1 / sqrt(2 pi).
const DENSITY: f32 = 0.398_942_3;
/// Beyond it every slope is 0 or 1, and squares of x may overflow.
const FLAT: f32 = 16.0;
/// 2 sqrt(2 / pi), and that times 0.044715.
const LINEAR: f32 = 1.595_769;
const CUBIC: f32 = 0.071_354_814;

impl BiasedGelu for Cpu {
    fn gelu_forward(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Cpu, f32>,
        x: Matrix<'_, Cpu, f32>,
        bias: Option<Slice<'_, Cpu, f32>>,
        gelu: Gelu,
    ) -> Result<()> {
        const KERNEL: &str = "gelu_forward";
        let threads = stream.threads();
        let inputs = MapInputs { x: Some(x), dout: None, bias };
        match gelu {
            Gelu::Erf => map_rows(threads, self.dispatch, KERNEL, out, inputs, Value(Erf)),
            Gelu::Tanh => map_rows(threads, self.dispatch, KERNEL, out, inputs, Value(Tanh)),
        }
    }

    fn gelu_backward(
        &self,
        stream: &mut DeviceStream,
        gradients: GeluGradients<'_, Cpu>,
        x: Matrix<'_, Cpu, f32>,
        bias: Option<Slice<'_, Cpu, f32>>,
        grains: GrainRows,
        gelu: Gelu,
    ) -> Result<()> {
        const KERNEL: &str = "gelu_backward";
        let threads = stream.threads();
        let GeluGradients { mut gradient, mut out, mut dbias } = gradients;
        let (rows, width) = (grains.rows(), gradient.columns);
        RowsMut::new(KERNEL, "gradient", gradient.reborrow(), rows, width)?;
        RowsMut::new(KERNEL, "out", out.reborrow(), rows, width)?;
        if let Some(dbias) = &mut dbias {
            exactly_mut(KERNEL, "dbias", dbias.reborrow(), grains.grains() * width)?;
        }
        let inputs = MapInputs { x: Some(x), dout: None, bias };
        let dx = gradient.reborrow();
        match gelu {
            Gelu::Erf => {
                map_rows(threads, self.dispatch, KERNEL, out, inputs, Value(Erf))?;
                map_rows(threads, self.dispatch, KERNEL, dx, inputs, Gradient(Erf))?;
            }
            Gelu::Tanh => {
                map_rows(threads, self.dispatch, KERNEL, out, inputs, Value(Tanh))?;
                map_rows(threads, self.dispatch, KERNEL, dx, inputs, Gradient(Tanh))?;
            }
        }
        match dbias {
            Some(dbias) => self.bias_backward(stream, dbias, gradient.as_matrix(), grains),
            None => Ok(()),
        }
    }
}

/// A function of x, and its derivative.
trait Curve: Copy + Send {
    fn value<S: Simd>(s: S, x: S::Vector) -> S::Vector;
    fn slope<S: Simd>(s: S, x: S::Vector) -> S::Vector;
}

/// x Phi(x).
#[derive(Clone, Copy)]
struct Erf;

/// `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`, where half of `1 + tanh u` is `sigmoid(2 u)`.
#[derive(Clone, Copy)]
struct Tanh;

/// `curve(x)`
#[derive(Clone, Copy)]
struct Value<C>(C);

/// `dout curve'(x)`
#[derive(Clone, Copy)]
struct Gradient<C>(C);

impl<C: Curve> Operation for Value<C> {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, arguments: Arguments<S::Vector>) -> S::Vector {
        C::value(s, arguments.x)
    }
}

impl<C: Curve> Operation for Gradient<C> {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, arguments: Arguments<S::Vector>) -> S::Vector {
        s.mul(arguments.dout, C::slope(s, arguments.x))
    }
}

/// x within +-[`FLAT`]; NaN stays.
#[inline(always)]
fn near<S: Simd>(s: S, x: S::Vector) -> S::Vector {
    s.max(s.splat(-FLAT), s.min(s.splat(FLAT), x))
}

/// `(Phi(x), exp(-x^2 / 2))`
#[inline(always)]
fn normal<S: Simd>(s: S, x: S::Vector) -> (S::Vector, S::Vector) {
    let one = s.splat(1.0);
    let u = s.div(one, s.mul_add(s.abs(x), s.splat(0.25), one));
    let mut p = s.splat(TAIL[9]);
    for coefficient in TAIL[..9].iter().rev() {
        p = s.mul_add(p, u, s.splat(*coefficient));
    }
    let bell = exp(s, s.mul(s.mul(x, s.splat(-0.5)), x));
    let tail = s.mul(s.mul(p, u), bell);
    (s.select_by_sign(x, s.sub(one, tail), tail), bell)
}

impl Curve for Erf {
    #[inline(always)]
    fn value<S: Simd>(s: S, x: S::Vector) -> S::Vector {
        s.mul(x, normal(s, x).0)
    }

    #[inline(always)]
    fn slope<S: Simd>(s: S, x: S::Vector) -> S::Vector {
        let x = near(s, x);
        let (below, bell) = normal(s, x);
        s.mul_add(s.mul(x, s.splat(DENSITY)), bell, below)
    }
}

/// `sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))` for x that is [`near`].
#[inline(always)]
fn tanh_share<S: Simd>(s: S, x: S::Vector) -> S::Vector {
    let square = s.mul(x, x);
    sigmoid(s, s.mul(x, s.mul_add(square, s.splat(CUBIC), s.splat(LINEAR))))
}

impl Curve for Tanh {
    #[inline(always)]
    fn value<S: Simd>(s: S, x: S::Vector) -> S::Vector {
        s.mul(x, tanh_share(s, near(s, x)))
    }

    #[inline(always)]
    fn slope<S: Simd>(s: S, x: S::Vector) -> S::Vector {
        let x = near(s, x);
        let share = tanh_share(s, x);
        let inner = s.mul_add(s.mul(x, x), s.splat(3.0 * CUBIC), s.splat(LINEAR));
        let change = s.mul(share, s.sub(s.splat(1.0), share));
        s.mul_add(s.mul(x, change), inner, share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::dispatch::{Dispatch, Kernel};
    use crate::cpu::simd::LANES;
    use crate::reference::gelu::{gelu, gelu_derivative};

    struct Map<'a, C>(C, &'a [f32]);

    impl<C: Curve> Kernel for Map<'_, C> {
        type Output = [Vec<f32>; 2];

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> [Vec<f32>; 2] {
            let mut out = [(); 2].map(|()| vec![f32::NAN; self.1.len()]);
            let [values, slopes] = &mut out;
            for (block, x) in self.1.chunks(LANES).enumerate() {
                let x = s.load_row(x);
                s.store_row(&mut values[block * LANES..], C::value(s, x));
                s.store_row(&mut slopes[block * LANES..], C::slope(s, x));
            }
            out
        }
    }

    /// The greatest errors of value and derivative, in units of 2^-24 of `max(|exact|, floor)`.
    fn greatest_errors<C: Curve>(curve: C, kind: Gelu, range: f32, floor: f64) -> [f64; 2] {
        let x: Vec<f32> = (0..=400_000).map(|i| range * (i as f32 / 2e5 - 1.0)).collect();
        let found = Dispatch::best().run(Map(curve, &x));
        let exact = [gelu as fn(f64, Gelu) -> f64, gelu_derivative];
        [0, 1].map(|which| {
            let errors = x.iter().zip(&found[which]).map(|(&x, &found)| {
                let exact = exact[which](f64::from(x), kind);
                (f64::from(found) - exact).abs() * 2.0_f64.powi(24) / exact.abs().max(floor)
            });
            errors.fold(0.0, f64::max)
        })
    }

    #[test]
    fn values_and_derivatives_are_within_a_few_roundings() {
        for (name, errors) in [
            ("erf", greatest_errors(Erf, Gelu::Erf, 12.0, 0.1)),
            ("tanh", greatest_errors(Tanh, Gelu::Tanh, 12.0, 0.1)),
        ] {
            assert!(errors[0] <= 8.0 && errors[1] <= 36.0, "{name}: {errors:?}");
        }
        // Each value to its own size, as far as the square's rounding in the exponent allows.
        let [erf, _] = greatest_errors(Erf, Gelu::Erf, 3.0, 0.0);
        assert!(erf <= 12.0, "{erf}");
    }

    #[test]
    fn large_numbers_are_kept_or_vanish() {
        let x = [3e38, 1e20, 40.0, -40.0, -1e20];
        for [values, slopes] in
            [Dispatch::best().run(Map(Erf, &x)), Dispatch::best().run(Map(Tanh, &x))]
        {
            assert_eq!(values[..3], x[..3]);
            assert_eq!(slopes[..3], [1.0; 3]);
            assert!(values[3..].iter().chain(&slopes[3..]).all(|y| y.abs() < 1e-15), "{values:?}");
        }
        let nan = Dispatch::best().run(Map(Erf, &[f32::NAN]));
        assert!(nan[0][0].is_nan() && nan[1][0].is_nan());
    }
}
