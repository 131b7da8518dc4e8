//! A [`Driver`] that runs GPU kernels on the CPU, for tests.
//!
//! Each source is compiled by the host's `g++` with `kernels/gpu/emulator.h`: a GPU thread becomes a fiber, a running block an
//! operating-system thread. So launchers, kernels and everything above them run without a GPU, at either warp width and
//! under several orders of threads. What is not modelled stands in that header.

mod matmul;
mod module;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::available_parallelism;

use self::matmul::matmul;
use self::module::{Library, compile};
use crate::error::{KernelError, Result};
use crate::gpu::driver::{Address, DeviceProperties, Driver, Launch, MatrixProduct};
use crate::gpu::source::{Source, SourceOptions};

/// Shared memory of a block, as the smallest of the devices of that warp that kernels are written for has it.
fn shared_bytes_per_block(warp: u32) -> usize {
    if warp == 32 { 99 << 10 } else { 64 << 10 }
}

/// What is emulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmulatorSettings {
    /// Lanes of a warp: 32 or 64.
    pub warp: u32,
    /// The order in which the threads of a block take their turns: 0 in order, else a random one.
    pub seed: u64,
}

/// A change of a source's text before it is compiled, so that tests can see a broken kernel fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceChange {
    /// The file of kernels.
    pub source: &'static str,
    /// What is replaced; it must be there.
    pub from: &'static str,
    /// What takes its place.
    pub to: &'static str,
}

/// An emulated GPU.
pub struct Emulator {
    settings: EmulatorSettings,
    change: Option<SourceChange>,
    properties: DeviceProperties,
    workers: u32,
    room: Arc<Room>,
}

/// How much device memory there is.
struct Room {
    total_bytes: usize,
    free_bytes: AtomicUsize,
}

impl Room {
    /// What an emulated GPU has unless told otherwise.
    const DEFAULT_BYTES: usize = 1 << 30;

    fn new(total_bytes: usize) -> Arc<Self> {
        Arc::new(Self { total_bytes, free_bytes: AtomicUsize::new(total_bytes) })
    }

    /// Takes `bytes`, if they are free.
    fn take(self: &Arc<Self>, bytes: usize) -> Option<Taken> {
        let less = |free: usize| free.checked_sub(bytes);
        self.free_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).ok()?;
        Some(Taken { room: Arc::clone(self), bytes })
    }
}

