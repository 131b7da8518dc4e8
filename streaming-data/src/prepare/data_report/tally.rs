//! Outcomes of documents, counted while they are read.
//!
//! Counts of passes and of processes are added in any order, counts of an input's parts in the order of the parts, with
//! the same result: the examples are the first documents in the order of inputs.

use std::{collections::BTreeMap, fmt, path::Path};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use super::{excerpt::Excerpt, histogram::Counts};
use crate::prepare::{
    Place,
    upkeep::{Document, Fate, Judged},
};

/// Documents that are shown of each verdict, and of each rule.
pub const EXAMPLES: usize = 3;

/// The outcome of a document.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "verdict", content = "rule")]
pub enum Verdict {
    /// It is in the stream.
    Kept,
    /// It is on the list of documents to leave out.
    Excluded,
    /// It broke this rule of a filter first.
    Rejected(String),
    /// Its text, or its words, occurred before.
    Copy,
    /// It is nearly the same as an earlier document.
    NearCopy,
}

impl fmt::Display for Verdict {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Kept => formatter.write_str("kept"),
            Verdict::Excluded => formatter.write_str("excluded by the list"),
            Verdict::Rejected(rule) => write!(formatter, "rejected by {rule}"),
            Verdict::Copy => formatter.write_str("copy"),
            Verdict::NearCopy => formatter.write_str("near copy"),
        }
    }
}

impl Verdict {
    /// The verdict on a document whose fate is known.
    pub(crate) fn of(judged: &Judged, fate: Fate) -> Verdict {
        match (judged, fate) {
            (Judged::Excluded, _) => Verdict::Excluded,
            (Judged::Rejected(rule), _) => Verdict::Rejected(rule.to_string()),
            (Judged::Chosen(_), Fate::Copy) => Verdict::Copy,
            (Judged::Chosen(_), Fate::NearCopy) => Verdict::NearCopy,
            (Judged::Chosen(_), Fate::Kept { .. } | Fate::Open) => Verdict::Kept,
        }
    }
}

/// A document that is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Example {
    /// The number of its input.
    pub input: usize,
    /// The file that it is in, where that was noted: an input may be a folder of several.
    pub path: Option<String>,
    /// Number of its line, row or sample.
    pub place: u64,
    /// Hash of its text; none of a text that is read in pieces.
    pub source: Option<u128>,
    /// None until it is read for this.
    pub excerpt: Option<Excerpt>,
}

impl Example {
    /// The one of a text as it was read.
    pub(crate) fn of_text(input: usize, path: &Path, place: Option<Place>, text: &str) -> Example {
        Example {
            input,
            path: Some(path.to_string_lossy().into_owned()),
            place: place.map_or(0, Place::number),
            source: Some(xxh3_128(text.as_bytes())),
            excerpt: Some(Excerpt::of(text)),
        }
    }
}

/// The documents of one verdict.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct OfVerdict {
    pub documents: u64,
    /// Bytes of their texts, as they were read.
    pub bytes: u64,
    /// The first [`EXAMPLES`].
    pub examples: Vec<Example>,
}

/// The documents of one input.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct OfInput {
    pub documents: u64,
    pub kept: u64,
    pub tokens: u64,
}

/// See the [module](self).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub verdicts: BTreeMap<Verdict, OfVerdict>,
    pub kept_tokens: Counts,
    pub kept_bytes: Counts,
    pub left_out_bytes: Counts,
    /// Counts of each input, by its number.
    pub inputs: BTreeMap<usize, OfInput>,
}

/// A document that is counted.
pub(crate) struct Counted<'a> {
    pub input: usize,
    /// Bytes of its text; none of a sample that was tokenized already.
    pub bytes: Option<u64>,
    /// Tokens of a kept document.
    pub tokens: u64,
    /// Makes an example of the document; called where one is needed.
    pub example: &'a dyn Fn() -> Option<Example>,
}

impl Tally {
    /// Counts a document.
    pub(crate) fn count(&mut self, verdict: Verdict, counted: &Counted<'_>) {
        let Counted { input, bytes, tokens, example } = *counted;
        let is_kept = verdict == Verdict::Kept;
        let of_input = self.inputs.entry(input).or_default();
        of_input.documents += 1;
        of_input.kept += u64::from(is_kept);
        of_input.tokens += if is_kept { tokens } else { 0 };
        if is_kept {
            self.kept_tokens.add(tokens, 1);
        }
        let lengths = if is_kept { &mut self.kept_bytes } else { &mut self.left_out_bytes };
        bytes.into_iter().for_each(|bytes| lengths.add(bytes, 1));
        let of_verdict = self.verdicts.entry(verdict).or_default();
        of_verdict.documents += 1;
        of_verdict.bytes += bytes.unwrap_or(0);
        // Within a part, documents come in their order.
        if of_verdict.examples.len() < EXAMPLES
            && let Some(example) = example()
        {
            of_verdict.examples.push(example);
        }
    }

    /// Counts a document by its record; its text is shown later.
    pub(crate) fn count_record(&mut self, input: usize, document: &Document) {
        let Document { place, source, judged, fate, bytes } = document;
        let tokens = match fate {
            Fate::Kept { tokens } => *tokens,
            Fate::Copy | Fate::NearCopy | Fate::Open => 0,
        };
        let (place, source) = (*place, Some(*source));
        let example = &|| Some(Example { input, path: None, place, source, excerpt: None });
        let counted = Counted { input, bytes: *bytes, tokens, example };
        self.count(Verdict::of(judged, *fate), &counted);
    }

