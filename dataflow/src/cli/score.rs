//! `tidemill score`: log-probabilities of token sequences, a JSON line each.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::Args;
use serde::Deserialize;
use tidemill_kernels::Backend;

use super::device::DeviceArguments;
use super::output::OUTPUT_FAILED;
use super::tokenizer::TextTokenizer;
use crate::cli::exit::ExitCode;
use crate::device::{Devices, WithBackend};
use crate::inference::LoadedModel;

/// Flags of `tidemill score`.
#[derive(Debug, Args)]
pub(crate) struct ScoreArguments {
    /// A checkpoint, a run folder (its latest checkpoint), or a Hugging Face folder.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// One {"tokens": [...]} or {"text": "..."} a line.
    #[arg(long, value_name = "FILE.jsonl")]
    input: PathBuf,
    #[command(flatten)]
    device: DeviceArguments,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    tokens: Option<Vec<u32>>,
    text: Option<String>,
}

pub(crate) fn run(arguments: &ScoreArguments) -> anyhow::Result<ExitCode> {
    let threads = std::thread::available_parallelism().unwrap_or(std::num::NonZeroUsize::MIN);
    let shorter = "shorten the longest line of --input";
    arguments.device.open_one(threads, Some(shorter), Score(arguments))
}

/// Lines that wait for a device.
struct Score<'a>(&'a ScoreArguments);

impl WithBackend for Score<'_> {
    type Output = anyhow::Result<ExitCode>;

    fn run<B: Backend>(self, devices: Devices<B>) -> Self::Output {
        score_on(self.0, LoadedModel::open(&self.0.model, Arc::clone(devices.first()))?)
    }
}

fn score_on<B: Backend>(
    arguments: &ScoreArguments,
    mut model: LoadedModel<B>,
) -> anyhow::Result<ExitCode> {
    let folder = model.folder().display().to_string();
    let tokenizer = TextTokenizer::beside(model.folder())?;
    let mut scorer = model.scorer()?;
    let path = arguments.input.display();
    let file =
        std::fs::File::open(&arguments.input).with_context(|| format!("reading {path} failed"))?;
    let mut out = std::io::stdout().lock();
    for (index, line) in BufReader::new(file).lines().enumerate() {
        let number = index + 1;
        let line = line.with_context(|| format!("{path}: line {number}: expected UTF-8 text"))?;
        if line.trim().is_empty() {
            continue;
        }
        let request: Request = serde_json::from_str(&line).with_context(|| {
            format!(
                "{path}: line {number}: expected {{\"tokens\": [...]}} or {{\"text\": \"...\"}}"
            )
        })?;
        let tokens = match (request.tokens, request.text) {
            (Some(tokens), None) => tokens,
            (None, Some(text)) => match &tokenizer {
                Some(tokenizer) => tokenizer.encode(&text)?,
                None => bail!(
                    "{path}: line {number}: {folder} has no tokenizer.json: give tokens, not text"
                ),
            },
            _ => bail!("{path}: line {number}: expected one of tokens and text"),
        };
        let log_probabilities =
            scorer.log_probabilities(&tokens).with_context(|| format!("{path}: line {number}"))?;
        let sum: f64 = log_probabilities.iter().copied().map(f64::from).sum();
        writeln!(out, "{}", serde_json::json!({ "logprobs": log_probabilities, "sum": sum }))
            .context(OUTPUT_FAILED)?;
    }
    out.flush().context(OUTPUT_FAILED)?;
    Ok(ExitCode::SUCCESS)
}
