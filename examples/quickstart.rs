//! The whole of Tidemill in a few minutes on two cores: prepare, train, stop, resume, generate.
//!
//! ```text
//! cargo run --release --example quickstart
//! ```
//!
//! It learns to write Rust, byte by byte, from the sources that cargo has already downloaded. It
//! stops half-way and resumes twice: with one worker and with two. The weights are the same to the
//! bit.
//!
//! `--short` does the same in a fraction of the time (and learns little); `--keep DIR` leaves everything in DIR.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use tidemill::inference::LoadedModel;
use tidemill::job::{ResolvedRun, RunConfig, TrainEvent, TrainOptions, TrainSummary, train};
use tidemill::kernels::Cpu;
use tidemill::metrics::{self, StepMetrics};
use tidemill::model::generation::{GenerationSettings, SamplingSettings};
use tidemill::streaming_data::prepare::{ByteTokenizer, PrepareSettings, prepare};

/// The amount of work.
struct Size {
    corpus_bytes: u64,
    seq_len: usize,
    samples_per_step: usize,
    steps: u64,
}

/// A crate with more Rust than this is mostly generated, such as bindings of an operating system.
const MOST_BYTES_OF_CRATE: u64 = 2 << 20;

const FULL: Size = Size { corpus_bytes: 16 << 20, seq_len: 512, samples_per_step: 8, steps: 146 };
const SHORT: Size = Size { corpus_bytes: 1 << 20, seq_len: 128, samples_per_step: 4, steps: 12 };

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let short = arguments.iter().any(|argument| argument == "--short");
    let keep = arguments.iter().position(|argument| argument == "--keep");
    let size = if short { SHORT } else { FULL };
    let scratch = tempfile::tempdir()?;
    let folder = match keep {
        Some(index) => {
            let folder =
                arguments.get(index + 1).context("--keep: expected a folder, found none")?;
            ensure!(!Path::new(folder).exists(), "{folder} exists: choose a new folder for --keep");
            PathBuf::from(folder)
        }
        None => scratch.path().to_owned(),
    };
    std::fs::create_dir_all(&folder)?;

    println!("1. Prepare: Rust sources from cargo's registry, a token a byte.");
    let data = folder.join("data");
    prepare_sources(&data, &size)?;

    println!("\n2. Train half-way with two workers, then stop.");
    let half = size.steps / 2;
    let one = folder.join("resumed-with-1-worker");
    run(&config(&one, &data, &size, half), 2)?;
    // A second run folder with the same first half, to be resumed differently.
    let two = folder.join("resumed-with-2-workers");
    copy_folder(&one, &two)?;

    println!("\n3. Resume with one worker, and once more with two.");
    run(&config(&one, &data, &size, size.steps), 1)?;
    let summary = run(&config(&two, &data, &size, size.steps), 2)?;

    println!("\n4. What changed?");
    let weights = |run: &Path| -> Result<Vec<u8>> {
        let path = run.join(format!("checkpoints/step-{:08}/model.safetensors", size.steps));
        std::fs::read(&path).with_context(|| format!("reading {}", path.display()))
    };
    let (first, second) = (weights(&one)?, weights(&two)?);
    ensure!(first == second, "the weights differ: this must never happen");
    let losses = |run: &Path| -> Result<Vec<f64>> {
        Ok(metrics::read::<StepMetrics>(run)?.iter().map(|line| line.loss).collect())
    };
    let (of_one, losses) = (losses(&one)?, losses(&two)?);
    let bits = |losses: &[f64]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
    ensure!(bits(&of_one) == bits(&losses), "the losses differ: this must never happen");
    ensure!(losses.len() as u64 == size.steps, "every step stands once in metrics.jsonl");
    println!(
        "   Nothing: the {} bytes of model.safetensors are equal, and so is every loss.",
        first.len()
    );
    let shown = losses.len().div_ceil(8);
    for (index, loss) in losses.iter().enumerate().step_by(shown) {
        println!("   step {:>4}  loss {loss:.3}  {}", index + 1, "#".repeat((loss * 8.0) as usize));
    }
    if let Some(last) = losses.last() {
        println!("   step {:>4}  loss {last:.3}", losses.len());
        ensure!(losses[0] > *last, "the loss fell");
    }

    println!("\n5. Generate.");
    let checkpoint = summary.checkpoint.context("a run ends with a checkpoint")?;
    generate(&checkpoint, if short { 40 } else { 400 })?;
    if keep.is_some() {
        println!("\nEverything is in {}; try: tidemill inspect {0}/data", folder.display());
    }
    Ok(())
}

/// The run as a user would write it into RUN.toml.
fn config(run: &Path, data: &Path, size: &Size, steps: u64) -> String {
    format!(
        r#"
        [run]
        dir = {run:?}
        steps = {steps}

        [model]
        preset = "mamba-10m"          # the vocabulary is the data set's: 259

        [data]
        dataset = {data:?}

        [batch]
        samples_per_step = {samples}

        [optimizer]
        learning_rate = 3e-3

        [schedule]
        steps = {total}               # the learning rate's horizon is that of the whole run
        warmup_steps = {warmup}

        [checkpoint]
        every_steps = {every}
        "#,
        samples = size.samples_per_step,
        total = size.steps,
        warmup = size.steps / 10,
        every = size.steps,
    )
}

