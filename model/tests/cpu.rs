//! Every test body of the model on the CPU.

mod bodies;

use std::num::NonZeroUsize;

use bodies::arm::Arm;
use bodies::every_body;
use bodies::families::{models_beside_mamba, tied_and_untied};
use bodies::lane::{Walk, bits, loss_bits, moved_parameters, run_lane, tokens};
use bodies::leases::{WALK, strict_passes};
use bodies::strict_source::Withheld;
use tidemill_kernels::Cpu;
use tidemill_kernels::cpu::InstructionSet;
use tidemill_model::{
    Direction, LanguageModel, LlamaConfig, MambaConfig, Microbatch, MicrobatchShape, Passes,
    Trainable,
};

fn threads(count: usize) -> Arm<Cpu> {
    let count = NonZeroUsize::new(count).expect("threads");
    Arm::new(format!("cpu, {count} threads"), Cpu::new(count).expect("threads"))
}

macro_rules! tests {
    ($($test:ident: $body:path;)*) => {
        $(
            #[test]
            fn $test() {
                $body(&threads(1));
            }
        )*
    };
}

every_body!(tests);

/// Forward from the first to the last, and backward from the last, which is entered once for both;
/// again for every microbatch.
#[test]
fn blocks_are_entered_in_order() {
    for (name, model) in tied_and_untied() {
        let (_, entered) = strict_passes(&threads(1), &model, Withheld::Nothing);
        let last = model.layout().blocks().len() - 1;
        let entries = |forward: std::ops::Range<usize>, backward: std::ops::Range<usize>| {
            let forward = forward.map(|block| (block, Direction::Forward));
            forward.chain(backward.rev().map(|block| (block, Direction::Backward)))
        };
        // At once, and sample by sample; then each microbatch in both directions.
        let forward = (0..1 + WALK.samples).flat_map(|_| entries(0..last + 1, 0..0));
        let both = (0..WALK.samples).flat_map(|_| entries(0..last, 0..last + 1));
        let expected: Vec<_> = forward.chain(both).collect();
        assert_eq!(entered, expected, "{name}");
    }
}

/// A model that reads NaN in place of a tensor that its layout declares computes something else,
/// and so does one that reads NaN backward in a use that its layout declares for both passes: so a
/// layout declares no more than is read. This is the same on every device.
#[test]
fn what_a_layout_says_is_read_is_read() {
    let arm = &threads(1);
    for (name, model) in tied_and_untied::<Cpu>() {
        let layout = model.layout();
        let (expected, _) = strict_passes(arm, &model, Withheld::Nothing);
        let mut declared = Vec::new();
        for (use_index, of_block) in layout.uses().iter().enumerate() {
            for (tensor, (_, reading)) in layout.reads(use_index).enumerate() {
                let fp32 = Withheld::Fp32 { use_index, tensor };
                declared.extend(reading.is_fp32().then_some(fp32));
                let activation = Withheld::Activation { use_index, tensor };
                declared.extend(reading.is_activation().then_some(activation));
            }
            let backward = Withheld::Backward { use_index };
            declared.extend((of_block.passes == Passes::Both).then_some(backward));
        }
        for withheld in declared {
            let (found, _) = strict_passes(arm, &model, withheld);
            assert!(found != expected, "{name}: {withheld:?}: declared, and not read");
        }
    }
}

/// The reading of a tensor is the union of those of its uses.
#[test]
fn a_layout_says_of_a_tensor_what_its_uses_say() {
    for (name, model) in tied_and_untied::<Cpu>() {
        let layout = model.layout();
        for tensor in layout.tensors() {
            let uses = (0..layout.uses().len()).flat_map(|use_index| layout.reads(use_index));
            let of_uses = uses.filter(|(other, _)| other.name == tensor.name);
            let (mut fp32, mut activation) = (false, false);
            for (_, reading) in of_uses {
                fp32 |= reading.is_fp32();
                activation |= reading.is_activation();
            }
            let declared = (tensor.reading.is_fp32(), tensor.reading.is_activation());
            assert_eq!(declared, (fp32, activation), "{name}: {}", tensor.name);
        }
    }
}

/// A document that begins where a tile of keys does has the bits that it has at a sample's first
/// position, as its rotary positions begin again. If the sample is one text, the bits differ.
#[test]
fn rotary_positions_begin_with_documents() {
    const END: u32 = 0;
    const LENGTH: usize = 21;
    let arm = &threads(1);
    let config = LlamaConfig { n_kv_heads: 2, rope_theta: 30.0, ..LlamaConfig::new(13, 16, 2, 4) };
    let model = LanguageModel::<Cpu>::new(&config).expect("sizes");
    let arena = moved_parameters(&model, 0.3);
    let text: Vec<u32> = (0..=LENGTH as u32).map(|i| 1 + i * i % 11).collect();
    let losses = |before: usize, document_end| {
        let first = (1..before as u32 + 1).map(|i| if i % 64 == 0 { END } else { 12 - i % 10 });
        let tokens: Vec<u32> = first.chain(text.iter().copied()).collect();
        let positions = tokens.len() - 1;
        arm.with_parameters(&model, &arena, |device, parameters| {
            let shape = MicrobatchShape { samples: 1, positions, samples_per_grain: 1 };
            let mut workspace = Trainable::plan(&model, device, shape).expect("fits");
            let mut source = parameters.source(model.layout());
            let microbatch =
                Microbatch { samples: &[tokens], positions, samples_per_grain: 1, document_end };
            let rows = model.row_losses(device, &mut workspace, &mut source, microbatch);
            bits(&rows.expect("losses")[before..])
        })
    };
    let alone = losses(0, Some(END));
    assert_eq!(alone.len(), LENGTH);
    assert_eq!(losses(64, Some(END)), alone);
    assert_eq!(losses(128, Some(END)), alone);
    assert_ne!(losses(64, None), alone);
}

#[test]
fn threads_and_vector_width_change_no_bit() {
    let mut config = MambaConfig::new(259, 48, 2);
    config.d_state = 5;
    let mut others = vec![threads(2), threads(3)];
    for set in InstructionSet::ALL {
        if !set.is_available() {
            println!("not run: this processor lacks {}", set.name());
            continue;
        }
        let backend = Cpu::with_instruction_set(NonZeroUsize::MIN, set).expect("available");
        others.push(Arm::new(set.name(), backend));
    }
    // Positions are more than two tiles of keys, and no whole number of them.
    let models = [("mamba", config.into(), 301)].into_iter();
    let models = models.chain(models_beside_mamba().into_iter().map(|(name, of)| (name, of, 157)));
    for (name, config, positions) in models {
        let model = LanguageModel::new(&config).expect(name);
        let arena = moved_parameters(&model, 0.1);
        let walk = Walk { samples: 4, positions, samples_per_grain: 3, grains_per_microbatch: 2 };
        let tokens = tokens(11, walk.samples, walk.positions, model.vocab_size());
        let run = |arm: &Arm<Cpu>| {
            let (losses, gradients) = run_lane(arm, &model, &arena, &tokens, walk);
            (loss_bits(&losses), bits(&gradients))
        };
        let expected = run(&threads(1));
        for arm in &others {
            assert!(run(arm) == expected, "{name}: {} gave other bits", arm.name);
        }
    }
}
