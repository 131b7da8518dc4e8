//! GELU (Hendrycks and Gimpel, 2016): `x Phi(x)`, Phi being the normal distribution, and its approximation by tanh.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use crate::backend::Gelu;

/// The cubic term of the approximation, beside x.
const CUBIC: f64 = 0.044_715;

/// `0.5 x erfc(-x / sqrt 2)`, or `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
pub fn gelu(x: f64, gelu: Gelu) -> f64 {
    match gelu {
        Gelu::Erf => 0.5 * x * libm::erfc(-x * FRAC_1_SQRT_2),
        Gelu::Tanh => x * super::sigmoid(2.0 * (2.0 / PI).sqrt() * (x + CUBIC * x.powi(3))),
    }
}

/// The derivative of [`gelu`](gelu()): `Phi(x) + x phi(x)`, phi being the density; or, with `s = sigmoid(2 u)`, which is
/// `(1 + tanh u) / 2`: `s + 2 x s (1 - s) u'`.
pub fn gelu_derivative(x: f64, gelu: Gelu) -> f64 {
    match gelu {
        Gelu::Erf => {
            let density = (-0.5 * x * x).exp() / (2.0 * PI).sqrt();
            0.5 * libm::erfc(-x * FRAC_1_SQRT_2) + x * density
        }
        Gelu::Tanh => {
            let root = (2.0 / PI).sqrt();
            let s = super::sigmoid(2.0 * root * (x + CUBIC * x.powi(3)));
            s + 2.0 * x * s * (1.0 - s) * root * (1.0 + 3.0 * CUBIC * x * x)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::central_difference::{check_gradient, wave};
    use super::*;

    #[test]
    fn derivatives_agree_with_central_differences() {
        for kind in [Gelu::Erf, Gelu::Tanh] {
            let x: Vec<f64> = wave(1.0, 40).into_iter().map(|x| 4.0 * x).collect();
            let slopes: Vec<f64> = x.iter().map(|&x| gelu_derivative(x, kind)).collect();
            check_gradient("gelu", &x, &slopes, |x| x.iter().map(|&x| gelu(x, kind)).sum());
        }
    }

    #[test]
    fn values_are_those_of_the_paper() {
        assert!((gelu(1.0, Gelu::Erf) - 0.841_344_746_068_542_9).abs() < 1e-15);
        let tanh = 0.5 * (1.0 + ((2.0 / PI).sqrt() * 1.044_715).tanh());
        assert!((gelu(1.0, Gelu::Tanh) - tanh).abs() < 1e-15);
    }
}
