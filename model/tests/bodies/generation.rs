//! The recurrence is the model: what it says of a text is what the forward pass says, however the text is fed.

use tidemill_kernels::Backend;
use tidemill_model::generation::{
    GenerationSettings, PIECE_POSITIONS, Recurrence, SamplingSettings, generate,
};
use tidemill_model::score::Scorer;
use tidemill_model::{
    Device, Mamba, MambaConfig, Microbatch, MicrobatchShape, ModelError, Parameters, Trainable,
};

use super::arm::Arm;
use super::lane::bits;

/// Longer than two pieces, or one, and not a whole number of them.
fn positions<B>(arm: &Arm<B>) -> usize {
    arm.sizes.choose(2, 1) * PIECE_POSITIONS + 7
}

/// Small models of odd sizes; their initial weights, made larger so that the state matters.
fn models<B>(arm: &Arm<B>) -> Vec<(Mamba, Vec<f32>)> {
    let odd = MambaConfig { d_state: 5, d_conv: 3, dt_rank: 2, ..MambaConfig::new(61, 13, 2) };
    let untied = MambaConfig { tie_embeddings: false, ..MambaConfig::new(40, 24, 1) };
    // One tap has no past to remember, and there is no bias.
    let one_tap = MambaConfig { d_conv: 1, conv_bias: false, ..MambaConfig::new(33, 17, 1) };
    let build = |config: MambaConfig| {
        let model = Mamba::new(&config).expect("sizes");
        let mut arena = model.initialize(7);
        for tensor in model.layout().tensors().iter().filter(|tensor| tensor.shape.len() == 2) {
            if !tensor.name.ends_with("A_log") {
                arena[tensor.range()].iter_mut().for_each(|weight| *weight *= 3.0);
            }
        }
        (model, arena)
    };
    let configs = arm.sizes.choose(vec![odd.clone(), untied, one_tap.clone()], vec![odd, one_tap]);
    configs.into_iter().map(build).collect()
}

fn text(length: usize, vocab_size: usize) -> Vec<u32> {
    (0..length).map(|i| ((i * i * 31 + i * 17 + 3) % vocab_size) as u32).collect()
}

