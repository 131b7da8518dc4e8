//! The tables of a page: runs in a few numbers, where time went, starts, and configs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write};
use std::time::{Duration, UNIX_EPOCH};

use super::chart::COLORS;
use super::escape::Escaped;
use super::log::Log;
use super::past::{End, Sitting, world_in_words};
use super::run::{Run, STEP_MILLISECONDS};
use super::scale::short;
use super::series::Series;
use crate::history::{Ended, Started};
use crate::metrics::{DEVICE_BYTES, HOST_BYTES};

/// The last second that a calendar of four digits has.
const LAST_SECOND: u64 = 253_402_300_799;

/// Each run in a few numbers.
pub(super) fn write_summary(page: &mut String, runs: &[Run]) -> fmt::Result {
    let heads =
        ["steps", "last loss", "last evaluation", "tokens", "tokens/s", "time of these steps"];
    write!(page, "<h2>Runs</h2>\n<div class=\"table\"><table><tr><th>run</th>")?;
    for head in heads {
        write!(page, "<th class=\"number\">{head}</th>")?;
    }
    writeln!(page, "<th>workers at the last start</th><th>devices of process 0</th></tr>")?;
    for (index, run) in runs.iter().enumerate() {
        let last = |log: &Log, name: &str| log.get(name)?.last().map(|point| point.value);
        let shown = |value: Option<f64>| value.map_or(String::new(), short);
        let tokens = last(&run.metrics, "tokens");
        let elapsed = last(&run.metrics, "elapsed_seconds");
        let rate = tokens.zip(elapsed).map(|(tokens, elapsed)| tokens / elapsed);
        write!(page, "<tr class=\"run{index}\"><td>{} {}</td>", swatch(index), Escaped(&run.name))?;
        let numbers = [
            run.last_step().to_string(),
            shown(last(&run.metrics, "loss")),
            shown(last(&run.evaluations, "loss")),
            shown(tokens),
            shown(rate.filter(|rate| rate.is_finite())),
            elapsed.map_or(String::new(), duration),
        ];
        for number in numbers {
            write!(page, "<td class=\"number\">{number}</td>")?;
        }
        let words = |words: Option<&str>| Escaped(words.unwrap_or("not known").to_owned());
        let (world, devices) = (run.world(), run.devices.as_deref());
        writeln!(page, "<td>{}</td><td>{}</td></tr>", words(world.as_deref()), words(devices))?;
    }
    writeln!(page, "</table></div>")
}

/// How much of the time of steps communication took, and what memory was held.
pub(super) fn write_time(page: &mut String, runs: &[Run]) -> fmt::Result {
    let sum = |run: &Run, name: &str| Some(run.metrics.get(name)?.sum() / 1e3);
    let timed: Vec<(usize, &Run, f64)> = runs
        .iter()
        .enumerate()
        .filter_map(|(index, run)| Some((index, run, sum(run, STEP_MILLISECONDS)?)))
        .filter(|(_, _, seconds)| *seconds > 0.0)
        .collect();
    if timed.is_empty() {
        return Ok(());
    }
    writeln!(page, "<h2>Where time and memory go</h2>")?;
    writeln!(
        page,
        "<p class=\"faint\">Of the steps in the metrics: steps that were done again count once, and time between starts does not count. Striped: communication of worker 0 that was not hidden behind computing; the rest is computing, with the waits for samples, evaluations and checkpoints. Memory: the most that was measured, once a second, of process 0 (resident) and of the device of worker 0 (what was taken of it since its workers began).</p>"
    )?;
    writeln!(
        page,
        "<div class=\"table\"><table><tr><th>run</th><th></th><th class=\"number\">steps took</th><th class=\"number\">communication</th><th class=\"number\">not hidden</th><th class=\"number\">a step</th><th class=\"number\">host memory</th><th class=\"number\">device memory</th></tr>"
    )?;
    for (index, run, seconds) in timed {
        let share = |part: f64| 100.0 * (part / seconds).clamp(0.0, 1.0);
        let [all, exposed] = ["milliseconds", "exposed_milliseconds"]
            .map(|name| sum(run, &format!("communication.{name}")));
        let width = share(exposed.unwrap_or(0.0));
        let color = index % COLORS;
        let part = |part: Option<f64>| {
            part.map_or("none".to_owned(), |part| {
                format!("{} ({:.1} %)", duration(part), share(part))
            })
        };
        let steps = run.metrics.get(STEP_MILLISECONDS).map_or(1, |series| series.count());
        write!(page, "<tr class=\"run{index}\"><td>{} {}</td>", swatch(index), Escaped(&run.name))?;
        write!(
            page,
            "<td><div class=\"bar c{color}\"><span style=\"width: {width:.2}%\"></span></div></td>"
        )?;
        let held = |name| {
            let most = run.metrics.get(name).and_then(Series::largest);
            most.map_or("not known".to_owned(), bytes)
        };
        let [host, device] = [HOST_BYTES, DEVICE_BYTES].map(held);
        let a_step = duration(seconds / steps as f64);
        for number in [duration(seconds), part(all), part(exposed), a_step, host, device] {
            write!(page, "<td class=\"number\">{number}</td>")?;
        }
        writeln!(page, "</tr>")?;
    }
    writeln!(page, "</table></div>")
}

