//! Which documents are read for their tokens.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, mpsc::SyncSender},
};

use super::{
    assembler::fate,
    record::{Fate, Judged, Record},
    recorder::Listed,
    spool::Spool,
};
use crate::prepare::{
    PrepareError,
    choose::duplicates::Verdicts,
    input::find::Input,
    pipeline::batch::{Batch, Collect, Ended},
};

/// Documents that are planned between two questions whether to go on.
const PLANNED_AT_ONCE: u64 = 1 << 12;

/// The documents that are read again for their tokens.
pub(super) struct Plan {
    pub inputs: Vec<Input>,
    pub wanted: Wanted,
    /// Documents that filters rejected, by rule.
    pub rejected: BTreeMap<String, u64>,
}

impl Plan {
    /// The kept documents whose tokens are not in the previous version; `go_on` is asked now and then.
    ///
    /// # Errors
    /// Errors of a temporary file, or of `go_on`.
    pub(super) fn new(
        spool: &mut Spool,
        verdicts: Option<&Verdicts>,
        listed: &[Listed<'_>],
        go_on: &mut dyn FnMut() -> Result<(), PrepareError>,
    ) -> Result<Plan, PrepareError> {
        let mut plan =
            Plan { inputs: Vec::new(), wanted: Wanted::default(), rejected: BTreeMap::new() };
        let (mut records, mut documents, mut inputs) = (spool.read()?, 0_u64, listed.iter());
        let mut wanted = Vec::new();
        while let Some((record, origin)) = records.next()? {
            match record {
                Record::Begin(_) => {}
                Record::Document(document) => {
                    if let Judged::Rejected(rule) = &document.judged {
                        *plan.rejected.entry(rule.to_string()).or_default() += 1;
                    }
                    let fate = fate(verdicts, documents, &document);
                    documents += 1;
                    if documents.is_multiple_of(PLANNED_AT_ONCE) {
                        go_on()?;
                    }
                    if matches!(fate, Fate::Kept { .. }) && origin.is_none() {
                        wanted.push((document.place, document.source));
                    }
                }
                Record::End(_) => {
                    let input = inputs.next().expect("each input was recorded").input;
                    if !wanted.is_empty() {
                        plan.inputs.push(input.clone());
                        plan.wanted.push(std::mem::take(&mut wanted));
                    }
                }
            }
        }
        Ok(plan)
    }
}

/// Documents of inputs, by their places, and the hashes that their texts must have.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    by_input: Vec<Arc<Vec<(u64, u128)>>>,
}

impl Wanted {
    /// Appends the wanted documents of one more input, ordered by place.
    pub(crate) fn push(&mut self, documents: Vec<(u64, u128)>) {
        self.by_input.push(Arc::new(documents));
    }

    /// The hash of a document that is wanted.
    pub(crate) fn of(&self, input: usize, place: u64) -> Option<u128> {
        let documents = self.by_input.get(input)?;
        let at = documents.binary_search_by_key(&place, |(place, _)| *place).ok()?;
        Some(documents[at].1)
    }

    /// Places and hashes of all that are wanted of an input.
    pub(crate) fn all_of(&self, input: usize) -> &[(u64, u128)] {
        self.by_input.get(input).map_or(&[], |documents| documents.as_slice())
    }

    /// The wanted documents of some inputs, renumbered in this order; they share the memory of `self`.
    pub(crate) fn of_inputs(&self, inputs: &[usize]) -> Wanted {
        let of_input = |&input: &usize| self.by_input.get(input).cloned().unwrap_or_default();
        Wanted { by_input: inputs.iter().map(of_input).collect() }
    }

    /// How many documents of an input are wanted.
    pub(crate) fn count(&self, input: usize) -> usize {
        self.all_of(input).len()
    }

    /// The number of inputs whose documents may be wanted.
    pub(crate) fn inputs(&self) -> usize {
        self.by_input.len()
    }

    /// How many documents are wanted.
    pub(crate) fn documents(&self) -> u64 {
        self.by_input.iter().map(|documents| documents.len() as u64).sum()
    }
}

/// Hands the tokens of documents that were wanted to another thread, in order.
pub(crate) struct Fetching<'a> {
    wanted: &'a Wanted,
    paths: Vec<PathBuf>,
    fetched: Vec<usize>,
    sender: SyncSender<Batch>,
}

impl<'a> Fetching<'a> {
    pub(crate) fn new(
        wanted: &'a Wanted,
        inputs: &[Input],
        sender: SyncSender<Batch>,
    ) -> Fetching<'a> {
        let paths: Vec<_> = inputs.iter().map(|input| input.path.clone()).collect();
        Fetching { wanted, fetched: vec![0; paths.len()], paths, sender }
    }
}

impl Collect for Fetching<'_> {
    fn take(&mut self, input: usize, batch: Batch) -> Result<(), PrepareError> {
        if batch.lengths.is_empty() {
            return Ok(());
        }
        self.fetched[input] += batch.lengths.len();
        // The receiver has ended, and reports why.
        self.sender.send(batch).map_err(|_| PrepareError::Interrupted)
    }

    fn end(&mut self, input: usize, _: Ended) -> Result<(), PrepareError> {
        match self.may_skip(input) {
            true => Ok(()),
            false => Err(PrepareError::InputChanged { path: self.paths[input].clone() }),
        }
    }

    fn may_skip(&self, input: usize) -> bool {
        self.fetched[input] == self.wanted.count(input)
    }
}
