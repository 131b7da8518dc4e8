//! What the driver answers, as errors of ours.

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;

use crate::error::{KernelError, Result};

/// A driver's answer in words.
pub(super) struct Failed {
    pub(super) answer: String,
    pub(super) out_of_memory: bool,
}

impl Failed {
    pub(super) fn of(error: DriverError) -> Self {
        let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
        let answer = text.unwrap_or_else(|_| "an error that it has no words for".to_owned());
        Self { answer, out_of_memory: error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY }
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
