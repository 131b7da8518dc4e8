//! GPUs: one [`Backend`](crate::Backend) for all vendors.
//!
//! [`Gpu`] runs the kernels of `kernels/gpu/*.cu` through a [`Driver`], which knows one vendor's
//! interface and no kernel. Launchers (`launch`) are written once over the driver; they check views
//! against shapes, choose a kernel by shape alone, and pass it one struct of arguments. Sources are
//! compiled for the present device at their first use, or in parallel at an earlier request
//! ([`source`]), and cached on disk. All work of a [`GpuStream`] runs in the order of the calls.
//!
//! The bits are the same for any microbatch, because a kernel is chosen by widths and strides,
//! never by the number of rows, except for generation's products and for forward norms, whose
//! kernels all give the same bits; grains are cut from their own first row; and a matrix product's
//! algorithm is chosen once for all numbers of rows ([`MatrixProduct`]), after trials have shown
//! that it keeps the promises of products ([`choose_algorithm`]).
//!
//! To add a vendor, implement [`Driver`].

mod algorithm;
mod buffer;
#[cfg(any(feature = "cuda", feature = "rocm", feature = "emulator"))]
pub(crate) mod cache;
pub mod collectives;
pub mod driver;
pub mod inventory;
mod launch;
mod matmul;
mod pinned;
mod precision;
mod profile;
mod recording;
mod runtime;
pub mod source;
mod stream;
#[cfg(any(feature = "cuda", feature = "rocm"))]
pub(crate) mod vendor;
mod weight_gradient;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;

pub use self::algorithm::{Candidate, Terms, choose_algorithm};
pub use self::buffer::GpuBuffer;
pub use self::driver::{
    Address, Batch, DeviceProperties, Driver, ElementKind, Installed, Launch, MatrixProduct,
    Operand, Rows, Start, TileMap, TiledRows,
};
pub use self::inventory::Inventory;
pub use self::pinned::GpuPinned;
pub use self::precision::{Bf16, Copies, Fp32, Precision};
use self::profile::Profile;
pub use self::recording::GpuGraph;
pub use self::source::{Definition, Source, SourceOptions};
pub use self::stream::{GpuStream, ScratchSlot};
#[cfg(any(feature = "cuda", feature = "rocm"))]
pub use self::vendor::VendorDriver;
use crate::error::{KernelError, Result};

/// A GPU that trains with activations of precision `P`.
pub struct Gpu<D: Driver, P: Precision> {
    driver: D,
    kernels: Mutex<Kernels<D>>,
    profile: Profile<D>,
    precision: std::marker::PhantomData<P>,
}

/// The modules and kernels that have been compiled and loaded.
struct Kernels<D: Driver> {
    modules: HashMap<SourceKey, Slot<D>>,
    kernels: HashMap<(SourceKey, &'static str), D::Kernel>,
}

/// The key of a source: the name of its file, and its definitions.
type SourceKey = (&'static str, &'static [Definition]);

/// The place of a module, empty until it is loaded. Its loader holds the lock meanwhile, so that only threads that need this module
/// wait.
type Slot<D> = Arc<Mutex<Option<Arc<<D as Driver>::Module>>>>;

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// A backend on the device that `driver` has opened.
    pub fn new(driver: D) -> Self {
        let kernels = Kernels { modules: HashMap::new(), kernels: HashMap::new() };
        Self {
            driver,
            kernels: Mutex::new(kernels),
            profile: Profile::off(),
            precision: std::marker::PhantomData,
        }
    }

    /// The driver.
    pub fn driver(&self) -> &D {
        &self.driver
    }

    /// Compiles every kernel now, instead of when it is first needed.
    ///
    /// # Errors
    /// A source that does not compile.
    pub fn compile_all(&self) -> Result<()> {
        self.compile(source::ALL.to_vec())
    }

