//! Devices: from `[device]` and this machine's hardware to a concrete backend, in this one place.
//!
//! [`DeviceChoice::new`] decides; [`DeviceChoice::open`] opens a backend for each worker of this process and hands them,
//! as [`Devices`], to code that is written once over [`Backend`] and waits as a [`WithBackend`]. Nothing after that
//! asks which backend it is.
//!
//! Workers of one machine are dealt out to its GPUs in turn ([`LocalWorkers`]): one each where there are as many.

mod choice;
#[cfg(any(feature = "cuda", feature = "rocm"))]
mod gpus;
mod local_workers;
mod maker;

use std::num::NonZeroUsize;
use std::sync::{Arc, Once};

use serde::{Deserialize, Serialize};
use tidemill_kernels::{Backend, Cpu, DeviceKind, MemoryPlace};
use tidemill_model::ModelError;

use crate::checkpoint::device_keys;
use crate::error::{JobError, Result};
use choice::{Gpus, Platform, choose};
pub use local_workers::LocalWorkers;
use maker::Maker;

/// `[device]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DeviceSettings {
    /// The backend that computes.
    pub backend: BackendChoice,
    /// The precision of activations.
    pub precision: Precision,
    /// Compute threads of a CPU worker, as far as there are cores; never numerics.
    pub threads: usize,
}

impl Default for DeviceSettings {
    fn default() -> Self {
        Self { backend: BackendChoice::Auto, precision: Precision::Fp32, threads: 1 }
    }
}

/// `device.backend`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum BackendChoice {
    /// NVIDIA GPUs where there are any that work, else AMD's, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
    /// AMD GPUs.
    Rocm,
}

impl BackendChoice {
    /// The word that the user writes.
    pub fn word(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Rocm => "rocm",
        }
    }

    /// The hardware and libraries of the maker whose GPUs the choice names, or why this build cannot tell; none if it names no maker.
    #[cfg(feature = "cli")]
    pub(crate) fn inventory(
        self,
    ) -> Option<std::result::Result<Box<tidemill_kernels::gpu::Inventory>, String>> {
        match self {
            Self::Auto | Self::Cpu => None,
            Self::Cuda => Some(Maker::Nvidia.inventory()),
            Self::Rocm => Some(Maker::Amd.inventory()),
        }
    }
}

/// `device.precision`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 32-bit floats throughout.
    #[default]
    Fp32,
    /// bf16 activations; fp32 masters, accumulation and residual. GPUs only.
    Bf16,
}

impl Precision {
    /// The word that the user writes.
    pub fn word(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Bf16 => "bf16",
        }
    }
}

/// Code that is written once for all backends, and is given one.
pub trait WithBackend {
    /// The result.
    type Output;

    /// Runs on `devices`.
    fn run<B: Backend>(self, devices: Devices<B>) -> Self::Output;
}

/// The device of one worker.
#[derive(Debug)]
pub struct WorkerDevice<B> {
    /// The backend; workers that share a device share it.
    pub backend: Arc<B>,
    /// The device's name, for people.
    pub name: String,
    /// Which device of this machine.
    pub ordinal: usize,
}

impl<B> Clone for WorkerDevice<B> {
    fn clone(&self) -> Self {
        let Self { backend, name, ordinal } = self;
        Self { backend: Arc::clone(backend), name: name.clone(), ordinal: *ordinal }
    }
}

/// The devices of the workers of this process: all of one kind.
#[derive(Debug)]
pub struct Devices<B> {
    workers: Vec<WorkerDevice<B>>,
    kind: DeviceKind,
    precision: Precision,
}

impl<B: Backend> Devices<B> {
    /// The devices of the workers of a process, in the order of the workers.
    ///
    /// # Errors
    /// No workers, or devices of different kinds.
    pub fn new(workers: Vec<WorkerDevice<B>>, precision: Precision) -> Result<Self> {
        let kind = one_kind(
            workers.iter().map(|worker| (worker.name.as_str(), worker.backend.device_kind())),
        )?;
        Ok(Self { workers, kind, precision })
    }

    /// The kind of all of them.
    pub fn kind(&self) -> &DeviceKind {
        &self.kind
    }

    /// The precision of activations.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// The device of each worker of this process.
    pub fn workers(&self) -> &[WorkerDevice<B>] {
        &self.workers
    }

    /// The backend of each worker of this process.
    pub fn backends(&self) -> Vec<&B> {
        self.workers.iter().map(|worker| &*worker.backend).collect()
    }

    /// The first worker's backend.
    pub fn first(&self) -> &Arc<B> {
        &self.workers[0].backend
    }

    /// Such as `NVIDIA H200 (sm_90a), fp32`, for people.
    pub fn in_words(&self) -> String {
        let mut names: Vec<&str> = Vec::new();
        for worker in &self.workers {
            if !names.contains(&worker.name.as_str()) {
                names.push(&worker.name);
            }
        }
        let architecture = &self.kind.architecture;
        format!("{} ({architecture}), {}", names.join(" and "), self.precision.word())
    }

