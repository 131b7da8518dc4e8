//! The changes of an update: two versions side by side, record by record.
//!
//! Documents of an input with the same text are the same document at any place; of several with the same text the first
//! matches the first, and so on. As many documents as are replaced in an input count as changed, and only the others as added or
//! removed. A renamed input counts as removed and added.

use std::{cmp::Ordering, collections::BTreeMap};

use serde::{Deserialize, Serialize};

use super::tally::Verdict;
use crate::{
    data_set::index::ShardEntry,
    hash::ContentHash,
    prepare::{
        PrepareError,
        choose::duplicates::Verdicts,
        upkeep::{Document, FormerRecords, Record, Spool, SpoolReader, Version, fate},
    },
};

/// The changes of an update.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// The previous version.
    pub former: ContentHash,
    /// Inputs: changed where their documents are others, or are at other places in them.
    pub inputs: Changed,
    /// Documents.
    pub documents: Changed,
    /// Changes of the verdict on documents whose text is unchanged.
    pub verdicts: Vec<Transition>,
    /// Shards.
    pub shards: ShardsChanged,
}

/// How many of something came, went, changed, and stayed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changed {
    /// Number of things that are new.
    pub added: u64,
    /// Number of things that are gone.
    pub removed: u64,
    /// Number of things that were replaced by others.
    pub changed: u64,
    /// Number of things that stayed.
    pub unchanged: u64,
}

/// Documents with another outcome than before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transition {
    /// Their outcome in the previous version.
    pub from: Verdict,
    /// Their outcome now.
    pub to: Verdict,
    /// Number of these documents.
    pub documents: u64,
}

/// The outcome of shards.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardsChanged {
    /// Shards of the previous version that stay.
    pub kept: u64,
    /// Shards that are new.
    pub written: u64,
    /// Shards of the previous version that are not in this one.
    pub gone: u64,
}

/// Records that are read between two questions whether to go on.
const RECORDS_AT_ONCE: u64 = 1 << 12;

/// The difference between the records and shards of a version and those of the previous version.
///
/// # Errors
/// The errors of reading the previous version and a temporary file, and of `go_on`.
pub(crate) fn difference(
    former: &Version,
    spool: &mut Spool,
    verdicts: Option<&Verdicts>,
    shards: &[ShardEntry],
    go_on: &mut dyn FnMut() -> Result<(), PrepareError>,
) -> Result<Difference, PrepareError> {
    let mut before = Before { records: FormerRecords::new(former) };
    let mut now = Now { records: spool.read()?, verdicts, documents: 0 };
    let mut comparison = Comparison::default();
    let (mut old, mut new) = (before.begin()?, now.begin()?);
    let mut asked = 0;
    loop {
        let order = match (&old, &new) {
            (None, None) => break,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(old), Some(new)) => old.cmp(new),
        };
        let (mut of_input, mut digests) = (OfInput::default(), [None, None]);
        let (mut has_old, mut has_new) = (order.is_le(), order.is_ge());
        while has_old || has_new {
            let mut pair = [None, None];
            if has_old {
                match before.next()? {
                    Item::Document(document) => pair[0] = Some(document),
                    Item::End(digest) => (digests[0], has_old) = (Some(digest), false),
                }
            }
            if has_new {
                match now.next()? {
                    Item::Document(document) => pair[1] = Some(document),
                    Item::End(digest) => (digests[1], has_new) = (Some(digest), false),
                }
            }
            of_input.take(pair, &mut comparison);
            asked += 1;
            if asked % RECORDS_AT_ONCE == 0 {
                go_on()?;
            }
        }
        of_input.end(&mut comparison);
        let inputs = &mut comparison.inputs;
        match (order, digests) {
            (Ordering::Less, _) => inputs.removed += 1,
            (Ordering::Greater, _) => inputs.added += 1,
            (Ordering::Equal, [old, new]) if old == new => inputs.unchanged += 1,
            (Ordering::Equal, _) => inputs.changed += 1,
        }
        if order.is_le() {
            old = before.begin()?;
        }
        if order.is_ge() {
            new = now.begin()?;
        }
    }
    let transition = |((from, to), documents)| Transition { from, to, documents };
    Ok(Difference {
        former: former.index.fingerprint(),
        inputs: comparison.inputs,
        documents: comparison.documents,
        verdicts: comparison.verdicts.into_iter().map(transition).collect(),
        shards: shards_changed(&former.index.shards, shards),
    })
}

