//! Matrix products: our own with AVX-512 ([`avx512`]), else through `matrixmultiply`, called directly so that
//! strides cost nothing.
//!
//! Its kernels for AVX-512, AVX2 and NEON and ours compute the same: each element of the output is
//! a chain of fused multiply-adds from +0.0 over a block of 256 along k, and the blocks are added
//! in order. So an element depends on k alone, and dividing the output among threads changes no
//! bits; dividing k would. The version of `matrixmultiply` is pinned, and the tests check these
//! properties for it, as the checks of a GPU's library do at run time.

#[cfg(target_arch = "x86_64")]
mod avx512;

use super::device_stream::ComputeThreads;
use super::dispatch::Dispatch;
use super::gradient_sums::AddAssign;
use super::rows::{Rows, RowsMut, exactly};
use super::{Cpu, DeviceStream, InstructionSet};
use crate::backend::{Bias, MatrixProducts, OrderedProducts, Output};
use crate::error::{KernelError, Result};
use crate::view::{Matrix, MatrixMut, Slice};

/// The layout of an operand: element (i, j) is at `start + i * row_stride + j * column_stride`.
#[derive(Clone, Copy)]
struct Operand {
    start: *const f32,
    row_stride: isize,
    column_stride: isize,
}

/// The layout of an output: element (i, j) is at `start + i * row_stride + j`.
#[derive(Clone, Copy)]
struct Target {
    start: *mut f32,
    row_stride: isize,
}

impl Target {
    /// The same rows from element (row, column) on.
    ///
    /// # Safety
    /// The element lies in the output, or one past its end.
    #[inline(always)]
    unsafe fn from(self, row: usize, column: usize) -> Self {
        let offset = row as isize * self.row_stride + column as isize;
        // SAFETY: the caller's promise.
        Self { start: unsafe { self.start.offset(offset) }, ..self }
    }
}

/// A part of a product: `out[rows, columns] (+)= a[rows, k] b[k, columns]`.
struct Part {
    out: Target,
    /// The matrix that the complete product is added to; `out` is then scratch memory, and is overwritten or left as it is.
    sum: Option<Target>,
    a: Operand,
    b: Operand,
    rows: usize,
    k: usize,
    columns: usize,
    beta: f32,
}

// SAFETY: the parts of one product write disjoint elements of outputs that `multiply` borrows
// exclusively, and only read their operands, until `ComputeThreads::for_each` has returned.
unsafe impl Send for Part {}

impl Part {
    /// # Safety
    /// All elements that the sizes and strides reach may be read, and those of the output written, by this thread alone.
    unsafe fn multiply(&self, dispatch: Dispatch) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's promise; an instruction set that is dispatched to is available.
        if dispatch.instruction_set() == InstructionSet::Avx512 && unsafe { avx512::product(self) }
        {
            return;
        }
        // SAFETY: the caller's promise.
        unsafe {
            matrixmultiply::sgemm(
                self.rows,
                self.k,
                self.columns,
                1.0,
                self.a.start,
                self.a.row_stride,
                self.a.column_stride,
                self.b.start,
                self.b.row_stride,
                self.b.column_stride,
                self.beta,
                self.out.start,
                self.out.row_stride,
                1,
            );
        }
        let Some(sum) = self.sum else { return };
        for row in 0..self.rows {
            // SAFETY: these are rows of the part, and the sum is not the scratch memory.
            unsafe {
                let sum = std::slice::from_raw_parts_mut(sum.from(row, 0).start, self.columns);
                let product = std::slice::from_raw_parts(self.out.from(row, 0).start, self.columns);
                dispatch.run(AddAssign { out: sum, x: product });
            }
        }
    }
}

impl MatrixProducts for Cpu {
    fn matmul(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        a: Matrix<'_, Self, f32>,
        b: Matrix<'_, Self, f32>,
        output: Output,
    ) -> Result<()> {
        matmul(stream.threads(), self.dispatch, out, a, b, output)
    }

