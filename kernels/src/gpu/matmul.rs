//! Matrix products: views become operands of the driver's matrix library.

use crate::backend::{Element, MatrixProducts, Output, Runtime};
use crate::error::{KernelError, Result};
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Batch, Bias, Driver, ElementKind, MatrixProduct, Operand, Rows};
use crate::gpu::launch::row_map::{self, Map, MapInputs};
use crate::gpu::launch::{exactly, row_alignment};
use crate::gpu::precision::Precision;
use crate::gpu::{Gpu, GpuStream, ScratchSlot};
use crate::view::{Matrix, MatrixMut, Slice};

/// The alignment, in bytes, that the matrix library can make use of.
const ALIGNMENT_BYTES: usize = 16;

/// How a product is written: over the output, added to the output, or added to another matrix.
pub(in crate::gpu) enum Written<'a, B: Runtime> {
    Over,
    AddedTo,
    /// The output is the sum of the product and this matrix.
    Onto(Matrix<'a, B, f32>),
}

impl<B: Runtime> From<Output> for Written<'_, B> {
    fn from(output: Output) -> Self {
        match output {
            Output::Overwrite => Self::Over,
            Output::Add => Self::AddedTo,
        }
    }
}

fn kind<T: Element>() -> ElementKind {
    if size_of::<T>() == 2 { ElementKind::Bf16 } else { ElementKind::F32 }
}

fn read_operand<D: Driver, P: Precision, T: Element>(
    what: &'static str,
    matrix: &Matrix<'_, Gpu<D, P>, T>,
) -> Result<Operand> {
    let transposed = matrix.column_stride != 1 && matrix.columns > 1;
    if transposed && matrix.row_stride != 1 && matrix.rows > 1 {
        let found = format!("strides of {} and {}", matrix.row_stride, matrix.column_stride);
        return Err(KernelError::shape("matmul", what, "contiguous rows or columns", found));
    }
    let (runs, given, least) = match transposed {
        true => (matrix.columns, matrix.column_stride, matrix.rows),
        false => (matrix.rows, matrix.row_stride, matrix.columns),
    };
    // If the library read such a matrix, whose rows overlap, with a larger stride, it would read
    // past the end.
    if runs > 1 && given < least {
        let expected = format!("rows or columns at least {least} apart");
        return Err(KernelError::shape("matmul", what, expected, format!("{given} apart")));
    }
    // The stride of a single row or column is not used, but the library requires one of at least
    // its length.
    let stride = given.max(least);
    Ok(Operand {
        address: matrix.address(),
        stride,
        transposed,
        element: kind::<T>(),
        alignment: row_alignment(matrix.start, stride, size_of::<T>(), ALIGNMENT_BYTES),
    })
}

/// The product as the library is asked for it; `None` where the output has no elements.
fn matrix_product<D: Driver, P: Precision, T: Element>(
    out: &MatrixMut<'_, Gpu<D, P>, T>,
    a: Matrix<'_, Gpu<D, P>, P::Activation>,
    b: Matrix<'_, Gpu<D, P>, P::Activation>,
    to: Written<'_, Gpu<D, P>>,
    rows: Rows,
) -> Result<Option<MatrixProduct>> {
    let [m, k, n] = [a.rows, a.columns, b.columns];
    if b.rows != k {
        return Err(KernelError::shape("matmul", "rows of b", k, b.rows));
    }
    if [out.rows, out.columns] != [m, n] {
        let found = format!("[{}, {}]", out.rows, out.columns);
        return Err(KernelError::shape("matmul", "out", format!("[{m}, {n}]"), found));
    }
    if m == 0 || n == 0 {
        return Ok(None);
    }
    if k == 0 {
        return Err(KernelError::shape("matmul", "terms", "at least 1", 0));
    }
    let a = read_operand("a", &a)?;
    // The rows of a transpose are columns of the original: dimensions of parameters, never of a
    // microbatch.
    let rows = if a.transposed { Rows::Fixed } else { rows };
    let stride = out.row_stride.max(out.columns);
    let (output, base, base_start) = match to {
        Written::Over => (Output::Overwrite, out.address(), out.start),
        Written::AddedTo => (Output::Add, out.address(), out.start),
        Written::Onto(base) => {
            let found = [base.rows, base.columns, base.row_stride, base.column_stride];
            let expected = [m, n, out.row_stride, 1];
            if found != expected {
                let [expected, found] = [expected, found].map(|of| format!("{of:?}"));
                let what = "rows, columns and strides of base";
                return Err(KernelError::shape("matmul", what, expected, found));
            }
            (Output::Add, base.address(), base.start)
        }
    };
    let alignment = [out.start, base_start]
        .map(|start| row_alignment(start, stride, size_of::<T>(), ALIGNMENT_BYTES));
    Ok(Some(MatrixProduct {
        out: Operand {
            address: out.address(),
            stride,
            transposed: false,
            element: kind::<T>(),
            alignment: alignment[0].min(alignment[1]),
        },
        a,
        b: read_operand("b", &b)?,
        m,
        n,
        k,
        output,
        base,
        bias: None,
        rows,
        batch: None,
    }))
}

impl<D: Driver, P: Precision> MatrixProducts for Gpu<D, P> {
    fn matmul(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        a: Matrix<'_, Self, P::Activation>,
        b: Matrix<'_, Self, P::Activation>,
        output: Output,
    ) -> Result<()> {
        self.product(stream, out, a, b, output.into(), Rows::Free)
    }

    fn matmul_f32(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, f32>,
        a: Matrix<'_, Self, P::Activation>,
        b: Matrix<'_, Self, P::Activation>,
        output: Output,
    ) -> Result<()> {
        self.product(stream, out, a, b, output.into(), Rows::Free)
    }

