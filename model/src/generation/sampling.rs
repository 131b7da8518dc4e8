//! From logits to the next token.
//!
//! The order and the meaning of every filter are those of transformers: repetition penalty, temperature, top-k, top-p, min-p,
//! each over the probabilities that the one before has left. Everything is computed in f64 from the logits, with ties going to
//! the lowest token id, so equal logits, settings and seed give equal tokens.

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
    /// Only the k most likely tokens, and those that are as likely as the last of them; 0 for all.
    pub top_k: usize,
    /// Only the fewest most likely tokens whose probabilities reach this sum; 1 for all (Holtzman et al., 2020).
    pub top_p: f64,
    /// Only tokens at least this many times as likely as the most likely one; 0 for all (Nguyen et al., 2024).
    pub min_p: f64,
    /// Logits of tokens that have been seen, in the prompt too, are divided by it where positive and multiplied by
    /// it where negative; 1 for none (CTRL, Keskar et al., 2019).
    pub repetition_penalty: f64,
    /// Seeds the draws. A prompt's [`index`](super::Prompt::index) says which of the seed's streams they come from.
    pub seed: u64,
}

impl Default for SamplingSettings {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
        }
    }
}

impl SamplingSettings {
    /// Whether the next token follows from the logits as they are: it is the likeliest.
    pub(crate) fn takes_likeliest(&self) -> bool {
        self.temperature == 0.0 && self.repetition_penalty == 1.0
    }

    /// Checks every value.
    ///
    /// # Errors
    /// A value that chooses nothing, named by its key.
    pub fn check(&self) -> Result<()> {
        let Self { temperature, top_p, min_p, repetition_penalty, .. } = *self;
        if !(temperature >= 0.0 && temperature.is_finite()) {
            let expected = "a finite number of at least 0";
            return Err(ModelError::config("temperature", expected, temperature));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(ModelError::config("top_p", "a number above 0 and at most 1", top_p));
        }
        if !(0.0..=1.0).contains(&min_p) {
            return Err(ModelError::config("min_p", "a number from 0 to 1", min_p));
        }
        if !(repetition_penalty > 0.0 && repetition_penalty.is_finite()) {
            let expected = "a finite number above 0";
            return Err(ModelError::config("repetition_penalty", expected, repetition_penalty));
        }
        Ok(())
    }
}

/// A token that may be chosen.
#[derive(Clone, Copy)]
struct Candidate {
    token: u32,
    /// The logit after the penalty, divided by the temperature.
    logit: f64,
    /// `exp(logit - largest)`
    weight: f64,
}

/// Chooses the tokens of one sequence.
pub struct Sampler {
    settings: SamplingSettings,
    random: ChaCha8Rng,
    /// Whether a token has been seen.
    seen: Vec<bool>,
    /// Kept between calls.
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// A sampler that draws from stream `index` of its seed, over a vocabulary of `vocab_size` tokens. What it draws depends
    /// on its settings, on `index` and on the logits alone: not on which other sequences a batch holds.
    ///
    /// # Errors
    /// A setting that chooses nothing.
    pub fn new(settings: SamplingSettings, index: u64, vocab_size: usize) -> Result<Self> {
        settings.check()?;
        let mut random = ChaCha8Rng::seed_from_u64(settings.seed);
        random.set_stream(index);
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
        let token = if self.settings.temperature == 0.0 {
            self.likeliest(logits)?.0
        } else {
            self.keep_candidates(logits)?;
            self.draw()
        };
        self.saw(&[token]);
        Ok(token)
    }

    /// The tokens that may be drawn after `logits[v]` and their probabilities, by token id.
    ///
    /// # Errors
    /// Logits of which one is not a finite number.
    pub fn probabilities(&mut self, logits: &[f32]) -> Result<Vec<(u32, f64)>> {
        if self.settings.temperature == 0.0 {
            return Ok(vec![(self.likeliest(logits)?.0, 1.0)]);
        }
        self.keep_candidates(logits)?;
        let sum = sum_of_weights(&self.candidates);
        Ok(self.candidates.iter().map(|kept| (kept.token, kept.weight / sum)).collect())
    }

    fn penalized(&self, token: usize, logit: f32) -> f64 {
        let (logit, penalty) = (f64::from(logit), self.settings.repetition_penalty);
        match self.seen.get(token) {
            Some(true) if logit > 0.0 => logit / penalty,
            Some(true) => logit * penalty,
            _ => logit,
        }
    }

    /// The most likely token and its logit after the penalty.
    fn likeliest(&self, logits: &[f32]) -> Result<(u32, f64)> {
        let mut best = (0, f64::NEG_INFINITY);
        for (token, &logit) in logits.iter().enumerate() {
            if !logit.is_finite() {
                let what = format!("the logit of token {token} is {logit}");
                return Err(ModelError::NotFinite { what });
            }
            let logit = self.penalized(token, logit);
            if logit > best.1 {
                best = (token as u32, logit);
            }
        }
        Ok(best)
    }

    /// Leaves in `candidates` what may be drawn, by token id.
    fn keep_candidates(&mut self, logits: &[f32]) -> Result<()> {
        let SamplingSettings { temperature, top_k, top_p, min_p, .. } = self.settings;
        let most = self.likeliest(logits)?.1 / temperature;
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.clear();
        candidates.extend(logits.iter().enumerate().map(|(token, &logit)| {
            let logit = self.penalized(token, logit) / temperature;
            Candidate { token: token as u32, logit, weight: libm::exp(logit - most) }
        }));
        if (1..candidates.len()).contains(&top_k) {
            let (_, last, _) =
                candidates.select_nth_unstable_by(top_k - 1, |a, b| b.logit.total_cmp(&a.logit));
            let least = last.logit;
            candidates.retain(|candidate| candidate.logit >= least);
        }
        if top_p < 1.0 {
            // A total order, so that which of two equal tokens is kept depends on their ids alone.
            candidates
                .sort_unstable_by(|a, b| b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token)));
            let reached = top_p * sum_of_weights(&candidates);
            let mut kept = 0.0;
            let last = candidates.iter().position(|candidate| {
                kept += candidate.weight;
                kept >= reached
            });
            candidates.truncate(last.map_or(candidates.len(), |last| last + 1));
        }
        if min_p > 0.0 {
            // The most likely token is kept by every filter, and its weight is 1.
            candidates.retain(|candidate| candidate.weight >= min_p);
        }
        candidates.sort_unstable_by_key(|candidate| candidate.token);
        self.candidates = candidates;
        Ok(())
    }

    fn draw(&mut self) -> u32 {
        // 53 random bits: uniform in [0, 1).
        let uniform = (self.random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        let mut left = uniform * sum_of_weights(&self.candidates);
        for candidate in &self.candidates {
            left -= candidate.weight;
            if left < 0.0 {
                return candidate.token;
            }
        }
        // Rounding may leave nothing at the very end of the line.
        self.candidates.last().map_or(0, |last| last.token)
    }
}

fn sum_of_weights(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|candidate| candidate.weight).sum()
}
