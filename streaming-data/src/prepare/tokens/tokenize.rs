//! [`Tokenize`]: text to tokens, as `prepare` needs it.
//!
//! A trait, so that this crate carries no tokenizer but [`ByteTokenizer`](super::ByteTokenizer):
//! the program brings the ones that read a `tokenizer.json`, and a user may bring any other.

use std::error::Error;

/// Why a tokenizer refused a text; the tokenizer's own error.
pub type TokenizeError = Box<dyn Error + Send + Sync>;

/// Whether a long text may be tokenized piece by piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pieces {
    /// Only the whole document gives the right tokens: it is held in memory whole.
    Whole,
    /// The tokens of a text are the tokens of its pieces one after the other, wherever the text is cut
    /// between two characters: a document of any size is read in bounded pieces.
    AtCharacters,
}

/// Turns the text of documents into tokens; called from several threads at once.
///
/// # Contract
/// - The same text gives the same tokens, independent of earlier texts: shards must be the same
///   to the byte for any number of threads.
/// - Every token is below [`vocab_size`](Tokenize::vocab_size).
/// - [`encode`](Tokenize::encode) adds no special tokens: `prepare` ends each document with
///   [`eos_token_id`](Tokenize::eos_token_id) itself.
pub trait Tokenize: Send + Sync {
    /// Appends the tokens of the text to `tokens`.
    ///
    /// # Errors
    /// Whatever keeps the tokenizer from encoding this text; it ends `prepare`.
    fn encode(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), TokenizeError>;

    /// Size of the vocabulary, special tokens included: at most 2^31 - 1.
    fn vocab_size(&self) -> u32;

    /// Token that begins a document, where there is one; written to the index, not to the rows.
    fn bos_token_id(&self) -> Option<u32>;

    /// Token that ends each document.
    fn eos_token_id(&self) -> u32;

    /// Token that fills, where there is one; written to the index, not to the rows.
    fn pad_token_id(&self) -> Option<u32>;

    /// Content of the `tokenizer.json` (Hugging Face tokenizers) next to the index, if there is
    /// one.
    fn tokenizer_json(&self) -> Option<String>;

    /// Whether a long text may be tokenized piece by piece.
    fn pieces(&self) -> Pieces {
        Pieces::Whole
    }
}
