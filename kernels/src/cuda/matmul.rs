//! cuBLASLt: its proposals for a product, and the call of a product.
//!
//! The library says which algorithms split k between blocks. With the others, an element's sum should run over k in the same order
//! at every place of the element; trials check that before an algorithm is used
//! ([`choose_algorithm`](crate::gpu::choose_algorithm)).

mod plan;

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{self, cublasLtMatmulAlgo_t, cublasStatus_t};

use self::plan::Plan;
use super::{BACKEND, unavailable};
use crate::backend::Output;
use crate::error::{KernelError, Result};
use crate::gpu::Candidate;
use crate::gpu::driver::{Batch, MatrixProduct, Rows};
use crate::gpu::inventory::FoundLibrary;
use crate::gpu::vendor::Queue;
use crate::gpu::vendor::context::Context;
use crate::gpu::vendor::library::OpenLibrary;
use crate::gpu::vendor::product::key::{PROBED_ENTRIES, PROBED_ROWS, canonical};
use crate::gpu::vendor::product::{Answer, Answered, Batches, ProductLibrary};
use crate::gpu::vendor::table::Device;

/// The library's version and file, for the inventory. [`CublasLt`] looks for the same names.
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

/// An error of the library as an [`Answer`]: [`Answer::Refuses`] where the same call would fail again, else [`Answer::Fails`].
fn answer(error: CublasError) -> Answer {
    match error.0 {
        cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED
        | cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE
        | cublasStatus_t::CUBLAS_STATUS_ARCH_MISMATCH => Answer::Refuses(error.to_string()),
        _ => Answer::Fails(error.to_string()),
    }
}

/// The library's handle on a device, which all that is open there shares: to destroy one waits for the whole device, and so spoils what
/// another thread records.
struct Handle {
    raw: sys::cublasLtHandle_t,
    context: Arc<Context>,
}

// SAFETY: the library's handle may be used by any thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// The handles in use, by device.
static HANDLES: Mutex<BTreeMap<Device, Weak<Handle>>> = Mutex::new(BTreeMap::new());

impl Handle {
    fn of(context: &Arc<Context>) -> std::result::Result<Arc<Self>, CublasError> {
        let mut handles = HANDLES.lock().unwrap_or_else(PoisonError::into_inner);
        let place = handles.entry(context.device()).or_default();
        if let Some(handle) = place.upgrade() {
            return Ok(handle);
        }
        let raw = result::create_handle()?;
        let handle = Arc::new(Self { raw, context: Arc::clone(context) });
        *place = Arc::downgrade(&handle);
        Ok(handle)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: the handle is alive and not used again, and so is the context that it was made in.
            let _ = unsafe { result::destroy_handle(self.raw) };
        }
    }
}

/// cuBLASLt on one device.
pub struct CublasLt {
    handle: Arc<Handle>,
}

impl CublasLt {
    pub(super) fn open(context: &Arc<Context>, device: &str) -> Result<Self> {
        // SAFETY: looks for a library, whose initialisers are the vendor's.
        if !unsafe { sys::is_culib_present() } {
            return Err(unavailable("NVIDIA's matrix library libcublasLt.so was not found"));
        }
        let handle = Handle::of(context).map_err(|error| KernelError::Device {
            attempted: "opening cuBLASLt",
            device: device.to_owned(),
            answer: error.to_string(),
        })?;
        Ok(Self { handle })
    }

    pub(super) fn version() -> String {
        // SAFETY: asks for a number.
        format!("cuBLASLt {}", unsafe { sys::cublasLtGetVersion() })
    }
}

impl ProductLibrary for CublasLt {
    const NAME: &'static str = "cuBLASLt";
    const BATCHES: Batches = Batches::Whole;
    const WORKSPACE_BYTES: usize = 32 << 20;
    type Algorithm = cublasLtMatmulAlgo_t;
    /// The library's descriptors of a product, and the algorithm.
    type Plan = (Plan, cublasLtMatmulAlgo_t);

    fn candidates(
        &self,
        product: &MatrixProduct,
    ) -> Answered<impl Iterator<Item = Candidate<cublasLtMatmulAlgo_t>>> {
        let asked = canonical(product);
        let candidates = Plan::new(&asked)
            .and_then(|plan| plan.candidates(self.handle.raw, &asked, Self::WORKSPACE_BYTES));
        let candidates = candidates.map_err(answer)?.into_iter();
        let probed: Vec<MatrixProduct> = match (product.rows, product.batch) {
            (Rows::Free, _) => PROBED_ROWS.map(|m| MatrixProduct { m, ..*product }).into(),
            (Rows::Fixed, None) => vec![*product],
            (Rows::Fixed, Some(batch)) => {
                let of = |entries| Some(Batch { entries, ..batch });
                PROBED_ENTRIES.map(|n| MatrixProduct { batch: of(n), ..*product }).collect()
            }
        };
        let probes = probed.iter().map(Plan::new);
        let probes = probes.collect::<std::result::Result<Vec<_>, _>>().map_err(answer)?;
        let handle = self.handle.raw;
        Ok(candidates.filter_map(move |candidate| {
            // The alignment that all algorithms require.
            let bytes =
                probes.iter().map(|plan| plan.workspace_bytes(handle, &candidate.algorithm));
            let workspace_bytes = bytes.collect::<Option<Vec<_>>>()?.into_iter().max()?;
            Some(Candidate { workspace_bytes, ..candidate })
        }))
    }

    fn parts(algorithm: &cublasLtMatmulAlgo_t) -> Vec<Option<u32>> {
        plan::parts(algorithm)
    }

    fn plan(
        &self,
        product: &MatrixProduct,
        algorithm: &cublasLtMatmulAlgo_t,
    ) -> Answered<(Plan, cublasLtMatmulAlgo_t)> {
        let plan = Plan::new(product).map_err(answer)?;
        match plan.workspace_bytes(self.handle.raw, algorithm) {
            Some(bytes) if bytes <= Self::WORKSPACE_BYTES => Ok((plan, *algorithm)),
            _ => {
                let refused = "the algorithm of these widths refuses the rows";
                Err(Answer::Refuses(refused.to_owned()))
            }
        }
    }

    unsafe fn enqueue(
        &self,
        queue: &Queue,
        (plan, algorithm): &(Plan, cublasLtMatmulAlgo_t),
        product: &MatrixProduct,
    ) -> Answered<()> {
        let one = 1.0_f32;
        let beta = if product.output == Output::Add { 1.0_f32 } else { 0.0 };
        // SAFETY: the caller guarantees the validity of the operands; descriptors, handle and stream are alive; factors are read
        // during the call.
        let enqueued = unsafe {
            result::matmul(
                self.handle.raw,
                plan.operation,
                std::ptr::from_ref(&one).cast(),
                std::ptr::from_ref(&beta).cast(),
                product.b.address.0 as *const c_void,
                plan.left,
                product.a.address.0 as *const c_void,
                plan.right,
                product.base.0 as *const c_void,
                plan.out,
                product.out.address.0 as *mut c_void,
                plan.out,
                std::ptr::from_ref(algorithm),
                queue.workspace().0 as *mut c_void,
                Self::WORKSPACE_BYTES,
                queue.stream().cast(),
            )
        };
        enqueued.map_err(answer)
    }
}
