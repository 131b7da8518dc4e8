//! Messages between operators of one worker about state that stays on the device.

use tidemill_collective::communicator::Key;

/// A worker's sums of a bucket in a round of its lanes are final, or enqueued to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The step and bucket.
    pub ticket: Ticket,
    /// The round, as the run's [`LaneSchedule`](tidemill_collective::LaneSchedule) has them.
    pub round: u32,
}

impl Ready {
    /// The key by which communicators know the sums.
    pub(super) fn key(self) -> Key {
        Key { round: self.round, ..Key::new(self.ticket.step, self.ticket.bucket) }
    }
}

/// A bucket of a step has come as far as the stream says that carries this. The bytes are where they are, and events of the
/// device say when they may be touched: a ticket never leaves its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// The step, from 0.
    pub step: u64,
    /// The bucket, as an index of [`TrainingPlan::buckets`](super::plan::TrainingPlan::buckets).
    pub bucket: u32,
}
