//! The cost of communication in a step, told beside the step's report.

use serde::{Deserialize, Serialize};
use timely::dataflow::StreamVec;
use timely::dataflow::operators::vec::{Filter, ToStream};

use super::owned::{OptimizerThread, StateJob};
use super::ticket::Ticket;

/// The cost of communication for one worker: for one update, the sums of its gradients, and the parameters that came before them.
/// The messages by which workers agree on their next work are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Communication {
    /// Bytes that the worker read from the memory of workers of its process.
    pub bytes_from_memory: u64,
    /// Bytes that came to it from other processes.
    pub bytes_from_processes: u64,
    /// The part of these bytes that came through host memory from processes of other hosts; left out of lines of metrics.
    #[serde(skip)]
    pub bytes_from_hosts: u64,
    /// Time that it took, by the device's clock. For each sum: from the moment when the sums of the workers that it reads were ready
    /// until the result, including waits for other processes. For parameters: from the moment when the worker came to them until they
    /// were all there, including waits for workers that had not updated them yet.
    pub milliseconds: f64,
    /// The part of this time that was not hidden behind computing. For sums: the time after the end of the worker's own backward pass.
    /// For parameters that are gathered before a step: all of it; for parameters gathered block by block: the time that computing waited
    /// for them.
    pub exposed_milliseconds: f64,
}

/// The cost of communication for an update. Each worker has its own.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CommunicationReport {
    /// Updates done, from 1.
    pub step: u64,
    /// The cost of its communication.
    pub communication: Communication,
}

/// Measures communication.
pub trait Measure<'scope> {
    /// Reports the cost of communication, step by step.
    ///
    /// # Contract
    /// - Input: the output of `gather`.
    /// - Output: at the timestamp of the step, one [`CommunicationReport`] on every worker that trains; none where it trains alone.
    /// - Memory: on the optimizer thread, two events for each sum and each gather of a step. Without this operator they are let go.
    /// - Never blocks, and no device waits: times are read when the step's parameters are on their way. Only a worker that owns
    ///   nothing may wait for its device then, on the optimizer thread, which has nothing else to do.
    /// - Failure: a device that fails aborts the run.
    ///
    /// # Example
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/chain.rs"));
    /// # fn main() -> Result<(), Failure> {
    /// # static BYTES: AtomicU64 = AtomicU64::new(0);
    /// # run(|scope, parts| {
    /// # let (updates, evaluation_losses, rest) = updated(scope, parts);
    /// # let (updated, thread) = (updates.updated.clone(), &rest.thread);
    /// let present = updated.gather(thread);
    /// present.clone().measure(thread).inspect(|report| {
    ///     BYTES.fetch_add(report.communication.bytes_from_memory, Ordering::Relaxed);
    /// });
    /// # rest.close_with(present, updates, evaluation_losses);
    /// # })?;
    /// // The workers have read each other's gradients.
    /// assert!(BYTES.load(Ordering::Relaxed) > 0);
    /// # Ok(())
    /// # }
    /// ```
    fn measure(self, thread: &OptimizerThread) -> StreamVec<'scope, u64, CommunicationReport>;
}

impl<'scope> Measure<'scope> for StreamVec<'scope, u64, Ticket> {
    fn measure(self, thread: &OptimizerThread) -> StreamVec<'scope, u64, CommunicationReport> {
        let scope = self.scope();
        if thread.place().ranks() == 1 {
            return Vec::new().to_stream(scope);
        }
        // The last bucket that is gathered: all measured work is behind it, and nothing of the step waits for it.
        let last = self.filter(|ticket| ticket.bucket == 0);
        thread.for_each(
            "Measure",
            last,
            StateJob::AnswerMeasures,
            (StateJob::Measure, |_: &Ticket| true),
        )
    }
}
