//! Inputs that hold many documents: read once from front to back, cut into parts.
//!
//! A compressed file can only be read from its beginning, so one thread at a time holds the reader
//! of an input ([`ReadParts`]) and does as little as possible with it: it decompresses, and cuts
//! off the next part at a border of documents. What takes time (parsing, tokenizing) is done with
//! the part alone, on any thread. How an input is cut into parts changes nothing about the
//! documents in it.
//!
//! A format is one file here, which implements that trait:
//!
//! | module | reads |
//! |---|---|
//! | [`json_lines`], [`json_text`] | lines of JSON, and the text in one |
//! | [`parquet`] | a column of text |
//! | [`mds`] | MosaicML's shards: text, or tokens |
//! | [`text`] | UTF-8 files, whole or in pieces |
//! | [`stream`] | bytes of a file, decompressed |
//! | [`values`] | values of a column, as parts carry them |
//!
//! Which files are read, and in which order, is [`find`]'s, by their names ([`format`](mod@format)); what gave no document is
//! [`skip`]'s.

pub(crate) mod find;
pub(crate) mod format;
pub(crate) mod json_lines;
pub(crate) mod json_text;
#[cfg(feature = "mds")]
pub(crate) mod mds;
#[cfg(not(feature = "mds"))]
#[path = "input/mds_left_out.rs"]
mod mds;
pub(crate) mod parquet;
pub(crate) mod skip;
pub(crate) mod stream;
pub(crate) mod text;
pub(crate) mod values;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use self::{
    find::Input,
    format::Format,
    json_lines::JsonLines,
    mds::{MdsReader, MdsSet, first_sample_tokens},
    parquet::TextColumn,
    skip::{BrokenReason, Place, SkipReason},
};
use super::settings::DEFAULT_TEXT_KEY;
use crate::prepare::PrepareError;

/// How large a part and a document in it may be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// A part ends where it has at least this many bytes.
    pub part_bytes: usize,
    /// A document above this is broken: it is never held in memory.
    pub document_bytes: usize,
}

/// One input being read.
pub(crate) trait ReadParts: Send {
    /// The next part in order.
    ///
    /// # Errors
    /// [`ReadFailure`]; the input then has no further parts.
    fn next_part(&mut self, limits: Limits) -> Result<Next, ReadFailure>;
}

/// The result of reading on in an input.
pub(crate) struct Next {
    /// The next part; there may be none although there are more to come.
    pub part: Option<Part>,
    /// Bytes of the input's files that were read since it was opened.
    pub read_bytes: u64,
    /// Whether there are more parts.
    pub more: More,
}

/// Whether an input has more parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum More {
    /// It may have.
    Yes,
    /// It was read to its end.
    No,
}

/// Why an input gives no further parts.
#[derive(Debug)]
pub(crate) enum ReadFailure {
    /// It is skipped from here on, or an error, as the settings say.
    Skip(SkipReason),
    /// Nothing can be prepared from these inputs.
    Fatal(PrepareError),
}

impl From<PrepareError> for ReadFailure {
    fn from(error: PrepareError) -> ReadFailure {
        ReadFailure::Fatal(error)
    }
}

/// Some documents in order, independent of the documents before and after.
pub(crate) struct Part {
    /// The file that they are in.
    pub path: Arc<Path>,
    /// Bytes that the part holds in memory; its texts have no more.
    pub bytes: u64,
    /// The documents.
    pub documents: Box<dyn Documents>,
}

/// The documents of a part.
pub(crate) trait Documents: Send {
    /// Gives each document to `take`, in order.
    ///
    /// # Errors
    /// The first that `take` answers.
    fn visit(&self, take: &mut Take<'_>) -> Result<(), PrepareError>;
}

/// Takes a document and where it is.
pub(crate) type Take<'a> = dyn FnMut(Place, Entry<'_>) -> Result<(), PrepareError> + 'a;

