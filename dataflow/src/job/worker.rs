//! One worker of a run: gets its state, builds the graph and steps it.

use std::num::NonZeroU64;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use tidemill_kernels::{Backend, FloatEnvironment};
use tidemill_model::LanguageModel;
use tidemill_streaming_data::Mixture;
use tidemill_streaming_data::reader::Decoder;
use timely::dataflow::operators::Inspect;

use super::data_versions::DataVersions;
use super::decisions::share_decisions;
use super::elsewhere;
use super::journal::{DeviceBytes, Evaluations, Journal, Workers};
use super::open_run::{OpenedRun, write_down};
use super::questions::EvaluationSource;
use super::resolve::ResolvedRun;
use super::restore::{Restored, RuleStates, StartPoint, distribute};
use super::shared_checkpoints::{ShareParts, SharedCheckpoints, Shares, WrittenElsewhere};
use super::shared_folder;
use super::source::{DecodedSamples, origin};
use super::state_sink::{CheckpointParts, RunCheckpoints};
use super::train::{Observer, StopRequest, TrainEvent, TrainSummary, lock};
use super::versioned_samples::VersionedSamples;
use crate::checkpoint::{CheckpointFiles, FilePlan, TrainerState};
use crate::cluster::progress::{self, Phase};
use crate::cluster::{Failure, WorkerContext};
use crate::communicators::Communicators;
use crate::device::Devices;
use crate::error::Result;
use crate::history::{Ended, HistoryLine, Started, unix_seconds};
use crate::operators::{
    CheckpointCuts, Evaluation, EvaluationPlan, SampleName, SampleNames, ScheduledRule, StateSink,
    StepReport, Training, TrainingPlan,
};

/// The state that the workers of a process share.
pub(super) struct Shared<B: Backend> {
    pub run: ResolvedRun,
    pub model: Arc<LanguageModel<B>>,
    pub devices: Devices<B>,
    pub communicators: Communicators<B>,
    pub data_versions: Arc<DataVersions>,
    pub evaluation_data: Option<Decoder>,
    pub stop: StopRequest,
    pub observer: Observer,
}

impl<B: Backend> Shared<B> {
    /// The source of evaluations: samples of the data set, and behind them requests.
    fn source(&self, decoder: &Decoder, plan: &EvaluationPlan) -> EvaluationSource {
        let decoded = DecodedSamples::new(decoder.clone(), self.run.model.vocab_size());
        let (positions, questions) = (self.run.data.seq_len(), self.run.questions.clone());
        EvaluationSource::new((decoded, plan.samples.get()), questions, positions)
    }

    /// The plan of every worker, which goes on from `start`.
    fn plan(&self, start: &StartPoint) -> TrainingPlan {
        let (run, config) = (&self.run, &self.run.config);
        let (layout, positions) = (run.model.layout(), run.data.seq_len());
        TrainingPlan {
            first_step: start.step,
            first_tokens: start.tokens,
            read_ahead_steps: at_least_one(config.data.read_ahead_steps),
            checkpoints: CheckpointCuts::Every(at_least_one(config.checkpoint.every_steps)),
            document_end: run.document_end,
            sample_names: {
                let data_versions = Arc::clone(&self.data_versions);
                SampleNames::new(move |position| data_versions.name(position))
            },
            evaluation_names: run
                .evaluation
                .as_ref()
                .map(|(data, _)| names(data))
                .unwrap_or_default(),
            ..TrainingPlan::new(run.batch.clone(), layout, positions, run.steps)
                .of_unit(layout, config.optimizer.unit())
        }
    }

    /// The plan of evaluations, and the decoder of their samples.
    fn evaluation(&self) -> Option<(EvaluationPlan, &Decoder)> {
        let ((_, samples), settings) =
            self.run.evaluation.as_ref().zip(self.run.config.evaluation.as_ref())?;
        let plan = EvaluationPlan {
            samples: at_least_one(*samples),
            requests: self.run.questions.as_ref().map_or(0, |it| it.requests().len() as u64),
            every_steps: at_least_one(settings.every_steps),
        };
        Some((plan, self.evaluation_data.as_ref()?))
    }

