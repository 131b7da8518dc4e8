//! Device memory from the driver's stream-ordered pool.

use std::sync::Arc;

use cudarc::driver::sys::CUmemPool_attribute;
use cudarc::driver::{CudaContext, result, sys};

use super::failure::{Failed, on};
use super::queue::CudaQueue;
use crate::error::{KernelError, Result};
use crate::gpu::driver::Address;

/// Device memory.
pub struct CudaMemory {
    context: Arc<CudaContext>,
    pointer: sys::CUdeviceptr,
    bytes: usize,
}

/// Lets the pool keep what is freed: buffers are planned once, so what was needed will be again.
pub(super) fn keep_freed_memory(context: &CudaContext, device: &str) -> Result<()> {
    let mut threshold = u64::MAX;
    let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the device is open, and the attribute is a 64-bit number.
    let set = unsafe {
        result::device::get_default_mem_pool(context.cu_device()).and_then(|pool| {
            let threshold = std::ptr::from_mut(&mut threshold).cast();
            result::mem_pool::set_attribute(pool, attribute, threshold)
        })
    };
    on(device, "setting up the memory pool", set)
}

impl CudaMemory {
    pub(super) fn zeroed(
        context: &Arc<CudaContext>,
        device: &str,
        queue: &CudaQueue,
        bytes: usize,
    ) -> Result<Self> {
        // SAFETY: the stream is alive.
        let pointer = unsafe { result::malloc_async(queue.stream(), bytes) };
        let pointer = pointer.map_err(|error| {
            let Failed { answer, out_of_memory } = Failed::of(error);
            let device = device.to_owned();
            match out_of_memory {
                true => KernelError::OutOfMemory { bytes, device },
                false => KernelError::Device { attempted: "allocating", device, answer },
            }
        })?;
        let memory = Self { context: Arc::clone(context), pointer, bytes };
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
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: nothing refers to the memory any more. The legacy stream waits for all queues, so what was
            // enqueued before still finds it. A failure leaves nothing to do.
            let _ = unsafe { result::free_async(self.pointer, result::stream::null()) };
        }
    }
}
