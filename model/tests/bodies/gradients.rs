//! Gradients of Mamba and of models with attention agree with differences of the loss, and with
//! those of another device, tensor by tensor.

use std::num::NonZeroUsize;

use tidemill_kernels::{Backend, Cpu};
use tidemill_model::{LanguageModel, Layout, MambaConfig, ModelConfig, Tensor};

use super::arm::{Arm, Sizes};
use super::families::models_beside_mamba;
use super::lane::{Walk, loss, moved_parameters, noise, odd_config, run_lane, tokens};

/// A lane of odd sizes.
fn walk<B>(arm: &Arm<B>) -> Walk {
    let (samples, positions) = arm.sizes.choose((3, 19), (2, 11));
    Walk { samples, positions, samples_per_grain: 2, grains_per_microbatch: 2 }
}

/// The sum of 57 fp32 losses carries a rounding error of some 1e-6, and a step moves it by 0.02, less for tensors with a
/// small gradient: a quotient is good to a few 1e-4 of the gradient's norm. The largest error seen is 2.4e-4.
const TOLERANCE: f64 = 1e-3;

/// In bf16, logits and weights are rounded to 8 bits, which moves the sum of losses by some 0.01;
/// only a step that moves the sum by 1 shows more than that, and not all tensors have one. So there
/// is one direction, that of the whole gradient. Weights that move by less than their rounding move
/// in jumps, or not at all: the largest error of a quotient seen is 0.13, on an H200, of a gradient
/// whose norm was off by 0.003.
const BF16_TOLERANCE: f64 = 0.2;

/// The derivative of the loss along `direction`, an arena, from the differences at two steps (Richardson).
fn derivative<B: Backend>(
    arm: &Arm<B>,
    model: &LanguageModel<B>,
    arena: &[f32],
    direction: &[f64],
    step: f64,
) -> f64 {
    let walk = walk(arm);
    let tokens = tokens(5, walk.samples, walk.positions, model.vocab_size());
    let at = |step: f64| {
        let moved = |(&value, x): (&f32, &f64)| (f64::from(value) + step * x) as f32;
        let arena: Vec<f32> = arena.iter().zip(direction).map(moved).collect();
        loss(arm, model, &arena, &tokens, walk)
    };
    let central = |step: f64| (at(step) - at(-step)) / (2.0 * step);
    (4.0 * central(step) - central(2.0 * step)) / 3.0
}

/// Each tensor with its gradient, summed over its uses.
fn by_tensor<'a>(
    layout: &'a Layout,
    gradients: &'a [f32],
) -> impl Iterator<Item = (&'a Tensor, Vec<f64>)> {
    layout.segments().iter().enumerate().flat_map(move |(segment_index, segment)| {
        layout.tensors()[segment.tensors.clone()].iter().map(move |tensor| {
            let mut gradient = vec![0.0; tensor.elements()];
            let uses = (0..layout.uses().len())
                .filter(|&use_index| layout.uses()[use_index].segment == segment_index);
            for use_index in uses {
                let slot = &gradients[layout.gradient_range(use_index)];
                let first = tensor.offset - segment.range.start;
                for (sum, &x) in gradient.iter_mut().zip(&slot[first..]) {
                    *sum += f64::from(x);
                }
            }
            (tensor, gradient)
        })
    })
}

