//! Buffers that other threads read while their owner keeps them.
//!
//! Device memory is outside of Rust's borrows: only events order the work on device streams, regardless of which threads hold
//! references on the host. So kernels of another thread's device can read it through a [`Shared`]: a read-only view that keeps the
//! memory alive. Host memory is copied instead, as there Rust keeps readers and writers apart.

use std::ops::{Deref, Range};
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

    /// The buffer, and the range of it.
    pub(crate) fn place(&self) -> (&Arc<B::Buffer<T>>, Range<usize>) {
        (&self.buffer, self.start..self.start + self.elements)
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

/// Elements in the host's memory that several read. The memory stays as long as any of its names.
pub struct HostView<T> {
    values: Arc<dyn AsRef<[T]> + Send + Sync>,
    range: Range<usize>,
}

impl<T> Clone for HostView<T> {
    fn clone(&self) -> Self {
        Self { values: Arc::clone(&self.values), range: self.range.clone() }
    }
}

impl<T: Element> From<Vec<T>> for HostView<T> {
    fn from(values: Vec<T>) -> Self {
        Arc::new(values).into()
    }
}

impl<T: Element> From<Arc<Vec<T>>> for HostView<T> {
    fn from(values: Arc<Vec<T>>) -> Self {
        let range = 0..values.len();
        Self { values, range }
    }
}

impl<T: Element> HostView<T> {
    /// Elements `range` of `values`, which has as many.
    pub(crate) fn new(values: Arc<dyn AsRef<[T]> + Send + Sync>, range: Range<usize>) -> Self {
        Self { values, range }
    }

    /// Elements `range`, counted inside the view.
    ///
    /// # Panics
    /// A range that leaves the view.
    #[must_use]
    pub fn sub(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.range.len(), "{range:?}");
        let start = self.range.start;
        Self { values: Arc::clone(&self.values), range: start + range.start..start + range.end }
    }
}

impl<T> Deref for HostView<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &(*self.values).as_ref()[self.range.clone()]
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use crate::{Cpu, SliceMut};

    /// Memory of a copy is used again when it has no reader, and never before.
    #[test]
    fn what_the_host_shares_is_a_copy_whose_memory_is_used_again() {
        let cpu = Cpu::new(NonZeroUsize::MIN).unwrap();
        let mut stream = cpu.device_stream().unwrap();
        let mut buffer = cpu.allocate::<f32>(&mut stream, 8).unwrap();
        let mut shared = Vec::new();
        for value in [1.0, 2.0] {
            cpu.write(&mut stream, SliceMut::all(&mut buffer), &[value; 8]).unwrap();
            let from = Slice::new(&buffer, 2, 5).unwrap();
            shared.push(cpu.share(&mut stream, from).unwrap());
        }
        let views: Vec<_> = shared.iter().map(|shared| Cpu::host_view(shared).unwrap()).collect();
        assert_eq!((&*views[0], &*views[1]), (&[1.0; 5][..], &[2.0; 5][..]));
        assert_eq!(views[1].sub(1..4).sub(2..3).len(), 1);
        let place = views[0].as_ptr();
        drop(shared);
        let again = |stream: &mut _, elements| {
            cpu.share(stream, Slice::new(&buffer, 0, elements).unwrap()).unwrap()
        };
        let other = again(&mut stream, 5);
        assert!(Cpu::host_view(&other).unwrap().as_ptr() != place, "it is still read");
        drop(views);
        let small = Cpu::host_view(&again(&mut stream, 2)).unwrap().as_ptr();
        assert!(small != place, "not for what is much smaller");
        let again = again(&mut stream, 4);
        assert_eq!(Cpu::host_view(&again).unwrap().as_ptr(), place);
        assert_eq!(again.elements(), 4);
        assert!(again.slice(3, 2).is_err());
    }
}
