//! The previous version's records of inputs and documents, which save reading them again.

use std::collections::{HashMap, VecDeque};

use super::{
    record::{Document, Fate, InputEnd, Judged, Record},
    spool::Origin,
    state::{Records, Version},
};
use crate::prepare::PrepareError;

/// Records that are read between two questions whether to go on.
const RECORDS_AT_ONCE: u64 = 1 << 12;

/// Verdicts of lists and filters on texts, by the hashes of the texts.
pub(crate) type Known = HashMap<u128, Judged>;

/// Where the tokens of texts are, by the hashes of the texts.
pub(crate) type Places = HashMap<u128, VecDeque<Origin>>;

/// The records of a version, with the places of tokens.
pub(crate) struct FormerRecords<'a> {
    records: Records<'a>,
    part: usize,
    offset: u64,
}

/// All inputs of a version.
#[derive(Debug, Default)]
pub(crate) struct FormerInputs {
    pub inputs: HashMap<Vec<u8>, FormerInput>,
    /// Tokens of each part.
    pub part_tokens: Vec<u64>,
}

/// An input of a version.
#[derive(Debug)]
pub(crate) struct FormerInput {
    pub end: InputEnd,
    /// Places and hashes of the documents that were on the list.
    pub excluded: Vec<(u64, u128)>,
}

impl<'a> FormerRecords<'a> {
    pub(crate) fn new(version: &'a Version) -> FormerRecords<'a> {
        FormerRecords { records: version.records(), part: 0, offset: 0 }
    }

    /// The next record; for a kept document, also where its tokens are.
    ///
    /// # Errors
    /// The errors of reading the state.
    pub(crate) fn next(&mut self) -> Result<Option<(Record, Option<Origin>)>, PrepareError> {
        let Some((part, record)) = self.records.next()? else { return Ok(None) };
        if part != self.part {
            (self.part, self.offset) = (part, 0);
        }
        let mut origin = None;
        if let Record::Document(Document { fate: Fate::Kept { tokens }, .. }) = record {
            origin = Some(Origin { part, offset: self.offset, tokens });
            self.offset += tokens;
        }
        Ok(Some((record, origin)))
    }
}

impl FormerInputs {
    /// The records of a version; `go_on` is asked now and then.
    ///
    /// # Errors
    /// The errors of reading the state, and of `go_on`.
    pub(crate) fn of(
        version: &Version,
        go_on: &mut dyn FnMut() -> Result<(), PrepareError>,
    ) -> Result<FormerInputs, PrepareError> {
        let mut records = FormerRecords::new(version);
        let mut former = FormerInputs::default();
        former.part_tokens.resize(version.state.parts.len(), 0);
        let (mut path, mut excluded, mut read) = (Vec::new(), Vec::new(), 0_u64);
        while let Some((record, origin)) = records.next()? {
            read += 1;
            if read.is_multiple_of(RECORDS_AT_ONCE) {
                go_on()?;
            }
            if let Some(Origin { part, tokens, .. }) = origin {
                former.part_tokens[part] += tokens;
            }
            match record {
                Record::Begin(begun) => path = begun,
                Record::Document(Document { judged: Judged::Excluded, place, source, .. }) => {
                    excluded.push((place, source));
                }
                Record::Document(_) => {}
                Record::End(end) => {
                    let input = FormerInput { end, excluded: std::mem::take(&mut excluded) };
                    former.inputs.insert(std::mem::take(&mut path), input);
                }
            }
        }
        Ok(former)
    }
}

/// The known facts on texts of the inputs for which `is_read` holds: inputs that are read again, and inputs that
/// are gone, whose documents may be elsewhere now. `go_on` is asked now and then.
///
/// # Errors
/// The errors of reading the state, and of `go_on`.
pub(crate) fn known_texts(
    version: &Version,
    is_read: impl Fn(&[u8]) -> bool,
    go_on: &mut dyn FnMut() -> Result<(), PrepareError>,
) -> Result<(Known, Places), PrepareError> {
    let (mut known, mut places) = (Known::new(), Places::new());
    let mut records = FormerRecords::new(version);
    let (mut is_wanted, mut read) = (false, 0_u64);
    while let Some((record, origin)) = records.next()? {
        read += 1;
        if read.is_multiple_of(RECORDS_AT_ONCE) {
            go_on()?;
        }
        match record {
            Record::Begin(path) => is_wanted = is_read(&path),
            Record::Document(Document { source, judged, .. }) if is_wanted => {
                if judged != Judged::Excluded {
                    known.insert(source, judged);
                }
                if let Some(origin) = origin {
                    places.entry(source).or_default().push_back(origin);
                }
            }
            Record::Document(_) | Record::End(_) => {}
        }
    }
    Ok((known, places))
}
