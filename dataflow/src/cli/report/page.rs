//! The page: one HTML file that needs nothing else, and is well-formed XML too.
//!
//! All charts have the same steps from left to right. Text that comes from runs is [escaped](super::escape) where it is written.

use std::collections::BTreeSet;
use std::fmt::{self, Write};

use super::chart::{COLORS, Chart, Line, Stroke};
use super::escape::Escaped;
use super::log::Log;
use super::past::Mark;
use super::run::{Run, STEP_MILLISECONDS};
use super::series::{Point, Series};
use super::tables;
use crate::metrics::STEP_NUMBERS;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Nothing may be loaded from anywhere.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'";

/// Numbers without a chart: they are in tables, or in the chart of losses.
const TOLD_ELSEWHERE: [&str; 3] = ["loss", "tokens", "elapsed_seconds"];

/// Numbers of metrics that have charts before others, by their keys in a log, with the titles of the charts.
fn known() -> impl Iterator<Item = (&'static str, &'static str)> {
    let of_steps = STEP_NUMBERS.iter().map(|number| (number.key, number.description));
    let derived = (STEP_MILLISECONDS, "Time of a step (ms)");
    let shown = of_steps.filter(|(key, _)| !TOLD_ELSEWHERE.contains(key));
    shown.chain([derived])
}

/// The page about `runs`.
pub(super) fn page(runs: &[Run]) -> String {
    let mut page = String::new();
    write_page(&mut page, runs).expect("a string takes all that is written");
    page
}

fn write_page(page: &mut String, runs: &[Run]) -> fmt::Result {
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    let names = names.join(", ");
    let title = Escaped(&names);
    writeln!(
        page,
        "<!DOCTYPE html>\n<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\"><head>"
    )?;
    writeln!(
        page,
        "<meta charset=\"utf-8\" /><meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\" />"
    )?;
    writeln!(page, "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\" />")?;
    writeln!(page, "<title>{title}: training report</title>\n<style>\n{STYLE}")?;
    for run in 0..runs.len() {
        writeln!(page, "body:has(#show{run}:not(:checked)) .run{run} {{ display: none; }}")?;
    }
    writeln!(page, "</style></head><body>\n<h1>{title}</h1>")?;
    write_legend(page, runs)?;
    write_notes(page, runs)?;
    tables::write_summary(page, runs)?;
    write_charts(page, runs)?;
    tables::write_time(page, runs)?;
    tables::write_starts(page, runs)?;
    tables::write_settings(page, runs)?;
    let version = env!("CARGO_PKG_VERSION");
    writeln!(
        page,
        "<p class=\"faint\">Written by tidemill {version}. Of long runs, lines show the least and the largest value of each few steps.</p>"
    )?;
    writeln!(page, "<script>\n{SCRIPT}</script>\n</body></html>")
}

fn write_legend(page: &mut String, runs: &[Run]) -> fmt::Result {
    writeln!(page, "<div class=\"legend\">")?;
    for (index, run) in runs.iter().enumerate() {
        let color = index % COLORS;
        write!(page, "<label><input type=\"checkbox\" id=\"show{index}\" checked=\"checked\" /> ")?;
        writeln!(page, "<span class=\"swatch c{color}\"></span> {}</label>", Escaped(&run.name))?;
    }
    writeln!(page, "<label><input type=\"checkbox\" id=\"logarithmic\" /> logarithmic</label>")?;
    writeln!(
        page,
        "<span class=\"faint\">dashed: evaluation; \u{2715} last step before a kill or failure; \u{25b8} resumed from here; shaded: steps that were done again, and are shown as they were the last time</span></div>"
    )
}

fn write_notes(page: &mut String, runs: &[Run]) -> fmt::Result {
    if runs.iter().all(|run| run.notes.is_empty()) {
        return Ok(());
    }
    writeln!(page, "<ul class=\"notes\">")?;
    for run in runs {
        for note in &run.notes {
            writeln!(page, "<li>{}: {}</li>", Escaped(&run.name), Escaped(note))?;
        }
    }
    writeln!(page, "</ul>")
}

fn write_charts(page: &mut String, runs: &[Run]) -> fmt::Result {
    let marks: Vec<Vec<Mark>> = runs.iter().map(|run| run.past.marks()).collect();
    let last_step = runs.iter().map(Run::last_step).max().unwrap_or(0);
    let pictures = pictures(runs);
    if pictures.is_empty() {
        return writeln!(page, "<p>There is no step to show yet.</p>");
    }
    writeln!(page, "<h2>Over steps</h2>\n<div class=\"charts\">")?;
    for (title, lines) in pictures {
        Chart { title, last_step, lines, marks: &marks }.write(page)?;
    }
    writeln!(page, "</div>")
}

