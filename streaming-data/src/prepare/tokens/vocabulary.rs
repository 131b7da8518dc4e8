//! The tokens that an index describes, and whether it can.

use crate::prepare::{PrepareError, PrepareSettings, Tokenize, TokenizedBy, input::Contents};

/// The description of tokens in an index.
pub(crate) struct Vocabulary<'a> {
    /// Its size; none if the samples determine it.
    pub size: Option<u32>,
    /// The tokenizer that makes or made the tokens, where it is known.
    pub tokenizer: Option<&'a dyn Tokenize>,
}

impl<'a> Vocabulary<'a> {
    /// The vocabulary for these settings and the content of the inputs.
    ///
    /// # Errors
    /// [`PrepareError::Setting`].
    pub(crate) fn new(
        settings: &PrepareSettings,
        contents: Contents,
        tokenizer: &'a dyn Tokenize,
    ) -> Result<Vocabulary<'a>, PrepareError> {
        let is_known =
            contents == Contents::Documents || settings.tokenized_by == TokenizedBy::Tokenizer;
        if is_known {
            check_tokenizer(tokenizer)?;
        }
        let least = if is_known { tokenizer.vocab_size() } else { 1 };
        if let Some(size) = settings.vocab_size
            && !(least..=i32::MAX as u32).contains(&size)
        {
            return Err(PrepareError::Setting {
                key: "vocab_size",
                found: u64::from(size),
                expected: "at least that of the tokenizer, and 1 to 2^31 - 1",
            });
        }
        let size = settings.vocab_size.or(is_known.then_some(least));
        Ok(Vocabulary { size, tokenizer: is_known.then_some(tokenizer) })
    }
}

/// Whether an index can describe the tokenizer.
fn check_tokenizer(tokenizer: &dyn Tokenize) -> Result<(), PrepareError> {
    let vocab_size = tokenizer.vocab_size();
    if vocab_size == 0 || vocab_size > i32::MAX as u32 {
        return Err(PrepareError::Setting {
            key: "the tokenizer's vocabulary",
            found: u64::from(vocab_size),
            expected: "1 to 2^31 - 1 tokens",
        });
    }
    for (key, token) in [
        ("the tokenizer's bos token", tokenizer.bos_token_id()),
        ("the tokenizer's eos token", Some(tokenizer.eos_token_id())),
        ("the tokenizer's pad token", tokenizer.pad_token_id()),
    ] {
        if let Some(token) = token.filter(|&token| token >= vocab_size) {
            return Err(PrepareError::Setting {
                key,
                found: u64::from(token),
                expected: "a token of its vocabulary",
            });
        }
    }
    Ok(())
}
