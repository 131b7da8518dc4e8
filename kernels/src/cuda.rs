//! NVIDIA GPUs: the parts that are specific to CUDA's driver interface, NVRTC and cuBLASLt.
//!
//! The three libraries are opened at their first use, so a program built with this module runs on
//! machines without them; a missing library is then an ordinary error. Building needs no CUDA
//! toolkit.

mod compile;
mod matmul;

use std::ffi::c_int;
use std::sync::{Arc, OnceLock};

use self::matmul::CublasLt;
use crate::error::{KernelError, Result};
use crate::gpu::collectives::NCCL;
use crate::gpu::driver::{DeviceProperties, MatrixProduct};
use crate::gpu::inventory::FoundLibrary;
use crate::gpu::source::{Source, SourceOptions};
use crate::gpu::vendor::compiler::{Compiler, takes_group_products};
use crate::gpu::vendor::context::{self, Context};
use crate::gpu::vendor::library::{OpenLibrary, once};
use crate::gpu::vendor::product::{ProductLibrary, Products};
use crate::gpu::vendor::table::{Code, Device, ErrorText, Interface, Table};
use crate::gpu::vendor::{ALL_DEVICES, Queue, Vendor, VendorDriver};

/// An NVIDIA GPU.
pub type Cuda = VendorDriver<Nvidia>;

/// NVIDIA.
pub struct Nvidia;

const BACKEND: &str = "cuda";

/// The oldest architecture that kernels are written for: bf16 products in tensor cores, asynchronous copies.
const OLDEST_CAPABILITY: (i32, i32) = (8, 0);

/// The oldest driver, as it numbers itself, that knows every call of the table: of 12.8, for `cuEventElapsedTime_v2`.
const OLDEST_DRIVER: c_int = 12_080;

// Device attributes, with the numbers of the driver interface.
const MULTIPROCESSORS: u32 = 16;
const CAPABILITY_MAJOR: u32 = 75;
const CAPABILITY_MINOR: u32 = 76;
/// The most shared memory of a block whose kernel asks for more than there is by default.
const SHARED_BYTES_PER_BLOCK: u32 = 97;

// The error codes that mean that there is no driver for these devices.
const STUB_LIBRARY: Code = Code(34);
const SYSTEM_DRIVER_MISMATCH: Code = Code(803);
const COMPAT_NOT_SUPPORTED_ON_DEVICE: Code = Code(804);

fn unavailable(reason: impl Into<String>) -> KernelError {
    KernelError::Unavailable { backend: BACKEND, reason: reason.into() }
}

/// The version of CUDA that a driver numbers so.
fn release(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// The driver, open.
struct NvidiaDriver {
    table: Table,
    found: FoundLibrary,
}

impl NvidiaDriver {
    fn get() -> Result<&'static Self> {
        static DRIVER: OnceLock<NvidiaDriver> = OnceLock::new();
        once(&DRIVER, || {
            let names = ["libcuda.so.1", "libcuda.so"];
            let library = OpenLibrary::first_of(BACKEND, "the NVIDIA driver's library", &names)?;
            let version =
                format!("the NVIDIA driver, of CUDA {}", release(check_driver(&library)?));
            let found = library.found(version, "cuInit");
            Ok(Self { table: Table::find(library, Interface::Cuda)?, found })
        })
    }
}

