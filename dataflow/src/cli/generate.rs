//! `tidemill generate`: continue a prompt.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::Args;
use tidemill_kernels::Backend;
use tidemill_model::generation::{GenerationSettings, SamplingSettings};

use super::Format;
use super::device::DeviceArguments;
use super::output::OUTPUT_FAILED;
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
    /// The text to continue.
    #[arg(long, value_name = "TEXT", required_unless_present = "tokens")]
    prompt: Option<String>,
    /// The tokens to continue, such as 1,2,3.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', conflicts_with = "prompt")]
    tokens: Option<Vec<u32>>,
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

pub(crate) fn run(arguments: &GenerateArguments) -> anyhow::Result<ExitCode> {
    let threads = std::thread::available_parallelism().unwrap_or(std::num::NonZeroUsize::MIN);
    arguments.device.open_one(threads, None, Generate(arguments))
}

/// A prompt that waits for a device.
struct Generate<'a>(&'a GenerateArguments);

impl WithBackend for Generate<'_> {
    type Output = anyhow::Result<ExitCode>;

    fn run<B: Backend>(self, devices: Devices<B>) -> Self::Output {
        write_on(self.0, LoadedModel::open(&self.0.model, Arc::clone(devices.first()))?)
    }
}

fn write_on<B: Backend>(
    arguments: &GenerateArguments,
    mut model: LoadedModel<B>,
) -> anyhow::Result<ExitCode> {
    let tokenizer = TextTokenizer::beside(model.folder())?;
    let prompt = match (&arguments.tokens, &arguments.prompt) {
        (Some(tokens), _) => tokens.clone(),
        (None, Some(text)) => {
            let tokenizer = tokenizer.as_ref().with_context(|| {
                format!(
                    "{} has no tokenizer.json: give --tokens instead of --prompt",
                    model.folder().display()
                )
            })?;
            tokenizer.encode(text)?
        }
        (None, None) => bail!("--prompt or --tokens is required"),
    };
    let settings = GenerationSettings {
        max_new_tokens: arguments.max_new_tokens,
        stop_token: if arguments.ignore_eos { None } else { model.eos_token() },
        sampling: SamplingSettings {
            temperature: arguments.temperature,
            top_k: arguments.top_k,
            top_p: arguments.top_p,
            repetition_penalty: arguments.repetition_penalty,
            seed: arguments.seed,
        },
    };
    let mut tokens = Vec::new();
    let mut out = std::io::stdout().lock();
    let mut shown = 0;
    model.generate(&prompt, &settings, |token| {
        tokens.push(token);
        // Text is shown as it comes, up to the last complete character.
        if arguments.format == Format::Text
            && let Some(tokenizer) = &tokenizer
            && let Ok(text) = tokenizer.decode(&tokens)
            && !text.ends_with('\u{fffd}')
            && text.is_char_boundary(shown)
        {
            let _ = write!(out, "{}", &text[shown..]).and_then(|()| out.flush());
            shown = text.len();
        }
    })?;
    let text = tokenizer.as_ref().map(|tokenizer| tokenizer.decode(&tokens)).transpose()?;
    match (arguments.format, &text) {
        (Format::Json, _) => {
            writeln!(out, "{}", serde_json::json!({ "tokens": tokens, "text": text }))
                .context(OUTPUT_FAILED)?;
        }
        (Format::Text, Some(text)) => {
            writeln!(out, "{}", text.get(shown..).unwrap_or("")).context(OUTPUT_FAILED)?
        }
        (Format::Text, None) => {
            let list: Vec<String> = tokens.iter().map(u32::to_string).collect();
            writeln!(out, "{}", list.join(",")).context(OUTPUT_FAILED)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
