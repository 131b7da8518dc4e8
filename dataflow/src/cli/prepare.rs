//! `tidemill prepare`: documents to a data set.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use tidemill_streaming_data::prepare::{
    ByteTokenizer, DEFAULT_GLOB, PrepareReport, PrepareSettings, Progress, Strictness, Tokenize,
    TokenizeError, prepare,
};

use super::exit::one_line;
use super::output::{note_line, result_line};
use super::tokenizer::TextTokenizer;
use super::{Format, progress};
use crate::cli::exit::ExitCode;

/// Flags of `tidemill prepare`.
#[derive(Debug, Args)]
pub(crate) struct PrepareArguments {
    /// Files and folders of UTF-8 text.
    #[arg(long, value_name = "PATH", required = true, num_args = 1..)]
    input: Vec<PathBuf>,
    /// The folder that becomes the data set: missing or empty.
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// Which files of input folders are documents.
    #[arg(long, value_name = "GLOB", default_value = DEFAULT_GLOB)]
    glob: String,
    /// `bytes`, or the path of a Hugging Face tokenizer.json.
    #[arg(long, value_name = "TOKENIZER", default_value = "bytes")]
    tokenizer: String,
    /// Predicted tokens per sample.
    #[arg(long, value_name = "N", default_value = "512")]
    seq_len: NonZeroUsize,
    /// The token that ends a document, by its text; by default the tokenizer's usual one.
    #[arg(long, value_name = "TOKEN")]
    eos_token: Option<String>,
    /// Samples of each shard; by default about 64 MiB of tokens.
    #[arg(long, value_name = "N")]
    shard_samples: Option<NonZeroUsize>,
    /// Make files that are unreadable or not UTF-8 an error that leaves nothing behind.
    #[arg(long)]
    strict: bool,
    /// Threads that read and tokenize; they change no byte. By default one per core.
    #[arg(short = 'w', long, value_name = "N")]
    workers: Option<NonZeroUsize>,
    /// How the report is printed.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub(crate) fn run(arguments: &PrepareArguments) -> anyhow::Result<ExitCode> {
    let cores = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let settings = PrepareSettings {
        glob: arguments.glob.clone(),
        workers: arguments.workers.unwrap_or(cores),
        strictness: if arguments.strict { Strictness::Strict } else { Strictness::Lenient },
        shard_samples: arguments.shard_samples,
        ..PrepareSettings::new(arguments.input.clone(), arguments.output.clone(), arguments.seq_len)
    };
    let tokenizer: Box<dyn Tokenize> = match arguments.tokenizer.as_str() {
        "bytes" => Box::new(ByteTokenizer),
        path => Box::new(DocumentTokenizer::open(path.as_ref(), arguments.eos_token.as_deref())?),
    };
    let interrupted = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&interrupted);
    ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed))?;
    let bar =
        progress::bar(0, "{wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} eta {eta} {msg}");
    let mut show = |now: Progress| {
        bar.set_length(now.bytes_total);
        bar.set_position(now.bytes_done);
        bar.set_message(format!("{} documents, {} samples", now.documents, now.samples));
        if interrupted.load(Ordering::Relaxed) {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    };
    let report = prepare(&settings, tokenizer.as_ref(), &mut show);
    bar.finish_and_clear();
    let report = report?;
    for skipped in &report.skipped {
        note_line!("skipped {}: {}", skipped.path.display(), one_line(&skipped.reason));
    }
    print(&report, arguments)?;
    Ok(ExitCode::SUCCESS)
}

fn print(report: &PrepareReport, arguments: &PrepareArguments) -> anyhow::Result<()> {
    let skipped: Vec<serde_json::Value> = report
        .skipped
        .iter()
        .map(|skipped| {
            let (path, reason) = (skipped.path.display().to_string(), one_line(&skipped.reason));
            serde_json::json!({ "path": path, "reason": reason })
        })
        .collect();
    match arguments.format {
        Format::Json => result_line!(
            "{}",
            serde_json::json!({
                "documents": report.documents,
                "empty": report.empty,
                "duplicates": report.duplicates,
                "skipped": skipped,
                "text_bytes": report.text_bytes,
                "tokens": report.tokens,
                "dropped_tokens": report.dropped_tokens,
                "samples": report.samples,
                "shards": report.shards,
                "shard_bytes": report.shard_bytes,
            })
        )?,
        Format::Text => {
            result_line!(
                "{}: {} samples of {} tokens in {} shards ({:.1} MB)",
                arguments.output.display(),
                report.samples,
                arguments.seq_len,
                report.shards,
                report.shard_bytes as f64 / 1e6,
            )?;
            result_line!(
                "from {} documents ({:.1} MB of text, {} tokens); {} empty, {} reached twice, {} skipped",
                report.documents,
                report.text_bytes as f64 / 1e6,
                report.tokens,
                report.empty,
                report.duplicates,
                skipped.len(),
            )?;
            result_line!(
                "{} tokens at the end fill no sample and were dropped",
                report.dropped_tokens
            )?;
        }
    }
    Ok(())
}

/// A tokenizer.json as `prepare` uses it.
struct DocumentTokenizer {
    tokenizer: TextTokenizer,
    json: String,
    vocab_size: u32,
    eos: u32,
}

/// What families of tokenizers call the token that ends a document, the likeliest first.
const USUAL_END_TOKENS: [&str; 5] =
    ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>"];

impl DocumentTokenizer {
    fn open(path: &Path, eos_token: Option<&str>) -> anyhow::Result<Self> {
        let tokenizer = TextTokenizer::open(path)?;
        let eos = match eos_token {
            Some(text) => tokenizer.token_id(text),
            None => USUAL_END_TOKENS.iter().find_map(|text| tokenizer.token_id(text)),
        };
        let eos = eos.ok_or_else(|| {
            let wanted = eos_token.map_or(USUAL_END_TOKENS.join(", "), str::to_owned);
            anyhow::anyhow!(
                "{}: expected a token that ends documents, found none of {wanted}; name one with \
                 --eos-token",
                path.display()
            )
        })?;
        let vocab_size = tokenizer.vocab_size();
        Ok(Self { tokenizer, json: std::fs::read_to_string(path)?, vocab_size, eos })
    }
}

impl Tokenize for DocumentTokenizer {
    fn encode(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), TokenizeError> {
        tokens.extend(self.tokenizer.encode(text)?);
        Ok(())
    }

    fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    fn bos_token_id(&self) -> Option<u32> {
        None
    }

    fn eos_token_id(&self) -> u32 {
        self.eos
    }

    fn pad_token_id(&self) -> Option<u32> {
        None
    }

    fn tokenizer_json(&self) -> Option<String> {
        Some(self.json.clone())
    }
}
