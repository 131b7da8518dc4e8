//! Records for one worker each: what a dataflow's workers tell each other, beside the chunks of the collective. A destination is a
//! worker's index in the dataflow, not its rank among those that train, which [`Place::worker`](super::Place::worker) turns into one.

use serde::{Deserialize, Serialize};
use timely::dataflow::channels::pact::Exchange;

/// A record on its way to one worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Addressed<D> {
    destination: u32,
    record: D,
}

impl<D: 'static> Addressed<D> {
    /// For the worker of index `destination` in the dataflow.
    pub(crate) fn new(destination: usize, record: D) -> Self {
        Self { destination: destination as u32, record }
    }

    /// Takes each record to its worker.
    pub(crate) fn by_destination() -> Exchange<Self, impl FnMut(&Self) -> u64> {
        Exchange::new(|addressed: &Self| u64::from(addressed.destination))
    }

    /// The record, which has arrived.
    pub(crate) fn into_record(self) -> D {
        self.record
    }
}
