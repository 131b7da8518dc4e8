//! The functions of CUDA's driver interface or of HIP, found in a vendor's library at run time.
//!
//! The two interfaces match: the functions called here have the same arguments, and the same
//! numbers for flags, modes, attributes of functions and pools, and error codes. They differ in how
//! a thread selects a device ([`Binding`]), how an error code is turned into text ([`ErrorText`]),
//! and in the numbers of device attributes, which the vendor supplies.
//!
//! The declarations are our own, after both vendors' documentation. Error codes are numbers, not
//! enums, because a newer library may return codes that no header lists. An address on a device is
//! a number in CUDA and a pointer in HIP, of one size and passed in the same way.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

use super::library::OpenLibrary;
use crate::error::Result;

pub type Device = c_int;
pub type DeviceAddress = u64;
pub type RawContext = *mut c_void;
pub type RawMemoryPool = *mut c_void;
pub type RawStream = *mut c_void;
pub type RawEvent = *mut c_void;
pub type RawGraph = *mut c_void;
pub type RawExecutable = *mut c_void;
pub type RawModule = *mut c_void;
pub type RawFunction = *mut c_void;

/// Streams and events as they are by default: a stream waits for the legacy one and that waits for it; an event has a time.
pub const DEFAULT_FLAGS: c_uint = 0;
/// An event that has no time: a device and the host are done with it sooner.
pub const EVENT_WITHOUT_TIME: c_uint = 2;
/// Page-locked memory that all devices of the process reach.
pub const HOST_MEMORY_PORTABLE: c_uint = 1;
/// Other threads may call what would spoil a recording.
pub const CAPTURE_OF_THREAD: c_uint = 1;
/// How many bytes a pool keeps when a device is waited for: a 64-bit number.
pub const POOL_RELEASE_THRESHOLD: c_uint = 4;
/// Bytes of shared memory that a kernel uses beside those that its launch asks for.
pub const FUNCTION_SHARED_BYTES: c_uint = 1;
/// The architecture that a kernel's machine code is of, ten times its major version and its minor one.
pub const FUNCTION_ARCHITECTURE: c_uint = 6;
/// The most bytes of shared memory that a launch of a kernel may ask for.
pub const FUNCTION_MOST_DYNAMIC_SHARED_BYTES: c_uint = 8;

/// A map of tiles, where the driver interface writes it.
#[repr(C, align(64))]
pub struct RawTileMap(pub [u64; 16]);

/// The map, the type of its elements, how many dimensions there are, where they begin; the size of each, the bytes between the elements of
/// all but the first, the sizes of a tile, the steps in it; how elements interleave, how a tile's chunks are permuted, what the cache
/// fetches beside, and what stands for elements outside.
pub type EncodeTiles = unsafe extern "C" fn(
    *mut RawTileMap,
    c_uint,
    c_uint,
    DeviceAddress,
    *const u64,
    *const u64,
    *const c_uint,
    *const c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
) -> Code;
/// Elements of bf16.
pub const TILE_ELEMENT_BF16: c_uint = 9;
/// Elements in order.
pub const TILE_INTERLEAVE_NONE: c_uint = 0;
/// Chunks of 16 bytes permuted within 128.
pub const TILE_SWIZZLE_128: c_uint = 3;
/// Bytes that the cache fetches together: 256.
pub const TILE_PROMOTION_256: c_uint = 3;
/// Zeros outside.
pub const TILE_FILL_ZERO: c_uint = 0;

/// The configuration of a launch with attributes, laid out as the vendors' `CUlaunchConfig` and its HIP equivalent.
#[repr(C)]
pub struct LaunchSettings {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared_bytes: c_uint,
    pub stream: RawStream,
    pub attributes: *const LaunchAttribute,
    pub attribute_count: c_uint,
}

/// An attribute of a launch, and its value.
#[repr(C, align(8))]
pub struct LaunchAttribute {
    id: c_uint,
    padding: c_uint,
    value: [c_int; 16],
}

