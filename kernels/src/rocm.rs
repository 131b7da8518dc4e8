//! AMD GPUs: the parts that are specific to HIP, hiprtc, hipBLASLt and rocBLAS.
//!
//! The libraries of ROCm 5 to 7 are opened at their first use, so a program built with this module
//! runs on machines without them; a missing library is then an ordinary error. Building needs
//! nothing of ROCm. The width of a wave is a property of the device, read at run time.

mod architecture;
mod compile;
mod handles;
mod hipblaslt;
mod matrices;
mod rocblas;

use std::ffi::{CStr, c_int};
use std::sync::{Arc, OnceLock};

use self::matrices::Matrices;
use self::rocblas::RocBlas;
use crate::error::{KernelError, Result};
use crate::gpu::collectives::RCCL;
use crate::gpu::driver::{DeviceProperties, MatrixProduct};
use crate::gpu::inventory::FoundLibrary;
use crate::gpu::source::{Source, SourceOptions};
use crate::gpu::vendor::compiler::{Compiler, takes_group_products};
use crate::gpu::vendor::context::{self, Context};
use crate::gpu::vendor::library::{OpenLibrary, once};
use crate::gpu::vendor::product::ProductLibrary;
use crate::gpu::vendor::table::{Code, Device, Interface, Table};
use crate::gpu::vendor::{ALL_DEVICES, Queue, Vendor, VendorDriver};

/// An AMD GPU.
pub type Rocm = VendorDriver<Amd>;

/// AMD.
pub struct Amd;

const BACKEND: &str = "rocm";

// Device attributes, with the numbers of HIP.
const COMPUTE_UNITS: u32 = 63;
const SHARED_BYTES_PER_BLOCK: u32 = 74;
const WAVE: u32 = 87;

// The error codes that mean that there is no driver, or no device that HIP_VISIBLE_DEVICES names.
const INSUFFICIENT_DRIVER: Code = Code(35);
const INVALID_DEVICE: Code = Code(101);

/// The HIP runtime: the functions of the table, and those that HIP alone has.
struct Hip {
    table: Table,
    properties: Properties,
    /// The runtime's version in its own numbering: 60_241_134 is 6.2.
    version: c_int,
    /// The ending of the runtime's file name, such as `.so.6`: the other libraries of the same release have it too.
    suffix: &'static str,
    found: FoundLibrary,
}

/// Major and minor version of a runtime that numbers itself so.
fn release(version: c_int) -> (i32, i32) {
    (version / 10_000_000, version / 100_000 % 100)
}

/// The function that reads a device's properties, and a place in the struct that it fills: the struct grew in HIP 6, and its
/// function has another name since.
struct Properties {
    get: unsafe extern "C" fn(*mut u8, c_int) -> Code,
    /// The byte of the struct at which the name of the architecture begins.
    architecture_at: usize,
}

/// The byte at which the name begins before HIP 6.
const OLD_ARCHITECTURE_AT: usize = 396;

/// Names of the runtime's library, the newest first.
const RUNTIMES: [&str; 4] =
    ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"];

fn suffix(runtime: &str) -> &'static str {
    let known = RUNTIMES.iter().find(|known| **known == runtime);
    known.map_or(".so", |known| &known["libamdhip64".len()..])
}

impl Hip {
    fn open() -> Result<Self> {
        Self::find(OpenLibrary::first_of(BACKEND, "AMD's HIP runtime", &RUNTIMES)?)
    }

    fn find(library: OpenLibrary) -> Result<Self> {
        let suffix = suffix(library.file_name());
        let mut version = 0;
        // SAFETY: HIP documents the functions with these types; the version is one number, and may be asked without a device.
        let (asked, properties) = unsafe {
            let newer = library.has("hipGetDevicePropertiesR0600");
            let (name, architecture_at) = match newer {
                true => ("hipGetDevicePropertiesR0600", 1160),
                false => ("hipGetDeviceProperties", OLD_ARCHITECTURE_AT),
            };
            let get_version: unsafe extern "C" fn(*mut c_int) -> Code =
                library.function("hipRuntimeGetVersion")?;
            let properties = Properties { get: library.function(name)?, architecture_at };
            (get_version(&raw mut version), properties)
        };
        let (major, minor) = release(version);
        let found = library.found(format!("HIP {major}.{minor} ({version})"), "hipInit");
        let table = Table::find(library, Interface::Hip)?;
        table.on(BACKEND, "asking for the runtime's version", asked.result())?;
        Ok(Self { table, properties, version, suffix, found })
    }

