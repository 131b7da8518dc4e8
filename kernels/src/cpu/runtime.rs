//! [`Runtime`] for [`Cpu`]: host memory, and calls that end when their work is done.

use std::convert::Infallible;
use std::sync::Arc;

use crate::backend::{DeviceKind, Element, MemoryPlace, NUMERICS_VERSION, PeerAccess, Runtime};
use crate::cpu::rows::{elements, elements_mut, exactly, exactly_mut};
use crate::cpu::{Buffer, Cpu, DeviceStream, Event, InstructionSet, MATRIX_LIBRARY};
use crate::error::Result;
use crate::shared::{HostView, Shared};
use crate::view::{Slice, SliceMut};

impl Runtime for Cpu {
    type Activation = f32;
    type Buffer<T: Element> = Buffer<T>;
    type DeviceStream = DeviceStream;
    type Event = Event;
    type Pinned<T: Element> = Buffer<T>;
    type Graph = Infallible;
    type RoundedCopy = ();

    /// Processors with AVX2 and FMA are one kind, as the instruction set is not numerics; without,
    /// the matrix library's products are not fused and differ.
    fn device_kind(&self) -> DeviceKind {
        let fused = InstructionSet::Avx2.is_available();
        let architecture = match std::env::consts::ARCH {
            "x86_64" if fused => "x86-64-fma",
            "x86_64" => "x86-64",
            other => other,
        };
        DeviceKind {
            backend: "cpu".to_owned(),
            architecture: architecture.to_owned(),
            numerics_version: NUMERICS_VERSION,
            matrix_library: MATRIX_LIBRARY.to_owned(),
        }
    }

    fn memory(&self) -> MemoryPlace {
        MemoryPlace::Host
    }

    fn free_memory_bytes(&self) -> Result<Option<usize>> {
        Ok(None)
    }

    fn device_stream(&self) -> Result<DeviceStream> {
        Ok(DeviceStream::new(self.threads.clone()))
    }

    fn allocate<T: Element>(&self, _: &mut DeviceStream, elements: usize) -> Result<Buffer<T>> {
        Buffer::zeroed(elements)
    }

    fn elements<T: Element>(buffer: &Buffer<T>) -> usize {
        buffer.len()
    }

    fn rounded_copy(&self, _: &mut DeviceStream, _elements: usize) -> Result<()> {
        Ok(())
    }

    fn round_to_activation(
        &self,
        _: &mut DeviceStream,
        (): &mut (),
        _master: &Buffer<f32>,
        _start: usize,
        _elements: usize,
    ) -> Result<()> {
        Ok(())
    }

    fn copies_mut((): &mut ()) -> Option<&mut Buffer<f32>> {
        None
    }

    fn compute_buffer_mut<'a>(master: &'a mut Buffer<f32>, (): &'a mut ()) -> &'a mut Buffer<f32> {
        master
    }

    fn compute_buffer<'a>(master: &'a Buffer<f32>, (): &'a ()) -> &'a Buffer<f32> {
        master
    }

    fn write<T: Element>(
        &self,
        _: &mut DeviceStream,
        out: SliceMut<'_, Self, T>,
        host: &[T],
    ) -> Result<()> {
        exactly_mut("write", "out", out, host.len())?.copy_from_slice(host);
        Ok(())
    }

    fn read<T: Element>(
        &self,
        _: &mut DeviceStream,
        host: &mut [T],
        from: Slice<'_, Self, T>,
    ) -> Result<()> {
        host.copy_from_slice(exactly("read", "from", from, host.len())?);
        Ok(())
    }

    /// One pass: nothing is zeroed first.
    fn to_vec<T: Element>(&self, _: &mut DeviceStream, from: Slice<'_, Self, T>) -> Result<Vec<T>> {
        Ok(elements(from).to_vec())
    }

    fn pinned<T: Element>(&self, elements: usize) -> Result<Buffer<T>> {
        Buffer::zeroed(elements)
    }

    fn pinned_values<'a, T: Element>(&self, pinned: &'a Buffer<T>) -> Result<&'a [T]> {
        Ok(pinned)
    }

    fn pinned_values_mut<'a, T: Element>(&self, pinned: &'a mut Buffer<T>) -> Result<&'a mut [T]> {
        Ok(pinned)
    }

    fn read_async<T: Element>(
        &self,
        stream: &mut DeviceStream,
        to: &mut Buffer<T>,
        start: usize,
        from: Slice<'_, Self, T>,
    ) -> Result<()> {
        self.copy(stream, SliceMut::new(to, start, from.elements)?, from)
    }

    fn write_async<T: Element>(
        &self,
        stream: &mut DeviceStream,
        out: SliceMut<'_, Self, T>,
        from: &Buffer<T>,
        start: usize,
    ) -> Result<()> {
        let elements = out.elements;
        self.copy(stream, out, Slice::new(from, start, elements)?)
    }

    /// All memory is the host's.
    fn reach(&self, _: &Self) -> Result<PeerAccess> {
        Ok(PeerAccess::Direct)
    }

    fn share<T: Element>(
        &self,
        stream: &mut DeviceStream,
        from: Slice<'_, Self, T>,
    ) -> Result<Shared<Self, T>> {
        let from = elements(from);
        Ok(Shared::new(stream.copy_of(from)?, 0, from.len()))
    }

    fn host_view<T: Element>(shared: &Shared<Self, T>) -> Option<HostView<T>> {
        let (buffer, range) = shared.place();
        let values: Arc<dyn AsRef<[T]> + Send + Sync> = Arc::clone(buffer) as _;
        Some(HostView::new(values, range))
    }

    fn copy<T: Element>(
        &self,
        _: &mut DeviceStream,
        out: SliceMut<'_, Self, T>,
        from: Slice<'_, Self, T>,
    ) -> Result<()> {
        let out = elements_mut(out);
        out.copy_from_slice(exactly("copy", "from", from, out.len())?);
        Ok(())
    }

    fn fill_zero<T: Element>(
        &self,
        _: &mut DeviceStream,
        out: SliceMut<'_, Self, T>,
    ) -> Result<()> {
        elements_mut(out).fill(T::zeroed());
        Ok(())
    }

    fn record(&self, _: &mut DeviceStream) -> Result<Event> {
        Ok(Event::untimed())
    }

    fn record_timed(&self, _: &mut DeviceStream) -> Result<Event> {
        Ok(Event::now())
    }

    /// Work has run when its call returns, so an event is reached when it is recorded.
    fn wait_for(&self, _: &mut DeviceStream, _: &Event) -> Result<()> {
        Ok(())
    }

    fn is_complete(&self, _: &Event) -> Result<bool> {
        Ok(true)
    }

    fn wait(&self, _: &Event) -> Result<()> {
        Ok(())
    }

    fn elapsed_milliseconds(&self, from: &Event, to: &Event) -> Result<f64> {
        from.milliseconds_to(to)
    }

    /// A call is a kernel's end here: there is nothing to save.
    fn record_graph(
        &self,
        _: &mut DeviceStream,
        _enqueue: &mut dyn FnMut(&mut DeviceStream) -> Result<()>,
    ) -> Result<Option<Infallible>> {
        Ok(None)
    }

    fn replay(&self, _: &mut DeviceStream, graph: &Infallible) -> Result<()> {
        match *graph {}
    }
}
