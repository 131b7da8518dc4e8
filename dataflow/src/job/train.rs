//! Runs a [`ResolvedRun`]: opens its devices and its data, meets the other processes, and sets the workers going.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tidemill_kernels::{Backend, FloatEnvironment};
use tidemill_streaming_data::reader::{Decoder, DecoderSettings};

use super::data_versions::{DataVersions, Place};
use super::memory::{FittingDevices, PlanMemory};
use super::resolve::ResolvedRun;
use super::worker::{Shared, run_worker};
use crate::batch::BatchPlan;
use crate::cluster::progress::{self, Phase};
use crate::cluster::trace::Trace;
use crate::cluster::{Abort, Cluster, ClusterError, ClusterSettings};
use crate::communicators::Communicators;
use crate::device::{Devices, LocalWorkers, Precision, WithBackend};
use crate::error::{JobError, Result};
use crate::metrics::StepMetrics;
use crate::operators::Scores;
use crate::refusal::{Advice, Refusal, cause_alone};

/// Asks a run to stop after the step in hand, with a checkpoint; from any thread.
#[derive(Clone, Debug, Default)]
pub struct StopRequest {
    pub(super) asked: Arc<AtomicBool>,
    /// A run that has not begun to train, and so has no step to stop after.
    waiting: Arc<Mutex<Option<Abort>>>,
}

impl StopRequest {
    /// Asks. All workers of all processes agree on the last step; processes that are still waiting for each other
    /// end at once.
    pub fn request(&self) {
        self.asked.store(true, Ordering::Release);
        if let Some(abort) = lock(&self.waiting).take() {
            abort.abort(ClusterError::StoppedEarly);
        }
    }

    /// Whether the stop was requested.
    pub fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Acquire)
    }

    /// Meets the other processes of a cluster, unless it is asked to stop before all have met.
    pub(crate) fn connect(
        &self,
        cluster: ClusterSettings,
        abort: Abort,
    ) -> std::result::Result<Cluster, ClusterError> {
        *lock(&self.waiting) = Some(abort.clone());
        if cluster.processes() > 1 && self.is_asked() {
            abort.abort(ClusterError::StoppedEarly);
        }
        let cluster = Cluster::connect_with(cluster, abort);
        *lock(&self.waiting) = None;
        cluster
    }
}

/// An event of a run; reported on worker 0 only.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum TrainEvent {
    /// The run's latest checkpoint is in a store, and is fetched from there.
    Fetching {
        /// Its URL.
        path: PathBuf,
    },
    /// The workers have their state.
    Started {
        /// Updates done: 0, or those of the checkpoint that the run resumes from.
        step: u64,
        /// Updates of the whole run.
        steps: u64,
        /// Updates of its learning rate's schedule, behind which the rate stays as it is.
        schedule_steps: u64,
        /// Parameters of the model.
        parameters: usize,
        /// Workers of all processes.
        workers: usize,
        /// The device of this process, such as `NVIDIA H200 (sm_90a), fp32`.
        device: String,
        /// The most workers of this process that one device computes for.
        workers_per_device: usize,
        /// How the kind of device differs from the checkpoint's; empty where the bits go on.
        device_changes: Vec<String>,
    },
    /// From a step on another version of the data is read: where `data.follow` says so, at the end of an epoch.
    Moved {
        /// Updates done before it.
        step: u64,
        /// The identity of the version.
        fingerprint: String,
        /// Samples of an epoch of it.
        samples: u64,
    },
    /// An update is done.
    Step(StepMetrics),
    /// An evaluation is done.
    Evaluated {
        /// Updates done.
        step: u64,
        /// The mean loss, in nats.
        loss: f64,
    },
    /// The tasks of an evaluation are answered.
    Answered {
        /// Updates done.
        step: u64,
        /// Their metrics, and the averages of suites.
        scores: Scores,
    },
    /// A checkpoint is complete.
    Checkpointed {
        /// Updates done.
        step: u64,
        /// Its folder or URL.
        path: PathBuf,
    },
}

/// Called with each event, on threads of the run. It must not block: a call that takes `run.step_deadline_seconds` ends the run.
pub type Observer = Arc<dyn Fn(&TrainEvent) + Send + Sync>;

