//! Writers of checkpoints, and the thread on which they are called.

use std::collections::BTreeMap;

use tidemill_collective::{Chunk, Credit, CreditLedger, StatePart};

use super::writers::StateWriters;
use crate::cluster::Failure;
use crate::operators::error::GraphError;
use crate::operators::job_thread::{Jobs, OperatorGone, Replies};
use crate::operators::optimize::StepReport;

/// The files of a checkpoint that a worker has written: the checksum of each by its name.
pub type WrittenFiles = BTreeMap<String, String>;

const NO_SHARE: GraphError =
    GraphError::Order { what: "a part of a checkpoint", missing: "a sink that writes parts" };

/// Where checkpoints go. It is called on a thread of its own, one checkpoint after the other.
///
/// Worker 0 has one. Where others write too, every worker has one, which says so: on each writer it is given its part.
pub trait StateSink: Send + 'static {
    /// The worker that writes each file.
    fn writers(&self) -> StateWriters {
        StateWriters::default()
    }

    /// Begins the checkpoint after `report.step` updates: on worker 0 first, on other writers when that is done.
    ///
    /// # Errors
    /// Whatever keeps it from being written; the run ends.
    fn begin(&mut self, report: &StepReport) -> Result<(), Failure>;

    /// Takes elements of the arena from `arena_start`. Every element of every part comes exactly
    /// once, to its writer, in no particular order.
    ///
    /// # Errors
    /// Whatever keeps it from being written; the run ends.
    fn write(&mut self, part: StatePart, arena_start: usize, values: &[f32])
    -> Result<(), Failure>;

    /// On other writers than worker 0: all of their part was written. Answers the message about it for worker 0, once it is
    /// sure to stay.
    ///
    /// # Errors
    /// Whatever keeps it from being kept; the run ends.
    fn finish(&mut self) -> Result<WrittenFiles, Failure> {
        Err(NO_SHARE.into())
    }

    /// On worker 0: another writer has finished.
    ///
    /// # Errors
    /// Files that it has not to write; the run ends.
    fn take(&mut self, _written: WrittenFiles) -> Result<(), Failure> {
        Err(NO_SHARE.into())
    }

    /// On worker 0: everything was written, and all have finished. Makes the checkpoint complete.
    ///
    /// # Errors
    /// Whatever keeps it from being complete; the run ends.
    fn commit(&mut self) -> Result<(), Failure>;
}

/// A job of the writer thread.
pub(super) enum WriterJob {
    Begin(StepReport),
    Write { part: StatePart, arena_start: usize, chunk: Chunk },
    Finish,
    Take(WrittenFiles),
    Commit,
}

/// An answer of the writer thread.
pub(super) enum WriterReply {
    Begun,
    Written(Vec<Credit>),
    Finished(WrittenFiles),
    Committed,
}

/// The writer thread.
pub(super) fn run(
    mut sink: Box<dyn StateSink>,
    jobs: &Jobs<WriterJob>,
    replies: &Replies<WriterReply>,
) -> Result<(), Failure> {
    while let Some(job) = jobs.next() {
        let reply = match job {
            WriterJob::Begin(report) => {
                sink.begin(&report)?;
                WriterReply::Begun
            }
            WriterJob::Write { part, arena_start, chunk } => {
                sink.write(part, arena_start, &chunk.values()?)?;
                let mut ledger = CreditLedger::default();
                ledger.consumed(chunk.header()?.source, chunk.payload_bytes());
                WriterReply::Written(ledger.settle().collect())
            }
            WriterJob::Finish => WriterReply::Finished(sink.finish()?),
            WriterJob::Take(written) => {
                sink.take(written)?;
                continue;
            }
            WriterJob::Commit => {
                sink.commit()?;
                WriterReply::Committed
            }
        };
        if let Err(OperatorGone) = replies.send(reply) {
            break;
        }
    }
    Ok(())
}
