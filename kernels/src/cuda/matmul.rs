//! Matrix products by cuBLASLt, the algorithm pinned.
//!
//! The library would choose an algorithm for each number of rows, and other algorithms round otherwise. So it is asked once for
//! [`CANONICAL_ROWS`] rows, and its answer is used for any number: within one algorithm an element's sum runs over k in
//! the same order wherever the element stands. Algorithms that split k between blocks are refused.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtMatmulAlgo_t, cublasLtMatmulAlgoConfigAttributes_t,
    cublasLtMatmulDescAttributes_t, cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulPreferenceAttributes_t, cublasStatus_t, cudaDataType,
};
use cudarc::driver::CudaContext;

use super::queue::CudaQueue;
use super::unavailable;
use crate::backend::Output;
use crate::error::{KernelError, Result};
use crate::gpu::driver::{ElementKind, MatrixProduct, Operand, Rows};

/// Room for what algorithms need beside their operands.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// The rows that an algorithm is chosen for where their number may change: enough to fill a GPU.
const CANONICAL_ROWS: usize = 4096;

/// The terms that an algorithm is chosen for at most where k is a grain's rows: for longer sums the library would
/// rather split them, and what it then offers unsplit is slow. Enough to hide where a block begins and ends.
const CANONICAL_TERMS: usize = 1024;

/// Numbers of rows that an algorithm must accept to be chosen.
const PROBED_ROWS: [usize; 3] = [1, 129, 1 << 17];

/// Algorithms that are looked at.
const CANDIDATES: usize = 32;

/// What an algorithm is pinned to, and what a plan is made for: a product without addresses.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    m: usize,
    n: usize,
    k: usize,
    operands: [(usize, bool, ElementKind, usize); 3],
    output: bool,
    rows: Rows,
}

impl Key {
    fn of(product: &MatrixProduct, m: usize) -> Self {
        let shape = |operand: &Operand| {
            (operand.stride, operand.transposed, operand.element, operand.alignment)
        };
        Self {
            m,
            n: product.n,
            k: product.k,
            operands: [shape(&product.out), shape(&product.a), shape(&product.b)],
            output: product.output == Output::Add,
            rows: product.rows,
        }
    }
}

/// cuBLASLt on one device.
pub(super) struct MatrixLibrary {
    handle: sys::cublasLtHandle_t,
    context: Arc<CudaContext>,
    device: String,
    plans: Mutex<Plans>,
}

#[derive(Default)]
struct Plans {
    algorithms: HashMap<Key, cublasLtMatmulAlgo_t>,
    plans: HashMap<Key, Arc<Plan>>,
}

// SAFETY: the library's handle and its descriptors may be used by any thread.
unsafe impl Send for MatrixLibrary {}
// SAFETY: as above; plans change behind a lock.
unsafe impl Sync for MatrixLibrary {}

/// Descriptors of a product, as the library wants them: column by column, so that it computes `out^T = b^T a^T`.
struct Plan {
    operation: sys::cublasLtMatmulDesc_t,
    left: sys::cublasLtMatrixLayout_t,
    right: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    algorithm: Option<cublasLtMatmulAlgo_t>,
}

// SAFETY: descriptors are only read once the plan is made.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

fn data_type(element: ElementKind) -> cudaDataType {
    match element {
        ElementKind::F32 => cudaDataType::CUDA_R_32F,
        ElementKind::Bf16 => cudaDataType::CUDA_R_16BF,
    }
}

impl Plan {
    fn new(product: &MatrixProduct, m: usize) -> std::result::Result<Self, CublasError> {
        let MatrixProduct { out, a, b, n, k, .. } = *product;
        let [m, n, k] = [m, n, k].map(|size| size as u64);
        let layout = |operand: Operand, rows: u64, columns: u64| {
            // `operand[rows, columns]` row by row is its transpose column by column.
            let [height, width] =
                if operand.transposed { [rows, columns] } else { [columns, rows] };
            let element = data_type(operand.element);
            result::create_matrix_layout(element, height, width, operand.stride as i64)
        };
        let compute = cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let plan = Self {
            operation: result::create_matmul_desc(compute, cudaDataType::CUDA_R_32F)?,
            left: layout(b, k, n)?,
            right: layout(a, m, k)?,
            out: layout(out, m, n)?,
            algorithm: None,
        };
        let transposes = [
            (cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA, b.transposed),
            (cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSB, a.transposed),
        ];
        for (attribute, transposed) in transposes {
            // cuBLAS's numbers for an operand as it is and for its transpose.
            let operation = i32::from(transposed);
            let value = std::ptr::from_ref(&operation).cast::<c_void>();
            // SAFETY: the descriptor is alive, and the attribute is of the type given.
            unsafe {
                let bytes = size_of_val(&operation);
                result::set_matmul_desc_attribute(plan.operation, attribute, value, bytes)?;
            }
        }
        Ok(plan)
    }

