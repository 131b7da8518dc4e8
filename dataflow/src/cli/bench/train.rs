//! `tidemill bench train`: tokens a second through the whole graph, on made-up tokens.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use clap::Args;
use tidemill_kernels::Cpu;
use tidemill_model::optimizer::OptimizerSettings;
use tidemill_model::schedule::{ScheduleName, ScheduleSettings};
use tidemill_model::{Mamba, ModelSettings, ResolvedModel, Trainable};
use tidemill_streaming_data::reader::Sample;
use timely::dataflow::operators::Inspect;

use crate::batch::{BatchPlan, BatchSettings, MicrobatchGrains, MicrobatchMemory};
use crate::cli::Format;
use crate::cli::output::result_line;
use crate::cluster::{ClusterSettings, Failure, execute};
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
    /// Predicted tokens per sample.
    #[arg(long, value_name = "N", default_value = "512")]
    seq_len: NonZeroUsize,
    /// Samples of a step.
    #[arg(long, value_name = "N", default_value_t = 4)]
    samples_per_step: usize,
    /// Steps that are measured, after one that is not.
    #[arg(long, value_name = "N", default_value = "10")]
    steps: NonZeroUsize,
    /// Workers; by default one per core, up to the lanes.
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
    /// Compute threads of a worker.
    #[arg(long, value_name = "N", default_value = "1")]
    threads: NonZeroUsize,
    /// How the result is printed.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub(crate) fn run(bench: &TrainBench) -> anyhow::Result<ExitCode> {
    let settings = ModelSettings { preset: Some(bench.preset.clone()), ..Default::default() };
    let ResolvedModel::Mamba(config) = settings.resolve(None)? else {
        return Err(JobError::value("--preset", "a preset", &bench.preset).into());
    };
    let batch = BatchSettings {
        samples_per_step: bench.samples_per_step,
        lanes: bench.lanes,
        grain_samples: bench.grain_samples,
        microbatch_grains: MicrobatchGrains::Grains(bench.microbatch_grains),
    };
    let batch = batch.plan(MicrobatchMemory { sample_bytes: 0, workspace_bytes: 0 })?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let workers = bench.workers.unwrap_or(cores.min(batch.lanes()));
    batch.worker_lanes(0, workers)?;
    let model = Arc::new(Mamba::new(&config)?);
    let parameters = Arc::new(Trainable::<Cpu>::initialize(model.as_ref(), 17));
    let parameter_count = Trainable::<Cpu>::layout(model.as_ref()).parameters();
    let reports = measure(bench, &batch, workers, model, parameters)?;
    let (first, last) = (reports.first(), reports.last());
    let (Some((first, started)), Some((last, ended))) = (first, last) else {
        anyhow::bail!("no step was reported");
    };
    let tokens: u64 = reports.iter().skip(1).map(|(report, _)| report.tokens).sum();
    let seconds = (*ended - *started).as_secs_f64();
    let tokens_per_second = tokens as f64 / seconds;
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
                "seq_len": bench.seq_len,
                "samples_per_step": batch.samples_per_step(),
                "lanes": batch.lanes(),
                "workers": workers,
                "threads": bench.threads,
                "matmul_gigaflops": gigaflops,
                "peak_memory_bytes": peak_memory_bytes(),
                "first_loss": first.loss,
                "last_loss": last.loss,
            })
        )?,
        Format::Text => {
            result_line!(
                "{tokens_per_second:.0} tokens/s: {} with {workers} workers, lanes {}, {} samples of {} tokens a step",
                bench.preset,
                batch.lanes(),
                batch.samples_per_step(),
                bench.seq_len
            )?;
            result_line!(
                "its matrix products alone are {gigaflops:.0} GFLOP/s, which bound it: compare one core's peak"
            )?;
            if let Some(bytes) = peak_memory_bytes() {
                result_line!("peak memory {:.0} MB", bytes as f64 / 1e6)?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// One warm-up step and the measured ones: reports, and when they came.
fn measure(
    bench: &TrainBench,
    batch: &BatchPlan,
    workers: usize,
    model: Arc<Mamba>,
    parameters: Arc<Vec<f32>>,
) -> anyhow::Result<Vec<(StepReport, Instant)>> {
    let layout = Trainable::<Cpu>::layout(model.as_ref());
    let steps = bench.steps.get() as u64 + 1;
    let plan = Arc::new(TrainingPlan::new(batch.clone(), layout, bench.seq_len.get(), steps));
    let backend = Arc::new(Cpu::new(bench.threads)?);
    let vocab_size = Trainable::<Cpu>::vocab_size(model.as_ref()) as u64;
    let tokens = bench.seq_len.get() + 1;
    let schedule =
        ScheduleSettings { name: ScheduleName::Constant, warmup_steps: 0, ..Default::default() };
    let results = execute(ClusterSettings::threads(workers), move |context| {
        let training = Training {
            plan: Arc::clone(&plan),
            backend: Arc::clone(&backend),
            model: Arc::clone(&model),
            state: InitialState { parameters: Arc::clone(&parameters), moments: None },
            rule: UpdateRule::new(OptimizerSettings::default(), schedule.clone(), steps),
            stop: Arc::new(AtomicBool::new(false)),
            checkpoints: None,
            abort: context.abort().clone(),
        };
        let reports = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&reports);
        context.dataflow::<u64, _, _>(|scope| {
            let source = MadeUpSamples { vocab_size, tokens, requested: Vec::new() };
            training.build(scope, source, None).reports.inspect(move |report| {
                seen.lock().unwrap_or_else(PoisonError::into_inner).push((*report, Instant::now()));
            });
        });
        context.run_until_done()?;
        let mut reports = reports.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::take(&mut *reports))
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

/// The most memory that this process has had, where the system says so.
fn peak_memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}