/// A document: the hash of its text, and what became of it.
type Judgement = (u128, Verdict);

/// The next record of an input.
enum Item {
    Document(Judgement),
    /// The end of an input, and the digest of its documents.
    End(u128),
}

/// The records of the previous version.
struct Before<'a> {
    records: FormerRecords<'a>,
}

/// The records of this version.
struct Now<'a> {
    records: SpoolReader<'a>,
    verdicts: Option<&'a Verdicts>,
    /// Documents so far.
    documents: u64,
}

impl Before<'_> {
    /// The path of the next input.
    fn begin(&mut self) -> Result<Option<Vec<u8>>, PrepareError> {
        Ok(path(self.records.next()?.map(|(record, _)| record)))
    }

    fn next(&mut self) -> Result<Item, PrepareError> {
        let record = self.records.next()?.map(|(record, _)| record);
        Ok(item(record, |document| Verdict::of(&document.judged, document.fate)))
    }
}

impl Now<'_> {
    fn begin(&mut self) -> Result<Option<Vec<u8>>, PrepareError> {
        Ok(path(self.records.next()?.map(|(record, _)| record)))
    }

    fn next(&mut self) -> Result<Item, PrepareError> {
        let record = self.records.next()?.map(|(record, _)| record);
        let (verdicts, number) = (self.verdicts, self.documents);
        let item = item(record, |document| {
            Verdict::of(&document.judged, fate(verdicts, number, document))
        });
        self.documents += u64::from(matches!(item, Item::Document(_)));
        Ok(item)
    }
}

/// The path of an input that begins.
fn path(record: Option<Record>) -> Option<Vec<u8>> {
    match record {
        Some(Record::Begin(path)) => Some(path),
        _ => None,
    }
}

fn item(record: Option<Record>, verdict: impl FnOnce(&Document) -> Verdict) -> Item {
    match record {
        Some(Record::Document(document)) => Item::Document((document.source, verdict(&document))),
        Some(Record::End(end)) => Item::End(end.digest),
        // This input has no end; no version has such an input.
        Some(Record::Begin(_)) | None => Item::End(0),
    }
}

/// The comparison so far.
#[derive(Debug, Default, PartialEq, Eq)]
struct Comparison {
    inputs: Changed,
    documents: Changed,
    verdicts: BTreeMap<(Verdict, Verdict), u64>,
}

impl Comparison {
    /// A document that stays.
    fn stays(&mut self, from: Verdict, to: Verdict) {
        self.documents.unchanged += 1;
        if from != to {
            *self.verdicts.entry((from, to)).or_default() += 1;
        }
    }
}

/// Documents of one input in both versions. From the first on that differ, they wait until all are there.
#[derive(Default)]
struct OfInput {
    waiting: [Vec<Judgement>; 2],
}

impl OfInput {
    /// Takes the next documents of the previous version and of this one.
    fn take(&mut self, pair: [Option<Judgement>; 2], comparison: &mut Comparison) {
        let is_in_step = self.waiting.iter().all(Vec::is_empty);
        match pair {
            [Some(old), Some(new)] if is_in_step && old.0 == new.0 => {
                comparison.stays(old.1, new.1);
            }
            pair => {
                for (waiting, judgement) in self.waiting.iter_mut().zip(pair) {
                    waiting.extend(judgement);
                }
            }
        }
    }

