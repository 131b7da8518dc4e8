//! Recorded launches.

use std::sync::Arc;

use super::pool::Pool;
use super::queue::Queue;
use super::table::{RawExecutable, RawGraph};
use crate::error::Result;

/// Recorded launches. What they name is kept by the pool, as long as this lives.
pub struct Graph {
    pool: Arc<Pool>,
    graph: RawGraph,
    executable: RawExecutable,
}

// SAFETY: a graph may be launched by any thread, one at a time.
unsafe impl Send for Graph {}

impl Graph {
    /// Takes the graph, also where it answers an error.
    pub(super) fn new(pool: &Arc<Pool>, device: &str, graph: RawGraph) -> Result<Self> {
        let table = pool.table();
        let mut executable = std::ptr::null_mut();
        // SAFETY: the graph was just recorded, and the call writes one handle.
        let made = unsafe { (table.graph_instantiate)(&raw mut executable, graph, 0) };
        table.on(device, "making a graph", made.result()).inspect_err(|_| {
            // SAFETY: the graph is alive and not used again.
            let _ = unsafe { (table.graph_destroy)(graph) };
        })?;
        Ok(Self { pool: Arc::clone(pool), graph, executable })
    }

    pub(super) fn launch(&self, device: &str, queue: &Queue) -> Result<()> {
        let table = self.pool.table();
        // SAFETY: graph and stream are alive.
        let launched = unsafe { (table.graph_launch)(self.executable, queue.stream()) };
        table.on(device, "launching a graph", launched.result())
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.pool.context().bind().is_ok() {
            let table = self.pool.table();
            // SAFETY: neither is used again; a launch in flight keeps what it needs.
            unsafe {
                let _ = (table.executable_destroy)(self.executable);
                let _ = (table.graph_destroy)(self.graph);
            }
        }
        self.pool.let_go();
    }
}
