//! Which tokens a model can read, and how many it can append.

use tidemill_kernels::Backend;

use super::LanguageModel;
use crate::error::{ModelError, Result};

impl<B: Backend> LanguageModel<B> {
    /// Checks a prompt for generation.
    ///
    /// # Errors
    /// No tokens, more than the model has learned positions, or a token outside the vocabulary.
    pub fn check_prompt(&self, tokens: &[u32]) -> Result<()> {
        if tokens.is_empty() {
            return Err(ModelError::config("prompt", "at least 1 token", "none"));
        }
        self.check_length("prompt", tokens.len(), 0)?;
        self.check_vocabulary(tokens)
    }

    /// Checks a text for scoring. Its last token is only predicted, and needs no position.
    ///
    /// # Errors
    /// Fewer than two tokens, more than the model has learned positions and one, or a token outside the vocabulary.
    pub fn check_text(&self, tokens: &[u32]) -> Result<()> {
        if tokens.len() < 2 {
            return Err(ModelError::config("text", "at least 2 tokens", tokens.len()));
        }
        self.check_length("tokens", tokens.len(), 1)?;
        self.check_vocabulary(tokens)
    }

    /// How many of `asked` new tokens fit after a prompt of `prompt` tokens. The last new token is
    /// never read as input, so that it needs no position.
    pub fn most_new_tokens(&self, prompt: usize, asked: usize) -> usize {
        let left = |count: usize| (count + 1).saturating_sub(prompt);
        self.positions().map_or(asked, |learned| asked.min(left(learned.count)))
    }

    fn check_length(&self, what: &str, tokens: usize, without_position: usize) -> Result<()> {
        match self.positions() {
            Some(learned) if tokens > learned.count + without_position => {
                let (most, count) = (learned.count + without_position, learned.count);
                let expected = format!("at most {most} tokens, as the model has {count} positions");
                Err(ModelError::config(what, expected, tokens))
            }
            _ => Ok(()),
        }
    }

    fn check_vocabulary(&self, tokens: &[u32]) -> Result<()> {
        let vocab_size = self.vocab_size();
        match tokens.iter().position(|token| *token as usize >= vocab_size) {
            None => Ok(()),
            Some(index) => {
                let what = format!("position {index}");
                Err(ModelError::Token { what, token: tokens[index], vocab_size })
            }
        }
    }
}
