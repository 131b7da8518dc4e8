//! Streams, events and graphs of the driver.

use std::sync::Arc;

use cudarc::driver::result::stream::StreamKind;
use cudarc::driver::sys::{
    CUevent_flags, CUevent_wait_flags, CUgraphInstantiate_flags, CUresult, CUstreamCaptureMode,
};
use cudarc::driver::{result, sys};

use super::failure::on;
use super::matmul::WORKSPACE_BYTES;
use super::memory::CudaMemory;
use super::pool::Pool;
use crate::error::{KernelError, Result};
use crate::gpu::driver::Address;

/// An in-order stream, and the workspace of its matrix products.
pub struct CudaQueue {
    pool: Arc<Pool>,
    stream: sys::CUstream,
    workspace: Option<CudaMemory>,
    /// Whether the stream is being recorded, for which the pool keeps what is dropped.
    recording: bool,
}

// SAFETY: a stream may be used by any thread, one at a time.
unsafe impl Send for CudaQueue {}

impl CudaQueue {
    pub(super) fn new(pool: &Arc<Pool>, device: &str) -> Result<Self> {
        let stream = on(device, "making a stream", result::stream::create(StreamKind::Default))?;
        let mut queue = Self { pool: Arc::clone(pool), stream, workspace: None, recording: false };
        queue.workspace = Some(CudaMemory::zeroed(pool, device, &queue, WORKSPACE_BYTES)?);
        Ok(queue)
    }

    pub(super) fn begin_recording(&mut self, device: &str) -> Result<()> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // First, so that what another thread drops once the recording has begun is set aside already.
        self.pool.keep();
        // SAFETY: the stream is alive.
        let begun = unsafe { result::stream::begin_capture(self.stream, mode) };
        on(device, "beginning a graph", begun).inspect_err(|_| self.pool.let_go())?;
        self.recording = true;
        Ok(())
    }

    pub(super) fn end_recording(&mut self, device: &str) -> Result<CudaGraph> {
        const ATTEMPTED: &str = "recording a graph";
        if !std::mem::take(&mut self.recording) {
            let answer = "no recording was begun".to_owned();
            let device = device.to_owned();
            return Err(KernelError::Device { attempted: ATTEMPTED, device, answer });
        }
        // SAFETY: the stream is alive.
        let graph = on(device, ATTEMPTED, unsafe { result::stream::end_capture(self.stream) });
        let graph = graph.and_then(|graph| CudaGraph::new(&self.pool, device, graph));
        if graph.is_err() {
            self.pool.let_go();
        }
        graph
    }

    /// As the driver names it.
    pub(super) fn raw(&self) -> *mut std::ffi::c_void {
        self.stream.cast()
    }

    /// What is enqueued from now on waits for `event`.
    pub(super) fn wait_for(&mut self, event: &CudaEvent, device: &str) -> Result<()> {
        let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are alive.
        let waited = unsafe { result::stream::wait_event(self.stream, event.0.event, flags) };
        on(device, "waiting for another queue", waited)
    }

    pub(super) fn is_recording(&self) -> bool {
        self.recording
    }

    pub(super) fn stream(&self) -> sys::CUstream {
        self.stream
    }

    pub(super) fn workspace(&self) -> Address {
        self.workspace.as_ref().map_or(Address::NULL, CudaMemory::address)
    }
}

impl Drop for CudaQueue {
    fn drop(&mut self) {
        if self.pool.context().bind_to_thread().is_err() {
            return;
        }
        if self.recording {
            drop(self.end_recording("a device"));
        }
        // SAFETY: the stream is alive. What was enqueued runs to its end first: it may use memory that is about to go. A failure
        // leaves nothing to do.
        let _ = unsafe { result::stream::synchronize(self.stream) };
        self.workspace = None;
        // SAFETY: nothing is enqueued any more, nor will be.
        let _ = unsafe { result::stream::destroy(self.stream) };
    }
}

/// A point in a stream.
#[derive(Clone)]
pub struct CudaEvent(Arc<EventHandle>);

struct EventHandle {
    pool: Arc<Pool>,
    event: sys::CUevent,
}

// SAFETY: an event may be asked by any thread.
unsafe impl Send for EventHandle {}
// SAFETY: as above; it is recorded once, before anybody shares it.
unsafe impl Sync for EventHandle {}

impl CudaEvent {
    pub(super) fn record(pool: &Arc<Pool>, device: &str, queue: &CudaQueue) -> Result<Self> {
        let event = result::event::create(CUevent_flags::CU_EVENT_DEFAULT);
        let event = on(device, "making an event", event)?;
        let handle = EventHandle { pool: Arc::clone(pool), event };
        // SAFETY: event and stream are alive.
        on(device, "recording an event", unsafe { result::event::record(event, queue.stream) })?;
        Ok(Self(Arc::new(handle)))
    }

    pub(super) fn is_complete(&self, device: &str) -> Result<bool> {
        // SAFETY: the event is alive, here and below.
        match unsafe { result::event::query(self.0.event) } {
            Ok(()) => Ok(true),
            Err(error) if error.0 == CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(error) => on(device, "asking for an event", Err(error)),
        }
    }

    pub(super) fn wait(&self, device: &str) -> Result<()> {
        // SAFETY: as above.
        on(device, "waiting for an event", unsafe { result::event::synchronize(self.0.event) })
    }

    /// Waits for it, whatever comes of that.
    pub(super) fn settle(&self) {
        if self.0.pool.context().bind_to_thread().is_ok() {
            // SAFETY: as above.
            let _ = unsafe { result::event::synchronize(self.0.event) };
        }
    }

    pub(super) fn milliseconds_to(&self, to: &Self, device: &str) -> Result<f32> {
        // SAFETY: as above.
        on(device, "timing", unsafe { result::event::elapsed(self.0.event, to.0.event) })
    }
}

impl Drop for EventHandle {
    fn drop(&mut self) {
        if self.pool.context().bind_to_thread().is_ok() {
            // SAFETY: the event is not used again; what waits for it on a device still does.
            let _ = unsafe { result::event::destroy(self.event) };
        }
    }
}

/// Recorded launches. What they name is kept by the pool, as long as this lives.
pub struct CudaGraph {
    pool: Arc<Pool>,
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
}

// SAFETY: a graph may be launched by any thread, one at a time.
unsafe impl Send for CudaGraph {}

impl CudaGraph {
    /// Takes the graph, also where it answers an error.
    fn new(pool: &Arc<Pool>, device: &str, graph: sys::CUgraph) -> Result<Self> {
        // SAFETY: the graph was just recorded.
        let executable = unsafe { result::graph::instantiate(graph, CUgraphInstantiate_flags(0)) };
        let executable = on(device, "making a graph", executable).inspect_err(|_| {
            // SAFETY: the graph is alive and not used again.
            let _ = unsafe { result::graph::destroy(graph) };
        })?;
        Ok(Self { pool: Arc::clone(pool), graph, executable })
    }

    pub(super) fn launch(&self, device: &str, queue: &CudaQueue) -> Result<()> {
        // SAFETY: graph and stream are alive.
        let launched = unsafe { result::graph::launch(self.executable, queue.stream) };
        on(device, "launching a graph", launched)
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        if self.pool.context().bind_to_thread().is_ok() {
            // SAFETY: neither is used again; a launch in flight keeps what it needs.
            unsafe {
                let _ = result::graph::exec_destroy(self.executable);
                let _ = result::graph::destroy(self.graph);
            }
        }
        self.pool.let_go();
    }
}
