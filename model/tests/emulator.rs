//! Every test body of the model on the emulated GPU in bf16, and in fp32 those that are about numbers: all bodies run in fp32 on
//! the CPU.

mod bodies;

use bodies::arm::Arm;
use bodies::every_body;
use bodies::families::models;
use bodies::lane::{Walk, bits, loss_bits, moved_parameters, run_lane, tokens};
use tidemill_kernels::emulator::{Emulator, EmulatorSettings, Schedule};
use tidemill_kernels::gpu::Precision;
use tidemill_kernels::{Bf16, Fp32, Gpu, Runtime};
use tidemill_model::generation::{
    GenerationSettings, Prompt, SamplingSettings, Sequences, generate, generate_batch,
};
use tidemill_model::{Device, LanguageModel, MicrobatchShape, Trainable};

fn arm<P: Precision>(warp: u32, seed: u64) -> Arm<Gpu<Emulator, P>> {
    let emulator = Emulator::new(EmulatorSettings { warp, seed }).expect("a width of warps");
    Arm::new(format!("emulator, warps of {warp}, seed {seed}"), Gpu::new(emulator))
}

macro_rules! tests {
    ($($test:ident: $body:path;)*) => {
        tests!(Bf16, 64, $($test: $body;)*);
    };
    ($precision:ty, $warp:literal, $($test:ident: $body:path;)*) => {
        $(
            #[test]
            fn $test() {
                $body(&arm::<$precision>($warp, 1));
            }
        )*
    };
}

mod bf16 {
    use super::*;

    every_body!(tests);
}

mod fp32 {
    use super::*;

    tests!(Fp32, 32,
        gradients_of_a_tied_model_agree_with_differences: bodies::gradients::tied_agrees;
        gradients_of_an_untied_model_agree_with_differences: bodies::gradients::untied_agrees;
        gradients_of_attention_agree_with_differences: bodies::gradients::attention_agrees;
        gradients_are_those_of_the_cpu: bodies::gradients::agree_with_the_cpu;
        gradients_of_attention_are_those_of_the_cpu: bodies::gradients::attention_agrees_with_the_cpu;
        microbatches_change_no_bit: bodies::grains::microbatches_change_no_bit;
        batches_change_no_bit: bodies::generation::batches_change_no_bit;
        log_probabilities_are_those_of_transformers: bodies::transformers::log_probabilities;
        greedy_tokens_are_those_of_transformers: bodies::transformers::greedy_tokens;
        six_steps_of_adamw_are_those_of_pytorch: bodies::training::six_steps;
    );
}

/// The order in which threads take their turns changes no bit.
fn the_order_of_threads_changes_no_bit<P: Precision>(warp: u32) {
    let walk = Walk { samples: 3, positions: 23, samples_per_grain: 2, grains_per_microbatch: 1 };
    for (name, config) in models() {
        let model = LanguageModel::new(&config).expect(name);
        let arena = moved_parameters(&model, 0.3);
        let tokens = tokens(11, walk.samples, walk.positions, model.vocab_size());
        let run = |seed| {
            let arm = arm::<P>(warp, seed);
            let (losses, gradients) = run_lane(&arm, &model, &arena, &tokens, walk);
            (loss_bits(&losses), bits(&gradients))
        };
        let expected = run(0);
        for seed in [1, 0x7469_6465] {
            assert!(run(seed) == expected, "{name}: seed {seed} gave other bits");
        }
    }
}

/// Everything that a pass launches was compiled when memory was planned, and nothing else was.
/// (Masters are rounded by the optimizer's kernels.)
#[test]
fn planning_compiles_what_a_pass_launches() {
    let walk = Walk { samples: 2, positions: 5, samples_per_grain: 1, grains_per_microbatch: 2 };
    for (name, config) in models() {
        let model = LanguageModel::new(&config).expect(name);
        let planned = arm::<Bf16>(32, 1);
        let mut stream = planned.backend.device_stream().unwrap();
        let mut device = Device { backend: &planned.backend, stream: &mut stream };
        let shape = MicrobatchShape { samples: 2, positions: 5, samples_per_grain: 1 };
        model.plan(&mut device, shape).unwrap();
        let mut expected = loaded(&planned);
        expected.push("optimizer.cu".to_owned());
        expected.sort_unstable();

        let arm = arm::<Bf16>(32, 1);
        let arena = moved_parameters(&model, 0.3);
        let tokens = tokens(11, walk.samples, walk.positions, model.vocab_size());
        run_lane(&arm, &model, &arena, &tokens, walk);
        assert_eq!(loaded(&arm), expected, "{name}");
    }
}

