//! The interface of a GPU vendor that the backend needs; it knows no kernel.

use std::ffi::c_void;
use std::ptr::NonNull;

use bytemuck::{Pod, Zeroable};

use crate::backend::{Output, PeerAccess};
use crate::error::Result;
use crate::gpu::inventory::Inventory;
use crate::gpu::source::{Source, SourceOptions};

/// A place in device memory, as kernels are given it.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable, Hash)]
pub struct Address(pub u64);

impl Address {
    /// Nothing: what a kernel is given for an argument that is not there.
    pub const NULL: Self = Self(0);

    /// The place `bytes` further on.
    #[must_use]
    pub fn offset(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// Whether a device notes when it reaches an event, which takes it and the host longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timing {
    /// The device notes the time.
    Noted,
    /// The device notes no time.
    Unknown,
}

/// The properties of a device that launchers and messages need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceProperties {
    /// `cuda`, `rocm` or `emulator`.
    pub backend: &'static str,
    /// The device's name, such as `NVIDIA H200`.
    pub name: String,
    /// The architecture that kernels are compiled for, such as `sm_90a`.
    pub architecture: String,
    /// Lanes of a warp: 32 or 64.
    pub warp: u32,
    /// Multiprocessors, or compute units.
    pub multiprocessors: u32,
    /// Whether groups of warps multiply bf16 together, as `GROUP_PRODUCTS` of `dialect.h` says to kernels.
    pub group_products: bool,
    /// The most shared memory that one block can have.
    pub shared_bytes_per_block: usize,
    /// The matrix library, its version, and a digest of the algorithms that it chooses, where it chooses.
    pub matrix_library: String,
    /// The library that moves bytes between devices of several processes, by the name that it is opened by, where there is one for
    /// such devices.
    pub collective_library: Option<&'static str>,
}

/// The most rows of which a token's kernels want all shared memory: one row is 2 % faster so on an H200, two are 1 % slower and four 2 %.
const ROWS_OF_SHARED_MEMORY: usize = 1;

/// The earliest point at which the blocks of a kernel may begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// After everything before the kernel has ended.
    #[default]
    Ordered,
    /// In a recording, while the kernel before it still runs, where the device can do that: every thread of the kernel waits for
    /// that one itself, by `await_previous` of `dialect.h`, which says why that is enough.
    Early {
        /// Whether as much of a multiprocessor's memory as goes shall be shared memory. Kernels that want different splits do not
        /// overlap: so all of a token want this one, or none.
        all_shared: bool,
    },
}

/// The shape of a launch, and when it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks in x, y and z; y and z at most 65,535.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: usize,
    /// The earliest point at which its blocks may begin.
    pub start: Start,
}

impl Launch {
    /// The same, of a kernel of `rows` rows that waits for the one before it.
    #[must_use]
    pub fn early(self, rows: usize) -> Self {
        Self { start: Start::Early { all_shared: rows <= ROWS_OF_SHARED_MEMORY }, ..self }
    }
}

/// Rows of bf16 in device memory, `[samples, rows, heads, columns]`, and the tiles of 64 columns that kernels cut out of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TiledRows {
    /// Sample 0, row 0, head 0, column 0; a multiple of 16, as all distances are.
    pub address: Address,
    /// Elements of a row of a head.
    pub columns: u64,
    /// Rows of a sample.
    pub rows: u64,
    /// Heads side by side in a row.
    pub heads: u64,
    /// Samples.
    pub samples: u64,
    /// Bytes between rows.
    pub row_bytes: u64,
    /// Bytes between heads.
    pub head_bytes: u64,
    /// Bytes between samples.
    pub sample_bytes: u64,
    /// Rows of a tile.
    pub tile_rows: u32,
}

impl TiledRows {
    /// Distances that copy engines know are below this many bytes.
    pub const MOST_BYTES: u64 = 1 << 40;
}

