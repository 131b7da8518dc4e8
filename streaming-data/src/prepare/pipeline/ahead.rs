//! Row groups that threads encode ahead, returned in the order of the data set, together with the items between them
//! that need no thread.

use std::sync::mpsc::Receiver;

use super::{
    in_order::InOrder,
    job::{Done, Job, Numbered},
    job_queue::JobQueue,
};
use crate::prepare::{PrepareError, output::shard::EncodedRowGroup, tokens::pack::RowGroup};

/// The next item of the data set.
pub(crate) enum Next<K> {
    Rows(EncodedRowGroup),
    /// An item that was put between them.
    Kept(K),
}

/// See the [module](self).
pub(crate) struct Ahead<'a, K> {
    jobs: &'a JobQueue,
    encoded: Receiver<Numbered<Done>>,
    items: InOrder<Result<Next<K>, PrepareError>>,
}

impl<'a, K> Ahead<'a, K> {
    /// For threads that do these jobs, which are the only ones in the queue, and send the results.
    pub(crate) fn new(jobs: &'a JobQueue, encoded: Receiver<Numbered<Done>>) -> Ahead<'a, K> {
        Ahead { jobs, encoded, items: InOrder::new() }
    }

    /// Hands out the row group that comes next.
    pub(crate) fn encode(&mut self, row_group: RowGroup) {
        let number = self.items.number();
        self.jobs.push(Numbered { number, item: Job::Encode(row_group) });
    }

    /// Appends an item.
    pub(crate) fn keep(&mut self, kept: K) {
        let number = self.items.number();
        self.items.arrived(number, Ok(Next::Kept(kept)));
    }

    /// The next item; none if it has not arrived and at most `most` row groups are outstanding.
    ///
    /// # Errors
    /// The error of a row group that cannot be encoded.
    pub(crate) fn next(&mut self, most: u64) -> Result<Option<Next<K>>, PrepareError> {
        loop {
            if let Some(next) = self.items.next() {
                return next.map(Some);
            }
            if self.items.outstanding() <= most {
                return Ok(None);
            }
            let Numbered { number, item } =
                self.encoded.recv().expect("threads answer every job, also by a caught panic");
            let Done::RowGroup(rows) = item else { unreachable!("rows alone are handed out") };
            self.items.arrived(number, rows.map(Next::Rows));
        }
    }
}
