//! A [`Driver`] that runs GPU kernels on the CPU, for tests.
//!
//! The host's `g++` compiles each source with `kernels/gpu/emulator.h`: a GPU thread becomes a
//! fiber, a running block an operating-system thread, which `kernels/gpu/emulator_launch.cpp`
//! schedules. So launchers, kernels and everything above them run without a GPU, at either warp
//! width and with several orders of threads. The header lists what is not modelled.

mod matmul;
mod memory;
mod module;
mod queue;
mod schedule;

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::available_parallelism;

use self::matmul::matmul;
use self::memory::Room;
pub use self::memory::{EmulatorHostMemory, EmulatorMemory};
use self::module::{Emulated, Library, compile, includes};
use self::queue::Step;
pub use self::queue::{EmulatorGraph, EmulatorQueue};
pub use self::schedule::{EmulatorEvent, Schedule};
use crate::backend::PeerAccess;
use crate::error::{KernelError, Result};
use crate::float_environment::FloatEnvironment;
use crate::gpu::driver::{
    Address, DeviceProperties, Driver, Launch, MatrixProduct, TileMap, TiledRows, Timing,
};
use crate::gpu::source::{Source, SourceOptions};

/// Shared memory of a block, as the smallest of the devices of that warp that kernels are written for has it.
fn shared_bytes_per_block(warp: u32) -> usize {
    if warp == 32 { 99 << 10 } else { 64 << 10 }
}

/// The same for devices whose groups of warps multiply together.
const SHARED_BYTES_OF_GROUPS: usize = 227 << 10;

/// The settings of an emulated GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmulatorSettings {
    /// Lanes of a warp: 32 or 64.
    pub warp: u32,
    /// The seed of the order in which the threads of a block run; with 0 they run in ascending order.
    pub seed: u64,
}

/// A change of a source's text before it is compiled, so that tests can see a broken kernel fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceChange {
    /// The file of kernels, or a header of some.
    pub source: &'static str,
    /// The text that is replaced. The source must contain it.
    pub from: &'static str,
    /// The replacement.
    pub to: &'static str,
}

/// An emulated GPU.
pub struct Emulator {
    settings: EmulatorSettings,
    changes: Vec<SourceChange>,
    properties: DeviceProperties,
    workers: u32,
    room: Arc<Room>,
    host_traffic: Arc<HostTraffic>,
}

/// Bytes that crossed between the host and an emulated device.
#[derive(Debug, Default)]
pub struct HostTraffic {
    to_host: AtomicU64,
    to_device: AtomicU64,
}

impl HostTraffic {
    /// Bytes that were copied to the host so far.
    pub fn to_host(&self) -> u64 {
        self.to_host.load(Ordering::Relaxed)
    }

    /// Bytes that were copied to the device.
    pub fn to_device(&self) -> u64 {
        self.to_device.load(Ordering::Relaxed)
    }
}

impl Emulator {
    /// An emulated GPU.
    ///
    /// # Errors
    /// A warp width that is neither 32 nor 64.
    pub fn new(settings: EmulatorSettings) -> Result<Self> {
        if ![32, 64].contains(&settings.warp) {
            return Err(KernelError::shape("emulator", "warp", "32 or 64", settings.warp));
        }
        let workers = available_parallelism().map_or(1, NonZeroUsize::get) as u32;
        let properties = DeviceProperties {
            backend: "emulator",
            name: format!("emulator with warps of {}", settings.warp),
            architecture: format!("warp{}", settings.warp),
            warp: settings.warp,
            // Few, and the same on every host, so that chains of scans are cut into segments.
            multiprocessors: 2,
            group_products: false,
            shared_bytes_per_block: shared_bytes_per_block(settings.warp),
            matrix_library: "host".to_owned(),
            collective_library: None,
        };
        let room = Room::new(Room::DEFAULT_BYTES, None);
        let host_traffic = Arc::default();
        Ok(Self { settings, changes: Vec::new(), properties, workers, room, host_traffic })
    }

    /// The same, with so much device memory.
    #[must_use]
    pub fn with_memory_bytes(self, bytes: usize) -> Self {
        let room = Room::new(bytes, self.room.schedule().cloned());
        Self { room, ..self }
    }

    /// The same, except that enqueued work runs when the schedule reaches it. Several devices may share a schedule.
    #[must_use]
    pub fn with_schedule(self, schedule: &Arc<Schedule>) -> Self {
        let room = Room::new(self.room.bytes()[1], Some(Arc::clone(schedule)));
        Self { room, ..self }
    }