/// How a run is run; none of it is numerics.
pub struct TrainOptions {
    /// Workers, and the other processes.
    pub cluster: ClusterSettings,
    /// Ends the run early.
    pub stop: StopRequest,
    /// Called with each event.
    pub observer: Observer,
    /// The trace of this process's threads, if there is one.
    pub trace: Option<Trace>,
}

impl TrainOptions {
    /// `threads` workers in this process alone, without an observer.
    pub fn threads(threads: usize) -> Self {
        Self {
            cluster: ClusterSettings::workers(threads),
            stop: StopRequest::default(),
            observer: Arc::new(|_| ()),
            trace: None,
        }
    }
}

/// How a run ended.
#[derive(Clone, Debug, Default)]
pub struct TrainSummary {
    /// Updates done.
    pub step: u64,
    /// Updates of the whole run.
    pub steps: u64,
    /// Whether it was stopped before its last step.
    pub stopped: bool,
    /// The last line of metrics; on process 0 only.
    pub last: Option<StepMetrics>,
    /// The folder or URL of the latest checkpoint; on process 0 only.
    pub checkpoint: Option<PathBuf>,
}

/// How long samples of a store may be waited for at least. A store that is silent is given up after two minutes, an
/// operation that goes on and on after ten: these errors say more.
const STORE_PATIENCE: Duration = Duration::from_secs(900);

/// Trains, from the run folder's latest checkpoint where it has one, on the devices that `run.device` says.
///
/// # Errors
/// The first error of the run, in whichever process it occurred; [`ClusterError::StoppedEarly`] where any of them was
/// asked to stop before all had met, which no harm comes of.
pub fn train(run: ResolvedRun, options: TrainOptions) -> Result<TrainSummary> {
    // The caller's thread is an embedder's, and threads that are started here inherit from it.
    let _standard = FloatEnvironment::standard();
    let cluster = &options.cluster;
    let count = cluster.workers * cluster.processes();
    run.batch.worker_lanes(0, count)?;
    let tasks = run.config.evaluation.as_ref().map_or(0, |evaluation| evaluation.tasks.len());
    if tasks > 0 && run.questions.is_none() {
        let expected = "requests made of them (ResolvedRun::questions), as `tidemill train` makes";
        return Err(JobError::value("evaluation.tasks", expected, "none"));
    }
    let workers = LocalWorkers::of(cluster);
    let (batch, precision) = (run.batch.clone(), run.config.device.precision);
    let device = run.device.clone();
    let fitting = FittingDevices::default();
    let train = Train { run, options, fitting: fitting.clone() };
    let trained = device.open(workers, train).flatten();
    trained.map_err(|error| {
        advise(error, &batch, precision, fitting.way(count, "parallel.shard = \"parameters\""))
    })
}

/// A run that waits for its devices.
struct Train {
    run: ResolvedRun,
    options: TrainOptions,
    /// Called with the number of devices like these that the run would fit on.
    fitting: FittingDevices,
}

impl WithBackend for Train {
    type Output = Result<TrainSummary>;

    fn run<B: Backend>(self, devices: Devices<B>) -> Self::Output {
        let Self { run, options, fitting } = self;
        let TrainOptions { mut cluster, stop, observer, trace } = options;
        let workers = cluster.workers * cluster.processes();
        let plan = PlanMemory {
            model: &run.model,
            batch: &run.config.batch,
            optimizer: &run.config.optimizer,
            sharding: run.batch.sharding(),
            positions: run.data.seq_len(),
            workers,
            workers_of_process: cluster.workers,
            workers_per_device: devices.workers_per_device(),
        };
        fitting.find(&plan, &devices, run.batch.microbatch_samples())?;
        cluster.identity.extend(run.identity(devices.kind()));
        cluster.peer_deadline = run.peer_deadline();
        cluster.connect_deadline = run.connect_deadline();
        cluster.step_deadline = Some(run.step_deadline());
        cluster.ending_deadline = cluster.ending_deadline.min(run.step_deadline());
        let tell = observer;
        let observer: Observer = Arc::new(move |event| {
            let _telling = progress::during(Phase::Reporting);
            tell(event);
        });
        let memory_bytes = run.config.data.cache_bytes();
        let settings = DecoderSettings { memory_bytes, ..DecoderSettings::default() };
        let evaluation = run.evaluation.as_ref();
        let evaluation_data = evaluation
            .map(|(data, samples)| Decoder::of_positions(data.clone(), settings, 0..*samples))
            .transpose()?;
        let abort = Abort::new();
        if let Some(trace) = &trace {
            abort.write_trace(trace);
        }
        let place = Place {
            process: cluster.process,
            processes: cluster.processes(),
            workers: cluster.workers,
        };
        let data_versions = DataVersions::new(&run, settings, place, &abort, &observer)?;
        if run.reads_store() {
            abort.allow(Phase::ReadingSamples, STORE_PATIENCE);
        }
        let (backends, schedule) = (devices.backends(), run.batch.lane_schedule(workers)?);
        let library = || devices.first().collective_library();
        let sharding = run.batch.sharding();
        let communicators = Communicators::new(&backends, &cluster, schedule, sharding, library)?;
        let model = Arc::new(run.model.build()?);
        let shared = Shared {
            run,
            model,
            devices,
            communicators,
            data_versions,
            evaluation_data,
            stop,
            observer,
        };
        let cluster = shared.stop.connect(cluster, abort)?;
        let summaries = cluster.execute(move |context| run_worker(context, &shared))?;
        Ok(summaries.into_iter().next().unwrap_or_default())
    }
}

