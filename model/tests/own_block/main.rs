//! Kinds of blocks from outside the crate, in a model among the crate's own blocks: their gradients
//! agree with differences of the loss, and their results token by token agree with those for a whole
//! sample.
//!
//! One [block](shifted_gate) uses the crate's public parts where these exist, and otherwise loops
//! over the CPU's memory; [another](bend) has no memory of its own.

#[path = "../bodies/arm.rs"]
#[allow(dead_code, reason = "other test programs use the rest")]
mod arm;
mod bend;
#[path = "../bodies/lane.rs"]
#[allow(dead_code, reason = "other test programs use the rest")]
mod lane;
mod shifted_gate;

use std::num::NonZeroUsize;

use arm::Arm;
use bend::Bend;
use lane::{
    Lane, Walk, bits, loss, loss_bits, moved_parameters, noise, run_lane_of_documents, tokens,
};
use shifted_gate::ShiftedGate;
use tidemill_kernels::backend::Gelu;
use tidemill_kernels::{Cpu, Runtime};
use tidemill_model::block::{AnyBlock, RowBlock};
use tidemill_model::generation::{
    GenerationSettings, Prompt, SamplingSettings, Sequences, generate_batch,
};
use tidemill_model::language_model::Stem;
use tidemill_model::linear::{Linear, NewLinear};
use tidemill_model::mamba::MambaBlock;
use tidemill_model::norm::{NewNorm, Norm, NormKind};
use tidemill_model::parameter_list::{Bias, ParameterList};
use tidemill_model::score::Scorer;
use tidemill_model::transformer::{Activation, Attention, Mlp, TransformerBlock, alibi_slopes};
use tidemill_model::{
    Device, GrainLoss, LanguageModel, MambaConfig, Microbatch, MicrobatchShape, Parameters,
    Recompute, Sample, ToTokens, Tokenized, Tokens, Trainable,
};

const WIDTH: usize = 6;
const VOCABULARY: usize = 13;

fn rms_norm(name: String, width: usize) -> NewNorm {
    NewNorm { name, kind: NormKind::RootMeanSquare, bias: Bias::Absent, width, eps: 1e-5 }
}

/// Attention and an MLP, put together from public parts.
fn attention(parameters: &mut ParameterList, index: usize) -> TransformerBlock {
    let (d, f) = (WIDTH, 9);
    let name = |tensor: &str| format!("blocks.{index}.{tensor}");
    let map = |tensor, inputs, outputs| NewLinear {
        name: name(tensor),
        inputs,
        outputs,
        bias: Bias::Absent,
        standard_deviation: 0.3,
    };
    TransformerBlock {
        norm_1: Norm::add(parameters, rms_norm(name("norm_1"), d)),
        projections: vec![Linear::add(parameters, map("projection", d, 3 * d))],
        attention: Attention {
            heads: 2,
            head_width: 3,
            rotary: None,
            scale: 0.6,
            window: None,
            slopes: Some(alibi_slopes(2, 8.0)),
            clip: None,
        },
        query_key_norms: None,
        out_proj: Linear::add(parameters, map("out_proj", d, d)),
        norm_2: Norm::add(parameters, rms_norm(name("norm_2"), d)),
        mlp: Mlp {
            up_proj: Linear::add(parameters, map("up_proj", d, f)),
            activation: Activation::Gelu(Gelu::Erf),
            down_proj: Linear::add(parameters, map("down_proj", f, d)),
        },
    }
}

/// A Mamba block, one of ours, attention, two more of ours, the latter with another size, and one
/// without memory.
fn model() -> LanguageModel<Cpu> {
    let mamba = MambaConfig { d_state: 3, d_conv: 3, ..MambaConfig::new(VOCABULARY, WIDTH, 5) };
    let stem = Stem {
        vocab_size: VOCABULARY,
        width: WIDTH,
        embedding_name: "embedding",
        positions: None,
        norm: rms_norm("norm".to_owned(), WIDTH),
        head_name: None,
        standard_deviation: 0.3,
        logit_scale: 1.0,
    };
    let config = serde_json::json!({ "model_type": "shifted_gates" });
    LanguageModel::assemble(stem, 6, config, |parameters, index| -> Box<dyn AnyBlock<Cpu>> {
        match index {
            0 => Box::new(MambaBlock::add(parameters, &mamba, index)),
            2 => Box::new(attention(parameters, index)),
            4 => Box::new(ShiftedGate::add(parameters, index, [WIDTH, 11])),
            5 => Box::new(RowBlock(Bend::add(parameters, index, WIDTH))),
            _ => Box::new(ShiftedGate::add(parameters, index, [WIDTH, 7])),
        }
    })
}

fn arm() -> Arm<Cpu> {
    Arm::new("cpu", Cpu::new(NonZeroUsize::MIN).expect("one thread"))
}

const WALK: Walk =
    Walk { samples: 3, positions: 11, samples_per_grain: 2, grains_per_microbatch: 2 };

