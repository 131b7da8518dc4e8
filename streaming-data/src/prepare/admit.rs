//! Which documents of a file or part enter the stream: lists, filters and duplicates one after the other.
//!
//! What is left out by a list or filter is looked at by nothing behind it: it is no rule's count, and no
//! document is a copy of it.

use std::{borrow::Cow, path::Path};

use super::{
    Place,
    duplicates::{Batch, BatchVerdicts, Dedup, Digest, Signature, Signer, Verdicts},
    exclude::Exclusions,
    filter::{self, FilterReport, FilterSet},
};

/// What is done with documents.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Pass<'a> {
    /// Signatures are made of them, and nothing else.
    Sign(Dedup),
    /// They are tokenized: all of them, or those that are kept by verdicts of a first pass.
    Tokenize(Option<&'a Verdicts>),
}

/// By what documents are chosen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules<'a> {
    pub exclusions: &'a Exclusions,
    pub filters: &'a [FilterSet],
    pub pass: Pass<'a>,
}

impl Rules<'_> {
    /// Whether documents are looked at as a whole.
    pub(crate) fn need_whole_documents(&self) -> bool {
        let is_listed = self.exclusions.identity().is_some();
        !matches!(self.pass, Pass::Tokenize(None)) || !self.filters.is_empty() || is_listed
    }
}

/// What was left out of a file or part.
#[derive(Debug, Default)]
pub(crate) struct LeftOut {
    /// Documents that are on a list.
    pub excluded: u64,
    /// What the filters did.
    pub filtered: FilterReport,
}

impl LeftOut {
    /// Adds what was left out elsewhere.
    pub(crate) fn add(&mut self, other: &LeftOut) {
        self.excluded += other.excluded;
        self.filtered.add(&other.filtered);
    }
}

/// The documents of a file or part, one after the other.
pub(crate) struct Admission<'a> {
    rules: Rules<'a>,
    verdicts: Option<BatchVerdicts<'a>>,
    signer: Signer,
    signatures: Vec<Option<Signature>>,
    /// Of the texts, where there are two passes.
    digest: Digest,
    left_out: LeftOut,
}

impl<'a> Admission<'a> {
    /// For the batch of this number.
    pub(crate) fn new(rules: Rules<'a>, batch: u64) -> Admission<'a> {
        let verdicts = match rules.pass {
            Pass::Tokenize(Some(verdicts)) => Some(verdicts.of_batch(batch)),
            Pass::Tokenize(None) | Pass::Sign(_) => None,
        };
        Admission {
            rules,
            verdicts,
            signer: Signer::default(),
            signatures: Vec::new(),
            digest: Digest::default(),
            left_out: LeftOut::default(),
        }
    }

    /// What of a text, which is not empty, is to be tokenized; nothing in a pass that signs.
    pub(crate) fn admit<'t>(
        &mut self,
        path: &Path,
        place: Option<Place>,
        text: &'t str,
    ) -> Option<Cow<'t, str>> {
        if let Some(verdicts) = &mut self.verdicts {
            // The first pass asked lists and filters; what is kept is judged again for the text that is left.
            self.digest.update(text);
            return match verdicts.keeps_next() {
                true => filter::judge(self.rules.filters, text, &mut self.left_out.filtered),
                false => None,
            };
        }
        let left = self.choose(path, place, text);
        match self.rules.pass {
            Pass::Tokenize(_) => left,
            Pass::Sign(dedup) => {
                let signature = left.map(|left| self.signer.sign(&left, dedup));
                self.signatures.push(signature);
                self.digest.update(text);
                None
            }
        }
    }

    /// What lists and filters leave of a text.
    fn choose<'t>(
        &mut self,
        path: &Path,
        place: Option<Place>,
        text: &'t str,
    ) -> Option<Cow<'t, str>> {
        if self.rules.exclusions.exclude(path, place, text) {
            self.left_out.excluded += 1;
            return None;
        }
        filter::judge(self.rules.filters, text, &mut self.left_out.filtered)
    }

    /// What was left out, and signatures; `None` if the documents are others than in the first pass.
    pub(crate) fn finish(self) -> Option<(LeftOut, Batch)> {
        let digest = &self.digest;
        let is_changed = self.verdicts.is_some_and(|verdicts| !verdicts.is_unchanged(digest));
        let signed = Batch { signatures: self.signatures, digest: digest.value() };
        (!is_changed).then_some((self.left_out, signed))
    }
}
