//! Views: constructing one is the check that it lies inside its buffer.

use tidemill_kernels::{Backend, Matrix, MatrixMut, Slice, SliceMut};

use super::arm::Arm;
use super::device::{Device, assert_shape_error};

/// Ranges and matrices that exceed their buffer, their parent or `usize` are refused.
pub fn views_stay_inside<B: Backend>(arm: &Arm<B>) {
    let mut device = Device::new(arm);
    let mut buffer = device.upload(&[0.0_f32; 12]);
    for (start, elements) in [(0, 13), (12, 1), (13, 0), (usize::MAX, 1), (1, usize::MAX)] {
        let what = format!("slice {start}+{elements}");
        let slice = Slice::<B, f32>::new(&buffer, start, elements).map(|_| ());
        assert_shape_error(&what, slice);
        let slice = SliceMut::<B, f32>::new(&mut buffer, start, elements).map(|_| ());
        assert_shape_error(&what, slice);
    }
    for [start, rows, columns, row_stride] in
        [[0, 3, 5, 5], [1, 3, 4, 4], [0, 2, 4, 9], [0, 2, 1, usize::MAX], [12, 1, 1, 1]]
    {
        let what = format!("matrix {start} [{rows}, {columns}] {row_stride} apart");
        let matrix = Matrix::<B, f32>::new(&buffer, start, rows, columns, row_stride, 1);
        assert_shape_error(&what, matrix.map(|_| ()));
        let matrix = MatrixMut::<B, f32>::new(&mut buffer, start, rows, columns, row_stride);
        assert_shape_error(&what, matrix.map(|_| ()));
    }
    let overlapping = MatrixMut::<B, f32>::new(&mut buffer, 0, 2, 4, 3).map(|_| ());
    assert_shape_error("written rows that overlap", overlapping);

    let slice = Slice::<B, f32>::new(&buffer, 2, 8).unwrap();
    assert_shape_error("past the slice", slice.sub(1, 8).map(|_| ()));
    assert_shape_error("larger than the slice", slice.matrix(3, 3).map(|_| ()));
    let matrix = slice.matrix(2, 4).unwrap();
    assert_shape_error("rows past the end", matrix.rows(1, 2).map(|_| ()));
    assert_shape_error("columns past the end", matrix.columns(4, 1).map(|_| ()));
}

/// Parts of views hold the elements that their ranges name.
pub fn parts_name_their_elements<B: Backend>(arm: &Arm<B>) {
    let backend = &arm.backend;
    let mut device = Device::new(arm);
    let numbers: Vec<u32> = (0..24).collect();
    let mut buffer = device.upload(&numbers);
    let slice = Slice::<B, u32>::new(&buffer, 2, 20).unwrap();
    let mut read = [0; 3];
    backend.read(&mut device.stream, &mut read, slice.sub(5, 3).unwrap()).unwrap();
    assert_eq!(read, [7, 8, 9]);
    let matrix = slice.matrix(4, 5).unwrap().rows(1, 2).unwrap().columns(3, 2).unwrap();
    assert_eq!((matrix.start(), matrix.shape(), matrix.strides()), (2 + 5 + 3, [2, 2], [5, 1]));
    let transposed = matrix.transposed();
    assert_eq!((transposed.start(), transposed.strides()), (10, [1, 5]));

    let part = SliceMut::<B, u32>::new(&mut buffer, 4, 10).unwrap().sub(3, 2).unwrap();
    backend.fill_zero(&mut device.stream, part).unwrap();
    let mut expected = numbers;
    expected[7..9].fill(0);
    assert_eq!(device.download(&buffer), expected);
}