    /// Adds counts that were made elsewhere.
    pub(crate) fn add(&mut self, other: &Tally) {
        for (verdict, other) in &other.verdicts {
            if !self.verdicts.contains_key(verdict) {
                self.verdicts.insert(verdict.clone(), OfVerdict::default());
            }
            let Some(own) = self.verdicts.get_mut(verdict) else { continue };
            own.documents = own.documents.saturating_add(other.documents);
            own.bytes = own.bytes.saturating_add(other.bytes);
            let last = own.examples.last().map_or(0, |example| example.input);
            let is_full = own.examples.len() == EXAMPLES;
            let is_wanted = |example: &&Example| !is_full || example.input < last;
            own.examples.extend(other.examples.iter().filter(is_wanted).cloned());
            // Examples of an input stay in order.
            own.examples.sort_by_key(|example| example.input);
            own.examples.truncate(EXAMPLES);
        }
        self.kept_tokens.merge(&other.kept_tokens);
        self.kept_bytes.merge(&other.kept_bytes);
        self.left_out_bytes.merge(&other.left_out_bytes);
        for (&input, other) in &other.inputs {
            let own = self.inputs.entry(input).or_default();
            own.documents = own.documents.saturating_add(other.documents);
            own.kept = own.kept.saturating_add(other.kept);
            own.tokens = own.tokens.saturating_add(other.tokens);
        }
    }

    /// Gives inputs the numbers that they have among all, where these are the ones of a process.
    pub(crate) fn renumber(&mut self, numbers: &[usize]) {
        let number = |input: usize| numbers.get(input).copied().unwrap_or(input);
        for of_verdict in self.verdicts.values_mut() {
            of_verdict.examples.iter_mut().for_each(|it| it.input = number(it.input));
        }
        let inputs = std::mem::take(&mut self.inputs);
        self.inputs = inputs.into_iter().map(|(input, of)| (number(input), of)).collect();
    }

    /// Documents that lists and filters left.
    pub(crate) fn compared(&self) -> u64 {
        let documents = |verdict| self.verdicts.get(verdict).map_or(0, |of| of.documents);
        let verdicts = [Verdict::Kept, Verdict::Copy, Verdict::NearCopy];
        verdicts.iter().map(documents).fold(0, u64::saturating_add)
    }

    /// Whether all its inputs are among the first `inputs`.
    pub(crate) fn is_of_inputs(&self, inputs: usize) -> bool {
        let examples = self.verdicts.values().flat_map(|of| &of.examples);
        let numbers = examples.map(|example| example.input).chain(self.inputs.keys().copied());
        numbers.max().is_none_or(|most| most < inputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(documents: &[(usize, u64)]) -> Tally {
        let mut tally = Tally::default();
        for &(input, place) in documents {
            let text = format!("{input} {place}");
            let verdict = match place % 4 {
                0 => Verdict::Kept,
                1 => Verdict::Copy,
                2 => Verdict::Rejected("c4.min_sentences".into()),
                _ => Verdict::Rejected("gopher.min_words".into()),
            };
            let (source, excerpt) = (Some(u128::from(place)), Some(Excerpt::of(&text)));
            let example = &|| {
                let (path, excerpt) = (Some(input.to_string()), excerpt.clone());
                Some(Example { input, path, place, source, excerpt })
            };
            let bytes = Some(text.len() as u64);
            tally.count(verdict, &Counted { input, bytes, tokens: 3 + place, example });
        }
        tally
    }

    #[test]
    fn counts_of_parts_in_any_order_are_those_of_the_whole() {
        let documents: Vec<(usize, u64)> =
            (0..6).flat_map(|input| (0..9).map(move |place| (input, 7 * place))).collect();
        let whole = tally(&documents);
        let examples = &whole.verdicts[&Verdict::Kept].examples;
        let places: Vec<_> = examples.iter().map(|it| (it.input, it.place)).collect();
        assert_eq!(places, [(0, 0), (0, 28), (0, 56)]);
        assert_eq!(whole.compared(), documents.iter().filter(|it| it.1 % 4 < 2).count() as u64);
        for size in [1, 2, 5, 11] {
            let mut forwards = Tally::default();
            documents.chunks(size).for_each(|part| forwards.add(&tally(part)));
            assert_eq!(forwards, whole);
        }
        // Processes have whole inputs, in no order.
        let mut of_processes = Tally::default();
        documents.chunks(9).rev().for_each(|input| of_processes.add(&tally(input)));
        assert_eq!(of_processes, whole);
        assert!(whole.is_of_inputs(6) && !whole.is_of_inputs(5));
    }

    #[test]
    fn inputs_of_a_process_get_the_numbers_of_all() {
        let mut own = tally(&[(0, 1), (0, 2), (1, 1)]);
        own.renumber(&[4, 7]);
        let numbers: Vec<usize> = own.inputs.keys().copied().collect();
        assert_eq!(numbers, [4, 7]);
        let examples = &own.verdicts[&Verdict::Copy].examples;
        let numbers: Vec<usize> = examples.iter().map(|example| example.input).collect();
        assert_eq!(numbers, [4, 7]);
    }
}
