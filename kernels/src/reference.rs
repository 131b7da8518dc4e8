//! Every kernel again, in plain `f64`: these functions are the kernels' definition.
//!
//! They are slow and obvious on purpose: one loop per index, no blocking, no shared tricks with the
//! backends, row-major contiguous slices. A backend agrees with the definition when its results are
//! within the tolerance of its element type; a backward reference is itself checked against central
//! differences of its forward in the tests beside it.
//!
//! The functions are for tests and for measuring errors; [`draw`](crate::draw) is the one
//! definition that programs run too. They trust their callers: a slice whose length does not fit
//! the shape is a mistake in the test, and panics.

pub mod attention;
pub mod causal_conv1d;
pub mod cross_entropy;
pub mod embedding;
pub mod gated_silu;
pub mod gelu;
pub mod gradient_sums;
pub mod head_scan;
pub mod layer_norm;
pub mod master;
pub mod matmul;
pub mod optimizer;
pub mod rms_norm;
pub mod rotary;
pub mod selective_scan;

#[cfg(test)]
mod central_difference;

/// `1 / (1 + exp(-x))`, without overflow on either side.
pub fn sigmoid(x: f64) -> f64 {
    if x >= 0.0 {
        1.0 / (1.0 + (-x).exp())
    } else {
        let exponential = x.exp();
        exponential / (1.0 + exponential)
    }
}

/// `x sigmoid(x)`.
pub fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// The derivative of [`silu`]: `s (1 + x (1 - s))`, `s = sigmoid(x)`.
pub fn silu_derivative(x: f64) -> f64 {
    let s = sigmoid(x);
    s * (1.0 + x * (1.0 - s))
}

/// `log(1 + exp(x))`, without overflow; its derivative is [`sigmoid`].
pub fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

#[cfg(test)]
mod tests {
    use super::central_difference::{check_gradient, wave};
    use super::*;

    #[test]
    fn activations_agree_with_central_differences() {
        let x: Vec<f64> = wave(1.0, 41).iter().map(|x| 6.0 * x).collect();
        let silu_gradient: Vec<f64> = x.iter().map(|&x| silu_derivative(x)).collect();
        check_gradient("silu", &x, &silu_gradient, |x| x.iter().map(|&x| silu(x)).sum());
        let softplus_gradient: Vec<f64> = x.iter().map(|&x| sigmoid(x)).collect();
        check_gradient("softplus", &x, &softplus_gradient, |x| {
            x.iter().map(|&x| softplus(x)).sum()
        });
    }

    #[test]
    fn activations_neither_overflow_nor_lose_their_tails() {
        assert_eq!(softplus(1000.0), 1000.0);
        assert_eq!(softplus(-1000.0), 0.0);
        assert!((softplus(-30.0) / (-30.0_f64).exp() - 1.0).abs() < 1e-12);
        assert_eq!(silu(1000.0), 1000.0);
        assert_eq!(silu(-1000.0), 0.0);
        assert!((softplus(0.0) - 2.0_f64.ln()).abs() < 1e-15);
    }
}
