//! Calls with shapes that do not fit: operands of zeros, and sizes that are wrong by one.

use tidemill_kernels::{Backend, Element, KernelError, Matrix, MatrixMut, Slice, SliceMut};

use super::arm::Arm;
use super::device::Device;
use super::number::Number;

/// `[rows, columns]` of a buffer of zeros.
pub fn matrix<B: Backend, T: Element>(
    buffer: &B::Buffer<T>,
    [rows, columns]: [usize; 2],
) -> Matrix<'_, B, T> {
    Matrix::new(buffer, 0, rows, columns, columns, 1).unwrap()
}

pub fn matrix_mut<B: Backend, T: Element>(
    buffer: &mut B::Buffer<T>,
    [rows, columns]: [usize; 2],
) -> MatrixMut<'_, B, T> {
    MatrixMut::new(buffer, 0, rows, columns, columns).unwrap()
}

pub fn slice<B: Backend, T: Element>(buffer: &B::Buffer<T>, elements: usize) -> Slice<'_, B, T> {
    Slice::new(buffer, 0, elements).unwrap()
}

pub fn slice_mut<B: Backend, T: Element>(
    buffer: &mut B::Buffer<T>,
    elements: usize,
) -> SliceMut<'_, B, T> {
    SliceMut::new(buffer, 0, elements).unwrap()
}

/// The sizes of a call: unchanged (a call that must succeed), then with each size in turn
/// one larger and one smaller.
pub fn wrong_by_one<const N: usize>(sizes: [usize; N]) -> Vec<(Option<usize>, [usize; N])> {
    let mut cases = vec![(None, sizes)];
    for i in 0..N {
        for wrong in [sizes[i] + 1, sizes[i] - 1] {
            let mut sizes = sizes;
            sizes[i] = wrong;
            cases.push((Some(i), sizes));
        }
    }
    cases
}

/// A call without a wrong size succeeds; a call with one returns an error that names this kernel.
#[track_caller]
pub fn assert_answer(kernel: &str, wrong: Option<usize>, result: tidemill_kernels::Result<()>) {
    match (wrong, result) {
        (None, result) => result.expect(kernel),
        (Some(_), Err(KernelError::Shape { kernel: named, .. })) if named == kernel => {}
        (Some(i), other) => {
            panic!("{kernel}, size {i} wrong: expected it to refuse a shape, found {other:?}")
        }
    }
}

/// A device with zeros for every operand.
pub struct Bench<'a, B: Backend> {
    pub device: Device<'a, B>,
    pub outs: [B::Buffer<f32>; 4],
    pub activation_outs: [B::Buffer<B::Activation>; 5],
    pub zeros: B::Buffer<f32>,
    pub activations: B::Buffer<B::Activation>,
    pub tokens: B::Buffer<u32>,
}

impl<'a, B: Backend<Activation: Number>> Bench<'a, B> {
    pub fn new(arm: &'a Arm<B>) -> Self {
        let mut device = Device::new(arm);
        let none = B::Activation::rounded(0.0);
        Self {
            outs: [(); 4].map(|()| device.upload(&[0.0; 4096])),
            activation_outs: [(); 5].map(|()| device.upload(&[none; 4096])),
            zeros: device.upload(&[0.0; 4096]),
            activations: device.upload(&[none; 4096]),
            tokens: device.upload(&[0; 4096]),
            device,
        }
    }

    /// Asserts that the work of the accepted calls succeeds.
    pub fn finish(mut self) {
        self.device.download(&self.outs[0]);
    }
}
