//! `--backend` and `--precision`: what computes, where there is no config to say so.

use std::num::NonZeroUsize;

use clap::Args;

use crate::device::{
    BackendChoice, DeviceChoice, DeviceSettings, LocalWorkers, Precision, WithBackend,
};
use crate::error::{JobError, Result};

/// Flags of every subcommand that computes without a `RUN.toml`.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct DeviceArguments {
    /// What computes; auto is an NVIDIA GPU where one works, else the CPU.
    #[arg(long, value_enum, value_name = "BACKEND", default_value_t)]
    backend: BackendChoice,
    /// The precision of activations; bf16 on GPUs only.
    #[arg(long, value_enum, value_name = "PRECISION", default_value_t)]
    precision: Precision,
}

impl DeviceArguments {
    /// What they come to here, with `threads` compute threads where it is the CPU.
    ///
    /// # Errors
    /// A backend that is not there, or a precision that it does not have; the error names the flag.
    pub(crate) fn choice(self, threads: NonZeroUsize) -> Result<DeviceChoice> {
        let Self { backend, precision } = self;
        DeviceChoice::new(&DeviceSettings { backend, precision, threads: threads.get() })
            .map_err(by_flag)
    }

    /// Runs `code` on one device.
    ///
    /// # Errors
    /// As [`choice`](Self::choice), or a device that cannot be opened.
    pub(crate) fn open_one<W: WithBackend>(
        self,
        threads: NonZeroUsize,
        code: W,
    ) -> Result<W::Output> {
        self.choice(threads)?.open(LocalWorkers::alone(1), code).map_err(by_flag)
    }
}

/// An error about a key of `[device]` as one about the flag of that name.
pub(crate) fn by_flag(error: JobError) -> JobError {
    match error {
        JobError::Device { key: "device.backend", backend, why } => {
            JobError::Device { key: "--backend", backend, why }
        }
        JobError::Value { key, expected, found } if key == "device.precision" => {
            JobError::Value { key: "--precision".to_owned(), expected, found }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_flags_where_there_are_no_keys() {
        let arguments = DeviceArguments { backend: BackendChoice::Cpu, precision: Precision::Bf16 };
        let error = arguments.choice(NonZeroUsize::MIN).unwrap_err().to_string();
        assert_eq!(error, "--precision: expected fp32 on the CPU, found bf16");
        let arguments =
            DeviceArguments { backend: BackendChoice::Rocm, precision: Precision::Fp32 };
        let error = arguments.choice(NonZeroUsize::MIN).unwrap_err().to_string();
        assert!(error.starts_with("--backend: rocm is not available: "), "{error}");
    }
}
