//! The progress of `prepare`, and its report.

use super::{BrokenDocument, Changes, DedupReport, FilterReport, SkippedDocument};
use crate::hash::ContentHash;

/// The phases of `prepare`; each reads from the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    /// Reading the inputs to compare their documents with each other: only where duplicates are left out.
    Comparing,
    /// Sorting the signatures that are to be compared.
    Sorting,
    /// Reading the inputs, tokenizing and writing.
    #[default]
    Tokenizing,
    /// Reading examples for a report, and comparing versions: only where a data set that can be kept up to date has one.
    Reporting,
    /// Putting the data set in place.
    Publishing,
}

/// How far `prepare` is in a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// The phase of the work.
    pub phase: Phase,
    /// Bytes of files, as they are stored, that are in the stream or were skipped.
    pub bytes_done: u64,
    /// Bytes of all files that were found.
    pub bytes_total: u64,
    /// Documents in the stream; while documents are compared, documents that were read.
    pub documents: u64,
    /// Tokens that were made of texts.
    pub tokens: u64,
    /// Rows written.
    pub samples: u64,
}

/// The kind of inputs that samples were made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PreparedFrom {
    /// Documents, which were tokenized.
    Documents,
    /// Samples that were tokenized already, and stay as they were.
    TokenizedSamples,
}

/// The outcome of a preparation.
#[derive(Debug)]
pub struct PrepareReport {
    /// The inputs of the samples.
    pub from: PreparedFrom,
    /// The identity of the data, as the index states it.
    pub fingerprint: ContentHash,
    /// The new part of it, where it can be kept up to date.
    pub changes: Changes,
    /// Documents in the stream, or samples that were tokenized already.
    pub documents: u64,
    /// Empty texts, which are no documents.
    pub empty: u64,
    /// Nulls in columns of text, which are no documents.
    pub nulls: u64,
    /// Paths to an input that was reached by another path as well.
    pub duplicates: u64,
    /// Files and folders that gave no document, or not all, in byte order of their paths.
    pub skipped: Vec<SkippedDocument>,
    /// Lines, rows and samples that are not valid documents.
    pub broken: u64,
    /// The first [`NAMED_BROKEN`](super::NAMED_BROKEN) of them, in the order of the stream.
    pub named_broken: Vec<BrokenDocument>,
    /// The effect of the filters, if there are any.
    pub filtered: FilterReport,
    /// Documents that were left out because there are others like them.
    pub dedup: DedupReport,
    /// Documents that were left out because they are on the list.
    pub excluded: u64,
    /// Keys of the list that no document has, in byte order.
    pub unused_exclusions: Vec<String>,
    /// Bytes of text of the documents, of what filters left of them.
    pub text_bytes: u64,
    /// Tokens of the stream, including the tokens that end documents.
    pub tokens: u64,
    /// Tokens at the end of the stream that fill no row.
    pub dropped_tokens: u64,
    /// Predicted tokens per row.
    pub seq_len: usize,
    /// Size of the vocabulary that the index states.
    pub vocab_size: u32,
    /// Rows written.
    pub samples: u64,
    /// Shards written.
    pub shards: u64,
    /// Bytes of all shards.
    pub shard_bytes: u64,
}
