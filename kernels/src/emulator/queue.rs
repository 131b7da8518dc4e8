//! Queues and graphs: a step runs at once, or when a [`Schedule`](super::Schedule) reaches it, or
//! it is recorded.

use std::sync::Arc;

use super::EmulatorKernel;
use super::memory::{Kept, Room};
use super::schedule::ScheduledQueue;
use crate::error::{KernelError, Result};
use crate::gpu::driver::{Address, Launch, MatrixProduct};

/// A queue.
pub struct EmulatorQueue {
    recording: Option<Recorded>,
    /// `None` where steps run at once.
    pub(super) scheduled: Option<ScheduledQueue>,
}

/// The recorded steps of a queue. The memory that they name is kept for as long as the graph
/// exists.
pub struct EmulatorGraph(pub(super) Arc<Recorded>);

pub(super) struct Recorded {
    pub(super) steps: Vec<Step>,
    _kept: Kept,
}

/// Something that can be enqueued.
pub(super) enum Step {
    Launch { kernel: EmulatorKernel, launch: Launch, arguments: Vec<u8> },
    Product(MatrixProduct),
    Copy { to: Address, from: Address, bytes: usize },
    Upload { to: Address, from: Vec<u8> },
    Clear { at: Address, bytes: usize },
    Graph(Arc<Recorded>),
}

fn failure(attempted: &'static str, answer: &str) -> KernelError {
    let device = "the emulator".to_owned();
    KernelError::Device { attempted, device, answer: answer.to_owned() }
}

impl EmulatorQueue {
    pub(super) fn new(scheduled: Option<ScheduledQueue>) -> Self {
        Self { recording: None, scheduled }
    }

    /// Keeps a step if it is to be recorded, else answers it.
    pub(super) fn record(&mut self, step: Step) -> Option<Step> {
        match &mut self.recording {
            None => Some(step),
            Some(graph) => {
                graph.steps.push(step);
                None
            }
        }
    }

    /// Asks that nothing be recorded, as drivers do.
    pub(super) fn check_idle(&self, attempted: &'static str) -> Result<()> {
        match self.recording {
            None => Ok(()),
            Some(_) => Err(failure(attempted, "the queue is being recorded")),
        }
    }

    /// Waits until everything is done; answers what failed.
    pub(super) fn finish(&self) -> Result<()> {
        self.scheduled.as_ref().map_or(Ok(()), ScheduledQueue::finish)
    }

    pub(super) fn begin_recording(&mut self, room: &Arc<Room>) -> Result<()> {
        self.check_idle("beginning a graph")?;
        self.recording = Some(Recorded { steps: Vec::new(), _kept: room.keep() });
        Ok(())
    }

    pub(super) fn end_recording(&mut self) -> Result<EmulatorGraph> {
        let recorded = self.recording.take();
        let recorded = recorded.ok_or_else(|| failure("recording a graph", "none was begun"))?;
        Ok(EmulatorGraph(Arc::new(recorded)))
    }
}