    fn matmul_onto(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, f32>,
        base: Matrix<'_, Self, f32>,
        a: Matrix<'_, Self, P::Activation>,
        b: Matrix<'_, Self, P::Activation>,
        bias: Option<Slice<'_, Self, f32>>,
    ) -> Result<()> {
        let to = Written::Onto(base);
        match bias {
            Some(bias) => {
                let add = &row_map::ADD_BIAS_F32;
                self.product_with_bias(stream, out, [a, b], to, bias, add)
            }
            None => self.product(stream, out, a, b, to, Rows::Free),
        }
    }

    fn matmul_biased(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        a: Matrix<'_, Self, P::Activation>,
        b: Matrix<'_, Self, P::Activation>,
        bias: Slice<'_, Self, f32>,
    ) -> Result<()> {
        self.product_with_bias(stream, out, [a, b], Written::Over, bias, &row_map::ADD_BIAS)
    }
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// `out[m, n] = (base[m, n] +) a[m, k] b[k, n]`
    pub(in crate::gpu) fn product<T: Element>(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, T>,
        a: Matrix<'_, Self, P::Activation>,
        b: Matrix<'_, Self, P::Activation>,
        to: Written<'_, Self>,
        rows: Rows,
    ) -> Result<()> {
        match matrix_product(&out, a, b, to, rows)? {
            // SAFETY: the views lie inside their buffers; `out` is borrowed mutably, so nothing else views its buffer.
            Some(product) => unsafe { self.enqueue_product(stream, product) },
            None => Ok(()),
        }
    }

    /// [`product`](Self::product) of free rows, to which `bias[n]` is added: by the matrix library where it can, which is given a bias
    /// that is rounded for bf16, else by `add`. (Where fp32 is added to in place, nothing that cuBLASLt 13.1 proposes passes the trial
    /// of a bias that is added last.)
    pub(in crate::gpu) fn product_with_bias<T: Element>(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, T>,
        [a, b]: [Matrix<'_, Self, P::Activation>; 2],
        to: Written<'_, Self>,
        bias: Slice<'_, Self, f32>,
        add: &Map,
    ) -> Result<()> {
        exactly("matmul", "bias", &bias, out.columns)?;
        let Some(product) = matrix_product(&out, a, b, to, Rows::Free)? else { return Ok(()) };
        let (n, element) = (out.columns, kind::<T>());
        let address = match element {
            ElementKind::Bf16 => {
                stream.scratch(&self.driver, ScratchSlot::First, n * element.bytes())?
            }
            ElementKind::F32 => bias.address(),
        };
        let with_bias = MatrixProduct { bias: Some(Bias { address, element }), ..product };
        let is_aligned = address.0.is_multiple_of(ALIGNMENT_BYTES as u64);
        if is_aligned && self.driver.adds_bias(stream.queue_mut(), &with_bias)? {
            if element == ElementKind::Bf16 {
                // SAFETY: the scratch memory has room for so many elements of the activation type, which is bf16.
                unsafe { self.round(stream, "matmul", address, bias.address(), n) }?;
            }
            // SAFETY: as in `product`; the bias has n elements.
            return unsafe { self.enqueue_product(stream, with_bias) };
        }
        // SAFETY: as in `product`.
        unsafe { self.enqueue_product(stream, product) }?;
        self.launch_row_map(stream, add, out, MapInputs::of_bias(bias))
    }

    /// # Safety
    /// The operands lie inside memory of the device, and nothing else views that of `out`.
    unsafe fn enqueue_product(
        &self,
        stream: &mut GpuStream<D>,
        product: MatrixProduct,
    ) -> Result<()> {
        let name = match product.rows {
            Rows::Free => "matmul",
            Rows::Fixed => "weight_gradient",
        };
        // SAFETY: the caller's promise.
        self.profile.note(&self.driver, stream, name, |stream| unsafe {
            self.driver.matmul(stream.queue_mut(), product)
        })
    }

    /// `out_i[m, n] = a_i[m, k] b_i[k, n]` in fp32 for each entry of `batch`, whose outputs are packed; `out`, `a` and `b` are those of the
    /// first entry. The sizes are those of grains and parameters.
    ///
    /// # Errors
    /// As for [`product`](Self::product).
    ///
    /// # Safety
    /// The factors of every entry lie inside the buffers of the first's. `out` is memory of the device, aligned to [`ALIGNMENT_BYTES`],
    /// that nothing else views, with room for those of every entry, which overlap no other's.
    pub(in crate::gpu) unsafe fn product_batch(
        &self,
        stream: &mut GpuStream<D>,
        out: Address,
        [a, b]: [Matrix<'_, Self, P::Activation>; 2],
        batch: Batch,
    ) -> Result<()> {
        let [m, k, n] = [a.rows, a.columns, b.columns];
        let aligned = |operand: Operand, distance: usize| {
            let bytes = operand.alignment | distance.saturating_mul(operand.element.bytes());
            Operand { alignment: 1 << bytes.trailing_zeros(), ..operand }
        };
        let element = ElementKind::F32;
        let alignment = row_alignment(0, n, element.bytes(), ALIGNMENT_BYTES);
        let packed = Operand { address: out, stride: n, transposed: false, element, alignment };
        let product = MatrixProduct {
            out: aligned(packed, batch.out),
            a: aligned(read_operand("a", &a)?, batch.a),
            b: aligned(read_operand("b", &b)?, batch.b),
            m,
            n,
            k,
            output: Output::Overwrite,
            base: out,
            bias: None,
            rows: Rows::Fixed,
            batch: Some(batch),
        };
        // SAFETY: the caller's promise.
        unsafe { self.enqueue_product(stream, product) }
    }
}
