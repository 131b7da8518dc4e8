//! Which documents are read for their tokens.

use std::{path::PathBuf, sync::mpsc::SyncSender};

use crate::prepare::{
    PrepareError,
    batch::{Batch, Collect, Ended},
    find::Input,
};

/// Documents of inputs, by their places, and the hashes that their texts must have.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    by_input: Vec<Vec<(u64, u128)>>,
}

impl Wanted {
    /// Those of one more input, in order of their places.
    pub(crate) fn push(&mut self, documents: Vec<(u64, u128)>) {
        self.by_input.push(documents);
    }

    /// The hash of a document that is wanted.
    pub(crate) fn of(&self, input: usize, place: u64) -> Option<u128> {
        let documents = self.by_input.get(input)?;
        let at = documents.binary_search_by_key(&place, |(place, _)| *place).ok()?;
        Some(documents[at].1)
    }

    /// Places and hashes of all that are wanted of an input.
    pub(crate) fn all_of(&self, input: usize) -> &[(u64, u128)] {
        self.by_input.get(input).map_or(&[], Vec::as_slice)
    }

    /// How many documents of an input are wanted.
    pub(crate) fn count(&self, input: usize) -> usize {
        self.all_of(input).len()
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
        // What waits for them ended, and knows why.
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
