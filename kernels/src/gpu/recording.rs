//! Graphs: launches of a stream that are recorded once and enqueued together.

use crate::error::{KernelError, Result};
use crate::gpu::GpuStream;
use crate::gpu::driver::{Address, Driver};

/// Recorded launches. They name scratch memory and faults of the stream that they were recorded on, so they run on no other.
pub struct GpuGraph<D: Driver> {
    graph: D::Graph,
    stream: Address,
}

impl<D: Driver> GpuGraph<D> {
    /// Enqueues the launches.
    pub(super) fn replay(&self, driver: &D, stream: &mut GpuStream<D>) -> Result<()> {
        let (own, given) = (self.stream, stream.identity());
        if given != own {
            let expected = "the device stream that the graph was recorded on";
            return Err(KernelError::shape("replay", "device stream", expected, "another"));
        }
        let queue = stream.queue_outside_recordings("replaying a graph")?;
        driver.replay(queue, &self.graph)?;
        stream.note_replay();
        Ok(())
    }
}

/// A stream that is being recorded. The recording ends when this value is dropped, also after an error or a panic.
pub(super) struct Recording<'a, D: Driver> {
    driver: &'a D,
    stream: &'a mut GpuStream<D>,
}

impl<'a, D: Driver> Recording<'a, D> {
    pub(super) fn begin(driver: &'a D, stream: &'a mut GpuStream<D>) -> Result<Self> {
        driver.begin_graph(stream.queue_outside_recordings("recording a graph")?)?;
        stream.set_recording(true);
        Ok(Self { driver, stream })
    }

    pub(super) fn stream(&mut self) -> &mut GpuStream<D> {
        self.stream
    }

    pub(super) fn end(mut self) -> Result<GpuGraph<D>> {
        let graph = self.stop()?;
        Ok(GpuGraph { graph, stream: self.stream.identity() })
    }

    fn stop(&mut self) -> Result<D::Graph> {
        self.stream.set_recording(false);
        self.driver.end_graph(self.stream.queue_mut())
    }
}

impl<D: Driver> Drop for Recording<'_, D> {
    fn drop(&mut self) {
        if self.stream.is_recording() {
            // The partial recording, or its error, is dropped.
            drop(self.stop());
        }
    }
}
