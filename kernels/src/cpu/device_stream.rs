//! The device stream of the CPU: compute threads and scratch memory.
//!
//! Kernels run inside the call, so the order of a device stream is the order of the calls. Work is
//! divided into parts whose results do not depend on how many there are: the number of threads is
//! never numerics.

use std::any::Any;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Instant;

use rayon::{ThreadPool, ThreadPoolBuilder};

use super::Buffer;
use super::simd::Lanes;
use crate::backend::Element;
use crate::error::{KernelError, Result};
use crate::float_environment::FloatEnvironment;

/// A point in a device stream of the CPU, where everything is over when a call returns.
#[derive(Clone, Copy, Debug)]
pub struct Event(Option<Instant>);

impl Event {
    pub(crate) fn untimed() -> Self {
        Self(None)
    }

    pub(crate) fn now() -> Self {
        Self(Some(Instant::now()))
    }

    /// # Errors
    /// A point whose time was not noted.
    pub(crate) fn milliseconds_to(&self, later: &Self) -> Result<f64> {
        let (from, to) = self.0.zip(later.0).ok_or_else(|| KernelError::untimed("the CPU"))?;
        Ok(to.duration_since(from).as_secs_f64() * 1e3)
    }
}

/// The compute threads of a [`Cpu`](super::Cpu); a single one is the caller itself.
#[derive(Clone, Debug)]
pub(crate) struct ComputeThreads {
    pool: Option<Arc<ThreadPool>>,
    count: usize,
}

impl ComputeThreads {
    /// # Errors
    /// Threads that the operating system refuses.
    pub(crate) fn new(count: NonZeroUsize) -> Result<Self> {
        let count = count.get();
        if count == 1 {
            return Ok(Self { pool: None, count });
        }
        let pool = ThreadPoolBuilder::new()
            .num_threads(count)
            .thread_name(|index| format!("compute-{index}"))
            // Compute threads would inherit the floating-point environment of the thread that
            // starts them.
            .start_handler(|_| FloatEnvironment::standard().keep())
            .build()
            .map_err(|source| KernelError::Threads { threads: count, source: Box::new(source) })?;
        Ok(Self { pool: Some(Arc::new(pool)), count })
    }

    /// The number of threads.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The number of `items` that each thread takes, at least 1.
    pub(crate) fn share(&self, items: usize) -> usize {
        items.div_ceil(self.count).max(1)
    }

    /// `work` on every part, in any order and in the standard floating-point environment.
    pub(crate) fn for_each<P: Send>(
        &self,
        parts: impl Iterator<Item = P>,
        work: impl Fn(P) + Sync,
    ) {
        match &self.pool {
            None => {
                let _standard = FloatEnvironment::standard();
                parts.for_each(work);
            }
            Some(pool) => pool.in_place_scope(|scope| {
                for part in parts {
                    let work = &work;
                    scope.spawn(move |_| work(part));
                }
            }),
        }
    }
}

/// A token and the row that holds it.
pub(crate) type TokenRow = (u32, usize);

/// Runs kernels in the order of the calls; holds the scratch memory that they reuse.
#[derive(Debug)]
pub struct DeviceStream {
    threads: ComputeThreads,
    scratch: Vec<Lanes>,
    token_rows: Vec<TokenRow>,
    weight_gradient: Option<Buffer<f32>>,
    /// Copies that were shared, as `Arc<Buffer<T>>` of any element type: one that no reader holds any more is reused.
    copies: Vec<Box<dyn Any + Send>>,
}

impl DeviceStream {
    pub(crate) fn new(threads: ComputeThreads) -> Self {
        Self {
            threads,
            scratch: Vec::new(),
            token_rows: Vec::new(),
            weight_gradient: None,
            copies: Vec::new(),
        }
    }

    /// The compute threads.
    pub(crate) fn threads(&self) -> &ComputeThreads {
        &self.threads
    }

    /// The compute threads, and `lanes` vectors of scratch memory with unspecified contents.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`] where the host has no room.
    pub(crate) fn with_scratch(&mut self, lanes: usize) -> Result<(&ComputeThreads, &mut [Lanes])> {
        self.reserve(lanes)?;
        Ok((&self.threads, &mut self.scratch[..lanes]))
    }

    /// `lanes` vectors of scratch memory with unspecified contents, and a list of (token, row).
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`] where the host has no room.
    pub(crate) fn with_token_rows(
        &mut self,
        lanes: usize,
    ) -> Result<(&mut [Lanes], &mut Vec<TokenRow>)> {
        self.reserve(lanes)?;
        Ok((&mut self.scratch[..lanes], &mut self.token_rows))
    }

    /// The compute threads, and at least `elements` elements of scratch memory, with unspecified
    /// contents, for the gradient of one weight from one grain.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`] where the host has no room.
    pub(crate) fn with_weight_gradient(
        &mut self,
        elements: usize,
    ) -> Result<(&ComputeThreads, &mut Buffer<f32>)> {
        let held = self.weight_gradient.take().filter(|held| held.len() >= elements);
        let held = match held {
            Some(held) => held,
            None => Buffer::zeroed(elements)?,
        };
        Ok((&self.threads, self.weight_gradient.insert(held)))
    }

    /// A copy of `elements`, at the beginning of a buffer that is at least as long, for others to read.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`] where the host has no room.
    pub(crate) fn copy_of<T: Element>(&mut self, elements: &[T]) -> Result<Arc<Buffer<T>>> {
        let fits = |copy: &mut Box<dyn Any + Send>| {
            let room = copy.downcast_mut::<Arc<Buffer<T>>>().and_then(Arc::get_mut);
            // A small request must not take a much larger piece of memory, which would then have to
            // be allocated again.
            room.is_some_and(|room| (elements.len()..=2 * elements.len()).contains(&room.len()))
        };
        let place = self.copies.iter_mut().position(fits);
        let mut copy = match place.map(|place| self.copies.swap_remove(place).downcast()) {
            Some(Ok(copy)) => *copy,
            _ => Arc::new(Buffer::<T>::zeroed(elements.len())?),
        };
        if let Some(room) = Arc::get_mut(&mut copy) {
            room[..elements.len()].copy_from_slice(elements);
        }
        self.copies.push(Box::new(Arc::clone(&copy)));
        Ok(copy)
    }

    fn reserve(&mut self, lanes: usize) -> Result<()> {
        if let Some(missing) = lanes.checked_sub(self.scratch.len()) {
            self.scratch.try_reserve_exact(missing).map_err(|_| KernelError::OutOfMemory {
                bytes: lanes.saturating_mul(size_of::<Lanes>()),
                device: "the CPU".to_owned(),
            })?;
            self.scratch.resize(lanes, Lanes::ZERO);
        }
        Ok(())
    }
}
