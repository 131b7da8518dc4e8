//! Matrix products by cuBLASLt, the algorithm pinned.
//!
//! The library would choose an algorithm for each number of rows, and other algorithms round otherwise. So it is asked once for
//! [`CANONICAL_ROWS`](crate::gpu::vendor::product::CANONICAL_ROWS) rows, and its answer is used for any number: within one algorithm an element's sum runs over k in
//! the same order wherever the element stands. Algorithms that split k between blocks are refused, and so is one whose rows
//! are found to differ when it is first tried ([`first_row_independent`]).
//!
//! Two libraries of one version may still choose differently, so what this one chooses for some products stands in the kind
//! of device ([`digest`]).

mod plan;

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{self, cublasLtMatmulAlgo_t, cublasStatus_t};

use self::plan::Plan;
use super::{BACKEND, Cuda, unavailable};
use crate::backend::Output;
use crate::error::{KernelError, Result};
use crate::gpu::driver::{MatrixProduct, Rows};
use crate::gpu::first_row_independent;
use crate::gpu::inventory::FoundLibrary;
use crate::gpu::vendor::context::Context;
use crate::gpu::vendor::library::OpenLibrary;
use crate::gpu::vendor::product::{Key, PROBED_ROWS, pinned_rows, sizes};
use crate::gpu::vendor::{Queue, digest};

/// Room for what algorithms need beside their operands.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// The terms that an algorithm is chosen for at most where k is a grain's rows: for longer sums the library would
/// rather split them, and what it then offers unsplit is slow. Enough to hide where a block begins and ends.
const CANONICAL_TERMS: usize = 1024;

/// Plans that are kept. There is one for each number of rows that was ever seen, and prompts have any length; making one again
/// takes microseconds.
const KEPT_PLANS: usize = 1024;

/// What is told of the library, which [`MatrixLibrary`] looks for by these names too.
pub(super) fn found() -> Result<FoundLibrary> {
    let names = ["libcublasLt.so", "libcublasLt.so.13", "libcublasLt.so.12"];
    let library = OpenLibrary::first_of(BACKEND, "NVIDIA's matrix library", &names)?;
    // SAFETY: the library documents the function with this type; it asks for a number.
    let version = unsafe {
        let get: unsafe extern "C" fn() -> usize = library.function("cublasLtGetVersion")?;
        get()
    };
    Ok(library.found(format!("cuBLASLt {version}"), "cublasLtGetVersion"))
}

/// cuBLASLt on one device.
pub struct MatrixLibrary {
    handle: sys::cublasLtHandle_t,
    context: Arc<Context>,
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

impl MatrixLibrary {
    pub(super) fn open(context: &Arc<Context>, device: &str) -> Result<Self> {
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

    /// What tells this library's choices from another's.
    ///
    /// # Errors
    /// What made the library fail.
    pub(super) fn digest(&self) -> Result<u64> {
        let start = Instant::now();
        let parts = |product: &_| Ok(self.accepted(product)?.next().as_ref().map(plan::parts));
        let digest = digest::of(parts)?;
        let milliseconds = start.elapsed().as_millis();
        tracing::debug!(digest, milliseconds, "the matrix library's choices are known");
        Ok(digest)
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
    fn plan(&self, driver: &Cuda, queue: &mut Queue, product: &MatrixProduct) -> Result<Arc<Plan>> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let key = Key::of(product, product.m);
        if let Some(plan) = plans.plans.get(&key) {
            return Ok(Arc::clone(plan));
        }
        let failed = |error: CublasError| self.failed(product, error);
        let pin = Key::of(product, pinned_rows(product));
        let algorithm = match plans.algorithms.get(&pin) {
            Some(algorithm) => *algorithm,
            None => {
                let algorithm = self.choose(driver, queue, product)?;
                plans.algorithms.insert(pin, algorithm);
                algorithm
            }
        };
        let plan = Plan::new(product, product.m).map_err(failed)?;
        if !plan.accepts(self.handle, &algorithm) {
            return Err(self.unsupported(product, "the algorithm of these widths refuses the rows"));
        }
        let plan = Arc::new(plan.with_algorithm(algorithm));
        if plans.plans.len() >= KEPT_PLANS {
            plans.plans.clear();
        }
        plans.plans.insert(key, Arc::clone(&plan));
        Ok(plan)
    }

    /// The first algorithm that can form the product, for any number of rows where they are free; those then are tried first.
    fn choose(
        &self,
        driver: &Cuda,
        queue: &mut Queue,
        product: &MatrixProduct,
    ) -> Result<cublasLtMatmulAlgo_t> {
        let mut accepted = self.accepted(product)?;
        let chosen = match product.rows {
            Rows::Fixed => accepted.next(),
            Rows::Free if queue.is_recording() => {
                let attempted = "choosing the algorithm of a matrix product";
                return Err(KernelError::NotRecordable { attempted });
            }
            Rows::Free => {
                let multiply = |queue: &mut Queue, algorithm: &_, tried: MatrixProduct| {
                    let plan = Plan::new(&tried, tried.m).map_err(|e| self.failed(&tried, e))?;
                    // SAFETY: the operands lie in memory that is there while an algorithm is tried, each in its own.
                    unsafe { self.enqueue(queue, &plan.with_algorithm(*algorithm), &tried) }
                };
                first_row_independent(driver, queue, product, accepted, multiply)?
            }
        };
        chosen.ok_or_else(|| {
            let wanted = match product.rows {
                Rows::Fixed => "no algorithm that leaves k whole",
                Rows::Free => "no algorithm that leaves k whole and treats all rows alike",
            };
            self.unsupported(product, wanted)
        })
    }

    /// The library's order of algorithms for a product, those that can form it for every number of rows.
    fn accepted(
        &self,
        product: &MatrixProduct,
    ) -> Result<impl Iterator<Item = cublasLtMatmulAlgo_t>> {
        let failed = |error: CublasError| self.failed(product, error);
        let rows = pinned_rows(product);
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
        let handle = self.handle;
        let candidates = candidates.map_err(failed)?.into_iter();
        Ok(candidates
            .filter(move |algorithm| probes.iter().all(|probe| probe.accepts(handle, algorithm))))
    }

    /// Enqueues a product.
    ///
    /// # Safety
    /// The operands must lie inside memory of the device, and `out` must overlap neither `a` nor `b`.
    pub(super) unsafe fn matmul(
        &self,
        driver: &Cuda,
        queue: &mut Queue,
        product: MatrixProduct,
    ) -> Result<()> {
        let plan = self.plan(driver, queue, &product)?;
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(queue, &plan, &product) }
    }

    /// # Safety
    /// As for [`matmul`](Self::matmul); the plan is the product's.
    unsafe fn enqueue(&self, queue: &Queue, plan: &Plan, product: &MatrixProduct) -> Result<()> {
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
        enqueued.map_err(|error| self.failed(product, error))
    }
}

impl Drop for MatrixLibrary {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: the handle is alive and not used again, and so is the context that it was made in.
            let _ = unsafe { result::destroy_handle(self.handle) };
        }
    }
}
