//! The outcome of reading the documents of a file or part, for the stages after reading.

use crate::prepare::{
    BrokenDocument, PrepareError, choose::duplicates::Signature, upkeep::Document,
};

/// A file or part that was read.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// The signature of each document in order, in a pass that signs; none for a document left out by lists or filters.
    pub signatures: Vec<Option<Signature>>,
    /// [`Digest::value`](super::duplicates::Digest::value) of its texts, where there are two passes.
    pub digest: u64,
    /// The record of each document in order, in a pass that records.
    pub documents: Vec<Document>,
    /// Tokens of those that were tokenized or fetched, one document after the other.
    pub tokens: Vec<u32>,
    /// How many tokens each of them has, in a pass that fetches.
    pub lengths: Vec<usize>,
    /// Documents that were tokenized.
    pub tokenized: u64,
    /// Empty texts, nulls and entries that are no documents.
    pub empty: u64,
    pub nulls: u64,
    pub broken: u64,
    /// The first entries that are no documents.
    pub named_broken: Vec<BrokenDocument>,
    /// Bytes of the input that were read for it, as far as that is known before the input ends.
    pub read_bytes: u64,
}

/// How an input ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// It was read to its end.
    Whole,
    /// It is skipped from here on.
    Skipped,
}

/// Takes batches, in the order of the stream.
pub(crate) trait Collect {
    /// Takes the next batch, of an input; one without documents counts too.
    ///
    /// # Errors
    /// Whatever ends the preparation.
    fn take(&mut self, input: usize, batch: Batch) -> Result<(), PrepareError>;

    /// Learns that an input gives nothing more.
    ///
    /// # Errors
    /// As [`Collect::take`].
    fn end(&mut self, _input: usize, _ended: Ended) -> Result<(), PrepareError> {
        Ok(())
    }

    /// Whether an input that cannot be read any further may be skipped.
    fn may_skip(&self, _input: usize) -> bool {
        true
    }
}
