//! Compiled kernels on a device, and their launch.

use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;

use super::pool::{Dropped, ModuleHandle, Pool};
use super::queue::Queue;
use super::table::{
    Code, FUNCTION_ARCHITECTURE, FUNCTION_MOST_DYNAMIC_SHARED_BYTES, FUNCTION_SHARED_BYTES,
    LaunchAttribute, LaunchSettings, LaunchWithSettings, RawFunction, Table,
};
use crate::error::{KernelError, Result};
use crate::gpu::driver::{Launch, Start};

/// The oldest architecture whose kernels can wait for the one before them: Hopper, as `EARLY_STARTS` of `dialect.h` says.
const OLDEST_EARLY_ARCHITECTURE: c_int = 90;

/// The bytes that the struct of most kernels has at most: clearing room for more would cost every launch.
const FEW_ARGUMENT_BYTES: usize = 512;
/// The bytes of arguments that drivers take.
const MOST_ARGUMENT_BYTES: usize = 4096;

/// A loaded module.
pub struct Module {
    pool: Arc<Pool>,
    module: ModuleHandle,
    name: &'static str,
}

/// A kernel of a module, which it keeps.
#[derive(Clone)]
pub struct Kernel {
    function: RawFunction,
    name: &'static str,
    /// The function that launches it early, if its machine code waits for the kernel before.
    launch_early: Option<LaunchWithSettings>,
    _module: Arc<Module>,
}

// SAFETY: a function handle is valid in every thread of its context, as long as its module is.
unsafe impl Send for Kernel {}
// SAFETY: as above; nothing changes it.
unsafe impl Sync for Kernel {}

impl Module {
    /// Loads `image`, machine code of the source `name` that names its own size.
    pub(super) fn load(
        pool: &Arc<Pool>,
        device: &str,
        image: &[u8],
        name: &'static str,
    ) -> Result<Self> {
        let table = pool.table();
        let mut module = std::ptr::null_mut();
        // SAFETY: it writes one handle; the image is whole.
        let loaded = unsafe { (table.module_load)(&raw mut module, image.as_ptr().cast()) };
        table.on(device, "loading kernels", loaded.result())?;
        Ok(Self { pool: Arc::clone(pool), module: ModuleHandle(module), name })
    }

    /// The kernel `name`, of whose blocks each may have `shared_bytes` bytes of shared memory.
    pub(super) fn kernel(
        module: &Arc<Self>,
        device: &str,
        name: &'static str,
        shared_bytes: usize,
    ) -> Result<Kernel> {
        let table = module.pool.table();
        let symbol = CString::new(name).map_err(|_| {
            KernelError::shape("kernel", "name", "no zero in it", format!("{name:?}"))
        })?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded, and the call writes one handle.
        let found =
            unsafe { (table.module_function)(&raw mut function, module.module.0, symbol.as_ptr()) };
        table.on(device, "looking for a kernel", found.result())?;
        raise_shared_bytes(table, device, function, shared_bytes)?;
        let launch_early = launch_early(table, device, function)?;
        tracing::debug!(name, source = module.name, "kernel loaded");
        Ok(Kernel { function, name, launch_early, _module: Arc::clone(module) })
    }
}

/// Lets launches of `function` ask for all that is left of `shared_bytes`.
fn raise_shared_bytes(
    table: &Table,
    device: &str,
    function: RawFunction,
    shared_bytes: usize,
) -> Result<()> {
    let Some(set_attribute) = table.set_function_attribute else { return Ok(()) };
    let mut fixed: c_int = 0;
    // SAFETY: the function is of a loaded module, here and below, and the call writes one number.
    let asked =
        unsafe { (table.function_attribute)(&raw mut fixed, FUNCTION_SHARED_BYTES, function) };
    table.on(device, "asking for a kernel's shared memory", asked.result())?;
    let most = shared_bytes as c_int - fixed;
    // SAFETY: as above.
    let set = unsafe { set_attribute(function, FUNCTION_MOST_DYNAMIC_SHARED_BYTES, most) };
    table.on(device, "raising a kernel's shared memory", set.result())
}

