//! Streams, and recordings on them.

use std::ffi::c_void;
use std::sync::Arc;

use super::event::Event;
use super::graph::Graph;
use super::memory::Memory;
use super::pool::Pool;
use super::table::{CAPTURE_OF_THREAD, DEFAULT_FLAGS, RawStream};
use crate::error::{KernelError, Result};
use crate::gpu::driver::Address;

/// An in-order stream, and the workspace of its matrix products.
pub struct Queue {
    pool: Arc<Pool>,
    stream: RawStream,
    /// None before the first product.
    workspace: Option<Memory>,
    /// Whether the stream is being recorded; the pool then keeps dropped memory.
    recording: bool,
}

// SAFETY: a stream may be used by any thread, one at a time.
unsafe impl Send for Queue {}

impl Queue {
    pub(super) fn new(pool: &Arc<Pool>, device: &str) -> Result<Self> {
        let table = pool.table();
        let mut stream = std::ptr::null_mut();
        // SAFETY: it writes one handle.
        let made = unsafe { (table.stream_create)(&raw mut stream, DEFAULT_FLAGS) };
        table.on(device, "making a stream", made.result())?;
        Ok(Self { pool: Arc::clone(pool), stream, workspace: None, recording: false })
    }

    /// Sees to it that there is a [`workspace`](Self::workspace), of `bytes` bytes: before a product.
    ///
    /// # Errors
    /// A device without room, or the first product of the queue in a recording.
    pub(super) fn make_workspace(&mut self, device: &str, bytes: usize) -> Result<()> {
        if self.workspace.is_none() {
            if self.recording {
                return Err(KernelError::NotRecordable { attempted: "a first matrix product" });
            }
            self.workspace = Some(Memory::zeroed(&self.pool, device, self, bytes)?);
        }
        Ok(())
    }

    pub(super) fn begin_recording(&mut self, device: &str) -> Result<()> {
        let table = self.pool.table();
        // First, so that memory that another thread drops during the recording is set aside.
        self.pool.keep();
        // SAFETY: the stream is alive.
        let begun = unsafe { (table.begin_capture)(self.stream, CAPTURE_OF_THREAD) };
        table
            .on(device, "beginning a graph", begun.result())
            .inspect_err(|_| self.pool.let_go())?;
        self.recording = true;
        Ok(())
    }

    pub(super) fn end_recording(&mut self, device: &str) -> Result<Graph> {
        const ATTEMPTED: &str = "recording a graph";
        if !std::mem::take(&mut self.recording) {
            let answer = "no recording was begun".to_owned();
            let device = device.to_owned();
            return Err(KernelError::Device { attempted: ATTEMPTED, device, answer });
        }
        let table = self.pool.table();
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is alive, and the call writes one handle.
        let ended = unsafe { (table.end_capture)(self.stream, &raw mut graph) };
        let graph = table
            .on(device, ATTEMPTED, ended.result())
            .and_then(|()| Graph::new(&self.pool, device, graph));
        if graph.is_err() {
            self.pool.let_go();
        }
        graph
    }

    /// The stream, as the vendor's libraries take it.
    pub(super) fn raw(&self) -> *mut c_void {
        self.stream
    }

    /// Makes all work that is enqueued from now on wait for `event`.
    pub(super) fn wait_for(&mut self, event: &Event, device: &str) -> Result<()> {
        let table = self.pool.table();
        // SAFETY: both are alive.
        let waited = unsafe { (table.stream_wait)(self.stream, event.raw(), DEFAULT_FLAGS) };
        table.on(device, "waiting for another queue", waited.result())
    }

    pub(crate) fn is_recording(&self) -> bool {
        self.recording
    }

    pub(crate) fn stream(&self) -> RawStream {
        self.stream
    }

    /// Memory for a matrix product besides its operands.
    pub(crate) fn workspace(&self) -> Address {
        self.workspace.as_ref().map_or(Address::NULL, Memory::address)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.pool.context().bind().is_err() {
            return;
        }
        if self.recording {
            drop(self.end_recording("a device"));
        }
        let table = self.pool.table();
        // SAFETY: the stream is alive. What was enqueued runs to its end first: it may use memory that is about to go. A failure
        // leaves nothing to do.
        let _ = unsafe { (table.stream_synchronize)(self.stream) };
        self.workspace = None;
        // SAFETY: nothing is enqueued any more, nor will be.
        let _ = unsafe { (table.stream_destroy)(self.stream) };
    }
}
