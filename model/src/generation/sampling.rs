//! From logits to the next token.
//!
//! The order and the meaning of every filter are those of transformers: repetition penalty,
//! temperature, top-k, top-p, min-p, each over the probabilities that the filters before it have
//! left. The steps after the penalty are [`draw`], which devices run where the logits are.
//! Everything is computed in f64 from the logits, with ties going to the lowest token id, so equal
//! logits, settings and seed give equal tokens on the host and on every device.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};
use tidemill_kernels::backend::{DrawSettings, KernelGroup};
use tidemill_kernels::draw::{self, Candidate};

use crate::error::{ModelError, Result};

/// How the next token is chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingSettings {
    /// Logits are divided by it; 0 takes the most likely token.
    pub temperature: f64,
    /// Keeps only the k most likely tokens, and those that are as likely as the last of them; 0 for
    /// all.
    pub top_k: usize,
    /// Keeps only the fewest most likely tokens whose probabilities reach this sum; 1 for all
    /// (Holtzman et al., 2020).
    pub top_p: f64,
    /// Keeps only tokens at least this many times as likely as the most likely one; 0 for all
    /// (Nguyen et al., 2024).
    pub min_p: f64,
    /// Logits of tokens that the sequence already has, prompt included, are divided by it where
    /// positive and multiplied by it where negative; 1 for none (CTRL, Keskar et al., 2019).
    pub repetition_penalty: f64,
    /// The seed of the draws. A prompt's [`index`](super::Prompt::index) selects one of the seed's
    /// streams.
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
    /// Where and how the next token is chosen. Only the host knows which tokens a sequence already
    /// has.
    pub(crate) fn choice(&self) -> Choice {
        let draw = self.draw();
        if self.repetition_penalty != 1.0 {
            Choice::OfHost
        } else if self.temperature == 0.0 {
            Choice::Likeliest
        } else if draw.check().is_ok() {
            Choice::Draw(draw)
        } else {
            Choice::OfHost
        }
    }

    /// All settings but the penalty.
    fn draw(&self) -> DrawSettings {
        let Self { temperature, top_k, top_p, min_p, .. } = *self;
        DrawSettings { temperature, top_k, top_p, min_p }
    }

    /// Checks every value.
    ///
    /// # Errors
    /// A value that no token can be chosen by, named by its key.
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

/// Where the next token is chosen from logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Choice {
    /// On the device: the most likely token.
    Likeliest,
    /// On the device: a token that is drawn.
    Draw(DrawSettings),
    /// On the host, from the logits: with a penalty, or with settings that devices refuse.
    OfHost,
}

impl Choice {
    /// The kernels that choose tokens.
    pub(crate) fn kernels(self) -> Option<KernelGroup> {
        match self {
            Self::Likeliest => Some(KernelGroup::Likeliest),
            Self::Draw(_) => Some(KernelGroup::Draw),
            Self::OfHost => None,
        }
    }
}

/// Chooses the tokens of one sequence.
pub struct Sampler {
    settings: SamplingSettings,
    random: ChaCha8Rng,
    /// `seen[v]`: whether the sequence already has a token.
    seen: Vec<bool>,
    /// Kept between calls, so that it is allocated once.
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// A sampler that draws from stream `index` of its seed, over a vocabulary of `vocab_size`
    /// tokens. Its draws depend on its settings, on `index` and on the logits alone: not on which
    /// other sequences a batch holds.
    ///
    /// # Errors
    /// A setting that no token can be chosen by.
    pub fn new(settings: SamplingSettings, index: u64, vocab_size: usize) -> Result<Self> {
        settings.check()?;
        let mut random = ChaCha8Rng::seed_from_u64(settings.seed);
        random.set_stream(index);
        Ok(Self { settings, random, seen: vec![false; vocab_size], candidates: Vec::new() })
    }

    /// Marks tokens as seen. The sampler itself marks the tokens that it returns.
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
    /// A logit that is not a finite number.
    pub fn next(&mut self, logits: &[f32]) -> Result<u32> {
        let uniform = self.uniform();
        self.next_by(uniform, logits)
    }

    /// The number in [0, 1) for drawing the next token, to be taken once for each token; 0 where
    /// nothing is drawn.
    pub(crate) fn uniform(&mut self) -> f64 {
        if self.settings.temperature == 0.0 {
            return 0.0;
        }
        // 53 random bits.
        (self.random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// [`next`](Self::next) with a number that [`uniform`](Self::uniform) has returned.
    pub(crate) fn next_by(&mut self, uniform: f64, logits: &[f32]) -> Result<u32> {
        let token = if self.settings.temperature == 0.0 {
            self.likeliest(logits)?
        } else {
            self.keep_candidates(logits)?;
            draw::draw(&self.candidates, uniform)
        };
        self.saw(&[token]);
        Ok(token)
    }

    /// The tokens that may be drawn after `logits[v]` and their probabilities, by token id.
    ///
    /// # Errors
    /// A logit that is not a finite number.
    pub fn probabilities(&mut self, logits: &[f32]) -> Result<Vec<(u32, f64)>> {
        if self.settings.temperature == 0.0 {
            return Ok(vec![(self.likeliest(logits)?, 1.0)]);
        }
        self.keep_candidates(logits)?;
        let sum = draw::sum_of_weights(&self.candidates);
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

    /// The most likely token.
    fn likeliest(&self, logits: &[f32]) -> Result<u32> {
        check_finite(logits)?;
        let mut best = (0, f64::NEG_INFINITY);
        for (token, &logit) in logits.iter().enumerate() {
            let logit = self.penalized(token, logit);
            if logit > best.1 {
                best = (token as u32, logit);
            }
        }
        Ok(best.0)
    }

    /// Leaves in `candidates` the tokens that may be drawn, by token id.
    fn keep_candidates(&mut self, logits: &[f32]) -> Result<()> {
        check_finite(logits)?;
        let mut candidates = std::mem::take(&mut self.candidates);
        let penalized = logits.iter().enumerate();
        let penalized = penalized.map(|(token, &logit)| self.penalized(token, logit));
        draw::keep_candidates(&mut candidates, penalized, &self.settings.draw());
        self.candidates = candidates;
        Ok(())
    }
}

fn check_finite(logits: &[f32]) -> Result<()> {
    match logits.iter().position(|logit| !logit.is_finite()) {
        None => Ok(()),
        Some(token) => {
            let what = format!("the logit of token {token} is {}", logits[token]);
            Err(ModelError::NotFinite { what })
        }
    }
}
