//! Any `tokenizer.json` as `prepare` uses it.
//!
//! The token that ends a document is no part of that file: it is named by the flag, by the files that Hugging Face puts beside
//! it, or found by the names that are usual for it.

mod fast;

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::ValueEnum;
use serde_json::Value;
use tidemill_files::Kind;
use tidemill_streaming_data::DataSet;
use tidemill_streaming_data::prepare::{Tokenize, TokenizeError};

use self::fast::FastTokenizer;
use crate::cli::tokenizer::TextTokenizer;
use crate::error::JobError;

/// A tokenizer, and what an index says of it.
pub(super) struct DocumentTokenizer {
    tokenizer: TextTokenizer,
    /// Gives the same tokens sooner.
    fast: Option<FastTokenizer>,
    json: String,
    vocab_size: u32,
    bos: Option<u32>,
    eos: u32,
    pad: Option<u32>,
}

/// The library that tokenizes documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Library {
    /// The fastest that gives the tokens of the reference.
    #[default]
    Fastest,
    /// Hugging Face's own alone.
    Reference,
}

/// Usual names of the token that ends a document, the likeliest first.
const USUAL_END_TOKENS: [&str; 6] =
    ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]"];

/// Files beside a tokenizer that name its special tokens, the likeliest first.
const NAMING_FILES: [&str; 2] = ["tokenizer_config.json", "special_tokens_map.json"];

/// How many special tokens an error names.
const NAMED_TOKENS: usize = 12;

impl DocumentTokenizer {
    /// Opens a tokenizer.json, or the one in a folder.
    ///
    /// # Errors
    /// A file that is none, one that gives other tokens each time, and one that does not say what ends a document.
    pub(super) fn open(
        path: &Path,
        eos_token: Option<&str>,
        library: Library,
    ) -> anyhow::Result<Self> {
        let inside = path.join("tokenizer.json");
        let path = if path.is_dir() { inside.as_path() } else { path };
        let failed = || format!("reading {} failed", path.display());
        let json = tidemill_files::read(path, Kind::Tokenizer).with_context(failed)?;
        let tokenizer = TextTokenizer::of_bytes(&json, path)?;
        let json = String::from_utf8(json).with_context(failed)?;
        let named = NamedTokens::beside(path)?;
        let eos = match eos_token {
            Some(text) => tokenizer.token_id(text),
            None => named
                .id(&tokenizer, "eos_token")
                .or_else(|| USUAL_END_TOKENS.iter().find_map(|text| tokenizer.token_id(text))),
        };
        let eos = eos.ok_or_else(|| {
            let wanted = eos_token.map_or(USUAL_END_TOKENS.join(", "), str::to_owned);
            let mut special = tokenizer.special_tokens();
            special.truncate(NAMED_TOKENS);
            let special = if special.is_empty() { "none".to_owned() } else { special.join(", ") };
            let what = format!(
                "expected a token that ends documents, found none of {wanted}; name one with --eos-token (its special \
                 tokens: {special})"
            );
            wrong(path, what)
        })?;
        let (bos, pad) = (named.id(&tokenizer, "bos_token"), named.id(&tokenizer, "pad_token"));
        Self::new(path, (tokenizer, json), SpecialTokens { bos, eos, pad }, library)
    }

    /// The tokenizer that a data set was prepared with, from its files and index.
    ///
    /// # Errors
    /// As [`open`](Self::open), and a data set that says too little.
    pub(super) fn of_data_set(data_set: &DataSet, library: Library) -> anyhow::Result<Self> {
        let path = data_set.tokenizer_location().unwrap_or_else(|| data_set.location().clone());
        let path = PathBuf::from(path.to_string());
        let missing =
            |what: &str| wrong(&path, format!("expected {what} of the data set, found none"));
        let json = data_set.read_tokenizer()?.ok_or_else(|| missing("the tokenizer"))?;
        let eos =
            data_set.eos_token_id().ok_or_else(|| missing("the token that ends documents"))?;
        let special =
            SpecialTokens { bos: data_set.bos_token_id(), eos, pad: data_set.pad_token_id() };
        let tokenizer = TextTokenizer::of_bytes(&json, &path)?;
        let failed = || format!("reading {} failed", path.display());
        let json = String::from_utf8(json.into()).with_context(failed)?;
        Self::new(&path, (tokenizer, json), special, library)
    }

