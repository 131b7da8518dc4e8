//! Runs a [`ResolvedRun`]: finds its checkpoint, gives every worker its state, and steps the graph.

use std::convert::Infallible;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tidemill_kernels::{Backend, Cpu, DeviceKind};
use tidemill_model::{Layout, ModelError, Trainable, hugging_face};
use tidemill_streaming_data::DataSet;
use tidemill_streaming_data::order::{CanonicalOrder, ShuffleSettings};
use tidemill_streaming_data::reader::{Decoder, DecoderSettings};
use timely::dataflow::operators::Inspect;

use super::resolve::{HORIZON_KEY, ResolvedRun, evaluation_shuffle};
use super::restore::{StartPoint, StateOrigin, WorkerState, distribute};
use super::resume;
use super::source::DecodedSamples;
use super::state_sink::{CheckpointParts, Evaluated, RunCheckpoints};
use crate::checkpoint::{self, Checkpoint, CheckpointFiles, TrainerState};
use crate::cluster::{Abort, Actor, Cluster, ClusterSettings, Failure, WorkerContext};
use crate::error::Result;
use crate::metrics::{StepLog, StepMetrics};
use crate::operators::{
    CheckpointCuts, EvaluationPlan, EvaluationReport, InitialState, StepReport, Training,
    TrainingPlan, UpdateRule,
};
use crate::run_folder::RunFolder;

/// Asks a run to stop after the step in hand, with a checkpoint; from any thread.
#[derive(Clone, Debug, Default)]
pub struct StopRequest {
    asked: Arc<AtomicBool>,
    /// A run that has not begun to train, and so has no step to stop after.
    waiting: Arc<Mutex<Option<Abort>>>,
}

impl StopRequest {
    /// Asks. All workers of all processes agree on the last step; processes that are still waiting for each other
    /// end at once.
    pub fn request(&self) {
        self.asked.store(true, Ordering::Release);
        if let Some(abort) = lock(&self.waiting).take() {
            abort.fail(Actor::Worker(0), Failure::restart("stopped before all processes had met"));
        }
    }
}

/// What happens during a run; told on worker 0 only.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum TrainEvent {
    /// The workers have their state.
    Started {
        /// Updates done: 0, or those of the checkpoint that is gone on with.
        step: u64,
        /// Updates of the whole run.
        steps: u64,
        /// Parameters of the model.
        parameters: usize,
        /// Workers of all processes.
        workers: usize,
        /// How the kind of device differs from the checkpoint's; empty where the bits go on.
        device_changes: Vec<String>,
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
    /// A checkpoint is complete.
    Checkpointed {
        /// Updates done.
        step: u64,
        /// Its folder.
        path: PathBuf,
    },
}

/// Is told what happens, on threads of the run; must not block.
pub type Observer = Arc<dyn Fn(&TrainEvent) + Send + Sync>;

/// How a run is run; none of it is numerics.
pub struct TrainOptions {
    /// Workers, and the other processes.
    pub cluster: ClusterSettings,
    /// Ends the run early.
    pub stop: StopRequest,
    /// Is told what happens.
    pub observer: Observer,
}

