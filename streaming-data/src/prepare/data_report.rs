//! The report on a data set, for people: documents by verdict and rule with examples, lengths, groups of duplicates,
//! sources, and the changes of an update. [`Reporting::Files`] asks for it.
//!
//! A report is two files in the folder of the shards: [`REPORT_FILE`], which programs read, and [`REPORT_PAGE`], which needs
//! only a browser. Each version of a data set that is kept up to date has its own report, next to its index
//! (`index/<fingerprint>.report.json` and `.html`), and those two are copies of the newest.
//!
//! # Contract
//! - Both files are a function of the documents and the settings, the same to the byte for any number of workers and
//!   processes. They contain no times and no rates. After an update everything except [`DataReport::update`] equals the
//!   report of a preparation from nothing.
//! - Examples are the first [`EXAMPLES`] documents of each verdict in the order of inputs, as they were read, cut at
//!   [`EXCERPT_CHARACTERS`] characters. The hash of an example is a key of a list of what to leave out.
//! - Counts are exact. Buckets of lengths lie between powers of two.
//! - A group of duplicates is the set of documents that buckets connect. It can hold more than one kept document: two kept
//!   documents are in one group where each shares a bucket with a third.
//! - Memory: three examples of each rule, 50 bytes for each input, and 40 for each document that shares a bucket with another. Of a data set
//!   that is kept up to date, records have the length of each document too, and an update needs 40 bytes for each document of an input
//!   that was read, one input at a time.
//!
//! | module | holds |
//! |---|---|
//! | `tally` | counts while documents are read |
//! | `histogram`, `groups`, `sources`, `excerpt` | the counted things: lengths, groups of duplicates, sources, and beginnings of texts |
//! | `difference` | the changes by an update |
//! | `show` | reading examples of documents that are not read for any other reason |
//! | `page` | the page |

pub(crate) mod difference;
pub(crate) mod excerpt;
pub(crate) mod groups;
pub(crate) mod histogram;
mod page;
pub(crate) mod show;
mod sources;
pub(crate) mod tally;

use std::{collections::BTreeMap, io::ErrorKind, path::Path};

use serde::{Deserialize, Serialize};
use tidemill_files::{Kind, read};

pub use self::{
    difference::{Changed, Difference, ShardsChanged, Transition},
    excerpt::{EXCERPT_CHARACTERS, Excerpt, in_a_line},
    groups::DuplicateGroups,
    histogram::{Bucket, Histogram},
    sources::{OtherSources, SOURCES, Source, Sources},
    tally::{EXAMPLES, Verdict},
};
use self::{
    sources::sources,
    tally::{Example, OfInput},
};
use super::{
    PrepareError, PreparedFrom,
    input::{find::Input, format::Format, skip::Place},
    pipeline::Outcome,
};
use crate::{
    data_set::index::{INDEX_FILE, Index, VERSIONS_FOLDER},
    error::DataError,
    hash::ContentHash,
    store::{Location, RemoteFolder, StoreSettings},
};

/// Name of the report that programs read.
pub const REPORT_FILE: &str = "report.json";

/// Name of the page.
pub const REPORT_PAGE: &str = "report.html";

/// The format version that is written, and the newest that can be read.
pub const REPORT_VERSION: u64 = 1;

/// Whether a report is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reporting {
    /// None.
    #[default]
    None,
    /// [`REPORT_FILE`] and [`REPORT_PAGE`] are written to the folder of the shards.
    Files,
}

/// The report of a data set: its inputs, its documents, and the reasons for which documents were left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataReport {
    /// [`REPORT_VERSION`].
    pub format_version: u64,
    /// The identity of the data that it is about.
    pub fingerprint: ContentHash,
    /// Hash of the state of its documents, where it can be kept up to date.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<ContentHash>,
    /// Samples and shards.
    pub data: DataCounts,
    /// Files and folders that were read.
    pub inputs: InputCounts,
    /// Documents, and entries of the inputs that are no documents.
    pub documents: DocumentCounts,
    /// Documents by verdict, for the verdicts that some document has.
    pub verdicts: Vec<OfVerdict>,
    /// Lines that filters took out of documents, by rule. Not of a data set that can be kept up to date: of a document that is not read
    /// again they are not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropped_lines: Option<BTreeMap<String, u64>>,
    /// How long documents are.
    pub lengths: Lengths,
    /// Groups of duplicates, where they were looked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duplicates: Option<DuplicateGroups>,
    /// Where the documents come from.
    pub sources: Sources,
    /// The changes by the update that made this version, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update: Option<Difference>,
}

