//! NVIDIA GPUs: a [`Driver`] over the CUDA driver interface, NVRTC and cuBLASLt.
//!
//! The three libraries are opened when they are first needed, so a program built with this module runs where none of them is;
//! what is missing is then an ordinary error. No CUDA toolkit is needed to build.

mod compile;
mod failure;
mod host_memory;
mod matmul;
mod memory;
mod peer;
mod pool;
mod queue;

use std::ffi::{CString, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys::{CUdevice_attribute, CUfunction_attribute_enum, CUresult};
use cudarc::driver::{CudaContext, DriverError, result, sys};

pub use self::host_memory::CudaHostMemory;
pub use self::memory::CudaMemory;
pub use self::queue::{CudaEvent, CudaGraph, CudaQueue};

use self::failure::{Failed, on};
use self::matmul::MatrixLibrary;
use self::pool::{Dropped, ModuleHandle, Pool};
use crate::backend::PeerAccess;
use crate::error::{KernelError, Result};
use crate::gpu::driver::{Address, DeviceProperties, Driver, Launch, MatrixProduct};
use crate::gpu::source::{Source, SourceOptions};

const BACKEND: &str = "cuda";

/// The oldest architecture that kernels are written for: bf16 products in tensor cores, asynchronous copies.
const OLDEST_CAPABILITY: (i32, i32) = (8, 0);

/// The oldest driver, as it numbers itself, that knows every call of these bindings: of 12.8, for `cuEventElapsedTime_v2`.
const OLDEST_DRIVER: i32 = 12_080;

/// An NVIDIA GPU.
pub struct Cuda {
    // Before the pool, which keeps the context that it lives in.
    matrices: MatrixLibrary,
    pool: Arc<Pool>,
    properties: DeviceProperties,
}

/// A loaded module.
pub struct CudaModule {
    pool: Arc<Pool>,
    module: ModuleHandle,
    name: &'static str,
}

/// A kernel of a module, which it keeps.
#[derive(Clone)]
pub struct CudaKernel {
    function: sys::CUfunction,
    name: &'static str,
    _module: Arc<CudaModule>,
}

// SAFETY: a function handle is valid in every thread of its context, as long as its module is.
unsafe impl Send for CudaKernel {}
// SAFETY: as above; nothing changes it.
unsafe impl Sync for CudaKernel {}

impl Drop for CudaModule {
    fn drop(&mut self) {
        self.pool.give_back(Dropped::Module(self.module));
    }
}

fn unavailable(reason: impl Into<String>) -> KernelError {
    KernelError::Unavailable { backend: BACKEND, reason: reason.into() }
}

/// Whether an answer says that there is nothing to use, rather than that it failed.
fn is_missing(error: &DriverError) -> bool {
    matches!(
        error.0,
        CUresult::CUDA_ERROR_NO_DEVICE
            | CUresult::CUDA_ERROR_STUB_LIBRARY
            | CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
            | CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
    )
}

/// Asks for a driver that knows every call of these bindings.
fn check_driver() -> Result<()> {
    let mut version = 0;
    // SAFETY: the library is there; it writes one number, and may be asked before it is started.
    let asked = unsafe { sys::cuDriverGetVersion(&raw mut version) }.result();
    on(BACKEND, "asking for the driver's version", asked)?;
    if version >= OLDEST_DRIVER {
        return Ok(());
    }
    let show = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
    let (found, oldest) = (show(version), show(OLDEST_DRIVER));
    Err(unavailable(format!("the NVIDIA driver is of CUDA {found}, {oldest} or newer is needed")))
}

/// Asks a device not to be too old.
fn check_capability(device: &str, (major, minor): (i32, i32)) -> Result<()> {
    if (major, minor) >= OLDEST_CAPABILITY {
        return Ok(());
    }
    let (oldest, next) = OLDEST_CAPABILITY;
    Err(KernelError::UnsupportedArchitecture {
        device: device.to_owned(),
        found: format!("of compute capability {major}.{minor}"),
        expected: format!("{oldest}.{next} or newer"),
    })
}

impl Cuda {
    /// The number of CUDA devices, at least 1.
    ///
    /// # Errors
    /// Why there is none: no driver library, one that is too old or does not fit the kernel's, or no device; else what made the
    /// driver fail.
    pub fn device_count() -> Result<usize> {
        // SAFETY: looks for a library, whose initialisers the system's vendor vouches for.
        if !unsafe { sys::is_culib_present() } {
            return Err(unavailable("the NVIDIA driver's library libcuda.so.1 was not found"));
        }
        check_driver()?;
        match CudaContext::device_count() {
            Ok(0) => Err(unavailable("the NVIDIA driver sees no GPU")),
            Ok(devices) => Ok(devices as usize),
            Err(error) if is_missing(&error) => {
                Err(unavailable(format!("the NVIDIA driver answers: {}", Failed::of(error).answer)))
            }
            Err(error) => on(BACKEND, "starting the driver", Err(error)),
        }
    }

    /// How many GPUs work together, the first among them: they are of one kind and read each other's memory.
    ///
    /// # Errors
    /// As [`device_count`](Self::device_count).
    pub fn together() -> Result<usize> {
        peer::together(Self::device_count()?)
    }

    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// No such device, one that is too old, a library that is missing or too old, or what made the driver fail.
    pub fn open(ordinal: usize) -> Result<Self> {
        let devices = Self::device_count()?;
        if ordinal >= devices {
            let reason = format!("GPU {ordinal} was asked for, but there are {devices}");
            return Err(unavailable(reason));
        }
        let place = format!("GPU {ordinal}");
        let context = on(&place, "opening a device", CudaContext::new(ordinal))?;
        let name = on(&place, "asking for a device's name", context.name())?;
        let attribute =
            |attribute| on(&name, "asking for an attribute", context.attribute(attribute));
        let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        check_capability(&name, (major, minor))?;
        let multiprocessors = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let shared = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        compile::version()?;
        let matrices = MatrixLibrary::open(&context, &name)?;
        // Kernels of one architecture, not of its family: what is tuned for it is used.
        let specific = if major >= 9 { "a" } else { "" };
        let properties = DeviceProperties {
            backend: BACKEND,
            architecture: format!("sm_{major}{minor}{specific}"),
            warp: 32,
            multiprocessors: attribute(multiprocessors)? as u32,
            shared_bytes_per_block: attribute(shared)? as usize,
            matrix_library: format!(
                "{}, algorithms {:016x}",
                matrices.version(),
                matrices.digest()?
            ),
            name,
        };
        let pool = Pool::new(context, &properties.name)?;
        Ok(Self { matrices, pool, properties })
    }

    fn name(&self) -> &str {
        &self.properties.name
    }

    /// Makes the device this thread's own: what every call begins with.
    fn bind(&self) -> Result<()> {
        on(self.name(), "binding a thread", self.pool.context().bind_to_thread())
    }
}

impl Driver for Cuda {
    type Memory = CudaMemory;
    type Queue = CudaQueue;
    type HostMemory = CudaHostMemory;
    type Event = CudaEvent;
    type Module = Arc<CudaModule>;
    type Kernel = CudaKernel;
    type Graph = CudaGraph;

    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn identity(&self) -> Option<String> {
        let uuid = self.pool.context().uuid().ok()?;
        Some(uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect())
    }

    fn memory_bytes(&self) -> Result<[usize; 2]> {
        self.bind()?;
        let (free, total) = on(self.name(), "asking for free memory", result::mem_get_info())?;
        Ok([free, total])
    }

    fn queue(&self) -> Result<CudaQueue> {
        self.bind()?;
        CudaQueue::new(&self.pool, self.name())
    }

    fn allocate(&self, queue: &mut CudaQueue, bytes: usize) -> Result<CudaMemory> {
        self.bind()?;
        CudaMemory::zeroed(&self.pool, self.name(), queue, bytes)
    }

    fn address(memory: &CudaMemory) -> Address {
        memory.address()
    }

    fn upload(
        &self,
        queue: &mut CudaQueue,
        to: &CudaMemory,
        offset_bytes: usize,
        from: &[u8],
    ) -> Result<()> {
        self.bind()?;
        let to = to.range(offset_bytes, from.len())?;
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: the range lies inside the memory. From pageable memory the call returns once `from` was read.
        let copied = unsafe { result::memcpy_htod_async(to, from, queue.stream()) };
        on(self.name(), "copying to the device", copied)
    }

    fn download(
        &self,
        queue: &mut CudaQueue,
        to: &mut [u8],
        from: &CudaMemory,
        offset_bytes: usize,
    ) -> Result<()> {
        self.bind()?;
        let from = from.range(offset_bytes, to.len())?;
        if !to.is_empty() {
            // SAFETY: the range lies inside the memory, and `to` outlives the copy, which is waited for below.
            let copied = unsafe { result::memcpy_dtoh_async(to, from, queue.stream()) };
            on(self.name(), "copying to the host", copied)?;
        }
        // SAFETY: the stream is alive.
        let waited = unsafe { result::stream::synchronize(queue.stream()) };
        on(self.name(), "waiting for the device", waited)
    }

    fn allocate_host(&self, bytes: usize) -> Result<CudaHostMemory> {
        self.bind()?;
        CudaHostMemory::zeroed(&self.pool, self.name(), bytes)
    }

    fn host_pointer(memory: &CudaHostMemory) -> NonNull<u8> {
        memory.first()
    }

    unsafe fn upload_async(
        &self,
        queue: &mut CudaQueue,
        (to, to_offset): (&CudaMemory, usize),
        (from, from_offset): (&CudaHostMemory, usize),
        bytes: usize,
    ) -> Result<()> {
        self.bind()?;
        let (to, from) = (to.range(to_offset, bytes)?, from.range(from_offset, bytes)?);
        match bytes {
            0 => Ok(()),
            // SAFETY: both ranges lie inside their memories; the caller vouches for the host's.
            _ => unsafe { host_memory::upload(self.name(), queue.stream(), to, from, bytes) },
        }
    }

    unsafe fn download_async(
        &self,
        queue: &mut CudaQueue,
        (to, to_offset): (&CudaHostMemory, usize),
        (from, from_offset): (&CudaMemory, usize),
        bytes: usize,
    ) -> Result<()> {
        self.bind()?;
        let (to, from) = (to.range(to_offset, bytes)?, from.range(from_offset, bytes)?);
        match bytes {
            0 => Ok(()),
            // SAFETY: as above.
            _ => unsafe { host_memory::download(self.name(), queue.stream(), to, from, bytes) },
        }
    }

    fn reach(&self, peer: &Self) -> Result<PeerAccess> {
        self.bind()?;
        let device = |cuda: &Self| cuda.pool.context().cu_device();
        peer::reach(self.name(), device(self), device(peer))
    }

    fn copy(
        &self,
        queue: &mut CudaQueue,
        (to, to_offset): (&CudaMemory, usize),
        (from, from_offset): (&CudaMemory, usize),
        bytes: usize,
    ) -> Result<()> {
        self.bind()?;
        let (to, from) = (to.range(to_offset, bytes)?, from.range(from_offset, bytes)?);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both ranges lie inside their memories.
        let copied = unsafe { result::memcpy_dtod_async(to, from, bytes, queue.stream()) };
        on(self.name(), "copying on the device", copied)
    }

    fn fill_zero(
        &self,
        queue: &mut CudaQueue,
        memory: &CudaMemory,
        offset_bytes: usize,
        bytes: usize,
    ) -> Result<()> {
        self.bind()?;
        let at = memory.range(offset_bytes, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the range lies inside the memory.
        let filled = unsafe { result::memset_d8_async(at, 0, bytes, queue.stream()) };
        on(self.name(), "clearing memory", filled)
    }

    fn record(&self, queue: &mut CudaQueue) -> Result<CudaEvent> {
        self.bind()?;
        CudaEvent::record(&self.pool, self.name(), queue)
    }

    fn for_library(&self, queue: &mut CudaQueue) -> Result<*mut c_void> {
        self.bind()?;
        Ok(queue.raw())
    }

    fn wait_for(&self, queue: &mut CudaQueue, event: &CudaEvent) -> Result<()> {
        self.bind()?;
        queue.wait_for(event, self.name())
    }

    fn is_complete(&self, event: &CudaEvent) -> Result<bool> {
        self.bind()?;
        event.is_complete(self.name())
    }

    fn wait(&self, event: &CudaEvent) -> Result<()> {
        self.bind()?;
        event.wait(self.name())
    }

    fn settle(event: &CudaEvent) {
        event.settle();
    }

    fn elapsed_milliseconds(&self, from: &CudaEvent, to: &CudaEvent) -> Result<f32> {
        self.bind()?;
        from.milliseconds_to(to, self.name())
    }

    fn load(&self, source: &'static Source, options: SourceOptions) -> Result<Arc<CudaModule>> {
        self.bind()?;
        let image = compile::cubin(source, options, self.name(), &self.properties.architecture)?;
        // SAFETY: the image is a whole cubin, which names its own size.
        let module = unsafe { result::module::load_data(image.as_ptr().cast::<c_void>()) };
        let module = on(self.name(), "loading kernels", module)?;
        let (pool, module) = (Arc::clone(&self.pool), ModuleHandle(module));
        Ok(Arc::new(CudaModule { pool, module, name: source.name }))
    }

    fn kernel(&self, module: &Arc<CudaModule>, name: &'static str) -> Result<CudaKernel> {
        self.bind()?;
        let symbol = CString::new(name).map_err(|_| unavailable("a kernel's name holds a zero"))?;
        // SAFETY: the module is loaded.
        let function = unsafe { result::module::get_function(module.module.0, symbol) };
        let function = on(self.name(), "looking for a kernel", function)?;
        let fixed = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        let dynamic = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is of the module.
        unsafe {
            let attribute = result::function::get_function_attribute(function, fixed);
            let fixed = on(self.name(), "asking for a kernel's shared memory", attribute)?;
            let most = self.properties.shared_bytes_per_block as i32 - fixed;
            let set = result::function::set_function_attribute(function, dynamic, most);
            on(self.name(), "raising a kernel's shared memory", set)?;
        }
        tracing::debug!(name, source = module.name, "kernel loaded");
        Ok(CudaKernel { function, name, _module: Arc::clone(module) })
    }

    unsafe fn launch(
        &self,
        queue: &mut CudaQueue,
        kernel: &CudaKernel,
        launch: Launch,
        arguments: &[u8],
    ) -> Result<()> {
        self.bind()?;
        // The driver copies the struct during the call; it wants the struct's own alignment.
        let mut aligned = [0_u64; 64];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut aligned);
        let Some(place) = bytes.get_mut(..arguments.len()) else {
            let (expected, found) = ("at most 512 bytes", arguments.len());
            return Err(KernelError::shape(kernel.name, "arguments", expected, found));
        };
        place.copy_from_slice(arguments);
        let [x, y, z] = launch.grid;
        let mut parameters = [aligned.as_mut_ptr().cast::<c_void>()];
        // SAFETY: the kernel takes one struct, which the caller vouches `arguments` to be.
        let launched = unsafe {
            result::launch_kernel(
                kernel.function,
                (x, y, z),
                (launch.threads, 1, 1),
                launch.shared_bytes as u32,
                queue.stream(),
                &mut parameters,
            )
        };
        launched.map_err(|error| {
            let device = self.name().to_owned();
            let Failed { answer, is_lasting, .. } = Failed::of(error);
            if is_lasting {
                let what = format!("run {} with {launch:?}", kernel.name);
                return KernelError::Unsupported { what, device, answer };
            }
            let answer = format!("{}: {answer}", kernel.name);
            KernelError::Device { attempted: "launching a kernel", device, answer }
        })
    }

    unsafe fn matmul(&self, queue: &mut CudaQueue, product: MatrixProduct) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller vouches for the operands.
        unsafe { self.matrices.matmul(self, queue, product) }
    }

    fn has_graphs(&self) -> bool {
        true
    }

    fn begin_graph(&self, queue: &mut CudaQueue) -> Result<()> {
        self.bind()?;
        queue.begin_recording(self.name())
    }

    fn end_graph(&self, queue: &mut CudaQueue) -> Result<CudaGraph> {
        self.bind()?;
        queue.end_recording(self.name())
    }

    fn replay(&self, queue: &mut CudaQueue, graph: &CudaGraph) -> Result<()> {
        self.bind()?;
        graph.launch(self.name(), queue)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_before_ampere_are_refused_in_one_line() {
        for capability in [(8, 0), (8, 6), (9, 0), (12, 0)] {
            check_capability("a GPU", capability).unwrap();
        }
        let error = check_capability("a GPU", (7, 5)).unwrap_err();
        assert_eq!(error.to_string(), "a GPU is of compute capability 7.5, expected 8.0 or newer");
    }
}