/// As in `bodies/gradients.rs`: an fp32 loss leaves quotients good to a few 1e-4 of the gradient's norm.
#[test]
fn gradients_are_differences_of_the_loss() {
    let (arm, model) = (arm(), model());
    let arena = moved_parameters(&model, 0.6);
    let tokens = tokens(5, WALK.samples, WALK.positions, VOCABULARY);
    let (_, gradients) = run_lane_of_documents(&arm, &model, &arena, &tokens, WALK, None);
    let layout = model.layout();
    let mut checked = 0;
    for (use_index, slot) in layout.uses().iter().enumerate() {
        let segment = &layout.segments()[slot.segment];
        if !segment.name.starts_with("blocks.") {
            continue;
        }
        for tensor in &layout.tensors()[segment.tensors.clone()] {
            let first =
                layout.gradient_range(use_index).start + tensor.offset - segment.range.start;
            let gradient = &gradients[first..][..tensor.elements()];
            let norm = gradient.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            assert!(norm > 1e-3, "{}: a gradient of {norm} tests nothing", tensor.name);
            let along: Vec<f64> = gradient.iter().map(|&x| f64::from(x) / norm).collect();
            let scale = (tensor.elements() as f64).sqrt().recip();
            let across = noise(3, tensor.elements());
            let across = across.iter().map(|x| f64::from(x.signum()) * scale).collect();
            for direction in [along, across] {
                let at = |step: f64| {
                    let mut arena = arena.clone();
                    for (value, x) in arena[tensor.range()].iter_mut().zip(&direction) {
                        *value = (f64::from(*value) + step * x) as f32;
                    }
                    loss(&arm, &model, &arena, &tokens, WALK)
                };
                let central = |step: f64| (at(step) - at(-step)) / (2.0 * step);
                let step = (0.02 / norm).min(0.1);
                let found = (4.0 * central(step) - central(2.0 * step)) / 3.0;
                let expected: f64 =
                    gradient.iter().zip(&direction).map(|(&x, y)| f64::from(x) * y).sum();
                let error = (found - expected).abs() / norm;
                assert!(error < 1e-3, "{}: {found}, {expected}, norm {norm}", tensor.name);
                checked += 1;
            }
        }
    }
    assert_eq!(checked, 2 * (10 + 3 * 6 + 6 + 1), "tensors of blocks");
}

/// Microbatches, independent documents or one text, and recomputation: memory, never numerics.
#[test]
fn microbatches_and_recomputation_change_no_bit() {
    let arm = arm();
    let kept = model();
    let arena = moved_parameters(&kept, 0.3);
    let tokens = tokens(7, WALK.samples, WALK.positions, VOCABULARY);
    let run = |model: &LanguageModel<Cpu>, grains_per_microbatch, end| {
        let walk = Walk { grains_per_microbatch, ..WALK };
        let (losses, gradients) = run_lane_of_documents(&arm, model, &arena, &tokens, walk, end);
        (loss_bits(&losses), bits(&gradients))
    };
    let again = model().with_recompute(Recompute::Block);
    let expected = [None, Some(0)].map(|end| run(&kept, 2, end));
    assert!(expected[0] != expected[1], "documents end");
    for (end, expected) in [None, Some(0)].into_iter().zip(expected) {
        assert!(run(&kept, 1, end) == expected, "{end:?}: microbatches");
        assert!(run(&again, 2, end) == expected, "{end:?}: formed again");
    }
    let backend = &arm.backend;
    let bytes = |model: &LanguageModel<Cpu>| model.sample_bytes(backend, 11).expect("sizes");
    // Two of ours are alike; the third has another size, and so memory of its own. A row of the kept values is n, its root mean
    // square, and [u | g].
    assert_eq!(bytes(&kept) - bytes(&again), 4 * 11 * (6 + 1 + 2 * 7));
}

/// Parameters that give blocks more weight than embeddings, so that their states matter.
fn strong_parameters(model: &LanguageModel<Cpu>) -> Vec<f32> {
    let mut arena = moved_parameters(model, 0.3);
    for tensor in model.layout().tensors() {
        if tensor.name.starts_with("blocks.") {
            arena[tensor.range()].iter_mut().for_each(|weight| *weight *= 3.0);
        }
    }
    arena
}

#[test]
fn scores_are_losses_and_cuts_change_no_bit() {
    let (arm, model) = (arm(), model());
    let arena = strong_parameters(&model);
    let tokens = tokens(9, 1, 40, VOCABULARY);
    arm.with_parameters(&model, &arena, |device, parameters| {
        let shape = MicrobatchShape { samples: 1, positions: 40, samples_per_grain: 1 };
        let mut workspace = model.plan(device, shape).expect("a workspace");
        let microbatch = Microbatch {
            samples: std::slice::from_ref(&tokens),
            positions: 40,
            samples_per_grain: 1,
            document_end: None,
        };
        let mut source = parameters.source(model.layout());
        let losses = model.row_losses(device, &mut workspace, &mut source, microbatch);
        let losses = losses.expect("runs");
        let mut scorer = Scorer::new(device, &model, parameters, 1, 64).expect("fits");
        let scores = scorer.log_probabilities(device, &tokens).expect("scores");
        assert_eq!(scores.len(), losses.len());
        for (position, (score, loss)) in scores.iter().zip(&losses).enumerate() {
            assert!((score + loss).abs() < 1e-4, "position {position}: {score}, {loss}");
        }
        let mut sequences = Sequences::new(device, &model, parameters, 1, 64).expect("fits");
        let mut logits = |cut: usize| {
            sequences.begin(device, 1).expect("begins");
            for piece in tokens.chunks(cut) {
                sequences.advance(device, &[piece]).expect("room");
            }
            bits(sequences.logits(device).expect("logits"))
        };
        let whole = logits(tokens.len());
        assert!([1, 3, 17].into_iter().all(|cut| logits(cut) == whole));
    });
}

