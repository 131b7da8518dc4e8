//! What the driver answers, as errors of ours.

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;

use crate::error::{KernelError, Result};

/// A driver's answer in words.
pub(super) struct Failed {
    pub(super) answer: String,
    pub(super) out_of_memory: bool,
    /// Whether the same call would be refused again, in this run and in the next.
    pub(super) is_lasting: bool,
}

impl Failed {
    pub(super) fn of(error: DriverError) -> Self {
        let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
        let answer = text.unwrap_or_else(|_| "an error that it has no words for".to_owned());
        let is_lasting = matches!(
            error.0,
            CUresult::CUDA_ERROR_INVALID_VALUE
                | CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
                | CUresult::CUDA_ERROR_NOT_SUPPORTED
        );
        let out_of_memory = error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        Self { answer, out_of_memory, is_lasting }
    }
}

/// `result`, said of `device`.
pub(super) fn on<T>(
    device: &str,
    attempted: &'static str,
    result: std::result::Result<T, DriverError>,
) -> Result<T> {
    result.map_err(|error| KernelError::Device {
        attempted,
        device: device.to_owned(),
        answer: Failed::of(error).answer,
    })
}