    /// The list that a run keeps beside its config: kind, precision, and the device of each worker.
    pub fn to_json(&self) -> String {
        let worker = |worker: &WorkerDevice<B>| serde_json::json!({ "name": worker.name, "ordinal": worker.ordinal });
        let list = serde_json::json!({
            "kind": device_keys(&self.kind),
            "precision": self.precision,
            "workers": self.workers.iter().map(worker).collect::<Vec<_>>(),
        });
        format!("{list:#}\n")
    }

    /// The most workers of this process that one device computes for, by the ordinals of devices.
    pub fn workers_per_device(&self) -> usize {
        let sharers =
            |ordinal| self.workers.iter().filter(|worker| worker.ordinal == ordinal).count();
        self.workers.iter().map(|worker| sharers(worker.ordinal)).max().unwrap_or(1)
    }
}

/// The kind that all of these devices are of.
fn one_kind<'a>(devices: impl Iterator<Item = (&'a str, DeviceKind)>) -> Result<DeviceKind> {
    let mut first: Option<(&str, DeviceKind)> = None;
    for (name, kind) in devices {
        match &first {
            None => first = Some((name, kind)),
            Some((_, expected)) if *expected == kind => {}
            Some((of, expected)) => {
                return Err(JobError::MixedDevices {
                    first: format!("{of} ({})", kind_in_words(expected)),
                    other: format!("{name} ({})", kind_in_words(&kind)),
                });
            }
        }
    }
    let (_, kind) = first.ok_or_else(|| JobError::value("-w", "at least 1 worker", 0))?;
    Ok(kind)
}

/// A kind of device on one line, such as `cuda sm_90a, numerics 1, cuBLASLt 12.8`.
pub fn kind_in_words(kind: &DeviceKind) -> String {
    let DeviceKind { backend, architecture, numerics_version, matrix_library } = kind;
    format!("{backend} {architecture}, numerics {numerics_version}, {matrix_library}")
}

/// The backend and precision that `[device]` gives on this machine.
#[derive(Clone, Debug)]
pub struct DeviceChoice {
    platform: Platform,
    precision: Precision,
    /// The compute threads that were asked for.
    threads: NonZeroUsize,
}

impl DeviceChoice {
    /// Decides. Looks for GPUs only where `device.backend` may mean them.
    ///
    /// # Errors
    /// A backend that this build or machine does not have, or a precision that it cannot compute in; the
    /// error names the key.
    pub fn new(settings: &DeviceSettings) -> Result<Self> {
        let platform = choose(settings.backend, settings.precision, Maker::usable_gpus)?;
        let threads = NonZeroUsize::new(settings.threads)
            .ok_or_else(|| JobError::value("device.threads", "at least 1", 0))?;
        Ok(Self { platform, precision: settings.precision, threads })
    }

    /// Whose memory it takes.
    pub fn memory(&self) -> MemoryPlace {
        match self.platform {
            Platform::Cpu => MemoryPlace::Host,
            Platform::Gpus(..) => MemoryPlace::Device,
        }
    }

    /// How many workers of this machine have something to compute on of their own: its cores, or its GPUs.
    pub fn places(&self) -> usize {
        match self.platform {
            Platform::Cpu => cores().get(),
            Platform::Gpus(_, gpus) => gpus.all.get(),
        }
    }

    /// Workers of each of `processes_here` processes of this machine where nothing says how many, up to `lanes`: one for each of its
    /// cores, or of those of its GPUs that work together.
    pub fn default_workers(&self, lanes: usize, processes_here: usize) -> usize {
        let places = match self.platform {
            Platform::Cpu => self.places(),
            Platform::Gpus(_, gpus) => gpus.together.get(),
        };
        (places / processes_here.max(1)).min(lanes).max(1)
    }

    /// A note for a run that was not told how many workers it should have.
    pub fn note(&self) -> Option<String> {
        let Platform::Gpus(_, Gpus { all, together }) = self.platform else { return None };
        (together < all).then(|| {
            format!(
                "{together} of {all} GPUs compute: the next is of another kind, or does not read their memory (-w \
                 says how many workers there are)"
            )
        })
    }

    /// The compute threads that this machine has cores for. Where more were asked for, a warning says so once.
    fn compute_threads(&self, workers: LocalWorkers) -> NonZeroUsize {
        static SAID: Once = Once::new();
        let (asked, cores) = (self.threads, cores());
        // Only the first process of a machine prints the warning.
        if asked > cores && workers.first == 0 {
            SAID.call_once(|| {
                tracing::warn!(
                    "{asked} compute threads (device.threads) on {cores} cores: {cores} compute"
                );
            });
        }
        asked.min(cores)
    }

