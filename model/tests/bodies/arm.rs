//! The arms of a test: ways to run a model.

use tidemill_kernels::backend::AttentionInputs;
use tidemill_kernels::shape::{AttentionShape, SequenceShape};
use tidemill_kernels::{Backend, Element, KernelError, Slice, SliceMut};
use tidemill_model::{Device, Mamba, Parameters};

/// One way to run a model.
pub struct Arm<B> {
    /// What reports call it.
    pub name: String,
    pub backend: B,
    pub sizes: Sizes,
}

/// How much work an arm may be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// All there is.
    Full,
    /// A part of it: for an emulator that takes microseconds a thread.
    Small,
}

impl Sizes {
    /// What this arm is given of two.
    pub fn choose<T>(self, full: T, small: T) -> T {
        match self {
            Self::Full => full,
            Self::Small => small,
        }
    }
}

impl<B: Backend> Arm<B> {
    pub fn new(name: impl Into<String>, backend: B) -> Self {
        let sizes = match backend.device_kind().backend.as_str() {
            "emulator" => Sizes::Small,
            _ => Sizes::Full,
        };
        Self { name: name.into(), backend, sizes }
    }

    /// What this arm is allowed of two: in fp32, and in bf16, each rounding of which is 2^16 times as large.
    pub fn by_precision<T>(&self, fp32: T, bf16: T) -> T {
        if B::Activation::NAME == f32::NAME { fp32 } else { bf16 }
    }

    /// Whether the backend computes attention; says so where it does not.
    pub fn attends(&self) -> bool {
        let mut stream = self.backend.device_stream().expect("a device stream");
        let stream = &mut stream;
        let mut activations = || self.backend.allocate(stream, 1).expect("one element");
        let (qkv, mut out) = (activations(), activations());
        let mut log_sum_exp = self.backend.allocate(stream, 1).expect("one element");
        let one = SequenceShape::new(1, 1).expect("one row");
        let shape = AttentionShape::new(one, 1, 1, 1.0, None).expect("one head");
        let [q, k, v] = [(); 3].map(|()| Slice::all(&qkv).matrix(1, 1).expect("one element"));
        let ran = self.backend.attention_forward(
            stream,
            SliceMut::all(&mut out).matrix(1, 1).expect("one element"),
            SliceMut::all(&mut log_sum_exp),
            AttentionInputs { q, k, v, slopes: None, starts: None },
            shape,
        );
        let attends = !matches!(ran, Err(KernelError::Unsupported { .. }));
        if !attends {
            println!("NOT RUN: {} computes no attention", self.name);
        }
        attends
    }

    /// Runs `body` with a device stream and a model's parameters on it.
    pub fn with_parameters<R>(
        &self,
        model: &Mamba,
        arena: &[f32],
        body: impl FnOnce(&mut Device<'_, B>, &Parameters<B>) -> R,
    ) -> R {
        let mut stream = self.backend.device_stream().expect("a device stream");
        let device = &mut Device { backend: &self.backend, stream: &mut stream };
        let parameters = Parameters::from_host(device, model.layout(), arena).expect("parameters");
        body(device, &parameters)
    }
}
