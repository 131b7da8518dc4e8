//! `tidemill tokenizer`: documents to a tokenizer.json of byte-level byte pairs.

use std::collections::BTreeSet;
use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use clap::Args;
use indicatif::DecimalBytes;
use tidemill_streaming_data::prepare::{
    DEFAULT_GLOB, FilterSettings, PrepareError, Progress, Strictness, TextSettings, TextsReport,
    read_texts,
};
use tidemill_streaming_data::tokenizer::{BYTES, BytePairs, WordCounts};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

use super::output::{counted, result_line};
use super::prepare::note_skipped;
use super::processes::parse_threads;
use super::{Format, progress};
use crate::cli::exit::ExitCode;
use crate::error::JobError;

/// Flags of `tidemill tokenizer`.
#[derive(Debug, Args)]
pub(crate) struct TokenizerArguments {
    /// Files and folders, as `prepare` takes them: UTF-8 text, JSON lines (.jsonl, .ndjson, .json, also .gz and .zst), Parquet, and
    /// MDS folders of MosaicML.
    #[arg(long, value_name = "PATH", required = true, num_args = 1..)]
    input: Vec<PathBuf>,
    /// The tokenizer.json that is written, where nothing is.
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// Tokens of the vocabulary: 256 for bytes, the special ones, and what is merged. It has fewer if no pair occurs as often as
    /// --min-count says.
    #[arg(long, value_name = "N")]
    vocab_size: NonZeroU32,
    /// A token of its own, which is never merged with others; several flags for several. The first ends a document. Where a
    /// text spells one out, it becomes that token, as in Hugging Face's tokenizers.
    #[arg(long, value_name = "TOKEN", default_value = "<|endoftext|>")]
    special_token: Vec<String>,
    /// How often a pair of tokens must occur to be merged.
    #[arg(long, value_name = "N", default_value = "2")]
    min_count: NonZeroU64,
    /// The inputs in input folders.
    #[arg(long, value_name = "GLOB", default_value = DEFAULT_GLOB)]
    glob: String,
    /// Where the text of a line, row or sample is: a key or column, with dots into nested ones; by default `text`.
    #[arg(long, value_name = "KEY")]
    text_key: Option<String>,
    /// Which documents and lines are counted, as `prepare --filter` has it.
    #[arg(long, value_name = "NAME|FILE.toml,...")]
    filter: Option<String>,
    /// Make files, lines and rows that are no documents an error that leaves nothing behind.
    #[arg(long)]
    strict: bool,
    /// Threads that read and count; they change no byte. By default one per core. Documents take 32 MiB of memory for each, or
    /// what the largest takes; beside that, each different word takes about 100 bytes, and about 300 more when pairs are merged.
    #[arg(short = 'w', long, value_name = "N", value_parser = parse_threads)]
    workers: Option<NonZeroUsize>,
    /// How the report is printed.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub(crate) fn run(arguments: &TokenizerArguments) -> anyhow::Result<ExitCode> {
    let special = special_tokens(&arguments.special_token)?;
    let merged = merged_tokens(arguments.vocab_size, special.len())?;
    refuse_what_is_there(&arguments.output)?;
    if let Some(folder) = arguments.output.parent() {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("creating the folder {} failed", folder.display()))?;
    }
    let cores = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let settings = TextSettings {
        inputs: arguments.input.clone(),
        glob: arguments.glob.clone(),
        text_key: arguments.text_key.clone(),
        filters: match &arguments.filter {
            Some(list) => FilterSettings::from_list(list)?,
            None => FilterSettings::default(),
        },
        strictness: if arguments.strict { Strictness::Strict } else { Strictness::Lenient },
        workers: arguments.workers.unwrap_or(cores),
    };
    let interrupted = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&interrupted);
    ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed))?;
    let goes_on = || match interrupted.load(Ordering::Relaxed) {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    };
    let bar =
        progress::bar(0, "{wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} eta {eta} {msg}");
    let mut show = |now: Progress| {
        bar.set_length(now.bytes_total);
        bar.set_position(now.bytes_done);
        bar.set_message(counted(now.documents, "document", "documents"));
        goes_on()
    };
    let counts = WordCounts::default();
    let report = read_texts(&settings, &|text| counts.add_text(text), &mut show);
    bar.finish_and_clear();
    let report = report?;
    let words = counts.words();
    let bar = progress::bar(merged as u64, "{wide_bar} {pos}/{len} tokens eta {eta}");
    let mut show = |tokens: usize| {
        bar.set_position(tokens as u64);
        goes_on()
    };
    let least_count = arguments.min_count.get();
    let pairs = BytePairs::train(counts.into_words(), merged, least_count, &mut show);
    bar.finish_and_clear();
    let pairs = pairs.ok_or(PrepareError::Interrupted)?;
    let json = json(&pairs, &special)?;
    tidemill_files::durable::replace(&arguments.output, json.as_bytes())
        .with_context(|| format!("writing {} failed", arguments.output.display()))?;
    note_skipped(&report.skipped, (&report.named_broken, report.broken));
    print(arguments, &report, words, pairs.tokens().len() + special.len())?;
    Ok(ExitCode::SUCCESS)
}

