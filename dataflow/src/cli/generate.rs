//! `tidemill generate`: continue prompts.

mod answers;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::Args;
use tidemill_kernels::Backend;
use tidemill_model::generation::{GenerationSettings, Prompt, SamplingSettings};

use self::answers::{Answers, Stream};
use super::Format;
use super::device::DeviceArguments;
use super::progress::CountProgress;
use super::requests::{Encoder, Request, Requests, TextKey};
use super::tokenizer::TextTokenizer;
use crate::cli::exit::ExitCode;
use crate::device::{Devices, WithBackend};
use crate::inference::LoadedModel;

/// Flags of `tidemill generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArguments {
    /// A checkpoint, a run folder (its latest checkpoint), or a Hugging Face folder.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    #[command(flatten)]
    asked: Asked,
    /// How many prompts of --input to continue at a time; by default as many as memory is good for, up to 32.
    #[arg(long, value_name = "N", conflicts_with_all = ["prompt", "tokens"])]
    batch: Option<NonZeroUsize>,
    /// How many tokens to add at most.
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_new_tokens: usize,
    /// 0 takes the likeliest token; higher is more varied.
    #[arg(long, value_name = "T", allow_negative_numbers = true, default_value_t = 1.0)]
    temperature: f64,
    /// Sample from the K likeliest tokens only; 0 for all.
    #[arg(long, value_name = "K", default_value_t = 0)]
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
    /// Seeds the sampling.
    #[arg(long, value_name = "S", default_value_t = 0)]
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

/// What is to be continued.
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
    fn settings(&self, eos_token: Option<u32>) -> anyhow::Result<GenerationSettings> {
        let sampling = SamplingSettings {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
        };
        sampling.check()?;
        let stop_token = if self.ignore_eos { None } else { eos_token };
        Ok(GenerationSettings { max_new_tokens: self.max_new_tokens, stop_token, sampling })
    }
}

pub(crate) fn run(arguments: &GenerateArguments) -> anyhow::Result<ExitCode> {
    let threads = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let smaller = arguments.asked.input.as_ref().map(|_| "lower --batch");
    arguments.device.open_one(threads, smaller, Generate(arguments))
}

/// Prompts that wait for a device.
struct Generate<'a>(&'a GenerateArguments);

impl WithBackend for Generate<'_> {
    type Output = anyhow::Result<ExitCode>;

    fn run<B: Backend>(self, devices: Devices<B>) -> Self::Output {
        let model = LoadedModel::open(&self.0.model, Arc::clone(devices.first()))?;
        let tokenizer = TextTokenizer::beside(model.folder())?;
        let settings = self.0.settings(model.eos_token())?;
        let answers = Answers::new(tokenizer.as_ref(), self.0.format);
        match &self.0.asked.input {
            Some(_) => write_many(self.0, model, tokenizer.as_ref(), &settings, &answers)?,
            None => write_one(self.0, model, tokenizer.as_ref(), &settings, &answers)?,
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
        _ => bail!("--prompt, --tokens or --input is required"),
    };
    let mut stream = Stream::new(answers);
    model.generate(&prompt, settings, |token| stream.push(token))?;
    stream.finish()
}

/// Each answer is printed when its batch is done, in the order of the prompts.
fn write_many<B: Backend>(
    arguments: &GenerateArguments,
    mut model: LoadedModel<B>,
    tokenizer: Option<&TextTokenizer>,
    settings: &GenerationSettings,
    answers: &Answers<'_>,
) -> anyhow::Result<()> {
    let Some(path) = &arguments.asked.input else { bail!("--input is required") };
    let encoder = Encoder { tokenizer, folder: model.folder() };
    // All of them are looked at before any is answered.
    let requests = Requests::open(path, TextKey::Prompt, encoder)?
        .map(|request| {
            let request = request?;
            model.check_prompt(&request.tokens).with_context(|| request.place.clone())?;
            Ok(request)
        })
        .collect::<anyhow::Result<Vec<Request>>>()?;
    let longest = requests.iter().map(|request| request.tokens.len()).max().unwrap_or(0);
    let at_once = match arguments.batch {
        Some(batch) => batch.get(),
        None => model.sequences_at_once(longest.saturating_add(settings.max_new_tokens))?,
    };
    let mut progress = CountProgress::new(requests.len() as u64, "prompts", "tokens");
    for (batch, requests) in requests.chunks(at_once).enumerate() {
        let prompts: Vec<Prompt<'_>> = (batch * at_once..)
            .zip(requests)
            .map(|(index, request)| Prompt { tokens: &request.tokens, index: index as u64 })
            .collect();
        let written = model.generate_batch(&prompts, settings, |_, _| progress.item())?;
        for (request, tokens) in requests.iter().zip(&written) {
            progress.suspend(|| answers.print(request, tokens))?;
        }
        progress.advance(requests.len() as u64);
    }
    progress.finish();
    Ok(())
}