/// Asks for a driver that knows every call of the table; answers its version.
fn check_driver(library: &OpenLibrary) -> Result<c_int> {
    let mut version = 0;
    // SAFETY: the driver documents the function with this type. It writes one number, and may be asked before the driver is started.
    let (asked, text) = unsafe {
        let get: unsafe extern "C" fn(*mut c_int) -> Code =
            library.function("cuDriverGetVersion")?;
        (get(&raw mut version), ErrorText::find(library, Interface::Cuda)?)
    };
    asked.result().map_err(|code| KernelError::Device {
        attempted: "asking for the driver's version",
        device: BACKEND.to_owned(),
        answer: text.words(code),
    })?;
    if version >= OLDEST_DRIVER {
        return Ok(version);
    }
    let (found, oldest) = (release(version), release(OLDEST_DRIVER));
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

impl Vendor for Nvidia {
    const BACKEND: &'static str = BACKEND;
    const DRIVER: &'static str = "the NVIDIA driver";
    const COLLECTIVES: &'static str = NCCL;
    const WORKSPACE_BYTES: usize = CublasLt::WORKSPACE_BYTES;
    type MatrixLibrary = Products<CublasLt>;

    fn table() -> Result<&'static Table> {
        Ok(&NvidiaDriver::get()?.table)
    }

    fn is_missing(code: Code) -> bool {
        let missing =
            [Code::NO_DEVICE, STUB_LIBRARY, SYSTEM_DRIVER_MISMATCH, COMPAT_NOT_SUPPORTED_ON_DEVICE];
        missing.contains(&code)
    }

    fn kind(table: &Table, device: Device) -> Result<String> {
        let of = |attribute| {
            let found = context::attribute(table, device, attribute);
            table.on(ALL_DEVICES, "asking for an attribute", found)
        };
        let (major, minor) = (of(CAPABILITY_MAJOR)?, of(CAPABILITY_MINOR)?);
        Ok(format!("{major}.{minor}, {} multiprocessors", of(MULTIPROCESSORS)?))
    }

    fn architecture(context: &Context, name: &str) -> Result<String> {
        let major = context.attribute(name, CAPABILITY_MAJOR)?;
        let minor = context.attribute(name, CAPABILITY_MINOR)?;
        check_capability(name, (major, minor))?;
        // Compiled for one architecture, not for its family, so that its special instructions are
        // available.
        let specific = if major >= 9 { "a" } else { "" };
        Ok(format!("sm_{major}{minor}{specific}"))
    }

    fn driver() -> Result<FoundLibrary> {
        Ok(NvidiaDriver::get()?.found.clone())
    }

    fn compiler() -> Result<&'static Compiler> {
        compile::compiler()
    }

    fn matrix_library() -> Result<FoundLibrary> {
        matmul::found()
    }

    fn open_matrix_library(context: &Arc<Context>, name: &str) -> Result<Products<CublasLt>> {
        Ok(Products::new(CublasLt::open(context, name)?, name))
    }

    fn properties(
        context: &Context,
        name: String,
        architecture: String,
        library: &Products<CublasLt>,
    ) -> Result<DeviceProperties> {
        let attribute = |attribute| context.attribute(&name, attribute);
        let digest = library.digest()?.value;
        Ok(DeviceProperties {
            backend: BACKEND,
            warp: 32,
            group_products: takes_group_products(&architecture),
            architecture,
            multiprocessors: attribute(MULTIPROCESSORS)? as u32,
            shared_bytes_per_block: attribute(SHARED_BYTES_PER_BLOCK)? as usize,
            matrix_library: format!("{}, algorithms {digest:016x}", CublasLt::version()),
            collective_library: Some(Self::COLLECTIVES),
            name,
        })
    }

    fn compile(
        source: &'static Source,
        options: SourceOptions,
        properties: &DeviceProperties,
    ) -> Result<Vec<u8>> {
        compile::cubin(source, options, &properties.name, &properties.architecture)
    }

    fn adds_bias(
        library: &Products<CublasLt>,
        driver: &Cuda,
        queue: &mut Queue,
        product: &MatrixProduct,
    ) -> Result<bool> {
        library.adds_bias(driver, queue, product)
    }

    unsafe fn multiply(
        library: &Products<CublasLt>,
        driver: &Cuda,
        queue: &mut Queue,
        product: MatrixProduct,
    ) -> Result<()> {
        // SAFETY: the caller guarantees the validity of the operands.
        unsafe { library.matmul(driver, queue, product) }
    }
}

#[cfg(test)]
mod tests {
    use cudarc::driver::sys::{
        self, CUdevice_attribute, CUevent_flags, CUevent_wait_flags, CUfunction_attribute,
        CUlaunchAttributeID, CUmemAccess_flags, CUmemLocationType, CUmemPool_attribute, CUresult,
        CUstream_flags, CUstreamCaptureMode,
    };

    use super::*;
    use crate::gpu::vendor::table::{self, LaunchAttribute, LaunchSettings};

    #[test]
    fn settings_of_launches_are_those_of_the_driver_interface() {
        assert_eq!(size_of::<LaunchSettings>(), size_of::<sys::CUlaunchConfig>());
        assert_eq!(size_of::<LaunchAttribute>(), size_of::<sys::CUlaunchAttribute>());
        assert_eq!(align_of::<LaunchAttribute>(), align_of::<sys::CUlaunchAttribute>());
        let attribute = LaunchAttribute::early_start();
        let settings = LaunchSettings {
            grid: [1, 2, 3],
            block: [4, 5, 6],
            shared_bytes: 7,
            stream: std::ptr::dangling_mut(),
            attributes: &raw const attribute,
            attribute_count: 8,
        };
        // SAFETY: both are plain structs of one size, and the attribute is alive.
        let (theirs, first) = unsafe {
            let theirs = std::mem::transmute::<LaunchSettings, sys::CUlaunchConfig>(settings);
            (theirs, *theirs.attrs)
        };
        assert_eq!([theirs.gridDimX, theirs.gridDimY, theirs.gridDimZ], [1, 2, 3]);
        assert_eq!([theirs.blockDimX, theirs.blockDimY, theirs.blockDimZ], [4, 5, 6]);
        assert_eq!((theirs.sharedMemBytes, theirs.numAttrs), (7, 8));
        assert_eq!(theirs.hStream, std::ptr::dangling_mut());
        assert_eq!(first.id as u32, LaunchAttribute::EARLY_START);
        // SAFETY: the value of this attribute is a number.
        assert_eq!(unsafe { first.value.programmaticStreamSerializationAllowed }, 1);
    }

