//! The arms of a test: ways to run a model.

use tidemill_kernels::{Backend, Element};
use tidemill_model::{Device, LanguageModel, Parameters};

/// One way to run a model.
pub struct Arm<B> {
    /// Its name in reports.
    pub name: String,
    pub backend: B,
    pub sizes: Sizes,
}

/// How much work an arm gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// All of it.
    Full,
    /// A part: for an emulator that takes microseconds a thread.
    Small,
}

impl Sizes {
    /// The one of two lists that this arm gets.
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

    /// The tolerance of this arm: in fp32, or in bf16, in which each rounding is 2^16 times as
    /// large.
    pub fn by_precision<T>(&self, fp32: T, bf16: T) -> T {
        if B::Activation::NAME == f32::NAME { fp32 } else { bf16 }
    }

    /// Runs `body` with a device stream and a model's parameters on it.
    pub fn with_parameters<R>(
        &self,
        model: &LanguageModel<B>,
        arena: &[f32],
        body: impl FnOnce(&mut Device<'_, B>, &Parameters<B>) -> R,
    ) -> R {
        let mut stream = self.backend.device_stream().expect("a device stream");
        let device = &mut Device { backend: &self.backend, stream: &mut stream };
        let parameters = Parameters::from_host(device, model.layout(), arena).expect("parameters");
        body(device, &parameters)
    }
}
