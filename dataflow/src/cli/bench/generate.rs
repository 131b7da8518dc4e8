//! `tidemill bench generate`: tokens a second and memory of generation, batch by batch, of one model or of two side by side.
//!
//! Weights are random and prompts made up: neither changes how long anything takes. The whole way is measured, choosing
//! tokens on the host included: the likeliest each time, with nothing to stop at. Seconds run from the prompts on the host to
//! the last token.

use std::num::NonZeroUsize;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde::{Deserialize, Serialize};
use tidemill_kernels::cpu::return_freed_memory;
use tidemill_kernels::{Backend, Cpu, KernelError};
use tidemill_model::generation::{
    GenerationSettings, PIECE_POSITIONS, Prompt, SamplingSettings, Sequences, Written,
    generate_batch,
};
use tidemill_model::{
    Blueprint, Device, LanguageModel, ModelError, ModelSettings, Parameters, ResolvedModel,
};

use crate::cli::Format;
use crate::cli::chart::{self, Chart, Series};
use crate::cli::device::DeviceArguments;
use crate::cli::exit::ExitCode;
use crate::cli::output::{counted, note_line, result_line};
use crate::device::{Devices, WithBackend};
use crate::error::JobError;
use crate::memory::resident_bytes;

/// The keys that must agree with the keys of an earlier result.
const MEASURED: [&str; 7] =
    ["preset", "against", "prompt_tokens", "new_tokens", "batches", "threads", "DeviceArguments"];
/// The numbers that are drawn: beyond lie only numbers that nothing measured, and the limits of axes.
const DRAWN: RangeInclusive<f64> = 1e-12..=1e12;

/// Flags of `tidemill bench generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateBench {
    /// The model.
    #[arg(long, value_name = "P", default_value = "mamba-10m")]
    preset: String,
    /// Another model, for comparison.
    #[arg(long, value_name = "P")]
    against: Option<String>,
    /// Tokens of each prompt.
    #[arg(long, value_name = "N", default_value = "1024")]
    prompt_tokens: NonZeroUsize,
    /// Tokens added to each prompt.
    #[arg(long, value_name = "N", default_value = "1024")]
    new_tokens: NonZeroUsize,
    /// How many prompts at once, one measurement each.
    #[arg(
        long,
        value_name = "N,N,...",
        value_delimiter = ',',
        default_value = "1,2,4,8,16,32,64,128"
    )]
    batches: Vec<NonZeroUsize>,
    /// Compute threads of the CPU; by default one per core.
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
    #[command(flatten)]
    device: DeviceArguments,
    /// Measure nothing: print and draw what `--format json` printed once.
    #[arg(long, value_name = "FILE", conflicts_with_all = MEASURED)]
    from: Option<PathBuf>,
    /// Also draw the measurements, as SVG or PNG by the file's name.
    #[arg(long, value_name = "FILE", num_args = 1.., value_parser = chart::parse_path)]
    plot: Vec<PathBuf>,
    /// How the result is printed.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// All that was measured.
#[derive(Debug, Deserialize, Serialize)]
struct Report {
    device: String,
    prompt_tokens: usize,
    new_tokens: usize,
    models: Vec<ModelReport>,
}

/// The measurements of one model.
#[derive(Debug, Deserialize, Serialize)]
struct ModelReport {
    preset: String,
    parameters: usize,
    rows: Vec<Row>,
}

/// The measurements at one batch size.
#[derive(Debug, Deserialize, Serialize)]
struct Row {
    batch: usize,
    #[serde(flatten)]
    result: Outcome,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(untagged)]
enum Outcome {
    Measured(Measured),
    /// The device has not enough memory.
    OutOfMemory {
        out_of_memory: bool,
    },
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
struct Measured {
    /// From the prompts on the host to the last token.
    seconds: f64,
    /// The part of them until each sequence has its first new token.
    prompt_seconds: f64,
    prompt_tokens_per_second: f64,
    decode_tokens_per_second: f64,
    /// Taken of the device's memory, weights included; of the host's where the device has none.
    memory_bytes: Option<u64>,
}

pub(crate) fn run(bench: &GenerateBench) -> anyhow::Result<ExitCode> {
    let report = match &bench.from {
        Some(path) => Report::read(path)?,
        None => Report::measure(bench)?,
    };
    draw(&report, &bench.plot)?;
    print(&report, bench.format)?;
    Ok(ExitCode::SUCCESS)
}

impl Report {
    fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| JobError::file("reading", path, error))?;
        serde_json::from_str(&text).map_err(|error| {
            JobError::Config { origin: path.display().to_string(), what: error.to_string() }.into()
        })
    }

    fn measure(bench: &GenerateBench) -> anyhow::Result<Self> {
        let cores = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let threads = bench.threads.unwrap_or(cores);
        let presets = [Some(&bench.preset), bench.against.as_ref()].into_iter().flatten();
        let models = presets
            .clone()
            .map(|preset| build(bench, preset))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let mut report = Self {
            device: String::new(),
            prompt_tokens: bench.prompt_tokens.get(),
            new_tokens: bench.new_tokens.get(),
            models: Vec::new(),
        };
        for (preset, model) in presets.zip(models) {
            // Each opens the device by itself, so that it finds its memory empty.
            let smaller = "use a smaller --preset";
            let measuring = Measuring { bench, preset, model: &model };
            let (device, measured) = bench.device.open_one(threads, smaller, measuring)?;
            report.device = device;
            report.models.push(measured);
        }
        Ok(report)
    }
}

