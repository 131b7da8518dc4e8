//! [`Driver`] for any vendor's GPU.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use super::event::Event;
use super::graph::Graph;
use super::host_memory::HostMemory;
use super::memory::Memory;
use super::module::{Kernel, Module};
use super::queue::Queue;
use super::table::{self, Code, RawTileMap, Table};
use super::{Vendor, VendorDriver, peer};
use crate::backend::PeerAccess;
use crate::error::Result;
use crate::gpu::driver::{
    Address, DeviceProperties, Driver, Launch, MatrixProduct, TileMap, TiledRows, Timing,
};
use crate::gpu::source::{Source, SourceOptions};

impl<V: Vendor> VendorDriver<V> {
    pub(super) fn name(&self) -> &str {
        &self.properties.name
    }

    fn table(&self) -> &'static Table {
        self.pool.table()
    }

    /// `answered`, said of this device.
    fn on<T>(&self, attempted: &'static str, answered: std::result::Result<T, Code>) -> Result<T> {
        self.table().on(self.name(), attempted, answered)
    }

    /// Makes the device this thread's own: what every call begins with.
    fn bind(&self) -> Result<()> {
        self.on("binding a thread", self.pool.context().bind())
    }
}

impl<V: Vendor> Driver for VendorDriver<V> {
    type Memory = Memory;
    type Queue = Queue;
    type HostMemory = HostMemory;
    type Event = Event;
    type Module = Arc<Module>;
    type Kernel = Kernel;
    type Graph = Graph;

    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn identity(&self) -> Option<String> {
        let uuid = self.pool.context().uuid().ok()?;
        Some(uuid.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    fn memory_bytes(&self) -> Result<[usize; 2]> {
        self.bind()?;
        self.on("asking for free memory", self.pool.context().memory_bytes())
    }

    fn queue(&self) -> Result<Queue> {
        self.bind()?;
        Queue::new(&self.pool, self.name())
    }

    fn allocate(&self, queue: &mut Queue, bytes: usize) -> Result<Memory> {
        self.bind()?;
        Memory::zeroed(&self.pool, self.name(), queue, bytes)
    }

    fn address(memory: &Memory) -> Address {
        memory.address()
    }

    fn upload(
        &self,
        queue: &mut Queue,
        to: &Memory,
        offset_bytes: usize,
        from: &[u8],
    ) -> Result<()> {
        self.bind()?;
        let to = to.range(offset_bytes, from.len())?;
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: the range lies inside the memory. From pageable memory the call returns once `from` was read.
        let copied =
            unsafe { (self.table().upload)(to, from.as_ptr().cast(), from.len(), queue.stream()) };
        self.on("copying to the device", copied.result())
    }

    fn download(
        &self,
        queue: &mut Queue,
        to: &mut [u8],
        from: &Memory,
        offset_bytes: usize,
    ) -> Result<()> {
        self.bind()?;
        let from = from.range(offset_bytes, to.len())?;
        if !to.is_empty() {
            // SAFETY: the range lies inside the memory, and `to` outlives the copy, which is waited for below.
            let copied = unsafe {
                (self.table().download)(to.as_mut_ptr().cast(), from, to.len(), queue.stream())
            };
            self.on("copying to the host", copied.result())?;
        }
        // SAFETY: the stream is alive.
        let waited = unsafe { (self.table().stream_synchronize)(queue.stream()) };
        self.on("waiting for the device", waited.result())
    }

    fn allocate_host(&self, bytes: usize) -> Result<HostMemory> {
        self.bind()?;
        HostMemory::zeroed(&self.pool, self.name(), bytes)
    }

    fn host_pointer(memory: &HostMemory) -> NonNull<u8> {
        memory.first()
    }

    unsafe fn upload_async(
        &self,
        queue: &mut Queue,
        (to, to_offset): (&Memory, usize),
        (from, from_offset): (&HostMemory, usize),
        bytes: usize,
    ) -> Result<()> {
        self.bind()?;
        let (to, from) = (to.range(to_offset, bytes)?, from.range(from_offset, bytes)?);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both ranges lie inside their memories; the caller guarantees the validity of the host's.
        let copied = unsafe { (self.table().upload)(to, from.cast(), bytes, queue.stream()) };
        self.on("copying to the device", copied.result())
    }

    unsafe fn download_async(
        &self,
        queue: &mut Queue,
        (to, to_offset): (&HostMemory, usize),
        (from, from_offset): (&Memory, usize),
        bytes: usize,
    ) -> Result<()> {
        self.bind()?;
        let (to, from) = (to.range(to_offset, bytes)?, from.range(from_offset, bytes)?);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: as above.
        let copied = unsafe { (self.table().download)(to.cast(), from, bytes, queue.stream()) };
        self.on("copying to the host", copied.result())
    }

    fn reach(&self, peer: &Self) -> Result<PeerAccess> {
        self.bind()?;
        let device = |driver: &Self| driver.pool.context().device();
        peer::reach(self.table(), self.name(), device(self), device(peer))
    }

    fn copy(
        &self,
        queue: &mut Queue,
        (to, to_offset): (&Memory, usize),
        (from, from_offset): (&Memory, usize),
        bytes: usize,
    ) -> Result<()> {
        self.bind()?;
        let (to, from) = (to.range(to_offset, bytes)?, from.range(from_offset, bytes)?);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both ranges lie inside their memories.
        let copied = unsafe { (self.table().copy)(to, from, bytes, queue.stream()) };
        self.on("copying on the device", copied.result())
    }

    fn fill_zero(
        &self,
        queue: &mut Queue,
        memory: &Memory,
        offset_bytes: usize,
        bytes: usize,
    ) -> Result<()> {
        self.bind()?;
        let at = memory.range(offset_bytes, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the range lies inside the memory.
        let filled = unsafe { (self.table().fill_bytes)(at, 0, bytes, queue.stream()) };
        self.on("clearing memory", filled.result())
    }

    fn record(&self, queue: &mut Queue, timing: Timing) -> Result<Event> {
        self.bind()?;
        Event::record(&self.pool, self.name(), queue, timing)
    }

    fn for_library(&self, queue: &mut Queue) -> Result<*mut c_void> {
        self.bind()?;
        Ok(queue.raw())
    }

    fn wait_for(&self, queue: &mut Queue, event: &Event) -> Result<()> {
        self.bind()?;
        queue.wait_for(event, self.name())
    }

    fn is_complete(&self, event: &Event) -> Result<bool> {
        self.bind()?;
        event.is_complete(self.name())
    }

    fn wait(&self, event: &Event) -> Result<()> {
        self.bind()?;
        event.wait(self.name())
    }

    fn settle(event: &Event) {
        event.settle();
    }

    fn elapsed_milliseconds(&self, from: &Event, to: &Event) -> Result<f32> {
        self.bind()?;
        from.milliseconds_to(to, self.name())
    }

    fn load(&self, source: &'static Source, options: SourceOptions) -> Result<Arc<Module>> {
        self.bind()?;
        let image = V::compile(source, options, &self.properties)?;
        Module::load(&self.pool, self.name(), &image, source.name).map(Arc::new)
    }

    fn kernel(&self, module: &Arc<Module>, name: &'static str) -> Result<Kernel> {
        self.bind()?;
        Module::kernel(module, self.name(), name, self.properties.shared_bytes_per_block)
    }

    fn tile_map(&self, rows: &TiledRows) -> Result<Option<TileMap>> {
        const PANEL_COLUMNS: u32 = 64;
        let Some(encode) = self.table().encode_tiles else { return Ok(None) };
        let sizes = [rows.columns, rows.rows, rows.heads, rows.samples];
        let bytes_between = [rows.row_bytes, rows.head_bytes, rows.sample_bytes];
        let tile = [PANEL_COLUMNS, rows.tile_rows, 1, 1];
        let steps = [1; 4];
        let mut map = RawTileMap([0; 16]);
        // SAFETY: it writes one map, and reads four numbers from each array but the strides, from which three. No memory of the device
        // is touched.
        let encoded = unsafe {
            encode(
                &raw mut map,
                table::TILE_ELEMENT_BF16,
                sizes.len() as u32,
                rows.address.0,
                sizes.as_ptr(),
                bytes_between.as_ptr(),
                tile.as_ptr(),
                steps.as_ptr(),
                table::TILE_INTERLEAVE_NONE,
                table::TILE_SWIZZLE_128,
                table::TILE_PROMOTION_256,
                table::TILE_FILL_ZERO,
            )
        };
        self.on("making a map of tiles", encoded.result())?;
        Ok(Some(TileMap(map.0)))
    }

    unsafe fn launch(
        &self,
        queue: &mut Queue,
        kernel: &Kernel,
        launch: Launch,
        arguments: &[u8],
    ) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller guarantees the validity of the arguments.
        unsafe { kernel.launch(self.table(), self.name(), queue, launch, arguments) }
    }

    fn adds_bias(&self, queue: &mut Queue, product: &MatrixProduct) -> Result<bool> {
        self.bind()?;
        V::adds_bias(&self.matrices, self, queue, product)
    }

    unsafe fn matmul(&self, queue: &mut Queue, product: MatrixProduct) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller guarantees the validity of the operands.
        unsafe { V::multiply(&self.matrices, self, queue, product) }
    }

    fn has_graphs(&self) -> bool {
        true
    }

    fn begin_graph(&self, queue: &mut Queue) -> Result<()> {
        self.bind()?;
        queue.begin_recording(self.name())
    }

    fn end_graph(&self, queue: &mut Queue) -> Result<Graph> {
        self.bind()?;
        queue.end_recording(self.name())
    }

    fn replay(&self, queue: &mut Queue, graph: &Graph) -> Result<()> {
        self.bind()?;
        graph.launch(self.name(), queue)
    }
}
