//! `tidemill bench train`: tokens a second through the whole graph, on made-up tokens.
//!
//! Workers are threads of this process, of several that are started here, or of a cluster's, as those of `tidemill train` are.
//! Worker 0, one of process 0, measures for all: a step is a step of all workers.

mod outcome;

use crate::cli::exit::ExitCode;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use clap::Args;
use tidemill_kernels::backend::KernelTime;
use tidemill_kernels::{Backend, KernelError};
use tidemill_model::optimizer::OptimizerSettings;
use tidemill_model::schedule::{ScheduleName, ScheduleSettings};
use tidemill_model::{Blueprint, LanguageModel, ModelSettings, ResolvedModel, Tokens};
use timely::dataflow::operators::Inspect;

use self::outcome::{Measured, Outcome};
use crate::batch::{BatchPlan, BatchSettings, MicrobatchGrains, MicrobatchMemory};
use crate::cli::Format;
use crate::cli::device::DeviceArguments;
use crate::cli::processes::{ProcessArguments, SECRET_HELP};
use crate::cli::shard::ShardChoice;
use crate::cluster::{Actor, ClusterSettings, Failure, execute};
use crate::communicators::Communicators;
use crate::device::{Devices, LocalWorkers, WithBackend, kind_in_words};
use crate::error::JobError;
use crate::job::memory::{FittingDevices, PlanMemory};
use crate::operators::{
    InitialState, SampleSource, ScheduledRule, StepReport, Training, TrainingPlan, Wake,
};

/// The argument by which a run shards its parameters too.
const SHARD: &str = "--shard parameters";

/// Flags of `tidemill bench train`.
#[derive(Clone, Debug, Args)]
#[command(after_help = SECRET_HELP)]
pub(crate) struct TrainBench {
    /// The model.
    #[arg(long, value_name = "P", default_value = "mamba-10m")]
    preset: String,
    /// Tokens of the vocabulary; by default the preset's.
    #[arg(long, value_name = "N")]
    vocab_size: Option<usize>,
    /// Predicted tokens per sample.
    #[arg(long, value_name = "N", default_value = "512")]
    seq_len: NonZeroUsize,
    /// Samples of a step, over all workers.
    #[arg(long, value_name = "N", default_value_t = 4)]
    samples_per_step: usize,
    /// Steps that are measured, after one that is not.
    #[arg(long, value_name = "N", default_value = "10")]
    steps: NonZeroUsize,
    #[command(flatten)]
    processes: ProcessArguments,
    /// Lanes; by default the largest power of two up to 8 and to the samples.
    #[arg(long, value_name = "N")]
    lanes: Option<usize>,
    /// Samples of a grain.
    #[arg(long, value_name = "N", default_value_t = 1)]
    grain_samples: usize,
    /// Grains in flight on a worker.
    #[arg(long, value_name = "N", default_value_t = 4)]
    microbatch_grains: usize,
    /// The state that workers share out, in place of holding all of it each.
    #[arg(long, value_enum, default_value = "optimizer")]
    shard: ShardChoice,
    /// Compute threads of a CPU worker.
    #[arg(long, value_name = "N", default_value = "1")]
    threads: NonZeroUsize,
    #[command(flatten)]
    device: DeviceArguments,
    /// Also say where device time goes in the last step, kernel by kernel; GPUs only, and of worker 0's alone. Slows that step
    /// a little.
    #[arg(long)]
    profile: bool,
    /// How the result is printed, by process 0 alone; memory is its own and that of worker 0's device.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub(crate) fn run(bench: &TrainBench) -> anyhow::Result<ExitCode> {
    let batch = bench.batch();
    let cut = bench.cut(&batch).map_err(by_flag)?;
    let model = bench.model()?;
    let device = bench.device.choice(bench.threads)?;
    let place = bench.processes.place(&device, cut.lanes())?;
    let workers = place.workers();
    cut.worker_lanes(0, workers).map_err(by_flag)?;
    let settled = |threads| Ok(bench.processes.settled(threads));
    place.bench(settled, |cluster| {
        let local = LocalWorkers::of(&cluster);
        let (process, processes) = (cluster.process, cluster.processes());
        let fitting = FittingDevices::default();
        let measurement =
            Measurement { bench, batch, cut: &cut, model: &model, cluster, fitting: &fitting };
        let smaller = || bench.smaller(&cut, fitting.way(workers, SHARD));
        let measured = bench.device.open(&device, local, smaller, measurement)?;
        if process == 0 {
            let outcome = Outcome { bench, cut: &cut, model: &model, workers, processes, measured };
            outcome.print()?;
        }
        Ok(ExitCode::SUCCESS)
    })
}

