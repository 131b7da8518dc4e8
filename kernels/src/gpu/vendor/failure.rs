//! Error codes of the interface as errors of this crate.

use super::table::{Code, Table};
use crate::error::{KernelError, Result};

impl Code {
    /// Whether the same call would be refused again, in this run and in the next.
    pub fn is_lasting(self) -> bool {
        [Self::INVALID_VALUE, Self::LAUNCH_OUT_OF_RESOURCES, Self::NOT_SUPPORTED].contains(&self)
    }
}

impl Table {
    /// The answer in words.
    pub fn words(&self, code: Code) -> String {
        self.error_text.words(code)
    }

    /// `answered`, said of `device`.
    pub fn on<T>(
        &self,
        device: &str,
        attempted: &'static str,
        answered: std::result::Result<T, Code>,
    ) -> Result<T> {
        answered.map_err(|code| {
            let (device, answer) = (device.to_owned(), self.words(code));
            KernelError::Device { attempted, device, answer }
        })
    }

    /// Why `bytes` bytes were not to be had on `device`.
    pub fn not_allocated(&self, device: String, bytes: usize, code: Code) -> KernelError {
        match code {
            Code::OUT_OF_MEMORY => KernelError::OutOfMemory { bytes, device },
            _ => KernelError::Device { attempted: "allocating", device, answer: self.words(code) },
        }
    }
}
