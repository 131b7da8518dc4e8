//! Buffers that others read while their owner keeps them.
//!
//! The memory of a device has no borrowers: what runs on a device stream is ordered by events alone, whoever holds which
//! reference on the host. So a buffer can be read by the kernels of another thread's device, in whose hands it is a
//! [`Shared`]: a view to read, which keeps the memory.

use std::sync::Arc;

use crate::backend::{Element, Runtime};
use crate::error::Result;
use crate::view::Slice;

/// A buffer of another, to be read. Its memory stays as long as any of its names.
pub struct Shared<B: Runtime, T: Element> {
    buffer: Arc<B::Buffer<T>>,
}

impl<B: Runtime, T: Element> Clone for Shared<B, T> {
    fn clone(&self) -> Self {
        Self { buffer: Arc::clone(&self.buffer) }
    }
}

impl<B: Runtime, T: Element> Shared<B, T> {
    /// `buffer` must name memory that Rust's references do not reach.
    pub(crate) fn new(buffer: B::Buffer<T>) -> Self {
        Self { buffer: Arc::new(buffer) }
    }

    /// `elements` elements from `start`.
    ///
    /// # Errors
    /// A range that leaves the buffer.
    pub fn slice(&self, start: usize, elements: usize) -> Result<Slice<'_, B, T>> {
        Slice::new(&*self.buffer, start, elements)
    }
}
