//! Typed host memory that a device copies to and from asynchronously.
//!
//! An access by the host waits for the copies that conflict with it; every copy leaves an event for
//! that.

use std::marker::PhantomData;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::backend::Element;
use crate::error::{KernelError, Result};
use crate::gpu::driver::Driver;

/// The number of events from which on those that were reached are removed.
const MANY_EVENTS: usize = 16;

/// Host memory that holds elements of one type.
pub struct GpuPinned<D: Driver, T> {
    memory: D::HostMemory,
    elements: usize,
    copies: Mutex<Copies<D::Event>>,
    element: PhantomData<fn() -> T>,
}

/// The ends of copies that may be on their way.
struct Copies<E> {
    into: Vec<E>,
    out_of: Vec<E>,
}

impl<D: Driver, T: Element> GpuPinned<D, T> {
    pub(super) fn zeroed(driver: &D, elements: usize) -> Result<Self> {
        let memory = driver.allocate_host(elements.max(1).saturating_mul(size_of::<T>()))?;
        let copies = Mutex::new(Copies { into: Vec::new(), out_of: Vec::new() });
        Ok(Self { memory, elements, copies, element: PhantomData })
    }

    /// The memory and the byte of element `start`, which `elements` elements follow.
    pub(super) fn place(
        &self,
        kernel: &'static str,
        start: usize,
        elements: usize,
    ) -> Result<(&D::HostMemory, usize)> {
        match start.checked_add(elements) {
            Some(end) if end <= self.elements => Ok((&self.memory, start * size_of::<T>())),
            _ => {
                let expected = format!("within {} elements", self.elements);
                let found = format!("{elements} from element {start}");
                Err(KernelError::shape(kernel, "pinned memory", expected, found))
            }
        }
    }

    /// A copy into the memory ends at `event`.
    pub(super) fn written_at(&mut self, driver: &D, event: D::Event) -> Result<()> {
        keep(driver, &mut lock(&self.copies).into, event)
    }

    /// A copy from the memory ends at `event`.
    pub(super) fn read_at(&self, driver: &D, event: D::Event) -> Result<()> {
        keep(driver, &mut lock(&self.copies).out_of, event)
    }

    pub(super) fn values(&self, driver: &D) -> Result<&[T]> {
        settle(driver, &mut lock(&self.copies).into)?;
        // SAFETY: the memory holds as many elements, zeros at first, which are valid as an `Element` is `Pod`. No copy into it is on
        // its way, and none can be enqueued while it is borrowed.
        Ok(unsafe { std::slice::from_raw_parts(self.first(), self.elements) })
    }

    pub(super) fn values_mut(&mut self, driver: &D) -> Result<&mut [T]> {
        let mut copies = lock(&self.copies);
        settle(driver, &mut copies.into)?;
        settle(driver, &mut copies.out_of)?;
        drop(copies);
        // SAFETY: as above, and no copy from it is on its way either.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.first(), self.elements) })
    }

    fn first(&self) -> *mut T {
        D::host_pointer(&self.memory).as_ptr().cast()
    }
}

impl<D: Driver, T> Drop for GpuPinned<D, T> {
    fn drop(&mut self) {
        let copies = lock(&self.copies);
        copies.into.iter().chain(&copies.out_of).for_each(D::settle);
    }
}

fn lock<E>(copies: &Mutex<Copies<E>>) -> MutexGuard<'_, Copies<E>> {
    copies.lock().unwrap_or_else(PoisonError::into_inner)
}

fn keep<D: Driver>(driver: &D, events: &mut Vec<D::Event>, event: D::Event) -> Result<()> {
    events.push(event);
    if events.len() < MANY_EVENTS {
        return Ok(());
    }
    let mut result = Ok(());
    events.retain(|event| match driver.is_complete(event) {
        Ok(is_complete) => !is_complete,
        Err(error) => {
            result = Err(error);
            true
        }
    });
    result
}

fn settle<D: Driver>(driver: &D, events: &mut Vec<D::Event>) -> Result<()> {
    events.iter().try_for_each(|event| driver.wait(event))?;
    events.clear();
    Ok(())
}
