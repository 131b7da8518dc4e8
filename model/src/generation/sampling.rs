//! From logits to the next token.
//!
//! The order is that of transformers and of the reference implementation of Mamba, which agree: repetition penalty, top-k,
//! temperature, top-p (temperature does not change which tokens are the top k). Everything is computed in f64 from the
//! logits, with ties going to the lowest token id, so equal logits, settings and seed give equal tokens.

use std::cmp::Ordering;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::error::{ModelError, Result};

/// How the next token is chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingSettings {
    /// Logits are divided by it; 0 takes the most likely token.
    pub temperature: f64,
    /// Only the k most likely tokens; 0 for all.
    pub top_k: usize,
    /// Only the fewest most likely tokens whose probabilities reach this sum; 1 for all (Holtzman et al., 2020).
    pub top_p: f64,
    /// Logits of tokens that have been seen, in the prompt too, are divided by it where positive and multiplied by
    /// it where negative; 1 for none (CTRL, Keskar et al., 2019).
    pub repetition_penalty: f64,
    /// Seeds the draws.
    pub seed: u64,
}

impl Default for SamplingSettings {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: 0, top_p: 1.0, repetition_penalty: 1.0, seed: 0 }
    }
}

impl SamplingSettings {
    /// Checks every value.
    ///
    /// # Errors
    /// A value that chooses nothing, named by its key.
    pub fn check(&self) -> Result<()> {
        let Self { temperature, top_p, repetition_penalty, .. } = *self;
        if !(temperature >= 0.0 && temperature.is_finite()) {
            let expected = "a finite number of at least 0";
            return Err(ModelError::config("temperature", expected, temperature));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(ModelError::config("top_p", "a number above 0 and at most 1", top_p));
        }
        if !(repetition_penalty > 0.0 && repetition_penalty.is_finite()) {
            let expected = "a finite number above 0";
            return Err(ModelError::config("repetition_penalty", expected, repetition_penalty));
        }
        Ok(())
    }
}

/// Chooses the tokens of one sequence.
pub struct Sampler {
    settings: SamplingSettings,
    random: ChaCha8Rng,
    /// Whether a token has been seen.
    seen: Vec<bool>,
    /// Tokens and their logits, then their weights; kept between calls.
    candidates: Vec<(u32, f64)>,
}

impl Sampler {
    /// A sampler for a vocabulary of `vocab_size` tokens.
    ///
    /// # Errors
    /// A setting that chooses nothing.
    pub fn new(settings: SamplingSettings, vocab_size: usize) -> Result<Self> {
        settings.check()?;
        let random = ChaCha8Rng::seed_from_u64(settings.seed);
        Ok(Self { settings, random, seen: vec![false; vocab_size], candidates: Vec::new() })
    }

    /// Marks tokens as seen. Tokens that the sampler returns are marked by itself.
    pub fn saw(&mut self, tokens: &[u32]) {
        for &token in tokens {
            if let Some(seen) = self.seen.get_mut(token as usize) {
                *seen = true;
            }
        }
    }

    /// The next token after `logits[v]`.
    ///
    /// # Errors
    /// Logits of which one is not a finite number.
    pub fn next(&mut self, logits: &[f32]) -> Result<u32> {
        let penalty = self.settings.repetition_penalty;
        self.candidates.clear();
        for (token, &logit) in logits.iter().enumerate() {
            if !logit.is_finite() {
                let what = format!("the logit of token {token} is {logit}");
                return Err(ModelError::NotFinite { what });
            }
            let logit = f64::from(logit);
            let logit = match self.seen.get(token) {
                Some(true) if logit > 0.0 => logit / penalty,
                Some(true) => logit * penalty,
                _ => logit,
            };
            self.candidates.push((token as u32, logit));
        }
        let token = if self.settings.temperature == 0.0 { self.greedy() } else { self.draw() };
        self.saw(&[token]);
        Ok(token)
    }

    fn greedy(&self) -> u32 {
        let first =
            |best: (u32, f64), next: &(u32, f64)| if next.1 > best.1 { *next } else { best };
        self.candidates.iter().fold((0, f64::NEG_INFINITY), first).0
    }

    fn draw(&mut self) -> u32 {
        let SamplingSettings { temperature, top_k, top_p, .. } = self.settings;
        let candidates = &mut self.candidates;
        // A total order, so that which of two equal tokens is kept depends on their ids alone.
        let likelier = |a: &(u32, f64), b: &(u32, f64)| -> Ordering {
            b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
        };
        if (1..candidates.len()).contains(&top_k) {
            candidates.select_nth_unstable_by(top_k - 1, likelier);
            candidates.truncate(top_k);
        }
        candidates.sort_unstable_by(likelier);
        let most = candidates.first().map_or(0.0, |first| first.1);
        let mut sum = 0.0;
        for (_, weight) in candidates.iter_mut() {
            *weight = libm::exp((*weight - most) / temperature);
            sum += *weight;
        }
        if top_p < 1.0 {
            let mut kept = 0.0;
            let reaching = candidates.iter().position(|(_, weight)| {
                kept += weight;
                kept >= top_p * sum
            });
            if let Some(last) = reaching {
                candidates.truncate(last + 1);
                sum = kept;
            }
        }
        // 53 random bits: uniform in [0, 1).
        let uniform = (self.random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        let mut left = uniform * sum;
        for &(token, weight) in candidates.iter() {
            left -= weight;
            if left < 0.0 {
                return token;
            }
        }
        // Rounding may leave nothing at the very end of the line.
        candidates.last().map_or(0, |last| last.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(
        settings: SamplingSettings,
        logits: &[f32],
        seen: &[u32],
        draws: usize,
    ) -> Vec<usize> {
        let mut counts = vec![0; logits.len()];
        for draw in 0..draws {
            let settings = SamplingSettings { seed: draw as u64, ..settings.clone() };
            let mut sampler = Sampler::new(settings, logits.len()).expect("settings");
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
        let share = |settings, token: usize| {
            counts(settings, &logits, &[], 20_000)[token] as f64 / 20_000.0
        };
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
        // Top-p counts the probabilities that top-k left: 0.5 / 0.8 reaches 0.6 alone.
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
        let mut sampler = Sampler::new(greedy, 2).expect("settings");
        let logits = [1.5, 1.0];
        let tokens: Vec<_> = (0..2).map(|_| sampler.next(&logits).expect("finite")).collect();
        assert_eq!(tokens, [0, 1], "a token that was chosen is penalized from then on");
    }

    #[test]
    fn wrong_settings_and_logits_are_errors() {
        let refused = |settings: SamplingSettings| {
            Sampler::new(settings, 2).err().expect("refused").to_string()
        };
        let plain = SamplingSettings::default();
        assert!(
            refused(SamplingSettings { temperature: -1.0, ..plain.clone() }).contains("temper")
        );
        assert!(refused(SamplingSettings { top_p: 0.0, ..plain.clone() }).contains("top_p"));
        let zero = SamplingSettings { repetition_penalty: 0.0, ..plain.clone() };
        assert!(refused(zero).contains("repetition_penalty"));
        let mut sampler = Sampler::new(plain, 2).expect("settings");
        let message = sampler.next(&[0.0, f32::NAN]).expect_err("refused").to_string();
        assert_eq!(message, "the logit of token 1 is NaN");
    }
}
