//! The rules by which a backend is chosen, apart from the machine that they are asked on.

use std::num::NonZeroUsize;

use tidemill_kernels::KernelError;
use tidemill_model::ModelError;

use super::{BackendChoice, Precision};
use crate::error::{JobError, Result};

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Platform {
    Cpu,
    Cuda(Gpus),
}

/// The GPUs of a maker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gpus {
    /// All of them.
    pub all: NonZeroUsize,
    /// Those from the first on that are of one kind and read each other's memory.
    pub together: NonZeroUsize,
}

/// Why no GPU of a maker can be used.
#[derive(Debug)]
pub(super) struct NoGpu {
    pub why: String,
    /// How many there are all the same.
    pub gpus: usize,
    /// The failure of one that may work another time; `None` where there is nothing to wait for.
    pub failure: Option<KernelError>,
}

/// What `device.backend` and `device.precision` come to where the NVIDIA GPUs are those that `cuda` finds.
///
/// # Errors
/// A backend that is not there, a GPU that was asked for and failed, or bf16 on the CPU.
pub(super) fn choose(
    backend: BackendChoice,
    precision: Precision,
    cuda: impl FnOnce() -> std::result::Result<Gpus, NoGpu>,
) -> Result<Platform> {
    let unavailable = |backend, why| JobError::Device { key: "device.backend", backend, why };
    match backend {
        BackendChoice::Cpu => on_the_cpu(precision, String::new()),
        BackendChoice::Cuda => match cuda() {
            Ok(gpus) => Ok(Platform::Cuda(gpus)),
            Err(NoGpu { failure: Some(failure), .. }) => Err(ModelError::from(failure).into()),
            Err(no_gpu) => {
                let why = format!("{}; use \"cpu\" or \"auto\"", no_gpu.why);
                Err(unavailable("cuda", why))
            }
        },
        BackendChoice::Rocm => {
            let why = "this version has no ROCm driver yet; use \"cpu\", \"cuda\" or \"auto\"";
            Err(unavailable("rocm", why.to_owned()))
        }
        BackendChoice::Auto => match cuda() {
            Ok(gpus) => Ok(Platform::Cuda(gpus)),
            Err(no_gpu) => {
                match &no_gpu {
                    NoGpu { why, gpus: 0, .. } => tracing::info!("no GPU: {why}"),
                    NoGpu { why, .. } => tracing::warn!("the GPU is left out: {why}"),
                }
                on_the_cpu(precision, format!(" (no GPU: {})", no_gpu.why))
            }
        },
    }
}

/// `because` says why it is the CPU, where the user did not.
fn on_the_cpu(precision: Precision, because: String) -> Result<Platform> {
    match precision {
        Precision::Fp32 => Ok(Platform::Cpu),
        Precision::Bf16 => {
            let expected = format!("fp32 on the CPU{because}");
            Err(JobError::value("device.precision", expected, precision.word()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Classified, ExitClass};

    fn of(gpus: usize) -> Gpus {
        let all = NonZeroUsize::new(gpus).unwrap();
        Gpus { all, together: all }
    }

    fn choice(
        backend: BackendChoice,
        precision: Precision,
        gpus: std::result::Result<usize, NoGpu>,
    ) -> std::result::Result<Platform, String> {
        let gpus = gpus.map(of);
        choose(backend, precision, || gpus).map_err(|error| error.to_string())
    }

    fn none() -> std::result::Result<usize, NoGpu> {
        Err(NoGpu { why: "libcuda.so.1 is missing".to_owned(), gpus: 0, failure: None })
    }

    #[test]
    fn auto_is_a_gpu_where_one_works_and_else_the_cpu() {
        let cuda = Platform::Cuda(of(2));
        for precision in [Precision::Fp32, Precision::Bf16] {
            assert_eq!(choice(BackendChoice::Auto, precision, Ok(2)), Ok(cuda));
            assert_eq!(choice(BackendChoice::Cuda, precision, Ok(2)), Ok(cuda));
        }
        assert_eq!(choice(BackendChoice::Auto, Precision::Fp32, none()), Ok(Platform::Cpu));
        let unusable = Err(NoGpu { why: "too old".to_owned(), gpus: 1, failure: None });
        assert_eq!(choice(BackendChoice::Auto, Precision::Fp32, unusable), Ok(Platform::Cpu));
    }

    #[test]
    fn a_gpu_that_fails_is_worth_another_attempt_only_where_it_was_asked_for() {
        let failed = || -> std::result::Result<Gpus, NoGpu> {
            let failure = KernelError::Device {
                attempted: "creating a stream",
                device: "NVIDIA H200".to_owned(),
                answer: "unspecified launch failure".to_owned(),
            };
            Err(NoGpu { why: failure.to_string(), gpus: 1, failure: Some(failure) })
        };
        let error = choose(BackendChoice::Cuda, Precision::Fp32, failed).unwrap_err();
        assert_eq!(error.exit_class(), ExitClass::Restart);
        let auto = choose(BackendChoice::Auto, Precision::Fp32, failed).unwrap();
        assert_eq!(auto, Platform::Cpu);
        let missing = choose(BackendChoice::Cuda, Precision::Fp32, || {
            Err(NoGpu { why: "none".to_owned(), gpus: 0, failure: None })
        });
        assert_eq!(missing.unwrap_err().exit_class(), ExitClass::FixInput);
    }

    #[test]
    fn the_cpu_is_never_looked_past() {
        let unasked = || -> std::result::Result<Gpus, NoGpu> { panic!("looked for GPUs") };
        let found = choose(BackendChoice::Cpu, Precision::Fp32, unasked);
        assert_eq!(found.unwrap(), Platform::Cpu);
        assert!(choose(BackendChoice::Rocm, Precision::Fp32, unasked).is_err());
    }

    #[test]
    fn errors_name_the_key_and_the_way_out() {
        let said = |backend, precision, gpus, parts: &[&str]| {
            let error = choice(backend, precision, gpus).unwrap_err();
            for part in parts {
                assert!(error.contains(part), "{part:?} is not in {error:?}");
            }
        };
        let missing = "libcuda.so.1 is missing";
        let (fp32, bf16) = (Precision::Fp32, Precision::Bf16);
        said(BackendChoice::Cuda, fp32, none(), &["device.backend: cuda", missing, "\"cpu\""]);
        said(BackendChoice::Rocm, fp32, Ok(1), &["device.backend: rocm", "ROCm", "\"auto\""]);
        said(BackendChoice::Cpu, bf16, Ok(1), &["device.precision", "fp32 on the CPU", "bf16"]);
        said(BackendChoice::Auto, bf16, none(), &["device.precision", "fp32 on the CPU", missing]);
    }
}
