//! `tidemill evaluate`: questions with known answers.

mod planning;
mod report;
mod scoring;
mod selection;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::ScopedJoinHandle;
use std::time::Instant;

use anyhow::Context;
use clap::Args;
use tidemill_evaluation::answers::{AnswerFile, AskedTask, Header};
use tidemill_evaluation::builtin;
use tidemill_evaluation::metrics::{Answer, Measured};
use tidemill_evaluation::plan::PlannedTask;
use tidemill_evaluation::suite::Suite;
use tidemill_kernels::{Backend, MemoryPlace};
use tidemill_streaming_data::hash::ContentHasher;

use self::report::{Report, Time};
use self::scoring::{Scoring, Workers};
use self::selection::Selection;
use super::Format;
use super::device::DeviceArguments;
use super::output::note_line;
use crate::cli::exit::ExitCode;
use crate::device::{Devices, LocalWorkers, WithBackend, kind_in_words};
use crate::error::JobError;
use crate::inference::{LoadedModel, ModelFiles};

/// Flags of `tidemill evaluate`.
#[derive(Debug, Args)]
pub(crate) struct EvaluateArguments {
    /// The folder or URL of a checkpoint, a run (its latest checkpoint) or a Hugging Face model.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    #[arg(long, value_name = "NAME|FILE,...", value_delimiter = ',', required = true, help = tasks_help())]
    tasks: Vec<String>,
    /// The folder or URL with the tasks' questions; by default that of a task's file, and of a built-in task the current folder.
    #[arg(long, value_name = "DIR")]
    data: Option<String>,
    /// Few-shot examples before each question; by default as many as a suite or the task says.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    fewshot: Option<usize>,
    /// Ask only the first N questions of each task.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    limit: Option<NonZeroUsize>,
    /// Chooses the few-shot examples.
    #[arg(long, value_name = "S", allow_negative_numbers = true, default_value_t = 0)]
    seed: u64,
    /// How many requests to score at a time; by default as many as fill the device and its memory is good for. Never numerics.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    batch: Option<NonZeroUsize>,
    /// The most tokens that the model reads of a request: longer ones lose their beginning. By default as many as it has learned positions, and all
    /// where it has learned none.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    max_length: Option<NonZeroUsize>,
    /// Workers, which share out the requests; by default one for each GPU, and one on the CPU. Never numerics.
    #[arg(short, long, value_name = "WORKERS", allow_negative_numbers = true)]
    workers: Option<NonZeroUsize>,
    /// Keep each answer in this file; the same command then goes on where it ended.
    #[arg(long, value_name = "FILE.jsonl")]
    output: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArguments,
    /// How the results are printed.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

fn tasks_help() -> String {
    let names: Vec<&str> = builtin::names().collect();
    format!(
        "What is asked: task or suite files (.toml), and of those that are built in {}",
        names.join(", ")
    )
}

pub(crate) fn run(arguments: &EvaluateArguments) -> anyhow::Result<ExitCode> {
    let began = Instant::now();
    let Selection { tasks, suites } = Selection::of(&arguments.tasks)?;
    if let Some(workers) = arguments.workers.filter(|workers| workers.get() > MOST_WORKERS) {
        return Err(
            JobError::value("-w", format!("at most {MOST_WORKERS} workers"), workers).into()
        );
    }
    let files = Arc::new(ModelFiles::open(&arguments.model)?);
    // Questions become tokens while the device is opened and the model read.
    std::thread::scope(|scope| {
        let files = &files;
        let planned = scope.spawn(move || timed(|| planning::plan(arguments, files, tasks)));
        let cores = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let alone = arguments.workers.unwrap_or(NonZeroUsize::MIN);
        let threads = NonZeroUsize::new(cores.get() / alone).unwrap_or(NonZeroUsize::MIN);
        let choice = arguments.device.choice(threads)?;
        let workers = match (arguments.workers, choice.memory()) {
            (Some(workers), _) => workers.get(),
            (None, MemoryPlace::Host) => 1,
            (None, MemoryPlace::Device) => choice.places(),
        };
        let smaller = || vec!["lower --batch".to_owned()];
        let evaluate = Evaluate { arguments, began, files, planned, suites };
        arguments.device.open(&choice, LocalWorkers::alone(workers), smaller, evaluate)
    })
}

/// The result of `work`, and the seconds that it took.
fn timed<T>(work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<(T, f64)> {
    let began = Instant::now();
    Ok((work()?, began.elapsed().as_secs_f64()))
}

/// A bound for typing errors.
const MOST_WORKERS: usize = 256;

/// Tasks that wait for devices.
struct Evaluate<'a, 'scope> {
    arguments: &'a EvaluateArguments,
    began: Instant,
    files: &'a Arc<ModelFiles>,
    /// The tasks, and the seconds that they took to plan.
    planned: ScopedJoinHandle<'scope, anyhow::Result<(Vec<PlannedTask>, f64)>>,
    suites: Vec<(String, Suite)>,
}

impl WithBackend for Evaluate<'_, '_> {
    type Output = anyhow::Result<ExitCode>;

    fn run<B: Backend>(self, devices: Devices<B>) -> Self::Output {
        let Self { arguments, began, files, planned, suites } = self;
        let model = LoadedModel::of_files(files, Arc::clone(devices.first()))?;
        let load_seconds = began.elapsed().as_secs_f64();
        let planned = planned.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let (planned, tokenize_seconds) = planned?;
        planning::check(&model, &planned)?;
        note_cut_requests(&planned);
        let device = format!("{}, {}", kind_in_words(devices.kind()), devices.precision().word());
        let file = match &arguments.output {
            None => None,
            Some(path) => Some(AnswerFile::open(path, &header(&model, &device, &planned)?)?),
        };
        let scoring = Scoring::new(&planned, file)?;
        let [requests, tokens] = scoring.left();
        let workers = Workers { batch: arguments.batch, first: model, files, devices: &devices };
        let (answers, score_seconds) = timed(|| workers.score(scoring))?;
        let measured = planned.iter().zip(&answers);
        let measured: Vec<Vec<Measured>> =
            measured.map(|(task, answers)| task.measure(answers)).collect::<Result<_, _>>()?;
        let total_seconds = began.elapsed().as_secs_f64();
        let report = Report {
            model: &arguments.model,
            device: devices.in_words(),
            seed: arguments.seed,
            tasks: planned.iter().zip(&measured).collect(),
            suites: &suites,
            time: Time {
                load_seconds,
                tokenize_seconds,
                score_seconds,
                total_seconds,
                requests,
                tokens,
            },
        };
        report.print(arguments.format)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The answers of each task, in the order of its requests.
type Answers = Vec<Vec<Answer>>;

fn note_cut_requests(planned: &[PlannedTask]) {
    for task in planned {
        let cut = report::cut_requests(task);
        if cut > 0 {
            let (name, of) = (&task.task().name, task.requests().len());
            note_line!(
                "note: {name}: {cut} of {of} requests are longer than the model reads and lose their beginning"
            );
        }
    }
}

/// The header of a file of answers: model, device and requests.
fn header<B: Backend>(
    model: &LoadedModel<B>,
    device: &str,
    planned: &[PlannedTask],
) -> anyhow::Result<Header> {
    let asked = planned.iter().map(|task| AskedTask {
        name: task.task().name.clone(),
        requests: task.fingerprint().to_string(),
        count: task.requests().len(),
    });
    Ok(Header::new(hash_of_model(model.folder())?, device.to_owned(), asked.collect()))
}

/// A hash of a model's config and tensors.
fn hash_of_model(folder: &Path) -> anyhow::Result<String> {
    use tidemill_streaming_data::hash::ContentHash;
    let failed = || format!("reading {} failed", folder.display());
    let entries = std::fs::read_dir(folder).with_context(failed)?;
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let mut names = names.collect::<std::io::Result<Vec<String>>>().with_context(failed)?;
    names.retain(|name| {
        name == "config.json" || name.ends_with(".safetensors") && !name.starts_with("optimizer")
    });
    names.sort_unstable();
    let mut hasher = ContentHasher::new();
    for name in names {
        let of_file = ContentHash::of_file(&folder.join(&name))?;
        hasher.update(format!("{name} {of_file}\n").as_bytes());
    }
    Ok(hasher.finish().to_string())
}
