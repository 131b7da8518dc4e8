//! Independent documents in a sample.

use tidemill_kernels::Backend;
use tidemill_model::{
    GrainLoss, LanguageModel, MambaConfig, Microbatch, MicrobatchShape, Trainable,
};

use super::arm::Arm;
use super::families::models_beside_mamba;
use super::lane::{Lane, bits, moved_parameters, noise, odd_config, rows};

/// The token that ends a document.
const END: u32 = 0;
/// The documents of a sample draw their tokens from these in turn.
const VOCABULARIES: [[u32; 6]; 2] = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]];
/// Samples, and positions of each.
const SAMPLES: usize = 3;
const POSITIONS: usize = 37;
/// The ends of the documents of each sample; the last is cut by the sample's end.
const ENDS: [&[usize]; SAMPLES] = [&[0, 9, 10, 23], &[15, 16, 31, 32, 35], &[1]];

/// `tokens[samples, positions + 1]`; `seeds` are for the two kinds of documents.
fn tokens(seeds: [u64; 2]) -> Vec<u32> {
    let draws = seeds.map(|seed| noise(seed, SAMPLES * (POSITIONS + 1)));
    let mut tokens = Vec::new();
    for ends in ENDS {
        for position in 0..=POSITIONS {
            let kind = ends.iter().filter(|&&end| end < position).count() % 2;
            let draw = (draws[kind][tokens.len()] + 1.0) * 3.0;
            let token = VOCABULARIES[kind][draw as usize];
            tokens.push(if ends.contains(&position) { END } else { token });
        }
    }
    tokens
}

/// The loss of every row, those of grains, and the gradient arena.
struct Results {
    rows: Vec<f32>,
    losses: Vec<GrainLoss>,
    gradients: Vec<f32>,
}

fn run<B: Backend>(
    arm: &Arm<B>,
    model: &LanguageModel<B>,
    tokens: &[u32],
    document_end: Option<u32>,
) -> Results {
    let arena = moved_parameters(model, 0.3);
    arm.with_parameters(model, &arena, |device, parameters| {
        let (samples, positions, samples_per_grain) = (SAMPLES, POSITIONS, 2);
        let shape = MicrobatchShape { samples, positions, samples_per_grain };
        let samples = &rows(tokens, positions)[..];
        let microbatch = Microbatch { samples, positions, samples_per_grain, document_end };
        let mut workspace = model.plan(device, shape).expect("a workspace");
        let mut source = parameters.source(model.layout());
        let rows = model.row_losses(device, &mut workspace, &mut source, microbatch);
        let mut lane = Lane::new(device, model.layout());
        let losses =
            model.forward_backward(device, &mut workspace, &mut source, microbatch, &mut lane);
        let gradients = lane.gradients(device);
        Results { rows: rows.expect("losses"), losses: losses.expect("gradients"), gradients }
    })
}

/// The rows whose inputs are tokens of `kind`.
fn rows_of(kind: usize, tokens: &[u32], values: &[f32]) -> Vec<u32> {
    let inputs = tokens.chunks(POSITIONS + 1).flat_map(|sample| &sample[..POSITIONS]);
    let own = inputs.zip(values).filter(|(token, _)| VOCABULARIES[kind].contains(token));
    bits(&own.map(|(_, &value)| value).collect::<Vec<_>>())
}

/// The gradients of `tokens` in the embedding table, without those of its use as the head.
fn embedding_gradients<B: Backend>(
    model: &LanguageModel<B>,
    gradients: &[f32],
    tokens: &[u32],
) -> Vec<f32> {
    let table = &gradients[model.layout().gradient_range(0)];
    let row = |&token: &u32| table[token as usize * model.width()..][..model.width()].to_vec();
    tokens.iter().flat_map(row).collect()
}

/// A property of every model of 13 tokens: where documents are independent, other tokens in some
/// documents change no bit of the others' losses, nor of the gradients of their tokens.
pub fn assert_independent<B: Backend>(arm: &Arm<B>, model: &LanguageModel<B>) {
    assert_eq!(model.vocab_size(), 13);
    let original = tokens([1, 2]);
    let found = run(arm, model, &original, Some(END));
    assert!(found.gradients.iter().all(|x| x.is_finite()));
    let ends = ENDS.iter().flat_map(|ends| ends.iter()).count();
    let counted: u64 = found.losses.iter().map(|loss| loss.tokens).sum();
    assert_eq!(counted, (SAMPLES * POSITIONS - ends) as u64, "counted tokens");
    let of_ends = embedding_gradients(model, &found.gradients, &[END]);
    assert!(of_ends.iter().all(|&x| x == 0.0), "no position sees the end of a document");
    for (kept, seeds) in [(1, [3, 2]), (0, [1, 3])] {
        let changed = tokens(seeds);
        let other = run(arm, model, &changed, Some(END));
        let what = format!("{}: documents of kind {kept}", arm.name);
        let rows = |kind: usize, results: &Results| rows_of(kind, &original, &results.rows);
        assert_eq!(rows(kept, &found), rows(kept, &other), "{what}: losses");
        assert_ne!(rows(1 - kept, &found), rows(1 - kept, &other), "the others were changed");
        let own = |results: &Results| {
            bits(&embedding_gradients(model, &results.gradients, &VOCABULARIES[kept]))
        };
        assert_eq!(own(&found), own(&other), "{what}: gradients");
        // If a sample is one text, none of this holds.
        let [one, another] = [&original, &changed].map(|tokens| run(arm, model, tokens, None));
        assert_ne!(rows(kept, &one), rows(kept, &another));
        assert_ne!(own(&one), own(&another));
        assert_ne!(rows(kept, &one), rows(kept, &found));
    }
}

/// Documents in a Mamba model.
pub fn of_mamba_are_independent<B: Backend>(arm: &Arm<B>) {
    let config = MambaConfig { tie_embeddings: false, ..odd_config() };
    assert_independent(arm, &LanguageModel::new(&config).expect("an odd model"));
}

/// Documents in models with attention, in a Mamba-2, and in hybrids.
pub fn of_attention_are_independent<B: Backend>(arm: &Arm<B>) {
    for (name, config) in models_beside_mamba() {
        println!("{name}");
        assert_independent(arm, &LanguageModel::new(&config).expect(name));
    }
}