impl LaunchAttribute {
    /// The number of the attribute by which a kernel may begin before the one ahead of it on its stream has ended.
    pub const EARLY_START: c_uint = 6;

    /// The number of the attribute that says how many percent of the memory that multiprocessors split shall be shared memory.
    const SHARED_MEMORY_SPLIT: c_uint = 14;

    /// Lets a kernel begin early.
    pub fn early_start() -> Self {
        Self::new(Self::EARLY_START, 1)
    }

    /// Asks for as much shared memory as goes.
    pub fn all_shared() -> Self {
        Self::new(Self::SHARED_MEMORY_SPLIT, 100)
    }

    fn new(id: c_uint, number: c_int) -> Self {
        let mut value = [0; 16];
        value[0] = number;
        Self { id, padding: 0, value }
    }
}

/// Takes the settings, the function, its arguments, and null for `extra`, the packed form of arguments.
pub type LaunchWithSettings = unsafe extern "C" fn(
    *const LaunchSettings,
    RawFunction,
    *mut *mut c_void,
    *mut *mut c_void,
) -> Code;

/// The status that a function of the interface returns.
#[must_use]
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub c_uint);

impl Code {
    pub const SUCCESS: Self = Self(0);
    pub const INVALID_VALUE: Self = Self(1);
    pub const OUT_OF_MEMORY: Self = Self(2);
    pub const NO_DEVICE: Self = Self(100);
    pub const NOT_READY: Self = Self(600);
    pub const LAUNCH_OUT_OF_RESOURCES: Self = Self(701);
    pub const NOT_SUPPORTED: Self = Self(801);

    /// The answer as an error, unless it is success.
    pub fn result(self) -> std::result::Result<(), Self> {
        if self == Self::SUCCESS { Ok(()) } else { Err(self) }
    }
}

/// The access of devices to the memory of a pool.
#[repr(C)]
pub struct PoolAccess {
    place: c_uint,
    device: Device,
    rights: c_uint,
}

impl PoolAccess {
    /// Reading and writing from `device`.
    pub fn of(device: Device) -> Self {
        const ON_A_DEVICE: c_uint = 1;
        const READ_AND_WRITE: c_uint = 3;
        Self { place: ON_A_DEVICE, device, rights: READ_AND_WRITE }
    }
}

/// The interface by whose names the functions are looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interface {
    #[cfg(feature = "cuda")]
    Cuda,
    #[cfg(feature = "rocm")]
    Hip,
}

/// In the place of a type that is inferred.
#[cfg(test)]
macro_rules! any {
    ($argument:ty) => {
        _
    };
}

