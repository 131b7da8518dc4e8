//! The verdicts of the first pass, by which the second one keeps documents or leaves them out.

use xxhash_rust::xxh3::Xxh3;

use super::{
    DedupReport, DedupSettings, Signature,
    sorter::{Likeness, Sorter},
};
use crate::prepare::{
    PrepareError,
    data_report::{Reporting, groups::Groups},
    pipeline::batch::{Batch, Collect},
    upkeep::Fate,
};

/// The documents of a file or part in the first pass; the second pass must read the same ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Seen {
    /// Documents of all batches before it.
    before: u64,
    /// Hash of its texts.
    digest: u64,
}

/// Hash of texts one after the other.
#[derive(Default)]
pub(crate) struct Digest(Option<Box<Xxh3>>);

impl Digest {
    /// Appends a text.
    pub(crate) fn update(&mut self, text: &str) {
        let hasher = self.0.get_or_insert_default();
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    }

    /// The hash; 0 without a text.
    pub(crate) fn value(&self) -> u64 {
        self.0.as_ref().map_or(0, |hasher| hasher.digest())
    }
}

/// A set of documents, by their numbers.
#[derive(Debug, Default)]
struct Documents {
    bits: Vec<u64>,
}

impl Documents {
    fn insert(&mut self, document: u64) {
        let (at, bit) = ((document / 64) as usize, document % 64);
        if self.bits.len() <= at {
            self.bits.resize(at + 1, 0);
        }
        self.bits[at] |= 1 << bit;
    }

    fn contains(&self, document: u64) -> bool {
        let word = self.bits.get((document / 64) as usize);
        word.is_some_and(|word| word >> (document % 64) & 1 == 1)
    }

    fn len(&self) -> u64 {
        self.bits.iter().map(|word| u64::from(word.count_ones())).sum()
    }
}

/// Documents that are left out for the sake of others, by their numbers.
#[derive(Debug, Default)]
pub(crate) struct Found {
    copies: Documents,
    near: Documents,
}

impl Found {
    /// Adds a document, which may have been found before.
    pub(crate) fn insert(&mut self, likeness: Likeness, document: u64) {
        match likeness {
            Likeness::Copy => self.copies.insert(document),
            Likeness::NearCopy => self.near.insert(document),
        }
    }
}

/// The batches and documents of the first pass, in order.
#[derive(Debug, Default)]
pub(crate) struct Listed {
    seen: Vec<Seen>,
    documents: u64,
    left_out: Documents,
}

impl Listed {
    /// A batch begins, whose texts have this digest.
    pub(crate) fn begin(&mut self, digest: u64) {
        self.seen.push(Seen { before: self.documents, digest });
    }

    /// How many documents there are so far.
    pub(crate) fn documents(&self) -> u64 {
        self.documents
    }

    /// Takes the next document, which has no signature if lists or filters left it out; returns its number.
    pub(crate) fn push(&mut self, signature: Option<&Signature>) -> u64 {
        let document = self.documents;
        self.documents += 1;
        if signature.is_none() {
            self.left_out.insert(document);
        }
        document
    }

    /// The verdicts on these documents.
    pub(crate) fn judged(self, found: Found) -> Verdicts {
        let Found { copies, near } = found;
        let both = near.bits.iter().zip(&copies.bits);
        let both: u64 = both.map(|(a, b)| u64::from((a & b).count_ones())).sum();
        let report = DedupReport { copies: copies.len(), near_copies: near.len() - both };
        let Listed { seen, documents, left_out } = self;
        Verdicts { seen, documents, left_out, copies, near, report, groups: None }
    }
}

/// Takes the signatures of the first pass in order.
#[derive(Debug)]
pub(crate) struct Collector {
    listed: Listed,
    found: Found,
    sorter: Sorter,
    /// Groups of duplicates, where they are reported.
    groups: Option<Groups>,
}

impl Collector {
    /// Within the memory of `settings`; see [`Sorter::new`].
    pub(crate) fn new(settings: DedupSettings, reporting: Reporting) -> Collector {
        Collector {
            listed: Listed::default(),
            found: Found::default(),
            sorter: Sorter::new(settings),
            groups: Groups::asked(reporting),
        }
    }