/// Runs `body` for every model.
fn for_each_model<B: Backend>(
    arm: &Arm<B>,
    body: impl Fn(&mut Device<'_, B>, &Mamba, &Parameters<B>),
) {
    for (model, arena) in models(arm) {
        arm.with_parameters(&model, &arena, |device, parameters| body(device, &model, parameters));
    }
}

pub fn scores_are_losses<B: Backend>(arm: &Arm<B>) {
    let tolerance = arm.by_precision(1e-4, 5e-2);
    for_each_model(arm, |device, model, parameters| {
        let tokens = text(positions(arm) + 1, model.vocab_size());
        let shape = MicrobatchShape { samples: 1, positions: positions(arm), samples_per_grain: 1 };
        let mut workspace = Trainable::plan(model, device, shape).expect("plans");
        let microbatch = Microbatch {
            tokens: &tokens,
            samples: 1,
            positions: positions(arm),
            samples_per_grain: 1,
            document_end: None,
        };
        let losses =
            model.row_losses(device, &mut workspace, parameters, microbatch).expect("runs");
        let mut scorer = Scorer::new(device, model, parameters).expect("fits");
        let scores = scorer.log_probabilities(device, &tokens).expect("scores");
        assert_eq!(scores.len(), losses.len());
        for (position, (score, loss)) in scores.iter().zip(&losses).enumerate() {
            assert!((score + loss).abs() < tolerance, "position {position}: {score}, {loss}");
        }
    });
}

pub fn a_score_depends_on_nothing_else<B: Backend>(arm: &Arm<B>) {
    for_each_model(arm, |device, model, parameters| {
        let tokens = text(positions(arm) + 1, model.vocab_size());
        let mut scorer = Scorer::new(device, model, parameters).expect("fits");
        let first = scorer.log_probabilities(device, &tokens).expect("scores");
        let other: Vec<u32> = tokens.iter().rev().copied().collect();
        scorer.log_probabilities(device, &other[..50]).expect("scores");
        let again = scorer.log_probabilities(device, &tokens).expect("scores");
        assert_eq!(bits(&first), bits(&again));
        // Nor on what follows.
        for length in [2, 3, PIECE_POSITIONS + 1, PIECE_POSITIONS + 2] {
            let short = scorer.log_probabilities(device, &tokens[..length]).expect("scores");
            assert_eq!(bits(&short), bits(&first[..length - 1]), "{length} tokens");
        }
    });
}

pub fn cuts_change_no_bit<B: Backend>(arm: &Arm<B>) {
    for_each_model(arm, |device, model, parameters| {
        let vocab_size = model.vocab_size();
        let tokens = text(positions(arm), vocab_size);
        let mut recurrence = Recurrence::new(device, model, parameters, 1).expect("fits");
        recurrence.advance(device, &tokens).expect("advances");
        let whole = recurrence.logits(device).expect("logits").to_vec();
        assert_eq!(whole.len(), vocab_size);
        for piece in [1, 5, PIECE_POSITIONS] {
            recurrence.reset(device).expect("resets");
            for tokens in tokens.chunks(piece) {
                recurrence.advance(device, tokens).expect("advances");
            }
            let logits = recurrence.logits(device).expect("logits");
            assert_eq!(bits(logits), bits(&whole), "{piece} tokens at a time");
        }
        // The second of three sequences, the others different.
        let other: Vec<u32> = tokens.iter().map(|token| (token + 1) % vocab_size as u32).collect();
        let three = [&other[..], &tokens[..], &other[..]].concat();
        let mut together = Recurrence::new(device, model, parameters, 3).expect("fits");
        together.advance(device, &three).expect("advances");
        let logits = together.logits(device).expect("logits");
        assert_eq!(logits.len(), 3 * vocab_size);
        assert_eq!(bits(&logits[vocab_size..2 * vocab_size]), bits(&whole));
        assert_eq!(bits(&logits[..vocab_size]), bits(&logits[2 * vocab_size..]));
        assert_ne!(bits(&logits[..vocab_size]), bits(&whole));
    });
}

pub fn writing_stops_and_repeats<B: Backend>(arm: &Arm<B>) {
    for_each_model(arm, |device, model, parameters| {
        let mut recurrence = Recurrence::new(device, model, parameters, 1).expect("fits");
        let prompt = text(9, model.vocab_size());
        let settings = |seed, stop_token| GenerationSettings {
            max_new_tokens: 24,
            stop_token,
            sampling: SamplingSettings { seed, ..SamplingSettings::default() },
        };
        let mut write = |settings: &GenerationSettings| {
            let mut seen = Vec::new();
            let on_token = |token| seen.push(token);
            let written = generate(device, &mut recurrence, &prompt, settings, on_token);
            let written = written.expect("writes");
            assert_eq!(written, seen);
            written
        };
        let written = write(&settings(5, None));
        assert_eq!(written.len(), 24);
        assert_eq!(write(&settings(5, None)), written);
        assert_ne!(write(&settings(6, None)), written);
        let stop = written[10];
        let end = written.iter().position(|token| *token == stop).expect("it is there");
        assert_eq!(write(&settings(5, Some(stop))), written[..=end]);
        let none = GenerationSettings { max_new_tokens: 0, ..settings(5, None) };
        assert!(write(&none).is_empty());
    });
}

pub fn wrong_text_is_an_error<B: Backend>(arm: &Arm<B>) {
    for_each_model(arm, |device, model, parameters| {
        let vocab_size = model.vocab_size();
        // The first row of padding, or just past the table.
        let outside = vocab_size as u32;
        let mut scorer = Scorer::new(device, model, parameters).expect("fits");
        let error = scorer.log_probabilities(device, &[0, outside, 1]).expect_err("outside");
        assert_eq!(
            error.to_string(),
            format!("position 1: token {outside} is outside the vocabulary of {vocab_size}")
        );
        let error = scorer.log_probabilities(device, &[0]).expect_err("one token");
        assert_eq!(error.to_string(), "tokens: expected at least 2, found 1");
        let mut recurrence = Recurrence::new(device, model, parameters, 2).expect("fits");
        assert!(recurrence.logits(device).is_err(), "nothing seen");
        assert!(recurrence.advance(device, &[0, 1, 2]).is_err(), "two sequences, three tokens");
        assert!(Recurrence::new(device, model, parameters, 0).is_err(), "no sequences");
        let mut one = Recurrence::new(device, model, parameters, 1).expect("fits");
        let settings = GenerationSettings::default();
        let error = generate(device, &mut one, &[], &settings, |_| ()).expect_err("no prompt");
        assert_eq!(error.to_string(), "prompt: expected at least 1 token, found none");
        let error = generate(device, &mut one, &[outside], &settings, |_| ()).expect_err("outside");
        assert!(matches!(error, ModelError::Token { .. }), "{error}");
    });
}