    fn get() -> Result<&'static Self> {
        static HIP: OnceLock<Hip> = OnceLock::new();
        once(&HIP, Self::open)
    }

    /// The architecture of a device in HIP's spelling, with its features: such as `gfx942:sramecc+:xnack-`.
    fn architecture(&self, name: &str, device: Device) -> Result<String> {
        /// More than the struct of any version has.
        const ROOM: usize = 8192;
        let mut properties = vec![0_u64; ROOM / 8];
        // SAFETY: it writes one struct, for which there is room.
        let asked = unsafe { (self.properties.get)(properties.as_mut_ptr().cast(), device) };
        self.table.on(name, "asking for a device's properties", asked.result())?;
        let bytes: &[u8] = bytemuck::cast_slice(&properties);
        let text = CStr::from_bytes_until_nul(&bytes[self.properties.architecture_at..]);
        Ok(text.map(|text| text.to_string_lossy().into_owned()).unwrap_or_default())
    }

    /// Such as `6.2`.
    fn version(&self) -> (i32, i32) {
        release(self.version)
    }

    /// The names of another library of the same release: by the versions that it may have, and without.
    fn beside(&self, library: &str, versions: &[&str]) -> Vec<String> {
        let versions = versions.iter().map(|version| format!("{library}.so{version}"));
        versions.chain([format!("{library}.so")]).collect()
    }
}

impl Vendor for Amd {
    const BACKEND: &'static str = BACKEND;
    const DRIVER: &'static str = "AMD's HIP runtime";
    const COLLECTIVES: &'static str = RCCL;
    const WORKSPACE_BYTES: usize = RocBlas::WORKSPACE_BYTES;
    type MatrixLibrary = Matrices;

