//! How the samples of a lane are walked through changes no bit of losses or gradients.

use std::num::NonZeroUsize;

use crate::lane::{Walk, bits, moved_parameters, odd_config, one_thread, run_lane, tokens};
use tidemill_kernels::cpu::InstructionSet;
use tidemill_kernels::{Cpu, IGNORED_TARGET};
use tidemill_model::{GrainLoss, Mamba, MambaConfig};

fn loss_bits(losses: &[GrainLoss]) -> Vec<(u64, u64)> {
    losses.iter().map(|loss| (loss.loss_sum.to_bits(), loss.tokens)).collect()
}

#[test]
fn microbatches_of_any_size_give_the_same_bits() {
    let (backend, config) = (one_thread(), odd_config());
    let model = Mamba::new(&config).expect("an odd model");
    let arena = moved_parameters(&model, 0.3);
    // More positions than a chunk of logits, so that grains end inside one.
    let positions = 131;
    for samples in 1..=5 {
        let tokens = tokens(samples as u64, samples, positions, config.vocab_size);
        for samples_per_grain in 1..=3 {
            let run = |grains_per_microbatch| {
                let walk = Walk { samples, positions, samples_per_grain, grains_per_microbatch };
                run_lane(&backend, &model, &arena, &tokens, walk)
            };
            let (losses, gradients) = run(1);
            assert_eq!(losses.len(), samples.div_ceil(samples_per_grain));
            assert!(gradients.iter().all(|x| x.is_finite()));
            for grains_per_microbatch in [2, 3, 5] {
                let (other_losses, other_gradients) = run(grains_per_microbatch);
                assert_eq!(loss_bits(&losses), loss_bits(&other_losses));
                assert_eq!(
                    bits(&gradients),
                    bits(&other_gradients),
                    "{samples} samples, {samples_per_grain} in a grain, {grains_per_microbatch} grains at a time"
                );
            }
        }
    }
}

/// Not a promise: a grain is numerics. But if this ever held, the test above could not fail.
#[test]
fn grains_of_another_size_are_other_sums() {
    let (backend, config) = (one_thread(), odd_config());
    let model = Mamba::new(&config).expect("an odd model");
    let arena = moved_parameters(&model, 0.3);
    let tokens = tokens(3, 4, 131, config.vocab_size);
    let run = |samples_per_grain| {
        let walk = Walk { samples: 4, positions: 131, samples_per_grain, grains_per_microbatch: 4 };
        run_lane(&backend, &model, &arena, &tokens, walk).1
    };
    assert_ne!(bits(&run(1)), bits(&run(2)));
}

#[test]
fn threads_and_vector_width_change_no_bit() {
    let mut config = MambaConfig::new(259, 48, 2);
    config.d_state = 5;
    let model = Mamba::new(&config).expect("a model");
    let arena = moved_parameters(&model, 0.1);
    let walk = Walk { samples: 4, positions: 301, samples_per_grain: 3, grains_per_microbatch: 2 };
    let tokens = tokens(11, walk.samples, walk.positions, config.vocab_size);
    let run = |backend: &Cpu| {
        let (losses, gradients) = run_lane(backend, &model, &arena, &tokens, walk);
        (loss_bits(&losses), bits(&gradients))
    };
    let expected = run(&one_thread());
    for threads in [2, 3] {
        let backend = Cpu::new(NonZeroUsize::new(threads).expect("threads")).expect("threads");
        assert!(run(&backend) == expected, "{threads} threads gave other bits");
    }
    for set in InstructionSet::ALL {
        if !set.is_available() {
            println!("not run: this processor lacks {}", set.name());
            continue;
        }
        let backend = Cpu::with_instruction_set(NonZeroUsize::MIN, set).expect("available");
        assert!(run(&backend) == expected, "{} gave other bits", set.name());
    }
}

#[test]
fn ignored_targets_at_the_end_are_as_if_they_were_not_there() {
    let (backend, config) = (one_thread(), odd_config());
    let model = Mamba::new(&config).expect("an odd model");
    let arena = moved_parameters(&model, 0.3);
    let (short, long) = (11, 20);
    let run = |tokens: &[u32], positions| {
        let walk = Walk { samples: 2, positions, samples_per_grain: 1, grains_per_microbatch: 2 };
        run_lane(&backend, &model, &arena, tokens, walk)
    };
    let tokens = tokens(7, 2, short, config.vocab_size);
    let mut padded = Vec::new();
    for row in tokens.chunks(short + 1) {
        padded.extend_from_slice(row);
        padded.resize(padded.len() + long - short, IGNORED_TARGET);
    }
    let (losses, gradients) = run(&tokens, short);
    let (padded_losses, padded_gradients) = run(&padded, long);
    assert_eq!(losses[0].tokens, short as u64);
    assert_eq!(loss_bits(&losses), loss_bits(&padded_losses));
    assert_eq!(bits(&gradients), bits(&padded_gradients));
    let (losses, gradients) = run(&vec![IGNORED_TARGET; 2 * (short + 1)], short);
    assert_eq!(losses, [GrainLoss::default(); 2]);
    assert!(gradients.iter().all(|&x| x == 0.0));
}

#[test]
fn padding_rows_of_the_vocabulary_have_no_gradient() {
    let (backend, mut config) = (one_thread(), odd_config());
    config.tie_embeddings = false;
    let model = Mamba::new(&config).expect("an odd model");
    let layout = model.layout();
    let arena = moved_parameters(&model, 0.3);
    let walk = Walk { samples: 2, positions: 40, samples_per_grain: 1, grains_per_microbatch: 1 };
    let tokens = tokens(7, walk.samples, walk.positions, config.vocab_size);
    let (_, gradients) = run_lane(&backend, &model, &arena, &tokens, walk);
    for use_index in [0, layout.uses().len() - 1] {
        let slot = &gradients[layout.gradient_range(use_index)];
        let (rows, padding) = slot.split_at(config.vocab_size * config.d_model);
        assert_eq!(padding.len(), 3 * config.d_model);
        assert!(padding.iter().all(|x| x.to_bits() == 0));
        assert!(rows.iter().any(|&x| x != 0.0));
    }
}