fn norm(gradient: &[f64]) -> f64 {
    gradient.iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn check<B: Backend>(arm: &Arm<B>, model: &LanguageModel<B>) {
    let arena = moved_parameters(model, 0.6);
    let walk = walk(arm);
    let tokens = tokens(5, walk.samples, walk.positions, model.vocab_size());
    let (_, gradients) = run_lane(arm, model, &arena, &tokens, walk);
    if arm.by_precision(true, false) {
        for (tensor, gradient) in by_tensor(model.layout(), &gradients) {
            check_tensor(arm, model, &arena, tensor, &gradient);
        }
        return;
    }
    let mut whole = vec![0.0; arena.len()];
    for (tensor, gradient) in by_tensor(model.layout(), &gradients) {
        whole[tensor.range()].copy_from_slice(&gradient);
    }
    let expected = norm(&whole);
    whole.iter_mut().for_each(|x| *x /= expected);
    let found = derivative(arm, model, &arena, &whole, 1.0 / expected);
    println!("{}: the gradient's norm {expected}, central difference {found}", arm.name);
    assert!((found / expected - 1.0).abs() < BF16_TOLERANCE, "{}", arm.name);
}

fn check_tensor<B: Backend>(
    arm: &Arm<B>,
    model: &LanguageModel<B>,
    arena: &[f32],
    tensor: &Tensor,
    gradient: &[f64],
) {
    let norm = norm(gradient);
    if tensor.name.ends_with("k_ln.bias") {
        // The same for all keys: it moves all scores of a query alike, and no probability.
        assert!(norm < 1e-4, "{}: {norm}", tensor.name);
        return;
    }
    assert!(norm > 1e-3, "{}: a gradient of {norm} tests nothing", tensor.name);
    let along: Vec<f64> = gradient.iter().map(|x| x / norm).collect();
    let scale = (tensor.elements() as f64).sqrt().recip();
    let sign = |x: &f32| f64::from(x.signum()) * scale;
    let across = |seed| -> Vec<f64> { noise(seed, tensor.elements()).iter().map(sign).collect() };
    let mut directions = vec![along];
    if arm.sizes == Sizes::Full {
        directions.extend([across(1), across(2), across(3)]);
    }
    for direction in directions {
        let expected: f64 = gradient.iter().zip(&direction).map(|(x, y)| x * y).sum();
        let mut in_arena = vec![0.0; arena.len()];
        in_arena[tensor.range()].copy_from_slice(&direction);
        let found = derivative(arm, model, arena, &in_arena, (0.02 / norm).min(0.1));
        assert!(
            (found - expected).abs() < TOLERANCE * norm,
            "{}: {}: gradient {expected}, central difference {found}, norm {norm}",
            arm.name,
            tensor.name
        );
    }
}

/// Without convolution bias; more states than one group of the scan, more taps than two, and more channels than one
/// vector.
fn untied_config() -> MambaConfig {
    let mut config = odd_config();
    (config.tie_embeddings, config.conv_bias) = (false, false);
    (config.d_state, config.d_conv, config.d_model) = (17, 5, 7);
    config
}

pub fn tied_agrees<B: Backend>(arm: &Arm<B>) {
    check(arm, &LanguageModel::new(&odd_config()).expect("an odd model"));
}

pub fn untied_agrees<B: Backend>(arm: &Arm<B>) {
    check(arm, &LanguageModel::new(&untied_config()).expect("an odd model"));
}

/// Without clipping, which has no derivative where it begins.
pub fn attention_agrees<B: Backend>(arm: &Arm<B>) {
    for (name, mut config) in models_beside_mamba() {
        match &mut config {
            ModelConfig::Mpt(config) => config.clip_qkv = None,
            ModelConfig::Mamba2(config) => config.delta_limits = [0.0, f64::INFINITY],
            _ => {}
        }
        check(arm, &LanguageModel::new(&config).expect(name));
    }
}

/// The allowed difference between the gradients of two devices, relative to each tensor's norm. The
/// CPU computes in fp32, with weights that bf16 can represent. Seen are 1e-6 and 2e-2.
const APART: [f64; 2] = [2e-5, 4e-2];

pub fn agree_with_the_cpu<B: Backend>(arm: &Arm<B>) {
    let even = MambaConfig { d_state: 16, ..MambaConfig::new(40, 32, 2) };
    compare_with_the_cpu(arm, &odd_config().into(), [3, 37]);
    compare_with_the_cpu(arm, &untied_config().into(), [3, 20]);
    compare_with_the_cpu(arm, &even.into(), [3, 33]);
    // Grains of more than one chunk of logits.
    let small = MambaConfig { d_state: 2, ..MambaConfig::new(9, 3, 1) };
    compare_with_the_cpu(arm, &small.into(), [1, arm.backend.logit_chunk_rows() + 3]);
}

pub fn attention_agrees_with_the_cpu<B: Backend>(arm: &Arm<B>) {
    for (_, config) in models_beside_mamba() {
        compare_with_the_cpu(arm, &config, [3, 37]);
    }
}

fn compare_with_the_cpu<B: Backend>(
    arm: &Arm<B>,
    config: &ModelConfig,
    [samples, positions]: [usize; 2],
) {
    let [fp32, bf16] = APART;
    let tolerance = arm.by_precision(fp32, bf16);
    let cpu = Arm::new("cpu", Cpu::new(NonZeroUsize::MIN).expect("one thread"));
    let model = LanguageModel::new(config).expect("a model");
    let mut arena = moved_parameters(&model, 0.2);
    for weight in &mut arena {
        *weight = f32::from_bits(weight.to_bits() & 0xffff_0000);
    }
    let walk = Walk { samples, positions, samples_per_grain: 2, grains_per_microbatch: 1 };
    let tokens = tokens(3, samples, positions, model.vocab_size());
    let (losses, gradients) = run_lane(arm, &model, &arena, &tokens, walk);
    let of_cpu = LanguageModel::new(config).expect("a model");
    let (expected_losses, expected) = run_lane(&cpu, &of_cpu, &arena, &tokens, walk);
    assert_eq!(losses.len(), expected_losses.len());
    for (loss, expected) in losses.iter().zip(&expected_losses) {
        let error = (loss.loss_sum / expected.loss_sum - 1.0).abs();
        assert!(error < 0.1 * tolerance, "{}: {loss:?}, {expected:?}", arm.name);
        assert_eq!(loss.tokens, expected.tokens);
    }
    let layout = model.layout();
    let mut worst: f64 = 0.0;
    for ((tensor, found), (_, expected)) in
        by_tensor(layout, &gradients).zip(by_tensor(layout, &expected))
    {
        let difference: Vec<f64> = found.iter().zip(&expected).map(|(x, y)| x - y).collect();
        if tensor.name.ends_with("k_ln.bias") {
            // Zero except for rounding.
            continue;
        }
        let error = norm(&difference) / norm(&expected);
        worst = worst.max(error);
        assert!(error < tolerance, "{}: {}: off by {error:.1e}", arm.name, tensor.name);
    }
    println!("{}: d = {}: at most {worst:.1e} apart", arm.name, model.width());
}
