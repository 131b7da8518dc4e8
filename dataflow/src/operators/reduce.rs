//! Gradients of all workers become sums, each at the worker that owns it.

use timely::dataflow::StreamVec;

use super::owned::{OptimizerThread, StateJob};
use super::ticket::{Ready, Ticket};

/// Sums gradients over all lanes.
pub trait Reduce<'scope> {
    /// The sums of what this worker owns.
    ///
    /// # Contract
    /// - Input: the buckets whose gradients this worker has summed over its own lanes of a round, in the order in which every worker
    ///   has them.
    /// - Output: a ticket for each bucket at the same times. What this worker owns of it is then summed over all lanes, in tree
    ///   order, or enqueued on its device to be.
    /// - Memory: on the optimizer thread, the sums of what is owned; what the [`Communicator`] needs to move them.
    /// - Never blocks: the optimizer thread waits for other workers.
    /// - Failure: lanes that are missing or come twice, or a worker that is gone, abort the run.
    ///
    /// [`Communicator`]: tidemill_collective::communicator::Communicator
    #[must_use]
    fn reduce(self, thread: &OptimizerThread) -> StreamVec<'scope, u64, Ticket>;
}

impl<'scope> Reduce<'scope> for StreamVec<'scope, u64, Ready> {
    fn reduce(self, thread: &OptimizerThread) -> StreamVec<'scope, u64, Ticket> {
        let rounds = thread.rounds();
        let is_last = move |ready: &Ready| ready.round + 1 == rounds;
        thread.for_each("Reduce", self, StateJob::AnswerSums, (StateJob::Sum, is_last))
    }
}
