//! rocBLAS: its solutions, and the call of a product.
//!
//! Solutions that cannot compute products of both few and many rows are left out. None may split k:
//! the library gets no workspace for partial sums, and may not add by atomics; trials check that a
//! solution keeps to this before it is used ([`choose_algorithm`](crate::gpu::choose_algorithm)).
//!
//! The declarations are our own, after AMD's documentation of rocBLAS 3 to 5. The list of solutions
//! belongs to its so-called beta interface.

use std::collections::HashSet;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, OnceLock};

use super::handles::{Handles, RawHandle};
use super::{BACKEND, Hip};
use crate::backend::Output;
use crate::error::{KernelError, Result};
use crate::gpu::driver::{ElementKind, MatrixProduct, Operand, Rows};
use crate::gpu::inventory::FoundLibrary;
use crate::gpu::vendor::Queue;
use crate::gpu::vendor::context::Context;
use crate::gpu::vendor::library::{OpenLibrary, once};
use crate::gpu::vendor::product::key::{PROBED_ROWS, pinned_rows};
use crate::gpu::vendor::product::{Answer, Answered, Batches, ProductLibrary};
use crate::gpu::{Candidate, Terms};

type Operation = c_int;
type DataType = c_int;

/// The status that a function of the library returns: a `rocblas_status`.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq)]
struct Status(c_int);

const SUCCESS: Status = Status(0);
/// Too little workspace, and what the library does not tell: other answers to a solution that it cannot run.
const UNCLEAR: [Status; 2] = [Status(5), Status(6)];
/// The answers to what the library would refuse again.
const LASTING: [Status; 5] = [
    // not implemented, invalid size, invalid value, not built with it, another architecture
    Status(2),
    Status(4),
    Status(11),
    Status(14),
    Status(15),
];

const AS_IT_IS: Operation = 111;
const TRANSPOSED: Operation = 112;
const FP32: DataType = 151;
const BF16: DataType = 168;
/// The solution is that of an index.
const BY_INDEX: c_int = 1;
/// No sums by atomics.
const WITHOUT_ATOMICS: c_int = 0;

/// A solution, by the library's number.
type Solution = i32;

/// `gemm_ex` as far as both of its functions take the same: D = alpha op(A) op(B) + beta C, column by column.
macro_rules! product_function {
    ($($rest:ty),*) => {
        unsafe extern "C" fn(
            RawHandle,
            Operation,
            Operation,
            c_int,
            c_int,
            c_int,
            *const c_void,
            *const c_void,
            DataType,
            c_int,
            *const c_void,
            DataType,
            c_int,
            *const c_void,
            *const c_void,
            DataType,
            c_int,
            *mut c_void,
            DataType,
            c_int,
            DataType,
            c_int,
            $($rest),*
        ) -> Status
    };
}

/// The functions of the library.
pub(super) struct Functions {
    create: unsafe extern "C" fn(*mut RawHandle) -> Status,
    destroy: unsafe extern "C" fn(RawHandle) -> c_int,
    set_stream: unsafe extern "C" fn(RawHandle, *mut c_void) -> Status,
    set_workspace: unsafe extern "C" fn(RawHandle, *mut c_void, usize) -> Status,
    set_atomics_mode: unsafe extern "C" fn(RawHandle, c_int) -> Status,
    version_bytes: unsafe extern "C" fn(*mut usize) -> Status,
    version: unsafe extern "C" fn(*mut c_char, usize) -> Status,
    /// Solution and flags.
    multiply: product_function!(i32, u32),
    /// Flags, and where the solutions and their number go.
    solutions: product_function!(u32, *mut Solution, *mut c_int),
    text: unsafe extern "C" fn(Status) -> *const c_char,
    library: OpenLibrary,
}

