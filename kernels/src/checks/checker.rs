//! The inputs of kernels, and the comparison of their results.

use super::Outcome;
use crate::backend::{ActivationElement, Backend, Element};
use crate::error::Result;
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

/// The error allowed to a result of fp32 arithmetic, as a fraction of the result or of the root mean square of its tensor,
/// whichever is larger: a sum that cancels is only as exact as its terms.
const OF_TYPICAL: f64 = 1e-4;
/// The error that each rounding to bf16 adds to the allowed one, as a fraction of the same.
const OF_ROUNDING: f64 = 1.0 / 256.0;

/// A device that is checked.
pub(super) struct Checker<'a, B: Backend> {
    pub(super) backend: &'a B,
    pub(super) stream: B::DeviceStream,
    /// The state of the generator of inputs.
    random: u64,
    /// Roundings to bf16 on the way to a result, where activations are bf16.
    pub(super) roundings: f64,
    worst: f64,
    wrong: Option<String>,
}

/// Numbers in memory of the device, and as they were put there.
pub(super) struct Numbers<B: Backend, T: Element> {
    pub(super) buffer: B::Buffer<T>,
    pub(super) wide: Vec<f64>,
}

impl<B: Backend, T: Element> Numbers<B, T> {
    pub(super) fn slice(&self) -> Slice<'_, B, T> {
        Slice::all(&self.buffer)
    }

    pub(super) fn slice_mut(&mut self) -> SliceMut<'_, B, T> {
        SliceMut::all(&mut self.buffer)
    }

    /// The numbers as a matrix with rows of `columns` elements.
    pub(super) fn matrix(&self, columns: usize) -> Result<Matrix<'_, B, T>> {
        self.slice().matrix(self.wide.len() / columns, columns)
    }

    pub(super) fn matrix_mut(&mut self, columns: usize) -> Result<MatrixMut<'_, B, T>> {
        let rows = self.wide.len() / columns;
        self.slice_mut().matrix(rows, columns)
    }
}

impl<'a, B: Backend> Checker<'a, B> {
    pub(super) fn new(backend: &'a B) -> Result<Self> {
        let stream = backend.device_stream()?;
        let random = 0x9e37_79b9_7f4a_7c15;
        Ok(Self { backend, stream, random, roundings: 2.0, worst: 0.0, wrong: None })
    }

    pub(super) fn outcome(self) -> Outcome {
        match self.wrong {
            Some(what) => Outcome::Differs { what },
            None => Outcome::Agrees { worst: self.worst },
        }
    }

    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random >> 40
    }

    /// Numbers between `low` and `high` that a `T` holds.
    pub(super) fn numbers<T: ActivationElement>(
        &mut self,
        elements: usize,
        [low, high]: [f32; 2],
    ) -> Result<Numbers<B, T>> {
        let mut number = || low + (high - low) * (self.next() as f32 / (1 << 24) as f32);
        let values: Vec<f32> = (0..elements).map(|_| number()).collect();
        self.put(&values)
    }

    /// Numbers between -1 and 1 that an activation holds.
    pub(super) fn activations(&mut self, elements: usize) -> Result<Numbers<B, B::Activation>> {
        self.numbers(elements, [-1.0, 1.0])
    }

    /// Memory that kernels write.
    pub(super) fn room<T: ActivationElement>(&mut self, elements: usize) -> Result<Numbers<B, T>> {
        self.put(&vec![f32::NAN; elements])
    }

    /// `values`, rounded to `T`.
    pub(super) fn put<T: ActivationElement>(&mut self, values: &[f32]) -> Result<Numbers<B, T>> {
        let rounded: Vec<T> = values.iter().map(|&value| T::rounded(value)).collect();
        let wide = rounded.iter().map(|value| f64::from(value.widened())).collect();
        Ok(Numbers { buffer: self.write(&rounded)?, wide })
    }

    /// Whole numbers below `limit`.
    pub(super) fn tokens(&mut self, elements: usize, limit: u64) -> Vec<u32> {
        (0..elements).map(|_| (self.next() % limit) as u32).collect()
    }

    /// `values` in memory of the device.
    pub(super) fn write<T: Element>(&mut self, values: &[T]) -> Result<B::Buffer<T>> {
        let mut buffer = self.backend.allocate(&mut self.stream, values.len())?;
        self.backend.write(&mut self.stream, SliceMut::all(&mut buffer), values)?;
        Ok(buffer)
    }

    /// The contents of a buffer of the device.
    pub(super) fn read<T: Element>(&mut self, buffer: &B::Buffer<T>) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); B::elements(buffer)];
        self.backend.read(&mut self.stream, &mut values, Slice::all(buffer))?;
        Ok(values)
    }

    /// Compares what a kernel has written with what its definition gives.
    pub(super) fn compare<T: ActivationElement>(
        &mut self,
        what: &str,
        found: &Numbers<B, T>,
        expected: &[f64],
    ) -> Result<()> {
        let found: Vec<T> = self.read(&found.buffer)?;
        let found: Vec<f64> = found.into_iter().map(|value| f64::from(value.widened())).collect();
        self.compare_values(what, &found, expected);
        Ok(())
    }

    /// The same of values that were read.
    pub(super) fn compare_values(&mut self, what: &str, found: &[f64], expected: &[f64]) {
        let squares: f64 = expected.iter().map(|x| x * x).sum();
        let typical = (squares / expected.len().max(1) as f64).sqrt();
        let roundings = self.roundings * B::Activation::REMAINDERS as f64;
        let of_size = OF_TYPICAL + OF_ROUNDING * roundings;
        for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
            let allowed = of_size * expected.abs().max(typical) + f64::from(f32::MIN_POSITIVE);
            let error = (found - expected).abs() / allowed;
            // A NaN agrees with nothing.
            if error.is_nan() || error > 1.0 {
                let what = format!("{what}[{i}] is {found:e}, expected {expected:e}");
                self.differs(what);
                return;
            }
            self.worst = self.worst.max(error);
        }
        if found.len() != expected.len() {
            self.differs(format!("{what} has {} of {} results", found.len(), expected.len()));
        }
    }

    /// Notes a difference; the first is reported.
    pub(super) fn differs(&mut self, what: String) {
        self.wrong.get_or_insert(what);
    }
}
