//! Points in streams.

use std::sync::{Arc, Mutex, PoisonError};

use super::pool::Pool;
use super::queue::Queue;
use super::table::{Code, DEFAULT_FLAGS, EVENT_WITHOUT_TIME, RawEvent, Table};
use crate::error::{KernelError, Result};
use crate::gpu::driver::Timing;

/// A point in a stream.
#[derive(Clone)]
pub struct Event(Arc<Handle>);

struct Handle {
    pool: Arc<Pool>,
    event: Spare,
    timing: Timing,
}

// SAFETY: it is recorded once, before it is shared, and only asked and waited for by then.
unsafe impl Sync for Handle {}

/// An event of the driver that marks no point now.
struct Spare(RawEvent);

// SAFETY: any thread may use an event.
unsafe impl Send for Spare {}

/// Events whose points are not asked for any more. A stream that was told to wait for such a point still does: it is told of the
/// point, not of the event.
#[derive(Default)]
pub(super) struct SpareEvents {
    noted: Mutex<Vec<Spare>>,
    unknown: Mutex<Vec<Spare>>,
}

impl SpareEvents {
    fn of(&self, timing: Timing) -> std::sync::MutexGuard<'_, Vec<Spare>> {
        let events = match timing {
            Timing::Noted => &self.noted,
            Timing::Unknown => &self.unknown,
        };
        events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, table: &Table, device: &str, timing: Timing) -> Result<Spare> {
        if let Some(spare) = self.of(timing).pop() {
            return Ok(spare);
        }
        let flags = match timing {
            Timing::Noted => DEFAULT_FLAGS,
            Timing::Unknown => EVENT_WITHOUT_TIME,
        };
        let mut event = std::ptr::null_mut();
        // SAFETY: it writes one handle.
        let made = unsafe { (table.event_create)(&raw mut event, flags) };
        table.on(device, "making an event", made.result())?;
        Ok(Spare(event))
    }

    /// Gives all of them up; the thread is bound to their device.
    pub(super) fn destroy(&self, table: &Table) {
        for timing in [Timing::Noted, Timing::Unknown] {
            for Spare(event) in self.of(timing).drain(..) {
                // SAFETY: nothing else has the event. A failure leaves nothing to do.
                let _ = unsafe { (table.event_destroy)(event) };
            }
        }
    }
}

impl Event {
    pub(super) fn record(
        pool: &Arc<Pool>,
        device: &str,
        queue: &Queue,
        timing: Timing,
    ) -> Result<Self> {
        let table = pool.table();
        let event = pool.spare_events().take(table, device, timing)?;
        let handle = Handle { pool: Arc::clone(pool), event, timing };
        // SAFETY: event and stream are alive.
        let recorded = unsafe { (table.event_record)(handle.event.0, queue.stream()) };
        table.on(device, "recording an event", recorded.result())?;
        Ok(Self(Arc::new(handle)))
    }

    pub(super) fn raw(&self) -> RawEvent {
        self.0.event.0
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

    /// Waits for the event, and ignores errors.
    pub(super) fn settle(&self) {
        if self.0.pool.context().bind().is_ok() {
            // SAFETY: as above.
            let _ = unsafe { (self.table().event_synchronize)(self.raw()) };
        }
    }

    pub(super) fn milliseconds_to(&self, to: &Self, device: &str) -> Result<f32> {
        if [self, to].iter().any(|event| event.0.timing == Timing::Unknown) {
            return Err(KernelError::untimed(device));
        }
        let mut milliseconds = 0.0;
        // SAFETY: as above; it writes one number.
        let asked =
            unsafe { (self.table().event_elapsed)(&raw mut milliseconds, self.raw(), to.raw()) };
        self.table().on(device, "timing", asked.result()).map(|()| milliseconds)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let spare = Spare(self.event.0);
        self.pool.spare_events().of(self.timing).push(spare);
    }
}
