//! The device under the kernels: memory, order and time.
//!
//! A runtime allocates opaque [`Buffer`](Runtime::Buffer)s, runs kernels in order on a
//! [`DeviceStream`](Runtime::DeviceStream), and moves bytes to and from the host only at a caller's
//! request ([`write`](Runtime::write), [`read`](Runtime::read)). Kernels of one device stream run
//! in the order of the calls; on a GPU a call returns before the kernel has run, so a later call on
//! the same device stream may return the error of an earlier kernel.
//!
//! Device streams are independent: one waits for the work of another through an event
//! ([`wait_for`](Runtime::wait_for)), without the host. Copies to and from pinned memory
//! ([`read_async`](Runtime::read_async), [`write_async`](Runtime::write_async)) are in the order of
//! their device stream too; the host waits for them only when it accesses the memory.

use std::ops::Range;

use super::KernelGroup;
use super::element::{ActivationElement, Element};
use crate::error::{KernelError, Result};
use crate::gpu::collectives::{CollectiveLibrary, GroupId, GroupMember, LibraryCollective};
use crate::shared::{HostView, Shared};
use crate::view::{Slice, SliceMut};

/// Where the buffers of a backend lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryPlace {
    /// In the host's memory: reading and writing them are copies within it.
    Host,
    /// In a memory of the device's own: every read waits for the device, and bytes cross a bus.
    Device,
}

/// The properties of a device that decide about bits: two workers whose kinds are equal compute the same bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceKind {
    /// `cpu`, `cuda` or `rocm`.
    pub backend: String,
    /// `x86-64-fma`, `sm_90a`, `gfx942` ...
    pub architecture: String,
    /// [`NUMERICS_VERSION`](super::NUMERICS_VERSION) of the kernels.
    pub numerics_version: u32,
    /// The matrix library and its version; on GPUs also a digest of its choices, and the number of multiprocessors, on which these
    /// depend too.
    pub matrix_library: String,
}

/// How kernels of one device access the memory of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerAccess {
    /// They read it where it is.
    Direct,
    /// They cannot: bytes have to be copied.
    Absent,
}

/// The device time of a kernel, summed over its launches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelTime {
    /// The kernel.
    pub kernel: &'static str,
    /// The number of launches.
    pub launches: u64,
    /// Device time.
    pub milliseconds: f64,
}

