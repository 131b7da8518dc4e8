//! Views as slices: checks the shapes of a kernel's operands, and divides its rows into parts.

use super::Cpu;
use super::simd::LANES;
use crate::backend::Element;
use crate::error::{KernelError, Result};
use crate::shape::SequenceShape;
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

/// `rows[i]`: rows of contiguous elements, `stride` apart.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    elements: &'a [f32],
    stride: usize,
    columns: usize,
}

/// [`Rows`] that are written.
pub(crate) struct RowsMut<'a> {
    elements: &'a mut [f32],
    stride: usize,
    columns: usize,
}

impl<'a> Rows<'a> {
    /// `matrix`, which must be `[rows, columns]` with contiguous columns.
    pub(crate) fn new(
        kernel: &'static str,
        what: &'static str,
        matrix: Matrix<'a, Cpu, f32>,
        rows: usize,
        columns: usize,
    ) -> Result<Self> {
        check(kernel, what, (matrix.rows, matrix.columns), (rows, columns))?;
        if matrix.columns > 1 && matrix.column_stride != 1 {
            return Err(KernelError::shape(
                kernel,
                what,
                "contiguous columns",
                format!("a column stride of {}", matrix.column_stride),
            ));
        }
        let end = matrix_end(matrix.start, rows, columns, matrix.row_stride);
        let elements = &matrix.buffer[matrix.start..end];
        // The stride of a single row may be anything.
        let stride = if rows > 1 { matrix.row_stride } else { columns };
        if stride < columns {
            let found = format!("a row stride of {stride}");
            return Err(KernelError::shape(kernel, what, "rows that do not overlap", found));
        }
        Ok(Self { elements, stride, columns })
    }

    /// `rows` rows of `columns` elements that follow each other without a gap, in the elements of a slice.
    pub(crate) fn packed(elements: &'a [f32], columns: usize) -> Self {
        Self { elements, stride: columns, columns }
    }

    /// The rows from `first` on, and of them `columns` columns from `first_column` on.
    pub(crate) fn part(&self, first: usize, first_column: usize, columns: usize) -> Self {
        let elements = &self.elements[first * self.stride + first_column..];
        Self { elements, stride: self.stride, columns }
    }

    #[inline(always)]
    pub(crate) fn row(&self, row: usize) -> &'a [f32] {
        &self.elements[row * self.stride..][..self.columns]
    }

    /// A vector's elements from `column` on, or as many as there are, of each of `count` rows from `first` on.
    #[inline(always)]
    pub(crate) fn vectors(
        &self,
        first: usize,
        count: usize,
        column: usize,
    ) -> impl Iterator<Item = &'a [f32]> + use<'a> {
        let (width, stride) = (LANES.min(self.columns - column), self.stride);
        let mut rest = &self.elements[first * stride + column..];
        (0..count).map(move |_| {
            let vector = &rest[..width];
            rest = rest.get(stride..).unwrap_or_default();
            vector
        })
    }

    /// The address of (row, column), for any row and column, even past the end.
    #[inline(always)]
    pub(crate) fn address(&self, row: usize, column: usize) -> *const f32 {
        let offset = row.wrapping_mul(self.stride).wrapping_add(column);
        self.elements.as_ptr().wrapping_add(offset)
    }
}

/// Copies `rows` rows, where there is a place for them.
pub(crate) fn copy_rows(to: Option<RowsMut<'_>>, from: &Rows<'_>, rows: usize) {
    if let Some(mut to) = to {
        (0..rows).for_each(|row| to.row_mut(row).copy_from_slice(from.row(row)));
    }
}

impl<'a> RowsMut<'a> {
    /// `matrix`, which must be `[rows, columns]`.
    pub(crate) fn new(
        kernel: &'static str,
        what: &'static str,
        matrix: MatrixMut<'a, Cpu, f32>,
        rows: usize,
        columns: usize,
    ) -> Result<Self> {
        check(kernel, what, (matrix.rows, matrix.columns), (rows, columns))?;
        let end = matrix_end(matrix.start, rows, columns, matrix.row_stride);
        // The stride of a single row may be anything; parts need one that holds the row.
        let stride = matrix.row_stride.max(columns);
        let elements = &mut matrix.buffer[matrix.start..end];
        Ok(Self { elements, stride, columns })
    }