impl Functions {
    /// # Errors
    /// A library that is not there, or lacks a function.
    pub(super) fn get() -> Result<&'static Self> {
        static FUNCTIONS: OnceLock<Functions> = OnceLock::new();
        once(&FUNCTIONS, || {
            let hip = Hip::get()?;
            let versions: &[&str] = match hip.version().0 {
                5 => &[".3", ".0"],
                6 => &[".4"],
                _ => &[".5"],
            };
            let names = hip.beside("librocblas", versions);
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            Self::find(OpenLibrary::first_of(BACKEND, "AMD's matrix library", &names)?)
        })
    }

    /// The library's version and file, for the inventory.
    pub(super) fn found(&self) -> FoundLibrary {
        let version = match self.version() {
            Ok(version) => format!("rocBLAS {version}"),
            Err(status) => format!("rocBLAS, whose version is not told: {}", self.words(status)),
        };
        self.library.found(version, "rocblas_create_handle")
    }

    /// Finds every function in `library`.
    ///
    /// # Errors
    /// The first function that the library lacks.
    pub(super) fn find(library: OpenLibrary) -> Result<Self> {
        // SAFETY: the library documents each function with the type of the field that it goes to.
        unsafe {
            Ok(Self {
                create: library.function("rocblas_create_handle")?,
                destroy: library.function("rocblas_destroy_handle")?,
                set_stream: library.function("rocblas_set_stream")?,
                set_workspace: library.function("rocblas_set_workspace")?,
                set_atomics_mode: library.function("rocblas_set_atomics_mode")?,
                version_bytes: library.function("rocblas_get_version_string_size")?,
                version: library.function("rocblas_get_version_string")?,
                multiply: library.function("rocblas_gemm_ex")?,
                solutions: library.function("rocblas_gemm_ex_get_solutions")?,
                text: library.function("rocblas_status_to_string")?,
                library,
            })
        }
    }

    fn words(&self, status: Status) -> String {
        // SAFETY: the function answers a constant text for any number.
        let text = unsafe { CStr::from_ptr((self.text)(status)) };
        text.to_string_lossy().into_owned()
    }

    fn version(&self) -> std::result::Result<String, Status> {
        let mut bytes = 0;
        // SAFETY: it writes one number.
        done(unsafe { (self.version_bytes)(&raw mut bytes) })?;
        let mut text = vec![0_u8; bytes + 1];
        // SAFETY: it writes at most as many bytes as it is told that there is room for.
        done(unsafe { (self.version)(text.as_mut_ptr().cast(), bytes) })?;
        let end = text.iter().position(|&byte| byte == 0).unwrap_or(bytes);
        Ok(String::from_utf8_lossy(&text[..end]).into_owned())
    }
}

/// The arguments of a product in the library's column-major convention: it computes `out^T = b^T a^T`.
struct Call {
    operations: [Operation; 2],
    sizes: [c_int; 3],
    addresses: [u64; 3],
    types: [DataType; 3],
    strides: [c_int; 3],
    beta: f32,
    /// The address of the matrix that the product is added to.
    base: u64,
}

impl Call {
    /// Sizes are cast to the library's 32 bits unchecked: a buffer with more rows or columns than these count fits no device.
    fn of(product: &MatrixProduct) -> Self {
        let MatrixProduct { out, a, b, m, n, k, output, base, .. } = *product;
        let operation = |operand: Operand| if operand.transposed { TRANSPOSED } else { AS_IT_IS };
        let operands = [b, a, out];
        Self {
            operations: [operation(b), operation(a)],
            sizes: [n, m, k].map(|size| size as c_int),
            addresses: operands.map(|operand| operand.address.0),
            types: operands.map(|operand| match operand.element {
                ElementKind::F32 => FP32,
                ElementKind::Bf16 => BF16,
            }),
            strides: operands.map(|operand| operand.stride as c_int),
            beta: if output == Output::Add { 1.0 } else { 0.0 },
            base: base.0,
        }
    }
}

/// A call of a function of products: what both take, then `rest`.
macro_rules! call {
    ($function:expr, $handle:expr, $call:expr, $($rest:expr),*) => {{
        let Call { operations, sizes, addresses, types, strides, beta, base } = &$call;
        let one = 1.0_f32;
        ($function)(
            $handle,
            operations[0],
            operations[1],
            sizes[0],
            sizes[1],
            sizes[2],
            (&raw const one).cast(),
            addresses[0] as *const c_void,
            types[0],
            strides[0],
            addresses[1] as *const c_void,
            types[1],
            strides[1],
            std::ptr::from_ref(beta).cast(),
            *base as *const c_void,
            types[2],
            strides[2],
            addresses[2] as *mut c_void,
            types[2],
            strides[2],
            FP32,
            BY_INDEX,
            $($rest),*
        )
    }};
}

fn done(status: Status) -> std::result::Result<(), Status> {
    if status == SUCCESS { Ok(()) } else { Err(status) }
}

/// rocBLAS on one device.
pub struct RocBlas {
    functions: &'static Functions,
    version: String,
    handles: Handles,
}

impl RocBlas {
    pub(super) fn open(context: &Arc<Context>, device: &str) -> Result<Self> {
        let functions = Functions::get()?;
        let failed = |attempted, words: &str| KernelError::Device {
            attempted,
            device: device.to_owned(),
            answer: format!("rocBLAS: {words}"),
        };
        let version = functions
            .version()
            .map_err(|status| failed("asking for rocBLAS's version", &functions.words(status)))?;
        let handles = Handles::new(context, functions.destroy);
        let library = Self { functions, version, handles };
        library.handle(None).map_err(|answer| failed("opening rocBLAS", answer.words()))?;
        Ok(library)
    }

    /// The library's version and file, for the inventory.
    pub(super) fn found(&self) -> FoundLibrary {
        self.functions.found()
    }

