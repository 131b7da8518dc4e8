//! What operators of one worker tell each other of state that stays on the device.

use tidemill_collective::communicator::Key;

/// What a worker has computed of a bucket in a round of its lanes is final, or enqueued to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// What it is of.
    pub ticket: Ticket,
    /// The round, as the run's [`LaneSchedule`](tidemill_collective::LaneSchedule) has them.
    pub round: u32,
}

impl Ready {
    /// What communicators call it.
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