/// Advice, in the words of the config, if a device of this process refused.
/// `more` says whether more devices would do.
fn advise(
    error: JobError,
    batch: &BatchPlan,
    precision: Precision,
    more: Option<String>,
) -> JobError {
    let Some(refusal) = Refusal::of(&error) else { return error };
    let lower = match batch.microbatch_grains() {
        1 => "use a smaller model or shorter samples (batch.microbatch_grains is 1 already)".into(),
        grains => {
            format!("lower batch.microbatch_grains, which is {grains} (it changes no result)")
        }
    };
    let room = match precision {
        Precision::Fp32 => format!("{lower}, or train with device.precision = \"bf16\" on a GPU"),
        Precision::Bf16 => lower,
    };
    let room = match more {
        Some(more) => format!("{more}, or {room}"),
        None => room,
    };
    let cause = match error {
        JobError::Cluster(error) => cause_alone(error),
        other => Arc::new(other),
    };
    refusal.advised(Advice { what: "the run", room, cpu: "device.backend = \"cpu\"" }, cause)
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::{BatchSettings, MicrobatchGrains, MicrobatchMemory};
    use crate::cluster::{Actor, ExitClass};
    use tidemill_kernels::KernelError;
    use tidemill_model::ModelError;

    fn failed(cause: KernelError) -> JobError {
        let cause = Arc::new(ModelError::from(cause));
        let (actor, exit_class) = (Actor::Worker(0), ExitClass::FixInput);
        ClusterError::Failed { actor, exit_class, cause }.into()
    }

    #[test]
    fn a_device_without_room_says_what_to_change() {
        let plan = |grains| {
            let microbatch_grains = MicrobatchGrains::Grains(grains);
            let settings =
                BatchSettings { lanes: Some(1), microbatch_grains, ..Default::default() };
            settings.plan(MicrobatchMemory::default()).unwrap()
        };
        let full = || KernelError::OutOfMemory { bytes: 7, device: "NVIDIA H200".to_owned() };
        for (grains, precision, expected, unexpected) in [
            (8, Precision::Fp32, ["microbatch_grains, which is 8", "bf16"], "already"),
            (1, Precision::Fp32, ["microbatch_grains is 1 already", "bf16"], "lower"),
            (8, Precision::Bf16, ["microbatch_grains, which is 8", "changes no result"], "bf16"),
        ] {
            let error = advise(failed(full()), &plan(grains), precision, None);
            let text = error.to_string();
            assert!(expected.iter().all(|part| text.contains(part)), "{text}");
            assert!(!text.contains(unexpected), "{text}");
            assert_eq!(Refusal::of(&error), Some(Refusal::OutOfMemory), "the cause is kept");
        }
        let other = failed(KernelError::shape("scan", "states", 1, 2));
        let more = Some("train on 3 such GPUs".to_owned());
        let more = advise(failed(full()), &plan(8), Precision::Bf16, more).to_string();
        assert!(more.contains("memory: train on 3 such GPUs, or lower batch."), "{more}");
        let kept = advise(other, &plan(8), Precision::Fp32, None);
        assert!(matches!(kept, JobError::Cluster(_)), "{kept}");
    }
}
