//! Views of device buffers: the operands of kernels.
//!
//! A view names its buffer and a range or a strided matrix inside it; it owns nothing and moves no
//! bytes. Constructing a view checks that it lies inside its buffer, and nothing can change it afterwards, so a kernel
//! can trust it.

use std::ops::Range;

use crate::backend::{Element, Runtime};
use crate::error::{KernelError, Result};

/// A contiguous range of a buffer, read by a kernel.
pub struct Slice<'a, B: Runtime, T: Element> {
    /// The buffer that holds the range.
    pub(crate) buffer: &'a B::Buffer<T>,
    /// The first element.
    pub(crate) start: usize,
    /// The number of elements.
    pub(crate) elements: usize,
}

/// A contiguous range of a buffer, written by a kernel.
pub struct SliceMut<'a, B: Runtime, T: Element> {
    /// The buffer that holds the range.
    pub(crate) buffer: &'a mut B::Buffer<T>,
    /// The first element.
    pub(crate) start: usize,
    /// The number of elements.
    pub(crate) elements: usize,
}

/// `matrix[rows, columns]` with arbitrary strides inside a buffer, read by a kernel.
pub struct Matrix<'a, B: Runtime, T: Element> {
    /// The buffer that holds the matrix.
    pub(crate) buffer: &'a B::Buffer<T>,
    /// The element at row 0, column 0.
    pub(crate) start: usize,
    /// The number of rows.
    pub(crate) rows: usize,
    /// The number of columns.
    pub(crate) columns: usize,
    /// Elements between neighbouring rows.
    pub(crate) row_stride: usize,
    /// Elements between neighbouring columns.
    pub(crate) column_stride: usize,
}

/// `matrix[rows, columns]` whose columns are contiguous, written by a kernel.
pub struct MatrixMut<'a, B: Runtime, T: Element> {
    /// The buffer that holds the matrix.
    pub(crate) buffer: &'a mut B::Buffer<T>,
    /// The element at row 0, column 0.
    pub(crate) start: usize,
    /// The number of rows.
    pub(crate) rows: usize,
    /// The number of columns.
    pub(crate) columns: usize,
    /// Elements between neighbouring rows.
    pub(crate) row_stride: usize,
}

impl<B: Runtime, T: Element> Clone for Slice<'_, B, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B: Runtime, T: Element> Copy for Slice<'_, B, T> {}
impl<B: Runtime, T: Element> Clone for Matrix<'_, B, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B: Runtime, T: Element> Copy for Matrix<'_, B, T> {}

fn check_end(what: &'static str, end: Option<usize>, capacity: usize) -> Result<()> {
    match end {
        Some(end) if end <= capacity => Ok(()),
        _ => Err(KernelError::shape(
            "view",
            what,
            format!("at most {capacity} elements"),
            end.map_or_else(|| "an overflowing size".to_owned(), |end| end.to_string()),
        )),
    }
}

/// One past the last element that a strided matrix touches.
fn matrix_end(
    start: usize,
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
) -> Option<usize> {
    if rows == 0 || columns == 0 {
        return Some(start);
    }
    let last_row = (rows - 1).checked_mul(row_stride)?;
    let last_column = (columns - 1).checked_mul(column_stride)?;
    start.checked_add(last_row)?.checked_add(last_column)?.checked_add(1)
}

impl<'a, B: Runtime, T: Element> Slice<'a, B, T> {
    /// `elements` elements of `buffer` from `start`.
    ///
    /// # Errors
    /// A range that leaves the buffer.
    pub fn new(buffer: &'a B::Buffer<T>, start: usize, elements: usize) -> Result<Self> {
        check_end("slice", start.checked_add(elements), B::elements(buffer))?;
        Ok(Self { buffer, start, elements })
    }

    /// The buffer that holds the range, and its elements there.
    pub fn place(self) -> (&'a B::Buffer<T>, Range<usize>) {
        (self.buffer, self.start..self.start + self.elements)
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// The whole of `buffer`.
    pub fn all(buffer: &'a B::Buffer<T>) -> Self {
        Self { buffer, start: 0, elements: B::elements(buffer) }
    }

    /// `elements` elements from `start`, counted inside this slice.
    ///
    /// # Errors
    /// A range that leaves the slice.
    pub fn sub(self, start: usize, elements: usize) -> Result<Self> {
        check_end("slice of a slice", start.checked_add(elements), self.elements)?;
        Ok(Self { buffer: self.buffer, start: self.start + start, elements })
    }

    /// The slice as `matrix[rows, columns]`, row-major.
    ///
    /// # Errors
    /// A matrix that is larger than the slice.
    pub fn matrix(self, rows: usize, columns: usize) -> Result<Matrix<'a, B, T>> {
        check_end("matrix of a slice", rows.checked_mul(columns), self.elements)?;
        Matrix::new(self.buffer, self.start, rows, columns, columns, 1)
    }
}

impl<'a, B: Runtime, T: Element> SliceMut<'a, B, T> {
    /// `elements` elements of `buffer` from `start`.
    ///
    /// # Errors
    /// A range that leaves the buffer.
    pub fn new(buffer: &'a mut B::Buffer<T>, start: usize, elements: usize) -> Result<Self> {
        check_end("slice", start.checked_add(elements), B::elements(buffer))?;
        Ok(Self { buffer, start, elements })
    }

