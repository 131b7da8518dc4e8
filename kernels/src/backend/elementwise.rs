//! Scaled sums of elements, of which an update rule of whole matrices is made.

use super::{ActivationElement, Runtime};
use crate::error::{KernelError, Result};
use crate::view::{Slice, SliceMut};

/// Elements in either type that a device computes with.
pub enum Values<'a, B: Runtime> {
    /// Elements of fp32.
    Fp32(Slice<'a, B, f32>),
    /// Elements in activation precision, as products read them.
    Activations(Slice<'a, B, B::Activation>),
}

/// [`Values`] to be written.
pub enum ValuesMut<'a, B: Runtime> {
    /// Elements of fp32.
    Fp32(SliceMut<'a, B, f32>),
    /// Elements in activation precision, as products read them: rounded once.
    Activations(SliceMut<'a, B, B::Activation>),
}

/// Kernels whose elements have nothing to do with one another. See the [module](super) for what every kernel promises.
pub trait Elementwise: Runtime {
    /// `out[i] = keep out[i] + factor x[i]` in fp32, by one fused multiply-add; where `keep` is 0, `factor x[i]`, and `out` is not
    /// read. (BLAS calls it axpby.)
    ///
    /// # Errors
    /// Lengths that differ, or a device that fails.
    fn axpby(
        &self,
        stream: &mut Self::DeviceStream,
        out: ValuesMut<'_, Self>,
        keep: f32,
        factor: f32,
        x: Values<'_, Self>,
    ) -> Result<()>;
}

/// The elements of both.
pub(crate) fn check_axpby<B: Runtime<Activation: ActivationElement>>(
    out: &ValuesMut<'_, B>,
    x: &Values<'_, B>,
) -> Result<usize> {
    let expected = match out {
        ValuesMut::Fp32(out) => out.elements(),
        ValuesMut::Activations(out) => out.elements(),
    };
    let found = match x {
        Values::Fp32(x) => x.elements(),
        Values::Activations(x) => x.elements(),
    };
    match found == expected {
        true => Ok(expected),
        false => Err(KernelError::shape("axpby", "x", expected, found)),
    }
}