    /// The same, of a device whose groups of warps multiply together, as Hopper's do.
    ///
    /// # Errors
    /// Warps of 64 threads, which no such device has.
    pub fn with_group_products(self) -> Result<Self> {
        if self.settings.warp != 32 {
            let warp = self.settings.warp;
            return Err(KernelError::shape("emulator", "warp of groups", 32, warp));
        }
        let properties = DeviceProperties {
            name: format!("{} in groups", self.properties.name),
            architecture: format!("{}groups", self.properties.architecture),
            group_products: true,
            shared_bytes_per_block: SHARED_BYTES_OF_GROUPS,
            ..self.properties
        };
        Ok(Self { properties, ..self })
    }

    /// The bytes that were copied between the host and this device, counted.
    pub fn host_traffic(&self) -> Arc<HostTraffic> {
        Arc::clone(&self.host_traffic)
    }

    /// Runs a step, now or later, or keeps it where the queue is being recorded.
    ///
    /// # Safety
    /// As for the driver's calls that enqueue it.
    unsafe fn enqueue(&self, queue: &mut EmulatorQueue, step: Step) -> Result<()> {
        let Some(step) = queue.record(step) else { return Ok(()) };
        let how = Running { seed: self.settings.seed, workers: self.workers };
        match &queue.scheduled {
            // SAFETY: the caller guarantees the validity of the step.
            None => unsafe { how.run(&step) },
            Some(scheduled) => {
                // SAFETY: as above; what the step names stays until it has run.
                scheduled.enqueue(Box::new(move || unsafe { how.run(&step) }));
                Ok(())
            }
        }
    }

    fn check_shared_bytes(&self, kernel: &EmulatorKernel, found: usize) -> Result<()> {
        let most = self.properties.shared_bytes_per_block;
        if found <= most {
            return Ok(());
        }
        let (what, expected) = ("shared bytes of a block", format!("at most {most}"));
        Err(KernelError::shape(kernel.name, what, expected, found))
    }

    /// The same, with a source broken on purpose. Each call breaks one more place.
    #[must_use]
    pub fn with_change(mut self, change: SourceChange) -> Self {
        self.changes.push(change);
        self
    }
}

/// How steps are run.
#[derive(Clone, Copy)]
struct Running {
    seed: u64,
    workers: u32,
}

impl Running {
    /// Runs a step to its end.
    ///
    /// # Safety
    /// All that it names must still be there.
    unsafe fn run(self, step: &Step) -> Result<()> {
        // A GPU is independent of the host's floating-point environment, but threads of a launch
        // inherit it here.
        let _standard = FloatEnvironment::standard();
        match step {
            Step::Launch { kernel, launch, arguments } => {
                // SAFETY: the caller guarantees the validity of the arguments.
                unsafe {
                    kernel.library.launch(kernel.name, *launch, arguments, self.seed, self.workers)
                }
            }
            Step::Product(product) => {
                // SAFETY: the caller guarantees the validity of the operands.
                unsafe { matmul(*product) };
                Ok(())
            }
            Step::Copy { to, from, bytes } => {
                // SAFETY: both ranges lay inside their memories, which are there. They may be one memory's.
                unsafe { std::ptr::copy(place(*from), place(*to), *bytes) };
                Ok(())
            }
            Step::Upload { to, from } => {
                // SAFETY: as above.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), place(*to), from.len()) };
                Ok(())
            }
            Step::Clear { at, bytes } => {
                // SAFETY: as above.
                unsafe { std::ptr::write_bytes(place(*at), 0, *bytes) };
                Ok(())
            }
            // SAFETY: the caller that recorded a step guaranteed its validity, and the graph has kept what it names.
            Step::Graph(graph) => graph.steps.iter().try_for_each(|step| unsafe { self.run(step) }),
        }
    }
}

/// A kernel and the library that holds it.
#[derive(Clone)]
pub struct EmulatorKernel {
    library: Arc<Library>,
    name: &'static str,
}

impl Driver for Emulator {
    type Memory = EmulatorMemory;
    type Queue = EmulatorQueue;
    type HostMemory = EmulatorHostMemory;
    type Event = EmulatorEvent;
    type Module = Arc<Library>;
    type Kernel = EmulatorKernel;
    type Graph = EmulatorGraph;

    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn identity(&self) -> Option<String> {
        None
    }

    fn memory_bytes(&self) -> Result<[usize; 2]> {
        Ok(self.room.bytes())
    }