/// The kernels that an arm has loaded, by their names.
fn loaded(arm: &Arm<Gpu<Emulator, Bf16>>) -> Vec<String> {
    arm.backend.loaded_sources().iter().map(ToString::to_string).collect()
}

/// The kernels that read prompts and write tokens were compiled when memory for sequences was
/// planned.
#[test]
fn planning_sequences_compiles_what_generation_launches() {
    for (name, config) in models() {
        let model = LanguageModel::new(&config).expect(name);
        let arena = moved_parameters(&model, 0.3);
        let arm = arm::<Bf16>(32, 1);
        arm.with_parameters(&model, &arena, |device, parameters| {
            let mut sequences = Sequences::new(device, &model, parameters, 2, 12).expect(name);
            let planned = loaded(&arm);
            assert!(planned.len() > 4, "{name}: {planned:?}");
            sequences.begin(device, 2).unwrap();
            sequences.advance(device, &[&[1, 2, 3], &[4, 5]]).unwrap();
            sequences.write(device, &[6, 7]).unwrap();
            sequences.likeliest(device).unwrap();
            assert_eq!(loaded(&arm), planned, "{name}");
        });
        let arm = self::arm::<Bf16>(32, 1);
        arm.with_parameters(&model, &arena, |device, parameters| {
            let sampling = SamplingSettings { top_k: 3, ..Default::default() };
            let sequences = Sequences::for_sampling(device, &model, parameters, 1, 12, &sampling);
            let mut sequences = sequences.expect(name);
            let planned = loaded(&arm);
            assert!(!planned.contains(&"likeliest.cu".to_owned()), "{name}: {planned:?}");
            let settings = GenerationSettings { max_new_tokens: 3, stop_token: None, sampling };
            generate(device, &mut sequences, &[1, 2, 3], &settings, |_| ()).unwrap();
            assert_eq!(loaded(&arm), planned, "{name}");
        });
    }
}

/// Answers are the same where every step runs only when the host waits for it, in whatever order the streams allow.
#[test]
fn answers_of_steps_that_run_later_are_the_same() {
    let (_, config) = models().next().expect("a model");
    let model = LanguageModel::new(&config).expect("sizes");
    let arena = moved_parameters(&model, 0.3);
    let prompts = [vec![1, 2, 3], vec![4, 5], vec![6], vec![7, 8, 9, 1]];
    let write = |arm: &Arm<Gpu<Emulator, Bf16>>, stop_token| {
        let sampling = SamplingSettings { temperature: 0.0, ..Default::default() };
        let settings = GenerationSettings { max_new_tokens: 6, stop_token, sampling };
        let prompts: Vec<_> = prompts.iter().map(|tokens| Prompt { tokens, index: 0 }).collect();
        arm.with_parameters(&model, &arena, |device, parameters| {
            let mut two = Sequences::new(device, &model, parameters, 2, 12).expect("fits");
            generate_batch(device, &mut two, &prompts, &settings, |_, _| ()).expect("writes")
        })
    };
    let at_once = arm::<Bf16>(32, 1);
    let stop_tokens = [None, Some(write(&at_once, None)[1][2])];
    for stop_token in stop_tokens {
        let expected = write(&at_once, stop_token);
        for seed in 0..4 {
            let schedule = Schedule::new(seed);
            let emulator = Emulator::new(EmulatorSettings { warp: 32, seed: 1 });
            let backend = Gpu::new(emulator.expect("a width of warps").with_schedule(&schedule));
            let later = Arm::new(format!("a schedule of seed {seed}"), backend);
            assert_eq!(write(&later, stop_token), expected, "{stop_token:?}, seed {seed}");
        }
    }
}

#[test]
fn the_order_of_threads_changes_no_bit_in_fp32() {
    the_order_of_threads_changes_no_bit::<Fp32>(64);
}

#[test]
fn the_order_of_threads_changes_no_bit_in_bf16() {
    the_order_of_threads_changes_no_bit::<Bf16>(32);
}
