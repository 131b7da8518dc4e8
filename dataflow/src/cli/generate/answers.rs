//! How what was generated is shown.

use std::io::Write;

use anyhow::Context;
use serde_json::{Value, json};

use crate::cli::Format;
use crate::cli::output::{OUTPUT_FAILED, result_line};
use crate::cli::requests::Request;
use crate::cli::tokenizer::TextTokenizer;

/// Shows answers: as text, or as tokens where there is no tokenizer; or as JSON with both.
pub(super) struct Answers<'a> {
    tokenizer: Option<&'a TextTokenizer>,
    format: Format,
}

impl<'a> Answers<'a> {
    pub(super) fn new(tokenizer: Option<&'a TextTokenizer>, format: Format) -> Self {
        Self { tokenizer, format }
    }

    fn text(&self, tokens: &[u32]) -> anyhow::Result<Option<String>> {
        self.tokenizer.map(|tokenizer| tokenizer.decode(tokens)).transpose()
    }

    fn json(&self, tokens: &[u32]) -> anyhow::Result<Value> {
        Ok(json!({ "tokens": tokens, "text": self.text(tokens)? }))
    }

    fn words(&self, tokens: &[u32]) -> anyhow::Result<String> {
        let list = || tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        Ok(self.text(tokens)?.unwrap_or_else(list))
    }

    /// Prints one of several answers.
    pub(super) fn print(&self, request: &Request, tokens: &[u32]) -> anyhow::Result<()> {
        match self.format {
            Format::Json => {
                let mut answer = self.json(tokens)?;
                if let Some(id) = &request.id {
                    answer["id"] = id.clone();
                }
                result_line!("{answer}")
            }
            Format::Text => {
                let name = match &request.id {
                    Some(Value::String(id)) => id.clone(),
                    Some(id) => id.to_string(),
                    None => request.place.clone(),
                };
                result_line!("--- {name}\n{}", self.words(tokens)?)
            }
        }
    }
}

/// The one answer, shown as it is written.
pub(super) struct Stream<'a> {
    answers: &'a Answers<'a>,
    tokens: Vec<u32>,
    /// Bytes of its text that have been shown.
    shown: usize,
}

impl<'a> Stream<'a> {
    pub(super) fn new(answers: &'a Answers<'a>) -> Self {
        Self { answers, tokens: Vec::new(), shown: 0 }
    }

    /// Shows text up to the last complete character.
    pub(super) fn push(&mut self, token: u32) {
        self.tokens.push(token);
        if self.answers.format == Format::Text
            && let Ok(Some(text)) = self.answers.text(&self.tokens)
            && !text.ends_with('\u{fffd}')
            && let Some(new) = text.get(self.shown..)
        {
            let mut out = std::io::stdout().lock();
            // A pipe that nobody reads is told of at the end.
            let _ = write!(out, "{new}").and_then(|()| out.flush());
            self.shown = text.len();
        }
    }

    /// Shows the rest.
    pub(super) fn finish(self) -> anyhow::Result<()> {
        match self.answers.format {
            Format::Json => result_line!("{}", self.answers.json(&self.tokens)?),
            Format::Text => {
                let words = self.answers.words(&self.tokens)?;
                let mut out = std::io::stdout().lock();
                writeln!(out, "{}", words.get(self.shown..).unwrap_or("")).context(OUTPUT_FAILED)
            }
        }
    }
}