/// A device: its memory, the order of its work, and queries about both.
pub trait Runtime: Send + Sync + Sized + 'static {
    /// Element type of activations and of the weights that matrix products read: the precision.
    type Activation: ActivationElement;
    /// Device memory holding elements of one type.
    type Buffer<T: Element>: Send + Sync;
    /// An in-order queue of kernels and the scratch memory that they use.
    type DeviceStream: Send;
    /// A point in a device stream.
    type Event: Clone + Send + Sync;
    /// Host memory holding elements of one type, which the device copies to and from while the host goes on.
    type Pinned<T: Element>: Send + Sync;
    /// Kernels that were recorded to be enqueued together; [`Infallible`](std::convert::Infallible) where none can be.
    type Graph: Send;
    /// A copy of an fp32 buffer, such as the masters of the parameters, rounded to activation precision for matrix products. Where
    /// activations are fp32 too it holds nothing, and products read the buffer itself.
    type RoundedCopy: Send + Sync;

    /// The kind of this device, which must equal that of its peers.
    fn device_kind(&self) -> DeviceKind;

    /// An identifier that no other device of any machine has; `None` where the device has none, or where several devices share one
    /// piece of hardware.
    fn identity(&self) -> Option<String> {
        None
    }

    /// Bytes of the device's own memory that are free now; `None` where buffers lie in host memory.
    fn free_memory_bytes(&self) -> Result<Option<usize>>;

    /// The place of buffers.
    fn memory(&self) -> MemoryPlace;

    /// Sees to it that the kernels of `groups` can be launched without a wait: where they are compiled on the machine, this waits for
    /// all of them at once, each compiled by a thread of its own as far as there are cores. Others are compiled when they are first
    /// launched.
    ///
    /// # Errors
    /// A kernel that does not compile.
    fn prepare(&self, groups: &[KernelGroup]) -> Result<()> {
        let _ = groups;
        Ok(())
    }

    /// A new device stream.
    fn device_stream(&self) -> Result<Self::DeviceStream>;

    /// `elements` zeros.
    fn allocate<T: Element>(
        &self,
        stream: &mut Self::DeviceStream,
        elements: usize,
    ) -> Result<Self::Buffer<T>>;

    /// The number of elements of a buffer.
    fn elements<T: Element>(buffer: &Self::Buffer<T>) -> usize;

    /// Room for the rounded copy of `elements` elements; none where activations are fp32.
    fn rounded_copy(
        &self,
        stream: &mut Self::DeviceStream,
        elements: usize,
    ) -> Result<Self::RoundedCopy>;

    /// Rounds `elements` elements of `source` from `start` to activation precision, into `copy`; does nothing where activations are
    /// fp32.
    fn round_to_activation(
        &self,
        stream: &mut Self::DeviceStream,
        copy: &mut Self::RoundedCopy,
        source: &Self::Buffer<f32>,
        start: usize,
        elements: usize,
    ) -> Result<()>;

    /// The buffer that matrix products read: every element is at its place in `source`.
    fn compute_buffer<'a>(
        source: &'a Self::Buffer<f32>,
        copy: &'a Self::RoundedCopy,
    ) -> &'a Self::Buffer<Self::Activation>;

    /// [`compute_buffer`](Self::compute_buffer), to be written.
    fn compute_buffer_mut<'a>(
        source: &'a mut Self::Buffer<f32>,
        copy: &'a mut Self::RoundedCopy,
    ) -> &'a mut Self::Buffer<Self::Activation>;

    /// The copy, to be written, where there is one.
    fn copies_mut(copy: &mut Self::RoundedCopy) -> Option<&mut Self::Buffer<Self::Activation>>;

    /// Copies from the host; `host` may be reused when the call returns.
    fn write<T: Element>(
        &self,
        stream: &mut Self::DeviceStream,
        out: SliceMut<'_, Self, T>,
        host: &[T],
    ) -> Result<()>;

    /// Copies to the host; waits for everything before it on the device stream.
    fn read<T: Element>(
        &self,
        stream: &mut Self::DeviceStream,
        host: &mut [T],
        from: Slice<'_, Self, T>,
    ) -> Result<()>;

    /// [`read`](Self::read) to memory of its own.
    fn to_vec<T: Element>(
        &self,
        stream: &mut Self::DeviceStream,
        from: Slice<'_, Self, T>,
    ) -> Result<Vec<T>> {
        let mut host = vec![T::zeroed(); from.elements];
        self.read(stream, &mut host, from)?;
        Ok(host)
    }

    /// `elements` zeros in pinned host memory, for this device and every other of the process.
    fn pinned<T: Element>(&self, elements: usize) -> Result<Self::Pinned<T>>;

    /// The contents of pinned memory. Waits for the copies into it; a caller that must not wait first asks an event.
    fn pinned_values<'a, T: Element>(&self, pinned: &'a Self::Pinned<T>) -> Result<&'a [T]>;

    /// The contents of pinned memory, to be changed. Waits for the copies into it and out of it.
    fn pinned_values_mut<'a, T: Element>(
        &self,
        pinned: &'a mut Self::Pinned<T>,
    ) -> Result<&'a mut [T]>;

    /// Copies to pinned memory from element `start` on, in the order of the device stream, and returns at once. Faults of kernels
    /// are answered by other calls.
    ///
    /// # Errors
    /// A range that leaves the pinned memory.
    fn read_async<T: Element>(
        &self,
        stream: &mut Self::DeviceStream,
        to: &mut Self::Pinned<T>,
        start: usize,
        from: Slice<'_, Self, T>,
    ) -> Result<()>;

    /// Copies from pinned memory from element `start` on, in the order of the device stream, and returns at once.
    ///
    /// # Errors
    /// A range that leaves the pinned memory.
    fn write_async<T: Element>(
        &self,
        stream: &mut Self::DeviceStream,
        out: SliceMut<'_, Self, T>,
        from: &Self::Pinned<T>,
        start: usize,
    ) -> Result<()>;

    /// Lets kernels of this device read the buffers of `peer`, those that are there and those to come, if they can.
    ///
    /// A view does not say whose buffer it is of: a kernel may be given one of a peer where its documentation says so. Both
    /// device streams must have been ordered by events: what a peer writes must have been written before it is read, and
    /// must not be written again or dropped before it has been read.
    fn reach(&self, peer: &Self) -> Result<PeerAccess>;

    /// Makes `from` readable to others: a device with a memory of its own shares it in place, the host shares a copy.
    ///
    /// Before others read it, their device streams wait for an event behind the write; before it is written again, the owner's
    /// stream waits for an event behind the reads.
    ///
    /// # Errors
    /// A host without room for the copy.
    fn share<T: Element>(
        &self,
        stream: &mut Self::DeviceStream,
        from: Slice<'_, Self, T>,
    ) -> Result<Shared<Self, T>>;

    /// Shared elements in the host's memory, read in place; `None` where they lie in a memory of the device's own.
    fn host_view<T: Element>(shared: &Shared<Self, T>) -> Option<HostView<T>> {
        let _ = shared;
        None
    }

    /// Opens the vendor's library that moves bytes between devices of several processes.
    ///
    /// # Errors
    /// A library that is not there or is too old; a device that has none.
    fn collective_library(&self) -> Result<CollectiveLibrary> {
        Err(KernelError::shape("group", "device", "one with a library of collectives", "the host"))
    }

    /// Begins to join a group of devices of several processes as a rank of it; [`exchange`](Self::exchange) waits until all
    /// have joined.
    ///
    /// # Errors
    /// An error of the library; a device that has no such library.
    fn join_group(
        &self,
        library: &CollectiveLibrary,
        id: GroupId,
        rank_of: (usize, usize),
    ) -> Result<GroupMember> {
        let _ = (library, id, rank_of);
        Err(KernelError::shape("group", "device", "one with a library of collectives", "the host"))
    }

    /// Sends each of `sends` to its rank, and receives the ranges `receives` of `into` from theirs, all at once: the first range
    /// that this rank sends to another arrives in the first that the other receives from this one, and so on. Returns when it is
    /// enqueued.
    ///
    /// # Errors
    /// An error of the library; a group that was aborted; a range that leaves `into`.
    fn exchange<T: Element>(
        &self,
        stream: &mut Self::DeviceStream,
        member: &GroupMember,
        sends: &[(usize, Slice<'_, Self, T>)],
        into: SliceMut<'_, Self, T>,
        receives: &[(usize, Range<usize>)],
    ) -> Result<()> {
        let _ = (stream, member, sends, into, receives);
        Err(KernelError::shape("group", "device", "one with a library of collectives", "the host"))
    }

    /// Runs a collective of the library over `from` of all ranks: for a reduce-scatter `out` is this rank's share of the sums, for
    /// an all-gather `from` is this rank's share of `out`. To be measured beside [`exchange`](Self::exchange): the library adds in
    /// an order of its own. Returns when it is enqueued.
    ///
    /// # Errors
    /// An error of the library; a group that was aborted; sizes of which one is not the other times the number of ranks.
    fn library_collective(
        &self,
        stream: &mut Self::DeviceStream,
        member: &GroupMember,
        what: LibraryCollective,
        out: SliceMut<'_, Self, f32>,
        from: Slice<'_, Self, f32>,
    ) -> Result<()> {
        let _ = (stream, member, what, out, from);
        Err(KernelError::shape("group", "device", "one with a library of collectives", "the host"))
    }

    /// `out = from`, on the device.
    fn copy<T: Element>(
        &self,
        stream: &mut Self::DeviceStream,
        out: SliceMut<'_, Self, T>,
        from: Slice<'_, Self, T>,
    ) -> Result<()>;

    /// `out = 0`.
    fn fill_zero<T: Element>(
        &self,
        stream: &mut Self::DeviceStream,
        out: SliceMut<'_, Self, T>,
    ) -> Result<()>;

    /// The point after everything enqueued so far.
    fn record(&self, stream: &mut Self::DeviceStream) -> Result<Self::Event>;

    /// The same, with the time at which the device reaches the point. Takes longer on the device and on the host.
    fn record_timed(&self, stream: &mut Self::DeviceStream) -> Result<Self::Event>;

    /// Makes all work that is enqueued on `stream` from now on wait until `event` is reached. The event may belong to another
    /// device stream, and to another device of the process. The host does not wait.
    fn wait_for(&self, stream: &mut Self::DeviceStream, event: &Self::Event) -> Result<()>;

    /// Whether the device has reached `event`.
    fn is_complete(&self, event: &Self::Event) -> Result<bool>;

    /// Waits until the device has reached `event`.
    fn wait(&self, event: &Self::Event) -> Result<()>;

    /// Milliseconds between two [timed](Self::record_timed) points of one device, both of which it has reached; of different device streams
    /// below 0 where `to` was reached first, or 0.
    ///
    /// # Errors
    /// A point whose time was not noted, or a device that fails.
    fn elapsed_milliseconds(&self, from: &Self::Event, to: &Self::Event) -> Result<f64>;

    /// Records the kernels that `enqueue` enqueues, instead of running them, so that [`replay`](Self::replay) can enqueue them
    /// all at once as often as they are wanted. `None` on a device where that saves nothing: then they are enqueued as usual.
    ///
    /// A replay runs on the buffers of the recording. The same calls must have run once before on this device stream, so that all scratch
    /// memory is there and all kernels are loaded. The recording ends with `enqueue`, also where that fails or panics. No kernel in it may write
    /// what another of them reads as a parameter: weights, biases and coefficients of norms, products, convolutions and scans, and
    /// lengths of pasts. Kernels may read these before the kernels ahead of them have ended.
    ///
    /// # Errors
    /// An error of `enqueue`; [`KernelError::NotRecordable`](crate::KernelError::NotRecordable) where `enqueue` allocates, reads or
    /// writes from the host, records events or graphs, or needs scratch memory or kernels that are not there yet.
    fn record_graph(
        &self,
        stream: &mut Self::DeviceStream,
        enqueue: &mut dyn FnMut(&mut Self::DeviceStream) -> Result<()>,
    ) -> Result<Option<Self::Graph>>;

    /// Enqueues the recorded kernels, on the device stream of the recording.
    ///
    /// # Errors
    /// Another device stream than that of the recording. A fault of a kernel in the graph, such as a token outside the
    /// vocabulary, is answered by the next read.
    fn replay(&self, stream: &mut Self::DeviceStream, graph: &Self::Graph) -> Result<()>;

    /// Starts to note the device time of every kernel; a device that cannot tell notes nothing.
    fn start_profile(&self) {}

    /// Ends what [`start_profile`](Self::start_profile) began: device time by kernel, the longest first.
    fn finish_profile(&self) -> Result<Vec<KernelTime>> {
        Ok(Vec::new())
    }
}