    fn matmul_f32(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        a: Matrix<'_, Self, f32>,
        b: Matrix<'_, Self, f32>,
        output: Output,
    ) -> Result<()> {
        matmul(stream.threads(), self.dispatch, out, a, b, output)
    }

    fn matmul_onto(
        &self,
        stream: &mut DeviceStream,
        mut out: MatrixMut<'_, Self, f32>,
        base: Matrix<'_, Self, f32>,
        a: Matrix<'_, Self, f32>,
        b: Matrix<'_, Self, f32>,
        bias: Option<Slice<'_, Self, f32>>,
    ) -> Result<()> {
        const KERNEL: &str = "matmul";
        let (rows, columns) = (out.rows, out.columns);
        let base = Rows::new(KERNEL, "base", base, rows, columns)?;
        if let Some(bias) = bias {
            exactly(KERNEL, "bias", bias, columns)?;
        }
        let mut to = RowsMut::new(KERNEL, "out", out.reborrow(), rows, columns)?;
        (0..rows).for_each(|row| to.row_mut(row).copy_from_slice(base.row(row)));
        matmul(stream.threads(), self.dispatch, out.reborrow(), a, b, Output::Add)?;
        match bias {
            Some(bias) => self.add_bias_f32(stream, out, bias),
            None => Ok(()),
        }
    }

    fn matmul_biased(
        &self,
        stream: &mut DeviceStream,
        mut out: MatrixMut<'_, Self, f32>,
        a: Matrix<'_, Self, f32>,
        b: Matrix<'_, Self, f32>,
        bias: Slice<'_, Self, f32>,
    ) -> Result<()> {
        exactly("matmul", "bias", bias, out.columns)?;
        matmul(stream.threads(), self.dispatch, out.reborrow(), a, b, Output::Overwrite)?;
        self.add_bias(stream, out, bias)
    }
}

impl OrderedProducts for Cpu {
    fn ordered_matmul(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        a: Matrix<'_, Self, f32>,
        weight: Matrix<'_, Self, f32>,
        output: Output,
    ) -> Result<()> {
        matmul(stream.threads(), self.dispatch, out, a, weight.transposed(), output)
    }

    fn ordered_matmul_f32(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        a: Matrix<'_, Self, f32>,
        weight: Matrix<'_, Self, f32>,
        output: Output,
    ) -> Result<()> {
        self.ordered_matmul(stream, out, a, weight, output)
    }
}

/// Rows and columns are divided at multiples of this, the edge of the widest micro kernel.
const EDGE: usize = 16;

fn matmul(
    threads: &ComputeThreads,
    dispatch: Dispatch,
    out: MatrixMut<'_, Cpu, f32>,
    a: Matrix<'_, Cpu, f32>,
    b: Matrix<'_, Cpu, f32>,
    output: Output,
) -> Result<()> {
    let beta = match output {
        Output::Overwrite => 0.0,
        Output::Add => 1.0,
    };
    multiply(threads, dispatch, out, None, a, b, beta)
}

/// `sum += a b`, the product as [`matmul`] forms it, added when it is whole: not what [`Output::Add`] does, which adds block
/// by block. `scratch` is as large as the sum.
pub(crate) fn matmul_added(
    threads: &ComputeThreads,
    dispatch: Dispatch,
    sum: MatrixMut<'_, Cpu, f32>,
    scratch: MatrixMut<'_, Cpu, f32>,
    a: Matrix<'_, Cpu, f32>,
    b: Matrix<'_, Cpu, f32>,
) -> Result<()> {
    let found = (sum.rows, sum.columns);
    if found != (scratch.rows, scratch.columns) {
        let expected = format!("[{}, {}]", scratch.rows, scratch.columns);
        let found = format!("[{}, {}]", found.0, found.1);
        return Err(KernelError::shape("matmul_added", "sum", expected, found));
    }
    multiply(threads, dispatch, scratch, Some(sum), a, b, 0.0)
}