impl TrainBench {
    fn batch(&self) -> BatchSettings {
        BatchSettings {
            samples_per_step: Some(self.samples_per_step),
            lanes: self.lanes,
            grain_samples: self.grain_samples,
            microbatch_grains: MicrobatchGrains::Grains(self.microbatch_grains),
        }
    }

    fn cut(&self, batch: &BatchSettings) -> crate::error::Result<BatchPlan> {
        Ok(batch.plan(MicrobatchMemory::default())?.sharded(self.shard.into()))
    }

    fn model(&self) -> anyhow::Result<Blueprint> {
        let settings = ModelSettings {
            preset: Some(self.preset.clone()),
            vocab_size: self.vocab_size,
            ..Default::default()
        };
        let ResolvedModel::New(config) = settings.resolve(None)? else {
            return Err(JobError::value("--preset", "a preset", &self.preset).into());
        };
        if let Some(most) = config.learned_positions()
            && self.seq_len.get() > most
        {
            let expected = format!("at most {most}, the positions of {}", self.preset);
            return Err(JobError::value("--seq-len", expected, self.seq_len).into());
        }
        Ok(Blueprint::new(&config)?)
    }

    /// Ways to make room on devices: `more` of them, if that would do, or settings that need less of each.
    fn smaller(&self, cut: &BatchPlan, more: Option<String>) -> Vec<String> {
        let lower = match cut.microbatch_grains() {
            1 => "lower --seq-len, or use a smaller --preset".to_owned(),
            grains => format!("lower --microbatch-grains, which is {grains}"),
        };
        more.into_iter().chain([lower]).collect()
    }

    /// Settings that must be equal in all processes, by flag.
    fn identity(&self, cut: &BatchPlan) -> impl Iterator<Item = (String, String)> {
        let vocab_size = self.vocab_size.map_or("the preset's".to_owned(), |size| size.to_string());
        let flags = [
            ("--preset", self.preset.clone()),
            ("--vocab-size", vocab_size),
            ("--seq-len", self.seq_len.to_string()),
            ("--samples-per-step", cut.samples_per_step().to_string()),
            ("--steps", self.steps.to_string()),
            ("--lanes", cut.lanes().to_string()),
            ("--grain-samples", cut.grain_samples().to_string()),
            ("--shard", cut.sharding().word().to_owned()),
        ];
        flags.into_iter().map(|(flag, value)| (flag.to_owned(), value))
    }
}

/// An error about a key of `[batch]` as one about the flag of that name.
fn by_flag(error: JobError) -> JobError {
    let JobError::Value { key, expected, found } = error else { return error };
    let expected = expected.replace("batch.", "--");
    let key = match key.strip_prefix("batch.") {
        Some(name) => format!("--{}", name.replace('_', "-")),
        None if key == "workers" => "-w".to_owned(),
        None => key,
    };
    JobError::Value { key, expected, found }
}

/// A model that waits for its devices.
struct Measurement<'a> {
    bench: &'a TrainBench,
    batch: BatchSettings,
    cut: &'a BatchPlan,
    model: &'a Blueprint,
    cluster: ClusterSettings,
    /// Called with the number of devices like these that the run would fit on.
    fitting: &'a FittingDevices,
}

impl WithBackend for Measurement<'_> {
    type Output = anyhow::Result<Measured>;

    fn run<B: Backend>(self, devices: Devices<B>) -> Self::Output {
        let Self { bench, batch, cut, model, mut cluster, fitting } = self;
        let plan = PlanMemory {
            optimizer: &OptimizerSettings::default(),
            model,
            batch: &batch,
            sharding: bench.shard.into(),
            positions: bench.seq_len.get(),
            workers: cluster.workers * cluster.processes(),
            workers_of_process: cluster.workers,
            workers_per_device: devices.workers_per_device(),
        };
        fitting.find(&plan, &devices, cut.microbatch_samples())?;
        cluster.identity.extend(bench.identity(cut));
        cluster.identity.insert("--backend (its kind)".to_owned(), kind_in_words(devices.kind()));
        let precision = devices.precision().word().to_owned();
        cluster.identity.insert("--precision".to_owned(), precision);
        let free_before = devices.first().free_memory_bytes()?;
        let device = devices.in_words();
        let Seen { reports, free_bytes, profile } =
            measure(bench, cut, Arc::new(model.build()?), devices, cluster)?;
        let device_memory_bytes = match (free_before, free_bytes) {
            (Some(before), Some(after)) => Some(before.saturating_sub(after)),
            _ => None,
        };
        Ok(Measured { device, reports, device_memory_bytes, profile })
    }
}