/// The content of one place in an input.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Entry<'a> {
    /// Its text, which may be empty.
    Text(&'a str),
    /// A sample that is tokenized already.
    #[cfg_attr(
        not(feature = "mds"),
        expect(dead_code, reason = "only data sets of MosaicML's hold tokens")
    )]
    Tokens(&'a [u32]),
    /// A null where a null may be.
    Null,
    /// None.
    Broken(BrokenReason),
}

/// A document that was refused where it was read.
pub(crate) struct Refused {
    pub place: Place,
    pub reason: BrokenReason,
}

impl Documents for Refused {
    fn visit(&self, take: &mut Take<'_>) -> Result<(), PrepareError> {
        take(self.place, Entry::Broken(self.reason.clone()))
    }
}

/// How the inputs that are cut into parts are read.
#[derive(Debug)]
pub(crate) struct Sources {
    text_key: Arc<str>,
    /// The MDS data sets by their folders.
    sets: BTreeMap<PathBuf, Arc<MdsSet>>,
    contents: Contents,
}

/// The content of the inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contents {
    /// Texts, to be tokenized.
    Documents,
    /// Samples that are tokenized already, in rows of this many tokens; none if there is no row.
    Samples { row_tokens: Option<usize> },
}

impl Sources {
    /// Looks into the MDS data sets among the inputs, and gives these the sizes of all their files.
    ///
    /// # Errors
    /// [`PrepareError::MixedInputs`] for documents mixed with samples of tokens, and the errors of opening
    /// an MDS data set.
    pub(crate) fn new(
        inputs: &mut [Input],
        text_key: Option<&str>,
    ) -> Result<Sources, PrepareError> {
        let mut sets = BTreeMap::new();
        for input in inputs.iter_mut().filter(|input| input.format == Format::Mds) {
            let set = MdsSet::open(&input.path, text_key)?;
            input.bytes = set.bytes();
            sets.insert(input.path.clone(), Arc::new(set));
        }
        let is_tokens =
            |input: &&Input| sets.get(&input.path).is_some_and(|set: &Arc<MdsSet>| set.is_tokens());
        let contents = match inputs.iter().find(is_tokens) {
            None => Contents::Documents,
            Some(tokens) => {
                if let Some(documents) = inputs.iter().find(|input| !is_tokens(input)) {
                    let (tokens, documents) = (tokens.path.clone(), documents.path.clone());
                    return Err(PrepareError::MixedInputs { tokens, documents });
                }
                let mut lengths =
                    inputs.iter().map(|input| first_sample_tokens(&sets[&input.path]));
                let row_tokens = lengths.find_map(Result::transpose).transpose()?;
                Contents::Samples { row_tokens }
            }
        };
        let text_key = text_key.unwrap_or(DEFAULT_TEXT_KEY).into();
        Ok(Sources { text_key, sets, contents })
    }

    /// The same where these are some of several inputs that hold this.
    pub(crate) fn among(self, contents: Contents) -> Sources {
        Sources { contents, ..self }
    }

    /// The content of the inputs.
    pub(crate) fn contents(&self) -> Contents {
        self.contents
    }

    /// Begins to read an input.
    ///
    /// # Errors
    /// [`ReadFailure`] when there is nothing to read.
    pub(crate) fn open(&self, input: &Input) -> Result<Box<dyn ReadParts>, ReadFailure> {
        match input.format {
            Format::JsonLines(compression) => {
                let lines = JsonLines::open(&input.path, compression, &self.text_key)?;
                Ok(Box::new(lines))
            }
            Format::Parquet => Ok(Box::new(TextColumn::open(&input.path, &self.text_key)?)),
            Format::Mds => {
                let row_tokens = match self.contents {
                    Contents::Samples { row_tokens: Some(row_tokens) } => row_tokens,
                    _ => 0,
                };
                Ok(Box::new(MdsReader::new(Arc::clone(&self.sets[&input.path]), row_tokens)))
            }
            Format::Text => unreachable!("texts are read in pieces, not in parts"),
        }
    }
}
