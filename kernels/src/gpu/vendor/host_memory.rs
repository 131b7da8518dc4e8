//! Host memory that every device of the process can access.

use std::ptr::NonNull;
use std::sync::Arc;

use super::memory::outside;
use super::pool::Pool;
use super::table::HOST_MEMORY_PORTABLE;
use crate::error::{KernelError, Result};

/// Page-locked host memory.
pub struct HostMemory {
    pool: Arc<Pool>,
    first: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns its bytes, which are reached through raw pointers alone.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// The context must be current.
    pub(super) fn zeroed(pool: &Arc<Pool>, device: &str, bytes: usize) -> Result<Self> {
        let table = pool.table();
        let mut first = std::ptr::null_mut();
        // SAFETY: it writes one address.
        let locked = unsafe { (table.allocate_host)(&raw mut first, bytes, HOST_MEMORY_PORTABLE) };
        locked.result().map_err(|code| {
            table.not_allocated(format!("the host, locked for {device}"), bytes, code)
        })?;
        let Some(first) = NonNull::new(first.cast::<u8>()) else {
            return Err(KernelError::OutOfMemory { bytes, device: device.to_owned() });
        };
        // SAFETY: there are as many bytes.
        unsafe { first.write_bytes(0, bytes) };
        Ok(Self { pool: Arc::clone(pool), first, bytes })
    }

    pub(super) fn first(&self) -> NonNull<u8> {
        self.first
    }

    /// The address of `bytes` bytes from `offset` on.
    pub(super) fn range(&self, offset: usize, bytes: usize) -> Result<*mut u8> {
        match offset.checked_add(bytes) {
            // SAFETY: the offset lies inside the memory.
            Some(end) if end <= self.bytes => Ok(unsafe { self.first.as_ptr().add(offset) }),
            _ => Err(outside(self.bytes, offset, bytes)),
        }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if self.pool.context().bind().is_ok() {
            let free = self.pool.table().free_host;
            // SAFETY: nothing is on its way to it or from it: what copies is waited for before it goes. A failure leaves nothing to do.
            let _ = unsafe { free(self.first.as_ptr().cast()) };
        }
    }
}