    fn table() -> Result<&'static Table> {
        Ok(&Hip::get()?.table)
    }

    fn is_missing(code: Code) -> bool {
        [Code::NO_DEVICE, INSUFFICIENT_DRIVER, INVALID_DEVICE].contains(&code)
    }

    fn kind(table: &Table, device: Device) -> Result<String> {
        let architecture = Hip::get()?.architecture(ALL_DEVICES, device)?;
        let units = context::attribute(table, device, COMPUTE_UNITS);
        let units = table.on(ALL_DEVICES, "asking for an attribute", units)?;
        Ok(format!("{architecture}, {units} compute units"))
    }

    fn architecture(context: &Context, name: &str) -> Result<String> {
        let hip = Hip::get()?;
        let architecture = hip.architecture(name, context.device())?;
        architecture::check(name, &architecture, hip.version())?;
        Ok(architecture)
    }

    fn driver() -> Result<FoundLibrary> {
        Ok(Hip::get()?.found.clone())
    }

    fn compiler() -> Result<&'static Compiler> {
        compile::compiler()
    }

    fn matrix_library() -> Result<FoundLibrary> {
        Matrices::found()
    }

    fn open_matrix_library(context: &Arc<Context>, name: &str) -> Result<Matrices> {
        Matrices::open(context, name)
    }

    fn properties(
        context: &Context,
        name: String,
        architecture: String,
        library: &Matrices,
    ) -> Result<DeviceProperties> {
        let attribute = |attribute| context.attribute(&name, attribute);
        let warp = attribute(WAVE)?;
        if ![32, 64].contains(&warp) {
            let (found, expected) = (format!("of waves of {warp}"), "32 or 64".to_owned());
            return Err(KernelError::UnsupportedArchitecture { device: name, found, expected });
        }
        Ok(DeviceProperties {
            // Not an AMD GPU: an NVIDIA GPU under a runtime that implements HIP on CUDA, which runs
            // the same kernels.
            group_products: takes_group_products(&architecture),
            backend: BACKEND,
            architecture,
            warp: warp as u32,
            multiprocessors: attribute(COMPUTE_UNITS)? as u32,
            shared_bytes_per_block: attribute(SHARED_BYTES_PER_BLOCK)? as usize,
            matrix_library: library.name(),
            collective_library: Some(Self::COLLECTIVES),
            name,
        })
    }

    fn compile(
        source: &'static Source,
        options: SourceOptions,
        properties: &DeviceProperties,
    ) -> Result<Vec<u8>> {
        compile::code_object(source, options, &properties.architecture)
    }

    /// A kernel adds the bias: rocBLAS cannot, and whether hipBLASLt keeps the promises was not tried.
    fn adds_bias(
        _library: &Matrices,
        _driver: &Rocm,
        _queue: &mut Queue,
        _product: &MatrixProduct,
    ) -> Result<bool> {
        Ok(false)
    }

    unsafe fn multiply(
        library: &Matrices,
        driver: &Rocm,
        queue: &mut Queue,
        product: MatrixProduct,
    ) -> Result<()> {
        // SAFETY: the caller guarantees the validity of the operands.
        unsafe { library.matmul(driver, queue, product) }
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;
    use std::process::Command;

    use hip_sys::hiprt;
    use hip_sys::hiprt::{
        hipDeviceAttribute_t as Attribute, hipError_t as Error,
        hipFunction_attribute as OfFunction, hipMemAccessDesc, hipMemAccessFlags, hipMemLocation,
        hipMemLocationType, hipMemPoolAttr, hipStreamCaptureMode,
    };

    use super::*;
    use crate::gpu::collectives::CollectiveLibrary;
    use crate::gpu::vendor::table;

    /// As of HIP 5.4; AMD has not changed these since.
    #[test]
    fn numbers_are_those_of_hip() {
        let same = [
            (COMPUTE_UNITS, Attribute::hipDeviceAttributeMultiprocessorCount as u32),
            (SHARED_BYTES_PER_BLOCK, Attribute::hipDeviceAttributeMaxSharedMemoryPerBlock as u32),
            (WAVE, Attribute::hipDeviceAttributeWarpSize as u32),
            (table::DEFAULT_FLAGS, hiprt::hipStreamDefault),
            (table::DEFAULT_FLAGS, hiprt::hipEventDefault),
            (table::EVENT_WITHOUT_TIME, hiprt::hipEventDisableTiming),
            (table::HOST_MEMORY_PORTABLE, hiprt::hipHostMallocPortable),
            (
                table::CAPTURE_OF_THREAD,
                hipStreamCaptureMode::hipStreamCaptureModeThreadLocal as u32,
            ),
            (table::POOL_RELEASE_THRESHOLD, hipMemPoolAttr::hipMemPoolAttrReleaseThreshold as u32),
            (table::FUNCTION_SHARED_BYTES, OfFunction::HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES as u32),
            (
                table::FUNCTION_MOST_DYNAMIC_SHARED_BYTES,
                OfFunction::HIP_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as u32,
            ),
        ];
        for (index, (ours, theirs)) in same.into_iter().enumerate() {
            assert_eq!(ours, theirs, "number {index}");
        }
        let answers = [
            (Code::SUCCESS, Error::hipSuccess),
            (Code::INVALID_VALUE, Error::hipErrorInvalidValue),
            (Code::OUT_OF_MEMORY, Error::hipErrorOutOfMemory),
            (Code::NO_DEVICE, Error::hipErrorNoDevice),
            (Code::NOT_READY, Error::hipErrorNotReady),
            (Code::LAUNCH_OUT_OF_RESOURCES, Error::hipErrorLaunchOutOfResources),
            (Code::NOT_SUPPORTED, Error::hipErrorNotSupported),
            (INSUFFICIENT_DRIVER, Error::hipErrorInsufficientDriver),
            (INVALID_DEVICE, Error::hipErrorInvalidDevice),
        ];
        for (ours, theirs) in answers {
            assert_eq!(ours, Code(theirs as u32), "{theirs:?}");
        }
        let location =
            hipMemLocation { type_: hipMemLocationType::hipMemLocationTypeDevice, id: 7 };
        let flags = hipMemAccessFlags::hipMemAccessFlagsProtReadWrite;
        // SAFETY: both are three 32-bit numbers, or this does not compile.
        let [ours, theirs] = unsafe {
            [
                std::mem::transmute::<table::PoolAccess, [u32; 3]>(table::PoolAccess::of(7)),
                std::mem::transmute::<hipMemAccessDesc, [u32; 3]>(hipMemAccessDesc {
                    location,
                    flags,
                }),
            ]
        };
        assert_eq!(ours, theirs);
        assert_eq!(OLD_ARCHITECTURE_AT, offset_of!(hiprt::hipDeviceProp_t, gcnArchName));
    }

    /// So that the program runs on the libraries that put HIP over CUDA; and where there is no CUDA, they say so.
    #[test]
    fn the_libraries_over_cuda_have_every_function() {
        let folder = tempfile::tempdir().unwrap();
        let build = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hip_on_cuda/build");
        let built = Command::new(build).arg(folder.path()).output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let path = |name: &str| folder.path().join(name);
        let open = |name| {
            let path = path(name);
            OpenLibrary::first_of(BACKEND, "a library", &[path.to_str().unwrap()]).unwrap()
        };
        let hip = Hip::find(open("libamdhip64.so.7")).unwrap();
        assert_eq!(hip.version(), (7, 0));
        compile::find(open("libhiprtc.so.7")).unwrap();
        hipblaslt::Functions::find(open("libhipblaslt.so.1")).unwrap();
        rocblas::Functions::find(open("librocblas.so.5")).unwrap();
        if let Err(code) = context::device_count(&hip.table) {
            assert!(Amd::is_missing(code), "{code:?}");
            let said = hip.table.words(code);
            assert!(said.starts_with("HIP has no NVIDIA GPU below it: libcuda.so.1"), "{said}");
        }
        if let Err(error) = CollectiveLibrary::open(path(RCCL)) {
            assert!(error.to_string().contains("libnccl.so.2"), "{error}");
        }
    }

    #[test]
    fn libraries_of_one_release_are_looked_for_together() {
        assert_eq!(suffix("libamdhip64.so.6"), ".so.6");
        assert_eq!(suffix("libamdhip64.so"), ".so");
    }
}
