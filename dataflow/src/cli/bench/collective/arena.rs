//! An arena on a device, and what its worker owns of the sums.

use std::ops::Range;
use std::sync::Arc;

use tidemill_kernels::{Backend, KernelError, Slice, SliceMut};

use super::measure::{Exchanged, Look, Memory};
use crate::cluster::Failure;

/// The memory of a worker with a device, and the device streams that exchange it.
pub(super) struct DeviceArena<B: Backend> {
    /// The stream that would have computed the sums. They are final long before they are needed, as in training, except for
    /// the last buckets of a step.
    pub compute: B::DeviceStream,
    /// The streams that exchange. They are dropped before the memory that they read, since they run to their end first.
    pub streams: Vec<B::DeviceStream>,
    pub arena: B::Buffer<f32>,
    /// The sums that are owned of each bucket.
    pub owned: Vec<B::Buffer<f32>>,
    pub backend: Arc<B>,
}

impl<B: Backend> DeviceArena<B> {
    /// An arena of so many elements, exchanged by so many device streams.
    ///
    /// # Errors
    /// A device that fails, or has no room.
    pub(super) fn new(
        backend: Arc<B>,
        elements: usize,
        streams: usize,
    ) -> Result<Self, KernelError> {
        let mut compute = backend.device_stream()?;
        let streams = (0..streams).map(|_| backend.device_stream()).collect::<Result<_, _>>()?;
        let arena = backend.allocate(&mut compute, elements)?;
        Ok(Self { compute, streams, arena, owned: Vec::new(), backend })
    }

    /// Makes room for so many owned elements of each bucket.
    pub(super) fn own(&mut self, buckets: impl Iterator<Item = usize>) -> Result<(), KernelError> {
        // Before others are allocated.
        self.owned.clear();
        for elements in buckets {
            self.owned.push(self.backend.allocate(&mut self.compute, elements)?);
        }
        Ok(())
    }

    /// Shows the elements `of_arena` as they were received; of sums these are the owned elements of a bucket.
    pub(super) fn show(
        &mut self,
        what: Exchanged,
        of_arena: Range<usize>,
        bucket: usize,
        look: &mut Look<'_>,
    ) -> Result<(), Failure> {
        let from = match what {
            Exchanged::Sums => Slice::new(&self.owned[bucket], 0, of_arena.len())?,
            Exchanged::Gathered => Slice::new(&self.arena, of_arena.start, of_arena.len())?,
        };
        look(of_arena.start, &self.backend.to_vec(&mut self.compute, from)?)
    }
}

impl<B: Backend> Memory for DeviceArena<B> {
    fn put(&mut self, start: usize, values: &[f32]) -> Result<(), Failure> {
        let out = SliceMut::new(&mut self.arena, start, values.len())?;
        Ok(self.backend.write(&mut self.compute, out, values)?)
    }

    fn clear(&mut self, what: Exchanged) -> Result<(), Failure> {
        let cleared = match what {
            Exchanged::Sums => &mut self.owned[..],
            Exchanged::Gathered => std::slice::from_mut(&mut self.arena),
        };
        for buffer in cleared {
            self.backend.fill_zero(&mut self.compute, SliceMut::all(buffer))?;
        }
        self.finish()
    }

    fn finish(&mut self) -> Result<(), Failure> {
        for stream in std::iter::once(&mut self.compute).chain(&mut self.streams) {
            self.backend.wait(&self.backend.record(stream)?)?;
        }
        Ok(())
    }
}
