//! The gathered parameters: those that matrix products read, and those that are read in fp32 beside them.

use std::ops::Range;

use tidemill_kernels::backend::Element;
use tidemill_kernels::{Backend, Shared, Slice, SliceMut};

use super::Result;

/// Values that a rank has updated.
pub enum Values<'a, B: Backend> {
    /// In the precision of activations.
    Rounded(Slice<'a, B, B::Activation>),
    /// In fp32.
    Fp32(Slice<'a, B, f32>),
}

/// The destination of values that other ranks have updated.
pub enum ValuesMut<'a, B: Backend> {
    /// In the precision of activations.
    Rounded(SliceMut<'a, B, B::Activation>),
    /// In fp32.
    Fp32(SliceMut<'a, B, f32>),
}

/// Values that others read.
pub(super) enum SharedValues<B: Backend> {
    Rounded(Shared<B, B::Activation>),
    Fp32(Shared<B, f32>),
}

impl<B: Backend> Clone for SharedValues<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Rounded(values) => Self::Rounded(values.clone()),
            Self::Fp32(values) => Self::Fp32(values.clone()),
        }
    }
}

impl<B: Backend> Values<'_, B> {
    pub(super) fn share(
        self,
        backend: &B,
        stream: &mut B::DeviceStream,
    ) -> Result<SharedValues<B>> {
        Ok(match self {
            Self::Rounded(values) => SharedValues::Rounded(backend.share(stream, values)?),
            Self::Fp32(values) => SharedValues::Fp32(backend.share(stream, values)?),
        })
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        match self {
            Self::Rounded(values) => values.elements(),
            Self::Fp32(values) => values.elements(),
        }
    }
}

impl<B: Backend> ValuesMut<'_, B> {
    /// The same for a shorter time.
    pub(super) fn reborrow(&mut self) -> ValuesMut<'_, B> {
        match self {
            Self::Rounded(out) => ValuesMut::Rounded(out.reborrow()),
            Self::Fp32(out) => ValuesMut::Fp32(out.reborrow()),
        }
    }

    /// Bytes of an element.
    pub(super) fn element_bytes(&self) -> usize {
        match self {
            Self::Rounded(_) => size_of::<B::Activation>(),
            Self::Fp32(_) => size_of::<f32>(),
        }
    }

    /// These values, as others read them where they are.
    pub(super) fn share(
        &self,
        backend: &B,
        stream: &mut B::DeviceStream,
    ) -> Result<SharedValues<B>> {
        match self {
            Self::Rounded(out) => Values::Rounded(out.as_slice()).share(backend, stream),
            Self::Fp32(out) => Values::Fp32(out.as_slice()).share(backend, stream),
        }
    }

    /// Elements `range` become as many of `values` from `from` on, which are of the same kind.
    pub(super) fn copy(
        self,
        backend: &B,
        stream: &mut B::DeviceStream,
        range: Range<usize>,
        (values, from): (&SharedValues<B>, usize),
    ) -> Result<()> {
        let (start, elements) = (range.start, range.len());
        match (self, values) {
            (Self::Rounded(out), SharedValues::Rounded(values)) => {
                let out = out.sub(start, elements)?;
                backend.copy(stream, out, values.slice(from, elements)?)?;
            }
            (Self::Fp32(out), SharedValues::Fp32(values)) => {
                let out = out.sub(start, elements)?;
                backend.copy(stream, out, values.slice(from, elements)?)?;
            }
            _ => return Err(super::CommunicatorError::OtherKind),
        }
        Ok(())
    }
}

/// The bytes of `values` as the words that a chunk holds, zeros behind them.
pub(super) fn words<T: Element>(values: &[T]) -> Vec<f32> {
    let mut words = vec![0.0_f32; size_of_val(values).div_ceil(size_of::<f32>())];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
    bytes[..size_of_val(values)].copy_from_slice(bytemuck::cast_slice(values));
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_two_bytes_are_words_and_the_same_again() {
        for elements in 0..5_u16 {
            let values: Vec<u16> = (0..elements).map(|i| 0x7fc0 + i).collect();
            let words = words(&values);
            assert_eq!(words.len(), values.len().div_ceil(2));
            let again: &[u16] = bytemuck::cast_slice(&words);
            assert_eq!(again[..values.len()], values);
        }
        assert_eq!(words(&[1.5_f32, -0.0]), [1.5, -0.0]);
    }
}
