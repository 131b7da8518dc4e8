//! The division of a lane into microbatches changes no bit of losses or gradients.

use tidemill_kernels::{Backend, IGNORED_TARGET};
use tidemill_model::{GrainLoss, LanguageModel, MambaConfig, ModelConfig};

use super::arm::{Arm, Sizes};
use super::families::models_beside_mamba;
use super::lane::{Walk, bits, loss_bits, moved_parameters, odd_config, run_lane, tokens};

/// Runs a lane with every number of grains at a time, each twice; all must give the same bits.
fn same_for_any_microbatch<B: Backend>(
    arm: &Arm<B>,
    config: &ModelConfig,
    lane: Walk,
    grains_at_a_time: &[usize],
) {
    let model = LanguageModel::new(config).expect("a model");
    let arena = moved_parameters(&model, 0.3);
    let tokens = tokens(lane.samples as u64, lane.samples, lane.positions, model.vocab_size());
    let run = |grains_per_microbatch| {
        let walk = Walk { grains_per_microbatch, ..lane };
        run_lane(arm, &model, &arena, &tokens, walk)
    };
    let (losses, gradients) = run(1);
    assert_eq!(losses.len(), lane.samples.div_ceil(lane.samples_per_grain));
    assert!(gradients.iter().all(|x| x.is_finite()));
    for &grains in [1].iter().chain(grains_at_a_time) {
        let (other_losses, other_gradients) = run(grains);
        let what = format!("{}: {lane:?}, {grains} grains at a time", arm.name);
        assert_eq!(loss_bits(&losses), loss_bits(&other_losses), "{what}");
        assert!(bits(&gradients) == bits(&other_gradients), "{what}: other gradients");
    }
}

/// Microbatches of one grain, of two and three, and of all of them; again with the same.
pub fn microbatches_change_no_bit<B: Backend>(arm: &Arm<B>) {
    let config = odd_config();
    // More positions than a chunk of the CPU's logits, so that grains end inside one.
    let positions = arm.sizes.choose(131, 19);
    for samples in arm.sizes.choose(1..=5, 5..=5) {
        for samples_per_grain in 1..=3 {
            let lane = Walk { samples, positions, samples_per_grain, grains_per_microbatch: 1 };
            same_for_any_microbatch(arm, &config.clone().into(), lane, &[2, 3, samples]);
        }
    }
    // The numbers of rows that wide loads and fast products need.
    let even = MambaConfig { d_state: 16, ..MambaConfig::new(64, 32, 2) };
    let lane = Walk { samples: 5, positions: 24, samples_per_grain: 2, grains_per_microbatch: 1 };
    same_for_any_microbatch(arm, &even.into(), lane, &[2, 3]);
    if arm.sizes == Sizes::Full {
        // A grain is more than one chunk of logits, on every device.
        let positions = arm.backend.logit_chunk_rows() + 3;
        let config = MambaConfig { d_state: 2, ..MambaConfig::new(9, 3, 1) };
        let lane = Walk { samples: 2, positions, samples_per_grain: 1, grains_per_microbatch: 1 };
        same_for_any_microbatch(arm, &config.into(), lane, &[2]);
    }
}

/// Positions that end inside a tile of keys, and grains that begin inside one.
pub fn microbatches_of_attention_change_no_bit<B: Backend>(arm: &Arm<B>) {
    let positions = arm.sizes.choose(131, 19);
    for (_, config) in models_beside_mamba() {
        for samples_per_grain in arm.sizes.choose(1..=2, 2..=2) {
            let lane = Walk { samples: 5, positions, samples_per_grain, grains_per_microbatch: 1 };
            same_for_any_microbatch(arm, &config, lane, &[2, 5]);
        }
    }
}

