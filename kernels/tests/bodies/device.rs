//! A backend under test, and matrices placed inside larger poisoned buffers.
//!
//! All memory around operands, and every output before it is written, holds [`Number::POISON`]:
//! a read of it spoils a result, and [`Placed::read`] detects a write over it.

use tidemill_kernels::{Backend, Element, KernelError, Matrix, MatrixMut, Result, Slice, SliceMut};

use super::arm::{Arm, Sizes, Sums};
use super::number::Number;

/// Elements of poison before and after an operand in its buffer: one margin aligned as a model's buffers are, and one not
/// aligned. Kernels may use wider loads where rows are aligned, but must give the same bits.
pub const MARGINS: [usize; 2] = [64, 5];

/// A backend and the device stream that a test uses.
pub struct Device<'a, B: Backend> {
    pub backend: &'a B,
    pub stream: B::DeviceStream,
    pub sizes: Sizes,
    pub sums: Sums,
    /// Elements of poison around operands placed from now on.
    pub margin: usize,
}

impl<'a, B: Backend> Device<'a, B> {
    pub fn new(arm: &'a Arm<B>) -> Self {
        let Arm { backend, sizes, sums, .. } = arm;
        let stream = backend.device_stream().unwrap();
        Self { backend, stream, sizes: *sizes, sums: *sums, margin: MARGINS[0] }
    }

    /// A buffer holding `host`.
    pub fn upload<T: Element>(&mut self, host: &[T]) -> B::Buffer<T> {
        let mut buffer = self.backend.allocate(&mut self.stream, host.len()).unwrap();
        self.backend.write(&mut self.stream, SliceMut::all(&mut buffer), host).unwrap();
        buffer
    }

    /// All elements of a buffer; `T` must have a zero.
    pub fn download<T: Element>(&mut self, buffer: &B::Buffer<T>) -> Vec<T> {
        let mut host = vec![bytemuck::Zeroable::zeroed(); B::elements(buffer)];
        self.backend.read(&mut self.stream, &mut host, Slice::all(buffer)).unwrap();
        host
    }

    /// The error of a call, returned by the call itself or by the next wait for the device.
    pub fn error_of(&mut self, result: Result<()>) -> KernelError {
        let synchronised = result.and_then(|()| {
            let buffer = self.backend.allocate::<u32>(&mut self.stream, 1)?;
            self.backend.read(&mut self.stream, &mut [0], Slice::all(&buffer))
        });
        synchronised.expect_err("the call must be refused")
    }
}

/// Asserts that the call itself, without the device, returns a shape error.
#[track_caller]
pub fn assert_shape_error(what: &str, result: Result<()>) {
    match result {
        Err(KernelError::Shape { .. }) => {}
        other => panic!("{what}: expected a shape error, found {other:?}"),
    }
}

/// Where a matrix lies inside its buffer.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Elements of poison before and after the rows.
    margin: usize,
    /// The first column inside a row.
    first: usize,
    rows: usize,
    columns: usize,
    row_stride: usize,
}

impl Layout {
    /// A matrix by itself.
    pub fn packed(rows: usize, columns: usize) -> Self {
        Self::columns_of(rows, columns, 0, columns)
    }

    /// Columns `first .. first + columns` of a matrix with rows of `row_stride` elements.
    pub fn columns_of(rows: usize, row_stride: usize, first: usize, columns: usize) -> Self {
        assert!(first + columns <= row_stride);
        Self { margin: 0, first, rows, columns, row_stride }
    }

    /// A matrix inside wider rows, with the alignment of a packed matrix.
    pub fn inside_wider(rows: usize, columns: usize) -> Self {
        let beside = if columns.is_multiple_of(8) { 8 } else { 3 };
        Self::columns_of(rows, columns + 2 * beside, beside, columns)
    }

    /// A range of `elements` elements.
    pub fn range(elements: usize) -> Self {
        Self::packed(1, elements)
    }

