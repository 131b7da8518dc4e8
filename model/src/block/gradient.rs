//! The gradient of the residual stream, on its way back through the blocks.

use tidemill_kernels::{Backend, Matrix, MatrixMut, Slice, SliceMut};

use crate::error::Result;
use crate::trainable::Device;

/// The gradient of the residual stream: fp32, and a copy in activation precision for matrix
/// products where activations are not fp32.
pub struct ResidualGradient<B: Backend> {
    gradient: B::Buffer<f32>,
    copy: B::RoundedCopy,
    /// The number of leading elements for which the copy is up to date with the gradient.
    rounded: usize,
}

/// Views of a [`ResidualGradient`] as a kernel takes them.
pub(crate) struct BothGradients<'a, B: Backend> {
    /// `gradient[rows, columns]`
    pub(crate) gradient: MatrixMut<'a, B, f32>,
    /// The same in activation precision, where activations are not fp32.
    pub(crate) rounded: Option<MatrixMut<'a, B, B::Activation>>,
}

impl<B: Backend> ResidualGradient<B> {
    /// Room for `elements` elements.
    pub(crate) fn new(device: &mut Device<'_, B>, elements: usize) -> Result<Self> {
        let Device { backend, stream } = device;
        Ok(Self {
            gradient: backend.allocate(stream, elements)?,
            copy: backend.rounded_copy(stream, elements)?,
            rounded: 0,
        })
    }

    /// The fp32 gradient.
    pub fn gradient(&self) -> &B::Buffer<f32> {
        &self.gradient
    }

    /// The fp32 gradient as a view that can be written.
    pub fn gradient_mut(&mut self) -> &mut B::Buffer<f32> {
        self.rounded = 0;
        &mut self.gradient
    }

    /// `gradient[rows, columns]` for a kernel that changes all of it, and the copy in activation
    /// precision, where there is one: the kernel writes its new values there as well.
    pub(crate) fn both_mut(&mut self, rows: usize, columns: usize) -> Result<BothGradients<'_, B>> {
        self.rounded = rows * columns;
        let copy = B::copies_mut(&mut self.copy);
        let rounded = copy.map(|copy| SliceMut::all(copy).matrix(rows, columns));
        let gradient = SliceMut::all(&mut self.gradient).matrix(rows, columns)?;
        Ok(BothGradients { gradient, rounded: rounded.transpose()? })
    }

    /// `gradient[rows, columns]` in activation precision, with the present values.
    ///
    /// # Errors
    /// A matrix larger than the gradient, or a device that fails.
    pub fn rounded(
        &mut self,
        device: &mut Device<'_, B>,
        rows: usize,
        columns: usize,
    ) -> Result<Matrix<'_, B, B::Activation>> {
        let Device { backend, stream } = device;
        let (copy, gradient) = (&mut self.copy, &self.gradient);
        if self.rounded != rows * columns {
            backend.round_to_activation(stream, copy, gradient, 0, rows * columns)?;
            self.rounded = rows * columns;
        }
        let buffer = B::compute_buffer(&self.gradient, &self.copy);
        Ok(Slice::all(buffer).matrix(rows, columns)?)
    }
}
