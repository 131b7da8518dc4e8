//! Matrix products by rocBLAS, the solution pinned.
//!
//! The library would choose a solution for each number of rows, and other solutions round otherwise. So its solutions are asked for
//! once for the canonical rows, those that cannot form the product of few rows or of many are left out, and the first whose rows
//! are found to agree ([`first_row_independent`]) is used for any number. Solutions that add by atomics are not allowed.
//!
//! The declarations are our own, after AMD's documentation of rocBLAS 3 to 5. Its list of solutions is of what it calls its beta
//! interface.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use super::{BACKEND, Hip, Rocm};
use crate::backend::Output;
use crate::error::{KernelError, Result};
use crate::gpu::driver::{ElementKind, MatrixProduct, Operand, Rows};
use crate::gpu::first_row_independent;
use crate::gpu::inventory::FoundLibrary;
use crate::gpu::vendor::context::Context;
use crate::gpu::vendor::library::{OpenLibrary, once};
use crate::gpu::vendor::product::{Key, PROBED_ROWS, pinned_rows, sizes};
use crate::gpu::vendor::{Queue, Vendor, digest};

type RawHandle = *mut c_void;
type Operation = c_int;
type DataType = c_int;

/// What a function of the library answers.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq)]
struct Status(c_int);

const SUCCESS: Status = Status(0);
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
    destroy: unsafe extern "C" fn(RawHandle) -> Status,
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

    /// What is told of the library.
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

/// What is said of a product to the library, which wants its matrices column by column: it computes `out^T = b^T a^T`.
struct Call {
    operations: [Operation; 2],
    sizes: [c_int; 3],
    addresses: [u64; 3],
    types: [DataType; 3],
    strides: [c_int; 3],
    beta: f32,
}

impl Call {
    /// Sizes that the library counts in 32 bits are not checked here: a buffer of so many rows fits no device.
    fn of(product: &MatrixProduct) -> Self {
        let MatrixProduct { out, a, b, m, n, k, output, .. } = *product;
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
        }
    }
}