/// The measurements of one worker.
#[derive(Default)]
struct Seen {
    /// Reports, and when they came.
    reports: Vec<(StepReport, Instant)>,
    /// Free memory of the worker's device at the last step.
    free_bytes: Option<usize>,
    /// Device time of the last step by kernel, where it was asked for.
    profile: Vec<KernelTime>,
}

impl Seen {
    /// Records the state that the last step leaves on its device.
    fn look_at<B: Backend>(&mut self, backend: &B, profiled: bool) -> Result<(), KernelError> {
        self.free_bytes = backend.free_memory_bytes()?;
        if profiled {
            self.profile = backend.finish_profile()?;
        }
        Ok(())
    }
}

/// Measures the first worker of this process: one step that warms up, and those that count.
fn measure<B: Backend>(
    bench: &TrainBench,
    batch: &BatchPlan,
    model: Arc<LanguageModel<B>>,
    devices: Devices<B>,
    cluster: ClusterSettings,
) -> anyhow::Result<Seen> {
    let steps = bench.steps.get() as u64 + 1;
    let positions = bench.seq_len.get();
    let plan = Arc::new(TrainingPlan::new(batch.clone(), model.layout(), positions, steps));
    let parameters = Arc::new(model.initialize(17));
    let vocab_size = model.vocab_size() as u64;
    let profiled = bench.profile;
    let schedule = ScheduleSettings {
        name: ScheduleName::Constant,
        warmup_steps: Some(0),
        ..Default::default()
    };
    let workers = cluster.workers * cluster.processes();
    let library = || devices.first().collective_library();
    let (backends, lanes) = (devices.backends(), batch.lane_schedule(workers)?);
    let sharding = batch.sharding();
    let communicators = Communicators::new(&backends, &cluster, lanes, sharding, library)?;
    let results = execute(cluster, move |context| {
        let local_index = context.index() % devices.workers().len();
        let backend = Arc::clone(&devices.workers()[local_index].backend);
        let connection = communicators.take(context, &backend)?;
        let training = Training {
            plan: Arc::clone(&plan),
            backend: Arc::clone(&backend),
            model: Arc::clone(&model),
            state: InitialState { parameters: Arc::clone(&parameters), states: None },
            rule: ScheduledRule::new(&OptimizerSettings::default(), schedule.clone(), steps),
            connection,
            stop: Arc::new(AtomicBool::new(false)),
            checkpoints: None,
            abort: context.abort().clone(),
        };
        let seen = Arc::new(Mutex::new(Seen::default()));
        let (reports, abort) = (Arc::clone(&seen), context.abort().clone());
        let actor = Actor::Worker(context.index());
        context.dataflow::<u64, _, _>(|scope| {
            let source = MadeUpSamples { vocab_size, tokens: positions + 1, requested: Vec::new() };
            training.build(scope, source, None).reports.inspect(move |report| {
                let mut seen = reports.lock().unwrap_or_else(PoisonError::into_inner);
                seen.reports.push((*report, Instant::now()));
                // A report comes between a step's gradient and its update: from one to the next is a whole step.
                if profiled && report.step + 1 == steps {
                    backend.start_profile();
                }
                if report.last {
                    let looked = seen.look_at(backend.as_ref(), profiled);
                    looked.unwrap_or_else(|error| abort.fail(actor.clone(), error));
                }
            });
        });
        context.run_until_done()?;
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::take(&mut *seen))
    })?;
    Ok(results.into_iter().next().unwrap_or_default())
}

/// Tokens that follow from their place, so that no reader is measured.
struct MadeUpSamples {
    vocab_size: u64,
    tokens: usize,
    requested: Vec<Range<u64>>,
}

impl SampleSource for MadeUpSamples {
    type Sample = Tokens;

    fn request(&mut self, positions: Range<u64>) {
        self.requested.push(positions);
    }

    fn poll(&mut self) -> Result<Option<(u64, Tokens)>, Failure> {
        while let Some(first) = self.requested.first_mut() {
            if let Some(position) = first.next() {
                let token = |index: usize| {
                    let mixed = (position << 20 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                    ((mixed >> 33) % self.vocab_size) as u32
                };
                return Ok(Some((position, (0..self.tokens).map(token).collect())));
            }
            self.requested.remove(0);
        }
        Ok(None)
    }

    fn set_wake(&mut self, _wake: Wake) {}
}

#[cfg(test)]
mod tests;
