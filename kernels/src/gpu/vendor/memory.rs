//! Device memory from the stream-ordered pool.

use std::sync::Arc;

use super::pool::{Dropped, Pool};
use super::queue::Queue;
use super::table::DeviceAddress;
use crate::error::{KernelError, Result};
use crate::gpu::driver::Address;

/// Device memory.
pub struct Memory {
    pool: Arc<Pool>,
    first: DeviceAddress,
    bytes: usize,
}

impl Memory {
    pub(super) fn zeroed(
        pool: &Arc<Pool>,
        device: &str,
        queue: &Queue,
        bytes: usize,
    ) -> Result<Self> {
        let table = pool.table();
        let mut first = 0;
        // SAFETY: it writes one address; the stream is alive.
        let allocated = unsafe { (table.allocate)(&raw mut first, bytes, queue.stream()) };
        allocated.result().map_err(|code| table.not_allocated(device.to_owned(), bytes, code))?;
        let memory = Self { pool: Arc::clone(pool), first, bytes };
        // SAFETY: the memory is as large; the stream is waited for so that any queue may use it from now on.
        let cleared = unsafe {
            let filled = (table.fill_bytes)(first, 0, bytes, queue.stream()).result();
            filled.and_then(|()| (table.stream_synchronize)(queue.stream()).result())
        };
        table.on(device, "clearing memory", cleared)?;
        Ok(memory)
    }

    pub(super) fn address(&self) -> Address {
        Address(self.first)
    }

    /// The address of `bytes` bytes from `offset` on.
    pub(super) fn range(&self, offset: usize, bytes: usize) -> Result<DeviceAddress> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(self.first + offset as u64),
            _ => Err(outside(self.bytes, offset, bytes)),
        }
    }
}

/// A range that lies not inside `all` bytes.
pub(super) fn outside(all: usize, offset: usize, bytes: usize) -> KernelError {
    let found = format!("{bytes} bytes from byte {offset}");
    KernelError::shape("copy", "range", format!("within {all}"), found)
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.pool.give_back(Dropped::Memory(self.first));
    }
}
