//! Every test body of the model on the CPU.

mod bodies;

use std::num::NonZeroUsize;

use bodies::arm::Arm;
use bodies::every_body;
use bodies::families::attention_models;
use bodies::lane::{Walk, bits, loss_bits, moved_parameters, run_lane, tokens};
use tidemill_kernels::Cpu;
use tidemill_kernels::cpu::InstructionSet;
use tidemill_model::{MambaConfig, Model};

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
    let models = models.chain(attention_models().into_iter().map(|(name, of)| (name, of, 157)));
    for (name, config, positions) in models {
        let model = Model::new(&config).expect(name);
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
