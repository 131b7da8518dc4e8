//! Files of requests to a model: a JSON object a line, as `generate --input` and `score --input` read them.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
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

/// The most bytes of a line: more than any model has positions for.
const LINE_BYTES: u64 = 64 << 20;

/// The requests of a file, in order; blank lines are none.
pub(crate) struct Requests<'a> {
    path: String,
    file: BufReader<File>,
    /// The number of the last line.
    line: usize,
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
        Ok(Self { path: name, file: BufReader::new(file), line: 0, key, encoder })
    }

    /// The next line, if there is one.
    ///
    /// # Errors
    /// A file that cannot be read, a line that is too long to be a request, or that is not text.
    fn next_line(&mut self, place: &str) -> anyhow::Result<Option<String>> {
        let mut line = Vec::new();
        let mut rest = (&mut self.file).take(LINE_BYTES + 1);
        let read = rest.read_until(b'\n', &mut line);
        if read.with_context(|| format!("reading {} failed", self.path))? == 0 {
            return Ok(None);
        }
        // With the end of the line, JSON that breaks off would be said to break off in the next.
        line.pop_if(|end| *end == b'\n');
        line.pop_if(|end| *end == b'\r');
        if line.len() as u64 > LINE_BYTES {
            let what = format!("expected a line of at most {LINE_BYTES} bytes, found a longer one");
            return Err(wrong(place, what));
        }
        let text = String::from_utf8(line);
        text.map(Some).map_err(|error| wrong(place, format!("expected UTF-8 text: {error}")))
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
            self.line += 1;
            let place = format!("{}: line {}", self.path, self.line);
            match self.next_line(&place) {
                Ok(line) if line.as_ref().is_some_and(|line| line.trim().is_empty()) => {}
                Ok(line) => return line.map(|line| self.parse(place, &line)),
                Err(error) => return Some(Err(error)),
            }
        }
    }
}