    /// The state that all checkpoints of the run share, without their place in it.
    fn template(&self, start: &StartPoint) -> TrainerState {
        let mut template = self.run.initial_state(self.devices.kind());
        self.run.set_horizon(&mut template, start.horizon);
        template
    }

    fn checkpoint_files(&self, plan: Arc<FilePlan>) -> Result<CheckpointFiles> {
        Ok(CheckpointFiles {
            plan,
            config: self.run.model_json(),
            tokenizer: self.run.tokenizer()?,
            keep: self.run.config.checkpoint.keep,
        })
    }

    fn announce(&self, start: &StartPoint, workers: usize, device_changes: Vec<String>) {
        (self.observer)(&TrainEvent::Started {
            step: start.step,
            steps: self.run.steps,
            schedule_steps: start.horizon,
            parameters: self.run.model.layout().parameters(),
            workers,
            device: self.devices.in_words(),
            workers_per_device: self.devices.workers_per_device(),
            device_changes,
        });
    }
}

/// The files and rows of a data set.
fn names(data: &Mixture) -> SampleNames {
    let data = data.clone();
    SampleNames::new(move |position| {
        let (file, row) = origin(&data, position);
        SampleName { file: file.display().to_string(), row }
    })
}

fn at_least_one(number: u64) -> NonZeroU64 {
    NonZeroU64::new(number).unwrap_or(NonZeroU64::MIN)
}

/// Bytes held on a device since this call, where it has memory of its own.
fn device_bytes<B: Backend>(device: &Arc<B>) -> Option<DeviceBytes> {
    let device = Arc::clone(device);
    let free = move || device.free_memory_bytes().ok().flatten();
    let before = free()?;
    Some(Box::new(move || free().map(|now| before.saturating_sub(now) as u64)))
}

