//! Files of requests to a model: a JSON object a line, as `generate --input` and `score --input` read them.

use std::fs::File;
use std::io::{BufRead, BufReader, Lines};
use std::iter::Enumerate;
use std::path::Path;

use anyhow::Context;
use serde::Deserialize;
use serde_json::Value;

use super::output::note_line;
use super::tokenizer::TextTokenizer;
use crate::error::JobError;

/// The keys of text in a file of requests.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TextKey {
    Prompt,
    Text,
}

/// One line.
#[derive(Debug)]
pub(crate) struct Request {
    /// Its place, such as `lines.jsonl: line 3`.
    pub place: String,
    /// The name of the answer.
    pub id: Option<Value>,
    pub tokens: Vec<u32>,
}

/// A line that may hold `text`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TextLine {
    tokens: Option<Vec<u32>>,
    text: Option<String>,
    id: Option<Value>,
}

/// The same, where text is a `prompt`: an error names the keys that the command takes, and no other's.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PromptLine {
    tokens: Option<Vec<u32>>,
    prompt: Option<String>,
    id: Option<Value>,
}

impl TextKey {
    fn word(self) -> &'static str {
        match self {
            Self::Prompt => "prompt",
            Self::Text => "text",
        }
    }

    fn read(self, line: &str) -> serde_json::Result<TextLine> {
        match self {
            Self::Prompt => {
                let PromptLine { tokens, prompt, id } = serde_json::from_str(line)?;
                Ok(TextLine { tokens, text: prompt, id })
            }
            Self::Text => serde_json::from_str(line),
        }
    }
}

/// The requests of a file, in order; blank lines are none.
pub(crate) struct Requests<'a> {
    path: String,
    lines: Enumerate<Lines<BufReader<File>>>,
    key: TextKey,
    encoder: Encoder<'a>,
}

/// The tokenizer of requests, if there is one.
#[derive(Clone, Copy)]
pub(crate) struct Encoder<'a> {
    pub tokenizer: Option<&'a TextTokenizer>,
    /// The model's folder.
    pub folder: &'a Path,
}

impl Encoder<'_> {
    /// The tokens of `text`.
    ///
    /// # Errors
    /// No tokenizer: then `instead` is what to do.
    pub(crate) fn encode(self, text: &str, instead: &str) -> anyhow::Result<Vec<u32>> {
        match self.tokenizer {
            Some(tokenizer) => tokenizer.encode(text),
            None => {
                let what = format!("expected tokenizer.json, found none: {instead}");
                Err(wrong(&self.folder.display().to_string(), what))
            }
        }
    }
}

/// Says that a file asks for nothing, which is no error.
pub(crate) fn note_nothing_asked(path: &Path) {
    note_line!("note: {} has no line that asks for anything", path.display());
}

impl<'a> Requests<'a> {
    /// Opens `path`.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub(crate) fn open(path: &Path, key: TextKey, encoder: Encoder<'a>) -> anyhow::Result<Self> {
        let name = path.display().to_string();
        let file = File::open(path).with_context(|| format!("reading {name} failed"))?;
        Ok(Self { path: name, lines: BufReader::new(file).lines().enumerate(), key, encoder })
    }

    fn parse(&self, place: String, line: &str) -> anyhow::Result<Request> {
        let word = self.key.word();
        let expected = format!("expected {{\"tokens\": [...]}} or {{\"{word}\": \"...\"}}");
        // A list would be taken for the values of the keys.
        if !line.trim_start().starts_with('{') {
            return Err(wrong(&place, format!("{expected}, found no JSON object")));
        }
        let read = self.key.read(line);
        let line =
            read.map_err(|error| wrong(&place, format!("{expected}: {}", at_column(&error))))?;
        let tokens = match (line.tokens, line.text) {
            (Some(tokens), None) => tokens,
            (None, Some(text)) => {
                let instead = format!("give tokens, not {word}");
                self.encoder.encode(&text, &instead).with_context(|| place.clone())?
            }
            _ => return Err(wrong(&place, format!("expected one of tokens and {word}"))),
        };
        Ok(Request { place, id: line.id, tokens })
    }
}

/// An error about an input.
fn wrong(origin: &str, what: String) -> anyhow::Error {
    JobError::Config { origin: origin.to_owned(), what }.into()
}

/// An error about a line, in which the JSON's own line number is left out.
fn at_column(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rsplit_once(" at line ") {
        Some((what, _)) => format!("{what} at column {}", error.column()),
        None => text,
    }
}

impl Iterator for Requests<'_> {
    type Item = anyhow::Result<Request>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let (index, line) = self.lines.next()?;
            let place = format!("{}: line {}", self.path, index + 1);
            match line.with_context(|| format!("{place}: expected UTF-8 text")) {
                Ok(line) if line.trim().is_empty() => {}
                Ok(line) => return Some(self.parse(place, &line)),
                Err(error) => return Some(Err(error)),
            }
        }
    }
}
