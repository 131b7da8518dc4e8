//! The descriptors of a product for the library, and the library's proposals for them.

use std::ffi::c_int;

use super::{Algorithm, Functions, Proposal, Raw, RawHandle, Status};
use crate::gpu::driver::{ElementKind, MatrixProduct, Operand};
use crate::gpu::vendor::product::Answered;
use crate::gpu::{Candidate, Terms};

/// Algorithms that are looked at.
const CANDIDATES: usize = 64;

// Values of the enums `hipblasComputeType_t`, `hipDataType` and `hipblasOperation_t` of hipBLAS and HIP.
const COMPUTE_FP32: c_int = 2;
const FP32: c_int = 0;
const BF16: c_int = 14;
const AS_IT_IS: c_int = 111;
const TRANSPOSED: c_int = 112;

// Attributes, by the numbers of `hipblasLtMatmulDescAttributes_t` and `hipblasLtMatmulPreferenceAttributes_t`.
const LEFT_OPERATION: c_int = 0;
const RIGHT_OPERATION: c_int = 1;
const MOST_WORKSPACE_BYTES: c_int = 1;

/// Descriptors of a product, as the library wants them: column by column, so that it computes `out^T = b^T a^T`.
pub struct Plan {
    functions: &'static Functions,
    pub(super) operation: Raw,
    pub(super) left: Raw,
    pub(super) right: Raw,
    pub(super) out: Raw,
}

// SAFETY: descriptors are only read once the plan is made.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

fn data_type(element: ElementKind) -> c_int {
    match element {
        ElementKind::F32 => FP32,
        ElementKind::Bf16 => BF16,
    }
}

impl Plan {
    pub(super) fn new(functions: &'static Functions, product: &MatrixProduct) -> Answered<Self> {
        let MatrixProduct { out, a, b, m, n, k, .. } = *product;
        let none = std::ptr::null_mut();
        // If a later step fails, the drop destroys what was created before.
        let mut plan = Self { functions, operation: none, left: none, right: none, out: none };
        let layout = |layout: &mut Raw, operand: Operand, [rows, columns]: [usize; 2]| {
            // `operand[rows, columns]` row by row is its transpose column by column.
            let [height, width] =
                if operand.transposed { [rows, columns] } else { [columns, rows] };
            let (element, stride) = (data_type(operand.element), operand.stride as i64);
            // SAFETY: it writes one descriptor.
            unsafe {
                (functions.layout_create)(layout, element, height as u64, width as u64, stride)
            }
            .done()
        };
        // SAFETY: it writes one descriptor.
        unsafe { (functions.operation_create)(&raw mut plan.operation, COMPUTE_FP32, FP32) }
            .done()?;
        layout(&mut plan.left, b, [k, n])?;
        layout(&mut plan.right, a, [m, k])?;
        layout(&mut plan.out, out, [m, n])?;
        let transposes = [(LEFT_OPERATION, b.transposed), (RIGHT_OPERATION, a.transposed)];
        for (attribute, is_transposed) in transposes {
            let operation = if is_transposed { TRANSPOSED } else { AS_IT_IS };
            let value = std::ptr::from_ref(&operation).cast();
            // SAFETY: the descriptor is alive, and the attribute is of the type given.
            unsafe {
                let bytes = size_of_val(&operation);
                (functions.operation_set)(plan.operation, attribute, value, bytes).done()?;
            }
        }
        Ok(plan)
    }

    /// The library's own order of algorithms for the product, where there is so much workspace. One that needs any may split k.
    pub(super) fn candidates(
        &self,
        handle: RawHandle,
        workspace_bytes: usize,
    ) -> Answered<Vec<Candidate<Algorithm>>> {
        let algorithm = Algorithm { data: [0; 16], most_workspace_bytes: 0 };
        let empty = Proposal {
            algorithm,
            workspace_bytes: 0,
            state: Status::NOT_SUPPORTED,
            waves: 0.0,
            reserved: [0; 4],
        };
        let mut proposals = vec![empty; CANDIDATES];
        let mut count = 0;
        let workspace = workspace_bytes as u64;
        let mut preference = std::ptr::null_mut();
        // SAFETY: descriptors are alive; the attribute is of the type given; the library writes at most as many proposals as there is
        // room for, and says how many. The preference is destroyed once.
        let asked = unsafe {
            (self.functions.preference_create)(&raw mut preference).done()?;
            let (value, bytes) = (std::ptr::from_ref(&workspace).cast(), size_of_val(&workspace));
            let set = self.functions.preference_set;
            let asked = set(preference, MOST_WORKSPACE_BYTES, value, bytes).done().and_then(|()| {
                (self.functions.propose)(
                    handle,
                    self.operation,
                    self.left,
                    self.right,
                    self.out,
                    self.out,
                    preference,
                    CANDIDATES as c_int,
                    proposals.as_mut_ptr(),
                    &raw mut count,
                )
                .done()
            });
            (self.functions.preference_destroy)(preference);
            asked
        };
        asked?;
        proposals.truncate(usize::try_from(count).unwrap_or(0));
        let usable = proposals.into_iter().filter(|proposal| proposal.state == Status::SUCCESS);
        let candidate = |Proposal { algorithm, workspace_bytes, .. }| Candidate {
            algorithm,
            workspace_bytes,
            terms: if workspace_bytes == 0 { Terms::Whole } else { Terms::Split },
        };
        Ok(usable.map(candidate).collect())
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: what there is of descriptors is alive and not used again.
        unsafe {
            if !self.operation.is_null() {
                (self.functions.operation_destroy)(self.operation);
            }
            for layout in [self.left, self.right, self.out] {
                if !layout.is_null() {
                    (self.functions.layout_destroy)(layout);
                }
            }
        }
    }
}
