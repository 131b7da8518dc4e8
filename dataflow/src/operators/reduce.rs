//! Gradients of all workers become sums, each at the worker that owns it.

use timely::dataflow::StreamVec;

use super::owned::{OptimizerThread, StateJob};
use super::ticket::{Ready, Ticket};

/// Sums gradients over all lanes.
pub trait Reduce<'scope> {
    /// The sums of this worker's part.
    ///
    /// # Contract
    /// - Input: the buckets whose gradients this worker has summed over its own lanes of a round, in the order in which every worker
    ///   has them.
    /// - Output: a ticket for each bucket at the same times. This worker's part of it is then summed over all lanes, in tree
    ///   order, or enqueued on its device to be.
    /// - Memory: on the optimizer thread, the sums of this worker's part; the buffers that the [`Communicator`] needs to move them.
    /// - Never blocks: the optimizer thread waits for other workers.
    /// - Failure: lanes that are missing or come twice, or a worker that is gone, abort the run.
    ///
    /// [`Communicator`]: tidemill_collective::communicator::Communicator
    ///
    /// # Example
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/chain.rs"));
    /// # fn main() -> Result<(), Failure> {
    /// # static SUMMED: AtomicU64 = AtomicU64::new(0);
    /// # run(|scope, parts| {
    /// # let (computed, mut rest) = computed(scope, parts);
    /// # let ForwardBackwardStreams { ready, counted, losses, evaluation_losses } = computed;
    /// # let inputs = rest.optimize_inputs(counted, losses);
    /// # let thread = &rest.thread;
    /// let summed = ready.reduce(thread).inspect(|ticket| {
    ///     println!("step {}: bucket {} is summed", ticket.step, ticket.bucket);
    ///     SUMMED.fetch_add(1, Ordering::Relaxed);
    /// });
    /// # let updates = summed.optimize(inputs, &rest.pace, &rest.thread, &rest.plan);
    /// # rest.close(updates, evaluation_losses);
    /// # })?;
    /// // One bucket in each of four steps, on both workers.
    /// assert_eq!(SUMMED.load(Ordering::Relaxed), 4 * 2);
    /// # Ok(())
    /// # }
    /// ```
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
