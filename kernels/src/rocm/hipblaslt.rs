//! hipBLASLt: its proposals for a product, and the call of a product.
//!
//! The library does not say which of its algorithms split k. Those that do keep partial sums in a
//! workspace, so the library gets none, and an algorithm that asks for one is left out; the library
//! also cuts k of some algorithms by the number of rows as far as a workspace allows, which is
//! impossible without one. Trials find algorithms that add partial sums by atomics
//! ([`choose_algorithm`](crate::gpu::choose_algorithm)), and algorithms that refuse few rows, for
//! which the library cannot be asked.
//!
//! The declarations are our own, after AMD's documentation of hipBLASLt 0.6 to 1 (ROCm 6 and 7).
//! Earlier versions have other numbers.

mod plan;

use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::{Arc, OnceLock};

use self::plan::Plan;
use super::handles::{Handles, RawHandle};
use super::{BACKEND, Hip};
use crate::backend::Output;
use crate::error::{KernelError, Result};
use crate::gpu::Candidate;
use crate::gpu::driver::MatrixProduct;
use crate::gpu::inventory::FoundLibrary;
use crate::gpu::vendor::Queue;
use crate::gpu::vendor::context::Context;
use crate::gpu::vendor::library::{OpenLibrary, once};
use crate::gpu::vendor::product::key::canonical;
use crate::gpu::vendor::product::{Answer, Answered, Batches, ProductLibrary};

/// The status that a function of the library returns: a `hipblasStatus_t`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Status(c_int);

impl Status {
    const SUCCESS: Self = Self(0);
    const INVALID_VALUE: Self = Self(3);
    const INTERNAL_ERROR: Self = Self(6);
    const NOT_SUPPORTED: Self = Self(7);
    const ARCH_MISMATCH: Self = Self(8);

    fn done(self) -> Answered<()> {
        if self == Self::SUCCESS { Ok(()) } else { Err(self.answer()) }
    }

    fn answer(self) -> Answer {
        let words = self.to_string();
        match self {
            Self::INVALID_VALUE | Self::NOT_SUPPORTED | Self::ARCH_MISMATCH => {
                Answer::Refuses(words)
            }
            // A solution that does not run here gives this code, as does a failed launch.
            Self::INTERNAL_ERROR => Answer::Unclear(words),
            _ => Answer::Fails(words),
        }
    }
}

/// The library has no function for it.
impl fmt::Display for Status {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self.0 {
            0 => "success",
            1 => "not initialized",
            2 => "allocation failed",
            3 => "invalid value",
            4 => "mapping error",
            5 => "execution failed",
            6 => "internal error",
            7 => "not supported",
            8 => "architecture mismatch",
            9 => "handle is a null pointer",
            10 => "invalid enumerator",
            number => return write!(out, "status {number}"),
        })
    }
}

/// An algorithm: a `hipblasLtMatmulAlgo_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Algorithm {
    /// The first four bytes are the number of a solution, which is the same for one build of the library.
    data: [u8; 16],
    most_workspace_bytes: usize,
}

impl Algorithm {
    fn number(&self) -> u32 {
        let [a, b, c, d, ..] = self.data;
        u32::from_le_bytes([a, b, c, d])
    }
}

/// A `hipblasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Proposal {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

type Raw = *mut c_void;

