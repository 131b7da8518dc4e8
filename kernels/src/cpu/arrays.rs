//! The host's memory as arrays of the crate `ndarray`, and arrays as the host's memory.
//!
//! Slices and matrices open as views, and nothing is copied: a view has the strides of its matrix.
//! In the other direction an array is copied, into memory that a device's slices and matrices are
//! made of: by [`Buffer::of_array`], or by `matrix.array().assign(&array)` into a matrix that is
//! there.
//!
//! ```
//! use ndarray::array;
//! use tidemill_kernels::cpu::Buffer;
//! use tidemill_kernels::{Cpu, Matrix, Slice, SliceMut};
//!
//! let mut buffer = Buffer::of_array(&array![[1.0_f32, 2.0, 3.0], [4.0, 5.0, 6.0]])?;
//! let matrix: Matrix<'_, Cpu, _> = Slice::all(&buffer).matrix(2, 3)?;
//! assert_eq!(matrix.columns(1, 2)?.transposed().array(), array![[2.0, 5.0], [3.0, 6.0]]);
//! SliceMut::<Cpu, _>::all(&mut buffer).matrix(2, 3)?.columns(0, 2)?.array().fill(0.0);
//! assert_eq!(buffer[..], [0.0, 0.0, 3.0, 0.0, 0.0, 6.0]);
//! # Ok::<(), tidemill_kernels::KernelError>(())
//! ```

use ndarray::{
    ArrayBase, ArrayView1, ArrayView2, ArrayViewMut1, ArrayViewMut2, Data, Dimension, ShapeBuilder,
};

use super::{Buffer, Cpu};
use crate::backend::Element;
use crate::error::Result;
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

/// The message of the panic where a view left its buffer, which its constructor has ruled out.
const INSIDE: &str = "a view that lies inside its buffer";

impl<'a, T: Element> Slice<'a, Cpu, T> {
    /// The elements as a view of `ndarray`.
    pub fn array(self) -> ArrayView1<'a, T> {
        self.values().into()
    }
}

impl<'a, T: Element> SliceMut<'a, Cpu, T> {
    /// The elements as a view of `ndarray` that can be written.
    pub fn array(self) -> ArrayViewMut1<'a, T> {
        self.values().into()
    }
}

impl<'a, T: Element> Matrix<'a, Cpu, T> {
    /// `matrix[rows, columns]` as a view of `ndarray` with the same strides.
    pub fn array(self) -> ArrayView2<'a, T> {
        let Self { buffer, start, rows, columns, row_stride, column_stride } = self;
        let shape = (rows, columns).strides(strides(rows, columns, (row_stride, column_stride)));
        ArrayView2::from_shape(shape, &buffer.as_slice()[start..]).expect(INSIDE)
    }
}

impl<'a, T: Element> MatrixMut<'a, Cpu, T> {
    /// `matrix[rows, columns]` as a view of `ndarray` that can be written, with the same strides.
    pub fn array(self) -> ArrayViewMut2<'a, T> {
        let Self { buffer, start, rows, columns, row_stride } = self;
        let shape = (rows, columns).strides(strides(rows, columns, (row_stride, 1)));
        ArrayViewMut2::from_shape(shape, &mut buffer.as_mut_slice()[start..]).expect(INSIDE)
    }
}

/// The strides of a view: none where it has no elements, as `ndarray` wants room for those of the
/// axes that are not 0.
fn strides(rows: usize, columns: usize, strides: (usize, usize)) -> (usize, usize) {
    if rows == 0 || columns == 0 { (0, 0) } else { strides }
}

impl<T: Element> Buffer<T> {
    /// A copy of the elements of `array`, its last axis the fastest, whatever its strides: of an
    /// array `[rows, columns]`, [`Slice::matrix`] of the whole buffer has the same elements at the
    /// same places.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`](crate::KernelError::OutOfMemory) where the host has no room.
    pub fn of_array<D: Dimension>(array: &ArrayBase<impl Data<Elem = T>, D>) -> Result<Self> {
        let mut buffer = Self::zeroed(array.len())?;
        buffer.iter_mut().zip(array).for_each(|(to, &from)| *to = from);
        Ok(buffer)
    }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, s};

    use super::*;

    /// `1, 2, ...`
    fn numbers(elements: usize) -> Buffer<f32> {
        Buffer::copy_of(&(1..=elements).map(|at| at as f32).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn views_have_the_elements_of_their_matrices() {
        let buffer = numbers(7 + 3 * 11);
        for (rows, columns, row_stride, column_stride) in
            [(3, 5, 11, 1), (3, 5, 11, 2), (5, 3, 1, 11), (1, 1, 9, 9), (4, 3, 0, 1), (0, 5, 9, 1)]
        {
            let matrix: Matrix<'_, Cpu, f32> =
                Matrix::new(&buffer, 7, rows, columns, row_stride, column_stride).unwrap();
            let expected = Array2::from_shape_fn((rows, columns), |(row, column)| {
                (8 + row * row_stride + column * column_stride) as f32
            });
            assert_eq!(matrix.array(), expected);
            assert_eq!(matrix.transposed().array(), expected.t());
        }
        let slice: Slice<'_, Cpu, f32> = Slice::new(&buffer, 5, 3).unwrap();
        assert_eq!(slice.array().to_vec(), [6.0, 7.0, 8.0]);
    }

    #[test]
    fn what_is_written_to_a_view_is_in_the_matrix_and_nowhere_else() {
        let mut buffer = numbers(2 + 3 * 7);
        let matrix = MatrixMut::<Cpu, _>::new(&mut buffer, 2, 3, 5, 7).unwrap();
        matrix.columns(1, 3).unwrap().array().fill(0.0);
        for (at, &value) in buffer.iter().enumerate() {
            let inside = at >= 2 && (1..4).contains(&((at - 2) % 7));
            assert_eq!(value, if inside { 0.0 } else { (at + 1) as f32 }, "element {at}");
        }
        // No rows, at the end of the buffer.
        let none = MatrixMut::<Cpu, _>::new(&mut buffer, 23, 0, 5, 9).unwrap();
        assert_eq!(none.array().dim(), (0, 5));
        // One row, whose stride is smaller than the row.
        let row = MatrixMut::<Cpu, _>::new(&mut buffer, 0, 1, 3, 0).unwrap();
        row.array().fill(-1.0);
        SliceMut::<Cpu, _>::new(&mut buffer, 1, 1).unwrap().array()[0] = -2.0;
        assert_eq!(buffer[..4], [-1.0, -2.0, -1.0, 0.0]);
    }

    #[test]
    fn an_array_of_any_strides_becomes_a_matrix_of_the_same_elements() {
        let array = Array2::from_shape_fn((5, 7), |(row, column)| (10 * row + column) as f32);
        for view in
            [array.view(), array.t(), array.slice(s![1..;2, ..;-3]), array.slice(s![2..2, ..])]
        {
            let buffer = Buffer::of_array(&view).unwrap();
            let (rows, columns) = view.dim();
            let matrix: Matrix<'_, Cpu, f32> = Slice::all(&buffer).matrix(rows, columns).unwrap();
            assert_eq!(matrix.array(), view);
        }
    }
}
