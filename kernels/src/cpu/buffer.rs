//! Host memory as device memory.

use std::alloc::{Layout, alloc, dealloc};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use super::Cpu;
use crate::backend::Element;
use crate::error::{KernelError, Result};
use crate::view::{Slice, SliceMut};

/// A cache line, and the widest vector: aligned loads never straddle two lines.
const ALIGNMENT: usize = 64;

/// A large page of x86-64 and of most arm64 systems.
const LARGE_PAGE: usize = 2 << 20;
/// Buffers of at least as many bytes lie in large pages. Rows of a matrix are often a page apart, and a processor that looks
/// up every row's page trains a tenth slower.
const LARGE_BUFFER: usize = LARGE_PAGE / 2;

/// Elements in host memory, aligned to 64 bytes; it derefs to a slice.
#[derive(Debug)]
pub struct Buffer<T: Element> {
    start: NonNull<T>,
    elements: usize,
    owned: PhantomData<T>,
}

// SAFETY: the buffer owns its elements alone, and an `Element` is `Send` and `Sync`.
unsafe impl<T: Element> Send for Buffer<T> {}
// SAFETY: the same; a shared buffer is only read.
unsafe impl<T: Element> Sync for Buffer<T> {}

impl<T: Element> Buffer<T> {
    /// `elements` zeros.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`] where the host has no room; a size that overflows counts as that.
    pub fn zeroed(elements: usize) -> Result<Self> {
        let out_of_memory = || KernelError::OutOfMemory {
            bytes: elements.saturating_mul(size_of::<T>()),
            device: "the CPU".to_owned(),
        };
        let layout = Self::layout(elements).ok_or_else(out_of_memory)?;
        if layout.size() == 0 {
            return Ok(Self { start: NonNull::dangling(), elements, owned: PhantomData });
        }
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc(layout) }).ok_or_else(out_of_memory)?;
        if layout.align() == LARGE_PAGE {
            prefer_large_pages(start, layout.size());
        }
        // SAFETY: the allocation has as many bytes.
        unsafe { start.write_bytes(0, layout.size()) };
        Ok(Self { start: start.cast(), elements, owned: PhantomData })
    }

    /// A copy of `elements`.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`] where the host has no room.
    pub fn copy_of(elements: &[T]) -> Result<Self> {
        let mut buffer = Self::zeroed(elements.len())?;
        buffer.copy_from_slice(elements);
        Ok(buffer)
    }

    /// The elements.
    pub fn as_slice(&self) -> &[T] {
        self
    }

    /// The elements.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        self
    }

    fn layout(elements: usize) -> Option<Layout> {
        let layout = Layout::array::<T>(elements).ok()?;
        if layout.size() < LARGE_BUFFER {
            return layout.align_to(ALIGNMENT).ok();
        }
        Some(layout.align_to(LARGE_PAGE).ok()?.pad_to_align())
    }
}

impl<'a, T: Element> Slice<'a, Cpu, T> {
    /// The elements.
    pub fn values(self) -> &'a [T] {
        let (buffer, range) = self.place();
        &buffer.as_slice()[range]
    }
}

impl<'a, T: Element> SliceMut<'a, Cpu, T> {
    /// The elements.
    pub fn values(self) -> &'a mut [T] {
        let (buffer, range) = self.place();
        &mut buffer.as_mut_slice()[range]
    }
}

/// Returns to the system the memory of freed buffers, which the allocator may keep for later ones; with the GNU C library alone.
pub fn return_freed_memory() {
    // SAFETY: it takes and gives back no memory that is in use, by any thread.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    let _ = unsafe { libc::malloc_trim(0) };
}

/// Asks for large pages before the memory is touched. Where there are none, nothing changes but time.
#[cfg(target_os = "linux")]
fn prefer_large_pages(start: NonNull<u8>, bytes: usize) {
    // SAFETY: the range is one allocation, aligned to pages, and this advice changes no contents.
    let _ = unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn prefer_large_pages(_: NonNull<u8>, _: usize) {}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `zeroed` allocated `elements` elements at `start` (or none: dangling and aligned),
        // and zeros are valid, as an `Element` is `Pod`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.elements) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and the buffer is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.elements) }
    }
}

impl<T: Element> AsRef<[T]> for Buffer<T> {
    fn as_ref(&self) -> &[T] {
        self
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        match Self::layout(self.elements) {
            // SAFETY: `zeroed` allocated `start` with this very layout.
            Some(layout) if layout.size() > 0 => unsafe {
                dealloc(self.start.as_ptr().cast(), layout);
            },
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_zeroed() -> Result<()> {
        for (elements, alignment) in [
            (1, ALIGNMENT),
            (3, ALIGNMENT),
            (LARGE_BUFFER / 4 - 1, ALIGNMENT),
            (LARGE_BUFFER / 4, LARGE_PAGE),
            (1_000_003, LARGE_PAGE),
        ] {
            let buffer = Buffer::<f32>::zeroed(elements)?;
            assert_eq!(buffer.as_slice().as_ptr().addr() % alignment, 0);
            assert_eq!(buffer.len(), elements);
            assert!(buffer.iter().all(|x| x.to_bits() == 0));
        }
        assert!(Buffer::<f64>::zeroed(0)?.is_empty());
        assert_eq!(Buffer::<u32>::copy_of(&[7, 8, 9])?.as_slice(), [7, 8, 9]);
        Ok(())
    }

    #[test]
    fn a_size_that_cannot_be_is_out_of_memory() {
        for elements in [usize::MAX, usize::MAX / 4, usize::MAX / 16] {
            let answer = Buffer::<f32>::zeroed(elements);
            assert!(matches!(answer, Err(KernelError::OutOfMemory { .. })), "{answer:?}");
        }
    }
}