fn multiply(
    threads: &ComputeThreads,
    dispatch: Dispatch,
    out: MatrixMut<'_, Cpu, f32>,
    sum: Option<MatrixMut<'_, Cpu, f32>>,
    a: Matrix<'_, Cpu, f32>,
    b: Matrix<'_, Cpu, f32>,
    beta: f32,
) -> Result<()> {
    let (rows, k, columns) = (out.rows, a.columns, out.columns);
    let shape = |rows, columns| format!("[{rows}, {columns}]");
    if a.rows != rows {
        return Err(KernelError::shape("matmul", "a", shape(rows, k), shape(a.rows, k)));
    }
    if (b.rows, b.columns) != (k, columns) {
        let found = shape(b.rows, b.columns);
        return Err(KernelError::shape("matmul", "b", shape(k, columns), found));
    }
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let whole = Part {
        out: target(out)?,
        sum: sum.map(target).transpose()?,
        a: operand(a)?,
        b: operand(b)?,
        rows,
        k,
        columns,
        beta,
    };
    // The longer side is divided, as each thread packs the whole of the other operand.
    let along_rows = rows >= columns;
    let items = if along_rows { rows } else { columns };
    let share = threads.share(items.div_ceil(EDGE)) * EDGE;
    let parts = (0..items).step_by(share).map(|first| {
        let count = share.min(items - first);
        // SAFETY: `first` is less than the number of rows or columns, so each pointer stays inside the
        // slice that `operand` or `target` has checked its matrix to lie in.
        unsafe {
            let from = |row, column| {
                (whole.out.from(row, column), whole.sum.map(|sum| sum.from(row, column)))
            };
            if along_rows {
                let (out, sum) = from(first, 0);
                let a = whole.a;
                Part {
                    out,
                    sum,
                    a: Operand { start: a.start.offset(first as isize * a.row_stride), ..a },
                    rows: count,
                    ..whole
                }
            } else {
                let (out, sum) = from(0, first);
                let b = whole.b;
                let start = b.start.offset(first as isize * b.column_stride);
                Part { out, sum, b: Operand { start, ..b }, columns: count, ..whole }
            }
        }
    });
    threads.for_each(parts, |part| {
        // SAFETY: `operand` and `target` have checked that every element that the sizes and strides reach
        // lies in its buffer, and the outputs are borrowed exclusively, their parts disjoint.
        unsafe { part.multiply(dispatch) };
    });
    Ok(())
}

/// The operand, its extent checked against its buffer.
fn operand(matrix: Matrix<'_, Cpu, f32>) -> Result<Operand> {
    let Matrix { buffer, start, rows, columns, row_stride, column_stride } = matrix;
    let end = match (rows.checked_sub(1), columns.checked_sub(1)) {
        (Some(rows), Some(columns)) => start + rows * row_stride + columns * column_stride + 1,
        _ => start,
    };
    Ok(Operand {
        start: buffer[start..end].as_ptr(),
        row_stride: signed(row_stride)?,
        column_stride: signed(column_stride)?,
    })
}

/// The output, which has elements, its extent checked against its buffer.
fn target(matrix: MatrixMut<'_, Cpu, f32>) -> Result<Target> {
    let MatrixMut { buffer, start, rows, columns, row_stride } = matrix;
    let end = start + (rows - 1) * row_stride + columns;
    Ok(Target { start: buffer[start..end].as_mut_ptr(), row_stride: signed(row_stride)? })
}