/// Runs the worker of `context` to its end.
pub(super) fn run_worker<B: Backend>(
    context: &mut WorkerContext<'_>,
    shared: &Shared<B>,
) -> std::result::Result<TrainSummary, Failure> {
    // Timely has started this thread.
    let _standard = FloatEnvironment::standard();
    let Shared { run, devices, .. } = shared;
    let (layout, states) = (run.model.layout(), run.config.optimizer.states());
    let rule = RuleStates { states, unit: run.config.optimizer.unit() };
    let elsewhere = elsewhere::furthest(context, run, devices.workers().len())?;
    let opened = match context.index() {
        0 => Some(OpenedRun::open(shared, elsewhere, context.abort())?),
        _ => None,
    };
    // Measured before the other workers have their state, which takes device memory.
    let device_bytes = opened.as_ref().and_then(|_| device_bytes(devices.first()));
    let (opened, origin) = match opened {
        Some(OpenedRun { folder, origin, device_changes }) => {
            (Some((folder, device_changes)), Some(origin))
        }
        None => (None, None),
    };
    let restored = distribute(context, origin, (layout, rule), &run.config.run.dir)?;
    let Restored { start, state, received_bytes } = restored;
    tracing::debug!(received_bytes, "the state is here");
    let token = opened.as_ref().and_then(|(folder, _)| folder.token());
    let in_folder = shared_folder::agree(context, token, &run.config.run.dir)?;
    let plan = Arc::new(shared.plan(&start));
    let evaluation = shared.evaluation();
    let (mut folder, mut journal) = (None, None);
    if let Some((held, device_changes)) = opened {
        write_down(shared, &held, &start)?;
        let evaluations = match evaluation {
            Some(_) => Evaluations::Logged,
            None => Evaluations::None,
        };
        let (observer, abort) = (&shared.observer, context.abort());
        let logged = (Workers::of(context.peers()), evaluations, &run.config.metrics);
        let mut opened = Journal::open(&held, start.step, logged, observer, abort)?;
        opened.questions = run.questions.clone();
        opened.device_bytes = device_bytes;
        if start.step < run.steps {
            let started = Started {
                step: start.step,
                steps_again: opened.steps_again(),
                workers: context.peers(),
                processes: context.processes(),
                device: devices.in_words(),
                unix_seconds: unix_seconds(SystemTime::now()),
            };
            opened.history(HistoryLine::Started(started))?;
        }
        journal = Some(opened);
        shared.announce(&start, context.peers(), device_changes);
        folder = Some(held);
    }
    let files = Arc::new(FilePlan::new(layout, states, run.file_bytes));
    let shares = Shares::new(in_folder.processes, devices.workers().len(), &files);
    let writers = shares.writers(&files, &plan.chunks);
    let share = shares.of(context.process());
    let checkpoints: Box<dyn StateSink> = match (&folder, &journal, share, in_folder.seen) {
        (Some(folder), Some(journal), Some(share), _) => {
            let observer = Arc::clone(&shared.observer);
            let parts = CheckpointParts {
                files: shared.checkpoint_files(files)?,
                share,
                writers,
                folder: Arc::clone(folder),
                template: shared.template(&start),
                data_versions: Arc::clone(&shared.data_versions),
                plan: Arc::clone(&plan),
                evaluation: evaluation.map(|(plan, _)| plan),
                written: journal.written(),
                abort: context.abort().clone(),
                on_commit: Box::new(move |step, path| {
                    observer(&TrainEvent::Checkpointed { step, path });
                }),
            };
            Box::new(RunCheckpoints::new(parts))
        }
        (None, None, Some(share), Some(folder)) => {
            let parts = ShareParts { plan: files, share, folder, writers };
            Box::new(SharedCheckpoints::new(parts))
        }
        _ => Box::new(WrittenElsewhere(writers)),
    };
    let config = &run.config;
    let local_index = context.index() % devices.workers().len();
    let backend = Arc::clone(&devices.workers()[local_index].backend);
    let connection = shared.communicators.take(context, &backend)?;
    let training = Training {
        plan,
        backend,
        model: Arc::clone(&shared.model),
        state,
        rule: ScheduledRule::new(&config.optimizer, config.schedule.clone(), start.horizon),
        connection,
        stop: Arc::clone(&shared.stop.asked),
        checkpoints: Some(checkpoints),
        abort: context.abort().clone(),
    };
    let journal = Arc::new(Mutex::new(journal));
    let last = Arc::new(Mutex::new(None));
    let (report_journal, last_report) = (Arc::clone(&journal), Arc::clone(&last));
    let communication_journal = Arc::clone(&journal);
    let evaluation_journal = Arc::clone(&journal);
    if context.processes() > 1 && shared.data_versions.may_move() {
        let threads = devices.workers().len();
        context.dataflow(|scope| share_decisions(scope, &shared.data_versions, threads));
    }
    context.dataflow::<u64, _, _>(|scope| {
        let evaluation =
            evaluation.map(|(plan, data)| Evaluation::new(plan, shared.source(data, &plan)));
        let samples = VersionedSamples::new(&shared.data_versions, scope.index());
        let streams = training.build(scope, samples, evaluation);
        streams.reports.inspect(move |report| {
            *lock(&last_report) = Some(*report);
            if let Some(journal) = lock(&report_journal).as_mut() {
                journal.report(report);
            }
        });
        streams.communication.inspect(move |report| {
            if let Some(journal) = lock(&communication_journal).as_mut() {
                journal.communication(report);
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
    let mut checkpoint = None;
    if let Some(folder) = &folder {
        let _in_store = folder.is_in_store().then(|| progress::during(Phase::UsingStore));
        if step > start.step {
            if let Some(journal) = lock(&journal).as_mut() {
                let ended = Ended { step, unix_seconds: unix_seconds(SystemTime::now()) };
                journal.history(HistoryLine::Ended(ended))?;
            }
            folder.finish()?;
        }
        checkpoint = folder.latest_checkpoint()?;
    }
    let metrics = lock(&journal).as_ref().and_then(|journal| journal.last().cloned());
    Ok(TrainSummary {
        step,
        steps: run.steps,
        stopped: step < run.steps,
        last: metrics,
        checkpoint,
    })
}
