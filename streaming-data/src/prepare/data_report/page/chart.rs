//! Histograms as SVG, with the same numbers as a table for readers who cannot see them.

use std::fmt::Write;

use super::markup::{escaped, number, power_of_two, short};
use crate::prepare::data_report::Bucket;

const WIDTH: u64 = 560;
const HEIGHT: u64 = 170;
/// Space next to the bars for the unit of sizes.
const MARGIN: u64 = 60;
/// Room above the bars for counts, and below for sizes.
const ABOVE: u64 = 18;
const BELOW: u64 = 22;
/// The narrowest bar that has its own label, and the widest that there is.
const LABELLED: u64 = 28;
const WIDEST: u64 = 56;

/// A chart of counts by size. `name` names the counted things, `unit` the unit of a size.
pub(super) fn histogram(
    (name, about): (&str, &str),
    (things, unit): (&str, &str),
    buckets: &[Bucket],
) -> String {
    let mut html = String::new();
    let most = buckets.iter().map(|bucket| bucket.count).max().unwrap_or(0);
    _ = write!(
        html,
        "<figure><figcaption>{}<small>{}</small></figcaption>",
        escaped(name),
        escaped(about)
    );
    if most == 0 {
        html.push_str("<p class=\"soft\">None.</p></figure>\n");
        return html;
    }
    let step = ((WIDTH - MARGIN) / buckets.len() as u64).clamp(1, WIDEST);
    let every = LABELLED.div_ceil(step);
    let base = ABOVE + HEIGHT;
    _ = writeln!(
        html,
        "<svg viewBox=\"0 0 {WIDTH} {}\" role=\"img\" aria-label=\"{}: {} by {}; the table below has the numbers\">",
        base + BELOW,
        escaped(name),
        escaped(things),
        escaped(unit),
    );
    _ = writeln!(html, "<line x1=\"0\" y1=\"{base}\" x2=\"{WIDTH}\" y2=\"{base}\"/>");
    for (at, bucket) in (0..).zip(buckets) {
        let (left, middle) = (at * step, at * step + step / 2);
        let height = (u128::from(bucket.count) * u128::from(HEIGHT) / u128::from(most)) as u64;
        // A count above zero can be seen.
        let height = if bucket.count > 0 { height.max(2) } else { 0 };
        if bucket.count > 0 {
            let (top, width) = (base - height, step - (step / 8).max(1));
            _ = writeln!(
                html,
                "<rect x=\"{left}\" y=\"{top}\" width=\"{width}\" height=\"{height}\" rx=\"2\" fill=\"var(--bar)\">\
                 <title>{}: {} {}</title></rect>",
                range(bucket),
                number(bucket.count),
                escaped(things),
            );
        }
        if at.is_multiple_of(every) {
            if bucket.count > 0 {
                _ = writeln!(
                    html,
                    "<text class=\"count\" x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                    base - height - 5,
                    short(bucket.count),
                );
            }
            _ = writeln!(
                html,
                "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                base + 15,
                power_of_two(bucket.from),
            );
        }
    }
    _ = writeln!(
        html,
        "<text x=\"{WIDTH}\" y=\"{}\" text-anchor=\"end\">{}</text>",
        base - 6,
        escaped(unit)
    );
    html.push_str(
        "</svg>\n<details><summary class=\"note\">As a table</summary><table><thead><tr>",
    );
    _ = write!(
        html,
        "<th scope=\"col\">{}</th><th scope=\"col\" class=\"n\">{}</th></tr></thead><tbody>",
        escaped(unit),
        escaped(things)
    );
    for bucket in buckets {
        _ = write!(
            html,
            "<tr><th scope=\"row\">{}</th><td class=\"n\">{}</td></tr>",
            range(bucket),
            number(bucket.count)
        );
    }
    html.push_str("</tbody></table></details></figure>\n");
    html
}

fn range(bucket: &Bucket) -> String {
    match bucket.from == bucket.to {
        true => number(bucket.from),
        false => format!("{} to {}", number(bucket.from), number(bucket.to)),
    }
}
