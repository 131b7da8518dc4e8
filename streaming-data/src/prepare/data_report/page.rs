//! The page: one file of HTML with its styles and pictures in it. It needs no network and no script, and forbids both.

mod chart;
mod markup;

use std::fmt::Write;

use self::{
    chart::histogram,
    markup::{bytes, count, escaped, escaped_lines, number, percent, width},
};
use super::{
    DataReport, DuplicateGroups, EXAMPLES, EXCERPT_CHARACTERS, Histogram, OfVerdict, ShownDocument,
    Sources, Verdict,
    difference::{Changed, Difference},
};

const STYLE: &str = include_str!("page/style.css");

/// The page of a report.
pub(super) fn page(report: &DataReport) -> String {
    let mut html = String::new();
    _ = write!(
        html,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"referrer\" content=\"no-referrer\">\n\
         <title>What the data set is made of</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n\
         <header>\n<h1>What the data set is made of</h1>\n\
         <p class=\"soft\">Version <code>{}</code></p>\n",
        report.fingerprint
    );
    tiles(&mut html, report);
    html.push_str("</header>\n");
    if let Some(update) = &report.update {
        changes(&mut html, update);
    }
    verdicts(&mut html, report);
    examples(&mut html, &report.verdicts);
    lengths(&mut html, report);
    if let Some(groups) = &report.duplicates {
        duplicates(&mut html, groups);
    }
    sources(&mut html, &report.sources, report.data.tokens);
    _ = write!(
        html,
        "<footer><p>Written by <code>tidemill prepare --report</code>. The same numbers stand in <code>{}</code>, for programs. \
         The page is a function of the documents and the settings.</p></footer>\n</main>\n</body>\n</html>\n",
        super::REPORT_FILE
    );
    html
}

fn tiles(html: &mut String, report: &DataReport) {
    let (data, documents) = (&report.data, &report.documents);
    html.push_str("<dl class=\"tiles\">\n");
    let mut tile = |name: &str, value: String, about: String| {
        _ = writeln!(html, "<div><dt>{name}</dt><dd>{value}<small>{about}</small></dd></div>");
    };
    let kept = percent(documents.kept, documents.read);
    let of = format!("{kept} of {}", number(documents.read));
    tile("Documents kept", number(documents.kept), of);
    let dropped = format!("{} at ends fill no sample", number(data.dropped_tokens));
    tile("Tokens", number(data.tokens), dropped);
    let each =
        format!("of {} tokens, vocabulary {}", number(data.seq_len), number(data.vocab_size));
    tile("Samples", number(data.samples), each);
    tile("Shards", number(data.shards), bytes(data.shard_bytes));
    let skipped = format!("{} could not be read in full", number(report.inputs.skipped));
    tile("Inputs", number(report.inputs.read), skipped);
    html.push_str("</dl>\n");
}

/// The class that gives a verdict its colour.
fn class(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::Kept => "kept",
        Verdict::Excluded => "excluded",
        Verdict::Rejected(_) => "rejected",
        Verdict::Copy => "copy",
        Verdict::NearCopy => "near",
    }
}

/// Verdicts as they are listed: of rules, the one that left out most comes first.
fn in_order(verdicts: &[OfVerdict]) -> Vec<&OfVerdict> {
    let mut verdicts: Vec<&OfVerdict> = verdicts.iter().collect();
    verdicts.sort_by_key(|of| {
        let place = match of.verdict {
            Verdict::Kept => 0,
            Verdict::Excluded => 1,
            Verdict::Rejected(_) => 2,
            Verdict::Copy => 3,
            Verdict::NearCopy => 4,
        };
        (place, std::cmp::Reverse(of.documents))
    });
    verdicts
}