    /// The sources whose kernels are loaded, in the order of their names.
    pub fn loaded_sources(&self) -> Vec<&'static Source> {
        let kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        let is_loaded =
            |slot: &Slot<D>| slot.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        let has = |source: &&Source| kernels.modules.get(&source.key()).is_some_and(is_loaded);
        let mut loaded: Vec<_> = source::ALL.iter().copied().filter(has).collect();
        loaded.sort_by_key(|source| source.key());
        loaded
    }

    /// Compiles and loads `sources` side by side.
    ///
    /// # Errors
    /// The first of them that does not compile.
    pub(crate) fn compile(&self, mut sources: Vec<&'static Source>) -> Result<()> {
        // The longest compilations start first.
        sources.sort_by_key(|source| std::cmp::Reverse(source.text.len()));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let next = AtomicUsize::new(0);
        let work = || {
            let mut compiled = Vec::new();
            while let Some(source) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
                compiled.push((source.key(), self.module(source).map(drop)));
            }
            compiled
        };
        let mut compiled: Vec<_> = std::thread::scope(|scope| {
            let others: Vec<_> = (1..cores.min(sources.len())).map(|_| scope.spawn(work)).collect();
            let own = work();
            let joined = others.into_iter().flat_map(|thread| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            own.into_iter().chain(joined).collect()
        });
        compiled.sort_by_key(|(source, _)| *source);
        compiled.into_iter().try_for_each(|(_, compiled)| compiled)
    }

    fn module(&self, source: &'static Source) -> Result<Arc<D::Module>> {
        let slot = {
            let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(kernels.modules.entry(source.key()).or_default())
        };
        let mut loaded = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = &*loaded {
            return Ok(Arc::clone(module));
        }
        let options = SourceOptions { activation: P::ELEMENT };
        let module = Arc::new(self.driver.load(source, options)?);
        *loaded = Some(Arc::clone(&module));
        Ok(module)
    }

    fn has_kernel(&self, source: &Source, name: &'static str) -> bool {
        let kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        kernels.kernels.contains_key(&(source.key(), name))
    }

    /// The kernel `name` of `source`, compiled where it has not been.
    pub(crate) fn kernel(&self, source: &'static Source, name: &'static str) -> Result<D::Kernel> {
        let found = {
            let kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
            kernels.kernels.get(&(source.key(), name)).cloned()
        };
        if let Some(kernel) = found {
            return Ok(kernel);
        }
        let module = self.module(source)?;
        let kernel = self.driver.kernel(&module, name)?;
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        kernels.kernels.insert((source.key(), name), kernel.clone());
        Ok(kernel)
    }

    /// Enqueues kernel `name` of `source`; `arguments` mirrors its struct. A grid without blocks launches nothing.
    ///
    /// # Errors
    /// A kernel that does not compile, one that a recording would have to load, or a launch that the device refuses.
    ///
    /// # Safety
    /// `arguments` mirrors the struct of the kernel, field by field. Every address in it names at least as many elements as the
    /// kernel reaches for these sizes and this grid, in memory that nothing else has borrowed where the kernel writes: so it
    /// comes from a view, which lies inside its buffer, that was checked against the shape, or from scratch memory that was
    /// asked for in that size. Sizes that the kernel counts in 32 bits do not wrap.
    pub(crate) unsafe fn launch<A: Pod>(
        &self,
        stream: &mut GpuStream<D>,
        source: &'static Source,
        name: &'static str,
        launch: Launch,
        arguments: A,
    ) -> Result<()> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        if stream.is_recording() && !self.has_kernel(source, name) {
            return Err(KernelError::NotRecordable { attempted: "loading a kernel" });
        }
        let kernel = self.kernel(source, name)?;
        let arguments = bytemuck::bytes_of(&arguments);
        // SAFETY: the caller guarantees the validity of the arguments; the memory that they name stays until the queue has run the
        // kernel, because memory is freed in the order of the queue.
        self.profile.note(&self.driver, stream, name, |stream| unsafe {
            self.driver.launch(stream.queue_mut(), &kernel, launch, arguments)
        })
    }
}