    #[test]
    fn devices_before_ampere_are_refused_in_one_line() {
        for capability in [(8, 0), (8, 6), (9, 0), (12, 0)] {
            check_capability("a GPU", capability).unwrap();
        }
        let error = check_capability("a GPU", (7, 5)).unwrap_err();
        assert_eq!(error.to_string(), "a GPU is of compute capability 7.5, expected 8.0 or newer");
    }

    #[test]
    fn numbers_are_those_of_the_driver_interface() {
        use CUdevice_attribute as Attribute;
        let same = [
            (MULTIPROCESSORS, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as u32),
            (CAPABILITY_MAJOR, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as u32),
            (CAPABILITY_MINOR, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as u32),
            (
                SHARED_BYTES_PER_BLOCK,
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as u32,
            ),
            (table::DEFAULT_FLAGS, CUstream_flags::CU_STREAM_DEFAULT as u32),
            (table::DEFAULT_FLAGS, CUevent_flags::CU_EVENT_DEFAULT as u32),
            (table::EVENT_WITHOUT_TIME, CUevent_flags::CU_EVENT_DISABLE_TIMING as u32),
            (table::DEFAULT_FLAGS, CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT as u32),
            (table::HOST_MEMORY_PORTABLE, sys::CU_MEMHOSTALLOC_PORTABLE),
            (
                table::CAPTURE_OF_THREAD,
                CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as u32,
            ),
            (
                table::POOL_RELEASE_THRESHOLD,
                CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD as u32,
            ),
            (
                table::FUNCTION_SHARED_BYTES,
                CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES as u32,
            ),
            (
                table::FUNCTION_ARCHITECTURE,
                CUfunction_attribute::CU_FUNC_ATTRIBUTE_BINARY_VERSION as u32,
            ),
            (
                table::LaunchAttribute::EARLY_START,
                CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION as u32,
            ),
            (
                table::FUNCTION_MOST_DYNAMIC_SHARED_BYTES,
                CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as u32,
            ),
        ];
        for (index, (ours, theirs)) in same.into_iter().enumerate() {
            assert_eq!(ours, theirs, "number {index}");
        }
        let same = [
            (
                table::TILE_ELEMENT_BF16,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 as u32,
            ),
            (
                table::TILE_INTERLEAVE_NONE,
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE as u32,
            ),
            (table::TILE_SWIZZLE_128, sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B as u32),
            (
                table::TILE_PROMOTION_256,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B as u32,
            ),
            (
                table::TILE_FILL_ZERO,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE as u32,
            ),
        ];
        for (index, (ours, theirs)) in same.into_iter().enumerate() {
            assert_eq!(ours, theirs, "number {index} of maps of tiles");
        }
        assert_eq!(size_of::<table::RawTileMap>(), size_of::<sys::CUtensorMap>());
        // The driver requires this alignment, which cudarc's declaration lacks.
        assert_eq!(align_of::<table::RawTileMap>(), 64);
        let answers = [
            (Code::SUCCESS, CUresult::CUDA_SUCCESS),
            (Code::INVALID_VALUE, CUresult::CUDA_ERROR_INVALID_VALUE),
            (Code::OUT_OF_MEMORY, CUresult::CUDA_ERROR_OUT_OF_MEMORY),
            (Code::NO_DEVICE, CUresult::CUDA_ERROR_NO_DEVICE),
            (Code::NOT_READY, CUresult::CUDA_ERROR_NOT_READY),
            (Code::LAUNCH_OUT_OF_RESOURCES, CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES),
            (Code::NOT_SUPPORTED, CUresult::CUDA_ERROR_NOT_SUPPORTED),
            (STUB_LIBRARY, CUresult::CUDA_ERROR_STUB_LIBRARY),
            (SYSTEM_DRIVER_MISMATCH, CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH),
            (COMPAT_NOT_SUPPORTED_ON_DEVICE, CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE),
        ];
        for (ours, theirs) in answers {
            assert_eq!(ours, Code(theirs as u32), "{theirs:?}");
        }
        // SAFETY: zeros are a value of this plain struct.
        let mut access: sys::CUmemAccessDesc = unsafe { std::mem::zeroed() };
        access.location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        access.location.id = 7;
        access.flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        // SAFETY: both are three 32-bit numbers, or this does not compile.
        let [ours, theirs] = unsafe {
            [
                std::mem::transmute::<table::PoolAccess, [u32; 3]>(table::PoolAccess::of(7)),
                std::mem::transmute::<sys::CUmemAccessDesc, [u32; 3]>(access),
            ]
        };
        assert_eq!(ours, theirs);
    }
}