/// The special tokens, each once.
fn special_tokens(tokens: &[String]) -> Result<Vec<AddedToken>, JobError> {
    let mut seen = BTreeSet::new();
    for token in tokens {
        if token.is_empty() || !seen.insert(token) {
            let expected = "tokens of a character or more, each once";
            return Err(JobError::value("--special-token", expected, format!("{token:?}")));
        }
    }
    Ok(tokens.iter().map(|token| AddedToken::from(token.as_str(), true)).collect())
}

/// How many tokens are not special.
fn merged_tokens(vocab_size: NonZeroU32, special: usize) -> Result<usize, JobError> {
    let least = BYTES + special;
    let size = vocab_size.get() as usize;
    if size < least {
        let expected = format!("at least {least}: a token for each byte, and {special} special");
        return Err(JobError::value("--vocab-size", expected, size));
    }
    Ok(size - special)
}

fn refuse_what_is_there(output: &Path) -> Result<(), JobError> {
    // A link to nothing is something too.
    if output.symlink_metadata().is_err() {
        return Ok(());
    }
    let found = format!("{}, which exists: name another, or remove it", output.display());
    Err(JobError::value("--output", "the path of a new file", found))
}

/// The tokenizer.json: special tokens first, then bytes and merged pairs.
fn json(pairs: &BytePairs, special: &[AddedToken]) -> anyhow::Result<String> {
    let texts: Vec<String> = (0..).take(pairs.tokens().len()).map(|id| pairs.text(id)).collect();
    if let Some(token) = special.iter().find(|token| texts.contains(&token.content)) {
        let expected = "a token that no text becomes";
        return Err(JobError::value("--special-token", expected, &token.content).into());
    }
    let special_texts = special.iter().map(|token| token.content.clone());
    let ids: Vocab = special_texts.chain(texts.iter().cloned()).zip(0..).collect();
    let merges = pairs.merges().iter().map(|merge| {
        let [left, right] = merge.map(|token| texts[token as usize].clone());
        (left, right)
    });
    let model = BPE::builder().vocab_and_merges(ids, merges.collect()).build();
    let mut tokenizer = Tokenizer::new(model.map_err(anyhow::Error::from_boxed)?);
    let bytes = ByteLevel::new(false, true, true);
    tokenizer.with_pre_tokenizer(Some(bytes)).with_decoder(Some(bytes));
    tokenizer.with_post_processor(Some(bytes.trim_offsets(false)));
    tokenizer.add_special_tokens(special);
    tokenizer.to_string(true).map_err(anyhow::Error::from_boxed)
}

fn print(
    arguments: &TokenizerArguments,
    report: &TextsReport,
    words: usize,
    tokens: usize,
) -> anyhow::Result<()> {
    let output = arguments.output.display();
    match arguments.format {
        Format::Json => {
            let printed = serde_json::json!({
                "output": output.to_string(),
                "documents": report.documents,
                "text_bytes": report.text_bytes,
                "words": words,
                "vocab_size": tokens,
                "skipped": report.skipped.len(),
                "broken": report.broken,
            });
            result_line!("{printed}")
        }
        Format::Text => {
            result_line!(
                "{output}: {} of {} in {} ({} of text)",
                counted(tokens, "token", "tokens"),
                counted(words, "word", "different words"),
                counted(report.documents, "document", "documents"),
                DecimalBytes(report.text_bytes),
            )?;
            if tokens < arguments.vocab_size.get() as usize {
                let times = counted(arguments.min_count.get(), "time", "times");
                result_line!("no other pair occurs {times}")?;
            }
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests;
