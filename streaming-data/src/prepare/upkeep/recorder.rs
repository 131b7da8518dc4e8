//! The first pass: records of all documents in order, read from inputs or taken over from the version
//! before.

use std::{
    collections::{BTreeMap, VecDeque},
    path::PathBuf,
};

use super::{
    former::{FormerRecords, Known, Places},
    record::{Document, Fate, InputEnd, Judged, Record, SourceDigest, WasRead},
    seen::{Look, Seen},
    spool::{Origin, Spool, SpoolWriter},
};
use crate::{
    hash::ContentHash,
    prepare::{
        PrepareError, Rule,
        choose::{duplicates::Collector, exclude::Exclusions},
        input::{
            find::{Input, path_bytes},
            format::Format,
        },
        pipeline::batch::{Batch, Collect, Ended},
    },
};

/// An input, and the source of its records.
pub(crate) struct Listed<'a> {
    pub input: &'a Input,
    pub look: Option<Look>,
    /// Digest of its documents in the previous version, where the look says that they are unchanged.
    pub told: Option<u128>,
    pub source: Source,
}

/// The source of an input's records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// It is read.
    Input,
    /// It is as it was in the previous version.
    Former,
}

/// Takes records; see the [module](self).
pub(crate) struct Recorder<'a> {
    listed: &'a [Listed<'a>],
    /// The inputs that are read, by their numbers among all.
    read: Vec<usize>,
    exclusions: &'a Exclusions,
    past: Past<'a>,
    spool: SpoolWriter,
    compared: Option<Collector>,
    /// The first input that is not recorded to its end.
    at: usize,
    /// The current input, after its beginning.
    begun: Option<Begun>,
    seen: Seen,
    counts: Counts,
}

/// The previous version's verdicts on texts, records and places of tokens.
pub(crate) struct Past<'a> {
    /// The known facts on texts of that version.
    pub known: &'a Known,
    pub records: Option<FormerRecords<'a>>,
    pub places: Places,
}

/// The outcome of recording.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Documents that are on the list.
    pub excluded: u64,
    pub empty: u64,
    pub nulls: u64,
    pub broken: u64,
    /// Documents of inputs that were read.
    pub read: u64,
    /// Documents of these inputs that filters rejected, by the first rule that each broke. Texts whose verdict was known
    /// before are not counted; a process that does not know the verdicts judges them again.
    pub rejected: BTreeMap<Rule, u64>,
    /// Inputs that changed although they look as before.
    pub unnoticed: Vec<PathBuf>,
}

/// An input that is being read.
#[derive(Default)]
struct Begun {
    digest: SourceDigest,
    empty: u64,
    nulls: u64,
    broken: u64,
}

