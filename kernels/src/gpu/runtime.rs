//! [`Runtime`] for [`Gpu`]: the driver's functions, with the types of the
//! [backend](crate::backend).

use crate::backend::{
    DeviceKind, Element, KernelGroup, KernelTime, MemoryPlace, NUMERICS_VERSION, PeerAccess,
    Runtime,
};
use crate::error::{KernelError, Result};
use std::ops::Range;
use std::sync::Arc;

use crate::gpu::buffer::Place;
use crate::gpu::collectives::{CollectiveLibrary, GroupId, GroupMember, LibraryCollective};
use crate::gpu::driver::{Driver, Timing};
use crate::gpu::precision::{Copies, Precision};
use crate::gpu::recording::{GpuGraph, Recording};
use crate::gpu::source::of_groups;
use crate::gpu::{Gpu, GpuBuffer, GpuPinned, GpuStream};
use crate::shared::Shared;
use crate::view::{Slice, SliceMut};

fn same_elements(kernel: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    Err(KernelError::shape(kernel, "from", format!("{expected} elements"), found))
}

impl<D: Driver, P: Precision> Runtime for Gpu<D, P> {
    type Activation = P::Activation;
    type Buffer<T: Element> = GpuBuffer<D, T>;
    type DeviceStream = GpuStream<D>;
    type Event = D::Event;
    type Pinned<T: Element> = GpuPinned<D, T>;
    type Graph = GpuGraph<D>;
    type RoundedCopy = Copies<D, P::Activation>;

    /// The number of multiprocessors is part of the matrix library's entry, since the library's choices depend on it.
    fn device_kind(&self) -> DeviceKind {
        let device = self.driver.properties();
        let (library, multiprocessors) = (&device.matrix_library, device.multiprocessors);
        DeviceKind {
            backend: device.backend.to_owned(),
            architecture: device.architecture.clone(),
            numerics_version: NUMERICS_VERSION,
            matrix_library: format!("{library}, {multiprocessors} multiprocessors"),
        }
    }

    fn identity(&self) -> Option<String> {
        self.driver.identity()
    }

    fn free_memory_bytes(&self) -> Result<Option<usize>> {
        Ok(Some(self.driver.memory_bytes()?[0]))
    }

    fn memory(&self) -> MemoryPlace {
        MemoryPlace::Device
    }

    fn prepare(&self, groups: &[KernelGroup]) -> Result<()> {
        let is_scan_of_sixteen = |channels, states| self.is_scan_of_sixteen(channels, states);
        self.compile(of_groups(groups, is_scan_of_sixteen, |width| self.takes_groups(width)))
    }

    fn device_stream(&self) -> Result<GpuStream<D>> {
        GpuStream::new(&self.driver)
    }

    fn allocate<T: Element>(
        &self,
        stream: &mut GpuStream<D>,
        elements: usize,
    ) -> Result<GpuBuffer<D, T>> {
        GpuBuffer::zeroed(&self.driver, stream, elements)
    }

    fn elements<T: Element>(buffer: &GpuBuffer<D, T>) -> usize {
        buffer.elements()
    }

    fn rounded_copy(
        &self,
        stream: &mut GpuStream<D>,
        elements: usize,
    ) -> Result<Copies<D, P::Activation>> {
        if size_of::<P::Activation>() == size_of::<f32>() {
            return Ok(Copies(None));
        }
        Ok(Copies(Some(GpuBuffer::zeroed(&self.driver, stream, elements)?)))
    }

    fn round_to_activation(
        &self,
        stream: &mut GpuStream<D>,
        weights: &mut Copies<D, P::Activation>,
        master: &GpuBuffer<D, f32>,
        start: usize,
        elements: usize,
    ) -> Result<()> {
        let Some(copies) = &mut weights.0 else { return Ok(()) };
        let out = SliceMut::new(copies, start, elements)?;
        self.launch_round(stream, out, Slice::new(master, start, elements)?)
    }