/// [`TiledRows`] as the device's copy engine reads them, `TileMap` of `group_product.h`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct TileMap(pub [u64; 16]);

/// The type of a matrix product's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementKind {
    /// 32-bit floating point.
    F32,
    /// The upper half of one.
    Bf16,
}

impl ElementKind {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// A matrix of a [`MatrixProduct`]: one of its strides is 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Row 0, column 0.
    pub address: Address,
    /// Elements between rows, or between columns where `transposed`.
    pub stride: usize,
    /// Whether columns, not rows, are contiguous runs in memory.
    pub transposed: bool,
    /// The type of the elements.
    pub element: ElementKind,
    /// A power of two up to 16 that the address of every row is a multiple of, in bytes. It follows from the strides
    /// alone, not from where the matrix begins: so it is the same for any rows of a larger matrix.
    pub alignment: usize,
}

/// Which sizes of a product may change without changing its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rows {
    /// m is a number of rows of a microbatch: the algorithm must not depend on it.
    Free,
    /// m, n and k are all those of a grain and a parameter.
    Fixed,
}

/// A vector that is added to every row of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bias {
    /// `bias[n]`, at a multiple of 16 bytes.
    pub address: Address,
    /// The type of the elements: that of the output.
    pub element: ElementKind,
}

/// Products of one shape that are formed together: the operands of entry i begin i times `out`, `a` and `b` elements after those of
/// the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Batch {
    /// Products, at least 1.
    pub entries: usize,
    /// Elements from an output to the next; at least as many as one has.
    pub out: usize,
    /// Elements from a left factor to the next.
    pub a: usize,
    /// Elements from a right factor to the next.
    pub b: usize,
}

/// `out[m, n] = (base[m, n] +) a[m, k] b[k, n] (+ bias[n])`, accumulated in fp32 in one pass over k, never split; where it adds to
/// fp32, the complete sum is added with one rounding. (To bf16, a library may round the product first.) A bias is added last: to an
/// fp32 output with one more rounding, to a bf16 output before the only rounding.
///
/// The algorithm is a function of everything except `m` ([`Rows::Free`]), the addresses, and the number and distance of a batch's
/// entries: an entry has the same bits in a batch of any size, and at any place in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixProduct {
    /// `out[m, n]`, not transposed.
    pub out: Operand,
    /// `a[m, k]`
    pub a: Operand,
    /// `b[k, n]`
    pub b: Operand,
    /// Rows of `out`.
    pub m: usize,
    /// Columns of `out`.
    pub n: usize,
    /// Terms of each sum.
    pub k: usize,
    /// Whether it replaces or adds.
    pub output: Output,
    /// The matrix that it adds to, laid out as `out`; it may be `out` itself.
    pub base: Address,
    /// The vector that is added to its rows: only where the driver says that it [adds](Driver::adds_bias) it.
    pub bias: Option<Bias>,
    /// Whether m may change.
    pub rows: Rows,
    /// The batch that this is the first entry of, where there is one: without a bias.
    pub batch: Option<Batch>,
}

impl MatrixProduct {
    /// The products of the batch, one by one and in order.
    #[cfg(any(feature = "cuda", feature = "rocm", feature = "emulator"))]
    pub(crate) fn each(self) -> impl Iterator<Item = Self> {
        let Batch { entries, out, a, b } =
            self.batch.unwrap_or(Batch { entries: 1, out: 0, a: 0, b: 0 });
        let at = |operand: Operand, elements: usize| Operand {
            address: operand.address.offset(elements * operand.element.bytes()),
            ..operand
        };
        (0..entries).map(move |entry| Self {
            out: at(self.out, entry * out),
            a: at(self.a, entry * a),
            b: at(self.b, entry * b),
            base: self.base.offset(entry * out * self.out.element.bytes()),
            batch: None,
            ..self
        })
    }
}