    /// Opens a device for each of `workers` and runs `code` on them.
    ///
    /// # Errors
    /// A device that cannot be opened, devices of different kinds, or no workers.
    pub fn open<W: WithBackend>(&self, workers: LocalWorkers, code: W) -> Result<W::Output> {
        match self.platform {
            Platform::Cpu => {
                let threads = self.compute_threads(workers);
                let backend = Arc::new(Cpu::new(threads).map_err(ModelError::from)?);
                let device = WorkerDevice { backend, name: "the CPU".to_owned(), ordinal: 0 };
                let devices = vec![device; workers.count];
                Ok(code.run(Devices::new(devices, self.precision)?))
            }
            Platform::Gpus(maker, Gpus { all: gpus, .. }) => {
                let ordinals = (0..workers.count)
                    .map(|worker| (workers.first % gpus + worker) % gpus)
                    .collect::<Vec<_>>();
                maker.open(&ordinals, self.precision, code)
            }
        }
    }
}

/// The cores that this process may use.
fn cores() -> NonZeroUsize {
    std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_compute_threads_than_cores_are_not_started() {
        let threads = |asked| {
            let settings = DeviceSettings {
                backend: BackendChoice::Cpu,
                threads: asked,
                ..Default::default()
            };
            let choice = DeviceChoice::new(&settings).unwrap();
            choice.compute_threads(LocalWorkers::alone(1))
        };
        assert_eq!(threads(1), NonZeroUsize::MIN);
        for beyond in [cores().get() + 1, 1000, usize::MAX] {
            assert_eq!(threads(beyond), cores());
        }
    }

    #[test]
    fn every_gpu_computes_and_every_core() {
        let on = |platform| DeviceChoice {
            platform,
            precision: Precision::Fp32,
            threads: NonZeroUsize::MIN,
        };
        let of = |all, together| {
            let [all, together] = [all, together].map(|gpus| NonZeroUsize::new(gpus).unwrap());
            on(Platform::Gpus(Maker::Amd, Gpus { all, together }))
        };
        let gpus = |gpus| of(gpus, gpus);
        for (count, processes, workers) in [(1, 1, 1), (8, 1, 8), (16, 1, 8), (8, 2, 4), (2, 16, 1)]
        {
            assert_eq!(gpus(count).default_workers(8, processes), workers, "{count} {processes}");
        }
        assert_eq!(gpus(8).note(), None);
        assert_eq!(of(8, 3).default_workers(8, 1), 3);
        assert!(of(8, 3).note().unwrap().starts_with("3 of 8 GPUs compute"));
        let cpu = on(Platform::Cpu);
        assert_eq!(cpu.note(), None);
        assert_eq!(cpu.default_workers(1, 1), 1);
        assert_eq!(cpu.default_workers(usize::MAX, 1), cores().get());
        assert_eq!(cpu.default_workers(8, 1 << 20), 1);
    }

    struct Describe;

    impl WithBackend for Describe {
        type Output = (String, usize, usize);

        fn run<B: Backend>(self, devices: Devices<B>) -> Self::Output {
            (devices.in_words(), devices.workers().len(), devices.workers_per_device())
        }
    }

    #[test]
    fn the_cpu_serves_every_worker() {
        let settings = DeviceSettings { backend: BackendChoice::Cpu, ..Default::default() };
        let choice = DeviceChoice::new(&settings).unwrap();
        let (words, workers, sharers) = choice.open(LocalWorkers::alone(3), Describe).unwrap();
        assert!(words.starts_with("the CPU (") && words.ends_with("), fp32"), "{words}");
        assert_eq!((workers, sharers), (3, 3));
        assert!(choice.open(LocalWorkers::alone(0), Describe).is_err());
    }

    #[test]
    fn devices_of_two_kinds_are_refused_by_name() {
        let kind = |architecture: &str| DeviceKind {
            backend: "cuda".to_owned(),
            architecture: architecture.to_owned(),
            numerics_version: 3,
            matrix_library: "cuBLASLt 12.8".to_owned(),
        };
        let same = [("NVIDIA H200", kind("sm_90a")), ("NVIDIA H100", kind("sm_90a"))];
        assert_eq!(one_kind(same.into_iter()).unwrap(), kind("sm_90a"));
        let mixed = [("NVIDIA H200", kind("sm_90a")), ("NVIDIA A100", kind("sm_80"))];
        let error = one_kind(mixed.into_iter()).unwrap_err().to_string();
        let named = ["NVIDIA H200 (cuda sm_90a, numerics 3", "NVIDIA A100 (cuda sm_80"];
        for part in [named[0], named[1], "CUDA_VISIBLE_DEVICES"] {
            assert!(error.contains(part), "{part:?} is not in {error:?}");
        }
    }

    #[test]
    fn no_threads_are_an_error() {
        let settings =
            DeviceSettings { backend: BackendChoice::Cpu, threads: 0, ..Default::default() };
        let error = DeviceChoice::new(&settings).unwrap_err().to_string();
        assert!(error.starts_with("device.threads: "), "{error}");
    }
}