    /// The library's own order of algorithms for the product, those that split k left out.
    fn candidates(
        &self,
        handle: sys::cublasLtHandle_t,
        product: &MatrixProduct,
    ) -> std::result::Result<Vec<cublasLtMatmulAlgo_t>, CublasError> {
        use cublasLtMatmulPreferenceAttributes_t as Preference;
        let preference = result::create_matmul_pref()?;
        let alignment = |operand: Operand| operand.alignment as u32;
        let (left, right) = (alignment(product.b), alignment(product.a));
        let out = alignment(product.out);
        let workspace = WORKSPACE_BYTES as u64;
        let none = 0_u32;
        let settings: [(Preference, *const c_void, usize); 6] = [
            (
                Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                std::ptr::from_ref(&workspace).cast(),
                8,
            ),
            (
                Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                std::ptr::from_ref(&none).cast(),
                4,
            ),
            (
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                std::ptr::from_ref(&left).cast(),
                4,
            ),
            (
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                std::ptr::from_ref(&right).cast(),
                4,
            ),
            (
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                std::ptr::from_ref(&out).cast(),
                4,
            ),
            (
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
                std::ptr::from_ref(&out).cast(),
                4,
            ),
        ];
        let mut found = Vec::with_capacity(CANDIDATES);
        // SAFETY: descriptors are alive; attributes are of the types and sizes given; the library writes at most as
        // many results as there is room for, and says how many.
        let answer = unsafe {
            let set = settings.into_iter().try_for_each(|(attribute, value, bytes)| {
                result::set_matmul_pref_attribute(preference, attribute, value, bytes)
            });
            let mut count = 0;
            let results: *mut cublasLtMatmulHeuristicResult_t = found.as_mut_ptr();
            let asked = set.and_then(|()| {
                sys::cublasLtMatmulAlgoGetHeuristic(
                    handle,
                    self.operation,
                    self.left,
                    self.right,
                    self.out,
                    self.out,
                    preference,
                    CANDIDATES as i32,
                    results,
                    &raw mut count,
                )
                .result()
            });
            let _ = result::destroy_matmul_pref(preference);
            asked.map(|()| found.set_len(usize::try_from(count).unwrap_or(0)))
        };
        answer?;
        let usable = found.into_iter().filter(|result| {
            result.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS && !splits(&result.algo)
        });
        Ok(usable.map(|result| result.algo).collect())
    }