    /// Takes the next document; none for a document left out by lists or filters.
    ///
    /// # Errors
    /// Errors of a temporary file.
    pub(crate) fn sign(&mut self, signature: Option<Signature>) -> Result<(), PrepareError> {
        let document = self.listed.push(signature.as_ref());
        let (found, groups) = (&mut self.found, &mut self.groups);
        let tell = &mut |likeness, document, first| {
            found.insert(likeness, document);
            groups.iter_mut().for_each(|groups| groups.link(document, first));
        };
        let mut buckets = signature.iter().flat_map(Signature::buckets);
        buckets.try_for_each(|bucket| self.sorter.insert(bucket, document, tell))
    }

    /// The verdicts; `go_on` is asked now and then.
    ///
    /// # Errors
    /// Errors of a temporary file, or of `go_on`.
    pub(crate) fn finish(
        self,
        go_on: &mut dyn FnMut() -> Result<(), PrepareError>,
    ) -> Result<Verdicts, PrepareError> {
        let Collector { listed, mut found, sorter, mut groups } = self;
        let tell = &mut |likeness, document, first| {
            found.insert(likeness, document);
            groups.iter_mut().for_each(|groups| groups.link(document, first));
        };
        sorter.finish(tell, go_on)?;
        Ok(Verdicts { groups, ..listed.judged(found) })
    }
}

impl Collect for Collector {
    fn take(&mut self, _: usize, batch: Batch) -> Result<(), PrepareError> {
        self.listed.begin(batch.digest);
        batch.signatures.into_iter().try_for_each(|signature| self.sign(signature))
    }
}

/// Which documents are kept.
#[derive(Debug)]
pub(crate) struct Verdicts {
    seen: Vec<Seen>,
    documents: u64,
    left_out: Documents,
    copies: Documents,
    near: Documents,
    report: DedupReport,
    /// Groups of duplicates, where they are reported.
    pub groups: Option<Groups>,
}

impl Verdicts {
    /// The fate of a document, by its number, that lists and filters did not leave out; a kept one has
    /// no tokens yet.
    pub(crate) fn fate(&self, document: u64) -> Fate {
        match (self.copies.contains(document), self.near.contains(document)) {
            (true, _) => Fate::Copy,
            (false, true) => Fate::NearCopy,
            (false, false) => Fate::Kept { tokens: 0 },
        }
    }

    /// The verdicts of a batch, whose documents are queried in order.
    pub(crate) fn of_batch(&self, batch: u64) -> BatchVerdicts<'_> {
        let seen = usize::try_from(batch).ok().and_then(|at| self.seen.get(at));
        let document = seen.map_or(self.documents, |seen| seen.before);
        let end = usize::try_from(batch).ok().and_then(|at| self.seen.get(at + 1));
        BatchVerdicts {
            verdicts: self,
            document,
            end: end.map_or(self.documents, |seen| seen.before),
            expected: seen.map(|seen| seen.digest),
        }
    }

    /// How many batches the first pass saw.
    pub(crate) fn batches(&self) -> u64 {
        self.seen.len() as u64
    }

    /// How many documents were left out as duplicates.
    pub(crate) fn report(&self) -> DedupReport {
        self.report
    }
}

/// The verdicts of a batch while its documents are read again.
#[derive(Debug)]
pub(crate) struct BatchVerdicts<'a> {
    verdicts: &'a Verdicts,
    document: u64,
    end: u64,
    expected: Option<u64>,
}

impl BatchVerdicts<'_> {
    /// The fate of the next document; none for a document left out by lists or filters.
    pub(crate) fn next_fate(&mut self) -> Option<Fate> {
        let document = self.document;
        self.document += 1;
        let is_judged = document < self.end && !self.verdicts.left_out.contains(document);
        is_judged.then(|| self.verdicts.fate(document))
    }

    /// Whether the batch, which ends here with this digest, is the same as in the first pass.
    pub(crate) fn is_unchanged(&self, digest: &Digest) -> bool {
        self.document == self.end && self.expected == Some(digest.value())
    }
}
