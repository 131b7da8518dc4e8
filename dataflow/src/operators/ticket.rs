//! What operators of one worker tell each other of state that stays on the device.

/// A bucket of a step has come as far as the stream says that carries this. The bytes are where they are, and events of the
/// device say when they may be touched: a ticket never leaves its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// The step, from 0.
    pub step: u64,
    /// The bucket, as an index of [`TrainingPlan::buckets`](super::plan::TrainingPlan::buckets).
    pub bucket: u32,
}
