//! The outcome of a run of the pipeline, and of a text that is read in pieces.

use crate::data_set::index::{ShardEntry, StateEntry};
use crate::prepare::{
    Difference, DuplicateGroups, Reporting, Verdict,
    choose::admit::{LeftOut, Rules},
    data_report::tally::{Counted, Example},
    input::skip::{Broken, SkippedDocument},
    upkeep::Changes,
};

/// The outcome of a run of the pipeline.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// The index entry of each shard.
    pub shards: Vec<ShardEntry>,
    /// Documents that were neither empty nor skipped.
    pub documents: u64,
    /// Documents without a byte.
    pub empty: u64,
    /// Nulls in the place of documents.
    pub nulls: u64,
    /// Bytes of text of the documents.
    pub text_bytes: u64,
    /// Inputs that could not be read, or not to their end, in order.
    pub skipped: Vec<SkippedDocument>,
    /// Lines, rows and samples that are no documents.
    pub broken: Broken,
    /// The documents left out, and the outcome of all where a report is asked for.
    pub left_out: LeftOut,
    /// The largest token of the parts.
    pub largest_token: u32,
    /// Tokens of the stream.
    pub tokens: u64,
    /// Tokens at its end that are in no row.
    pub dropped_tokens: u64,
    /// The most memory that was charged at once.
    pub peak_held_bytes: u64,
    /// The records of the documents and their changes, where these are kept.
    pub state: Option<StateEntry>,
    pub changes: Changes,
    /// For a report: groups of duplicates, and what an update changed.
    pub groups: Option<DuplicateGroups>,
    pub difference: Option<Difference>,
}

/// The outcome so far of a text that is read in pieces.
#[derive(Default)]
pub(super) struct PiecesDone {
    tokens: u64,
    bytes: u64,
    /// The beginning of the text, as an example.
    example: Option<Example>,
}

impl PiecesDone {
    pub(super) fn take(&mut self, tokens: usize, bytes: u64, example: Option<Example>) {
        self.tokens += tokens as u64;
        self.bytes += bytes;
        self.example = self.example.take().or(example);
    }

    /// Counts the text as one document, where a report is asked for. Its hash is known of its beginning only.
    pub(super) fn count(mut self, rules: &Rules<'_>, input: usize, left_out: &mut LeftOut) {
        if rules.reporting == Reporting::None {
            return;
        }
        if let Some(example) = &mut self.example {
            example.source = None;
            example.excerpt.iter_mut().for_each(|excerpt| excerpt.document_bytes = self.bytes);
        }
        let example = &|| self.example.clone();
        let (bytes, tokens) = (Some(self.bytes), self.tokens);
        left_out.tally.count(Verdict::Kept, &Counted { input, bytes, tokens, example });
    }
}
