//! `tidemill bench train`: tokens a second through the whole graph, on made-up tokens.

use crate::cli::exit::ExitCode;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use clap::Args;
use tidemill_kernels::backend::KernelTime;
use tidemill_kernels::gpu::collectives::{CollectiveLibrary, NCCL};
use tidemill_kernels::{Backend, KernelError};
use tidemill_model::optimizer::OptimizerSettings;
use tidemill_model::schedule::{ScheduleName, ScheduleSettings};
use tidemill_model::{Model, ModelSettings, ResolvedModel};
use tidemill_streaming_data::reader::Sample;
use timely::dataflow::operators::Inspect;

use super::peak_memory_bytes;
use crate::batch::{BatchPlan, BatchSettings, MicrobatchGrains, MicrobatchMemory};
use crate::cli::Format;
use crate::cli::device::DeviceArguments;
use crate::cli::output::result_line;
use crate::cluster::{Actor, ClusterSettings, Failure, execute};
use crate::device::{Communicators, Devices, LocalWorkers, WithBackend};
use crate::error::JobError;
use crate::operators::{
    InitialState, SampleSource, StepReport, Training, TrainingPlan, UpdateRule, Wake,
};

/// Flags of `tidemill bench train`.
#[derive(Debug, Args)]
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
    /// Samples of a step.
    #[arg(long, value_name = "N", default_value_t = 4)]
    samples_per_step: usize,
    /// Steps that are measured, after one that is not.
    #[arg(long, value_name = "N", default_value = "10")]
    steps: NonZeroUsize,
    /// Workers; by default one per core or GPU, up to the lanes.
    #[arg(short = 'w', long, value_name = "W")]
    workers: Option<usize>,
    /// Lanes; by default the largest power of two up to 8 and to the samples.
    #[arg(long, value_name = "N")]
    lanes: Option<usize>,
    /// Samples of a grain.
    #[arg(long, value_name = "N", default_value_t = 1)]
    grain_samples: usize,
    /// Grains in flight on a worker.
    #[arg(long, value_name = "N", default_value_t = 4)]
    microbatch_grains: usize,
    /// Compute threads of a CPU worker.
    #[arg(long, value_name = "N", default_value = "1")]
    threads: NonZeroUsize,
    #[command(flatten)]
    device: DeviceArguments,
    /// Also say where device time goes in the last step, kernel by kernel; GPUs only. Slows that step a little.
    #[arg(long)]
    profile: bool,
    /// How the result is printed.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub(crate) fn run(bench: &TrainBench) -> anyhow::Result<ExitCode> {
    let settings = ModelSettings {
        preset: Some(bench.preset.clone()),
        vocab_size: bench.vocab_size,
        ..Default::default()
    };
    let ResolvedModel::New(config) = settings.resolve(None)? else {
        return Err(JobError::value("--preset", "a preset", &bench.preset).into());
    };
    if let Some(most) = config.learned_positions()
        && bench.seq_len.get() > most
    {
        let expected = format!("at most {most}, the positions of {}", bench.preset);
        return Err(JobError::value("--seq-len", expected, bench.seq_len).into());
    }
    let batch = BatchSettings {
        samples_per_step: Some(bench.samples_per_step),
        lanes: bench.lanes,
        grain_samples: bench.grain_samples,
        microbatch_grains: MicrobatchGrains::Grains(bench.microbatch_grains),
    };
    let batch = batch.plan(MicrobatchMemory::default())?;
    let device = bench.device.choice(bench.threads)?;
    let workers = bench.workers.unwrap_or_else(|| device.default_workers(batch.lanes(), 1));
    batch.worker_lanes(0, workers)?;
    let model = Arc::new(Model::new(&config)?);
    let measurement = Measurement { bench, batch: &batch, model: Arc::clone(&model) };
    let smaller = match batch.microbatch_grains() {
        1 => "lower --seq-len, or use a smaller --preset".to_owned(),
        grains => format!("lower --microbatch-grains, which is {grains}"),
    };
    let workers_here = LocalWorkers::alone(workers);
    let Measured { device, reports, device_memory_bytes, profile } =
        bench.device.open(&device, workers_here, &smaller, measurement)?;
    let (first, last) = (reports.first(), reports.last());
    let (Some((first, started)), Some((last, ended))) = (first, last) else {
        anyhow::bail!("no step was reported");
    };
    let tokens: u64 = reports.iter().skip(1).map(|(report, _)| report.tokens).sum();
    let seconds = (*ended - *started).as_secs_f64();
    let tokens_per_second = tokens as f64 / seconds;
    let parameter_count = model.layout().parameters();
    // Forward and backward of the matrix products: 6 operations a parameter and token.
    let gigaflops = 6.0 * parameter_count as f64 * tokens_per_second / 1e9;
    match bench.format {
        Format::Json => result_line!(
            "{}",
            serde_json::json!({
                "tokens_per_second": tokens_per_second,
                "step_milliseconds": seconds * 1e3 / bench.steps.get() as f64,
                "preset": bench.preset,
                "parameters": parameter_count,
                "device": device,
                "seq_len": bench.seq_len,
                "samples_per_step": batch.samples_per_step(),
                "lanes": batch.lanes(),
                "grain_samples": batch.grain_samples(),
                "microbatch_grains": batch.microbatch_grains(),
                "workers": workers,
                "threads": bench.threads,
                "matmul_gigaflops": gigaflops,
                "peak_memory_bytes": peak_memory_bytes(),
                "device_memory_bytes": device_memory_bytes,
                "profile": profile.iter().map(profile_json).collect::<Vec<_>>(),
                "first_loss": first.loss,
                "last_loss": last.loss,
            })
        )?,
        Format::Text => {
            result_line!(
                "{tokens_per_second:.0} tokens/s: {} with {workers} workers on {device}, lanes {}, {} samples of {} tokens a step",
                bench.preset,
                batch.lanes(),
                batch.samples_per_step(),
                bench.seq_len
            )?;
            result_line!(
                "its matrix products alone are {gigaflops:.0} GFLOP/s, which bound it: compare the device's peak"
            )?;
            if let Some(bytes) = peak_memory_bytes() {
                result_line!("peak memory {:.0} MB", bytes as f64 / 1e6)?;
            }
            if let Some(bytes) = device_memory_bytes {
                result_line!("memory of the device {:.0} MB", bytes as f64 / 1e6)?;
            }
            let total: f64 = profile.iter().map(|time| time.milliseconds).sum();
            for KernelTime { kernel, launches, milliseconds } in &profile {
                let percent = 100.0 * milliseconds / total;
                result_line!("{milliseconds:>10.2} ms {percent:>5.1} % {launches:>7} x {kernel}")?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn profile_json(time: &KernelTime) -> serde_json::Value {
    let KernelTime { kernel, launches, milliseconds } = time;
    serde_json::json!({ "kernel": kernel, "launches": launches, "milliseconds": milliseconds })
}

/// A model that waits for its devices.
struct Measurement<'a> {
    bench: &'a TrainBench,
    batch: &'a BatchPlan,
    model: Arc<Model>,
}

/// What was seen.
struct Measured {
    /// What computed, in words.
    device: String,
    /// The reports of one warm-up step and the measured ones, and when they came.
    reports: Vec<(StepReport, Instant)>,
    /// What the run took of the first worker's device, where that has a memory of its own.
    device_memory_bytes: Option<usize>,
    /// Device time of the last step by kernel, where it was asked for.
    profile: Vec<KernelTime>,
}

impl WithBackend for Measurement<'_> {
    type Output = anyhow::Result<Measured>;

    fn run<B: Backend>(self, devices: Devices<B>) -> Self::Output {
        let Self { bench, batch, model } = self;
        let free_before = devices.first().free_memory_bytes()?;
        let device = devices.in_words();
        let Seen { reports, free_bytes, profile } = measure(bench, batch, model, devices)?;
        let device_memory_bytes = match (free_before, free_bytes) {
            (Some(before), Some(after)) => Some(before.saturating_sub(after)),
            _ => None,
        };
        Ok(Measured { device, reports, device_memory_bytes, profile })
    }
}

/// What one worker saw.
#[derive(Default)]
struct Seen {
    /// Reports, and when they came.
    reports: Vec<(StepReport, Instant)>,
    /// What memory of the worker's device was free at the last.
    free_bytes: Option<usize>,
    /// Device time of the last step by kernel, where it was asked for.
    profile: Vec<KernelTime>,
}

impl Seen {
    /// What the last step leaves to be seen on its device.
    fn look_at<B: Backend>(&mut self, backend: &B, profiled: bool) -> Result<(), KernelError> {
        self.free_bytes = backend.free_memory_bytes()?;
        if profiled {
            self.profile = backend.finish_profile()?;
        }
        Ok(())
    }
}

/// What the first worker sees of one step that warms up and those that are measured.
fn measure<B: Backend>(
    bench: &TrainBench,
    batch: &BatchPlan,
    model: Arc<Model>,
    devices: Devices<B>,
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
    let workers = devices.workers().len();
    let library = || CollectiveLibrary::open(NCCL);
    let (backends, lanes) = (devices.backends(), batch.lanes());
    let communicators = Communicators::new(&backends, workers, lanes, library)?;
    let results = execute(ClusterSettings::threads(workers), move |context| {
        let backend = Arc::clone(&devices.workers()[context.index()].backend);
        let communicator = communicators.take(context, &backend)?;
        let training = Training {
            plan: Arc::clone(&plan),
            backend: Arc::clone(&backend),
            model: Arc::clone(&model),
            state: InitialState { parameters: Arc::clone(&parameters), moments: None },
            rule: UpdateRule::new(OptimizerSettings::default(), schedule.clone(), steps),
            communicator,
            stop: Arc::new(AtomicBool::new(false)),
            checkpoints: None,
            abort: context.abort().clone(),
        };
        let seen = Arc::new(Mutex::new(Seen::default()));
        let (reports, abort) = (Arc::clone(&seen), context.abort().clone());
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
                    looked.unwrap_or_else(|error| abort.fail(Actor::Worker(0), error));
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
    fn request(&mut self, positions: Range<u64>) {
        self.requested.push(positions);
    }

    fn poll(&mut self) -> Result<Option<Sample>, Failure> {
        while let Some(first) = self.requested.first_mut() {
            if let Some(position) = first.next() {
                let token = |index: usize| {
                    let mixed = (position << 20 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                    ((mixed >> 33) % self.vocab_size) as u32
                };
                let tokens = (0..self.tokens).map(token).collect();
                return Ok(Some(Sample { position, tokens }));
            }
            self.requested.remove(0);
        }
        Ok(None)
    }

    fn set_wake(&mut self, _wake: Wake) {}
}
