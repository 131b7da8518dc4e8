//! Device memory from the driver's stream-ordered pool.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::failure::{Failed, on};
use super::pool::{Dropped, Pool};
use super::queue::CudaQueue;
use crate::error::{KernelError, Result};
use crate::gpu::driver::Address;

/// Device memory.
pub struct CudaMemory {
    pool: Arc<Pool>,
    pointer: sys::CUdeviceptr,
    bytes: usize,
}

impl CudaMemory {
    pub(super) fn zeroed(
        pool: &Arc<Pool>,
        device: &str,
        queue: &CudaQueue,
        bytes: usize,
    ) -> Result<Self> {
        // SAFETY: the stream is alive.
        let pointer = unsafe { result::malloc_async(queue.stream(), bytes) };
        let pointer = pointer.map_err(|error| {
            let Failed { answer, out_of_memory, .. } = Failed::of(error);
            let device = device.to_owned();
            match out_of_memory {
                true => KernelError::OutOfMemory { bytes, device },
                false => KernelError::Device { attempted: "allocating", device, answer },
            }
        })?;
        let memory = Self { pool: Arc::clone(pool), pointer, bytes };
        // SAFETY: the memory is as large; the stream is waited for so that any queue may use it from now on.
        let cleared = unsafe {
            result::memset_d8_async(pointer, 0, bytes, queue.stream())
                .and_then(|()| result::stream::synchronize(queue.stream()))
        };
        on(device, "clearing memory", cleared)?;
        Ok(memory)
    }

    pub(super) fn address(&self) -> Address {
        Address(self.pointer)
    }

    /// Where `bytes` bytes from `offset` begin.
    pub(super) fn range(&self, offset: usize, bytes: usize) -> Result<sys::CUdeviceptr> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(self.pointer + offset as u64),
            _ => {
                let found = format!("{bytes} bytes from byte {offset}");
                Err(KernelError::shape("copy", "range", format!("within {}", self.bytes), found))
            }
        }
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        self.pool.give_back(Dropped::Memory(self.pointer));
    }
}