    fn compute_buffer<'a>(
        master: &'a GpuBuffer<D, f32>,
        weights: &'a Copies<D, P::Activation>,
    ) -> &'a GpuBuffer<D, P::Activation> {
        P::compute(master, weights)
    }

    fn copies_mut(
        copies: &mut Copies<D, P::Activation>,
    ) -> Option<&mut GpuBuffer<D, P::Activation>> {
        copies.0.as_mut()
    }

    fn compute_buffer_mut<'a>(
        master: &'a mut GpuBuffer<D, f32>,
        weights: &'a mut Copies<D, P::Activation>,
    ) -> &'a mut GpuBuffer<D, P::Activation> {
        P::compute_mut(master, weights)
    }

    fn write<T: Element>(
        &self,
        stream: &mut GpuStream<D>,
        out: SliceMut<'_, Self, T>,
        host: &[T],
    ) -> Result<()> {
        if out.elements != host.len() {
            let expected = format!("{} elements", host.len());
            return Err(KernelError::shape("write", "out", expected, out.elements));
        }
        let offset = out.start * size_of::<T>();
        let queue = stream.queue_outside_recordings("writing from the host")?;
        self.driver.upload(queue, out.buffer.memory(), offset, bytemuck::cast_slice(host))
    }

    fn read<T: Element>(
        &self,
        stream: &mut GpuStream<D>,
        host: &mut [T],
        from: Slice<'_, Self, T>,
    ) -> Result<()> {
        same_elements("read", host.len(), from.elements)?;
        let offset = from.start * size_of::<T>();
        let queue = stream.queue_outside_recordings("reading to the host")?;
        let host = bytemuck::cast_slice_mut(host);
        self.driver.download(queue, host, from.buffer.memory(), offset)?;
        stream.check(&self.driver)
    }

    fn pinned<T: Element>(&self, elements: usize) -> Result<GpuPinned<D, T>> {
        GpuPinned::zeroed(&self.driver, elements)
    }

    fn pinned_values<'a, T: Element>(&self, pinned: &'a GpuPinned<D, T>) -> Result<&'a [T]> {
        pinned.values(&self.driver)
    }

    fn pinned_values_mut<'a, T: Element>(
        &self,
        pinned: &'a mut GpuPinned<D, T>,
    ) -> Result<&'a mut [T]> {
        pinned.values_mut(&self.driver)
    }

    fn read_async<T: Element>(
        &self,
        stream: &mut GpuStream<D>,
        to: &mut GpuPinned<D, T>,
        start: usize,
        from: Slice<'_, Self, T>,
    ) -> Result<()> {
        let bytes = from.elements * size_of::<T>();
        let queue = stream.queue_outside_recordings("reading to the host")?;
        let place = to.place("read_async", start, from.elements)?;
        let from = (from.buffer.memory(), from.start * size_of::<T>());
        // SAFETY: the host reaches the memory only through `GpuPinned`, which waits for the event below, as does its end.
        unsafe { self.driver.download_async(queue, place, from, bytes)? };
        let event = self.driver.record(queue, Timing::Unknown)?;
        to.written_at(&self.driver, event)
    }

    fn write_async<T: Element>(
        &self,
        stream: &mut GpuStream<D>,
        out: SliceMut<'_, Self, T>,
        from: &GpuPinned<D, T>,
        start: usize,
    ) -> Result<()> {
        let bytes = out.elements * size_of::<T>();
        let queue = stream.queue_outside_recordings("writing from the host")?;
        let place = from.place("write_async", start, out.elements)?;
        let to = (out.buffer.memory(), out.start * size_of::<T>());
        // SAFETY: as above.
        unsafe { self.driver.upload_async(queue, to, place, bytes)? };
        let event = self.driver.record(queue, Timing::Unknown)?;
        from.read_at(&self.driver, event)
    }

    fn reach(&self, peer: &Self) -> Result<PeerAccess> {
        self.driver.reach(&peer.driver)
    }

    fn share<T: Element>(
        &self,
        _: &mut GpuStream<D>,
        from: Slice<'_, Self, T>,
    ) -> Result<Shared<Self, T>> {
        let (buffer, range) = from.place();
        Ok(Shared::new(Arc::new(buffer.alias()), range.start, range.len()))
    }

    fn collective_library(&self) -> Result<CollectiveLibrary> {
        let properties = self.driver.properties();
        let name = properties.collective_library.ok_or_else(|| {
            let expected = "one with a library of collectives";
            KernelError::shape("group", "device", expected, &properties.name)
        })?;
        CollectiveLibrary::open(name)
    }

    fn join_group(
        &self,
        library: &CollectiveLibrary,
        id: GroupId,
        rank_of: (usize, usize),
    ) -> Result<GroupMember> {
        // Makes the device current on this thread, as every call does.
        self.driver.memory_bytes()?;
        GroupMember::join(library, id, rank_of)
    }

    fn exchange<T: Element>(
        &self,
        stream: &mut GpuStream<D>,
        member: &GroupMember,
        sends: &[(usize, Slice<'_, Self, T>)],
        mut into: SliceMut<'_, Self, T>,
        receives: &[(usize, Range<usize>)],
    ) -> Result<()> {
        let sends: Vec<_> = sends
            .iter()
            .map(|(peer, from)| (*peer, from.address().0, from.elements * size_of::<T>()))
            .collect();
        let receives = receives.iter().map(|(peer, range)| {
            let out = into.reborrow().sub(range.start, range.len())?;
            Ok((*peer, out.address().0, out.elements * size_of::<T>()))
        });
        let receives = receives.collect::<Result<Vec<_>>>()?;
        let queue = stream.queue_outside_recordings("exchanging")?;
        let queue = self.driver.for_library(queue)?;
        // SAFETY: views lie inside their buffers, and the target of the receives is borrowed mutably.
        unsafe { member.exchange(queue, &sends, &receives) }
    }

    fn library_collective(
        &self,
        stream: &mut GpuStream<D>,
        member: &GroupMember,
        what: LibraryCollective,
        mut out: SliceMut<'_, Self, f32>,
        from: Slice<'_, Self, f32>,
    ) -> Result<()> {
        let (share, all) = match what {
            LibraryCollective::ReduceScatter => (out.elements, from.elements),
            LibraryCollective::AllGather => (from.elements, out.elements),
        };
        same_elements("group", share * member.ranks(), all)?;
        let queue = stream.queue_outside_recordings("exchanging")?;
        let queue = self.driver.for_library(queue)?;
        let addresses = (from.address().0, out.reborrow().address().0);
        // SAFETY: views lie inside their buffers, and the target of the receives is borrowed mutably.
        unsafe { member.collective(queue, what, addresses, share) }
    }

    fn copy<T: Element>(
        &self,
        stream: &mut GpuStream<D>,
        out: SliceMut<'_, Self, T>,
        from: Slice<'_, Self, T>,
    ) -> Result<()> {
        same_elements("copy", out.elements, from.elements)?;
        let bytes = out.elements * size_of::<T>();
        let to = (out.buffer.memory(), out.start * size_of::<T>());
        let from = (from.buffer.memory(), from.start * size_of::<T>());
        self.profile.note(&self.driver, stream, "copy", |stream| {
            self.driver.copy(stream.queue_mut(), to, from, bytes)
        })
    }

    fn fill_zero<T: Element>(
        &self,
        stream: &mut GpuStream<D>,
        out: SliceMut<'_, Self, T>,
    ) -> Result<()> {
        let (offset, bytes) = (out.start * size_of::<T>(), out.elements * size_of::<T>());
        let memory = out.buffer.memory();
        self.profile.note(&self.driver, stream, "fill_zero", |stream| {
            self.driver.fill_zero(stream.queue_mut(), memory, offset, bytes)
        })
    }

    fn record(&self, stream: &mut GpuStream<D>) -> Result<D::Event> {
        self.driver.record(stream.queue_outside_recordings("an event")?, Timing::Unknown)
    }

    fn record_timed(&self, stream: &mut GpuStream<D>) -> Result<D::Event> {
        self.driver.record(stream.queue_outside_recordings("an event")?, Timing::Noted)
    }

    fn wait_for(&self, stream: &mut GpuStream<D>, event: &D::Event) -> Result<()> {
        self.driver.wait_for(stream.queue_outside_recordings("waiting for an event")?, event)
    }

    fn is_complete(&self, event: &D::Event) -> Result<bool> {
        self.driver.is_complete(event)
    }

    fn wait(&self, event: &D::Event) -> Result<()> {
        self.driver.wait(event)
    }

    fn elapsed_milliseconds(&self, from: &D::Event, to: &D::Event) -> Result<f64> {
        self.driver.elapsed_milliseconds(from, to).map(f64::from)
    }

    fn record_graph(
        &self,
        stream: &mut GpuStream<D>,
        enqueue: &mut dyn FnMut(&mut GpuStream<D>) -> Result<()>,
    ) -> Result<Option<GpuGraph<D>>> {
        if !self.driver.has_graphs() {
            return Ok(None);
        }
        let mut recording = Recording::begin(&self.driver, stream)?;
        enqueue(recording.stream())?;
        recording.end().map(Some)
    }

    fn replay(&self, stream: &mut GpuStream<D>, graph: &GpuGraph<D>) -> Result<()> {
        self.profile
            .note(&self.driver, stream, "graph", |stream| graph.replay(&self.driver, stream))
    }

    fn start_profile(&self) {
        self.profile.start();
    }

    fn finish_profile(&self) -> Result<Vec<KernelTime>> {
        self.profile.finish(&self.driver)
    }
}