    /// The element of the buffer at row 0, column 0.
    fn start(self) -> usize {
        self.margin + self.first
    }

    /// The elements of a buffer for the matrix, poison included.
    fn buffer_elements(self) -> usize {
        2 * self.margin + self.rows * self.row_stride
    }

    /// Where each element of the matrix lies, row by row.
    fn places(self) -> impl Iterator<Item = usize> {
        (0..self.rows).flat_map(move |row| {
            let first = self.start() + row * self.row_stride;
            first..first + self.columns
        })
    }
}

/// A matrix or range inside a poisoned buffer.
pub struct Placed<B: Backend, T: Number = f32> {
    buffer: B::Buffer<T>,
    layout: Layout,
}

impl<B: Backend, T: Number> Placed<B, T> {
    /// `values`, row-major, placed by `layout`; `T` must hold them exactly, so that kernel and definition compute from the same numbers.
    pub fn new(device: &mut Device<'_, B>, layout: Layout, values: &[f32]) -> Self {
        let layout = Layout { margin: device.margin, ..layout };
        let mut host = vec![T::POISON; layout.buffer_elements()];
        assert_eq!(values.len(), layout.rows * layout.columns, "elements of {layout:?}");
        for (place, &value) in layout.places().zip(values) {
            host[place] = T::rounded(value);
            let exact = value.is_nan() || host[place].widened().to_bits() == value.to_bits();
            assert!(exact, "{value:e} is not a number of {}", T::NAME);
        }
        Self { buffer: device.upload(&host), layout }
    }

    /// Poison, to be written by a kernel.
    pub fn poisoned(device: &mut Device<'_, B>, layout: Layout) -> Self {
        let layout = Layout { margin: device.margin, ..layout };
        let host = vec![T::POISON; layout.buffer_elements()];
        Self { buffer: device.upload(&host), layout }
    }

    /// The matrix, to be read.
    pub fn matrix(&self) -> Matrix<'_, B, T> {
        let Layout { rows, columns, row_stride, .. } = self.layout;
        Matrix::new(&self.buffer, self.layout.start(), rows, columns, row_stride, 1).unwrap()
    }

    /// The matrix, to be written.
    pub fn matrix_mut(&mut self) -> MatrixMut<'_, B, T> {
        let Layout { rows, columns, row_stride, .. } = self.layout;
        MatrixMut::new(&mut self.buffer, self.layout.start(), rows, columns, row_stride).unwrap()
    }

    /// The range, to be read; the matrix must be contiguous.
    pub fn slice(&self) -> Slice<'_, B, T> {
        assert_eq!(self.layout.row_stride, self.layout.columns);
        let elements = self.layout.rows * self.layout.columns;
        Slice::new(&self.buffer, self.layout.start(), elements).unwrap()
    }

    /// The range, to be written; the matrix must be contiguous.
    pub fn slice_mut(&mut self) -> SliceMut<'_, B, T> {
        assert_eq!(self.layout.row_stride, self.layout.columns);
        let elements = self.layout.rows * self.layout.columns;
        SliceMut::new(&mut self.buffer, self.layout.start(), elements).unwrap()
    }

    /// The whole buffer.
    pub fn memory(&self, device: &mut Device<'_, B>) -> Vec<T> {
        device.download(&self.buffer)
    }

    /// The matrix, row-major; asserts that everything around it is still poison.
    #[track_caller]
    pub fn read(&self, device: &mut Device<'_, B>) -> Vec<f32> {
        let mut host = device.download(&self.buffer);
        let values = self.layout.places().map(|place| host[place].widened()).collect();
        for place in self.layout.places() {
            host[place] = T::POISON;
        }
        let poison = T::POISON.widened().to_bits();
        let touched = host.iter().position(|value| value.widened().to_bits() != poison);
        assert_eq!(touched, None, "an element outside {:?} was written", self.layout);
        values
    }
}
