//! The report of `prepare`, in words and in JSON.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use indicatif::DecimalBytes;
use serde_json::Value;
use tidemill_streaming_data::prepare::{PrepareReport, PreparedFrom, Rule};
use tidemill_streaming_data::store::Location;

use super::{DedupKind, PrepareArguments};
use crate::cli::Format;
use crate::cli::exit::one_line;
use crate::cli::output::{counted, result_line};

/// Prints the report; `output` is without the secret parts of a URL.
pub(super) fn print(
    report: &PrepareReport,
    output: &Location,
    arguments: &PrepareArguments,
) -> anyhow::Result<()> {
    match arguments.format {
        Format::Json => {
            let mut printed = numbers(report);
            if arguments.updatable {
                printed["fingerprint"] = report.fingerprint.to_string().into();
            }
            if arguments.filter.is_some() {
                printed["rejected"] = by_rule(&report.filtered.rejected);
                printed["dropped_lines"] = by_rule(&report.filtered.dropped_lines);
            }
            if arguments.dedup != DedupKind::None {
                printed["copies"] = report.dedup.copies.into();
                printed["near_copies"] = report.dedup.near_copies.into();
            }
            if arguments.exclude.is_some() {
                printed["excluded"] = report.excluded.into();
                printed["unused_exclusions"] = report.unused_exclusions.clone().into();
            }
            result_line!("{printed}")?;
        }
        Format::Text => {
            result_line!(
                "{output}: {} ({})",
                samples_and_shards(report),
                DecimalBytes(report.shard_bytes),
            )?;
            print_source(report, arguments)?;
        }
    }
    Ok(())
}

/// Such as `45 samples of 32 tokens in 1 shard`.
pub(super) fn samples_and_shards(report: &PrepareReport) -> String {
    let samples = counted(report.samples, "sample", "samples");
    let tokens = counted(report.seq_len, "token", "tokens");
    format!("{samples} of {tokens} in {}", counted(report.shards, "shard", "shards"))
}

/// The numbers and names that every report has, in JSON.
pub(super) fn numbers(report: &PrepareReport) -> Value {
    let skipped: Vec<Value> = report
        .skipped
        .iter()
        .map(|skipped| {
            let (path, reason) = (skipped.path.display().to_string(), one_line(&skipped.reason));
            serde_json::json!({ "path": path, "reason": reason })
        })
        .collect();
    let broken: Vec<Value> = report
        .named_broken
        .iter()
        .map(|broken| {
            let (path, place) = (broken.path.display().to_string(), broken.place.to_string());
            let reason = broken.reason.to_string();
            serde_json::json!({ "path": path, "place": place, "reason": reason })
        })
        .collect();
    serde_json::json!({
        "documents": report.documents,
        "empty": report.empty,
        "nulls": report.nulls,
        "broken": report.broken,
        "named_broken": broken,
        "duplicates": report.duplicates,
        "skipped": skipped,
        "text_bytes": report.text_bytes,
        "tokens": report.tokens,
        "dropped_tokens": report.dropped_tokens,
        "seq_len": report.seq_len,
        "vocab_size": report.vocab_size,
        "samples": report.samples,
        "shards": report.shards,
        "shard_bytes": report.shard_bytes,
    })
}

/// Prints where the samples come from.
fn print_source(report: &PrepareReport, arguments: &PrepareArguments) -> anyhow::Result<()> {
    if report.from == PreparedFrom::TokenizedSamples {
        let stated = match (arguments.vocab_size, &arguments.tokenizer) {
            (Some(_), _) => "as --vocab-size says",
            (None, Some(_)) => "that of the tokenizer",
            (None, None) => "the largest token + 1",
        };
        return result_line!(
            "from {} tokenized already; vocabulary of {}: {stated}",
            counted(report.documents, "sample that was", "samples that were"),
            report.vocab_size,
        );
    }
    result_line!(
        "from {} ({} of text, {}); {} empty, {} null, {} broken, {} reached twice, {} skipped",
        documents(report.documents),
        DecimalBytes(report.text_bytes),
        counted(report.tokens, "token", "tokens"),
        report.empty,
        report.nulls,
        report.broken,
        counted(report.duplicates, "file", "files"),
        report.skipped.len(),
    )?;
    if arguments.exclude.is_some() {
        result_line!("the list excluded {}", documents(report.excluded))?;
    }
    if arguments.filter.is_some() {
        let rejected = documents(report.filtered.rejected_documents());
        result_line!("filters rejected {rejected}{}", told(&report.filtered.rejected))?;
        let dropped: u64 = report.filtered.dropped_lines.values().sum();
        if dropped > 0 {
            let rules = told(&report.filtered.dropped_lines);
            let lines = counted(dropped, "line", "lines");
            result_line!("and dropped {lines} of others{rules}")?;
        }
    }
    if arguments.dedup != DedupKind::None {
        let (copies, near) = (report.dedup.copies, report.dedup.near_copies);
        let copies = counted(copies, "document was a copy", "documents were copies");
        result_line!("{copies} of others, and {}", counted(near, "near copy", "near copies"))?;
    }
    let dropped = counted(report.dropped_tokens, "token", "tokens");
    result_line!("dropped at the end, where it fills no sample: {dropped}")
}

fn documents(count: u64) -> String {
    counted(count, "document", "documents")
}

/// Counts by rule, as JSON.
fn by_rule(counts: &BTreeMap<Rule, u64>) -> serde_json::Value {
    counts.iter().map(|(rule, count)| (rule.to_string(), serde_json::Value::from(*count))).collect()
}

/// Counts by rule behind a colon, the greatest first; nothing where there are none.
fn told(counts: &BTreeMap<Rule, u64>) -> String {
    let mut counts: Vec<_> = counts.iter().collect();
    counts.sort_by_key(|(_, count)| Reverse(**count));
    let rules: Vec<String> = counts.iter().map(|(rule, count)| format!("{count} {rule}")).collect();
    if rules.is_empty() { String::new() } else { format!(": {}", rules.join(", ")) }
}
