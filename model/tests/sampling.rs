//! Sampling of the next token, compared with results by hand and by transformers.

use std::path::Path;

use serde_json::Value;
use tidemill_model::generation::{Sampler, SamplingSettings};

fn counts(settings: SamplingSettings, logits: &[f32], seen: &[u32], draws: usize) -> Vec<usize> {
    let mut counts = vec![0; logits.len()];
    for draw in 0..draws {
        let settings = SamplingSettings { seed: draw as u64, ..settings.clone() };
        let mut sampler = Sampler::new(settings, 0, logits.len()).expect("settings");
        sampler.saw(seen);
        counts[sampler.next(logits).expect("finite") as usize] += 1;
    }
    counts
}

#[test]
fn greedy_takes_the_first_of_equals() {
    let greedy = SamplingSettings { temperature: 0.0, ..SamplingSettings::default() };
    assert_eq!(counts(greedy.clone(), &[1.0, 3.0, 3.0, 2.0], &[], 1), [0, 1, 0, 0]);
    assert_eq!(counts(greedy, &[-2.0, -1.0, -1.0], &[], 1), [0, 1, 0]);
}

#[test]
fn draws_follow_the_probabilities() {
    // Probabilities 0.1, 0.2, 0.7 at temperature 1; squared and normalized at temperature 1/2.
    let logits = [0.1_f32.ln(), 0.2_f32.ln(), 0.7_f32.ln()];
    let share =
        |settings, token: usize| counts(settings, &logits, &[], 20_000)[token] as f64 / 20_000.0;
    let plain = SamplingSettings::default();
    // Three standard deviations of 20,000 draws are 0.01.
    assert!((share(plain.clone(), 0) - 0.1).abs() < 0.01);
    assert!((share(plain.clone(), 1) - 0.2).abs() < 0.01);
    let sharp = SamplingSettings { temperature: 0.5, ..plain.clone() };
    assert!((share(sharp, 1) - 0.04 / 0.54).abs() < 0.01);
    let two = SamplingSettings { top_k: 2, ..plain };
    assert!((share(two, 1) - 0.2 / 0.9).abs() < 0.01);
}

#[test]
fn top_k_and_top_p_leave_the_rest_out() {
    let logits = [0.15_f32.ln(), 0.5_f32.ln(), 0.3_f32.ln(), 0.05_f32.ln()];
    let drawn = |settings| {
        let counts = counts(settings, &logits, &[], 2000);
        counts.iter().map(|count| *count > 0).collect::<Vec<_>>()
    };
    let plain = SamplingSettings::default();
    let nucleus = |top_p| SamplingSettings { top_p, ..plain.clone() };
    assert_eq!(drawn(nucleus(0.4)), [false, true, false, false]);
    assert_eq!(drawn(nucleus(0.7)), [false, true, true, false]);
    assert_eq!(drawn(nucleus(0.9)), [true, true, true, false]);
    assert_eq!(drawn(nucleus(1.0)), [true; 4]);
    assert_eq!(drawn(nucleus(1e-9)), [false, true, false, false]);
    let top = |top_k| SamplingSettings { top_k, ..plain.clone() };
    assert_eq!(drawn(top(1)), [false, true, false, false]);
    assert_eq!(drawn(top(3)), [true, true, true, false]);
    assert_eq!(drawn(top(9)), [true; 4]);
    // Top-p counts the probabilities that top-k has left: 0.5 / 0.8 alone reaches 0.6.
    let both = SamplingSettings { top_k: 2, top_p: 0.6, ..plain };
    assert_eq!(drawn(both), [false, true, false, false]);
}

#[test]
fn the_penalty_lowers_both_signs() {
    let greedy = SamplingSettings {
        temperature: 0.0,
        repetition_penalty: 2.0,
        ..SamplingSettings::default()
    };
    assert_eq!(counts(greedy.clone(), &[1.0, 1.5, 0.5], &[1, 1], 1), [1, 0, 0]);
    assert_eq!(counts(greedy.clone(), &[-1.5, -1.0, -3.0], &[1], 1), [1, 0, 0]);
    let mut sampler = Sampler::new(greedy, 0, 2).expect("settings");
    let logits = [1.5, 1.0];
    let tokens: Vec<_> = (0..2).map(|_| sampler.next(&logits).expect("finite")).collect();
    assert_eq!(tokens, [0, 1], "a token that was chosen is penalized from then on");
}

#[test]
fn wrong_settings_and_logits_are_errors() {
    let refused = |settings: SamplingSettings| {
        Sampler::new(settings, 0, 2).err().expect("refused").to_string()
    };
    let plain = SamplingSettings::default();
    assert!(refused(SamplingSettings { temperature: -1.0, ..plain.clone() }).contains("temper"));
    assert!(refused(SamplingSettings { top_p: 0.0, ..plain.clone() }).contains("top_p"));
    assert!(refused(SamplingSettings { min_p: 1.5, ..plain.clone() }).contains("min_p"));
    let zero = SamplingSettings { repetition_penalty: 0.0, ..plain.clone() };
    assert!(refused(zero).contains("repetition_penalty"));
    let mut sampler = Sampler::new(plain, 0, 2).expect("settings");
    let message = sampler.next(&[0.0, f32::NAN]).expect_err("refused").to_string();
    assert_eq!(message, "the logit of token 1 is NaN");
}

/// The tokens kept and their probabilities are those of transformers, whose processors wrote `sampling.json`.
#[test]
fn filters_are_those_of_transformers() {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/transformers/sampling.json");
    let bytes = std::fs::read(&path).expect("a fixture");
    let cases: Vec<Value> = serde_json::from_slice(&bytes).expect("JSON");
    assert!(cases.len() > 15);
    for case in &cases {
        let settings: SamplingSettings =
            serde_json::from_value(case["settings"].clone()).expect("settings");
        let logits: Vec<f32> = serde_json::from_value(case["logits"].clone()).expect("numbers");
        let seen: Vec<u32> = serde_json::from_value(case["seen"].clone()).expect("tokens");
        let mut sampler = Sampler::new(settings, 0, logits.len()).expect("settings");
        sampler.saw(&seen);
        let found = sampler.probabilities(&logits).expect("finite");
        let expected = case["probabilities"].as_object().expect("by token");
        assert_eq!(found.len(), expected.len(), "{case}: {found:?}");
        for (token, probability) in found {
            let expected = expected[&token.to_string()].as_f64().expect("a number");
            assert!((probability - expected).abs() < 1e-12, "{case}: {token}: {probability}");
        }
    }
}

/// Every sequence of a batch has draws of its own, which are the same again for the same seed.
#[test]
fn sequences_draw_apart() {
    let draws = |seed, sequence| {
        let settings = SamplingSettings { seed, ..SamplingSettings::default() };
        let mut sampler = Sampler::new(settings, sequence, 64).expect("settings");
        (0..16).map(|_| sampler.next(&[0.0; 64]).expect("finite")).collect::<Vec<_>>()
    };
    assert_eq!(draws(3, 2), draws(3, 2));
    assert_ne!(draws(3, 2), draws(3, 1));
    assert_ne!(draws(3, 2), draws(4, 2));
}