macro_rules! table {
    ($($field:ident($($argument:ty),*): $cuda:ident, $hip:ident;)*) => {
        /// The functions of an interface; the library that they are of stays open.
        pub struct Table {
            pub binding: Binding,
            pub error_text: ErrorText,
            /// Raises a limit of a kernel, where kernels have limits to be raised.
            pub set_function_attribute: Option<unsafe extern "C" fn(RawFunction, c_uint, c_int) -> Code>,
            /// Writes a map of tiles, where there is an engine that copies them.
            pub encode_tiles: Option<EncodeTiles>,
            /// Launches a kernel that may begin early, where there are such launches.
            pub launch_with_settings: Option<LaunchWithSettings>,
            $(pub $field: unsafe extern "C" fn($($argument),*) -> Code,)*
            _library: OpenLibrary,
        }

        impl Table {
            /// Finds every function of `interface` in `library`.
            ///
            /// # Errors
            /// The first function that the library lacks.
            pub fn find(library: OpenLibrary, interface: Interface) -> Result<Self> {
                // SAFETY: the vendor documents each function with the type of the field that it goes to.
                unsafe {
                    Ok(Self {
                        binding: Binding::find(&library, interface)?,
                        error_text: ErrorText::find(&library, interface)?,
                        set_function_attribute: match interface {
                            #[cfg(feature = "cuda")]
                            Interface::Cuda => Some(library.function("cuFuncSetAttribute")?),
                            #[cfg(feature = "rocm")]
                            Interface::Hip => None,
                        },
                        encode_tiles: match interface {
                            #[cfg(feature = "cuda")]
                            Interface::Cuda => library.function("cuTensorMapEncodeTiled").ok(),
                            #[cfg(feature = "rocm")]
                            Interface::Hip => None,
                        },
                        launch_with_settings: match interface {
                            #[cfg(feature = "cuda")]
                            Interface::Cuda => library.function("cuLaunchKernelEx").ok(),
                            #[cfg(feature = "rocm")]
                            Interface::Hip => None,
                        },
                        $($field: library.function(match interface {
                            #[cfg(feature = "cuda")]
                            Interface::Cuda => stringify!($cuda),
                            #[cfg(feature = "rocm")]
                            Interface::Hip => stringify!($hip),
                        })?,)*
                        _library: library,
                    })
                }
            }
        }

        /// The functions of CUDA's driver interface: the bytes of their arguments here, and as cudarc declares them.
        #[cfg(all(test, feature = "cuda"))]
        fn argument_bytes_of_cuda() -> Vec<(&'static str, Vec<usize>, Vec<usize>)> {
            use cudarc::driver::sys;
            vec![$((
                stringify!($cuda),
                vec![$(size_of::<$argument>()),*],
                tests::bytes_of(|| sys::$cuda as unsafe fn($(any!($argument)),*) -> _),
            )),*]
        }

        /// The functions of HIP: the bytes of their arguments here, and as hip-sys declares them.
        #[cfg(all(test, feature = "rocm"))]
        fn argument_bytes_of_hip() -> Vec<(&'static str, Vec<usize>, Vec<usize>)> {
            use hip_sys::hiprt;
            vec![$((
                stringify!($hip),
                vec![$(size_of::<$argument>()),*],
                tests::bytes_of(|| hiprt::$hip as unsafe extern "C" fn($(any!($argument)),*) -> _),
            )),*]
        }
    };
}

