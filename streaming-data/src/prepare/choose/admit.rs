//! Which documents of a file or part enter the stream: lists, filters and duplicates one after the other.
//!
//! A document that a list or filter leaves out reaches no later rule: it is no rule's count, and no
//! document is a copy of it.

use std::{borrow::Cow, path::Path};

use xxhash_rust::xxh3::xxh3_128;

use super::{
    duplicates::{BatchVerdicts, Dedup, Digest, Signature, Signer, Verdicts},
    exclude::Exclusions,
    filter::{self, FilterReport, FilterSet},
};
use crate::prepare::{
    Place, PrepareError, Reporting, Verdict,
    data_report::tally::{Counted, Example, Tally},
    pipeline::batch::Batch,
    texts::Visitor,
    upkeep::{Document, Fate, Judged, Known, Wanted},
};

/// The purpose of a pass over documents.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Pass<'a> {
    /// Documents get signatures only.
    Sign(Dedup),
    /// Documents are tokenized: all, or the ones kept by the verdicts of a first pass.
    Tokenize(Option<&'a Verdicts>),
    /// Documents get records only, with signatures for this deduplication; a text whose verdict is known is not judged
    /// again.
    Record(Dedup, &'a Known),
    /// Wanted documents are tokenized, each by itself.
    Fetch(&'a Wanted),
    /// The visitor gets the texts, and nothing else is done with them.
    Visit(Visitor<'a>),
}

/// The rules by which documents are chosen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules<'a> {
    pub exclusions: &'a Exclusions,
    pub filters: &'a [FilterSet],
    pub pass: Pass<'a>,
    /// Whether documents are counted for a report.
    pub reporting: Reporting,
}

impl Rules<'_> {
    /// Whether documents are looked at as a whole.
    pub(crate) fn need_whole_documents(&self) -> bool {
        let is_listed = self.exclusions.identity().is_some();
        !matches!(self.pass, Pass::Tokenize(None)) || !self.filters.is_empty() || is_listed
    }
}

/// Counts of the documents that were left out of a file or part, or of many.
#[derive(Debug, Default)]
pub(crate) struct LeftOut {
    /// Documents that are on a list.
    pub excluded: u64,
    /// Counts by rule of the documents and lines that the filters removed.
    pub filtered: FilterReport,
    /// Counts of all documents by verdict, where a report is asked for.
    pub tally: Tally,
}

impl LeftOut {
    /// Adds the counts of another file or part.
    pub(crate) fn add(&mut self, other: &LeftOut) {
        self.excluded += other.excluded;
        self.filtered.add(&other.filtered);
        self.tally.add(&other.tally);
    }
}

/// The documents of a file or part, one after the other.
pub(crate) struct Admission<'a> {
    rules: Rules<'a>,
    verdicts: Option<BatchVerdicts<'a>>,
    signer: Signer,
    /// Which input they are in.
    input: usize,
    signatures: Vec<Option<Signature>>,
    documents: Vec<Document>,
    /// Hash of the texts, where there are two passes.
    digest: Digest,
    left_out: LeftOut,
}

