//! The second pass: kept documents in order become shards, and all records parts of the state.
//!
//! A shard follows one of the previous version as long as it has the same documents from the first on; where
//! it has them all, that shard stays. Otherwise tokens are taken out of the shards before, or come from
//! texts that were read for them.

use std::{collections::VecDeque, mem};

use super::{
    cut::ContentCut,
    former_shards::FormerShards,
    part::part_bytes,
    record::{Document, Fate, Judged, Record, RecordWriter},
    spool::{Origin, SpoolReader},
};
use crate::{
    data_set::index::ShardEntry,
    prepare::{
        PrepareError, Reporting,
        choose::duplicates::Verdicts,
        data_report::tally::Tally,
        tokens::pack::{Cut, Packer, RowGroup},
    },
};

/// A step of assembling a version.
pub(crate) enum Step<'a> {
    /// Rows to encode.
    Rows(RowGroup),
    /// A shard of the previous version, which is the next.
    Keep(&'a ShardEntry),
    /// The bytes of a part of the state.
    Part(Vec<u8>),
    /// The end.
    End,
}

/// Gives the tokens of the next document that was read for them.
pub(crate) type Fetch<'a> = dyn FnMut(&mut Vec<u32>) -> Result<(), PrepareError> + 'a;

/// See the [module](self).
pub(crate) struct Assembler<'a> {
    records: SpoolReader<'a>,
    verdicts: Option<&'a Verdicts>,
    former: Option<FormerShards<'a>>,
    cut: ContentCut,
    packer: Packer,
    /// Documents so far, kept or not.
    documents: u64,
    /// Tokens of the current shard.
    tokens: u64,
    /// The part that the current shard follows.
    following: Option<usize>,
    /// Tokens of the previous version that are to be packed: a part, the first token, and the end.
    splices: VecDeque<(usize, u64, u64)>,
    /// Whether the current shard ends here.
    ends: bool,
    part: RecordWriter,
    /// Tokens in no row of the current part, after the end of its shard.
    sealed: Option<Vec<u32>>,
    out: VecDeque<Step<'a>>,
    is_over: bool,
    pub totals: Totals,
    /// Counts of all documents by outcome, where a report is asked for; `inputs` counts the inputs that began.
    pub tally: Option<Tally>,
    inputs: usize,
}

/// The outcome of assembling.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub documents: u64,
    pub tokens: u64,
    /// Tokens in no row.
    pub dropped_tokens: u64,
    /// Shards of the previous version that stay.
    pub kept_shards: u64,
}

