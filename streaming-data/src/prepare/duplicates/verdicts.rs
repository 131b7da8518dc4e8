//! What the first pass finds out, and the second goes by.

use std::io;

use xxhash_rust::xxh3::Xxh3;

use super::{DedupReport, DedupSettings, Signature, buckets::Buckets};
use crate::prepare::{
    PrepareError,
    batch::{Batch, Collect},
    upkeep::Fate,
};

/// What the first pass saw of a file or part: the second must see the same.
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

/// Takes the signatures of the first pass in order.
#[derive(Debug)]
pub(crate) struct Collector {
    seen: Vec<Seen>,
    documents: u64,
    left_out: Documents,
    copies: Documents,
    near: Documents,
    by_copies: Buckets<[u64; 2]>,
    by_band: Buckets<u64>,
}

impl Collector {
    /// For so much memory: a copy's entry has 24 bytes, those of bands 14 times 16.
    pub(crate) fn new(settings: DedupSettings) -> Collector {
        let memory_bytes = settings.memory_bytes;
        let for_copies = match settings.dedup {
            super::Dedup::Near => memory_bytes / 10,
            _ => memory_bytes,
        };
        Collector {
            seen: Vec::new(),
            documents: 0,
            left_out: Documents::default(),
            copies: Documents::default(),
            near: Documents::default(),
            by_copies: Buckets::new(for_copies),
            by_band: Buckets::new(memory_bytes - for_copies),
        }
    }

    /// Takes the next document; none for one that is left out whatever else there is.
    ///
    /// # Errors
    /// That of a temporary file.
    pub(crate) fn sign(&mut self, signature: Option<Signature>) -> Result<(), PrepareError> {
        let document = self.documents;
        self.documents += 1;
        match signature {
            None => self.left_out.insert(document),
            Some(signature) => self.insert(document, signature).map_err(sorting_failed)?,
        }
        Ok(())
    }

    fn insert(&mut self, document: u64, Signature { copies, near }: Signature) -> io::Result<()> {
        let key = [(copies >> 64) as u64, copies as u64];
        self.by_copies.insert(key, document, &mut |document| self.copies.insert(document))?;
        for band in near.into_iter().flatten() {
            self.by_band.insert(band, document, &mut |document| self.near.insert(document))?;
        }
        Ok(())
    }

    /// The verdicts; `go_on` is asked now and then.
    ///
    /// # Errors
    /// That of a temporary file, or of `go_on`.
    pub(crate) fn finish(
        mut self,
        go_on: &mut dyn FnMut() -> Result<(), PrepareError>,
    ) -> Result<Verdicts, PrepareError> {
        let mut go_on = || go_on().map_err(Stopped::Asked);
        let stopped = |stopped| match stopped {
            Stopped::Asked(error) => error,
            Stopped::Io(error) => sorting_failed(error),
        };
        let copies = &mut self.copies;
        let finished = self.by_copies.finish(&mut |document| copies.insert(document), &mut go_on);
        finished.map_err(stopped)?;
        let near = &mut self.near;
        let finished = self.by_band.finish(&mut |document| near.insert(document), &mut go_on);
        finished.map_err(stopped)?;
        let report = DedupReport {
            copies: self.copies.len(),
            near_copies: {
                let both = self.near.bits.iter().zip(&self.copies.bits);
                self.near.len() - both.map(|(a, b)| u64::from((a & b).count_ones())).sum::<u64>()
            },
        };
        let Collector { seen, documents, left_out, copies, near, .. } = self;
        Ok(Verdicts { seen, documents, left_out, copies, near, report })
    }
}

impl Collect for Collector {
    fn take(&mut self, _: usize, batch: Batch) -> Result<(), PrepareError> {
        self.seen.push(Seen { before: self.documents, digest: batch.digest });
        batch.signatures.into_iter().try_for_each(|signature| self.sign(signature))
    }
}

/// Why the buckets were not finished.
enum Stopped {
    Asked(PrepareError),
    Io(io::Error),
}

impl From<io::Error> for Stopped {
    fn from(error: io::Error) -> Stopped {
        Stopped::Io(error)
    }
}

fn sorting_failed(error: io::Error) -> PrepareError {
    PrepareError::io("sort records of documents in", std::env::temp_dir())(error)
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
}

impl Verdicts {
    /// What became of a document, by its number, that was not left out whatever else there is; a kept one has
    /// no tokens yet.
    pub(crate) fn fate(&self, document: u64) -> Fate {
        match (self.copies.contains(document), self.near.contains(document)) {
            (true, _) => Fate::Copy,
            (false, true) => Fate::NearCopy,
            (false, false) => Fate::Kept { tokens: 0 },
        }
    }

    fn is_kept(&self, document: u64) -> bool {
        !self.left_out.contains(document) && matches!(self.fate(document), Fate::Kept { .. })
    }

    /// Those of a batch, whose documents are asked for one after the other.
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

    /// What was left out.
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
    /// Whether the next document is kept.
    pub(crate) fn keeps_next(&mut self) -> bool {
        self.document += 1;
        self.document <= self.end && self.verdicts.is_kept(self.document - 1)
    }

    /// Whether the batch, which ends here with this digest, is what it was in the first pass.
    pub(crate) fn is_unchanged(&self, digest: &Digest) -> bool {
        self.document == self.end && self.expected == Some(digest.value())
    }
}