impl<'a> Admission<'a> {
    /// For the batch of this number, in an input.
    pub(crate) fn new(rules: Rules<'a>, batch: u64, input: usize) -> Admission<'a> {
        let verdicts = match rules.pass {
            Pass::Tokenize(Some(verdicts)) => Some(verdicts.of_batch(batch)),
            _ => None,
        };
        Admission {
            rules,
            verdicts,
            signer: Signer::default(),
            input,
            signatures: Vec::new(),
            documents: Vec::new(),
            digest: Digest::default(),
            left_out: LeftOut::default(),
        }
    }

    /// The part to tokenize of a text that is not empty; nothing in a pass that signs or records.
    ///
    /// # Errors
    /// [`PrepareError::OtherText`] where another is wanted.
    pub(crate) fn admit<'t>(
        &mut self,
        path: &Path,
        place: Option<Place>,
        text: &'t str,
    ) -> Result<Option<Cow<'t, str>>, PrepareError> {
        if let Some(verdicts) = &mut self.verdicts {
            // The first pass asked lists and filters; a kept document is judged again for the text that filters leave.
            self.digest.update(text);
            let verdict = match verdicts.next_fate() {
                Some(Fate::Copy) => Verdict::Copy,
                Some(Fate::NearCopy) => Verdict::NearCopy,
                Some(Fate::Kept { .. } | Fate::Open) => {
                    let filtered = &mut self.left_out.filtered;
                    return Ok(filter::judge(self.rules.filters, text, filtered));
                }
                // The first pass counted it.
                None => return Ok(None),
            };
            self.count(verdict, (path, place), text, 0);
            return Ok(None);
        }
        let number = place.map_or(0, Place::number);
        match self.rules.pass {
            Pass::Tokenize(_) => Ok(self.choose(path, place, text)),
            Pass::Visit(visitor) => {
                if let Some(left) = self.choose(path, place, text) {
                    visitor.visit(&left);
                }
                Ok(None)
            }
            Pass::Sign(dedup) => {
                let left = self.choose(path, place, text);
                let signature = left.map(|left| self.signer.sign(&left, dedup));
                self.signatures.push(signature);
                self.digest.update(text);
                Ok(None)
            }
            Pass::Record(dedup, known) => {
                let source = xxh3_128(text.as_bytes());
                let judged = self.judge(path, place, text, (dedup, known.get(&source)));
                let bytes = self.is_reported().then_some(text.len() as u64);
                let fate = Fate::Open;
                self.documents.push(Document { place: number, source, judged, fate, bytes });
                Ok(None)
            }
            Pass::Fetch(wanted) => match wanted.of(self.input, number) {
                None => Ok(None),
                Some(source) if source == xxh3_128(text.as_bytes()) => {
                    Ok(filter::judge(self.rules.filters, text, &mut self.left_out.filtered))
                }
                Some(_) => Err(PrepareError::OtherText { path: path.to_owned(), number }),
            },
        }
    }

    /// The verdict of lists and filters on a text, with its signature where it may be kept.
    fn judge(
        &mut self,
        path: &Path,
        place: Option<Place>,
        text: &str,
        (dedup, known): (Dedup, Option<&Judged>),
    ) -> Judged {
        if self.rules.exclusions.exclude(path, place, text) {
            self.left_out.excluded += 1;
            return Judged::Excluded;
        }
        if let Some(known) = known {
            return known.clone();
        }
        let mut report = FilterReport::default();
        // The recorder counts rejected documents from their records, so this report is not kept.
        let left = filter::judge(self.rules.filters, text, &mut report);
        match (left, report.rejected.keys().next()) {
            (None, Some(rule)) => Judged::Rejected(rule.to_string().into()),
            (None, None) => unreachable!("what is rejected breaks a rule"),
            (Some(_), _) if dedup == Dedup::None => Judged::Chosen(None),
            (Some(left), _) => Judged::Chosen(Some(self.signer.sign(&left, dedup))),
        }
    }

    /// The text that lists and filters leave; `None` where they leave the document out.
    fn choose<'t>(
        &mut self,
        path: &Path,
        place: Option<Place>,
        text: &'t str,
    ) -> Option<Cow<'t, str>> {
        if self.rules.exclusions.exclude(path, place, text) {
            self.left_out.excluded += 1;
            self.count(Verdict::Excluded, (path, place), text, 0);
            return None;
        }
        let mut filtered = FilterReport::default();
        let left = filter::judge(self.rules.filters, text, &mut filtered);
        if left.is_none()
            && let Some(rule) = filtered.rejected.keys().next()
        {
            self.count(Verdict::Rejected(rule.to_string()), (path, place), text, 0);
        }
        self.left_out.filtered.add(&filtered);
        left
    }

    fn is_reported(&self) -> bool {
        self.rules.reporting == Reporting::Files
    }

    /// Counts a document of the stream with its number of tokens, by its text as it was read.
    pub(crate) fn keep(&mut self, at: (&Path, Option<Place>), text: &str, tokens: usize) {
        // Documents that are fetched or shown are counted elsewhere.
        if let Pass::Tokenize(_) = self.rules.pass {
            self.count(Verdict::Kept, at, text, tokens as u64);
        }
    }

    /// Counts a sample that was tokenized already.
    pub(crate) fn keep_sample(&mut self, tokens: usize) {
        if self.is_reported() {
            let (input, tokens) = (self.input, tokens as u64);
            let counted = Counted { input, bytes: None, tokens, example: &|| None };
            self.left_out.tally.count(Verdict::Kept, &counted);
        }
    }

    /// Counts a document.
    fn count(
        &mut self,
        verdict: Verdict,
        (path, place): (&Path, Option<Place>),
        text: &str,
        tokens: u64,
    ) {
        if !self.is_reported() {
            return;
        }
        let input = self.input;
        let example = &|| Some(Example::of_text(input, path, place, text));
        let counted = Counted { input, bytes: Some(text.len() as u64), tokens, example };
        self.left_out.tally.count(verdict, &counted);
    }

    /// The counts, and the signatures or records; `None` if the documents differ from those of the first pass.
    pub(crate) fn finish(self) -> Option<(LeftOut, Batch)> {
        let digest = &self.digest;
        let is_changed = self.verdicts.is_some_and(|verdicts| !verdicts.is_unchanged(digest));
        let signed = Batch {
            signatures: self.signatures,
            digest: digest.value(),
            documents: self.documents,
            ..Batch::default()
        };
        (!is_changed).then_some((self.left_out, signed))
    }
}
