//! Launchers, by kernel source. They check views against shapes, choose the kernel by widths and strides, and
//! enqueue it.

mod attention;
mod attention_backward;
mod attention_backward_groups;
mod attention_groups;
mod attention_step;
mod axpby;
mod causal_conv1d;
mod cross_entropy;
mod documents;
mod draw;
mod embedding;
mod gated_silu;
mod gelu;
pub(in crate::gpu) mod gradient_sums;
mod head_scan;
mod head_scan_backward;
mod likeliest;
mod lion;
mod norm;
mod optimizer;
mod ordered_groups;
mod ordered_product;
mod partial_sums;
mod rotary;
pub(in crate::gpu) mod row_map;
mod scan;
mod scan_backward;
mod scan_piece;
mod scan_step;
mod scan_work;
mod sizes;
mod tree_sum;

pub(in crate::gpu) use self::attention::HeadWidth;
pub(in crate::gpu) use self::head_scan::HeadStates;
use crate::backend::{Element, PieceState};
use crate::error::{KernelError, Result};
use crate::gpu::Gpu;
use crate::gpu::driver::Driver;
use crate::gpu::precision::Precision;
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

/// The name of a kernel: of its function in the source, or of the operation in errors.
pub(in crate::gpu) type KernelName = &'static str;

/// Asks `found`, rows and columns, to be `expected`.
fn check_shape(
    kernel: KernelName,
    what: &'static str,
    found: [usize; 2],
    expected: [usize; 2],
) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let show = |[rows, columns]: [usize; 2]| format!("[{rows}, {columns}]");
    Err(KernelError::shape(kernel, what, show(expected), show(found)))
}

/// Asks `matrix` to be `[rows, columns]` with contiguous columns; answers the elements between its rows.
pub(in crate::gpu) fn row_stride<D: Driver, P: Precision, T: Element>(
    kernel: KernelName,
    what: &'static str,
    matrix: &Matrix<'_, Gpu<D, P>, T>,
    rows: usize,
    columns: usize,
) -> Result<u64> {
    check_shape(kernel, what, [matrix.rows, matrix.columns], [rows, columns])?;
    if matrix.columns > 1 && matrix.column_stride != 1 {
        let found = format!("a column stride of {}", matrix.column_stride);
        return Err(KernelError::shape(kernel, what, "contiguous columns", found));
    }
    Ok(matrix.row_stride as u64)
}

/// [`row_stride`] of a matrix that is written.
pub(in crate::gpu) fn row_stride_mut<D: Driver, P: Precision, T: Element>(
    kernel: KernelName,
    what: &'static str,
    matrix: &MatrixMut<'_, Gpu<D, P>, T>,
    rows: usize,
    columns: usize,
) -> Result<u64> {
    check_shape(kernel, what, [matrix.rows, matrix.columns], [rows, columns])?;
    Ok(matrix.row_stride as u64)
}

fn check_elements(
    kernel: KernelName,
    what: &'static str,
    found: usize,
    expected: usize,
) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(KernelError::shape(kernel, what, format!("{expected} elements"), found))
}

/// Asks `slice` to have `expected` elements.
pub(in crate::gpu) fn exactly<D: Driver, P: Precision, T: Element>(
    kernel: KernelName,
    what: &'static str,
    slice: &Slice<'_, Gpu<D, P>, T>,
    expected: usize,
) -> Result<()> {
    check_elements(kernel, what, slice.elements, expected)
}

/// [`exactly`] of a slice that is written.
pub(in crate::gpu) fn exactly_mut<D: Driver, P: Precision, T: Element>(
    kernel: KernelName,
    what: &'static str,
    slice: &SliceMut<'_, Gpu<D, P>, T>,
    expected: usize,
) -> Result<()> {
    check_elements(kernel, what, slice.elements, expected)
}

/// Asks a piece to carry a state of `held` elements on, for `samples` samples, and to be of no documents.
fn check_piece<D: Driver, P: Precision, T: Element>(
    kernel: KernelName,
    piece: &PieceState<'_, Gpu<D, P>, T>,
    has_starts: bool,
    [samples, held]: [usize; 2],
) -> Result<()> {
    if has_starts {
        return Err(KernelError::shape(kernel, "starts", "none in a piece", "some"));
    }
    exactly_mut(kernel, "state", &piece.state, held)?;
    match &piece.lengths {
        Some(lengths) => exactly(kernel, "lengths", lengths, samples),
        None => Ok(()),
    }
}

/// The largest power of two up to `limit` that every row of a matrix is aligned to, in bytes. It follows from the stride and
/// the first column, so it is the same for any rows of the matrix; what begins a buffer is aligned.
pub(in crate::gpu) fn row_alignment(
    start: usize,
    row_stride: usize,
    element_bytes: usize,
    limit: usize,
) -> usize {
    let first_column = if row_stride == 0 { start } else { start % row_stride };
    let bytes = limit | (row_stride * element_bytes) | (first_column * element_bytes);
    1 << bytes.trailing_zeros()
}
