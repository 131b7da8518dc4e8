//! Gradients of a Mamba model agree with central differences of its loss, tensor by tensor.

use crate::lane::{Walk, loss, moved_parameters, noise, odd_config, one_thread, run_lane, tokens};
use tidemill_kernels::Cpu;
use tidemill_model::{Mamba, MambaConfig, Tensor};

const WALK: Walk =
    Walk { samples: 3, positions: 19, samples_per_grain: 2, grains_per_microbatch: 2 };

/// Of the tensor's gradient norm. The sum of 57 fp32 losses carries a rounding error of some 1e-6, and a step moves it by
/// 0.02, less for tensors with a small gradient: a quotient is good to a few 1e-4. The largest error seen is 2.4e-4.
const TOLERANCE: f64 = 1e-3;

/// The derivative of the loss along `direction` from the differences at two steps (Richardson).
fn derivative(
    backend: &Cpu,
    model: &Mamba,
    arena: &[f32],
    tensor: &Tensor,
    direction: &[f64],
    step: f64,
) -> f64 {
    let tokens = tokens(5, WALK.samples, WALK.positions, model.vocab_size());
    let at = |step: f64| {
        let mut arena = arena.to_vec();
        for (value, x) in arena[tensor.range()].iter_mut().zip(direction) {
            *value = (f64::from(*value) + step * x) as f32;
        }
        loss(backend, model, &arena, &tokens, WALK)
    };
    let central = |step: f64| (at(step) - at(-step)) / (2.0 * step);
    (4.0 * central(step) - central(2.0 * step)) / 3.0
}

fn check(config: &MambaConfig) {
    let backend = one_thread();
    let model = Mamba::new(config).expect("an odd model");
    let arena = moved_parameters(&model, 0.6);
    let tokens = tokens(5, WALK.samples, WALK.positions, config.vocab_size);
    let (_, gradients) = run_lane(&backend, &model, &arena, &tokens, WALK);
    let layout = model.layout();
    let mut worst: f64 = 0.0;
    for (segment_index, segment) in layout.segments().iter().enumerate() {
        for tensor in &layout.tensors()[segment.tensors.clone()] {
            let mut gradient = vec![0.0; tensor.elements()];
            for use_index in 0..layout.uses().len() {
                if layout.uses()[use_index].segment != segment_index {
                    continue;
                }
                let slot = &gradients[layout.gradient_range(use_index)];
                let first = tensor.offset - segment.range.start;
                for (sum, &x) in gradient.iter_mut().zip(&slot[first..]) {
                    *sum += f64::from(x);
                }
            }
            let norm = gradient.iter().map(|x| x * x).sum::<f64>().sqrt();
            assert!(norm > 1e-3, "{}: a gradient of {norm} tests nothing", tensor.name);
            let step = (0.02 / norm).min(0.1);
            let along: Vec<f64> = gradient.iter().map(|x| x / norm).collect();
            let scale = (tensor.elements() as f64).sqrt().recip();
            let sign = |x: &f32| f64::from(x.signum()) * scale;
            let across =
                |seed| -> Vec<f64> { noise(seed, tensor.elements()).iter().map(sign).collect() };
            for direction in [along, across(1), across(2), across(3)] {
                let expected: f64 = gradient.iter().zip(&direction).map(|(x, y)| x * y).sum();
                let found = derivative(&backend, &model, &arena, tensor, &direction, step);
                let error = (found - expected).abs() / norm;
                worst = worst.max(error);
                assert!(
                    error < TOLERANCE,
                    "{}: gradient {expected}, central difference {found}, norm {norm}",
                    tensor.name
                );
            }
        }
    }
    println!("largest error, of the gradient's norm: {worst:.1e}");
}

#[test]
fn gradients_of_a_tied_model_agree_with_central_differences() {
    check(&odd_config());
}

#[test]
fn gradients_of_an_untied_model_without_convolution_bias_agree_with_central_differences() {
    let mut config = odd_config();
    (config.tie_embeddings, config.conv_bias) = (false, false);
    // More states than one group of the scan, more taps than two, and more channels than one vector.
    (config.d_state, config.d_conv, config.d_model) = (17, 5, 7);
    check(&config);
}
