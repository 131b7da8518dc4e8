//! The report on a data set, in words.

use indicatif::DecimalBytes;
use tidemill_streaming_data::prepare::data_report::{
    Changed, DataReport, Difference, Histogram, ShownDocument, in_a_line,
};

use crate::cli::output::{counted, result_line};

/// Characters of an example that are printed.
const PRINTED_CHARACTERS: usize = 100;
/// Sources that are printed.
const PRINTED_SOURCES: usize = 10;

/// Prints a report, or how to get one.
pub(super) fn print(report: Option<&DataReport>) -> anyhow::Result<()> {
    let Some(report) = report else {
        return result_line!(
            "report: none; `tidemill prepare --report` writes what a data set is made of"
        );
    };
    let (documents, inputs) = (&report.documents, &report.inputs);
    result_line!("report:")?;
    result_line!(
        "  kept: {} of {}; {} empty, {} null, {} lines or rows broken",
        counted(documents.kept, "document", "documents"),
        documents.read,
        counted(documents.empty, "text was", "texts were"),
        documents.nulls,
        documents.broken,
    )?;
    result_line!(
        "  {} read, {} could not be or not in full, {} reached once more",
        counted(inputs.read, "input was", "inputs were"),
        inputs.skipped,
        counted(inputs.reached_again, "was", "were"),
    )?;
    for of in &report.verdicts {
        let share = 100.0 * of.documents as f64 / documents.read.max(1) as f64;
        let bytes = DecimalBytes(of.bytes);
        let verdict = in_a_line(&of.verdict.to_string());
        let documents = counted(of.documents, "document", "documents");
        result_line!("  {verdict}: {documents} ({share:.1} %), {bytes}")?;
        of.examples.iter().try_for_each(example)?;
    }
    for (rule, lines) in report.dropped_lines.iter().flatten() {
        result_line!("  lines taken out by {}: {lines}", in_a_line(rule))?;
    }
    let lengths = &report.lengths;
    histogram("documents kept, by tokens", &lengths.kept_tokens)?;
    histogram("documents kept, by bytes", &lengths.kept_bytes)?;
    histogram("documents left out, by bytes", &lengths.left_out_bytes)?;
    if let Some(groups) = &report.duplicates {
        result_line!(
            "  {} compared: {} in {} alike, the others like none",
            counted(groups.compared, "document was", "documents were"),
            counted(groups.documents, "is", "are"),
            counted(groups.groups, "group that is", "groups that are"),
        )?;
        histogram("groups of duplicates, by documents", &groups.sizes)?;
    }
    let sources = &report.sources;
    result_line!("  tokens by source:")?;
    for source in sources.listed.iter().take(PRINTED_SOURCES) {
        result_line!(
            "    {}: {} of {}, {} of them kept",
            in_a_line(&source.path),
            counted(source.tokens, "token", "tokens"),
            counted(source.documents, "document", "documents"),
            source.kept,
        )?;
    }
    let left = sources.listed.iter().skip(PRINTED_SOURCES);
    let others = left.clone().count() as u64 + sources.others.sources;
    if others > 0 {
        let tokens = left.map(|source| source.tokens).sum::<u64>() + sources.others.tokens;
        result_line!("    and {others} more: {}", counted(tokens, "token", "tokens"))?;
    }
    report.update.as_ref().map_or(Ok(()), changes)
}

fn example(example: &ShownDocument) -> anyhow::Result<()> {
    let begins: String = example.excerpt.text.chars().take(PRINTED_CHARACTERS).collect();
    let is_cut = begins.len() < example.excerpt.text.len() || example.excerpt.is_cut();
    let place = example.place.as_ref().map_or_else(String::new, |place| format!(", {place}"));
    result_line!(
        "    {}{}: {}{}",
        in_a_line(&example.path),
        in_a_line(&place),
        in_a_line(&begins),
        if is_cut { " ..." } else { "" },
    )
}

fn histogram(name: &str, histogram: &Histogram) -> anyhow::Result<()> {
    if histogram.count == 0 {
        return Ok(());
    }
    let mean = histogram.total as f64 / histogram.count as f64;
    result_line!("  {name} (mean {mean:.1}, largest {}):", histogram.largest)?;
    for bucket in &histogram.buckets {
        result_line!("    {} to {}: {}", bucket.from, bucket.to, bucket.count)?;
    }
    Ok(())
}

fn changes(update: &Difference) -> anyhow::Result<()> {
    result_line!("  the update, against version {}:", update.former)?;
    for (name, changed) in [("inputs", update.inputs), ("documents", update.documents)] {
        let Changed { added, removed, changed, unchanged } = changed;
        result_line!(
            "    {name}: {added} added, {removed} removed, {changed} changed, {unchanged} as before"
        )?;
    }
    for change in &update.verdicts {
        let (from, to) = (change.from.to_string(), change.to.to_string());
        result_line!(
            "    {}: {}, now {}",
            counted(change.documents, "document", "documents"),
            in_a_line(&from),
            in_a_line(&to)
        )?;
    }
    let shards = &update.shards;
    result_line!(
        "    shards: {} written, {} kept, {} of before gone",
        shards.written,
        shards.kept,
        shards.gone,
    )
}