    /// Whether the algorithm can compute this plan's product within the workspace.
    fn accepts(&self, handle: sys::cublasLtHandle_t, algorithm: &cublasLtMatmulAlgo_t) -> bool {
        let mut result = std::mem::MaybeUninit::<cublasLtMatmulHeuristicResult_t>::zeroed();
        // SAFETY: descriptors are alive; the result was zeroed, which is a value of every field.
        unsafe {
            let status = sys::cublasLtMatmulAlgoCheck(
                handle,
                self.operation,
                self.left,
                self.right,
                self.out,
                self.out,
                algorithm,
                result.as_mut_ptr(),
            );
            status == cublasStatus_t::CUBLAS_STATUS_SUCCESS
                && result.assume_init().workspaceSize <= WORKSPACE_BYTES
        }
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: the descriptors are alive and not used again.
        unsafe {
            let _ = result::destroy_matmul_desc(self.operation);
            for layout in [self.left, self.right, self.out] {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

/// Whether an algorithm cuts k into parts that are summed afterwards: so may one that does not tell that it leaves k whole.
fn splits(algorithm: &cublasLtMatmulAlgo_t) -> bool {
    let attribute = cublasLtMatmulAlgoConfigAttributes_t::CUBLASLT_ALGO_CONFIG_SPLITK_NUM;
    let (mut parts, mut written) = (0_i32, 0);
    // SAFETY: the attribute is a 32-bit number.
    let status = unsafe {
        let place = std::ptr::from_mut(&mut parts).cast();
        let bytes = size_of::<i32>();
        sys::cublasLtMatmulAlgoConfigGetAttribute(
            algorithm,
            attribute,
            place,
            bytes,
            &raw mut written,
        )
    };
    !(status == cublasStatus_t::CUBLAS_STATUS_SUCCESS && matches!(parts, 0 | 1))
}

fn sizes(product: &MatrixProduct) -> String {
    let MatrixProduct { m, n, k, .. } = product;
    format!("m = {m}, n = {n}, k = {k}")
}

impl MatrixLibrary {
    pub(super) fn open(context: &Arc<CudaContext>, device: &str) -> Result<Self> {
        // SAFETY: looks for a library, whose initialisers its vendor vouches for.
        if !unsafe { sys::is_culib_present() } {
            return Err(unavailable("NVIDIA's matrix library libcublasLt.so was not found"));
        }
        let handle = result::create_handle().map_err(|error| KernelError::Device {
            attempted: "opening cuBLASLt",
            device: device.to_owned(),
            answer: error.to_string(),
        })?;
        let (context, device) = (Arc::clone(context), device.to_owned());
        Ok(Self { handle, context, device, plans: Mutex::default() })
    }

    pub(super) fn version(&self) -> String {
        // SAFETY: asks for a number.
        format!("cuBLASLt {}", unsafe { sys::cublasLtGetVersion() })
    }

    /// What the library answered; where it would answer the same again, nothing is gained by starting again.
    fn failed(&self, product: &MatrixProduct, error: CublasError) -> KernelError {
        match error.0 {
            cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED
            | cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE
            | cublasStatus_t::CUBLAS_STATUS_ARCH_MISMATCH => self.unsupported(product, error),
            _ => KernelError::Device {
                attempted: "a matrix product",
                device: self.device.clone(),
                answer: format!("cuBLASLt: {error} for {}", sizes(product)),
            },
        }
    }

    fn unsupported(&self, product: &MatrixProduct, answer: impl std::fmt::Display) -> KernelError {
        KernelError::Unsupported {
            what: format!("form a matrix product of {}", sizes(product)),
            device: self.device.clone(),
            answer: format!("cuBLASLt: {answer}"),
        }
    }

    /// The plan of a product; the same algorithm for any m where rows are free.
    fn plan(&self, product: &MatrixProduct) -> Result<Arc<Plan>> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let key = Key::of(product, product.m);
        if let Some(plan) = plans.plans.get(&key) {
            return Ok(Arc::clone(plan));
        }
        let failed = |error: CublasError| self.failed(product, error);
        let pinned_rows = match product.rows {
            Rows::Free => CANONICAL_ROWS,
            Rows::Fixed => product.m,
        };
        let pin = Key::of(product, pinned_rows);
        let algorithm = match plans.algorithms.get(&pin) {
            Some(algorithm) => *algorithm,
            None => {
                let algorithm = self.choose(product, pinned_rows)?;
                plans.algorithms.insert(pin, algorithm);
                algorithm
            }
        };
        let mut plan = Plan::new(product, product.m).map_err(failed)?;
        if !plan.accepts(self.handle, &algorithm) {
            return Err(self.unsupported(product, "the algorithm of these widths refuses the rows"));
        }
        plan.algorithm = Some(algorithm);
        let plan = Arc::new(plan);
        plans.plans.insert(key, Arc::clone(&plan));
        Ok(plan)
    }

    fn choose(&self, product: &MatrixProduct, rows: usize) -> Result<cublasLtMatmulAlgo_t> {
        let failed = |error: CublasError| self.failed(product, error);
        let terms = match product.rows {
            Rows::Free => product.k,
            Rows::Fixed => product.k.min(CANONICAL_TERMS),
        };
        let shorter = MatrixProduct { k: terms, ..*product };
        let candidates =
            Plan::new(&shorter, rows).and_then(|plan| plan.candidates(self.handle, &shorter));
        let own = [rows];
        let probes: &[usize] = match product.rows {
            Rows::Free => &PROBED_ROWS,
            Rows::Fixed => &own,
        };
        let probes = probes.iter().map(|&rows| Plan::new(product, rows));
        let probes = probes.collect::<std::result::Result<Vec<_>, _>>().map_err(failed)?;
        let mut candidates = candidates.map_err(failed)?.into_iter();
        candidates
            .find(|algorithm| probes.iter().all(|probe| probe.accepts(self.handle, algorithm)))
            .ok_or_else(|| self.unsupported(product, "no algorithm that leaves k whole"))
    }

    /// Enqueues a product.
    ///
    /// # Safety
    /// The operands must lie inside memory of the device, and `out` must overlap neither `a` nor `b`.
    pub(super) unsafe fn matmul(&self, queue: &CudaQueue, product: MatrixProduct) -> Result<()> {
        let plan = self.plan(&product)?;
        let one = 1.0_f32;
        let beta = if product.output == Output::Add { 1.0_f32 } else { 0.0 };
        let algorithm = plan.algorithm.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the caller vouches for the operands; descriptors, handle and stream are alive; factors are read
        // during the call.
        let enqueued = unsafe {
            result::matmul(
                self.handle,
                plan.operation,
                std::ptr::from_ref(&one).cast(),
                std::ptr::from_ref(&beta).cast(),
                product.b.address.0 as *const c_void,
                plan.left,
                product.a.address.0 as *const c_void,
                plan.right,
                product.out.address.0 as *const c_void,
                plan.out,
                product.out.address.0 as *mut c_void,
                plan.out,
                algorithm,
                queue.workspace().0 as *mut c_void,
                WORKSPACE_BYTES,
                queue.stream().cast(),
            )
        };
        enqueued.map_err(|error| self.failed(&product, error))
    }
}

impl Drop for MatrixLibrary {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: the handle is alive and not used again, and so is the context that it was made in.
            let _ = unsafe { result::destroy_handle(self.handle) };
        }
    }
}