    pub(super) fn version(&self) -> String {
        format!("rocBLAS {}", self.version)
    }

    fn answer(&self, status: Status) -> Answer {
        let words = self.functions.words(status);
        match status {
            status if LASTING.contains(&status) => Answer::Refuses(words),
            status if UNCLEAR.contains(&status) => Answer::Unclear(words),
            _ => Answer::Fails(words),
        }
    }

    /// The handle of a queue, or of none.
    fn handle(&self, queue: Option<&Queue>) -> Answered<RawHandle> {
        let Functions { create, destroy, set_stream, set_workspace, set_atomics_mode, .. } =
            self.functions;
        self.handles.get(queue, || {
            let mut handle = std::ptr::null_mut();
            // SAFETY: the device is this thread's own, the first call writes one handle, and the queue's stream and workspace are
            // there for as long as it is. A handle that cannot be used is destroyed once.
            let made = unsafe {
                done(create(&raw mut handle)).map_err(|status| self.answer(status))?;
                let set = || {
                    done(set_atomics_mode(handle, WITHOUT_ATOMICS))?;
                    let Some(queue) = queue else { return Ok(()) };
                    done(set_stream(handle, queue.stream()))?;
                    let workspace = queue.workspace().0 as *mut c_void;
                    done(set_workspace(handle, workspace, Self::WORKSPACE_BYTES))
                };
                set().inspect_err(|_| {
                    destroy(handle);
                })
            };
            made.map_err(|status| self.answer(status))?;
            Ok(handle)
        })
    }

    /// The library's list of solutions for a product of `rows` rows; empty where it has none.
    fn listed(&self, product: &MatrixProduct, rows: usize) -> Answered<Vec<Solution>> {
        /// An address without memory: the library refuses a null address even where it only looks at sizes.
        const SOMEWHERE: usize = 4096;
        let product = MatrixProduct { m: rows, ..*product };
        let handle = self.handle(None)?;
        // As aligned as the operands, because the library's choice may depend on the alignment of
        // addresses.
        let addresses = [product.b, product.a, product.out]
            .map(|operand| (SOMEWHERE + operand.alignment) as u64);
        let call = Call { addresses, base: addresses[2], ..Call::of(&product) };
        let ask = |solutions: *mut Solution, count: &mut c_int| {
            // SAFETY: nothing is computed; the library writes as many solutions as it is told that there are places for, or only how
            // many there are.
            done(unsafe { call!(self.functions.solutions, handle, call, 0, solutions, count) })
        };
        let mut count = 0;
        let asked = ask(std::ptr::null_mut(), &mut count).and_then(|()| {
            let mut solutions = vec![0; usize::try_from(count).unwrap_or(0)];
            ask(solutions.as_mut_ptr(), &mut count)?;
            solutions.truncate(usize::try_from(count).unwrap_or(0));
            Ok(solutions)
        });
        match asked {
            Ok(solutions) => Ok(solutions),
            Err(status) if LASTING.contains(&status) => Ok(Vec::new()),
            Err(status) => Err(self.answer(status)),
        }
    }
}

impl ProductLibrary for RocBlas {
    const NAME: &'static str = "rocBLAS";
    const BATCHES: Batches = Batches::OneByOne;
    /// Too little for parts of sums, and more than none, for which the library would make its own.
    const WORKSPACE_BYTES: usize = 256;
    type Algorithm = Solution;
    type Plan = Solution;

    fn candidates(
        &self,
        product: &MatrixProduct,
    ) -> Answered<impl Iterator<Item = Candidate<Solution>>> {
        let mut accepted = self.listed(product, pinned_rows(product))?;
        if product.rows == Rows::Free {
            for rows in PROBED_ROWS {
                let able: HashSet<Solution> = self.listed(product, rows)?.into_iter().collect();
                accepted.retain(|solution| able.contains(solution));
            }
        }
        // The library does not report the workspace of a solution: one that needs more than it gets
        // is refused.
        Ok(accepted.into_iter().map(|algorithm| Candidate {
            algorithm,
            workspace_bytes: 0,
            terms: Terms::Whole,
        }))
    }

    fn parts(solution: &Solution) -> Vec<Option<u32>> {
        vec![Some(*solution as u32)]
    }

    fn plan(&self, _: &MatrixProduct, solution: &Solution) -> Answered<Solution> {
        Ok(*solution)
    }

    unsafe fn enqueue(
        &self,
        queue: &Queue,
        solution: &Solution,
        product: &MatrixProduct,
    ) -> Answered<()> {
        let handle = self.handle(Some(queue))?;
        let call = Call::of(product);
        // SAFETY: the caller guarantees the validity of the operands; handle and stream are alive; factors are read during the call.
        let enqueued = done(unsafe { call!(self.functions.multiply, handle, call, *solution, 0) });
        enqueued.map_err(|status| self.answer(status))
    }
}