    fn end(self, comparison: &mut Comparison) {
        let [mut old, mut new] = self.waiting;
        // Documents of the same text stay in order.
        old.sort_by_key(|judgement| judgement.0);
        new.sort_by_key(|judgement| judgement.0);
        let (mut old, mut new) = (old.into_iter().peekable(), new.into_iter().peekable());
        let (mut gone, mut come) = (0, 0);
        loop {
            let order = match (old.peek(), new.peek()) {
                (None, None) => break,
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some(old), Some(new)) => old.0.cmp(&new.0),
            };
            let from = if order.is_le() { old.next() } else { None };
            let to = if order.is_ge() { new.next() } else { None };
            match (from, to) {
                (Some(from), Some(to)) => comparison.stays(from.1, to.1),
                (from, _) => {
                    gone += u64::from(from.is_some());
                    come += u64::from(from.is_none());
                }
            }
        }
        let changed = gone.min(come);
        comparison.documents.changed += changed;
        comparison.documents.removed += gone - changed;
        comparison.documents.added += come - changed;
    }
}

fn shards_changed(former: &[ShardEntry], now: &[ShardEntry]) -> ShardsChanged {
    let mut left: BTreeMap<ContentHash, u64> = BTreeMap::new();
    former.iter().for_each(|shard| *left.entry(shard.hash).or_default() += 1);
    let mut changed = ShardsChanged::default();
    for shard in now {
        match left.get_mut(&shard.hash) {
            Some(count) if *count > 0 => (*count, changed.kept) = (*count - 1, changed.kept + 1),
            _ => changed.written += 1,
        }
    }
    changed.gone = former.len() as u64 - changed.kept;
    changed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(old: &[(u128, Verdict)], new: &[(u128, Verdict)]) -> Comparison {
        let (mut comparison, mut of_input) = (Comparison::default(), OfInput::default());
        for at in 0..old.len().max(new.len()) {
            let pair = [old.get(at).cloned(), new.get(at).cloned()];
            of_input.take(pair, &mut comparison);
        }
        of_input.end(&mut comparison);
        comparison
    }

    fn kept(sources: &[u128]) -> Vec<(u128, Verdict)> {
        sources.iter().map(|&source| (source, Verdict::Kept)).collect()
    }

    #[test]
    fn documents_are_told_apart_by_their_texts_wherever_they_stand() {
        let changed =
            |added, removed, changed, unchanged| Changed { added, removed, changed, unchanged };
        for (old, new, expected) in [
            (&[][..], &[1, 2][..], changed(2, 0, 0, 0)),
            (&[1, 2], &[], changed(0, 2, 0, 0)),
            (&[1, 2, 3], &[1, 2, 3], changed(0, 0, 0, 3)),
            (&[1, 2, 3], &[9, 1, 2, 3], changed(1, 0, 0, 3)),
            (&[1, 2, 3], &[1, 7, 3], changed(0, 0, 1, 2)),
            (&[1, 2, 3], &[3, 2, 1], changed(0, 0, 0, 3)),
            (&[1, 1, 1, 2], &[2, 1, 5], changed(0, 1, 1, 2)),
            (&[1, 2], &[1, 2, 2, 2], changed(2, 0, 0, 2)),
        ] {
            let found = compared(&kept(old), &kept(new));
            assert_eq!(found.documents, expected, "{old:?} {new:?}");
            assert!(found.verdicts.is_empty());
        }
    }

    #[test]
    fn verdicts_are_compared_of_the_same_occurrence() {
        let old = [(5, Verdict::Kept), (5, Verdict::Copy), (6, Verdict::Copy)];
        let new = [(6, Verdict::Kept), (5, Verdict::Copy), (5, Verdict::Copy)];
        let found = compared(&old, &new);
        let expected: BTreeMap<_, _> =
            [((Verdict::Kept, Verdict::Copy), 1), ((Verdict::Copy, Verdict::Kept), 1)].into();
        assert_eq!(found.verdicts, expected);
        assert_eq!(found.documents, Changed { unchanged: 3, ..Changed::default() });
    }
}
