//! Text to tokens and back, by any tokenizer.json.

use std::path::Path;

use anyhow::Context;

/// A tokenizer read from a tokenizer.json.
pub(crate) struct TextTokenizer {
    tokenizer: tokenizers::Tokenizer,
    path: String,
}

impl TextTokenizer {
    /// Reads `path`.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        let path_text = path.display().to_string();
        let bytes = std::fs::read(path).with_context(|| format!("reading {path_text} failed"))?;
        let tokenizer = tokenizers::Tokenizer::from_bytes(&bytes).map_err(|error| {
            anyhow::anyhow!("{path_text}: expected a Hugging Face tokenizer.json: {error}")
        })?;
        Ok(Self { tokenizer, path: path_text })
    }

    /// The tokenizer.json in `folder`, where there is one.
    pub(crate) fn beside(folder: &Path) -> anyhow::Result<Option<Self>> {
        let path = folder.join("tokenizer.json");
        if path.exists() { Self::open(&path).map(Some) } else { Ok(None) }
    }

    /// The tokens of `text`, without special tokens around it.
    pub(crate) fn encode(&self, text: &str) -> anyhow::Result<Vec<u32>> {
        let encoding = self
            .tokenizer
            .encode_fast(text, false)
            .map_err(|error| anyhow::anyhow!("{}: tokenizing failed: {error}", self.path))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of `tokens`, special tokens left out.
    pub(crate) fn decode(&self, tokens: &[u32]) -> anyhow::Result<String> {
        self.tokenizer
            .decode(tokens, true)
            .map_err(|error| anyhow::anyhow!("{}: decoding failed: {error}", self.path))
    }

    /// One more than the largest id, added tokens included: ids may have gaps.
    pub(crate) fn vocab_size(&self) -> u32 {
        self.tokenizer.get_vocab(true).into_values().max().map_or(0, |id| id.saturating_add(1))
    }

    /// The id of a token by its text.
    pub(crate) fn token_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }
}