fn build(bench: &GenerateBench, preset: &str) -> anyhow::Result<Blueprint> {
    let settings = ModelSettings { preset: Some(preset.to_owned()), ..Default::default() };
    let ResolvedModel::New(config) = settings.resolve(None)? else {
        return Err(JobError::value("--preset", "a preset", preset).into());
    };
    let model = Blueprint::new(&config)?;
    let (prompt, new) = (bench.prompt_tokens.get(), bench.new_tokens.get());
    let most = model.build::<Cpu>()?.most_new_tokens(prompt, new);
    if most < new {
        let expected =
            format!("at most {most} after {prompt} tokens of prompt, by {preset}'s positions");
        return Err(JobError::value("--new-tokens", expected, new).into());
    }
    Ok(model)
}

/// Draws seconds, decoded tokens a second, and memory by batch.
fn draw(report: &Report, paths: &[PathBuf]) -> anyhow::Result<()> {
    let chart = |title: &str, unit: &str, value: fn(&Measured) -> Option<f64>| Chart {
        title: title.to_owned(),
        x_name: "batch size (prompts at once)".to_owned(),
        y_name: unit.to_owned(),
        series: report.models.iter().map(|model| model.series(value)).collect(),
    };
    let charts = [
        chart("Time from prompt to last token", "seconds", |measured| Some(measured.seconds)),
        chart("Decoding", "tokens / second", |measured| Some(measured.decode_tokens_per_second)),
        chart("Memory, weights included", "GB", |measured| {
            measured.memory_bytes.map(|bytes| bytes as f64 / 1e9)
        }),
    ];
    let Report { device, prompt_tokens, new_tokens, .. } = report;
    let title = format!("{prompt_tokens} tokens in, {new_tokens} out, on {device}");
    paths.iter().try_for_each(|path| chart::draw(&title, &charts, path))
}

impl ModelReport {
    fn series(&self, value: fn(&Measured) -> Option<f64>) -> Series {
        let point = |row: &Row| match &row.result {
            Outcome::Measured(measured) => Some([row.batch as f64, value(measured)?]),
            Outcome::OutOfMemory { .. } => None,
        };
        let refused = |row: &&Row| matches!(row.result, Outcome::OutOfMemory { .. });
        let name = match self.rows.iter().find(refused) {
            Some(row) => format!("{} (out of memory from {})", self.preset, row.batch),
            None => self.preset.clone(),
        };
        let points = self
            .rows
            .iter()
            .filter_map(point)
            .filter(|point| point.iter().all(|value| DRAWN.contains(value)));
        Series { name, points: points.collect() }
    }
}

fn print(report: &Report, format: Format) -> anyhow::Result<()> {
    if format == Format::Json {
        return result_line!("{}", serde_json::to_string(report)?);
    }
    let Report { device, prompt_tokens, new_tokens, models } = report;
    let prompt_tokens = counted(*prompt_tokens, "token", "tokens");
    result_line!("{prompt_tokens} in, {new_tokens} out, on {device}")?;
    for ModelReport { preset, parameters, rows } in models {
        result_line!("{preset}, {parameters} parameters")?;
        result_line!("  batch    seconds  prompt tokens/s  decode tokens/s  memory MB")?;
        for row in rows {
            result_line!("{}", row.in_words())?;
        }
    }
    Ok(())
}

impl Row {
    fn in_words(&self) -> String {
        let batch = self.batch;
        match &self.result {
            Outcome::Measured(measured) => {
                let Measured {
                    seconds,
                    prompt_tokens_per_second: prompt,
                    decode_tokens_per_second: decode,
                    memory_bytes,
                    ..
                } = measured;
                let memory =
                    memory_bytes.map_or("?".to_owned(), |bytes| (bytes / 1_000_000).to_string());
                format!("{batch:>7} {seconds:>10.2} {prompt:>16.0} {decode:>16.1} {memory:>10}")
            }
            Outcome::OutOfMemory { .. } => format!("{batch:>7}  out of memory"),
        }
    }
}

/// A model that waits for a device.
struct Measuring<'a> {
    bench: &'a GenerateBench,
    preset: &'a str,
    model: &'a Blueprint,
}