table! {
    init(c_uint): cuInit, hipInit;
    device_count(*mut c_int): cuDeviceGetCount, hipGetDeviceCount;
    device(*mut Device, c_int): cuDeviceGet, hipDeviceGet;
    device_name(*mut c_char, c_int, Device): cuDeviceGetName, hipDeviceGetName;
    device_uuid(*mut [u8; 16], Device): cuDeviceGetUuid_v2, hipDeviceGetUuid;
    device_attribute(*mut c_int, c_uint, Device): cuDeviceGetAttribute, hipDeviceGetAttribute;
    can_access_peer(*mut c_int, Device, Device): cuDeviceCanAccessPeer, hipDeviceCanAccessPeer;
    synchronize(): cuCtxSynchronize, hipDeviceSynchronize;

    memory_info(*mut usize, *mut usize): cuMemGetInfo_v2, hipMemGetInfo;
    default_pool(*mut RawMemoryPool, Device): cuDeviceGetDefaultMemPool, hipDeviceGetDefaultMemPool;
    pool_trim(RawMemoryPool, usize): cuMemPoolTrimTo, hipMemPoolTrimTo;
    pool_set_attribute(RawMemoryPool, c_uint, *mut c_void): cuMemPoolSetAttribute, hipMemPoolSetAttribute;
    pool_set_access(RawMemoryPool, *const PoolAccess, usize): cuMemPoolSetAccess, hipMemPoolSetAccess;
    allocate(*mut DeviceAddress, usize, RawStream): cuMemAllocAsync, hipMallocAsync;
    free(DeviceAddress, RawStream): cuMemFreeAsync, hipFreeAsync;
    allocate_host(*mut *mut c_void, usize, c_uint): cuMemHostAlloc, hipHostMalloc;
    free_host(*mut c_void): cuMemFreeHost, hipHostFree;
    fill_bytes(DeviceAddress, u8, usize, RawStream): cuMemsetD8Async, hipMemsetD8Async;
    upload(DeviceAddress, *const c_void, usize, RawStream): cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync;
    download(*mut c_void, DeviceAddress, usize, RawStream): cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync;
    copy(DeviceAddress, DeviceAddress, usize, RawStream): cuMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync;

    stream_create(*mut RawStream, c_uint): cuStreamCreate, hipStreamCreateWithFlags;
    stream_synchronize(RawStream): cuStreamSynchronize, hipStreamSynchronize;
    stream_destroy(RawStream): cuStreamDestroy_v2, hipStreamDestroy;
    stream_wait(RawStream, RawEvent, c_uint): cuStreamWaitEvent, hipStreamWaitEvent;
    begin_capture(RawStream, c_uint): cuStreamBeginCapture_v2, hipStreamBeginCapture;
    end_capture(RawStream, *mut RawGraph): cuStreamEndCapture, hipStreamEndCapture;

    event_create(*mut RawEvent, c_uint): cuEventCreate, hipEventCreateWithFlags;
    event_record(RawEvent, RawStream): cuEventRecord, hipEventRecord;
    event_query(RawEvent): cuEventQuery, hipEventQuery;
    event_synchronize(RawEvent): cuEventSynchronize, hipEventSynchronize;
    event_elapsed(*mut f32, RawEvent, RawEvent): cuEventElapsedTime_v2, hipEventElapsedTime;
    event_destroy(RawEvent): cuEventDestroy_v2, hipEventDestroy;

    graph_instantiate(*mut RawExecutable, RawGraph, c_ulonglong): cuGraphInstantiateWithFlags, hipGraphInstantiateWithFlags;
    graph_launch(RawExecutable, RawStream): cuGraphLaunch, hipGraphLaunch;
    executable_destroy(RawExecutable): cuGraphExecDestroy, hipGraphExecDestroy;
    graph_destroy(RawGraph): cuGraphDestroy, hipGraphDestroy;

    module_load(*mut RawModule, *const c_void): cuModuleLoadData, hipModuleLoadData;
    module_unload(RawModule): cuModuleUnload, hipModuleUnload;
    module_function(*mut RawFunction, RawModule, *const c_char): cuModuleGetFunction, hipModuleGetFunction;
    function_attribute(*mut c_int, c_uint, RawFunction): cuFuncGetAttribute, hipFuncGetAttribute;
    launch(
        RawFunction,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        RawStream,
        *mut *mut c_void,
        *mut *mut c_void
    ): cuLaunchKernel, hipModuleLaunchKernel;
}

/// How a thread is given the device that its calls are for.
#[derive(Clone, Copy)]
pub enum Binding {
    /// The thread makes a context of the device current, which all its users in the process share.
    Context {
        retain: unsafe extern "C" fn(*mut RawContext, Device) -> Code,
        release: unsafe extern "C" fn(Device) -> Code,
        current: unsafe extern "C" fn(*mut RawContext) -> Code,
        make_current: unsafe extern "C" fn(RawContext) -> Code,
    },
    /// The thread sets the number of the device.
    Number {
        current: unsafe extern "C" fn(*mut Device) -> Code,
        make_current: unsafe extern "C" fn(Device) -> Code,
    },
}

impl Binding {
    /// # Safety
    /// The library is one of `interface`.
    unsafe fn find(library: &OpenLibrary, interface: Interface) -> Result<Self> {
        // SAFETY: as above; the vendor documents each function with the type of its field.
        unsafe {
            match interface {
                #[cfg(feature = "cuda")]
                Interface::Cuda => Ok(Self::Context {
                    retain: library.function("cuDevicePrimaryCtxRetain")?,
                    release: library.function("cuDevicePrimaryCtxRelease_v2")?,
                    current: library.function("cuCtxGetCurrent")?,
                    make_current: library.function("cuCtxSetCurrent")?,
                }),
                #[cfg(feature = "rocm")]
                Interface::Hip => Ok(Self::Number {
                    current: library.function("hipGetDevice")?,
                    make_current: library.function("hipSetDevice")?,
                }),
            }
        }
    }
}

