//! Resources of a device: memory and modules, to which graphs may still refer after their owners
//! are dropped; and events, which are reused.
//!
//! A graph holds addresses without owning the memory. So while a graph exists, dropped memory is
//! set aside, and returned with the last graph: the replay of a graph never touches memory that has
//! another owner by then.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::context::Context;
use super::event::SpareEvents;
use super::table::{Device, DeviceAddress, POOL_RELEASE_THRESHOLD, RawModule, Table};
use crate::error::Result;

/// An owner of a device's memory, modules and events.
pub(super) struct Pool {
    context: Arc<Context>,
    /// Shared by all owners of the device in this process: they have one legacy stream.
    aside: Arc<Mutex<Aside>>,
    spare_events: SpareEvents,
}

/// Resources that were dropped while graphs exist.
#[derive(Default)]
struct Aside {
    graphs: usize,
    dropped: Vec<Dropped>,
}

/// Something that its owner has dropped.
pub(super) enum Dropped {
    /// Device memory.
    Memory(DeviceAddress),
    /// A module.
    Module(ModuleHandle),
}

/// A loaded module.
#[derive(Clone, Copy)]
pub(super) struct ModuleHandle(pub(super) RawModule);

// SAFETY: a module handle is valid in every thread of its context.
unsafe impl Send for ModuleHandle {}
// SAFETY: as above; nothing changes it.
unsafe impl Sync for ModuleHandle {}

/// The resources set aside on a device, shared by all its owners in this process. Where no other owner is alive, `first` runs
/// before they are made.
fn aside_of(context: &Context, first: impl FnOnce() -> Result<()>) -> Result<Arc<Mutex<Aside>>> {
    type OfDevices = BTreeMap<(usize, Device), Weak<Mutex<Aside>>>;
    static OF_DEVICES: Mutex<OfDevices> = Mutex::new(BTreeMap::new());
    // A vendor has one table.
    let vendor = std::ptr::from_ref(context.table()).addr();
    let mut devices = OF_DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let known = devices.entry((vendor, context.device())).or_default();
    if let Some(aside) = known.upgrade() {
        return Ok(aside);
    }
    first()?;
    let aside = Arc::default();
    *known = Arc::downgrade(&aside);
    Ok(aside)
}

impl Pool {
    /// The pool lets the driver keep memory that is freed: buffers are planned once, so the same sizes will be needed again. Memory
    /// that an earlier owner has left there is released, unless another owner is alive: releasing takes a wait for all work of the
    /// device, which spoils the recordings of other threads.
    pub(super) fn new(context: Arc<Context>, device: &str) -> Result<Arc<Self>> {
        let table = context.table();
        let aside = aside_of(&context, || {
            let mut threshold = u64::MAX;
            let mut pool = std::ptr::null_mut();
            // SAFETY: the device is open, it is this thread's own, the first call writes one handle, and the attribute is a 64-bit number.
            let set = unsafe {
                let found = (table.default_pool)(&raw mut pool, context.device()).result();
                found
                    .and_then(|()| (table.synchronize)().result())
                    .and_then(|()| (table.pool_trim)(pool, 0).result())
                    .and_then(|()| {
                        let threshold = (&raw mut threshold).cast();
                        (table.pool_set_attribute)(pool, POOL_RELEASE_THRESHOLD, threshold).result()
                    })
            };
            table.on(device, "setting up the memory pool", set)
        })?;
        Ok(Arc::new(Self { context, aside, spare_events: SpareEvents::default() }))
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    pub(super) fn table(&self) -> &'static Table {
        self.context.table()
    }

    pub(super) fn spare_events(&self) -> &SpareEvents {
        &self.spare_events
    }

    /// A graph is about to begin: from here until [`let_go`](Self::let_go) no memory is freed, and when this returns other threads
    /// have finished freeing theirs. Memory is freed on the legacy stream, which waits for all queues, and waiting for a queue that
    /// is being recorded spoils the recording.
    pub(super) fn keep(&self) {
        self.aside().graphs += 1;
    }

    /// A graph is gone.
    pub(super) fn let_go(&self) {
        let mut aside = self.aside();
        aside.graphs -= 1;
        if aside.graphs == 0 {
            std::mem::take(&mut aside.dropped)
                .into_iter()
                .for_each(|dropped| self.release(dropped));
        }
    }

    /// Gives something back, now or with the last graph.
    pub(super) fn give_back(&self, dropped: Dropped) {
        let mut aside = self.aside();
        match aside.graphs {
            0 => self.release(dropped),
            _ => aside.dropped.push(dropped),
        }
    }

    /// The caller holds the lock, so that no graph begins meanwhile.
    fn release(&self, dropped: Dropped) {
        if self.context.bind().is_err() {
            return;
        }
        let table = self.table();
        // SAFETY: nothing refers to it any more. Memory is freed on the legacy stream, which waits for all queues, so that work
        // enqueued before can still use it. A failure leaves nothing to do.
        let _ = unsafe {
            match dropped {
                Dropped::Memory(first) => (table.free)(first, std::ptr::null_mut()),
                Dropped::Module(module) => (table.module_unload)(module.0),
            }
        };
    }

    fn aside(&self) -> std::sync::MutexGuard<'_, Aside> {
        self.aside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            self.spare_events.destroy(self.table());
        }
    }
}
