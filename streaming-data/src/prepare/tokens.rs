//! Text to tokens, and tokens to rows.

pub(crate) mod byte_tokenizer;
pub(crate) mod pack;
pub(crate) mod tokenize;
pub(crate) mod vocabulary;
