//! Results of many threads, back in the order in which the work was handed out.

use std::collections::BTreeMap;

/// Numbers items as they are handed out, and gives back the arriving results in the order of these numbers.
pub(crate) struct InOrder<T> {
    handed_out: u64,
    given_back: u64,
    arrived: BTreeMap<u64, T>,
}

impl<T> InOrder<T> {
    pub(crate) fn new() -> InOrder<T> {
        InOrder { handed_out: 0, given_back: 0, arrived: BTreeMap::new() }
    }

    /// The number of the next piece of work.
    pub(crate) fn number(&mut self) -> u64 {
        self.handed_out += 1;
        self.handed_out - 1
    }

    /// Takes a result that may be early.
    pub(crate) fn arrived(&mut self, number: u64, item: T) {
        self.arrived.insert(number, item);
    }

    /// The next result in order, once it arrived.
    pub(crate) fn next(&mut self) -> Option<T> {
        let item = self.arrived.remove(&self.given_back)?;
        self.given_back += 1;
        Some(item)
    }

    /// How many results were not given back yet.
    pub(crate) fn outstanding(&self) -> u64 {
        self.handed_out - self.given_back
    }
}