/// The functions of the library.
pub(super) struct Functions {
    create: unsafe extern "C" fn(*mut RawHandle) -> Status,
    destroy: unsafe extern "C" fn(RawHandle) -> c_int,
    version: unsafe extern "C" fn(RawHandle, *mut c_int) -> Status,
    /// Rows, columns and stride.
    layout_create: unsafe extern "C" fn(*mut Raw, c_int, u64, u64, i64) -> Status,
    layout_destroy: unsafe extern "C" fn(Raw) -> Status,
    /// The type that sums are formed in, and that of their factors.
    operation_create: unsafe extern "C" fn(*mut Raw, c_int, c_int) -> Status,
    operation_destroy: unsafe extern "C" fn(Raw) -> Status,
    operation_set: unsafe extern "C" fn(Raw, c_int, *const c_void, usize) -> Status,
    preference_create: unsafe extern "C" fn(*mut Raw) -> Status,
    preference_destroy: unsafe extern "C" fn(Raw) -> Status,
    preference_set: unsafe extern "C" fn(Raw, c_int, *const c_void, usize) -> Status,
    /// Operation, a, b, c, d, preference, room, proposals and their number.
    propose: unsafe extern "C" fn(
        RawHandle,
        Raw,
        Raw,
        Raw,
        Raw,
        Raw,
        Raw,
        c_int,
        *mut Proposal,
        *mut c_int,
    ) -> Status,
    /// D = alpha op(A) op(B) + beta C, column by column; then the algorithm, workspace, its bytes, and the stream.
    multiply: unsafe extern "C" fn(
        RawHandle,
        Raw,
        *const c_void,
        *const c_void,
        Raw,
        *const c_void,
        Raw,
        *const c_void,
        *const c_void,
        Raw,
        *mut c_void,
        Raw,
        *const Algorithm,
        *mut c_void,
        usize,
        *mut c_void,
    ) -> Status,
    library: OpenLibrary,
}

impl Functions {
    /// # Errors
    /// A library that is not there, lacks a function, or is older than its interface.
    pub(super) fn get() -> Result<&'static Self> {
        static FUNCTIONS: OnceLock<Functions> = OnceLock::new();
        once(&FUNCTIONS, || {
            let hip = Hip::get()?;
            let versions: &[&str] = match hip.version().0 {
                5 => {
                    let reason = "hipBLASLt of ROCm 5 has another interface".to_owned();
                    return Err(KernelError::Unavailable { backend: BACKEND, reason });
                }
                6 => &[".0"],
                _ => &[".1"],
            };
            let names = hip.beside("libhipblaslt", versions);
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            Self::find(OpenLibrary::first_of(BACKEND, "the matrix library", &names)?)
        })
    }

    /// Finds every function in `library`.
    ///
    /// # Errors
    /// The first function that the library lacks.
    pub(super) fn find(library: OpenLibrary) -> Result<Self> {
        // SAFETY: the library documents each function with the type of the field that it goes to.
        unsafe {
            Ok(Self {
                create: library.function("hipblasLtCreate")?,
                destroy: library.function("hipblasLtDestroy")?,
                version: library.function("hipblasLtGetVersion")?,
                layout_create: library.function("hipblasLtMatrixLayoutCreate")?,
                layout_destroy: library.function("hipblasLtMatrixLayoutDestroy")?,
                operation_create: library.function("hipblasLtMatmulDescCreate")?,
                operation_destroy: library.function("hipblasLtMatmulDescDestroy")?,
                operation_set: library.function("hipblasLtMatmulDescSetAttribute")?,
                preference_create: library.function("hipblasLtMatmulPreferenceCreate")?,
                preference_destroy: library.function("hipblasLtMatmulPreferenceDestroy")?,
                preference_set: library.function("hipblasLtMatmulPreferenceSetAttribute")?,
                propose: library.function("hipblasLtMatmulAlgoGetHeuristic")?,
                multiply: library.function("hipblasLtMatmul")?,
                library,
            })
        }
    }
}

/// hipBLASLt on one device.
pub struct HipBlasLt {
    functions: &'static Functions,
    version: String,
    handles: Handles,
}

impl HipBlasLt {
    /// # Errors
    /// [`KernelError::Unavailable`]: a library that is not there or does not fit, or one that makes no handle for the device, which
    /// is the calling thread's own.
    pub(super) fn open(context: &Arc<Context>) -> Result<Self> {
        let functions = Functions::get()?;
        let handles = Handles::new(context, functions.destroy);
        let mut library = Self { functions, version: String::new(), handles };
        let refused = |attempted: &'static str| {
            move |answer: Answer| {
                let (file, words) = (functions.library.file_name(), answer.words());
                let reason = format!("{file} {attempted}: {words}");
                KernelError::Unavailable { backend: BACKEND, reason }
            }
        };
        let handle = library.handle(None).map_err(refused("makes no handle"))?;
        let mut version = 0;
        // SAFETY: the handle is alive, and the call writes one number.
        let asked = unsafe { (functions.version)(handle, &raw mut version) }.done();
        asked.map_err(refused("does not tell its version"))?;
        library.version = release(version);
        Ok(library)
    }

    pub(super) fn version(&self) -> String {
        format!("hipBLASLt {}", self.version)
    }

    /// The library's version and file, for the inventory.
    pub(super) fn found(&self) -> FoundLibrary {
        self.functions.library.found(self.version(), "hipblasLtCreate")
    }

    /// The handle of a queue, or that of none, which only asks.
    fn handle(&self, queue: Option<&Queue>) -> Answered<RawHandle> {
        self.handles.get(queue, || {
            let mut handle = std::ptr::null_mut();
            // SAFETY: the device is this thread's own, and the call writes one handle.
            unsafe { (self.functions.create)(&raw mut handle) }.done()?;
            Ok(handle)
        })
    }
}