fn prepare_sources(output: &Path, size: &Size) -> Result<()> {
    let registry = cargo_registry()?;
    let mut inputs = Vec::new();
    let mut bytes = 0;
    for source in children(&registry)?.iter().flat_map(|index| children(index).unwrap_or_default())
    {
        if bytes >= size.corpus_bytes {
            break;
        }
        let of_source = rust_bytes(&source);
        if of_source <= MOST_BYTES_OF_CRATE {
            bytes += of_source;
            inputs.push(source);
        }
    }
    ensure!(!inputs.is_empty(), "no crate sources in {}", registry.display());
    let seq_len = NonZeroUsize::new(size.seq_len).context("a length")?;
    let settings = PrepareSettings {
        glob: "**/*.rs".to_owned(),
        workers: NonZeroUsize::MIN.saturating_add(1),
        ..PrepareSettings::new(inputs, output.to_owned(), seq_len)
    };
    let bar = bar(0, "   {wide_bar} {bytes}/{total_bytes}");
    let report = prepare(&settings, &ByteTokenizer, &mut |now| {
        bar.set_length(now.bytes_total);
        bar.set_position(now.bytes_done);
        ControlFlow::Continue(())
    })?;
    bar.finish_and_clear();
    println!(
        "   {} documents, {} tokens, {} samples of {}",
        report.documents, report.tokens, report.samples, size.seq_len
    );
    Ok(())
}

/// Runs a config with `workers` threads and shows how it goes.
fn run(config: &str, workers: usize) -> Result<TrainSummary> {
    let run = ResolvedRun::new(RunConfig::parse(config, "quickstart", &[])?, workers)?;
    let bar = bar(run.steps, "   {wide_bar} step {pos}/{len} {msg}");
    let shown = bar.clone();
    let observer = move |event: &TrainEvent| match event {
        TrainEvent::Started { step, parameters, workers, device, .. } => {
            shown.set_position(*step);
            shown.suspend(|| {
                println!("   {parameters} parameters, {workers} workers, {step} steps done before");
                println!("   on {device}");
            });
        }
        TrainEvent::Step(metrics) => {
            if shown.is_hidden() && metrics.step.is_multiple_of(10) {
                println!("   step {}: loss {:.3}", metrics.step, metrics.loss);
            }
            shown.set_position(metrics.step);
            shown.set_message(format!(
                "loss {:.3}  {:.0} tokens/s",
                metrics.loss, metrics.tokens_per_second
            ));
        }
        _ => {}
    };
    let options = TrainOptions { observer: Arc::new(observer), ..TrainOptions::threads(workers) };
    let summary = train(run, options)?;
    bar.finish_and_clear();
    if let Some(last) = &summary.last {
        println!("   step {}: loss {:.3}", last.step, last.loss);
    }
    Ok(summary)
}

fn generate(checkpoint: &Path, new_tokens: usize) -> Result<()> {
    let prompt = "/// Returns the number of elements.\npub fn len(&self)";
    let tokens: Vec<u32> = prompt.bytes().map(u32::from).collect();
    let mut model = LoadedModel::open(checkpoint, Arc::new(Cpu::new(NonZeroUsize::MIN)?))?;
    let settings = GenerationSettings {
        max_new_tokens: new_tokens,
        stop_token: model.eos_token(),
        sampling: SamplingSettings { temperature: 0.6, seed: 1, ..Default::default() },
    };
    let written = model.generate(&tokens, &settings, |_| ())?;
    let bytes: Vec<u8> = written.iter().filter_map(|&token| u8::try_from(token).ok()).collect();
    for line in format!("{prompt}{}", String::from_utf8_lossy(&bytes)).lines() {
        println!("   | {line}");
    }
    Ok(())
}

/// Where cargo keeps the sources that it has downloaded.
fn cargo_registry() -> Result<PathBuf> {
    let home = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::home_dir().map(|home| home.join(".cargo")));
    Ok(home.context("neither CARGO_HOME nor a home folder is known")?.join("registry/src"))
}

fn children(folder: &Path) -> Result<Vec<PathBuf>> {
    let listing =
        std::fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
    let mut paths = listing.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

/// Bytes of Rust below `path`.
fn rust_bytes(path: &Path) -> u64 {
    if path.is_dir() {
        return children(path).unwrap_or_default().iter().map(|child| rust_bytes(child)).sum();
    }
    let is_rust = path.extension().is_some_and(|extension| extension == "rs");
    if is_rust { path.metadata().map_or(0, |metadata| metadata.len()) } else { 0 }
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    for child in children(from)? {
        let target = to.join(child.file_name().context("a child has a name")?);
        if child.is_dir() {
            copy_folder(&child, &target)?;
        } else {
            std::fs::copy(&child, &target)?;
        }
    }
    Ok(())
}

fn bar(total: u64, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template).expect("a constant template");
    ProgressBar::new(total).with_style(style.progress_chars("=> "))
}
