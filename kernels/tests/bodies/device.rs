//! A backend under test, and matrices placed inside larger poisoned buffers.
//!
//! Everything a kernel may not touch, and every output before it is written, holds [`POISON_BITS`]:
//! reading it spoils a result, writing over it is seen by [`Placed::read`].

use tidemill_kernels::{Backend, Element, KernelError, Matrix, MatrixMut, Result, Slice, SliceMut};

/// A NaN that no arithmetic produces.
pub const POISON_BITS: u32 = 0x7fc0_dead;

/// Elements of poison before and after what is placed in a buffer.
const MARGIN: usize = 5;

/// A backend and the device stream that a test uses.
pub struct Device<'a, B: Backend> {
    pub backend: &'a B,
    pub stream: B::DeviceStream,
}

impl<'a, B: Backend> Device<'a, B> {
    pub fn new(backend: &'a B) -> Self {
        Self { backend, stream: backend.device_stream().unwrap() }
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

    /// The error of a call, which a device may also answer when it is next waited for.
    pub fn error_of(&mut self, result: Result<()>) -> KernelError {
        let synchronised = result.and_then(|()| {
            let buffer = self.backend.allocate::<u32>(&mut self.stream, 1)?;
            self.backend.read(&mut self.stream, &mut [0], Slice::all(&buffer))
        });
        synchronised.expect_err("the call must be refused")
    }
}

/// Asserts that a call was refused for a shape: known on the host, so answered by the call itself.
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
    start: usize,
    rows: usize,
    columns: usize,
    row_stride: usize,
}

impl Layout {
    /// A matrix by itself.
    pub fn packed(rows: usize, columns: usize) -> Self {
        Self::columns_of(rows, columns, 0, columns)
    }

    /// Columns `first .. first + columns` of a matrix that is `row_stride` wide.
    pub fn columns_of(rows: usize, row_stride: usize, first: usize, columns: usize) -> Self {
        assert!(first + columns <= row_stride);
        Self { start: MARGIN + first, rows, columns, row_stride }
    }

    /// A range of `elements` elements.
    pub fn range(elements: usize) -> Self {
        Self::packed(1, elements)
    }

    /// The elements of a buffer that holds the matrix, poison included.
    fn buffer_elements(self) -> usize {
        self.start + self.rows * self.row_stride + MARGIN
    }

    /// Where each element of the matrix lies, row by row.
    fn places(self) -> impl Iterator<Item = usize> {
        (0..self.rows).flat_map(move |row| {
            let first = self.start + row * self.row_stride;
            first..first + self.columns
        })
    }
}

/// An fp32 matrix or range inside a poisoned buffer.
pub struct Placed<B: Backend> {
    buffer: B::Buffer<f32>,
    layout: Layout,
}

impl<B: Backend> Placed<B> {
    /// `values`, row-major, placed by `layout`.
    pub fn new(device: &mut Device<'_, B>, layout: Layout, values: &[f32]) -> Self {
        let mut host = vec![f32::from_bits(POISON_BITS); layout.buffer_elements()];
        assert_eq!(values.len(), layout.rows * layout.columns, "elements of {layout:?}");
        for (place, &value) in layout.places().zip(values) {
            host[place] = value;
        }
        Self { buffer: device.upload(&host), layout }
    }

    /// Poison, to be written by a kernel.
    pub fn poisoned(device: &mut Device<'_, B>, layout: Layout) -> Self {
        let host = vec![f32::from_bits(POISON_BITS); layout.buffer_elements()];
        Self { buffer: device.upload(&host), layout }
    }

    /// The matrix, to be read.
    pub fn matrix(&self) -> Matrix<'_, B, f32> {
        let Layout { start, rows, columns, row_stride } = self.layout;
        Matrix::new(&self.buffer, start, rows, columns, row_stride, 1).unwrap()
    }

    /// The matrix, to be written.
    pub fn matrix_mut(&mut self) -> MatrixMut<'_, B, f32> {
        let Layout { start, rows, columns, row_stride } = self.layout;
        MatrixMut::new(&mut self.buffer, start, rows, columns, row_stride).unwrap()
    }

    /// The range, to be read; the matrix must be contiguous.
    pub fn slice(&self) -> Slice<'_, B, f32> {
        assert_eq!(self.layout.row_stride, self.layout.columns);
        let elements = self.layout.rows * self.layout.columns;
        Slice::new(&self.buffer, self.layout.start, elements).unwrap()
    }

    /// The range, to be written; the matrix must be contiguous.
    pub fn slice_mut(&mut self) -> SliceMut<'_, B, f32> {
        assert_eq!(self.layout.row_stride, self.layout.columns);
        let elements = self.layout.rows * self.layout.columns;
        SliceMut::new(&mut self.buffer, self.layout.start, elements).unwrap()
    }

    /// The matrix, row-major; everything around it must still be poison.
    #[track_caller]
    pub fn read(&self, device: &mut Device<'_, B>) -> Vec<f32> {
        let mut host = device.download(&self.buffer);
        let values = self.layout.places().map(|place| host[place]).collect();
        for place in self.layout.places() {
            host[place] = f32::from_bits(POISON_BITS);
        }
        let touched = host.iter().position(|value| value.to_bits() != POISON_BITS);
        assert_eq!(touched, None, "an element outside {:?} was written", self.layout);
        values
    }
}
