//! `tidemill score`: log-probabilities of token sequences, a JSON line each.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use clap::Args;
use tidemill_kernels::Backend;

use super::device::DeviceArguments;
use super::output::result_line;
use super::progress::CountProgress;
use super::requests::{Encoder, Request, Requests, TextKey, note_nothing_asked};
use super::tokenizer::TextTokenizer;
use crate::cli::exit::ExitCode;
use crate::device::{Devices, WithBackend};
use crate::inference::{LoadedModel, ModelScorer};

/// Lines that are read before any of them is scored, unless `--batch` says otherwise.
const LINES_AT_ONCE: usize = 32;

/// Flags of `tidemill score`.
#[derive(Debug, Args)]
pub(crate) struct ScoreArguments {
    /// The folder or URL of a checkpoint, a run (its latest checkpoint) or a Hugging Face model.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// One {"tokens": [...]} or {"text": "..."} a line.
    #[arg(long, value_name = "FILE.jsonl")]
    input: PathBuf,
    /// How many lines to score at a time; by default as many as memory is good for, up to 32.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    batch: Option<NonZeroUsize>,
    #[command(flatten)]
    device: DeviceArguments,
}

pub(crate) fn run(arguments: &ScoreArguments) -> anyhow::Result<ExitCode> {
    let threads = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let shorter = "lower --batch, or shorten the longest line of --input";
    arguments.device.open_one(threads, shorter, Score(arguments))
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
    let folder = model.folder().to_owned();
    let tokenizer = TextTokenizer::beside(&folder)?;
    let encoder = Encoder { tokenizer: tokenizer.as_ref(), folder: &folder };
    let mut requests = Requests::open(&arguments.input, TextKey::Text, encoder)?.peekable();
    if requests.peek().is_none() {
        note_nothing_asked(&arguments.input);
    }
    let lines = arguments.batch.map_or(LINES_AT_ONCE, NonZeroUsize::get);
    let mut progress = CountProgress::new(0, "lines", "tokens");
    loop {
        // A line that is wrong ends the program when those before it have been scored.
        let mut wrong = None;
        let mut batch = Vec::new();
        for request in requests.by_ref().take(lines) {
            let checked = request.and_then(|request| {
                let place = request.place.clone();
                model.check_text(&request.tokens).context(place).map(|()| request)
            });
            match checked {
                Ok(request) => batch.push(request),
                Err(error) => {
                    wrong = Some(error);
                    break;
                }
            }
        }
        let ended = batch.len() < lines;
        score_batch(arguments, &mut model, &batch, &mut progress)?;
        match wrong {
            Some(error) => return Err(error),
            None if ended => break,
            None => {}
        }
    }
    progress.finish();
    Ok(ExitCode::SUCCESS)
}

fn score_batch<B: Backend>(
    arguments: &ScoreArguments,
    model: &mut LoadedModel<B>,
    requests: &[Request],
    progress: &mut CountProgress,
) -> anyhow::Result<()> {
    let Some(longest) = requests.iter().map(|request| request.tokens.len()).max() else {
        return Ok(());
    };
    let at_once = match arguments.batch {
        Some(batch) => batch.get(),
        None => model.sequences_at_once(longest)?,
    };
    let at_once = at_once.min(requests.len());
    let mut scorer = model.scorer(at_once, longest)?;
    for requests in requests.chunks(at_once) {
        print_scores(&mut scorer, requests, progress)?;
    }
    Ok(())
}

fn print_scores<B: Backend>(
    scorer: &mut ModelScorer<'_, B>,
    requests: &[Request],
    progress: &mut CountProgress,
) -> anyhow::Result<()> {
    let texts: Vec<&[u32]> = requests.iter().map(|request| &request.tokens[..]).collect();
    let scores = scorer.log_probabilities(&texts)?;
    for (request, log_probabilities) in requests.iter().zip(&scores) {
        let sum: f64 = log_probabilities.iter().copied().map(f64::from).sum();
        let mut line = serde_json::json!({ "logprobs": log_probabilities, "sum": sum });
        if let Some(id) = &request.id {
            line["id"] = id.clone();
        }
        progress.suspend(|| result_line!("{line}"))?;
        progress.advance(1);
        progress.add(request.tokens.len() as u64);
    }
    Ok(())
}
