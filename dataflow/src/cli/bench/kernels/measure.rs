//! Random inputs, device time, and the ceilings that times are compared with.

use tidemill_kernels::backend::{ActivationElement, Element, Output};
use tidemill_kernels::{Backend, KernelError, MemoryPlace, Slice, SliceMut};

use super::ResultLine;

/// A device that is measured.
pub(super) struct Bench<'a, B: Backend> {
    pub(super) backend: &'a B,
    pub(super) stream: &'a mut B::DeviceStream,
    repeats: usize,
    /// The state of the generator of inputs.
    random: u64,
}

/// The least work of one run of a kernel.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Work {
    /// Each input read once, each output written once.
    pub(super) bytes: f64,
    /// Multiplications and additions of matrix products.
    pub(super) operations: f64,
}

impl Work {
    pub(super) fn bytes(bytes: f64) -> Self {
        Self { bytes, operations: 0.0 }
    }
}

/// The rows of a family of kernels.
pub(super) type Measured = Result<Vec<Measurement>, KernelError>;

/// A kernel at a size.
#[derive(Debug)]
pub(super) struct Measurement {
    pub(super) kernel: &'static str,
    pub(super) direction: &'static str,
    pub(super) shape: String,
    pub(super) work: Work,
    pub(super) milliseconds: f64,
}

impl<'a, B: Backend> Bench<'a, B> {
    pub(super) fn new(backend: &'a B, stream: &'a mut B::DeviceStream, repeats: usize) -> Self {
        Self { backend, stream, repeats, random: 0x9e37_79b9_7f4a_7c15 }
    }

    /// Bytes of an activation.
    pub(super) fn activation_bytes(&self) -> f64 {
        size_of::<B::Activation>() as f64
    }

    /// A number between -1 and 1.
    fn next(&mut self) -> f32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }

    /// A buffer of fp32 between `low` and `high`.
    pub(super) fn floats(
        &mut self,
        elements: usize,
        [low, high]: [f32; 2],
    ) -> Result<B::Buffer<f32>, KernelError> {
        let number = |bench: &mut Self| low + (high - low) * (0.5 + 0.5 * bench.next());
        let values: Vec<f32> = (0..elements).map(|_| number(self)).collect();
        self.buffer(&values)
    }

    /// A buffer of activations between -1 and 1.
    pub(super) fn activations(
        &mut self,
        elements: usize,
    ) -> Result<B::Buffer<B::Activation>, KernelError> {
        let values: Vec<B::Activation> =
            (0..elements).map(|_| B::Activation::rounded(self.next())).collect();
        self.buffer(&values)
    }

    /// A buffer of tokens below `vocab_size`.
    pub(super) fn tokens(
        &mut self,
        elements: usize,
        vocab_size: usize,
    ) -> Result<B::Buffer<u32>, KernelError> {
        let token = |bench: &mut Self| {
            ((0.5 + 0.5 * bench.next()) * vocab_size as f32).min(vocab_size as f32 - 1.0) as u32
        };
        let values: Vec<u32> = (0..elements).map(|_| token(self)).collect();
        self.buffer(&values)
    }

    /// Where the document of each row begins, all documents being of `document` positions.
    pub(super) fn document_starts(
        &mut self,
        [samples, positions]: [usize; 2],
        document: usize,
    ) -> Result<B::Buffer<u32>, KernelError> {
        let starts = (0..positions).map(|position| (position - position % document) as u32);
        let starts: Vec<u32> = starts.collect();
        self.buffer(&starts.repeat(samples))
    }

    /// A buffer that kernels write.
    pub(super) fn room<T: Element>(
        &mut self,
        elements: usize,
    ) -> Result<B::Buffer<T>, KernelError> {
        self.backend.allocate(self.stream, elements)
    }

    fn buffer<T: Element>(&mut self, values: &[T]) -> Result<B::Buffer<T>, KernelError> {
        let mut buffer = self.backend.allocate(self.stream, values.len())?;
        self.backend.write(self.stream, SliceMut::all(&mut buffer), values)?;
        Ok(buffer)
    }

    /// Device time of a run: the median of many after one that is not counted.
    pub(super) fn milliseconds(
        &mut self,
        mut run: impl FnMut(&B, &mut B::DeviceStream) -> Result<(), KernelError>,
    ) -> Result<f64, KernelError> {
        let (backend, stream) = (self.backend, &mut *self.stream);
        run(backend, stream)?;
        let mut times = Vec::with_capacity(self.repeats);
        for _ in 0..self.repeats {
            let started = backend.record_timed(stream)?;
            run(backend, stream)?;
            let ended = backend.record_timed(stream)?;
            backend.wait(&ended)?;
            times.push(backend.elapsed_milliseconds(&started, &ended)?);
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }
}

/// The most that the device does of either.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ceilings {
    pub(super) gigabytes_per_second: f64,
    pub(super) teraflops: f64,
}

impl Ceilings {
    /// Measures both.
    pub(super) fn measure<B: Backend>(bench: &mut Bench<'_, B>) -> Result<Self, KernelError> {
        let (copied, side) = match bench.backend.memory() {
            MemoryPlace::Device if size_of::<B::Activation>() == 2 => (1 << 28, 8192),
            MemoryPlace::Device => (1 << 28, 4096),
            MemoryPlace::Host => (1 << 24, 768),
        };
        let from = bench.floats(copied, [0.0, 1.0])?;
        let mut to = bench.room::<f32>(copied)?;
        let milliseconds = bench.milliseconds(|backend, stream| {
            backend.copy(stream, SliceMut::all(&mut to), Slice::all(&from))
        })?;
        let gigabytes_per_second = 8.0 * copied as f64 / milliseconds / 1e6;
        drop((from, to));
        let (a, b) = (bench.activations(side * side)?, bench.activations(side * side)?);
        let mut out = bench.room::<B::Activation>(side * side)?;
        let milliseconds = bench.milliseconds(|backend, stream| {
            let a = Slice::all(&a).matrix(side, side)?;
            let b = Slice::all(&b).matrix(side, side)?.transposed();
            let out = SliceMut::all(&mut out).matrix(side, side)?;
            backend.matmul(stream, out, a, b, Output::Overwrite)
        })?;
        let teraflops = 2.0 * (side as f64).powi(3) / milliseconds / 1e9;
        Ok(Self { gigabytes_per_second, teraflops })
    }

    /// A measurement beside the ceiling that bounds it.
    pub(super) fn line(&self, measured: Measurement, dtype: &'static str) -> ResultLine {
        let Measurement { kernel, direction, shape, work, milliseconds } = measured;
        let gigabytes_per_second = work.bytes / milliseconds / 1e6;
        let teraflops = work.operations / milliseconds / 1e9;
        let of_bytes = gigabytes_per_second / self.gigabytes_per_second;
        let of_operations = teraflops / self.teraflops;
        ResultLine {
            kernel,
            shape,
            dtype,
            direction,
            milliseconds,
            gigabytes_per_second,
            teraflops,
            ceiling_fraction: of_bytes.max(of_operations),
        }
    }
}