impl<'a> Recorder<'a> {
    /// # Errors
    /// Errors of a temporary file.
    pub(crate) fn new(
        listed: &'a [Listed<'a>],
        exclusions: &'a Exclusions,
        past: Past<'a>,
        compared: Option<Collector>,
    ) -> Result<Recorder<'a>, PrepareError> {
        let is_read =
            |(at, input): (usize, &Listed<'_>)| (input.source == Source::Input).then_some(at);
        Ok(Recorder {
            listed,
            read: listed.iter().enumerate().filter_map(is_read).collect(),
            exclusions,
            past,
            spool: SpoolWriter::new()?,
            compared,
            at: 0,
            begun: None,
            seen: Seen::default(),
            counts: Counts::default(),
        })
    }

    /// Takes over the unread inputs after the last input, and ends.
    ///
    /// # Errors
    /// The errors of reading the state, and of a temporary file.
    pub(crate) fn finish(
        mut self,
    ) -> Result<(Spool, Option<Collector>, Seen, Counts), PrepareError> {
        self.take_over(self.listed.len())?;
        Ok((self.spool.finish()?, self.compared, self.seen, self.counts))
    }

    /// Takes over all inputs before this one.
    fn take_over(&mut self, end: usize) -> Result<(), PrepareError> {
        while self.at < end {
            let listed = &self.listed[self.at];
            let path = path_bytes(&listed.input.path);
            loop {
                let record = match &mut self.past.records {
                    Some(former) => former.next()?,
                    None => None,
                };
                match record {
                    Some((Record::Begin(begun), _)) if begun == path => break,
                    // A record of an input that was read again, or is gone.
                    Some(_) => {}
                    None => unreachable!("what is taken over is in the version before"),
                }
            }
            self.spool.push(&Record::Begin(path.to_owned()), None)?;
            self.take_over_documents(listed)?;
            self.at += 1;
        }
        Ok(())
    }

    fn take_over_documents(&mut self, listed: &Listed<'_>) -> Result<(), PrepareError> {
        while let Some((record, origin)) =
            self.past.records.as_mut().map_or(Ok(None), FormerRecords::next)?
        {
            match record {
                Record::Begin(_) => break,
                Record::Document(document) => {
                    let judged = match self.is_excluded(listed.input, &document) {
                        true => Judged::Excluded,
                        false => document.judged,
                    };
                    let fate = Fate::Open;
                    self.push(Document { judged, fate, ..document }, origin)?;
                }
                Record::End(end) => {
                    self.end_input(listed, end)?;
                    break;
                }
            }
        }
        Ok(())
    }

    fn is_excluded(&self, input: &Input, document: &Document) -> bool {
        let hash = || ContentHash::of_bits(document.source);
        let place = (input.format != Format::Text).then_some(document.place);
        self.exclusions.exclude_hashed(&input.path, place, hash)
    }

    fn push(&mut self, document: Document, origin: Option<Origin>) -> Result<(), PrepareError> {
        let signature = match &document.judged {
            Judged::Chosen(signature) => *signature,
            Judged::Excluded | Judged::Rejected(_) => None,
        };
        self.counts.excluded += u64::from(document.judged == Judged::Excluded);
        if let Some(compared) = &mut self.compared {
            compared.sign(signature)?;
        }
        self.spool.push(&Record::Document(document), origin)
    }

    fn end_input(&mut self, listed: &Listed<'_>, end: InputEnd) -> Result<(), PrepareError> {
        self.counts.empty += end.empty;
        self.counts.nulls += end.nulls;
        self.counts.broken += end.broken;
        if let Some(look) = listed.look.filter(|_| end.read == WasRead::Whole) {
            self.seen.insert(path_bytes(&listed.input.path), look, end.digest);
        }
        self.spool.push(&Record::End(end), None)
    }

    /// The input that is read next, begun.
    fn begin(&mut self, input: usize) -> Result<Begun, PrepareError> {
        let at = self.read[input];
        self.take_over(at)?;
        match self.begun.take() {
            Some(begun) => Ok(begun),
            None => {
                let path = path_bytes(&self.listed[at].input.path).to_owned();
                self.spool.push(&Record::Begin(path), None)?;
                Ok(Begun::default())
            }
        }
    }
}

impl Collect for Recorder<'_> {
    fn take(&mut self, input: usize, batch: Batch) -> Result<(), PrepareError> {
        let mut begun = self.begin(input)?;
        begun.empty += batch.empty;
        begun.nulls += batch.nulls;
        begun.broken += batch.broken;
        for document in batch.documents {
            begun.digest.update(document.place, document.source);
            let places = self.past.places.get_mut(&document.source);
            let origin = places.and_then(VecDeque::pop_front);
            self.counts.read += 1;
            if let Judged::Rejected(rule) = &document.judged
                && !self.past.known.contains_key(&document.source)
                && let Some(rule) = Rule::parse(rule)
            {
                *self.counts.rejected.entry(rule).or_default() += 1;
            }
            self.push(document, origin)?;
        }
        self.begun = Some(begun);
        Ok(())
    }

    fn end(&mut self, input: usize, ended: Ended) -> Result<(), PrepareError> {
        let begun = self.begin(input)?;
        let listed = &self.listed[self.read[input]];
        let end = InputEnd {
            bytes: listed.input.bytes,
            digest: begun.digest.value(),
            documents: begun.digest.documents(),
            empty: begun.empty,
            nulls: begun.nulls,
            broken: begun.broken,
            read: match ended {
                Ended::Whole => WasRead::Whole,
                Ended::Skipped => WasRead::InPart,
            },
        };
        if listed.told.is_some_and(|told| told != end.digest) {
            self.counts.unnoticed.push(listed.input.path.clone());
        }
        self.end_input(listed, end)?;
        self.at += 1;
        Ok(())
    }
}
