//! Writing on: a prompt in, new tokens out, with constant memory for each token.
//!
//! [`Recurrence`] holds the states of a model and moves them on; [`Sampler`] chooses from logits; [`generate`] does both
//! until enough has been written.

mod recurrence;
mod sampling;

use serde::{Deserialize, Serialize};
use tidemill_kernels::Backend;

pub use recurrence::{PIECE_POSITIONS, Recurrence};
pub use sampling::{Sampler, SamplingSettings};

use crate::error::{ModelError, Result};
use crate::trainable::Device;

/// How much is written, and how.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GenerationSettings {
    /// New tokens at most.
    pub max_new_tokens: usize,
    /// The token after which nothing more is written, usually the end of a document; it is part of what is
    /// returned, as in transformers.
    pub stop_token: Option<u32>,
    /// How each token is chosen.
    pub sampling: SamplingSettings,
}

impl Default for GenerationSettings {
    fn default() -> Self {
        Self { max_new_tokens: 128, stop_token: None, sampling: SamplingSettings::default() }
    }
}

/// Continues `prompt`; returns the new tokens alone. `recurrence` holds one sequence and is reset first; `on_token`
/// sees each new token as it is chosen.
///
/// # Errors
/// An empty prompt, a token outside the vocabulary, a setting that chooses nothing, logits that are not finite,
/// or a device that fails.
pub fn generate<B: Backend>(
    device: &mut Device<'_, B>,
    recurrence: &mut Recurrence<'_, B>,
    prompt: &[u32],
    settings: &GenerationSettings,
    mut on_token: impl FnMut(u32),
) -> Result<Vec<u32>> {
    if prompt.is_empty() {
        return Err(ModelError::config("prompt", "at least 1 token", "none"));
    }
    let vocab_size = recurrence.model().vocab_size();
    let mut sampler = Sampler::new(settings.sampling.clone(), vocab_size)?;
    recurrence.reset(device)?;
    recurrence.advance(device, prompt)?;
    sampler.saw(prompt);
    let mut written = Vec::new();
    while written.len() < settings.max_new_tokens {
        let token = sampler.next(recurrence.logits(device)?)?;
        written.push(token);
        on_token(token);
        if settings.stop_token == Some(token) {
            break;
        }
        // The last token's state would be moved on for nobody.
        if written.len() < settings.max_new_tokens {
            recurrence.advance(device, &[token])?;
        }
    }
    Ok(written)
}
