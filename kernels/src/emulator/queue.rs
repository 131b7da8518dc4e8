//! Queues and graphs: what is enqueued runs at once, unless it is recorded.

use std::sync::Arc;

use super::EmulatorKernel;
use super::memory::{Kept, Room};
use crate::error::{KernelError, Result};
use crate::gpu::driver::{Address, Launch, MatrixProduct};

/// A queue. Empty unless it is being recorded.
#[derive(Default)]
pub struct EmulatorQueue {
    recording: Option<EmulatorGraph>,
}

/// What was recorded, and the memory that it names.
pub struct EmulatorGraph {
    steps: Vec<Step>,
    _kept: Kept,
}

/// Something that can be enqueued.
pub(super) enum Step {
    Launch { kernel: EmulatorKernel, launch: Launch, arguments: Vec<u8> },
    Product(MatrixProduct),
    Copy { to: Address, from: Address, bytes: usize },
    Clear { at: Address, bytes: usize },
}

fn failure(attempted: &'static str, answer: &str) -> KernelError {
    let device = "the emulator".to_owned();
    KernelError::Device { attempted, device, answer: answer.to_owned() }
}

impl EmulatorQueue {
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

    pub(super) fn begin_recording(&mut self, room: &Arc<Room>) -> Result<()> {
        self.check_idle("beginning a graph")?;
        self.recording = Some(EmulatorGraph { steps: Vec::new(), _kept: room.keep() });
        Ok(())
    }

    pub(super) fn end_recording(&mut self) -> Result<EmulatorGraph> {
        let recorded = self.recording.take();
        recorded.ok_or_else(|| failure("recording a graph", "no recording was begun"))
    }
}

impl EmulatorGraph {
    pub(super) fn steps(&self) -> &[Step] {
        &self.steps
    }
}