/// A call of a function of products: what both take, then `rest`.
macro_rules! call {
    ($function:expr, $handle:expr, $call:expr, $($rest:expr),*) => {{
        let Call { operations, sizes, addresses, types, strides, beta } = &$call;
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
            addresses[2] as *const c_void,
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

/// What the library keeps for one queue.
struct Handle(RawHandle);

// SAFETY: a handle may be used by any thread, one at a time.
unsafe impl Send for Handle {}

/// rocBLAS on one device.
pub struct RocBlas {
    functions: &'static Functions,
    context: Arc<Context>,
    device: String,
    version: String,
    /// By stream and workspace; that of none serves what only asks.
    handles: Mutex<HashMap<(usize, u64), Handle>>,
    solutions: Mutex<HashMap<Key, Solution>>,
}

impl RocBlas {
    pub(super) fn open(context: &Arc<Context>, device: &str) -> Result<Self> {
        let functions = Functions::get()?;
        let failed = |attempted| {
            move |status| KernelError::Device {
                attempted,
                device: device.to_owned(),
                answer: format!("rocBLAS: {}", functions.words(status)),
            }
        };
        let version = functions.version().map_err(failed("asking for rocBLAS's version"))?;
        let library = Self {
            functions,
            context: Arc::clone(context),
            device: device.to_owned(),
            version,
            handles: Mutex::default(),
            solutions: Mutex::default(),
        };
        library.handle(None).map_err(failed("opening rocBLAS"))?;
        Ok(library)
    }

    pub(super) fn version(&self) -> String {
        format!("rocBLAS {}", self.version)
    }

    /// What tells this library's choices from another's.
    ///
    /// # Errors
    /// What made the library fail.
    pub(super) fn digest(&self) -> Result<u64> {
        let start = Instant::now();
        let first = |product: &MatrixProduct| {
            let first = self.accepted(product)?.first().copied();
            Ok(first.map(|solution| vec![Some(solution as u32)]))
        };
        let digest = digest::of(first)?;
        let milliseconds = start.elapsed().as_millis();
        tracing::debug!(digest, milliseconds, "the matrix library's solutions are known");
        Ok(digest)
    }

    fn failed(&self, product: &MatrixProduct, status: Status) -> KernelError {
        let answer = self.functions.words(status);
        if LASTING.contains(&status) {
            return self.unsupported(product, &answer);
        }
        KernelError::Device {
            attempted: "a matrix product",
            device: self.device.clone(),
            answer: format!("rocBLAS: {answer} for {}", sizes(product)),
        }
    }

    fn unsupported(&self, product: &MatrixProduct, answer: &str) -> KernelError {
        KernelError::Unsupported {
            what: format!("form a matrix product of {}", sizes(product)),
            device: self.device.clone(),
            answer: format!("rocBLAS: {answer}"),
        }
    }

    /// The handle of a queue, or of none. Handles stay until the library goes: those of queues that are gone serve new ones of
    /// the same stream and workspace.
    fn handle(&self, queue: Option<&Queue>) -> std::result::Result<RawHandle, Status> {
        let place = queue.map_or((0, 0), |queue| (queue.stream() as usize, queue.workspace().0));
        let mut handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(handle) = handles.get(&place) {
            return Ok(handle.0);
        }
        let mut handle = std::ptr::null_mut();
        let Functions { create, set_stream, set_workspace, set_atomics_mode, .. } = self.functions;
        // SAFETY: the device is this thread's own, the first call writes one handle, and the queue's stream and workspace are there for
        // as long as it is.
        unsafe {
            done(create(&raw mut handle))?;
            handles.insert(place, Handle(handle));
            done(set_atomics_mode(handle, WITHOUT_ATOMICS))?;
            if let Some(queue) = queue {
                done(set_stream(handle, queue.stream()))?;
                let workspace = queue.workspace().0 as *mut c_void;
                done(set_workspace(handle, workspace, super::Amd::WORKSPACE_BYTES))?;
            }
        }
        Ok(handle)
    }

    /// The library's list of solutions for a product of `rows` rows; empty where it has none.
    fn listed(&self, product: &MatrixProduct, rows: usize) -> Result<Vec<Solution>> {
        /// Where nothing lies: the library refuses no place at all, also where it only looks at sizes.
        const SOMEWHERE: usize = 4096;
        let product = MatrixProduct { m: rows, ..*product };
        let handle = self.handle(None).map_err(|status| self.failed(&product, status))?;
        // As aligned as the operands are: what a library makes of addresses holds for theirs too.
        let addresses = [product.b, product.a, product.out]
            .map(|operand| (SOMEWHERE + operand.alignment) as u64);
        let call = Call { addresses, ..Call::of(&product) };
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
            Err(status) => Err(self.failed(&product, status)),
        }
    }

    /// The library's order of solutions for a product, those that can form it for every number of rows.
    fn accepted(&self, product: &MatrixProduct) -> Result<Vec<Solution>> {
        let mut accepted = self.listed(product, pinned_rows(product))?;
        if product.rows == Rows::Free {
            for rows in PROBED_ROWS {
                let able: HashSet<Solution> = self.listed(product, rows)?.into_iter().collect();
                accepted.retain(|solution| able.contains(solution));
            }
        }
        Ok(accepted)
    }

    /// The solution of a product; the same for any m where rows are free.
    fn solution(
        &self,
        driver: &Rocm,
        queue: &mut Queue,
        product: &MatrixProduct,
    ) -> Result<Solution> {
        let mut solutions = self.solutions.lock().unwrap_or_else(PoisonError::into_inner);
        let pin = Key::of(product, pinned_rows(product));
        if let Some(solution) = solutions.get(&pin) {
            return Ok(*solution);
        }
        let solution = self.choose(driver, queue, product)?;
        solutions.insert(pin, solution);
        Ok(solution)
    }

    /// The first solution that can form the product, for any number of rows where they are free; those then are tried first.
    fn choose(
        &self,
        driver: &Rocm,
        queue: &mut Queue,
        product: &MatrixProduct,
    ) -> Result<Solution> {
        if queue.is_recording() {
            let attempted = "choosing the solution of a matrix product";
            return Err(KernelError::NotRecordable { attempted });
        }
        let accepted = self.accepted(product)?;
        let chosen = match product.rows {
            Rows::Fixed => accepted.first().copied(),
            Rows::Free => {
                let multiply = |queue: &mut Queue, solution: &_, tried: MatrixProduct| {
                    // SAFETY: the operands lie in memory that is there while a solution is tried, each in its own.
                    unsafe { self.enqueue(queue, *solution, &tried) }
                };
                first_row_independent(driver, queue, product, accepted, multiply)?
            }
        };
        chosen.ok_or_else(|| {
            let wanted = match product.rows {
                Rows::Fixed => "no solution",
                Rows::Free => "no solution that treats all rows alike",
            };
            self.unsupported(product, wanted)
        })
    }

    /// Enqueues a product.
    ///
    /// # Safety
    /// The operands must lie inside memory of the device, and `out` must overlap neither `a` nor `b`.
    pub(super) unsafe fn matmul(
        &self,
        driver: &Rocm,
        queue: &mut Queue,
        product: MatrixProduct,
    ) -> Result<()> {
        let solution = self.solution(driver, queue, &product)?;
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(queue, solution, &product) }
    }

    /// # Safety
    /// As for [`matmul`](Self::matmul).
    unsafe fn enqueue(
        &self,
        queue: &Queue,
        solution: Solution,
        product: &MatrixProduct,
    ) -> Result<()> {
        let enqueued = self.handle(Some(queue)).and_then(|handle| {
            let call = Call::of(product);
            // SAFETY: the caller vouches for the operands; handle and stream are alive; factors are read during the call.
            done(unsafe { call!(self.functions.multiply, handle, call, solution, 0) })
        });
        enqueued.map_err(|status| self.failed(product, status))
    }
}

impl Drop for RocBlas {
    fn drop(&mut self) {
        if self.context.bind().is_err() {
            return;
        }
        let handles = self.handles.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (_, Handle(handle)) in handles.drain() {
            // SAFETY: the handle is alive and not used again, and so is the device that it was made for.
            unsafe { (self.functions.destroy)(handle) };
        }
    }
}
