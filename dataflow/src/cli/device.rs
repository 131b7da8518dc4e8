//! `--backend` and `--precision`: the device, where there is no config to name it.
//!
//! Subcommands whose numbers are fp32 on every device take `--backend` alone.

use std::error::Error;
use std::num::NonZeroUsize;

use clap::Args;
use tidemill_kernels::MemoryPlace;

use crate::cluster::ClusterError;
use crate::device::{
    BackendChoice, DeviceChoice, DeviceSettings, LocalWorkers, Precision, WithBackend,
};
use crate::error::{JobError, Result};
use crate::refusal::{Advice, Refusal, cause_alone};

/// Flags of every subcommand that computes without a `RUN.toml`.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct DeviceArguments {
    /// The device that computes; auto is an NVIDIA GPU where one works, else an AMD GPU, else the CPU.
    #[arg(long, value_enum, value_name = "BACKEND", default_value_t)]
    backend: BackendChoice,
    /// The precision of activations; bf16 on GPUs only.
    #[arg(long, value_enum, value_name = "PRECISION", default_value_t)]
    precision: Precision,
}

impl DeviceArguments {
    /// The settings that these flags give here, with `threads` compute threads on the CPU.
    ///
    /// # Errors
    /// A backend that is not there, or a precision that it does not have; the error names the flag.
    pub(crate) fn choice(self, threads: NonZeroUsize) -> Result<DeviceChoice> {
        let Self { backend, precision } = self;
        DeviceChoice::new(&DeviceSettings { backend, precision, threads: threads.get() })
            .map_err(by_flag)
    }

    /// Runs `code` on one device; `smaller` names settings that need less memory.
    ///
    /// # Errors
    /// As [`choice`](Self::choice), a device that cannot be opened, or an error of `code`.
    pub(crate) fn open_one<T, W>(
        self,
        threads: NonZeroUsize,
        smaller: &str,
        code: W,
    ) -> anyhow::Result<T>
    where
        W: WithBackend<Output = anyhow::Result<T>>,
    {
        let smaller = || vec![smaller.to_owned()];
        self.open(&self.choice(threads)?, LocalWorkers::alone(1), smaller, code)
    }

    /// Runs `code` on the devices of `workers`; `smaller` names settings that need less memory of each.
    ///
    /// # Errors
    /// A device that cannot be opened, or an error of `code`: if a device refused, with the flags that help.
    pub(crate) fn open<T, W>(
        self,
        choice: &DeviceChoice,
        workers: LocalWorkers,
        smaller: impl FnOnce() -> Vec<String>,
        code: W,
    ) -> anyhow::Result<T>
    where
        W: WithBackend<Output = anyhow::Result<T>>,
    {
        open(choice, workers, || self.ways(smaller(), choice.memory()), code)
    }

    /// How to need less memory than a device has: `smaller`, or another precision.
    pub(crate) fn ways(self, mut smaller: Vec<String>, memory: MemoryPlace) -> Vec<String> {
        // The CPU has no other precision.
        if let (MemoryPlace::Device, Precision::Fp32) = (memory, self.precision) {
            smaller.push("use --precision bf16".to_owned());
        }
        smaller
    }
}

/// The flag of a subcommand whose numbers are fp32 on every device.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct BackendArgument {
    /// The devices that compute; auto is NVIDIA GPUs where they work, else AMD GPUs, else the CPU.
    #[arg(long, value_enum, value_name = "BACKEND", default_value_t)]
    backend: BackendChoice,
}

impl BackendArgument {
    /// The backend that this flag gives here.
    ///
    /// # Errors
    /// A backend that is not there.
    pub(crate) fn choice(self) -> Result<DeviceChoice> {
        DeviceArguments { backend: self.backend, precision: Precision::Fp32 }
            .choice(NonZeroUsize::MIN)
    }
}

/// Runs `code` on the devices of `workers`; `ways` says how they would need less memory.
///
/// # Errors
/// A device that cannot be opened, or an error of `code`: if a device refused, with the flags that help.
pub(crate) fn open<T, W>(
    choice: &DeviceChoice,
    workers: LocalWorkers,
    ways: impl FnOnce() -> Vec<String>,
    code: W,
) -> anyhow::Result<T>
where
    W: WithBackend<Output = anyhow::Result<T>>,
{
    let opened = choice.open(workers, code).map_err(|error| by_flag(error).into());
    opened.flatten().map_err(|error| advise(error, ways(), choice.memory()))
}

/// An error of a device that refused, with `ways` to ask less of it; any other as it is.
pub(crate) fn advise(
    error: anyhow::Error,
    mut ways: Vec<String>,
    memory: MemoryPlace,
) -> anyhow::Error {
    let Some(refusal) = Refusal::of(error.as_ref()) else { return error };
    // From the CPU there is no other device to send anyone to.
    if memory == MemoryPlace::Device {
        ways.push("use --backend cpu".to_owned());
    }
    let room = ways.join(", or ");
    let cause = match error.downcast::<ClusterError>() {
        Ok(error) => cause_alone(error),
        Err(error) => Box::<dyn Error + Send + Sync>::from(error).into(),
    };
    refusal.advised(Advice { what: "this", room, cpu: "--backend cpu" }, cause).into()
}

/// An error about a key of `[device]` as one about the flag of that name.
fn by_flag(error: JobError) -> JobError {
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
    use crate::cli::exit::one_line;
    use crate::cluster::{Actor, ExitClass};
    use std::sync::Arc;
    use tidemill_kernels::KernelError;

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

    #[test]
    fn a_device_without_room_is_told_with_flags() {
        let said = |backend, precision, memory| {
            let full = KernelError::OutOfMemory { bytes: 7, device: "NVIDIA H200".to_owned() };
            let (actor, exit_class) = (Actor::Worker(0), ExitClass::FixInput);
            let error = ClusterError::Failed { actor, exit_class, cause: Arc::new(full) };
            let arguments = DeviceArguments { backend, precision };
            let ways = arguments.ways(vec!["shorten it".to_owned()], memory);
            one_line(advise(error.into(), ways, memory).as_ref())
        };
        let line = |ways: &str| {
            let reason = "allocating 7 bytes on NVIDIA H200 failed: out of memory";
            format!("this does not fit into the device's memory: {ways}: {reason}")
        };
        let (auto, device) = (BackendChoice::Auto, MemoryPlace::Device);
        let ways = "shorten it, or use --precision bf16, or use --backend cpu";
        assert_eq!(said(auto, Precision::Fp32, device), line(ways));
        let ways = "shorten it, or use --backend cpu";
        assert_eq!(said(auto, Precision::Bf16, device), line(ways));
        // The CPU has neither bf16 nor another device to go to, whether it was asked for or found.
        for backend in [auto, BackendChoice::Cpu] {
            assert_eq!(said(backend, Precision::Fp32, MemoryPlace::Host), line("shorten it"));
        }
    }
}