fn verdicts(html: &mut String, report: &DataReport) {
    let all = report.documents.read;
    html.push_str(
        "<section aria-labelledby=\"verdicts\">\n<h2 id=\"verdicts\">What became of the documents</h2>\n\
         <p class=\"soft\">Lists are asked first, then filters, then duplicates; what one leaves out is seen by none behind it.</p>\n\
         <div class=\"stack\" aria-hidden=\"true\">",
    );
    // All rules together are one piece of the bar.
    let mut pieces: Vec<(&str, u64)> = Vec::new();
    for of in &report.verdicts {
        let class = class(&of.verdict);
        match pieces.last_mut().filter(|piece| piece.0 == class) {
            Some(piece) => piece.1 = piece.1.saturating_add(of.documents),
            None => pieces.push((class, of.documents)),
        }
    }
    for (class, documents) in pieces {
        _ = write!(html, "<span class=\"{class}\" style=\"flex:{documents} 1 0\"></span>");
    }
    html.push_str(
        "</div>\n<div class=\"scroll\"><table><thead><tr><th scope=\"col\">Verdict</th>\
         <th scope=\"col\" class=\"n\">Documents</th><th scope=\"col\" class=\"n\">Share</th>\
         <th scope=\"col\" class=\"n\">Text</th><th scope=\"col\"><span aria-hidden=\"true\"></span></th></tr></thead>\n<tbody>\n",
    );
    let most = report.verdicts.iter().map(|of| of.documents).max().unwrap_or(0);
    for of in in_order(&report.verdicts) {
        let class = class(&of.verdict);
        _ = writeln!(
            html,
            "<tr><th scope=\"row\"><span class=\"dot {class}\"></span>{}</th><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"n\">{}</td><td class=\"share\"><i class=\"{class}\" style=\"width:{}\"></i></td></tr>",
            escaped(&of.verdict.to_string()),
            number(of.documents),
            percent(of.documents, all),
            bytes(of.bytes),
            width(of.documents, most),
        );
    }
    html.push_str("</tbody></table></div>\n");
    let documents = &report.documents;
    _ = writeln!(
        html,
        "<p class=\"note\">Beside these there were {}, {}, and {} or rows, which are no documents.</p>",
        count(documents.empty, "empty text"),
        count(documents.nulls, "null"),
        count(documents.broken, "broken line")
    );
    if let Some(lines) = report.dropped_lines.as_ref().filter(|lines| !lines.is_empty()) {
        let told: Vec<String> = lines
            .iter()
            .map(|(rule, count)| format!("{} by {}", number(*count), escaped(rule)))
            .collect();
        _ = writeln!(
            html,
            "<p class=\"note\">Lines that filters took out: {}.</p>",
            told.join(", ")
        );
    }
    html.push_str("</section>\n");
}

fn examples(html: &mut String, verdicts: &[OfVerdict]) {
    _ = writeln!(
        html,
        "<section aria-labelledby=\"examples\">\n<h2 id=\"examples\">Examples</h2>\n\
         <p class=\"soft\">The first {EXAMPLES} documents of each verdict as they were read, up to {EXCERPT_CHARACTERS} characters. \
         Characters that would not be seen are told by their symbols or numbers. A hash is a key for <code>--exclude</code>.</p>"
    );
    let verdicts = in_order(verdicts);
    // Readers look for documents that are left out.
    let first = verdicts.iter().find(|of| of.verdict != Verdict::Kept).map(|of| &of.verdict);
    for of in verdicts.iter().filter(|of| !of.examples.is_empty()) {
        let open = if first == Some(&of.verdict) { " open" } else { "" };
        _ = writeln!(
            html,
            "<details{open}><summary><span class=\"dot {}\"></span><strong>{}</strong> \
             <span class=\"soft\">{}</span></summary>",
            class(&of.verdict),
            escaped(&of.verdict.to_string()),
            number(of.documents)
        );
        of.examples.iter().for_each(|example| shown(html, example));
        html.push_str("</details>\n");
    }
    html.push_str("</section>\n");
}

fn shown(html: &mut String, example: &ShownDocument) {
    let place = example.place.as_ref().map_or_else(String::new, |it| format!(", {}", escaped(it)));
    let hash = example.hash.map_or_else(String::new, |hash| format!(" · <code>{hash}</code>"));
    let (excerpt, cut) = (&example.excerpt, if example.excerpt.is_cut() { " …" } else { "" });
    _ = writeln!(
        html,
        "<article class=\"example\"><p><bdi>{}</bdi>{place} <span class=\"soft\">· {} bytes{hash}</span></p>\
         <pre dir=\"auto\">{}{cut}</pre></article>",
        escaped(&example.path),
        number(excerpt.document_bytes),
        escaped_lines(&excerpt.text)
    );
}

fn lengths(html: &mut String, report: &DataReport) {
    html.push_str(
        "<section aria-labelledby=\"lengths\">\n<h2 id=\"lengths\">How long documents are</h2>\n\
         <p class=\"soft\">A bar counts the documents from its length up to the next.</p>\n<div class=\"charts\">\n",
    );
    let lengths = &report.lengths;
    let charts = [
        ("Kept, in tokens", &lengths.kept_tokens, "tokens"),
        ("Kept, in bytes of text", &lengths.kept_bytes, "bytes"),
        ("Left out, in bytes of text", &lengths.left_out_bytes, "bytes"),
    ];
    // Samples that were tokenized already have no text.
    for (name, lengths, unit) in charts.into_iter().filter(|(_, lengths, _)| lengths.count > 0) {
        let about = about(lengths, unit);
        html.push_str(&histogram((name, &about), ("documents", unit), &lengths.buckets));
    }
    html.push_str("</div>\n</section>\n");
}

/// Mean and longest.
fn about(lengths: &Histogram, unit: &str) -> String {
    let mean = lengths.total.checked_div(lengths.count).unwrap_or(0);
    format!(
        "{}, {} {unit} in all; mean {}, longest {}",
        count(lengths.count, "document"),
        number(lengths.total),
        number(mean),
        number(lengths.largest)
    )
}

