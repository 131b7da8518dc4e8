//! Points in streams.

use std::sync::Arc;

use super::pool::Pool;
use super::queue::Queue;
use super::table::{Code, DEFAULT_FLAGS, RawEvent, Table};
use crate::error::Result;

/// A point in a stream.
#[derive(Clone)]
pub struct Event(Arc<Handle>);

struct Handle {
    pool: Arc<Pool>,
    event: RawEvent,
}

// SAFETY: an event may be asked by any thread.
unsafe impl Send for Handle {}
// SAFETY: as above; it is recorded once, before it is shared.
unsafe impl Sync for Handle {}

impl Event {
    pub(super) fn record(pool: &Arc<Pool>, device: &str, queue: &Queue) -> Result<Self> {
        let table = pool.table();
        let mut event = std::ptr::null_mut();
        // SAFETY: it writes one handle.
        let made = unsafe { (table.event_create)(&raw mut event, DEFAULT_FLAGS) };
        table.on(device, "making an event", made.result())?;
        let handle = Handle { pool: Arc::clone(pool), event };
        // SAFETY: event and stream are alive.
        let recorded = unsafe { (table.event_record)(event, queue.stream()) };
        table.on(device, "recording an event", recorded.result())?;
        Ok(Self(Arc::new(handle)))
    }

    pub(super) fn raw(&self) -> RawEvent {
        self.0.event
    }

    fn table(&self) -> &'static Table {
        self.0.pool.table()
    }

    pub(super) fn is_complete(&self, device: &str) -> Result<bool> {
        // SAFETY: the event is alive, here and below.
        match unsafe { (self.table().event_query)(self.raw()) } {
            Code::NOT_READY => Ok(false),
            answer => {
                self.table().on(device, "asking for an event", answer.result()).map(|()| true)
            }
        }
    }

    pub(super) fn wait(&self, device: &str) -> Result<()> {
        // SAFETY: as above.
        let waited = unsafe { (self.table().event_synchronize)(self.raw()) };
        self.table().on(device, "waiting for an event", waited.result())
    }

    /// Waits for it, whatever comes of that.
    pub(super) fn settle(&self) {
        if self.0.pool.context().bind().is_ok() {
            // SAFETY: as above.
            let _ = unsafe { (self.table().event_synchronize)(self.raw()) };
        }
    }

    pub(super) fn milliseconds_to(&self, to: &Self, device: &str) -> Result<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: as above; it writes one number.
        let asked =
            unsafe { (self.table().event_elapsed)(&raw mut milliseconds, self.raw(), to.raw()) };
        self.table().on(device, "timing", asked.result()).map(|()| milliseconds)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.pool.context().bind().is_ok() {
            // SAFETY: the event is not used again; what waits for it on a device still does.
            let _ = unsafe { (self.pool.table().event_destroy)(self.event) };
        }
    }
}