/// No promise: a grain is numerics. But if these bits were equal, the tests above could not fail.
pub fn another_size_is_another_sum<B: Backend>(arm: &Arm<B>) {
    let config = odd_config();
    let model = LanguageModel::new(&config).expect("an odd model");
    let arena = moved_parameters(&model, 0.3);
    let positions = arm.sizes.choose(131, 19);
    let tokens = tokens(3, 4, positions, config.vocab_size);
    let run = |samples_per_grain| {
        let walk = Walk { samples: 4, positions, samples_per_grain, grains_per_microbatch: 4 };
        run_lane(arm, &model, &arena, &tokens, walk).1
    };
    assert_ne!(bits(&run(1)), bits(&run(2)));
}

pub fn ignored_targets_are_as_if_not_there<B: Backend>(arm: &Arm<B>) {
    ignored_targets_of(arm, &LanguageModel::new(&odd_config()).expect("an odd model"));
}

pub fn ignored_targets_of_attention<B: Backend>(arm: &Arm<B>) {
    for (name, config) in models_beside_mamba() {
        ignored_targets_of(arm, &LanguageModel::new(&config).expect(name));
    }
}

fn ignored_targets_of<B: Backend>(arm: &Arm<B>, model: &LanguageModel<B>) {
    let arena = moved_parameters(model, 0.3);
    let (short, long) = (11, 20);
    let run = |tokens: &[u32], positions| {
        let walk = Walk { samples: 2, positions, samples_per_grain: 1, grains_per_microbatch: 2 };
        run_lane(arm, model, &arena, tokens, walk)
    };
    let tokens = tokens(7, 2, short, model.vocab_size());
    let mut padded = Vec::new();
    for row in tokens.chunks(short + 1) {
        padded.extend_from_slice(row);
        padded.resize(padded.len() + long - short, IGNORED_TARGET);
    }
    let (losses, gradients) = run(&tokens, short);
    let (padded_losses, padded_gradients) = run(&padded, long);
    assert_eq!(losses[0].tokens, short as u64);
    assert_eq!(loss_bits(&losses), loss_bits(&padded_losses));
    assert_same_gradients(arm, &gradients, &padded_gradients);
    let (losses, gradients) = run(&vec![IGNORED_TARGET; 2 * (short + 1)], short);
    assert_eq!(losses, [GrainLoss::default(); 2]);
    assert!(gradients.iter().all(|&x| x == 0.0));
}

/// Sums over more rows, with zeros in the others. A chain of additions gives the same bits; a
/// matrix library may cut longer sums differently.
fn assert_same_gradients<B: Backend>(arm: &Arm<B>, gradients: &[f32], padded: &[f32]) {
    if !["cuda", "rocm"].contains(&arm.backend.device_kind().backend.as_str()) {
        assert_eq!(bits(gradients), bits(padded));
        return;
    }
    let largest = gradients.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
    for (i, (x, y)) in gradients.iter().zip(padded).enumerate() {
        assert!((x - y).abs() <= 1e-6 * largest, "{i}: {x} and {y}, of {largest}");
    }
}

pub fn padding_has_no_gradient<B: Backend>(arm: &Arm<B>) {
    let mut config = odd_config();
    config.tie_embeddings = false;
    let model = LanguageModel::new(&config).expect("an odd model");
    let layout = model.layout();
    let arena = moved_parameters(&model, 0.3);
    let walk = Walk { samples: 2, positions: 40, samples_per_grain: 1, grains_per_microbatch: 1 };
    let tokens = tokens(7, walk.samples, walk.positions, config.vocab_size);
    let (_, gradients) = run_lane(arm, &model, &arena, &tokens, walk);
    for use_index in [0, layout.uses().len() - 1] {
        let slot = &gradients[layout.gradient_range(use_index)];
        let (rows, padding) = slot.split_at(config.vocab_size * config.d_model);
        assert_eq!(padding.len(), 3 * config.d_model);
        assert!(padding.iter().all(|x| x.to_bits() == 0));
        assert!(rows.iter().any(|&x| x != 0.0));
    }
}