/// A version in the library's numbering as text: `1.4.1` for 100401.
fn release(version: c_int) -> String {
    format!("{}.{}.{}", version / 100_000, version / 100 % 1000, version % 100)
}

impl ProductLibrary for HipBlasLt {
    const NAME: &'static str = "hipBLASLt";
    const BATCHES: Batches = Batches::OneByOne;
    /// So that no sum over k is split.
    const WORKSPACE_BYTES: usize = 0;
    type Algorithm = Algorithm;
    type Plan = (Plan, Algorithm);

    fn candidates(
        &self,
        product: &MatrixProduct,
    ) -> Answered<impl Iterator<Item = Candidate<Algorithm>>> {
        let plan = Plan::new(self.functions, &canonical(product))?;
        Ok(plan.candidates(self.handle(None)?, Self::WORKSPACE_BYTES)?.into_iter())
    }

    fn parts(algorithm: &Algorithm) -> Vec<Option<u32>> {
        vec![Some(algorithm.number())]
    }

    fn plan(&self, product: &MatrixProduct, algorithm: &Algorithm) -> Answered<(Plan, Algorithm)> {
        Ok((Plan::new(self.functions, product)?, *algorithm))
    }

    unsafe fn enqueue(
        &self,
        queue: &Queue,
        (plan, algorithm): &(Plan, Algorithm),
        product: &MatrixProduct,
    ) -> Answered<()> {
        let one = 1.0_f32;
        let beta = if product.output == Output::Add { 1.0_f32 } else { 0.0 };
        let handle = self.handle(Some(queue))?;
        // SAFETY: the caller guarantees the validity of the operands; descriptors, handle and stream are alive; factors are read during the call.
        let enqueued = unsafe {
            (self.functions.multiply)(
                handle,
                plan.operation,
                std::ptr::from_ref(&one).cast(),
                product.b.address.0 as *const c_void,
                plan.left,
                product.a.address.0 as *const c_void,
                plan.right,
                std::ptr::from_ref(&beta).cast(),
                product.base.0 as *const c_void,
                plan.out,
                product.out.address.0 as *mut c_void,
                plan.out,
                algorithm,
                queue.workspace().0 as *mut c_void,
                Self::WORKSPACE_BYTES,
                queue.stream(),
            )
        };
        enqueued.done()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As AMD's headers have them: sixteen bytes and a size; that, a size, two numbers and four.
    #[test]
    fn structs_are_as_large_as_the_librarys() {
        assert_eq!((size_of::<Algorithm>(), align_of::<Algorithm>()), (24, 8));
        assert_eq!((size_of::<Proposal>(), align_of::<Proposal>()), (56, 8));
        assert_eq!(std::mem::offset_of!(Proposal, workspace_bytes), 24);
        assert_eq!(std::mem::offset_of!(Proposal, state), 32);
    }

    #[test]
    fn a_version_is_told_as_people_know_it() {
        assert_eq!(release(100_401), "1.4.1");
        assert_eq!(release(1003), "0.10.3");
    }

    #[test]
    fn what_the_library_would_refuse_again_is_told_from_what_failed() {
        assert_eq!(Status(7).answer(), Answer::Refuses("not supported".to_owned()));
        assert_eq!(Status(6).answer(), Answer::Unclear("internal error".to_owned()));
        assert_eq!(Status(2).answer(), Answer::Fails("allocation failed".to_owned()));
        assert_eq!(Status(77).answer(), Answer::Fails("status 77".to_owned()));
    }
}