/// The content of the shards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataCounts {
    /// Predicted tokens of a sample.
    pub seq_len: u64,
    /// Size of the vocabulary.
    pub vocab_size: u64,
    /// Rows of all shards.
    pub samples: u64,
    /// How many shards there are.
    pub shards: u64,
    /// Bytes of their files.
    pub shard_bytes: u64,
    /// Tokens of the stream.
    pub tokens: u64,
    /// Tokens of the stream that fill no sample.
    pub dropped_tokens: u64,
}

/// The inputs that were read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputCounts {
    /// Files, and folders that are read as one.
    pub read: u64,
    /// The inputs that could not be read, or not to their end.
    pub skipped: u64,
    /// Paths that led to an input once more.
    pub reached_again: u64,
}

/// Documents, and places in inputs without one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DocumentCounts {
    /// Documents, or samples that were tokenized already, of all verdicts.
    pub read: u64,
    /// Documents in the stream.
    pub kept: u64,
    /// Texts without a byte.
    pub empty: u64,
    /// Nulls in the place of a text.
    pub nulls: u64,
    /// Lines, rows and samples that are no documents.
    pub broken: u64,
}

/// The documents of one verdict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfVerdict {
    /// The verdict.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// Number of documents with this verdict.
    pub documents: u64,
    /// Bytes of their texts, as they were read.
    pub bytes: u64,
    /// The first of them.
    pub examples: Vec<ShownDocument>,
}

/// A document that is shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShownDocument {
    /// The input, as it was reached.
    pub path: String,
    /// Where in it: `line 7`, `row 0`; nothing of a text file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<String>,
    /// Hash of the whole text; none for a text file that was read in pieces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash: Option<ContentHash>,
    /// How it begins.
    #[serde(flatten)]
    pub excerpt: Excerpt,
}

/// How long documents are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lengths {
    /// Tokens of kept documents, with the token that ends each.
    pub kept_tokens: Histogram,
    /// Bytes of their texts, as they were read.
    pub kept_bytes: Histogram,
    /// Bytes of the documents that are left out.
    pub left_out_bytes: Histogram,
}

/// The results of a preparation from which a report is made.
pub(crate) struct Findings<'a> {
    pub index: &'a Index,
    pub outcome: &'a Outcome,
    pub inputs: &'a [Input],
    pub from: PreparedFrom,
    pub skipped: u64,
    pub reached_again: u64,
}

impl DataReport {
    /// The report on these findings.
    pub(crate) fn new(findings: &Findings<'_>) -> DataReport {
        let Findings { index, outcome, inputs, .. } = *findings;
        let tally = &outcome.left_out.tally;
        let of_input = |(number, input): (usize, &Input)| {
            let counts = tally.inputs.get(&number).copied().unwrap_or_default();
            (input.path.to_string_lossy().into_owned(), counts)
        };
        let by_input: Vec<(String, OfInput)> = inputs.iter().enumerate().map(of_input).collect();
        let is_updatable = index.state.is_some();
        let dropped = &outcome.left_out.filtered.dropped_lines;
        let dropped = || dropped.iter().map(|(rule, lines)| (rule.to_string(), *lines)).collect();
        let verdicts = tally.verdicts.iter().map(|(verdict, of)| OfVerdict {
            verdict: verdict.clone(),
            documents: of.documents,
            bytes: of.bytes,
            examples: of.examples.iter().filter_map(|it| shown_document(it, inputs)).collect(),
        });
        DataReport {
            format_version: REPORT_VERSION,
            fingerprint: index.fingerprint(),
            state: index.state.as_ref().map(|state| state.hash),
            data: DataCounts {
                seq_len: index.seq_len as u64,
                vocab_size: index.vocab_size.into(),
                samples: index.samples(),
                shards: index.shards.len() as u64,
                shard_bytes: index.shards.iter().map(|shard| shard.bytes).sum(),
                tokens: outcome.tokens,
                dropped_tokens: outcome.dropped_tokens,
            },
            inputs: InputCounts {
                read: inputs.len() as u64,
                skipped: findings.skipped,
                reached_again: findings.reached_again,
            },
            documents: DocumentCounts {
                read: tally.verdicts.values().map(|of| of.documents).sum(),
                kept: tally.verdicts.get(&Verdict::Kept).map_or(0, |of| of.documents),
                empty: outcome.empty,
                nulls: outcome.nulls,
                broken: outcome.broken.count,
            },
            verdicts: verdicts.collect(),
            dropped_lines: (!is_updatable && findings.from == PreparedFrom::Documents)
                .then(dropped),
            lengths: Lengths {
                kept_tokens: tally.kept_tokens.histogram(),
                kept_bytes: tally.kept_bytes.histogram(),
                left_out_bytes: tally.left_out_bytes.histogram(),
            },
            duplicates: outcome.groups.clone(),
            sources: sources(&by_input),
            update: outcome.difference.clone(),
        }
    }