fn duplicates(html: &mut String, groups: &DuplicateGroups) {
    let alone = groups.compared.saturating_sub(groups.documents);
    _ = writeln!(
        html,
        "<section aria-labelledby=\"duplicates\">\n<h2 id=\"duplicates\">Groups of duplicates</h2>\n\
         <p class=\"soft\">{} were compared. {} are like no other; {} are in {}, in which one is like the next. \
         The largest group has {}.</p>",
        count(groups.compared, "document"),
        number(alone),
        number(groups.documents),
        count(groups.groups, "group"),
        count(groups.sizes.largest, "document")
    );
    let of_several: Vec<_> =
        groups.sizes.buckets.iter().copied().filter(|bucket| bucket.from > 1).collect();
    let name = ("Groups by size", "Those of two documents and more");
    html.push_str(&histogram(name, ("groups", "documents in a group"), &of_several));
    html.push_str("</section>\n");
}

fn sources(html: &mut String, sources: &Sources, tokens: u64) {
    html.push_str(
        "<section aria-labelledby=\"sources\">\n<h2 id=\"sources\">Where the tokens come from</h2>\n<div class=\"scroll\"><table>\
         <thead><tr><th scope=\"col\">Source</th><th scope=\"col\" class=\"n\">Inputs</th>\
         <th scope=\"col\" class=\"n\">Documents</th><th scope=\"col\" class=\"n\">Kept</th><th scope=\"col\" class=\"n\">Tokens</th>\
         <th scope=\"col\" class=\"n\">Share</th><th scope=\"col\"><span aria-hidden=\"true\"></span></th></tr></thead>\n<tbody>\n",
    );
    let most = sources.listed.first().map_or(0, |source| source.tokens);
    for source in &sources.listed {
        _ = writeln!(
            html,
            "<tr><th scope=\"row\"><bdi>{}</bdi></th><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"share\"><i style=\"width:{}\"></i></td></tr>",
            escaped(&source.path),
            number(source.inputs),
            number(source.documents),
            number(source.kept),
            number(source.tokens),
            percent(source.tokens, tokens),
            width(source.tokens, most),
        );
    }
    html.push_str("</tbody></table></div>\n");
    let others = &sources.others;
    if others.sources > 0 {
        _ = writeln!(
            html,
            "<p class=\"note\">{} other sources are not listed: {} inputs, {} documents, {} of them kept, {} tokens.</p>",
            number(others.sources),
            number(others.inputs),
            number(others.documents),
            number(others.kept),
            number(others.tokens)
        );
    }
    html.push_str("</section>\n");
}

fn changes(html: &mut String, update: &Difference) {
    _ = writeln!(
        html,
        "<section aria-labelledby=\"changes\">\n<h2 id=\"changes\">What the update changed</h2>\n\
         <p class=\"soft\">Against version <code>{}</code>. Documents of an input are told apart by their texts; as many as were \
         replaced there count as changed.</p>\n<div class=\"scroll\"><table><thead><tr><td></td>\
         <th scope=\"col\" class=\"n\">Added</th><th scope=\"col\" class=\"n\">Removed</th>\
         <th scope=\"col\" class=\"n\">Changed</th><th scope=\"col\" class=\"n\">As before</th></tr></thead>\n<tbody>",
        update.former
    );
    for (name, changed) in [("Inputs", update.inputs), ("Documents", update.documents)] {
        let Changed { added, removed, changed, unchanged } = changed;
        _ = writeln!(
            html,
            "<tr><th scope=\"row\">{name}</th><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"n\">{}</td></tr>",
            number(added),
            number(removed),
            number(changed),
            number(unchanged)
        );
    }
    let shards = &update.shards;
    _ = writeln!(
        html,
        "<tr><th scope=\"row\">Shards</th><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">0</td>\
         <td class=\"n\">{}</td></tr>\n</tbody></table></div>",
        number(shards.written),
        number(shards.gone),
        number(shards.kept)
    );
    if update.verdicts.is_empty() {
        html.push_str(
            "<p class=\"note\">No document that stayed has another verdict than before.</p>\n",
        );
    } else {
        html.push_str(
            "<h3>Verdicts that changed on documents which did not</h3>\n<div class=\"scroll\"><table><thead><tr>\
             <th scope=\"col\">Before</th><th scope=\"col\">Now</th><th scope=\"col\" class=\"n\">Documents</th></tr></thead><tbody>\n",
        );
        for change in &update.verdicts {
            _ = writeln!(
                html,
                "<tr><td><span class=\"dot {}\"></span>{}</td><td><span class=\"dot {}\"></span>{}</td><td class=\"n\">{}</td></tr>",
                class(&change.from),
                escaped(&change.from.to_string()),
                class(&change.to),
                escaped(&change.to.to_string()),
                number(change.documents)
            );
        }
        html.push_str("</tbody></table></div>\n");
    }
    html.push_str("</section>\n");
}