impl TrainOptions {
    /// `threads` workers in this process alone, observed by nobody.
    pub fn threads(threads: usize) -> Self {
        Self {
            cluster: ClusterSettings::threads(threads),
            stop: StopRequest::default(),
            observer: Arc::new(|_| ()),
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
    /// The latest checkpoint; on process 0 only.
    pub checkpoint: Option<PathBuf>,
}

/// What the workers of a process share.
struct Shared {
    run: ResolvedRun,
    backend: Arc<Cpu>,
    kind: DeviceKind,
    training_data: (Decoder, Arc<CanonicalOrder>),
    evaluation_data: Option<(Decoder, Arc<CanonicalOrder>)>,
    stop: StopRequest,
    observer: Observer,
    /// Is dropped by all who have it once the run folder is let go.
    released: Sender<Infallible>,
}

/// How long a writer that is stuck in a file may keep a run from returning.
const RELEASE_PATIENCE: Duration = Duration::from_secs(10);

/// Trains, from the run folder's latest checkpoint where it has one.
///
/// # Errors
/// The first error of the run, in whichever process it occurred.
pub fn train(run: ResolvedRun, options: TrainOptions) -> Result<TrainSummary> {
    let TrainOptions { mut cluster, stop, observer } = options;
    run.batch.worker_lanes(0, cluster.threads * cluster.processes())?;
    let threads = NonZeroUsize::new(run.config.device.threads).unwrap_or(NonZeroUsize::MIN);
    let backend = Arc::new(Cpu::new(threads).map_err(ModelError::from)?);
    let kind = backend.device_kind();
    cluster.identity.extend(run.identity(&kind));
    cluster.peer_deadline = run.peer_deadline();
    let memory_bytes = run.config.data.cache_bytes();
    let decode = |data_set: &DataSet, shuffle: ShuffleSettings| -> Result<_> {
        let order = data_set.order(shuffle)?;
        let settings = DecoderSettings { memory_bytes, ..DecoderSettings::default() };
        // The decoder keeps an order of its own; this one says where a position is stored.
        let places = Arc::new(data_set.order(shuffle)?);
        Ok((Decoder::new(data_set.clone(), order, settings)?, places))
    };
    let training_data = decode(&run.data_set, run.shuffle())?;
    let evaluation_data = run
        .evaluation
        .as_ref()
        .map(|(data_set, _)| decode(data_set, evaluation_shuffle()))
        .transpose()?;
    let (released, release) = mpsc::channel();
    let shared =
        Shared { run, backend, kind, training_data, evaluation_data, stop, observer, released };
    let abort = Abort::new();
    *lock(&shared.stop.waiting) = Some(abort.clone());
    let cluster = Cluster::connect_with(cluster, abort);
    *lock(&shared.stop.waiting) = None;
    let summaries = cluster?.execute(move |context| run_worker(context, &shared));
    // The writer's thread ends by itself; whoever has this answer may open the run folder again.
    let _ = release.recv_timeout(RELEASE_PATIENCE);
    let summaries = summaries?;
    Ok(summaries.into_iter().next().unwrap_or_default())
}

fn run_worker(
    context: &mut WorkerContext<'_>,
    shared: &Shared,
) -> std::result::Result<TrainSummary, Failure> {
    let Shared { run, backend, .. } = shared;
    let layout: &Layout = Trainable::<Cpu>::layout(run.model.as_ref());
    let mut plan = TrainingPlan::new(run.batch.clone(), layout, run.data_set.seq_len(), run.steps);
    let opened = match context.index() {
        0 => Some(OpenedRun::open(shared, layout)?),
        _ => None,
    };
    let (folder, origin) = match opened {
        Some(OpenedRun { folder, origin }) => (Some(folder), Some(origin)),
        None => (None, None),
    };
    let WorkerState { start, parameters, moments } =
        distribute(context, origin, layout, &plan.chunks)?;
    plan.first_step = start.step;
    plan.first_tokens = start.tokens;
    let read_ahead = NonZeroU64::new(run.config.data.read_ahead_steps);
    plan.read_ahead_steps = read_ahead.unwrap_or(NonZeroU64::MIN);
    let every = NonZeroU64::new(run.config.checkpoint.every_steps).unwrap_or(NonZeroU64::MIN);
    plan.checkpoints = CheckpointCuts::Every(every);
    plan.evaluation = match (&run.evaluation, &run.config.evaluation) {
        (Some((_, samples)), Some(settings)) => Some(EvaluationPlan {
            samples: *samples,
            every_steps: NonZeroU64::new(settings.every_steps).unwrap_or(NonZeroU64::MIN),
        }),
        _ => None,
    };
    let vocab_size = Trainable::<Cpu>::vocab_size(run.model.as_ref());
    let source = |(decoder, order): &(Decoder, Arc<CanonicalOrder>)| {
        DecodedSamples::new(decoder.clone(), Arc::clone(order), vocab_size)
    };
    let journal = match &folder {
        Some(folder) => Some(Journal::open(folder, &start, shared, context)?),
        None => None,
    };
    let evaluated = journal.as_ref().map(|journal| journal.evaluated.clone()).unwrap_or_default();
    let plan = Arc::new(plan);
    let training = Training {
        plan: Arc::clone(&plan),
        backend: Arc::clone(backend),
        model: Arc::clone(&run.model),
        state: InitialState {
            parameters: Arc::new(parameters),
            moments: moments.map(|arenas| arenas.map(Arc::new)),
        },
        rule: UpdateRule::new(
            run.config.optimizer.clone(),
            run.config.schedule.clone(),
            start.horizon,
        ),
        stop: Arc::clone(&shared.stop.asked),
        checkpoints: match &folder {
            Some(folder) => {
                let template = template(shared, &start);
                let files = checkpoint_files(run, layout)?;
                let observer = Arc::clone(&shared.observer);
                let parts = CheckpointParts {
                    files,
                    folder: Arc::clone(folder),
                    template,
                    plan,
                    evaluated,
                    abort: context.abort().clone(),
                    on_commit: Box::new(move |step, path| {
                        observer(&TrainEvent::Checkpointed { step, path });
                    }),
                };
                Some(Box::new(RunCheckpoints::new(parts)))
            }
            None => None,
        },
        abort: context.abort().clone(),
    };
    let journal = Arc::new(Mutex::new(journal));
    let (report_journal, evaluation_journal) = (Arc::clone(&journal), Arc::clone(&journal));
    let last = Arc::new(Mutex::new(None));
    let last_report = Arc::clone(&last);
    context.dataflow::<u64, _, _>(|scope| {
        let evaluation = shared.evaluation_data.as_ref().map(source);
        let streams = training.build(scope, source(&shared.training_data), evaluation);
        streams.reports.inspect(move |report| {
            *lock(&last_report) = Some(*report);
            if let Some(journal) = lock(&report_journal).as_mut() {
                journal.report(report);
            }
        });
        streams.evaluations.inspect(move |report| {
            if let Some(journal) = lock(&evaluation_journal).as_mut() {
                journal.evaluation(report);
            }
        });
    });
    context.run_until_done()?;
    let last: Option<StepReport> = *lock(&last);
    let step = last.map_or(start.step, |report| report.step);
    let checkpoint = match &folder {
        Some(folder) => checkpoint::latest(folder.path())?.map(|entry| entry.path),
        None => None,
    };
    let metrics = lock(&journal).as_ref().and_then(|journal| journal.metrics.last().cloned());
    Ok(TrainSummary {
        step,
        steps: run.steps,
        stopped: step < run.steps,
        last: metrics,
        checkpoint,
    })
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The run folder as worker 0 finds it.
struct OpenedRun {
    folder: Arc<RunFolder>,
    origin: (StartPoint, StateOrigin),
}

impl OpenedRun {
    fn open(shared: &Shared, layout: &Layout) -> Result<Self> {
        let run = &shared.run;
        let dir = &run.config.run.dir;
        if checkpoint::latest(dir)?.is_none() {
            // A run that cannot begin leaves no folder; one that goes on keeps the horizon that was checked then.
            run.config.schedule.check(run.config.schedule.steps.unwrap_or(run.steps))?;
        }
        let mut folder = RunFolder::hold(dir)?;
        folder.announce_release(shared.released.clone());
        checkpoint::sweep(folder.path())?;
        let mut now = run.initial_state(&shared.kind);
        let origin = match checkpoint::latest(folder.path())? {
            None => {
                let parameters = match &run.weights_from {
                    Some(weights) => hugging_face::read_weights(weights, layout)?,
                    None => Trainable::<Cpu>::initialize(run.model.as_ref(), run.config.run.seed),
                };
                let horizon = run.config.schedule.steps.unwrap_or(run.steps);
                (StartPoint { step: 0, tokens: 0, horizon }, StateOrigin::Parameters(parameters))
            }
            Some(entry) => {
                let found = Checkpoint::open(&entry.path)?;
                let saved = found.state();
                keep_horizon(saved, &mut now, run.config.schedule.steps.is_some());
                resume::check(saved, &now, found.path())?;
                let horizon = saved.settings.get(HORIZON_KEY).and_then(|steps| steps.as_u64());
                let start = StartPoint {
                    step: saved.step,
                    tokens: saved.tokens,
                    horizon: horizon.unwrap_or(run.steps),
                };
                (start, StateOrigin::checkpoint(found.path(), layout)?)
            }
        };
        if origin.0.step < run.steps {
            folder.write_config(&run.to_toml())?;
        }
        Ok(Self { folder: Arc::new(folder), origin })
    }
}

/// The horizon of a run that has begun stays, unless the user names one: then it must be the same.
fn keep_horizon(saved: &TrainerState, now: &mut TrainerState, named: bool) {
    if let (false, Some(horizon)) = (named, saved.settings.get(HORIZON_KEY)) {
        now.settings.insert(HORIZON_KEY.to_owned(), horizon.clone());
    }
}

fn checkpoint_files(run: &ResolvedRun, layout: &Layout) -> Result<CheckpointFiles> {
    Ok(CheckpointFiles {
        layout: Arc::new(layout.clone()),
        config: run.model_json(),
        tokenizer: run.tokenizer()?,
        keep: run.config.checkpoint.keep,
    })
}

/// What every checkpoint of the run says but for where it stands.
fn template(shared: &Shared, start: &StartPoint) -> TrainerState {
    let mut template = shared.run.initial_state(&shared.kind);
    template.settings.insert(HORIZON_KEY.to_owned(), start.horizon.into());
    template
}

/// What worker 0 writes down and tells.
struct Journal {
    metrics: StepLog<StepMetrics>,
    evaluations: Option<StepLog<EvaluationReport>>,
    /// The evaluations that are written down.
    evaluated: Evaluated,
    observer: Observer,
    abort: Abort,
    /// Seconds of training before this run.
    elapsed_before: f64,
    started: Instant,
    last_step: Instant,
}

impl Journal {
    fn open(
        folder: &RunFolder,
        start: &StartPoint,
        shared: &Shared,
        context: &WorkerContext<'_>,
    ) -> Result<Self> {
        let metrics = StepLog::<StepMetrics>::open(folder.path(), start.step)?;
        let evaluations = match &shared.run.evaluation {
            Some(_) => Some(StepLog::open(folder.path(), start.step)?),
            None => None,
        };
        let layout: &Layout = Trainable::<Cpu>::layout(shared.run.model.as_ref());
        let device_changes = match checkpoint::latest(folder.path())? {
            Some(entry) => {
                let saved = TrainerState::read(&entry.path)?;
                resume::device_changes(&saved, &shared.run.initial_state(&shared.kind))
            }
            None => Vec::new(),
        };
        (shared.observer)(&TrainEvent::Started {
            step: start.step,
            steps: shared.run.steps,
            parameters: layout.parameters(),
            workers: context.peers(),
            device_changes,
        });
        let now = Instant::now();
        Ok(Self {
            elapsed_before: metrics.last().map_or(0.0, |last| last.elapsed_seconds),
            metrics,
            evaluations,
            evaluated: Evaluated::default(),
            observer: Arc::clone(&shared.observer),
            abort: context.abort().clone(),
            started: now,
            last_step: now,
        })
    }

    fn report(&mut self, report: &StepReport) {
        let now = Instant::now();
        let seconds = (now - self.last_step).as_secs_f64();
        self.last_step = now;
        let metrics = StepMetrics {
            step: report.step,
            loss: report.loss,
            grad_norm: report.grad_norm,
            learning_rate: report.learning_rate,
            tokens: report.total_tokens,
            tokens_per_second: report.tokens as f64 / seconds.max(1e-9),
            elapsed_seconds: self.elapsed_before + (now - self.started).as_secs_f64(),
        };
        match self.metrics.append(metrics.clone()) {
            Ok(()) => (self.observer)(&TrainEvent::Step(metrics)),
            Err(error) => self.abort.fail(Actor::Worker(0), error),
        }
    }

    fn evaluation(&mut self, report: &EvaluationReport) {
        let Some(evaluations) = &mut self.evaluations else { return };
        match evaluations.append(*report) {
            Ok(()) => {
                self.evaluated.note(report.step);
                let (step, loss) = (report.step, report.loss);
                (self.observer)(&TrainEvent::Evaluated { step, loss });
            }
            Err(error) => self.abort.fail(Actor::Worker(0), error),
        }
    }
}
