//! `tidemill generate`: continue prompts.

mod answers;

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use clap::Args;
use tidemill_kernels::Backend;
use tidemill_model::ModelError;
use tidemill_model::generation::{GenerationSettings, Prompt, SamplingSettings, Written};

use self::answers::{Answers, Stream};
use super::Format;
use super::device::DeviceArguments;
use super::output::note_line;
use super::progress::CountProgress;
use super::requests::{Encoder, Request, Requests, TextKey, note_nothing_asked};
use super::tokenizer::TextTokenizer;
use crate::cli::exit::ExitCode;
use crate::device::{Devices, WithBackend};
use crate::error::JobError;
use crate::inference::LoadedModel;

/// Flags of `tidemill generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArguments {
    /// The folder or URL of a checkpoint, a run (its latest checkpoint) or a Hugging Face model.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    #[command(flatten)]
    asked: Asked,
    /// How many prompts of --input to continue at a time; by default as many as memory is good for, up to 32.
    #[arg(long, value_name = "N", allow_negative_numbers = true, conflicts_with_all = ["prompt", "tokens"])]
    batch: Option<NonZeroUsize>,
    /// How many tokens to add at most; fewer where a model's learned positions end before.
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 128)]
    max_new_tokens: usize,
    /// 0 takes the likeliest token; higher is more varied.
    #[arg(long, value_name = "T", allow_negative_numbers = true, default_value_t = 1.0)]
    temperature: f64,
    /// Sample from the K likeliest tokens only; 0 for all.
    #[arg(long, value_name = "K", allow_negative_numbers = true, default_value_t = 0)]
    top_k: usize,
    /// Sample from the likeliest tokens that together have probability P.
    #[arg(long, value_name = "P", allow_negative_numbers = true, default_value_t = 1.0)]
    top_p: f64,
    /// Sample from tokens that are at least P times as likely as the likeliest; 0 for all.
    #[arg(long, value_name = "P", allow_negative_numbers = true, default_value_t = 0.0)]
    min_p: f64,
    /// Above 1, tokens that have appeared become less likely.
    #[arg(long, value_name = "R", allow_negative_numbers = true, default_value_t = 1.0)]
    repetition_penalty: f64,
    /// Seeds the sampling. A prompt of --input draws what it draws alone; one that is asked again, other tokens.
    #[arg(long, value_name = "S", allow_negative_numbers = true, default_value_t = 0)]
    seed: u64,
    /// Go on past the end-of-sequence token.
    #[arg(long)]
    ignore_eos: bool,
    #[command(flatten)]
    device: DeviceArguments,
    /// How the result is printed.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// The text or tokens to continue.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Asked {
    /// The text to continue.
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// The tokens to continue, such as 1,2,3.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    tokens: Option<Vec<u32>>,
    /// Many prompts: one {"tokens": [...]} or {"prompt": "..."} a line, with an "id" if you like.
    #[arg(long, value_name = "FILE.jsonl")]
    input: Option<PathBuf>,
}

impl GenerateArguments {
    fn sampling(&self) -> anyhow::Result<SamplingSettings> {
        let sampling = SamplingSettings {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
        };
        sampling.check().map_err(as_flag)?;
        Ok(sampling)
    }
}

/// Names a setting by its flag.
fn as_flag(error: ModelError) -> ModelError {
    match error {
        ModelError::Config { key, expected, found } => {
            ModelError::Config { key: format!("--{}", key.replace('_', "-")), expected, found }
        }
        other => other,
    }
}

pub(crate) fn run(arguments: &GenerateArguments) -> anyhow::Result<ExitCode> {
    let threads = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let smaller = match arguments.asked.input {
        Some(_) => "lower --batch or --max-new-tokens",
        None => "lower --max-new-tokens",
    };
    let sampling = arguments.sampling()?;
    arguments.device.open_one(threads, smaller, Generate { arguments, sampling })
}

/// Prompts that wait for a device.
struct Generate<'a> {
    arguments: &'a GenerateArguments,
    sampling: SamplingSettings,
}