    /// The buffer that holds the range, and its elements there.
    pub fn place(self) -> (&'a mut B::Buffer<T>, Range<usize>) {
        (self.buffer, self.start..self.start + self.elements)
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// The whole of `buffer`.
    pub fn all(buffer: &'a mut B::Buffer<T>) -> Self {
        let elements = B::elements(buffer);
        Self { buffer, start: 0, elements }
    }

    /// `elements` elements from `start`, counted inside this slice; the slice itself is given up.
    ///
    /// # Errors
    /// A range that leaves the slice.
    pub fn sub(self, start: usize, elements: usize) -> Result<Self> {
        check_end("slice of a slice", start.checked_add(elements), self.elements)?;
        Ok(Self { buffer: self.buffer, start: self.start + start, elements })
    }

    /// The same slice for a shorter time.
    pub fn reborrow(&mut self) -> SliceMut<'_, B, T> {
        SliceMut { buffer: self.buffer, start: self.start, elements: self.elements }
    }

    /// The same range, read only.
    pub fn as_slice(&self) -> Slice<'_, B, T> {
        Slice { buffer: self.buffer, start: self.start, elements: self.elements }
    }

    /// The slice as `matrix[rows, columns]`, row-major.
    ///
    /// # Errors
    /// A matrix that is larger than the slice.
    pub fn matrix(self, rows: usize, columns: usize) -> Result<MatrixMut<'a, B, T>> {
        check_end("matrix of a slice", rows.checked_mul(columns), self.elements)?;
        MatrixMut::new(self.buffer, self.start, rows, columns, columns)
    }
}

impl<'a, B: Runtime, T: Element> Matrix<'a, B, T> {
    /// `matrix[rows, columns]` from element `start` of `buffer`, with strides in elements.
    ///
    /// # Errors
    /// A matrix that leaves the buffer.
    pub fn new(
        buffer: &'a B::Buffer<T>,
        start: usize,
        rows: usize,
        columns: usize,
        row_stride: usize,
        column_stride: usize,
    ) -> Result<Self> {
        let end = matrix_end(start, rows, columns, row_stride, column_stride);
        check_end("matrix", end, B::elements(buffer))?;
        Ok(Self { buffer, start, rows, columns, row_stride, column_stride })
    }

    /// The buffer that holds the matrix.
    pub fn buffer(&self) -> &'a B::Buffer<T> {
        self.buffer
    }

    /// The element of the buffer at row 0, column 0.
    pub fn start(&self) -> usize {
        self.start
    }

    /// The numbers of rows and columns.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// Elements between neighbouring rows, and between neighbouring columns.
    pub fn strides(&self) -> [usize; 2] {
        [self.row_stride, self.column_stride]
    }

    /// The transpose: the same elements, `matrix[columns, rows]`.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// Rows `first .. first + rows`.
    ///
    /// # Errors
    /// Rows past the end.
    pub fn rows(self, first: usize, rows: usize) -> Result<Self> {
        check_end("rows of a matrix", first.checked_add(rows), self.rows)?;
        Ok(Self { start: self.start + first * self.row_stride, rows, ..self })
    }

    /// Columns `first .. first + columns`.
    ///
    /// # Errors
    /// Columns past the end.
    pub fn columns(self, first: usize, columns: usize) -> Result<Self> {
        check_end("columns of a matrix", first.checked_add(columns), self.columns)?;
        Ok(Self { start: self.start + first * self.column_stride, columns, ..self })
    }
}

impl<'a, B: Runtime, T: Element> MatrixMut<'a, B, T> {
    /// `matrix[rows, columns]` from element `start` of `buffer`, its rows `row_stride` apart.
    ///
    /// # Errors
    /// A matrix that leaves the buffer, or rows that overlap.
    pub fn new(
        buffer: &'a mut B::Buffer<T>,
        start: usize,
        rows: usize,
        columns: usize,
        row_stride: usize,
    ) -> Result<Self> {
        check_end("matrix", matrix_end(start, rows, columns, row_stride, 1), B::elements(buffer))?;
        if rows > 1 && row_stride < columns {
            return Err(KernelError::shape(
                "view",
                "row stride of a written matrix",
                format!("at least {columns}"),
                row_stride,
            ));
        }
        Ok(Self { buffer, start, rows, columns, row_stride })
    }

    /// The same matrix for a shorter time.
    pub fn reborrow(&mut self) -> MatrixMut<'_, B, T> {
        MatrixMut { buffer: self.buffer, ..*self }
    }

    /// The same matrix, read only.
    pub fn as_matrix(&self) -> Matrix<'_, B, T> {
        let Self { start, rows, columns, row_stride, .. } = *self;
        Matrix { buffer: self.buffer, start, rows, columns, row_stride, column_stride: 1 }
    }

    /// Columns `first .. first + columns`.
    ///
    /// # Errors
    /// Columns past the end.
    pub fn columns(self, first: usize, columns: usize) -> Result<Self> {
        check_end("columns of a matrix", first.checked_add(columns), self.columns)?;
        Ok(Self { start: self.start + first, columns, ..self })
    }
}
