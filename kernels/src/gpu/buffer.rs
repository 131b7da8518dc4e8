//! Typed device memory, and the addresses of views of it.

use std::marker::PhantomData;
use std::sync::Arc;

use crate::backend::Element;
use crate::error::Result;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::stream::GpuStream;
use crate::gpu::{Gpu, driver};
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

/// Device memory that holds elements of one type.
pub struct GpuBuffer<D: Driver, T> {
    memory: Arc<D::Memory>,
    elements: usize,
    element: PhantomData<fn() -> T>,
}

impl<D: Driver, T: Element> GpuBuffer<D, T> {
    pub(super) fn zeroed(driver: &D, stream: &mut GpuStream<D>, elements: usize) -> Result<Self> {
        // A buffer of no elements has an address too.
        let bytes = elements.max(1).saturating_mul(size_of::<T>());
        let memory = driver.allocate(stream.queue_outside_recordings("allocating")?, bytes)?;
        Ok(Self { memory: Arc::new(memory), elements, element: PhantomData })
    }

    /// Another name of the same memory.
    pub(super) fn alias(&self) -> Self {
        Self { memory: Arc::clone(&self.memory), elements: self.elements, element: PhantomData }
    }

    pub(super) fn elements(&self) -> usize {
        self.elements
    }

    pub(super) fn memory(&self) -> &D::Memory {
        &self.memory
    }

    fn address(&self, start: usize) -> Address {
        D::address(&self.memory).offset(start * size_of::<T>())
    }
}

/// A view whose first element a kernel is given.
pub(crate) trait Place {
    /// The address of its first element.
    fn address(&self) -> driver::Address;
}

impl<D: Driver, P: Precision, T: Element> Place for Slice<'_, Gpu<D, P>, T> {
    fn address(&self) -> Address {
        self.buffer.address(self.start)
    }
}
impl<D: Driver, P: Precision, T: Element> Place for SliceMut<'_, Gpu<D, P>, T> {
    fn address(&self) -> Address {
        self.buffer.address(self.start)
    }
}
impl<D: Driver, P: Precision, T: Element> Place for Matrix<'_, Gpu<D, P>, T> {
    fn address(&self) -> Address {
        self.buffer.address(self.start)
    }
}
impl<D: Driver, P: Precision, T: Element> Place for MatrixMut<'_, Gpu<D, P>, T> {
    fn address(&self) -> Address {
        self.buffer.address(self.start)
    }
}
impl<T: Place> Place for Option<T> {
    fn address(&self) -> Address {
        self.as_ref().map_or(Address::NULL, Place::address)
    }
}