/// How `function` is launched where it may begin early.
fn launch_early(
    table: &Table,
    device: &str,
    function: RawFunction,
) -> Result<Option<LaunchWithSettings>> {
    let Some(launch) = table.launch_with_settings else { return Ok(None) };
    let mut architecture: c_int = 0;
    // SAFETY: the function is of a loaded module, and the call writes one number.
    let asked = unsafe {
        (table.function_attribute)(&raw mut architecture, FUNCTION_ARCHITECTURE, function)
    };
    table.on(device, "asking for a kernel's architecture", asked.result())?;
    Ok((architecture >= OLDEST_EARLY_ARCHITECTURE).then_some(launch))
}

impl Drop for Module {
    fn drop(&mut self) {
        self.pool.give_back(Dropped::Module(self.module));
    }
}

impl Kernel {
    /// Enqueues the kernel with the bytes of its struct.
    ///
    /// # Safety
    /// As for [`Driver::launch`](crate::gpu::Driver::launch).
    pub(super) unsafe fn launch(
        &self,
        table: &Table,
        device: &str,
        queue: &Queue,
        launch: Launch,
        arguments: &[u8],
    ) -> Result<()> {
        let found = arguments.len();
        if found > MOST_ARGUMENT_BYTES {
            let expected = format!("at most {MOST_ARGUMENT_BYTES} bytes");
            return Err(KernelError::shape(self.name, "arguments", expected, found));
        }
        // SAFETY: the caller's promise.
        let answered = unsafe {
            if found <= FEW_ARGUMENT_BYTES {
                self.enqueue::<{ FEW_ARGUMENT_BYTES / 8 }>(table, queue, launch, arguments)
            } else {
                self.enqueue::<{ MOST_ARGUMENT_BYTES / 8 }>(table, queue, launch, arguments)
            }
        };
        answered.result().map_err(|code| self.refused(table, device, launch, code))
    }

    /// # Safety
    /// As for [`launch`](Self::launch); the bytes are at most those of `WORDS` words.
    unsafe fn enqueue<const WORDS: usize>(
        &self,
        table: &Table,
        queue: &Queue,
        launch: Launch,
        arguments: &[u8],
    ) -> Code {
        // The driver copies the struct during the call, and requires the struct's own alignment.
        let mut aligned = [0_u64; WORDS];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut aligned);
        bytes[..arguments.len()].copy_from_slice(arguments);
        let [x, y, z] = launch.grid;
        let mut parameters = [aligned.as_mut_ptr().cast::<c_void>()];
        if let (Start::Early { all_shared }, true, Some(launch_early)) =
            (launch.start, queue.is_recording(), self.launch_early)
        {
            let attributes = [LaunchAttribute::early_start(), LaunchAttribute::all_shared()];
            let settings = LaunchSettings {
                grid: launch.grid,
                block: [launch.threads, 1, 1],
                shared_bytes: launch.shared_bytes as u32,
                stream: queue.stream(),
                attributes: attributes.as_ptr(),
                attribute_count: if all_shared { 2 } else { 1 },
            };
            // SAFETY: as below; the settings and their attributes are alive.
            let answer = unsafe {
                let none = std::ptr::null_mut();
                launch_early(&raw const settings, self.function, parameters.as_mut_ptr(), none)
            };
            // A driver that refuses an attribute still launches kernels in order.
            if ![Code::NOT_SUPPORTED, Code::INVALID_VALUE].contains(&answer) {
                return answer;
            }
        }
        // SAFETY: the kernel takes one struct, and the caller guarantees that `arguments` is one.
        unsafe {
            (table.launch)(
                self.function,
                x,
                y,
                z,
                launch.threads,
                1,
                1,
                launch.shared_bytes as u32,
                queue.stream(),
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
    }

    #[cold]
    fn refused(&self, table: &Table, device: &str, launch: Launch, code: Code) -> KernelError {
        let (device, answer) = (device.to_owned(), table.words(code));
        if code.is_lasting() {
            let what = format!("run {} with {launch:?}", self.name);
            return KernelError::Unsupported { what, device, answer };
        }
        let answer = format!("{}: {answer}", self.name);
        KernelError::Device { attempted: "launching a kernel", device, answer }
    }
}
