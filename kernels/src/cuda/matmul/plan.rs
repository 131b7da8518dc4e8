//! The descriptors of a product for the library, and the library's proposals for them.

use std::ffi::c_void;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtEpilogue_t, cublasLtMatmulAlgo_t,
    cublasLtMatmulAlgoConfigAttributes_t as Attribute, cublasLtMatmulDescAttributes_t,
    cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreferenceAttributes_t,
    cublasLtMatrixLayoutAttribute_t, cublasStatus_t, cudaDataType,
};

use crate::gpu::driver::{Batch, Bias, ElementKind, MatrixProduct, Operand};
use crate::gpu::{Candidate, Terms};

/// Algorithms that are looked at.
const CANDIDATES: usize = 32;

/// Descriptors of a product, as the library wants them: column by column, so that it computes `out^T = b^T a^T`.
pub struct Plan {
    pub(super) operation: sys::cublasLtMatmulDesc_t,
    pub(super) left: sys::cublasLtMatrixLayout_t,
    pub(super) right: sys::cublasLtMatrixLayout_t,
    pub(super) out: sys::cublasLtMatrixLayout_t,
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
    pub(super) fn new(product: &MatrixProduct) -> std::result::Result<Self, CublasError> {
        let MatrixProduct { out, a, b, m, n, k, .. } = *product;
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
        };
        let transposes = [
            (cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA, b.transposed),
            (cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSB, a.transposed),
        ];
        for (attribute, transposed) in transposes {
            // cuBLAS's numbers for an operand and for its transpose.
            let operation = i32::from(transposed);
            let value = std::ptr::from_ref(&operation).cast::<c_void>();
            // SAFETY: the descriptor is alive, and the attribute is of the type given.
            unsafe {
                let bytes = size_of_val(&operation);
                result::set_matmul_desc_attribute(plan.operation, attribute, value, bytes)?;
            }
        }
        if let Some(bias) = product.bias {
            plan.set_bias(bias)?;
        }
        if let Some(Batch { entries, out, a, b }) = product.batch {
            // The matrix that the product is added to has the layout of the output.
            for (layout, distance) in [(plan.left, b), (plan.right, a), (plan.out, out)] {
                set_batch(layout, entries, distance)?;
            }
        }
        Ok(plan)
    }

    fn set_bias(&self, bias: Bias) -> std::result::Result<(), CublasError> {
        use cublasLtMatmulDescAttributes_t as Attribute;
        let added = cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
        let (address, element) = (bias.address.0, data_type(bias.element));
        let settings: [(Attribute, *const c_void, usize); 3] = [
            (
                Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE,
                std::ptr::from_ref(&added).cast(),
                size_of_val(&added),
            ),
            (
                Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                std::ptr::from_ref(&address).cast(),
                size_of_val(&address),
            ),
            (
                Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                std::ptr::from_ref(&element).cast(),
                size_of_val(&element),
            ),
        ];
        for (attribute, value, bytes) in settings {
            // SAFETY: the descriptor is alive, and the attribute is of the type given.
            unsafe {
                result::set_matmul_desc_attribute(self.operation, attribute, value, bytes)?;
            }
        }
        Ok(())
    }

    /// The library's own order of algorithms for the product.
    pub(super) fn candidates(
        &self,
        handle: sys::cublasLtHandle_t,
        product: &MatrixProduct,
        workspace_bytes: usize,
    ) -> std::result::Result<Vec<Candidate<cublasLtMatmulAlgo_t>>, CublasError> {
        use cublasLtMatmulPreferenceAttributes_t as Preference;
        let preference = result::create_matmul_pref()?;
        let alignment = |operand: Operand| operand.alignment as u32;
        let (left, right) = (alignment(product.b), alignment(product.a));
        let out = alignment(product.out);
        let workspace = workspace_bytes as u64;
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
        let usable = |result: &cublasLtMatmulHeuristicResult_t| {
            result.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS
        };
        let candidate = |result: cublasLtMatmulHeuristicResult_t| Candidate {
            algorithm: result.algo,
            workspace_bytes: result.workspaceSize,
            terms: terms(&result.algo),
        };
        Ok(found.into_iter().filter(usable).map(candidate).collect())
    }

    /// Bytes of workspace that the algorithm needs for this plan's product; nothing where it cannot form it.
    pub(super) fn workspace_bytes(
        &self,
        handle: sys::cublasLtHandle_t,
        algorithm: &cublasLtMatmulAlgo_t,
    ) -> Option<usize> {
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
            (status == cublasStatus_t::CUBLAS_STATUS_SUCCESS)
                .then(|| result.assume_init().workspaceSize)
        }
    }
}

/// Makes a matrix the first of `entries`, each `distance` elements after the one before.
fn set_batch(
    layout: sys::cublasLtMatrixLayout_t,
    entries: usize,
    distance: usize,
) -> std::result::Result<(), CublasError> {
    use cublasLtMatrixLayoutAttribute_t as Attribute;
    let (count, distance) = (entries as i32, distance as i64);
    let settings: [(Attribute, *const c_void, usize); 2] = [
        (
            Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
            std::ptr::from_ref(&count).cast(),
            size_of_val(&count),
        ),
        (
            Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
            std::ptr::from_ref(&distance).cast(),
            size_of_val(&distance),
        ),
    ];
    for (attribute, value, bytes) in settings {
        // SAFETY: the layout is alive, and the attribute is of the type given.
        unsafe { result::set_matrix_layout_attribute(layout, attribute, value, bytes)? };
    }
    Ok(())
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
fn terms(algorithm: &cublasLtMatmulAlgo_t) -> Terms {
    match attribute(algorithm, Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4) {
        Some(0 | 1) => Terms::Whole,
        _ => Terms::Split,
    }
}

/// The attributes that define an algorithm, and the size of each in bytes. The library's opaque struct would serve instead if its
/// documentation said that all of its bytes have a meaning.
const ATTRIBUTES: [(Attribute, usize); 9] = [
    (Attribute::CUBLASLT_ALGO_CONFIG_ID, 4),
    (Attribute::CUBLASLT_ALGO_CONFIG_TILE_ID, 4),
    (Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4),
    (Attribute::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, 4),
    (Attribute::CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, 4),
    (Attribute::CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, 4),
    (Attribute::CUBLASLT_ALGO_CONFIG_STAGES_ID, 4),
    (Attribute::CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, 2),
    (Attribute::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, 2),
];

/// The [`ATTRIBUTES`] of an algorithm, in order; `None` for those that an older library does not know.
pub(super) fn parts(algorithm: &cublasLtMatmulAlgo_t) -> Vec<Option<u32>> {
    ATTRIBUTES.iter().map(|&(name, bytes)| attribute(algorithm, name, bytes)).collect()
}

/// An attribute of an algorithm: a number of `bytes` bytes, at most 4; `None` where the library does not know it.
fn attribute(algorithm: &cublasLtMatmulAlgo_t, attribute: Attribute, bytes: usize) -> Option<u32> {
    let mut value = [0_u8; 4];
    let room = value.get_mut(..bytes)?;
    let mut written = 0;
    // SAFETY: the library writes at most as many bytes as it is told that there is room for.
    let status = unsafe {
        sys::cublasLtMatmulAlgoConfigGetAttribute(
            algorithm,
            attribute,
            room.as_mut_ptr().cast(),
            room.len(),
            &raw mut written,
        )
    };
    (status == cublasStatus_t::CUBLAS_STATUS_SUCCESS).then_some(u32::from_le_bytes(value))
}