    #[inline(always)]
    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.elements[row * self.stride..][..self.columns]
    }

    /// A vector's elements from `column` on, or as many as there are, of each of `count` rows from `first` on.
    #[inline(always)]
    pub(crate) fn vectors_mut(
        &mut self,
        first: usize,
        count: usize,
        column: usize,
    ) -> impl Iterator<Item = &mut [f32]> {
        let (width, stride) = (LANES.min(self.columns - column), self.stride);
        let mut rest = &mut self.elements[first * stride + column..];
        (0..count).map(move |_| {
            let next = stride.min(rest.len());
            let (row, after) = std::mem::take(&mut rest).split_at_mut(next);
            rest = after;
            &mut row[..width]
        })
    }

    /// The address of (row, column), for any row and column, even past the end.
    #[inline(always)]
    pub(crate) fn address(&self, row: usize, column: usize) -> *const f32 {
        let offset = row.wrapping_mul(self.stride).wrapping_add(column);
        self.elements.as_ptr().wrapping_add(offset)
    }

    /// The elements from row 0, column 0 to the last row's last column, and how far apart rows are.
    pub(crate) fn into_elements(self) -> (&'a mut [f32], usize) {
        (self.elements, self.stride)
    }

    /// Cuts the rows into parts of `rows` rows each; the last may be shorter.
    pub(crate) fn parts(self, rows: usize) -> impl Iterator<Item = RowsMut<'a>> {
        let Self { elements, stride, columns } = self;
        let parts = elements.chunks_mut((rows * stride).max(1));
        parts.map(move |elements| RowsMut { elements, stride, columns })
    }
}

impl<'a> RowsMut<'a> {
    /// Cuts the first `rows` rows into parts of `columns` columns, the last of which may be narrower: for each part, its elements
    /// of each row.
    pub(crate) fn column_parts(self, columns: usize, rows: usize) -> Vec<Vec<&'a mut [f32]>> {
        let parts = self.columns.div_ceil(columns);
        let mut of_parts: Vec<Vec<_>> = (0..parts).map(|_| Vec::with_capacity(rows)).collect();
        for row in self.elements.chunks_mut(self.stride).take(rows) {
            let of_row = row[..self.columns].chunks_mut(columns);
            of_parts.iter_mut().zip(of_row).for_each(|(part, elements)| part.push(elements));
        }
        of_parts
    }
}

fn matrix_end(start: usize, rows: usize, columns: usize, row_stride: usize) -> usize {
    if rows == 0 || columns == 0 { start } else { start + (rows - 1) * row_stride + columns }
}

/// Asks `found`, rows and columns, to be `expected`.
pub(crate) fn check(
    kernel: &'static str,
    what: &'static str,
    found: (usize, usize),
    expected: (usize, usize),
) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let show = |(rows, columns)| format!("[{rows}, {columns}]");
    Err(KernelError::shape(kernel, what, show(expected), show(found)))
}

fn check_elements(
    kernel: &'static str,
    what: &'static str,
    found: usize,
    expected: usize,
) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(KernelError::shape(kernel, what, format!("{expected} elements"), found))
}

/// The elements of `slice`.
pub(crate) fn elements<'a, T: Element>(slice: Slice<'a, Cpu, T>) -> &'a [T] {
    &slice.buffer[slice.start..][..slice.elements]
}

/// The elements of `slice`.
pub(crate) fn elements_mut<'a, T: Element>(slice: SliceMut<'a, Cpu, T>) -> &'a mut [T] {
    &mut slice.buffer[slice.start..][..slice.elements]
}

/// The elements of `slice`, of which there must be `expected`.
pub(crate) fn exactly<'a, T: Element>(
    kernel: &'static str,
    what: &'static str,
    slice: Slice<'a, Cpu, T>,
    expected: usize,
) -> Result<&'a [T]> {
    check_elements(kernel, what, slice.elements, expected)?;
    Ok(elements(slice))
}

/// The elements of `slice`, of which there must be `expected`.
pub(crate) fn exactly_mut<'a, T: Element>(
    kernel: &'static str,
    what: &'static str,
    slice: SliceMut<'a, Cpu, T>,
    expected: usize,
) -> Result<&'a mut [T]> {
    check_elements(kernel, what, slice.elements, expected)?;
    Ok(elements_mut(slice))
}

/// A piece of sequences has no documents.
pub(crate) fn no_documents(kernel: &'static str, present: bool) -> Result<()> {
    if !present {
        return Ok(());
    }
    Err(KernelError::shape(kernel, "starts", "none in a piece", "some"))
}

/// The number of positions of each sample of a piece.
#[derive(Clone, Copy)]
pub(crate) struct Lengths<'a> {
    lengths: Option<&'a [u32]>,
    positions: usize,
}

impl<'a> Lengths<'a> {
    pub(crate) fn new(
        kernel: &'static str,
        lengths: Option<Slice<'a, Cpu, u32>>,
        sequences: SequenceShape,
    ) -> Result<Self> {
        let lengths = lengths.map(|lengths| {
            check_elements(kernel, "lengths", lengths.elements, sequences.samples())?;
            Ok(elements(lengths))
        });
        Ok(Self { lengths: lengths.transpose()?, positions: sequences.positions() })
    }

    pub(crate) fn of(&self, sample: usize) -> usize {
        self.lengths.map_or(self.positions, |all| self.positions.min(all[sample] as usize))
    }
}
