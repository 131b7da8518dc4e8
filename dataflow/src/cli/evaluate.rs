//! `tidemill evaluate`: questions with known answers.

mod report;
mod scoring;
mod selection;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use clap::Args;
use tidemill_evaluation::answers::{AnswerFile, AskedTask, Header};
use tidemill_evaluation::builtin;
use tidemill_evaluation::metrics::{Answer, Measured};
use tidemill_evaluation::plan::{PlannedTask, Settings};
use tidemill_evaluation::tokens::Vocabulary;
use tidemill_kernels::{Backend, MemoryPlace};
use tidemill_streaming_data::hash::ContentHasher;

use self::report::Report;
use self::scoring::{Scoring, Workers};
use self::selection::Selection;
use super::Format;
use super::device::DeviceArguments;
use super::output::note_line;
use super::quiet::caught;
use super::tokenizer::TextTokenizer;
use crate::cli::exit::ExitCode;
use crate::device::{Devices, LocalWorkers, WithBackend, kind_in_words};
use crate::error::JobError;
use crate::inference::LoadedModel;

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
    /// How many requests to score at a time; by default as many as memory is good for, up to 32. Never numerics.
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
    let selection = Selection::of(&arguments.tasks)?;
    let cores = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let alone = arguments.workers.unwrap_or(NonZeroUsize::MIN);
    let threads = NonZeroUsize::new(cores.get() / alone).unwrap_or(NonZeroUsize::MIN);
    let choice = arguments.device.choice(threads)?;
    let workers = match (arguments.workers, choice.memory()) {
        (Some(workers), _) => workers.get(),
        (None, MemoryPlace::Host) => 1,
        (None, MemoryPlace::Device) => choice.places(),
    };
    if workers > MOST_WORKERS {
        return Err(
            JobError::value("-w", format!("at most {MOST_WORKERS} workers"), workers).into()
        );
    }
    let smaller = || vec!["lower --batch".to_owned()];
    let evaluate = Evaluate { arguments, selection };
    arguments.device.open(&choice, LocalWorkers::alone(workers), smaller, evaluate)
}

/// A bound for typing errors.
const MOST_WORKERS: usize = 256;

/// Tasks that wait for devices.
struct Evaluate<'a> {
    arguments: &'a EvaluateArguments,
    selection: Selection,
}

impl WithBackend for Evaluate<'_> {
    type Output = anyhow::Result<ExitCode>;

    fn run<B: Backend>(self, devices: Devices<B>) -> Self::Output {
        let Self { arguments, selection } = self;
        let model = LoadedModel::open(&arguments.model, Arc::clone(devices.first()))?;
        let tokenizer = TextTokenizer::beside(model.folder())?.ok_or_else(|| {
            let what =
                "expected tokenizer.json, found none: put the model's tokenizer there".to_owned();
            JobError::Config { origin: model.folder().display().to_string(), what }
        })?;
        let Selection { tasks, suites } = selection;
        let planned = plan(arguments, &model, &tokenizer, tasks)?;
        note_cut_requests(&planned);
        let device = format!("{}, {}", kind_in_words(devices.kind()), devices.precision().word());
        let file = match &arguments.output {
            None => None,
            Some(path) => Some(AnswerFile::open(path, &header(&model, &device, &planned)?)?),
        };
        let scoring = Scoring::new(&planned, file)?;
        let workers = Workers {
            path: &arguments.model,
            batch: arguments.batch,
            first: model,
            devices: &devices,
        };
        let answers = workers.score(scoring)?;
        let measured = planned.iter().zip(&answers);
        let measured: Vec<Vec<Measured>> =
            measured.map(|(task, answers)| task.measure(answers)).collect::<Result<_, _>>()?;
        let report = Report {
            model: &arguments.model,
            device: devices.in_words(),
            seed: arguments.seed,
            tasks: planned.iter().zip(&measured).collect(),
            suites: &suites,
        };
        report.print(arguments.format)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The answers of each task, in the order of its requests.
type Answers = Vec<Vec<Answer>>;

/// All requests of all tasks, which the model can take.
fn plan<B: Backend>(
    arguments: &EvaluateArguments,
    model: &LoadedModel<B>,
    tokenizer: &TextTokenizer,
    tasks: Vec<(tidemill_evaluation::task::Task, Option<usize>)>,
) -> anyhow::Result<Vec<PlannedTask>> {
    let positions = match (arguments.max_length.map(NonZeroUsize::get), model.learned_positions()) {
        (Some(asked), Some(learned)) if asked > learned => {
            let expected = format!("at most {learned}, the positions of the model");
            return Err(JobError::value("--max-length", expected, asked).into());
        }
        (asked, learned) => asked.or(learned),
    };
    let prefix = model.bos_token().or(model.eos_token());
    let prefix_text = prefix.and_then(|prefix| tokenizer.token_text(prefix));
    let vocabulary = Vocabulary {
        tokenizer,
        prefix: prefix.zip(prefix_text.as_deref()),
        end: model.eos_token(),
        positions,
    };
    let settings = Settings {
        data: arguments.data.clone(),
        fewshot: arguments.fewshot,
        limit: arguments.limit.map(NonZeroUsize::get),
        seed: arguments.seed,
    };
    let mut planned = Vec::with_capacity(tasks.len());
    for (task, shots) in tasks {
        let name = task.name.clone();
        // A library panics where it meets a Parquet file that is damaged in certain places.
        let task = caught(|| PlannedTask::new(task, shots, &settings, &vocabulary)).map_err(
            |said| JobError::Config {
                origin: name,
                what: format!("expected rows that can be read: {said}"),
            },
        )??;
        for (index, request) in task.requests().iter().enumerate() {
            let place = || task.documents()[task.asked(index).0].place.clone();
            model.check_text(&request.tokens).with_context(place)?;
        }
        planned.push(task);
    }
    Ok(planned)
}

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

/// To what these are answers.
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