impl<'a> Assembler<'a> {
    pub(crate) fn new(
        records: SpoolReader<'a>,
        verdicts: Option<&'a Verdicts>,
        former: Option<FormerShards<'a>>,
        (cut, content_cut): (Cut, ContentCut),
        reporting: Reporting,
    ) -> Assembler<'a> {
        Assembler {
            records,
            verdicts,
            former,
            cut: content_cut,
            packer: Packer::new(Cut { shard_samples: usize::MAX, ..cut }),
            documents: 0,
            tokens: 0,
            following: None,
            splices: VecDeque::new(),
            ends: false,
            part: RecordWriter::default(),
            sealed: None,
            out: VecDeque::new(),
            is_over: false,
            totals: Totals::default(),
            tally: (reporting == Reporting::Files).then(Tally::default),
            inputs: 0,
        }
    }

    /// The next step; `fetch` gives tokens of documents that have none yet.
    ///
    /// # Errors
    /// The errors of reading the previous version, of a temporary file and of `fetch`.
    pub(crate) fn next(&mut self, fetch: &mut Fetch<'_>) -> Result<Step<'a>, PrepareError> {
        loop {
            if let Some(step) = self.out.pop_front() {
                return Ok(step);
            }
            if let Some((part, from, end)) = self.splices.pop_front() {
                self.splice(part, from, end)?;
            } else if mem::take(&mut self.ends) {
                self.end_shard()?;
            } else if self.is_over {
                return Ok(Step::End);
            } else {
                self.take_record(fetch)?;
            }
        }
    }

    fn take_record(&mut self, fetch: &mut Fetch<'_>) -> Result<(), PrepareError> {
        let Some((record, origin)) = self.records.next()? else {
            self.is_over = true;
            if self.sealed.is_none() && (self.tokens > 0 || self.part.len() > 0) {
                self.ends = true;
            } else {
                self.seal_part();
            }
            return Ok(());
        };
        match record {
            // It stays with the documents before it.
            Record::End(_) => self.part.write(&record),
            Record::Begin(_) => {
                self.seal_part();
                self.part.write(&record);
                self.inputs += 1;
            }
            Record::Document(document) => {
                self.seal_part();
                let document = self.take_document(document, origin, fetch)?;
                if let Some(tally) = &mut self.tally {
                    tally.count_record(self.inputs - 1, &document);
                }
                self.part.write(&Record::Document(document));
            }
        }
        Ok(())
    }

    /// Puts a document into the shard, if it is kept.
    fn take_document(
        &mut self,
        document: Document,
        origin: Option<Origin>,
        fetch: &mut Fetch<'_>,
    ) -> Result<Document, PrepareError> {
        let fate = fate(self.verdicts, self.documents, &document);
        self.documents += 1;
        if !matches!(fate, Fate::Kept { .. }) {
            return Ok(Document { fate, ..document });
        }
        let before = self.tokens;
        let tokens = match origin {
            Some(origin) => {
                self.follow(Some(origin));
                if self.following.is_none() {
                    let Origin { part, offset, tokens } = origin;
                    self.splices.push_back((part, offset, offset + tokens));
                }
                origin.tokens
            }
            None => {
                self.follow(None);
                // Spliced tokens come before it.
                while let Some((part, from, end)) = self.splices.pop_front() {
                    self.splice(part, from, end)?;
                }
                let mut tokens = Vec::new();
                fetch(&mut tokens)?;
                self.pack(&tokens);
                tokens.len() as u64
            }
        };
        self.tokens += tokens;
        self.totals.documents += 1;
        self.totals.tokens += tokens;
        if self.cut.ends(before, self.tokens, document.source) {
            self.ends = true;
        }
        Ok(Document { fate: Fate::Kept { tokens }, ..document })
    }

    /// Follows a part with a document, or no longer.
    fn follow(&mut self, origin: Option<Origin>) {
        let starts = self.tokens == 0;
        match (self.following, origin) {
            (None, Some(Origin { part, offset: 0, .. })) if starts => {
                let former = self.former.as_ref();
                let is_reusable = former.is_some_and(|former| former.reusable(part).is_some());
                self.following = is_reusable.then_some(part);
            }
            (Some(part), Some(origin)) if origin.part == part && origin.offset == self.tokens => {}
            (Some(_), _) => self.unfollow(),
            (None, _) => {}
        }
    }

    fn unfollow(&mut self) {
        if let Some(part) = self.following.take() {
            self.splices.push_back((part, 0, self.tokens));
        }
    }

    /// Packs tokens of a row group at most, and comes back for the others.
    fn splice(&mut self, part: usize, from: u64, end: u64) -> Result<(), PrepareError> {
        let mut tokens = Vec::new();
        let former = self.former.as_mut().expect("what has an origin has a version before");
        let until = former.read(part, from, end, &mut tokens)?;
        if until < end {
            self.splices.push_front((part, until, end));
        }
        self.pack(&tokens);
        Ok(())
    }

    fn pack(&mut self, tokens: &[u32]) {
        self.out.extend(self.packer.push(tokens).into_iter().map(Step::Rows));
    }

    fn end_shard(&mut self) -> Result<(), PrepareError> {
        if let (Some(part), Some(former)) = (self.following, &mut self.former) {
            if former.tokens_of(part) != self.tokens {
                // It ends before the one that it followed.
                self.unfollow();
                self.ends = true;
                return Ok(());
            }
            let shard = former.reusable(part).expect("it is followed");
            let tail = former.tail(part)?.to_vec();
            self.packer.skip_shard();
            self.totals.kept_shards += 1;
            self.end_with(tail);
            self.out.push_back(Step::Keep(shard));
        } else {
            let (rows, tail) = self.packer.end_shard();
            self.end_with(tail);
            self.out.extend(rows.map(Step::Rows));
        }
        if self.is_over {
            self.seal_part();
        }
        Ok(())
    }

    fn end_with(&mut self, tail: Vec<u32>) {
        self.totals.dropped_tokens += tail.len() as u64;
        self.sealed = Some(tail);
        self.tokens = 0;
        self.following = None;
    }

    /// Ends the part, where its shard ended.
    fn seal_part(&mut self) {
        if let Some(tail) = self.sealed.take() {
            let records = self.part.take_part();
            self.out.push_back(Step::Part(part_bytes(&tail, &records)));
        }
    }

    /// Shards of the previous version that were read.
    pub(crate) fn opened_shards(&self) -> u64 {
        self.former.as_ref().map_or(0, FormerShards::opened)
    }
}

/// The fate of the document with this number; of a kept document the tokens are not counted yet.
pub(crate) fn fate(verdicts: Option<&Verdicts>, number: u64, document: &Document) -> Fate {
    match (&document.judged, verdicts) {
        (Judged::Excluded | Judged::Rejected(_), _) => Fate::Open,
        (Judged::Chosen(_), Some(verdicts)) => verdicts.fate(number),
        (Judged::Chosen(_), None) => Fate::Kept { tokens: 0 },
    }
}