/// The titles and lines of charts; each has at least one line.
fn pictures(runs: &[Run]) -> Vec<(String, Vec<Line>)> {
    let mut losses = lines(runs, "training", Stroke::Solid, |run| run.metrics.get("loss"));
    losses.extend(lines(runs, "evaluation", Stroke::Dashed, |run| run.evaluations.get("loss")));
    let mut pictures = vec![("Loss (nats a token)".to_owned(), losses)];
    for (name, title) in known() {
        let of_name = lines(runs, name, Stroke::Solid, |run| {
            // A run that exchanges nothing in some way has no chart of that.
            run.metrics.get(name).filter(|series| series.sum() != 0.0)
        });
        pictures.push((title.to_owned(), of_name));
    }
    pictures.push(("Workers".to_owned(), worlds(runs)));
    let is_known = |name: &str| known().any(|(known, _)| known == name);
    for name in names(runs, |run| &run.evaluations) {
        let of_name = lines(runs, name, Stroke::Dashed, |run| run.evaluations.get(name));
        pictures.push((format!("Evaluation: {name}"), of_name));
    }
    for name in names(runs, |run| &run.metrics).filter(|name| !is_known(name)) {
        let of_name = lines(runs, name, Stroke::Solid, |run| run.metrics.get(name));
        pictures.push((name.to_owned(), of_name));
    }
    pictures.retain(|(_, lines)| !lines.is_empty());
    pictures
}

/// The numbers of the logs of all runs that are not told elsewhere.
fn names(runs: &[Run], log: impl Fn(&Run) -> &Log) -> impl Iterator<Item = &str> {
    let names: BTreeSet<&str> =
        runs.iter().flat_map(|run| log(run).series.keys()).map(String::as_str).collect();
    names.into_iter().filter(|name| !TOLD_ELSEWHERE.contains(name))
}

/// One line for each run that has such a series.
fn lines(
    runs: &[Run],
    what: &str,
    stroke: Stroke,
    series: impl Fn(&Run) -> Option<&Series>,
) -> Vec<Line> {
    let line = |(index, run): (usize, &Run)| {
        let points = series(run)?.points();
        Some(Line { run: index, label: format!("{}, {what}", run.name), points, stroke })
    };
    runs.iter().enumerate().filter_map(line).collect()
}

/// How many workers each run has had, up to its last step.
fn worlds(runs: &[Run]) -> Vec<Line> {
    let line = |(index, run): (usize, &Run)| {
        let worlds = run.past.workers();
        let point = |(step, workers)| Point { step, value: workers as f64 };
        let mut points: Vec<Point> = worlds.into_iter().map(point).collect();
        let last = *points.last()?;
        points.push(Point { step: last.step.max(run.last_step()), ..last });
        let label = format!("{}, workers", run.name);
        Some(Line { run: index, label, points, stroke: Stroke::Stairs })
    };
    runs.iter().enumerate().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::report::past::tests::{end, past, start};

    fn run(name: &str, metrics: &[&str], evaluations: &[&str]) -> Run {
        let log = |names: &[&str]| {
            let mut log = Log { steps: Some([1, 9]), ..Log::default() };
            for name in names {
                let series = log.series.entry((*name).to_owned()).or_default();
                (1..10).for_each(|step| series.push(step, step as f64));
            }
            log
        };
        Run {
            name: name.to_owned(),
            metrics: log(metrics),
            evaluations: log(evaluations),
            past: past([start(0, 0, 2), start(4, 3, 1), end(9)]),
            config: Some("[run]\nsteps = 9 # <&>".to_owned()),
            devices: Some("a \"device\"".to_owned()),
            notes: vec!["<note>".to_owned()],
        }
    }

    #[test]
    fn every_number_has_a_chart_and_known_ones_come_first() {
        let one = run("a", &["loss", "tokens", "tokens_per_second", "own.number"], &["loss"]);
        let other = run("b", &["loss"], &["loss", "tasks.arc.accuracy", "tokens"]);
        let runs = [one, other];
        let found: Vec<(String, usize)> =
            pictures(&runs).into_iter().map(|(title, lines)| (title, lines.len())).collect();
        let expected = [
            ("Loss (nats a token)", 4),
            ("Tokens per second", 1),
            ("Workers", 2),
            ("Evaluation: tasks.arc.accuracy", 1),
            ("own.number", 1),
        ];
        assert_eq!(found, expected.map(|(title, lines)| (title.to_owned(), lines)));
    }

    #[test]
    fn names_and_texts_of_runs_are_no_markup() {
        let runs = [run("</title><script>1", &["loss", "<i>"], &["loss"])];
        let page = page(&runs);
        assert_eq!(page.matches("<script").count(), 1);
        for hostile in ["<i>", "<note>", "<&>", "a \"device\""] {
            assert!(!page.contains(hostile), "{hostile}");
        }
        for shown in ["&lt;i&gt;", "&lt;note&gt;", "# &lt;&amp;&gt;", "a &quot;device&quot;"] {
            assert!(page.contains(shown), "{shown}");
        }
    }

    #[test]
    fn what_stands_in_every_page_is_no_markup_either() {
        assert!(!STYLE.contains(['<', '&']) && !SCRIPT.contains(['<', '&']));
        assert!(!STYLE.contains("url(") && !STYLE.contains("@import"));
    }
}