fn signed(stride: usize) -> Result<isize> {
    isize::try_from(stride).map_err(|_| {
        KernelError::shape("matmul", "stride", format!("at most {}", isize::MAX), stride)
    })
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use crate::cpu::Buffer;
    use crate::cpu::InstructionSet;

    /// The blocks along k of `matrixmultiply`.
    const BLOCK: usize = 256;

    /// Pins what the module's documentation says, of every way to multiply that this processor has.
    #[test]
    fn an_element_is_a_chain_of_fused_multiply_adds_in_blocks() -> Result<()> {
        if cfg!(target_arch = "x86_64") && !InstructionSet::Avx2.is_available() {
            eprintln!("not run: this processor has no fused multiply-add");
            return Ok(());
        }
        for set in InstructionSet::ALL {
            let Ok(dispatch) = Dispatch::new(set) else {
                eprintln!("not run: this processor lacks {}", set.name());
                continue;
            };
            for rows in 1..=14 {
                for (k, columns) in [(1, 1), (15, 16), (17, 33), (256, 31), (300, 49)] {
                    chains(dispatch, [rows, k, columns])?;
                }
            }
            // More than a panel of rows, of columns, and several blocks.
            for sizes in [[530, 20, 5], [3, 601, 1040], [40, 300, 1040], [17, 255, 33]] {
                chains(dispatch, sizes)?;
            }
        }
        Ok(())
    }

    /// A product whose operands lie in every way, against chains written out; without an output, it is added when it is whole.
    fn chains(dispatch: Dispatch, [rows, k, columns]: [usize; 3]) -> Result<()> {
        let mut bits = 17_u32;
        let mut next = || {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            bits as f32 / u32::MAX as f32 - 0.5
        };
        let mut fill = |elements| {
            let mut buffer = Buffer::zeroed(elements)?;
            buffer.fill_with(&mut next);
            Ok::<_, KernelError>(buffer)
        };
        // Row-major, column-major, and neither, with gaps between the lines.
        let strides =
            |rows: usize, columns: usize| [(columns + 3, 1), (1, rows + 2), (2 * columns + 1, 2)];
        let extent = |rows, columns, (row, column)| (rows - 1) * row + (columns - 1) * column + 1;
        for ((a_strides, b_strides), output) in strides(rows, k)
            .into_iter()
            .flat_map(|a| strides(k, columns).map(|b| (a, b)))
            .flat_map(|strides| {
                [Some(Output::Overwrite), Some(Output::Add), None].map(|output| (strides, output))
            })
        {
            let a = fill(extent(rows, k, a_strides))?;
            let b = fill(extent(k, columns, b_strides))?;
            let stride = columns + 5;
            let mut out = fill(rows * stride)?;
            let mut expected = out.to_vec();
            for (i, expected) in expected.iter_mut().enumerate() {
                let (row, column) = (i / stride, i % stride);
                if column >= columns {
                    continue;
                }
                let chain = |first: usize| {
                    (first..(first + BLOCK).min(k)).fold(0.0_f32, |sum, k| {
                        let a = a[row * a_strides.0 + k * a_strides.1];
                        a.mul_add(b[k * b_strides.0 + column * b_strides.1], sum)
                    })
                };
                let blocks = (0..k).step_by(BLOCK).map(chain);
                let start = (output == Some(Output::Add)).then_some(*expected);
                let product = start.into_iter().chain(blocks).reduce(|x, y| x + y).unwrap();
                *expected = if output.is_none() { *expected + product } else { product };
            }
            let threads = ComputeThreads::new(NonZeroUsize::MIN)?;
            let a = Matrix::new(&a, 0, rows, k, a_strides.0, a_strides.1)?;
            let b = Matrix::new(&b, 0, k, columns, b_strides.0, b_strides.1)?;
            let view = MatrixMut::new(&mut out, 0, rows, columns, stride)?;
            match output {
                Some(output) => matmul(&threads, dispatch, view, a, b, output)?,
                None => {
                    let mut scratch = fill(rows * (columns + 1))?;
                    let scratch = MatrixMut::new(&mut scratch, 0, rows, columns, columns + 1)?;
                    matmul_added(&threads, dispatch, view, scratch, a, b)?;
                }
            }
            for (i, (out, expected)) in out.iter().zip(expected).enumerate() {
                let label = format!(
                    "[{rows}, {k}] {a_strides:?} [{k}, {columns}] {b_strides:?} {output:?}: {i}"
                );
                assert_eq!(out.to_bits(), expected.to_bits(), "{label}");
            }
        }
        Ok(())
    }
}