/// When each run was started, on what, and how that ended.
pub(super) fn write_starts(page: &mut String, runs: &[Run]) -> fmt::Result {
    if runs.iter().all(|run| run.past.sittings.is_empty()) {
        return Ok(());
    }
    writeln!(page, "<h2>Starts, kills and resumes</h2>")?;
    writeln!(
        page,
        "<div class=\"table\"><table class=\"starts\"><tr><th>run</th><th>started</th><th class=\"number\">from step</th><th>done again</th><th>until</th><th>workers</th><th>devices</th></tr>"
    )?;
    for (index, run) in runs.iter().enumerate() {
        for Sitting { started, end } in &run.past.sittings {
            let Started { step, workers, processes, device, unix_seconds, .. } = started;
            let until = match end {
                End::InOrder(Ended { step, unix_seconds }) => {
                    format!("it ended after step {step}, {}", date(*unix_seconds))
                }
                End::Broken { step } => format!("killed or failed after step {step}"),
                End::Unknown => "no end is written: it runs, or was killed or failed".to_owned(),
            };
            write!(
                page,
                "<tr class=\"run{index}\"><td>{} {}</td>",
                swatch(index),
                Escaped(&run.name)
            )?;
            write!(page, "<td>{}</td><td class=\"number\">{step}</td>", date(*unix_seconds))?;
            let again = started.done_again().unwrap_or_default();
            let world = world_in_words(*workers, *processes);
            write!(page, "<td>{again}</td><td>{until}</td><td>{world}</td>")?;
            writeln!(page, "<td>{}</td></tr>", Escaped(device))?;
        }
    }
    writeln!(page, "</table></div>")
}

/// The settings in which the configs differ, and all settings.
pub(super) fn write_settings(page: &mut String, runs: &[Run]) -> fmt::Result {
    writeln!(page, "<h2>Configs</h2>")?;
    let settings: Vec<BTreeMap<String, String>> = runs.iter().map(Run::settings).collect();
    let keys: BTreeSet<&String> = settings.iter().flat_map(BTreeMap::keys).collect();
    let differs =
        |key: &&&String| settings.iter().any(|of_run| of_run.get(**key) != settings[0].get(**key));
    let different: Vec<&&String> = keys.iter().filter(differs).collect();
    if !different.is_empty() {
        write!(
            page,
            "<div class=\"table\"><table class=\"differences\"><tr><th>what differs</th>"
        )?;
        for (index, run) in runs.iter().enumerate() {
            write!(page, "<th class=\"run{index}\">{} {}</th>", swatch(index), Escaped(&run.name))?;
        }
        writeln!(page, "</tr>")?;
        for key in different {
            write!(page, "<tr><td>{}</td>", Escaped(key))?;
            for (index, of_run) in settings.iter().enumerate() {
                let value = of_run.get(*key).map_or("", String::as_str);
                write!(page, "<td class=\"run{index}\">{}</td>", Escaped(value))?;
            }
            writeln!(page, "</tr>")?;
        }
        writeln!(page, "</table></div>")?;
    }
    for run in runs {
        let Some(config) = &run.config else { continue };
        write!(
            page,
            "<details><summary>{}: run.toml, as of the last start</summary>",
            Escaped(&run.name)
        )?;
        writeln!(page, "<pre>{}</pre></details>", Escaped(config))?;
    }
    Ok(())
}

fn swatch(run: usize) -> String {
    format!("<span class=\"swatch c{}\"></span>", run % COLORS)
}

/// Such as `2026-11-26 18:30:05 UTC`.
fn date(unix_seconds: u64) -> String {
    let time = UNIX_EPOCH + Duration::from_secs(unix_seconds.min(LAST_SECOND));
    let text = humantime::format_rfc3339_seconds(time).to_string();
    text.replace('T', " ").replace('Z', " UTC")
}

/// Such as `62.5 GiB`.
fn bytes(bytes: f64) -> String {
    const UNITS: [&str; 5] = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let power = (bytes.max(1.0).log2() / 10.0).floor().min(4.0);
    format!("{} {}", short(bytes / 1024_f64.powf(power)), UNITS[power as usize])
}

/// Such as `3h 20m`, `12.5 s` or `3.25 ms`.
fn duration(seconds: f64) -> String {
    match seconds {
        long if (100.0..1e15).contains(&long) => {
            let (hours, minutes) = ((long / 3600.0).floor(), (long % 3600.0 / 60.0).floor());
            match hours >= 1.0 {
                true => format!("{hours}h {minutes:02}m"),
                false => format!("{minutes}m {:02}s", (long % 60.0).floor()),
            }
        }
        short_one if short_one >= 1.0 => format!("{} s", short(short_one)),
        milliseconds => format!("{} ms", short(1e3 * milliseconds)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_for_people() {
        for (seconds, text) in
            [(0.00325, "3.25 ms"), (12.5, "12.5 s"), (100.0, "1m 40s"), (12_000.0, "3h 20m")]
        {
            assert_eq!(duration(seconds), text);
        }
        for (held, text) in [
            (0.0, "0 bytes"),
            (1023.0, "1023 bytes"),
            (1536.0, "1.5 KiB"),
            (67108864e3, "62.5 GiB"),
        ] {
            assert_eq!(bytes(held), text);
        }
        assert_eq!(date(1_795_718_405), "2026-11-26 18:40:05 UTC");
        assert_eq!(date(u64::MAX), "9999-12-31 23:59:59 UTC");
    }
}
