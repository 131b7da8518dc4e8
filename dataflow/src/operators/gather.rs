//! Parameters that their owners have updated come to every worker.

use timely::dataflow::StreamVec;

use super::owned::{OptimizerThread, StateJob};
use super::ticket::Ticket;

/// Gathers parameters.
pub trait Gather<'scope> {
    /// Brings the updates of all owners to this worker.
    ///
    /// # Contract
    /// - Input: the buckets whose part this worker has updated, in the order in which every worker has them.
    /// - Output: the same tickets at the same times. All of the bucket's parameters are then where the device thread reads them, or
    ///   enqueued to be; after a step's last bucket they are lent to it.
    /// - Memory: the buffers of the [`Communicator`] alone.
    /// - Never blocks: the optimizer thread waits for other workers.
    /// - Failure: a worker that is gone aborts the run.
    ///
    /// [`Communicator`]: tidemill_collective::communicator::Communicator
    ///
    /// # Example
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/chain.rs"));
    /// # fn main() -> Result<(), Failure> {
    /// # static PRESENT: AtomicU64 = AtomicU64::new(0);
    /// # run(|scope, parts| {
    /// # let (updates, evaluation_losses, rest) = updated(scope, parts);
    /// # let (updated, thread) = (updates.updated.clone(), &rest.thread);
    /// let present = updated.gather(thread).inspect(|ticket| {
    ///     println!("bucket {} is there for step {}", ticket.bucket, ticket.step + 1);
    ///     PRESENT.fetch_add(1, Ordering::Relaxed);
    /// });
    /// # rest.close_with(present, updates, evaluation_losses);
    /// # })?;
    /// // One bucket in each of four steps, on both workers.
    /// assert_eq!(PRESENT.load(Ordering::Relaxed), 4 * 2);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    fn gather(self, thread: &OptimizerThread) -> Self;
}

impl<'scope> Gather<'scope> for StreamVec<'scope, u64, Ticket> {
    fn gather(self, thread: &OptimizerThread) -> Self {
        thread.for_each(
            "Gather",
            self,
            StateJob::AnswerGathers,
            (StateJob::Gather, |_: &Ticket| true),
        )
    }
}