    fn new(
        path: &Path,
        (tokenizer, json): (TextTokenizer, String),
        SpecialTokens { bos, eos, pad }: SpecialTokens,
        library: Library,
    ) -> anyhow::Result<Self> {
        let parsed = parse_deterministic(path, &json)?;
        let fast = match library {
            Library::Fastest => FastTokenizer::open(parsed, &tokenizer),
            Library::Reference => None,
        };
        tracing::info!(fast = fast.is_some(), "{} is read", path.display());
        Ok(Self { vocab_size: tokenizer.vocab_size(), fast, bos, pad, tokenizer, json, eos })
    }
}

/// The special tokens of a data set's index.
struct SpecialTokens {
    bos: Option<u32>,
    eos: u32,
    pad: Option<u32>,
}

/// Asks the faster library to have given the tokens of the reference.
fn check_agreement(found: &[u32], expected: &[u32]) -> Result<(), JobError> {
    if found == expected {
        return Ok(());
    }
    let same = found.iter().zip(expected).take_while(|(found, expected)| found == expected).count();
    let token = |tokens: &[u32]| match tokens.get(same) {
        Some(token) => token.to_string(),
        None => "the end".to_owned(),
    };
    let (origin, what) = (
        "a document that two libraries tokenize differently".to_owned(),
        format!(
            "expected {} as token {same}, found {}; remove what was prepared, and prepare it with --tokenizer-library reference",
            token(expected),
            token(found)
        ),
    );
    Err(JobError::Config { origin, what })
}

/// Parses a tokenizer file that gives the same tokens each time: one that was saved for training may leave merges out at random.
fn parse_deterministic(path: &Path, json: &str) -> anyhow::Result<Value> {
    let json: Value = serde_json::from_str(json).map_err(|error| wrong(path, error.to_string()))?;
    let dropout = json["model"]["dropout"].as_f64().unwrap_or(0.0);
    if dropout != 0.0 {
        let what = "expected null: the same text must always give the same tokens";
        return Err(wrong(path, format!("model.dropout is {dropout}, {what}")).into());
    }
    Ok(json)
}

/// A file that cannot be used.
fn wrong(path: &Path, what: String) -> JobError {
    JobError::Config { origin: path.display().to_string(), what }
}

/// The special tokens in the files beside a tokenizer.
struct NamedTokens(Vec<Value>);

impl NamedTokens {
    fn beside(path: &Path) -> anyhow::Result<Self> {
        let mut files = Vec::new();
        for name in NAMING_FILES {
            let path = path.with_file_name(name);
            match tidemill_files::read(&path, Kind::Config) {
                Ok(bytes) => files.push(
                    serde_json::from_slice(&bytes)
                        .map_err(|error| wrong(&path, error.to_string()))?,
                ),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("reading {} failed", path.display()));
                }
            }
        }
        Ok(Self(files))
    }

    /// The token of this role, if the tokenizer has the one that is named.
    fn id(&self, tokenizer: &TextTokenizer, role: &str) -> Option<u32> {
        let text = |file: &Value| {
            let token = &file[role];
            token.as_str().or_else(|| token["content"].as_str()).map(str::to_owned)
        };
        self.0.iter().filter_map(text).find_map(|text| tokenizer.token_id(&text))
    }
}

impl Tokenize for DocumentTokenizer {
    fn encode(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), TokenizeError> {
        let fast = self.fast.as_ref();
        let Some((fast, found)) = fast.and_then(|fast| Some((fast, fast.encode(text)?))) else {
            tokens.extend(self.tokenizer.encode(text)?);
            return Ok(());
        };
        if fast.is_compared(text) {
            check_agreement(&found, &self.tokenizer.encode(text)?)?;
        }
        tokens.extend(found);
        Ok(())
    }

    fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    fn bos_token_id(&self) -> Option<u32> {
        self.bos
    }

    fn eos_token_id(&self) -> u32 {
        self.eos
    }

    fn pad_token_id(&self) -> Option<u32> {
        self.pad
    }

    fn tokenizer_json(&self) -> Option<String> {
        Some(self.json.clone())
    }
}

#[cfg(test)]
mod damage;
#[cfg(test)]
mod tests;