impl WithBackend for Generate<'_> {
    type Output = anyhow::Result<ExitCode>;

    fn run<B: Backend>(self, devices: Devices<B>) -> Self::Output {
        let Self { arguments, sampling } = self;
        let model = LoadedModel::open(&arguments.model, Arc::clone(devices.first()))?;
        let tokenizer = TextTokenizer::beside(model.folder())?;
        let stop_token = if arguments.ignore_eos { None } else { model.eos_token() };
        let max_new_tokens = arguments.max_new_tokens;
        let settings = GenerationSettings { max_new_tokens, stop_token, sampling };
        let answers = Answers::new(tokenizer.as_ref(), arguments.format);
        match &arguments.asked.input {
            Some(_) => write_many(arguments, model, tokenizer.as_ref(), &settings, &answers)?,
            None => write_one(arguments, model, tokenizer.as_ref(), &settings, &answers)?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Text is shown as it comes.
fn write_one<B: Backend>(
    arguments: &GenerateArguments,
    mut model: LoadedModel<B>,
    tokenizer: Option<&TextTokenizer>,
    settings: &GenerationSettings,
    answers: &Answers<'_>,
) -> anyhow::Result<()> {
    let prompt = match &arguments.asked {
        Asked { tokens: Some(tokens), .. } => tokens.clone(),
        Asked { prompt: Some(text), .. } => Encoder { tokenizer, folder: model.folder() }
            .encode(text, "give --tokens instead of --prompt")?,
        _ => return Err(nothing_asked("--prompt, --tokens or --input").into()),
    };
    let mut stream = Stream::new(answers);
    let written = model.generate(&prompt, settings, |token| stream.push(token))?;
    stream.finish()?;
    note_cut_answers(&model, settings, usize::from(is_cut(&written, settings)), 1);
    Ok(())
}

fn nothing_asked(expected: &str) -> JobError {
    JobError::value("generate", expected, "none")
}

/// Whether an answer has ended where the model's learned positions do.
fn is_cut(written: &[u32], settings: &GenerationSettings) -> bool {
    let stopped = settings.stop_token.is_some() && written.last().copied() == settings.stop_token;
    written.len() < settings.max_new_tokens && !stopped
}

fn note_cut_answers<B: Backend>(
    model: &LoadedModel<B>,
    settings: &GenerationSettings,
    cut: usize,
    answers: usize,
) {
    if let (Some(positions), 1..) = (model.learned_positions(), cut) {
        let asked = settings.max_new_tokens;
        note_line!(
            "note: the model has {positions} positions, so {cut} of {answers} answers ended before {asked} new tokens"
        );
    }
}

/// Answers are printed in the order of the prompts, each as soon as those before it have ended.
fn write_many<B: Backend>(
    arguments: &GenerateArguments,
    mut model: LoadedModel<B>,
    tokenizer: Option<&TextTokenizer>,
    settings: &GenerationSettings,
    answers: &Answers<'_>,
) -> anyhow::Result<()> {
    let Some(path) = &arguments.asked.input else { return Err(nothing_asked("--input").into()) };
    let encoder = Encoder { tokenizer, folder: model.folder() };
    // All of them are looked at before any is answered.
    let requests = Requests::open(path, TextKey::Prompt, encoder)?
        .map(|request| {
            let request = request?;
            model.check_prompt(&request.tokens).with_context(|| request.place.clone())?;
            Ok(request)
        })
        .collect::<anyhow::Result<Vec<Request>>>()?;
    if requests.is_empty() {
        note_nothing_asked(path);
    }
    let longest = requests.iter().map(|request| request.tokens.len()).max().unwrap_or(0);
    let at_once = match arguments.batch {
        Some(batch) => batch.get(),
        None => model.sequences_at_once(longest.saturating_add(settings.max_new_tokens))?,
    };
    let prompts = prompts(&requests);
    let mut cut = 0;
    let mut progress = CountProgress::new(requests.len() as u64, "prompts", "tokens");
    // Answers that have ended before one that is asked earlier.
    let mut ended: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    let (mut next, mut printed) = (0, Ok(()));
    model.generate_batch(&prompts, at_once, settings, |place, written| match written {
        Written::Token(_) => progress.item(),
        Written::Answer(tokens) => {
            progress.advance(1);
            cut += usize::from(is_cut(tokens, settings));
            ended.insert(place, tokens.to_vec());
            while let (Ok(()), Some(tokens)) = (&printed, ended.remove(&next)) {
                printed = progress.suspend(|| answers.print(&requests[next], &tokens));
                next += 1;
            }
        }
    })?;
    printed?;
    progress.finish_with_rate();
    note_cut_answers(&model, settings, cut, requests.len());
    Ok(())
}

/// Each numbered by the equal ones before it: those draw apart, and no other line changes what a prompt draws.
fn prompts(requests: &[Request]) -> Vec<Prompt<'_>> {
    let mut asked: HashMap<&[u32], u64> = HashMap::new();
    let mut prompts = Vec::with_capacity(requests.len());
    for Request { tokens, .. } in requests {
        let times = asked.entry(tokens).or_default();
        prompts.push(Prompt { tokens, index: *times });
        *times += 1;
    }
    prompts
}