impl WithBackend for Measuring<'_> {
    type Output = anyhow::Result<(String, ModelReport)>;

    fn run<B: Backend>(self, devices: Devices<B>) -> Self::Output {
        let Self { bench, preset, model } = self;
        // Or memory that the model before this one has given back would count as this one's.
        return_freed_memory();
        let model = &model.build()?;
        let backend = devices.first().as_ref();
        let free_before = backend.free_memory_bytes()?;
        let mut stream = backend.device_stream()?;
        let mut device = Device { backend, stream: &mut stream };
        let parameters = Parameters::from_host(&mut device, model.layout(), &model.initialize(17))?;
        let mut batches: Vec<usize> = bench.batches.iter().map(|batch| batch.get()).collect();
        // Ascending: a device keeps memory that was lent for the next batch.
        batches.sort_unstable();
        batches.dedup();
        let mut rows = Vec::new();
        for batch in batches {
            let measured = measure(&mut device, bench, model, &parameters, batch);
            let result = match measured {
                Ok((times, held)) => {
                    let taken =
                        free_before.zip(held.free).map(|(before, now)| before.saturating_sub(now));
                    let taken = taken.or(held.resident).map(|bytes| bytes as u64);
                    Outcome::Measured(times.measured(bench, batch, taken))
                }
                Err(ModelError::Kernel(KernelError::OutOfMemory { .. })) => {
                    Outcome::OutOfMemory { out_of_memory: true }
                }
                Err(error) => return Err(error.into()),
            };
            let row = Row { batch, result };
            note_line!("{preset}: {}", row.in_words());
            rows.push(row);
        }
        let parameters = model.layout().parameters();
        Ok((devices.in_words(), ModelReport { preset: preset.to_owned(), parameters, rows }))
    }
}

/// Memory while sequences are held.
struct Held {
    /// Bytes of the device that are free, where it has memory of its own.
    free: Option<usize>,
    /// Bytes of this process in host memory.
    resident: Option<usize>,
}

/// Durations from the beginning until the prompts were read, and until the last token.
struct Times {
    prompt: Duration,
    all: Duration,
}

impl Times {
    fn measured(&self, bench: &GenerateBench, batch: usize, memory_bytes: Option<u64>) -> Measured {
        let (prompt, all) = (self.prompt.as_secs_f64(), self.all.as_secs_f64());
        let decoded = (batch * (bench.new_tokens.get() - 1)) as f64;
        Measured {
            seconds: all,
            prompt_seconds: prompt,
            prompt_tokens_per_second: (batch * bench.prompt_tokens.get()) as f64 / prompt,
            decode_tokens_per_second: if decoded > 0.0 { decoded / (all - prompt) } else { 0.0 },
            memory_bytes,
        }
    }
}

fn measure<B: Backend>(
    device: &mut Device<'_, B>,
    bench: &GenerateBench,
    model: &LanguageModel<B>,
    parameters: &Parameters<B>,
    batch: usize,
) -> Result<(Times, Held), ModelError> {
    let (prompt_tokens, new_tokens) = (bench.prompt_tokens.get(), bench.new_tokens.get());
    let positions = prompt_tokens.saturating_add(new_tokens);
    let mut sequences = Sequences::new(device, model, parameters, batch, positions)?;
    // Kernels are compiled, and products planned, before anything is measured.
    let mut write = |prompt_tokens: usize, new_tokens: usize| {
        let tokens: Vec<Vec<u32>> =
            (0..batch).map(|index| made_up(index, prompt_tokens, model.vocab_size())).collect();
        let prompts: Vec<_> = tokens.iter().map(|tokens| Prompt { tokens, index: 0 }).collect();
        let settings = GenerationSettings {
            max_new_tokens: new_tokens,
            stop_token: None,
            sampling: SamplingSettings { temperature: 0.0, ..Default::default() },
        };
        let (started, mut prompt, mut chosen) = (Instant::now(), Duration::ZERO, 0);
        let on_written = |_, written: Written<'_>| {
            chosen += usize::from(matches!(written, Written::Token(_)));
            if chosen == batch && prompt.is_zero() {
                prompt = started.elapsed();
            }
        };
        generate_batch(device, &mut sequences, &prompts, &settings, on_written)?;
        Ok::<_, ModelError>(Times { prompt, all: started.elapsed() })
    };
    write(prompt_tokens.min(PIECE_POSITIONS), new_tokens.min(4))?;
    let times = write(prompt_tokens, new_tokens)?;
    // Measured while the sequences' states are still held.
    let held = Held { free: device.backend.free_memory_bytes()?, resident: resident_bytes() };
    Ok((times, held))
}

/// A prompt that no other is.
fn made_up(index: usize, tokens: usize, vocab_size: usize) -> Vec<u32> {
    let token = |place: usize| {
        let mixed = ((index << 32 | place) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((mixed >> 33) % vocab_size as u64) as u32
    };
    (0..tokens).map(token).collect()
}
