//! `tidemill prepare --update`: a new version of a data set, of its inputs as they are now.

use std::num::NonZeroUsize;

use indicatif::DecimalBytes;
use tidemill_streaming_data::DataSet;
use tidemill_streaming_data::prepare::{
    ByteTokenizer, Tokenize, UpdateReport, UpdateSettings, Verify,
};
use tidemill_streaming_data::store::Location;

use super::document_tokenizer::DocumentTokenizer;
use super::places::{Task, What};
use super::report::samples_and_shards;
use super::{PrepareArguments, note_left_out, report};
use crate::cli::Format;
use crate::cli::output::{counted, note_line, result_line};

/// Which data set is to be updated, by so many threads.
pub(super) fn task(arguments: &PrepareArguments, workers: NonZeroUsize) -> anyhow::Result<Task> {
    let (settings, tokenizer) = update(arguments, workers)?;
    Ok(Task { what: What::Update(settings), tokenizer })
}

/// How the data set is updated by so many threads, and by its own tokenizer.
pub(super) fn update(
    arguments: &PrepareArguments,
    workers: NonZeroUsize,
) -> anyhow::Result<(UpdateSettings, Box<dyn Tokenize>)> {
    let path = arguments.output.clone().unwrap_or_default();
    let data_set = DataSet::open(&path)?;
    let bytes = ByteTokenizer.tokenizer_json();
    let is_bytes =
        data_set.read_tokenizer()?.is_some_and(|json| bytes.is_some_and(|bytes| json == bytes));
    let tokenizer: Box<dyn Tokenize> = match is_bytes {
        true => Box::new(ByteTokenizer),
        false => Box::new(DocumentTokenizer::of_data_set(&data_set, arguments.tokenizer_library)?),
    };
    let settings = UpdateSettings {
        workers,
        dedup_memory_bytes: u64::from(arguments.dedup_memory_mib.get()) << 20,
        verify: if arguments.verify { Verify::All } else { Verify::No },
        ..UpdateSettings::new(path)
    };
    Ok((settings, tokenizer))
}

/// Prints the changes of a data set.
pub(super) fn print(
    updated: &UpdateReport,
    output: &Location,
    format: Format,
) -> anyhow::Result<()> {
    note_left_out(&updated.prepared)?;
    for path in &updated.prepared.changes.unnoticed {
        note_line!("{} changed, though its size and time are the same", path.display());
    }
    match format {
        Format::Json => result_line!("{}", json(updated)),
        Format::Text => in_words(updated, output),
    }
}

fn json(updated: &UpdateReport) -> serde_json::Value {
    let (prepared, changes) = (&updated.prepared, &updated.prepared.changes);
    let mut printed = report::numbers(prepared);
    printed["fingerprint"] = prepared.fingerprint.to_string().into();
    printed["former_fingerprint"] = updated.former.to_string().into();
    printed["rejected"] = serde_json::json!(changes.rejected);
    printed["copies"] = prepared.dedup.copies.into();
    printed["near_copies"] = prepared.dedup.near_copies.into();
    printed["excluded"] = prepared.excluded.into();
    printed["unused_exclusions"] = prepared.unused_exclusions.clone().into();
    let unnoticed: Vec<_> =
        changes.unnoticed.iter().map(|path| path.display().to_string()).collect();
    printed["changes"] = serde_json::json!({
        "inputs_read": changes.inputs_read,
        "inputs_kept": changes.inputs_kept,
        "inputs_gone": changes.inputs_gone,
        "unnoticed": unnoticed,
        "texts_read": changes.texts_read,
        "texts_tokenized": changes.texts_tokenized,
        "shards_kept": changes.shards_kept,
        "shards_read": changes.shards_read,
    });
    printed
}

fn in_words(updated: &UpdateReport, output: &Location) -> anyhow::Result<()> {
    let (prepared, changes) = (&updated.prepared, &updated.prepared.changes);
    let what = match updated.former == prepared.fingerprint {
        true => "its samples are what they were".to_owned(),
        false => format!("version {}", prepared.fingerprint),
    };
    result_line!("{output}: {what}")?;
    result_line!(
        "{} ({}), {} of them new",
        samples_and_shards(prepared),
        DecimalBytes(prepared.shard_bytes),
        prepared.shards - changes.shards_kept,
    )?;
    result_line!(
        "{} read, {} as before, {} gone; {} in what was read, {} tokenized",
        counted(changes.inputs_read, "input", "inputs"),
        changes.inputs_kept,
        changes.inputs_gone,
        counted(changes.texts_read, "document", "documents"),
        changes.texts_tokenized,
    )?;
    result_line!(
        "from {} ({}); {} rejected by filters, {}, {}, {} excluded, {} empty, {} null, {} broken",
        counted(prepared.documents, "document", "documents"),
        counted(prepared.tokens, "token", "tokens"),
        changes.rejected.values().sum::<u64>(),
        counted(prepared.dedup.copies, "copy", "copies"),
        counted(prepared.dedup.near_copies, "near copy", "near copies"),
        prepared.excluded,
        prepared.empty,
        prepared.nulls,
        prepared.broken,
    )
}