/// Answers move between places while others are written; each is the same as alone.
#[test]
fn answers_depend_on_nothing_else() {
    let (arm, model) = (arm(), model());
    let arena = strong_parameters(&model);
    arm.with_parameters(&model, &arena, |device, parameters| {
        let texts: Vec<Vec<u32>> = (0..40)
            .map(|index| tokens(index, 1, 3 + 5 * index as usize % 11, VOCABULARY))
            .collect();
        let prompt = |(tokens, index)| Prompt { tokens, index };
        let prompts: Vec<_> = texts.iter().map(Vec::as_slice).zip(0..).map(prompt).collect();
        let settings = GenerationSettings {
            max_new_tokens: 20,
            stop_token: Some(4),
            sampling: SamplingSettings { temperature: 1.0, ..SamplingSettings::default() },
        };
        let mut answers = |prompts: &[Prompt<'_>], at_once| {
            let mut sequences =
                Sequences::new(device, &model, parameters, at_once, 64).expect("fits");
            generate_batch(device, &mut sequences, prompts, &settings, |_, _| ()).expect("writes")
        };
        let together = answers(&prompts, 5);
        let alone: Vec<_> = prompts.iter().flat_map(|&prompt| answers(&[prompt], 1)).collect();
        assert_eq!(together, alone);
        let lengths: Vec<_> = alone.iter().map(Vec::len).collect();
        assert!(lengths.iter().any(|&length| length != lengths[0]), "some end early: {lengths:?}");
    });
}

/// A sample from outside the crate: letters, which are tokens.
#[derive(Clone)]
struct Letters(String);

impl Sample for Letters {
    fn positions(&self) -> usize {
        self.0.len() - 1
    }
}

impl ToTokens for Letters {
    fn to_tokens(&self) -> Tokens {
        self.0.bytes().map(|letter| u32::from(letter - b'a')).collect()
    }
}

/// The results of all calls of a model, numbers as their bits.
#[derive(Debug, PartialEq)]
struct Calls {
    losses: [Vec<(u64, u64)>; 4],
    greedy: Option<Vec<bool>>,
    counted: Option<u64>,
    gradients: Vec<u32>,
    config: serde_json::Value,
}

fn every_call<M: Trainable<Cpu>>(model: &M, samples: &[M::Sample]) -> Calls {
    let backend = arm().backend;
    let mut stream = backend.device_stream().expect("a device stream");
    let device = &mut Device { backend: &backend, stream: &mut stream };
    let arena = model.initialize(3);
    let parameters = Parameters::from_host(device, model.layout(), &arena).expect("parameters");
    let positions = samples[0].positions();
    let microbatch = Microbatch { samples, positions, samples_per_grain: 2, document_end: Some(0) };
    let mut workspace = model.plan(device, microbatch.shape()).expect("a workspace");
    let (workspace, source) = (&mut workspace, &mut parameters.source(model.layout()));
    let forward = model.forward(device, workspace, source, microbatch).expect("runs");
    let greedy = model.forward_greedy(device, workspace, source, microbatch).expect("runs");
    let before = GrainLoss { loss_sum: 0.5, tokens: 3 };
    let onto = model.forward_onto(device, workspace, source, microbatch, before).expect("runs");
    let mut lane = Lane::new(device, model.layout());
    let sink = &mut lane;
    let losses = model.forward_backward(device, workspace, source, microbatch, sink).expect("runs");
    let losses = [forward, greedy.0, vec![onto], losses].map(|losses| loss_bits(&losses));
    let counted = model.counted_tokens(microbatch);
    let (gradients, config) = (bits(&lane.gradients(device)), model.config_json());
    Calls { losses, greedy: greedy.1, counted, gradients, config }
}

#[test]
fn samples_that_say_their_tokens_train_to_the_bits_of_these() {
    let samples = ["abcdefghi", "mlkjihgfe", "aabbaacca"].map(|it| Letters(it.to_owned()));
    let tokens = samples.each_ref().map(Letters::to_tokens);
    let expected = every_call(&model(), &tokens);
    assert!(expected.greedy.is_some() && expected.counted < Some(3 * 8), "documents end");
    assert_eq!(every_call(&Tokenized::<Letters, _>::new(model()), &samples), expected);
}