/// How an answer is put into words.
#[derive(Clone, Copy)]
pub enum ErrorText {
    /// The function leaves the text in a place.
    Written(unsafe extern "C" fn(Code, *mut *const c_char) -> Code),
    /// The function answers the text.
    Answered(unsafe extern "C" fn(Code) -> *const c_char),
}

impl ErrorText {
    /// # Safety
    /// The library is one of `interface`.
    pub unsafe fn find(library: &OpenLibrary, interface: Interface) -> Result<Self> {
        // SAFETY: as above.
        unsafe {
            match interface {
                #[cfg(feature = "cuda")]
                Interface::Cuda => Ok(Self::Written(library.function("cuGetErrorString")?)),
                #[cfg(feature = "rocm")]
                Interface::Hip => Ok(Self::Answered(library.function("hipGetErrorString")?)),
            }
        }
    }

    /// `code` in the library's words.
    pub fn words(self, code: Code) -> String {
        let mut text = std::ptr::null();
        match self {
            // SAFETY: the function writes one address, of a text that stays; or none for a number that it does not know.
            Self::Written(write) => drop(unsafe { write(code, &raw mut text) }.result()),
            // SAFETY: the function answers a text that stays, for any number.
            Self::Answered(answer) => text = unsafe { answer(code) },
        }
        if text.is_null() {
            return "an error that it has no words for".to_owned();
        }
        // SAFETY: it is a constant text of the library.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes of the arguments of a function. It is not called, nor is what names it: no library has to be linked.
    pub(super) fn bytes_of<F: ArgumentBytes>(_: impl FnOnce() -> F) -> Vec<usize> {
        F::argument_bytes()
    }

    pub(super) trait ArgumentBytes {
        fn argument_bytes() -> Vec<usize>;
    }

    macro_rules! functions {
        ($($arguments:ident)*) => {
            functions!(@of unsafe fn($($arguments),*) -> Answer, $($arguments)*);
            functions!(@of unsafe extern "C" fn($($arguments),*) -> Answer, $($arguments)*);
        };
        (@of $function:ty, $($arguments:ident)*) => {
            impl<Answer, $($arguments),*> ArgumentBytes for $function {
                fn argument_bytes() -> Vec<usize> {
                    assert_eq!(size_of::<Answer>(), size_of::<Code>());
                    vec![$(size_of::<$arguments>()),*]
                }
            }
        };
    }
    functions!();
    functions!(A);
    functions!(A B);
    functions!(A B C);
    functions!(A B C D);
    functions!(A B C D E F G H I J K);

    #[cfg(feature = "cuda")]
    #[test]
    fn functions_are_declared_as_in_cudarc() {
        let functions = argument_bytes_of_cuda();
        assert!(functions.len() > 40);
        for (function, ours, theirs) in functions {
            assert_eq!(ours, theirs, "{function}");
        }
    }

    #[cfg(feature = "rocm")]
    #[test]
    fn functions_are_declared_as_in_hip_sys() {
        let functions = argument_bytes_of_hip();
        assert!(functions.len() > 40);
        for (function, ours, theirs) in functions {
            assert_eq!(ours, theirs, "{function}");
        }
    }

    #[test]
    fn a_library_without_the_interface_is_an_error() {
        let missing = [
            #[cfg(feature = "cuda")]
            (Interface::Cuda, "cuDevicePrimaryCtxRetain"),
            #[cfg(feature = "rocm")]
            (Interface::Hip, "hipGetDevice"),
        ];
        for (interface, function) in missing {
            let library = OpenLibrary::first_of("gpu", "the library", &["libc.so.6"]).unwrap();
            let said = Table::find(library, interface).err().unwrap().to_string();
            assert!(said.contains(&format!("libc.so.6 has no {function}: ")), "{said}");
        }
    }
}
