//! What lives on a device: memory and modules, which graphs may still name when nobody else does.
//!
//! A graph holds addresses, not owners. So while a graph is there, what is dropped is set aside instead of given back, and given
//! back with the last graph: replaying one never touches memory that has become somebody else's.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUmemPool_attribute;
use cudarc::driver::{CudaContext, result, sys};

use super::failure::on;
use crate::error::Result;

/// The owner of a device's memory and modules.
pub(super) struct Pool {
    context: Arc<CudaContext>,
    aside: Mutex<Aside>,
}

/// What was dropped while graphs are there.
#[derive(Default)]
struct Aside {
    graphs: usize,
    dropped: Vec<Dropped>,
}

/// Something that its owner has dropped.
pub(super) enum Dropped {
    /// Device memory.
    Memory(sys::CUdeviceptr),
    /// A module.
    Module(ModuleHandle),
}

/// A loaded module.
#[derive(Clone, Copy)]
pub(super) struct ModuleHandle(pub(super) sys::CUmodule);

// SAFETY: a module handle is valid in every thread of its context.
unsafe impl Send for ModuleHandle {}
// SAFETY: as above; nothing changes it.
unsafe impl Sync for ModuleHandle {}

impl Pool {
    /// The pool lets the driver keep what is freed: buffers are planned once, so what was needed will be again. What
    /// an owner before this one has left there is given back.
    pub(super) fn new(context: Arc<CudaContext>, device: &str) -> Result<Arc<Self>> {
        let mut threshold = u64::MAX;
        let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: the device is open, its context is current, and the attribute is a 64-bit number.
        let set = unsafe {
            result::device::get_default_mem_pool(context.cu_device()).and_then(|pool| {
                result::ctx::synchronize()?;
                result::mem_pool::trim_to(pool, 0)?;
                let threshold = std::ptr::from_mut(&mut threshold).cast();
                result::mem_pool::set_attribute(pool, attribute, threshold)
            })
        };
        on(device, "setting up the memory pool", set)?;
        Ok(Arc::new(Self { context, aside: Mutex::default() }))
    }

    pub(super) fn context(&self) -> &CudaContext {
        &self.context
    }

    /// A graph is about to begin: from here until [`let_go`](Self::let_go) nothing is given back. Whatever another thread is giving
    /// back has been when this returns. It goes through the legacy stream, which waits for all queues, and one that waits for
    /// a queue that is being recorded spoils the recording.
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
        if self.context.bind_to_thread().is_err() {
            return;
        }
        // SAFETY: nothing refers to it any more. Memory is freed on the legacy stream, which waits for all queues, so that
        // what was enqueued before still finds it. A failure leaves nothing to do.
        let _ = unsafe {
            match dropped {
                Dropped::Memory(pointer) => result::free_async(pointer, result::stream::null()),
                Dropped::Module(module) => result::module::unload(module.0),
            }
        };
    }

    fn aside(&self) -> std::sync::MutexGuard<'_, Aside> {
        self.aside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
