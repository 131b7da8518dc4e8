//! Buffers that others read while their owner keeps them.
//!
//! The memory of a device has no borrowers: what runs on a device stream is ordered by events alone, whoever holds which
//! reference on the host. So it can be read by the kernels of another thread's device, in whose hands it is a [`Shared`]: a
//! view to read, which keeps the memory. What lies in the host's memory is copied, as there Rust keeps readers apart from who
//! writes.

use std::sync::Arc;

use crate::backend::{Element, Runtime};
use crate::error::Result;
use crate::view::Slice;

/// A range of a buffer, to be read. Its memory stays as long as any of its names.
pub struct Shared<B: Runtime, T: Element> {
    buffer: Arc<B::Buffer<T>>,
    start: usize,
    elements: usize,
}

impl<B: Runtime, T: Element> Clone for Shared<B, T> {
    fn clone(&self) -> Self {
        Self { buffer: Arc::clone(&self.buffer), ..*self }
    }
}

impl<B: Runtime, T: Element> Shared<B, T> {
    /// `elements` elements from `start`; `buffer` has as many, and they do not change while Rust's references reach them.
    pub(crate) fn new(buffer: Arc<B::Buffer<T>>, start: usize, elements: usize) -> Self {
        Self { buffer, start, elements }
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// All of it.
    ///
    /// # Errors
    /// None, as the range was checked when it was shared.
    pub fn all(&self) -> Result<Slice<'_, B, T>> {
        Slice::new(&*self.buffer, self.start, self.elements)
    }

    /// `elements` elements from `start`, counted inside the range.
    ///
    /// # Errors
    /// A range that leaves it.
    pub fn slice(&self, start: usize, elements: usize) -> Result<Slice<'_, B, T>> {
        self.all()?.sub(start, elements)
    }
}