    fn queue(&self) -> Result<EmulatorQueue> {
        Ok(EmulatorQueue::new(self.room.schedule().map(Schedule::queue)))
    }

    fn allocate(&self, queue: &mut EmulatorQueue, bytes: usize) -> Result<EmulatorMemory> {
        queue.check_idle("allocating")?;
        let device = || self.properties.name.clone();
        self.room
            .allocate(bytes)
            .ok_or_else(|| KernelError::OutOfMemory { bytes, device: device() })
    }

    fn address(memory: &EmulatorMemory) -> Address {
        memory.address()
    }

    fn upload(
        &self,
        queue: &mut EmulatorQueue,
        to: &EmulatorMemory,
        offset_bytes: usize,
        from: &[u8],
    ) -> Result<()> {
        queue.check_idle("copying to the device")?;
        let to = to.range(offset_bytes, from.len())?;
        self.host_traffic.to_device.fetch_add(from.len() as u64, Ordering::Relaxed);
        // SAFETY: the range lies inside the memory, which is borrowed mutably.
        unsafe { self.enqueue(queue, Step::Upload { to, from: from.to_vec() }) }
    }

    fn download(
        &self,
        queue: &mut EmulatorQueue,
        to: &mut [u8],
        from: &EmulatorMemory,
        offset_bytes: usize,
    ) -> Result<()> {
        queue.check_idle("copying to the host")?;
        let from = place(from.range(offset_bytes, to.len())?);
        self.host_traffic.to_host.fetch_add(to.len() as u64, Ordering::Relaxed);
        queue.finish()?;
        // SAFETY: the range lies inside the memory, whose bytes have all been written: with zeros first.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    fn allocate_host(&self, bytes: usize) -> Result<EmulatorHostMemory> {
        EmulatorHostMemory::zeroed(bytes)
    }

    fn host_pointer(memory: &EmulatorHostMemory) -> NonNull<u8> {
        memory.first()
    }

    unsafe fn upload_async(
        &self,
        queue: &mut EmulatorQueue,
        (to, to_offset): (&EmulatorMemory, usize),
        (from, from_offset): (&EmulatorHostMemory, usize),
        bytes: usize,
    ) -> Result<()> {
        queue.check_idle("copying to the device")?;
        let (to, from) = (to.range(to_offset, bytes)?, from.range(from_offset, bytes)?);
        self.host_traffic.to_device.fetch_add(bytes as u64, Ordering::Relaxed);
        // SAFETY: both ranges lie inside their memories; the caller guarantees the validity of the host's.
        unsafe { self.enqueue(queue, Step::Copy { to, from, bytes }) }
    }

