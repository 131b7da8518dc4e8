//! AdamW (Loshchilov and Hutter, 2019), in the order of PyTorch's `torch.optim.AdamW`, Lion (Chen et al., 2023), and scaled
//! sums.

use crate::backend::{AdamWStep, LionStep};

/// The state that AdamW updates: the parameters and their moments.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamWState {
    /// The parameters.
    pub parameters: Vec<f64>,
    /// m, the first moment.
    pub exp_avg: Vec<f64>,
    /// v, the second moment.
    pub exp_avg_sq: Vec<f64>,
}

/// One update: with `g = gradient * gradient_scale`,
///
/// ```text
/// p *= decay_factor
/// m  = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
/// p -= learning_rate / bias_correction1 * m / (sqrt(v) / sqrt(bias_correction2) + eps)
/// ```
pub fn adamw(state: &mut AdamWState, gradient: &[f64], step: AdamWStep) {
    let [beta1, beta2, eps] = [step.beta1, step.beta2, step.eps].map(f64::from);
    let step_size = f64::from(step.learning_rate) / f64::from(step.bias_correction1);
    for (i, gradient) in gradient.iter().enumerate() {
        let g = gradient * f64::from(step.gradient_scale);
        let (m, v) = (&mut state.exp_avg[i], &mut state.exp_avg_sq[i]);
        *m = beta1 * *m + (1.0 - beta1) * g;
        *v = beta2 * *v + (1.0 - beta2) * g * g;
        let denominator = v.sqrt() / f64::from(step.bias_correction2).sqrt() + eps;
        let decayed = state.parameters[i] * f64::from(step.decay_factor);
        state.parameters[i] = decayed - step_size * *m / denominator;
    }
}

/// The state that Lion updates: the parameters and the average of their gradients.
#[derive(Clone, Debug, PartialEq)]
pub struct LionState {
    /// The parameters.
    pub parameters: Vec<f64>,
    /// m, the average of gradients.
    pub exp_avg: Vec<f64>,
}

/// One update (algorithm 2 of the paper): with `g = gradient * gradient_scale`, and 0 the sign of 0,
///
/// ```text
/// p = p decay_factor - learning_rate sign(beta1 m + (1 - beta1) g)
/// m = beta2 m + (1 - beta2) g
/// ```
pub fn lion(state: &mut LionState, gradient: &[f64], step: LionStep) {
    let [beta1, beta2] = [step.beta1, step.beta2].map(f64::from);
    for (i, gradient) in gradient.iter().enumerate() {
        let g = gradient * f64::from(step.gradient_scale);
        let m = &mut state.exp_avg[i];
        let direction = beta1 * *m + (1.0 - beta1) * g;
        let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
        *m = beta2 * *m + (1.0 - beta2) * g;
        let decayed = state.parameters[i] * f64::from(step.decay_factor);
        state.parameters[i] = decayed - f64::from(step.learning_rate) * sign;
    }
}

/// `out = keep out + factor x`
pub fn axpby(out: &mut [f64], keep: f64, factor: f64, x: &[f64]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out = keep * *out + factor * x;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the paper has it: `u = sign(b1 m + (1 - b1) g); p -= lr (u + wd p); m = b2 m + (1 - b2) g`, by hand.
    #[test]
    fn lion_goes_by_the_sign_of_what_the_average_will_not_be() {
        let mut state =
            LionState { parameters: vec![1.0, 1.0, -2.0, 4.0], exp_avg: vec![0.0, 1.0, 1.0, 0.0] };
        let (learning_rate, weight_decay) = (0.125_f32, 0.5);
        let step = LionStep {
            learning_rate,
            beta1: 0.5,
            beta2: 0.75,
            decay_factor: 1.0 - learning_rate * weight_decay,
            gradient_scale: 2.0,
        };
        // The directions are 1, -0.5, 0.5 and 0.
        lion(&mut state, &[1.0, -1.0, 0.0, 0.0], step);
        let moved = |p: f64, u: f64| p - 0.125 * (u + 0.5 * p);
        let expected = [moved(1.0, 1.0), moved(1.0, -1.0), moved(-2.0, 1.0), moved(4.0, 0.0)];
        assert_eq!(state.parameters, expected);
        assert_eq!(state.exp_avg, [0.5, 0.25, 0.75, 0.0]);
    }

    /// On the first step the corrected moments are g and g^2, so the update is the learning rate
    /// against the gradient's sign.
    #[test]
    fn the_first_step_moves_by_the_learning_rate() {
        let mut state = AdamWState {
            parameters: vec![1.0, 1.0, 1.0],
            exp_avg: vec![0.0; 3],
            exp_avg_sq: vec![0.0; 3],
        };
        let step = AdamWStep {
            learning_rate: 0.125,
            beta1: 0.5,
            beta2: 0.75,
            eps: 0.0,
            decay_factor: 0.5,
            bias_correction1: 0.5,
            bias_correction2: 0.25,
            gradient_scale: 2.0,
        };
        adamw(&mut state, &[3.0, -0.25, 1.0], step);
        for (parameter, expected) in state.parameters.iter().zip([0.375, 0.625, 0.375]) {
            assert!((parameter - expected).abs() < 1e-12);
        }
        assert_eq!(state.exp_avg, [3.0, -0.25, 1.0]);
        assert_eq!(state.exp_avg_sq, [9.0, 0.0625, 1.0]);
    }
}
