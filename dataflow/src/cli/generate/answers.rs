//! How generated text is shown.

use std::io::Write;

use serde_json::{Value, json};

use crate::cli::Format;
use crate::cli::output::result_line;
use crate::cli::requests::Request;
use crate::cli::tokenizer::{TextStream, TextTokenizer};

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
    /// Text that is shown before the end, if there is a tokenizer.
    text: Option<TextStream<'a>>,
}

impl<'a> Stream<'a> {
    pub(super) fn new(answers: &'a Answers<'a>) -> Self {
        let tokenizer = answers.tokenizer.filter(|_| answers.format == Format::Text);
        let text = tokenizer.map(TextTokenizer::text_stream);
        Self { answers, tokens: Vec::new(), text }
    }

    /// Shows text up to the last complete character.
    pub(super) fn push(&mut self, token: u32) {
        self.tokens.push(token);
        if let Some(text) = &mut self.text
            && let Ok(Some(part)) = text.push(token)
        {
            let mut out = std::io::stdout().lock();
            // A pipe without a reader is reported at the end.
            let _ = write!(out, "{part}").and_then(|()| out.flush());
        }
    }

    /// Shows the rest.
    pub(super) fn finish(self) -> anyhow::Result<()> {
        match (self.answers.format, self.text) {
            (Format::Json, _) => result_line!("{}", self.answers.json(&self.tokens)?),
            (Format::Text, Some(text)) => result_line!("{}", text.rest()?),
            (Format::Text, None) => result_line!("{}", self.answers.words(&self.tokens)?),
        }
    }
}