    unsafe fn download_async(
        &self,
        queue: &mut EmulatorQueue,
        (to, to_offset): (&EmulatorHostMemory, usize),
        (from, from_offset): (&EmulatorMemory, usize),
        bytes: usize,
    ) -> Result<()> {
        queue.check_idle("copying to the host")?;
        let (to, from) = (to.range(to_offset, bytes)?, from.range(from_offset, bytes)?);
        self.host_traffic.to_host.fetch_add(bytes as u64, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { self.enqueue(queue, Step::Copy { to, from, bytes }) }
    }

    /// Libraries are not emulated: they run at once, when everything before has run.
    fn for_library(&self, queue: &mut EmulatorQueue) -> Result<*mut c_void> {
        queue.check_idle("calling a library")?;
        queue.finish()?;
        Ok(std::ptr::null_mut())
    }

    /// The memory of every emulated device is the host's.
    fn reach(&self, _: &Self) -> Result<PeerAccess> {
        Ok(PeerAccess::Direct)
    }

    fn copy(
        &self,
        queue: &mut EmulatorQueue,
        (to, to_offset): (&EmulatorMemory, usize),
        (from, from_offset): (&EmulatorMemory, usize),
        bytes: usize,
    ) -> Result<()> {
        let (to, from) = (to.range(to_offset, bytes)?, from.range(from_offset, bytes)?);
        // SAFETY: the ranges lie inside their memories, which a graph keeps.
        unsafe { self.enqueue(queue, Step::Copy { to, from, bytes }) }
    }

    fn fill_zero(
        &self,
        queue: &mut EmulatorQueue,
        memory: &EmulatorMemory,
        offset_bytes: usize,
        bytes: usize,
    ) -> Result<()> {
        let at = memory.range(offset_bytes, bytes)?;
        // SAFETY: the range lies inside the memory, which a graph keeps.
        unsafe { self.enqueue(queue, Step::Clear { at, bytes }) }
    }

    fn record(&self, queue: &mut EmulatorQueue, timing: Timing) -> Result<EmulatorEvent> {
        queue.check_idle("recording an event")?;
        Ok(match &queue.scheduled {
            Some(scheduled) => scheduled.record(timing),
            None => EmulatorEvent::reached(timing),
        })
    }

    fn wait_for(&self, queue: &mut EmulatorQueue, event: &EmulatorEvent) -> Result<()> {
        queue.check_idle("waiting for an event")?;
        match &queue.scheduled {
            Some(scheduled) => scheduled.wait_for(event),
            // Nothing can wait here, so the work that is waited for must run first.
            None => event.wait(),
        }
        Ok(())
    }

    fn is_complete(&self, event: &EmulatorEvent) -> Result<bool> {
        Ok(event.is_complete())
    }

    fn wait(&self, event: &EmulatorEvent) -> Result<()> {
        event.wait();
        Ok(())
    }

    fn settle(event: &EmulatorEvent) {
        event.wait();
    }

    fn elapsed_milliseconds(&self, from: &EmulatorEvent, to: &EmulatorEvent) -> Result<f32> {
        match [from, to].iter().all(|event| event.is_timed()) {
            true => Ok(0.0),
            false => Err(KernelError::untimed(&self.properties.name)),
        }
    }

    fn load(&self, source: &'static Source, options: SourceOptions) -> Result<Arc<Library>> {
        let is_held = |name: &str| name == source.name || includes(source.text, name);
        let changes: Vec<SourceChange> =
            self.changes.iter().copied().filter(|change| is_held(change.source)).collect();
        let device =
            Emulated { warp: self.settings.warp, group_products: self.properties.group_products };
        compile(source, options, device, &changes)
    }

    fn kernel(&self, module: &Arc<Library>, name: &'static str) -> Result<EmulatorKernel> {
        module.check(name)?;
        Ok(EmulatorKernel { library: Arc::clone(module), name })
    }

    /// A map that `group_product.h` reads where it is emulated.
    fn tile_map(&self, rows: &TiledRows) -> Result<Option<TileMap>> {
        let mut words = [0; 16];
        let first = [rows.address.0, rows.row_bytes, rows.head_bytes, rows.sample_bytes];
        words[..4].copy_from_slice(&first);
        words[4..8].copy_from_slice(&[rows.columns, rows.rows, rows.heads, rows.samples]);
        words[8] = u64::from(rows.tile_rows);
        Ok(Some(TileMap(words)))
    }

    unsafe fn launch(
        &self,
        queue: &mut EmulatorQueue,
        kernel: &EmulatorKernel,
        launch: Launch,
        arguments: &[u8],
    ) -> Result<()> {
        self.check_shared_bytes(kernel, launch.shared_bytes)?;
        let (kernel, arguments) = (kernel.clone(), arguments.to_vec());
        // SAFETY: the caller guarantees the validity of the arguments; a graph keeps what they name.
        unsafe { self.enqueue(queue, Step::Launch { kernel, launch, arguments }) }
    }

    fn adds_bias(&self, _queue: &mut EmulatorQueue, _product: &MatrixProduct) -> Result<bool> {
        Ok(true)
    }

    unsafe fn matmul(&self, queue: &mut EmulatorQueue, product: MatrixProduct) -> Result<()> {
        // SAFETY: the caller guarantees the validity of the operands; a graph keeps them.
        unsafe { self.enqueue(queue, Step::Product(product)) }
    }

    /// Graphs save no time here; they exist so that the work that is enqueued by them is tested.
    fn has_graphs(&self) -> bool {
        true
    }

    fn begin_graph(&self, queue: &mut EmulatorQueue) -> Result<()> {
        queue.begin_recording(&self.room)
    }

    fn end_graph(&self, queue: &mut EmulatorQueue) -> Result<EmulatorGraph> {
        queue.end_recording()
    }

    fn replay(&self, queue: &mut EmulatorQueue, graph: &EmulatorGraph) -> Result<()> {
        queue.check_idle("replaying a graph")?;
        // SAFETY: the caller that recorded a step guaranteed its validity, and the graph keeps what it names.
        unsafe { self.enqueue(queue, Step::Graph(Arc::clone(&graph.0))) }
    }
}

/// An address as the host's pointer.
fn place(Address(address): Address) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address as usize)
}