    /// The files of the report, by their names in the data set.
    pub(crate) fn files(&self) -> Vec<(String, Vec<u8>)> {
        let (json, page) = (self.to_bytes(), page::page(self).into_bytes());
        let mut files = Vec::new();
        if self.state.is_some() {
            let [json_file, page_file] = report_files(self.fingerprint);
            files.push((json_file, json.clone()));
            files.push((page_file, page.clone()));
        }
        files.push((REPORT_FILE.to_owned(), json));
        files.push((REPORT_PAGE.to_owned(), page));
        files
    }

    /// The content of [`REPORT_FILE`].
    ///
    /// # Panics
    /// Never: every field has a JSON form.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self).expect("a report has only JSON values");
        bytes.push(b'\n');
        bytes
    }

    /// The report that such content says; none where it is damaged or of a newer format.
    pub fn from_bytes(bytes: &[u8]) -> Option<DataReport> {
        let report: DataReport = serde_json::from_slice(bytes).ok()?;
        (report.format_version <= REPORT_VERSION).then_some(report)
    }

    /// The report on the newest version of a data set: none where it was prepared without, and where the one that is
    /// there is damaged or of another version.
    ///
    /// # Errors
    /// The errors of reading the index and the store.
    pub fn read(
        location: &Location,
        settings: &StoreSettings,
    ) -> Result<Option<DataReport>, PrepareError> {
        let remote = match location.local() {
            Some(_) => None,
            None => Some(RemoteFolder::open(location.clone(), settings)?),
        };
        let get = |name: &str| -> Result<Option<Vec<u8>>, DataError> {
            match (&remote, location.local()) {
                (Some(remote), _) => Ok(remote.get_if_there(name)?.map(Vec::from)),
                (None, Some(folder)) => {
                    let path = folder.join(name);
                    match read(&path, Kind::Index) {
                        Ok(bytes) => Ok(Some(bytes)),
                        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                        Err(error) => Err(DataError::io("read", path)(error)),
                    }
                }
                (None, None) => Ok(None),
            }
        };
        let Some(index) = get(INDEX_FILE)? else { return Ok(None) };
        let index = Index::from_bytes(&index, Path::new(&location.join(INDEX_FILE).to_string()))?;
        let [of_version, _] = report_files(index.fingerprint());
        let of_version = if index.state.is_some() { get(&of_version)? } else { None };
        let is_of = |report: &DataReport| report.is_of(&index);
        let report = |bytes: Vec<u8>| DataReport::from_bytes(&bytes).filter(is_of);
        match of_version.and_then(report) {
            Some(report) => Ok(Some(report)),
            None => Ok(get(REPORT_FILE)?.and_then(report)),
        }
    }

    /// Whether it is about the version that an index says.
    pub(crate) fn is_of(&self, index: &Index) -> bool {
        let state = index.state.as_ref().map(|state| state.hash);
        self.fingerprint == index.fingerprint() && self.state == state
    }

    /// The documents that it shows, by their hashes.
    pub(crate) fn into_excerpts(self) -> BTreeMap<ContentHash, Excerpt> {
        let examples = self.verdicts.into_iter().flat_map(|of| of.examples);
        examples.filter_map(|example| Some((example.hash?, example.excerpt))).collect()
    }
}

/// Names of the report on a version, below the data set's folder: of the JSON and of the page.
pub(crate) fn report_files(fingerprint: ContentHash) -> [String; 2] {
    REPORT_SUFFIXES.map(|suffix| format!("{VERSIONS_FOLDER}/{}{suffix}", fingerprint.digits()))
}

/// The extension of their names.
pub(crate) const REPORT_SUFFIXES: [&str; 2] = [".report.json", ".report.html"];

fn shown_document(example: &Example, inputs: &[Input]) -> Option<ShownDocument> {
    let (input, path) = (inputs.get(example.input)?, example.path.clone());
    let place = match input.format {
        Format::Text => None,
        Format::JsonLines(_) => Some(Place::Line(example.place)),
        Format::Parquet => Some(Place::Row(example.place)),
        Format::Mds => Some(Place::Sample(example.place)),
    };
    Some(ShownDocument {
        path: path.unwrap_or_else(|| input.path.to_string_lossy().into_owned()),
        place: place.map(|place| place.to_string()),
        hash: example.source.map(ContentHash::of_bits),
        excerpt: example.excerpt.clone()?,
    })
}
