//! Host memory that every device of the process reaches by itself.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::failure::{Failed, on};
use super::pool::Pool;
use crate::error::{KernelError, Result};

/// Page-locked host memory.
pub struct CudaHostMemory {
    pool: Arc<Pool>,
    first: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns its bytes, which are reached through raw pointers alone.
unsafe impl Send for CudaHostMemory {}
// SAFETY: as above.
unsafe impl Sync for CudaHostMemory {}

impl CudaHostMemory {
    /// The context must be current.
    pub(super) fn zeroed(pool: &Arc<Pool>, device: &str, bytes: usize) -> Result<Self> {
        // SAFETY: the context is current.
        let first = unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE) };
        let first = first.map_err(|error| {
            let Failed { answer, out_of_memory, .. } = Failed::of(error);
            let device = format!("the host, locked for {device}");
            match out_of_memory {
                true => KernelError::OutOfMemory { bytes, device },
                false => KernelError::Device { attempted: "allocating", device, answer },
            }
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

    /// Where `bytes` bytes from `offset` begin.
    pub(super) fn range(&self, offset: usize, bytes: usize) -> Result<*mut u8> {
        match offset.checked_add(bytes) {
            // SAFETY: the offset lies inside the memory.
            Some(end) if end <= self.bytes => Ok(unsafe { self.first.as_ptr().add(offset) }),
            _ => {
                let found = format!("{bytes} bytes from byte {offset}");
                Err(KernelError::shape("copy", "range", format!("within {}", self.bytes), found))
            }
        }
    }
}

impl Drop for CudaHostMemory {
    fn drop(&mut self) {
        if self.pool.context().bind_to_thread().is_ok() {
            // SAFETY: nothing is on its way to it or from it: whoever copies waits before it goes. A failure leaves nothing to do.
            let _ = unsafe { result::free_host(self.first.as_ptr().cast()) };
        }
    }
}

/// Enqueues a copy from the host.
///
/// # Safety
/// The range at `to` is device memory, and nothing writes that at `from`, or takes it away, before it was copied.
pub(super) unsafe fn upload(
    device: &str,
    stream: sys::CUstream,
    to: sys::CUdeviceptr,
    from: *const u8,
    bytes: usize,
) -> Result<()> {
    // SAFETY: the caller vouches for both.
    let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, stream) }.result();
    on(device, "copying to the device", copied)
}

/// Enqueues a copy to the host.
///
/// # Safety
/// The range at `from` is device memory, and nothing reads or writes that at `to`, or takes it away, before it was copied.
pub(super) unsafe fn download(
    device: &str,
    stream: sys::CUstream,
    to: *mut u8,
    from: sys::CUdeviceptr,
    bytes: usize,
) -> Result<()> {
    // SAFETY: the caller vouches for both.
    let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, stream) }.result();
    on(device, "copying to the host", copied)
}