/// One vendor's interface: memory, order, modules and the matrix library of one device.
///
/// Every call can be made from any thread. What is enqueued on one queue runs in order.
pub trait Driver: Send + Sync + Sized + 'static {
    /// Device memory. When it is dropped, it is freed after everything enqueued so far.
    type Memory: Send + Sync;
    /// An in-order queue.
    type Queue: Send;
    /// Host memory that the device reaches by itself; given back when it is dropped.
    type HostMemory: Send + Sync;
    /// A point in a queue.
    type Event: Clone + Send + Sync;
    /// Compiled kernels.
    type Module: Send + Sync;
    /// One of them; keeps its module.
    type Kernel: Clone + Send + Sync;
    /// Recorded launches.
    type Graph: Send;

    /// The properties of the device.
    fn properties(&self) -> &DeviceProperties;

    /// An identifier that no other device of any machine has, if there is one.
    fn identity(&self) -> Option<String>;

    /// Bytes of device memory that are free now, and all there are.
    fn memory_bytes(&self) -> Result<[usize; 2]>;

    /// A new queue.
    fn queue(&self) -> Result<Self::Queue>;

    /// `bytes` zeroed bytes, aligned to 256.
    fn allocate(&self, queue: &mut Self::Queue, bytes: usize) -> Result<Self::Memory>;

    /// The address at which memory begins.
    fn address(memory: &Self::Memory) -> Address;

    /// Copies from the host; `from` may be reused when the call returns.
    fn upload(
        &self,
        queue: &mut Self::Queue,
        to: &Self::Memory,
        offset_bytes: usize,
        from: &[u8],
    ) -> Result<()>;

    /// Copies to the host; waits for everything before it on the queue.
    fn download(
        &self,
        queue: &mut Self::Queue,
        to: &mut [u8],
        from: &Self::Memory,
        offset_bytes: usize,
    ) -> Result<()>;

    /// `bytes` zeroed bytes of host memory for every device of the process, aligned to 256.
    fn allocate_host(&self, bytes: usize) -> Result<Self::HostMemory>;

    /// The address at which host memory begins.
    fn host_pointer(memory: &Self::HostMemory) -> NonNull<u8>;

    /// Enqueues a copy of `bytes` from host memory.
    ///
    /// # Safety
    /// Nothing writes the bytes of the host memory, and it stays, until the queue has copied them.
    unsafe fn upload_async(
        &self,
        queue: &mut Self::Queue,
        to: (&Self::Memory, usize),
        from: (&Self::HostMemory, usize),
        bytes: usize,
    ) -> Result<()>;

    /// Enqueues a copy of `bytes` to host memory.
    ///
    /// # Safety
    /// Nothing reads or writes the bytes of the host memory, and it stays, until the queue has copied them.
    unsafe fn download_async(
        &self,
        queue: &mut Self::Queue,
        to: (&Self::HostMemory, usize),
        from: (&Self::Memory, usize),
        bytes: usize,
    ) -> Result<()>;

    /// Lets kernels of this device read the memory of `peer`, where the two can.
    fn reach(&self, peer: &Self) -> Result<PeerAccess>;

    /// The queue as libraries take it, for a call from this thread. Their work runs behind all work that was enqueued before.
    fn for_library(&self, queue: &mut Self::Queue) -> Result<*mut c_void>;

    /// Copies `bytes` on the device between two memories.
    fn copy(
        &self,
        queue: &mut Self::Queue,
        to: (&Self::Memory, usize),
        from: (&Self::Memory, usize),
        bytes: usize,
    ) -> Result<()>;

    /// Sets bytes to zero.
    fn fill_zero(
        &self,
        queue: &mut Self::Queue,
        memory: &Self::Memory,
        offset_bytes: usize,
        bytes: usize,
    ) -> Result<()>;

    /// The point after everything enqueued so far.
    fn record(&self, queue: &mut Self::Queue, timing: Timing) -> Result<Self::Event>;

    /// Makes all work that is enqueued from now on wait for `event`, which may belong to another queue and to another device.
    fn wait_for(&self, queue: &mut Self::Queue, event: &Self::Event) -> Result<()>;

    /// Whether the device has reached `event`.
    fn is_complete(&self, event: &Self::Event) -> Result<bool>;

    /// Waits until the device has reached `event`.
    fn wait(&self, event: &Self::Event) -> Result<()>;

    /// Waits until the device has reached `event`, or fails; called before memory that the work ahead of the event uses is freed.
    fn settle(event: &Self::Event);

    /// Milliseconds of device time between two events that have been reached and whose times were noted.
    fn elapsed_milliseconds(&self, from: &Self::Event, to: &Self::Event) -> Result<f32>;

    /// Compiles a source for the device, or takes it from the cache.
    fn load(&self, source: &'static Source, options: SourceOptions) -> Result<Self::Module>;

    /// A kernel of a module.
    fn kernel(&self, module: &Self::Module, name: &'static str) -> Result<Self::Kernel>;

    /// How kernels find tiles of `rows` by the device's copy engine, where the driver can say so: a value for their arguments, which is
    /// made on the host alone.
    ///
    /// # Errors
    /// The driver refuses these rows.
    fn tile_map(&self, rows: &TiledRows) -> Result<Option<TileMap>>;

    /// Enqueues a kernel; `arguments` are the bytes of its struct.
    ///
    /// # Safety
    /// Every address among the arguments must name memory of this device that is at least as large as the
    /// kernel reaches, and `arguments` must be of the kernel's own struct.
    unsafe fn launch(
        &self,
        queue: &mut Self::Queue,
        kernel: &Self::Kernel,
        launch: Launch,
        arguments: &[u8],
    ) -> Result<()>;

    /// Whether the matrix library forms `product` with its bias. The answer does not depend on m where rows are free.
    ///
    /// # Errors
    /// An error of the library.
    fn adds_bias(&self, queue: &mut Self::Queue, product: &MatrixProduct) -> Result<bool>;

    /// Enqueues a matrix product.
    ///
    /// # Safety
    /// The operands, of every entry of a batch, must lie inside memory of this device, and `out` must overlap neither `a` nor `b` nor
    /// that of another entry.
    unsafe fn matmul(&self, queue: &mut Self::Queue, product: MatrixProduct) -> Result<()>;

    /// Whether launches can be recorded.
    fn has_graphs(&self) -> bool;

    /// Begins to record the work that is enqueued on `queue`, instead of running it. Until the end the queue may only be given
    /// launches, products, copies on the device and zeroing.
    fn begin_graph(&self, queue: &mut Self::Queue) -> Result<()>;

    /// Ends the recording, also where it answers an error. Memory that the launches name stays there for as long as the
    /// graph does, even if it is dropped before.
    ///
    /// # Errors
    /// No recording was begun, or it was spoilt.
    fn end_graph(&self, queue: &mut Self::Queue) -> Result<Self::Graph>;

    /// Enqueues the recorded launches.
    fn replay(&self, queue: &mut Self::Queue, graph: &Self::Graph) -> Result<()>;
}

/// Devices of one maker in this machine, by their numbers.
pub trait Installed: Driver {
    /// The number of devices, at least 1.
    ///
    /// # Errors
    /// Why there is none: no driver library, one that is too old or does not fit the kernel's, or no device; else what made the
    /// driver fail.
    fn device_count() -> Result<usize>;

    /// The number of devices that work together, the first among them: they are of one kind and read each other's memory.
    ///
    /// # Errors
    /// As [`device_count`](Self::device_count).
    fn together() -> Result<usize>;

    /// The maker's devices and libraries, each as found or with the error.
    fn inventory() -> Inventory;

    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// No such device, one that is too old, a library that is missing or too old, or an error of the driver.
    fn open(ordinal: usize) -> Result<Self>;
}