/// A part of the device memory; given back when it is dropped.
struct Taken {
    room: Arc<Room>,
    bytes: usize,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.room.free_bytes.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

/// Host memory that stands for device memory.
pub struct EmulatorMemory {
    words: Box<[Aligned]>,
    _taken: Taken,
}

/// The alignment that drivers promise.
#[repr(C, align(256))]
#[derive(Clone, Copy)]
struct Aligned([u8; 256]);

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
            // Few, and the same on every host: chains of scans are then cut into turns.
            multiprocessors: 2,
            shared_bytes_per_block: shared_bytes_per_block(settings.warp),
            matrix_library: "host".to_owned(),
        };
        let room = Room::new(Room::DEFAULT_BYTES);
        Ok(Self { settings, change: None, properties, workers, room })
    }

    /// The same, with so much device memory.
    #[must_use]
    pub fn with_memory_bytes(self, bytes: usize) -> Self {
        Self { room: Room::new(bytes), ..self }
    }

    fn no_graphs(&self) -> KernelError {
        KernelError::Device {
            attempted: "recording a graph",
            device: self.properties.name.clone(),
            answer: "the emulator has no graphs".to_owned(),
        }
    }

    /// The same, with a source broken on purpose.
    #[must_use]
    pub fn with_change(self, change: SourceChange) -> Self {
        Self { change: Some(change), ..self }
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
    type Queue = ();
    type Event = ();
    type Module = Arc<Library>;
    type Kernel = EmulatorKernel;
    type Graph = std::convert::Infallible;

    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn memory_bytes(&self) -> Result<[usize; 2]> {
        Ok([self.room.free_bytes.load(Ordering::Relaxed), self.room.total_bytes])
    }

    fn queue(&self) -> Result<()> {
        Ok(())
    }

    fn allocate(&self, (): &mut (), bytes: usize) -> Result<EmulatorMemory> {
        let words = bytes.div_ceil(size_of::<Aligned>());
        let mut memory = Vec::new();
        let refused = || KernelError::OutOfMemory { bytes, device: self.properties.name.clone() };
        let taken = words.checked_mul(size_of::<Aligned>()).and_then(|all| self.room.take(all));
        let taken = taken.ok_or_else(refused)?;
        memory.try_reserve_exact(words).map_err(|_| refused())?;
        memory.resize(words, Aligned([0; 256]));
        Ok(EmulatorMemory { words: memory.into_boxed_slice(), _taken: taken })
    }

    fn address(memory: &EmulatorMemory) -> Address {
        Address(memory.words.as_ptr() as u64)
    }

    fn upload(
        &self,
        (): &mut (),
        to: &mut EmulatorMemory,
        offset_bytes: usize,
        from: &[u8],
    ) -> Result<()> {
        to.bytes_mut()[offset_bytes..][..from.len()].copy_from_slice(from);
        Ok(())
    }

    fn download(
        &self,
        (): &mut (),
        to: &mut [u8],
        from: &EmulatorMemory,
        offset_bytes: usize,
    ) -> Result<()> {
        to.copy_from_slice(&from.bytes()[offset_bytes..][..to.len()]);
        Ok(())
    }

    fn copy(
        &self,
        (): &mut (),
        (to, to_offset): (&mut EmulatorMemory, usize),
        (from, from_offset): (&EmulatorMemory, usize),
        bytes: usize,
    ) -> Result<()> {
        let from = &from.bytes()[from_offset..][..bytes];
        to.bytes_mut()[to_offset..][..bytes].copy_from_slice(from);
        Ok(())
    }

    fn fill_zero(
        &self,
        (): &mut (),
        memory: &mut EmulatorMemory,
        offset_bytes: usize,
        bytes: usize,
    ) -> Result<()> {
        memory.bytes_mut()[offset_bytes..][..bytes].fill(0);
        Ok(())
    }

    fn record(&self, (): &mut ()) -> Result<()> {
        Ok(())
    }

    fn is_complete(&self, (): &()) -> Result<bool> {
        Ok(true)
    }

    fn wait(&self, (): &()) -> Result<()> {
        Ok(())
    }

    fn elapsed_milliseconds(&self, (): &(), (): &()) -> Result<f32> {
        Ok(0.0)
    }

    fn load(&self, source: &'static Source, options: SourceOptions) -> Result<Arc<Library>> {
        let change = self.change.filter(|change| change.source == source.name);
        compile(source, options, self.settings.warp, change)
    }

    fn kernel(&self, module: &Arc<Library>, name: &'static str) -> Result<EmulatorKernel> {
        module.check(name)?;
        Ok(EmulatorKernel { library: Arc::clone(module), name })
    }

    unsafe fn launch(
        &self,
        (): &mut (),
        kernel: &EmulatorKernel,
        launch: Launch,
        arguments: &[u8],
    ) -> Result<()> {
        let most = self.properties.shared_bytes_per_block;
        if launch.shared_bytes > most {
            let found = launch.shared_bytes;
            return Err(KernelError::shape(
                kernel.name,
                "shared bytes of a block",
                format!("at most {most}"),
                found,
            ));
        }
        // SAFETY: the caller vouches for the arguments.
        unsafe {
            kernel.library.launch(kernel.name, launch, arguments, self.settings.seed, self.workers)
        }
    }

    unsafe fn matmul(&self, (): &mut (), product: MatrixProduct) -> Result<()> {
        // SAFETY: the caller vouches for the operands.
        unsafe { matmul(product) };
        Ok(())
    }

    /// Graphs are a matter of launch cost, which the emulator does not model.
    fn has_graphs(&self) -> bool {
        false
    }

    fn begin_graph(&self, (): &mut ()) -> Result<()> {
        Err(self.no_graphs())
    }

    fn end_graph(&self, (): &mut ()) -> Result<Self::Graph> {
        Err(self.no_graphs())
    }

    fn replay(&self, (): &mut (), graph: &Self::Graph) -> Result<()> {
        match *graph {}
    }
}

impl EmulatorMemory {
    fn bytes(&self) -> &[u8] {
        let bytes = self.words.len() * size_of::<Aligned>();
        // SAFETY: `Aligned` is 256 initialised bytes without padding.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), bytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.words.len() * size_of::<Aligned>();
        // SAFETY: as in `bytes`, and the memory is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), bytes) }
    }
}
