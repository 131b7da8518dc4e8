//! The rules by which a backend is chosen, apart from the machine that they are asked on.

use std::num::NonZeroUsize;

use tidemill_kernels::KernelError;
use tidemill_model::ModelError;

use super::maker::Maker;
use super::{BackendChoice, Precision};
use crate::error::{JobError, Result};

/// The kind of hardware that computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Platform {
    Cpu,
    Gpus(Maker, Gpus),
}

/// The GPUs of a maker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gpus {
    /// All of them.
    pub all: NonZeroUsize,
    /// GPUs from the first one on that are of one kind and read each other's memory.
    pub together: NonZeroUsize,
}

/// Why no GPU of a maker can be used.
#[derive(Debug)]
pub(super) struct NoGpu {
    pub why: String,
    /// Number of GPUs that are there all the same.
    pub gpus: usize,
    /// The failure of one that may work another time; `None` where there is nothing to wait for.
    pub failure: Option<KernelError>,
}

/// The backend and precision that `device.backend` and `device.precision` give where each maker's GPUs are those that `look` finds.
///
/// # Errors
/// A backend that is not there, a GPU that was asked for and failed, or bf16 on the CPU.
pub(super) fn choose(
    backend: BackendChoice,
    precision: Precision,
    look: impl Fn(Maker) -> std::result::Result<Gpus, NoGpu>,
) -> Result<Platform> {
    match backend {
        BackendChoice::Cpu => on_the_cpu(precision, String::new()),
        BackendChoice::Cuda => asked_for(Maker::Nvidia, look),
        BackendChoice::Rocm => asked_for(Maker::Amd, look),
        BackendChoice::Auto => {
            let mut whys = Vec::new();
            for maker in Maker::ALL {
                match look(maker) {
                    Ok(gpus) => return Ok(Platform::Gpus(maker, gpus)),
                    Err(NoGpu { why, gpus: 0, .. }) => {
                        tracing::info!("no GPU: {why}");
                        whys.push(why);
                    }
                    Err(NoGpu { why, .. }) => {
                        tracing::warn!("the GPU is left out: {why}");
                        whys.push(why);
                    }
                }
            }
            on_the_cpu(precision, format!(" (no GPU: {})", whys.join("; ")))
        }
    }
}

fn asked_for(
    maker: Maker,
    look: impl Fn(Maker) -> std::result::Result<Gpus, NoGpu>,
) -> Result<Platform> {
    match look(maker) {
        Ok(gpus) => Ok(Platform::Gpus(maker, gpus)),
        Err(NoGpu { failure: Some(failure), .. }) => Err(ModelError::from(failure).into()),
        Err(no_gpu) => {
            let why = format!("{}; use \"cpu\" or \"auto\"", no_gpu.why);
            Err(JobError::Device { key: "device.backend", backend: maker.backend(), why })
        }
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
        look: impl Fn(Maker) -> std::result::Result<Gpus, NoGpu>,
    ) -> std::result::Result<Platform, String> {
        choose(backend, precision, look).map_err(|error| error.to_string())
    }

    fn none(maker: Maker) -> std::result::Result<Gpus, NoGpu> {
        let why = match maker {
            Maker::Nvidia => "libcuda.so.1 is missing",
            Maker::Amd => "libamdhip64.so.7 is missing",
        };
        Err(NoGpu { why: why.to_owned(), gpus: 0, failure: None })
    }

    /// A machine with two GPUs of one maker.
    fn only(of_maker: Maker) -> impl Fn(Maker) -> std::result::Result<Gpus, NoGpu> {
        move |maker| if maker == of_maker { Ok(of(2)) } else { none(maker) }
    }

    #[test]
    fn auto_is_a_gpu_where_one_works_and_else_the_cpu() {
        for (maker, backend) in
            [(Maker::Nvidia, BackendChoice::Cuda), (Maker::Amd, BackendChoice::Rocm)]
        {
            let gpus = Platform::Gpus(maker, of(2));
            for precision in [Precision::Fp32, Precision::Bf16] {
                assert_eq!(choice(BackendChoice::Auto, precision, only(maker)), Ok(gpus));
                assert_eq!(choice(backend, precision, only(maker)), Ok(gpus));
            }
        }
        let both = choice(BackendChoice::Auto, Precision::Fp32, |_| Ok(of(1)));
        assert_eq!(both, Ok(Platform::Gpus(Maker::Nvidia, of(1))));
        assert_eq!(choice(BackendChoice::Auto, Precision::Fp32, none), Ok(Platform::Cpu));
        let unusable = |_| Err(NoGpu { why: "too old".to_owned(), gpus: 1, failure: None });
        assert_eq!(choice(BackendChoice::Auto, Precision::Fp32, unusable), Ok(Platform::Cpu));
    }

    #[test]
    fn a_gpu_that_fails_is_worth_another_attempt_only_where_it_was_asked_for() {
        let failed = |_| -> std::result::Result<Gpus, NoGpu> {
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
        let missing = choose(BackendChoice::Cuda, Precision::Fp32, |_| {
            Err(NoGpu { why: "none".to_owned(), gpus: 0, failure: None })
        });
        assert_eq!(missing.unwrap_err().exit_class(), ExitClass::FixInput);
    }

    #[test]
    fn the_cpu_is_never_looked_past() {
        let unasked = |_| -> std::result::Result<Gpus, NoGpu> { panic!("looked for GPUs") };
        let found = choose(BackendChoice::Cpu, Precision::Fp32, unasked);
        assert_eq!(found.unwrap(), Platform::Cpu);
    }

    #[test]
    fn errors_name_the_key_and_the_way_out() {
        let said = |backend, precision, parts: &[&str]| {
            let error = choice(backend, precision, none).unwrap_err();
            for part in parts {
                assert!(error.contains(part), "{part:?} is not in {error:?}");
            }
        };
        let [nvidia, amd] = ["libcuda.so.1 is missing", "libamdhip64.so.7 is missing"];
        let (fp32, bf16) = (Precision::Fp32, Precision::Bf16);
        said(BackendChoice::Cuda, fp32, &["device.backend: cuda", nvidia, "\"cpu\""]);
        said(BackendChoice::Rocm, fp32, &["device.backend: rocm", amd, "\"auto\""]);
        said(BackendChoice::Cpu, bf16, &["device.precision", "fp32 on the CPU", "bf16"]);
        let both = format!("fp32 on the CPU (no GPU: {nvidia}; {amd})");
        said(BackendChoice::Auto, bf16, &["device.precision", &both]);
    }
}
