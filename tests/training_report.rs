//! `tidemill report`: the history of a run is on its page, and the page is one complete file.
//!
//! Reporting kills as stops turns the tests of `report/past.rs` red.

use tidemill::checkpoint;
use tidemill::history::HistoryLine;
use tidemill::metrics::{self, StepMetrics};

use crate::support::processes::wait_until;
use crate::support::{Workbench, workbench};

const STEPS: u64 = 120;

/// Fails unless every element is closed in the right place, every attribute has a quoted value and
/// no other text looks like markup.
fn assert_well_formed(page: &str) {
    let mut rest = page.strip_prefix("<!DOCTYPE html>\n").expect("an HTML page");
    let mut open: Vec<&str> = Vec::new();
    while let Some((text, behind)) = rest.split_once('<') {
        assert_entities(text);
        let (tag, after) = behind.split_once('>').expect("the end of a tag");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "closed before {:.80}", after);
        } else {
            let (name, attributes) = tag.split_once(' ').unwrap_or((tag, ""));
            assert!(name.chars().all(|c| c.is_ascii_alphanumeric()), "<{tag}>");
            let is_empty = attributes.ends_with('/');
            assert_attributes(attributes.trim_end_matches('/'));
            if !is_empty {
                open.push(name);
            }
        }
        rest = after;
    }
    assert!(open.is_empty() && rest.trim().is_empty(), "{open:?} {rest}");
}

fn assert_attributes(attributes: &str) {
    let mut rest = attributes.trim();
    while !rest.is_empty() {
        let (name, behind) = rest.split_once("=\"").unwrap_or_else(|| panic!("{attributes}"));
        assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'), "{attributes}");
        let (value, after) = behind.split_once('"').unwrap_or_else(|| panic!("{attributes}"));
        assert_entities(value);
        rest = after.trim_start();
    }
}

/// An ampersand begins an entity, and every character is allowed in a page.
fn assert_entities(text: &str) {
    for behind in text.split('&').skip(1) {
        let name = behind.split_once(';').unwrap_or_else(|| panic!("{text}")).0;
        assert!(["amp", "lt", "gt", "quot", "#39"].contains(&name), "&{name}; in {text}");
    }
    assert!(!text.contains(|c: char| c.is_control() && c != '\n' && c != '\t'), "{text:?}");
}

/// The chart called `title`, as text.
fn chart<'a>(page: &'a str, title: &str) -> &'a str {
    let caption = format!("<figcaption>{title}</figcaption>");
    let (_, behind) = page.split_once(&caption).unwrap_or_else(|| panic!("no chart {title}"));
    behind.split_once("</figure>").unwrap().0
}

fn attribute<'a>(element: &'a str, name: &str) -> &'a str {
    let (_, behind) = element.split_once(&format!("{name}=\"")).expect(name);
    behind.split_once('"').unwrap().0
}

/// Steps and values of the first line of a chart, derived from its drawing on the linear axis.
fn line(chart: &str) -> Vec<(f64, f64)> {
    let linear = chart.split_once("class=\"linear\"").unwrap().1;
    let [low, high] =
        ["data-low", "data-high"].map(|name| attribute(linear, name).parse::<f64>().unwrap());
    let steps: f64 = attribute(chart, "data-steps").parse().unwrap();
    let edges = attribute(chart, "data-box").split(' ').map(|edge| edge.parse::<f64>().unwrap());
    let [left, right, top, bottom] = edges.collect::<Vec<_>>().try_into().unwrap();
    let points = attribute(linear, " points").split(' ').map(|point| {
        let (x, y) = point.split_once(',').unwrap();
        let [x, y] = [x, y].map(|place| place.parse::<f64>().unwrap());
        let (across, up) = ((x - left) / (right - left), (bottom - y) / (bottom - top));
        (across * steps, low + up * (high - low))
    });
    points.collect()
}

#[test]
fn three_kills_and_two_world_sizes_stand_on_the_page() {
    let bench = Workbench::new();
    let config = workbench::config()
        .replace("steps = 5", &format!("steps = {STEPS}"))
        .replace("every_steps = 2", "every_steps = 7");
    bench.write("run.toml", config);
    let evaluation = "evaluation={dataset=\"validation\", every_steps=20, samples=5}";
    let train =
        |workers: &str| bench.start(&["train", "run.toml", "-w", workers, "--set", evaluation]);
    let history = || metrics::read::<HistoryLine>(&bench.path("run")).unwrap();
    for (round, workers) in ["2", "3", "2"].into_iter().enumerate() {
        let mut run = train(workers);
        wait_until("a checkpoint and steps behind it", || {
            let resumed_at = history().get(round).map(|line| match line {
                HistoryLine::Started(started) => started.step,
                HistoryLine::Ended(ended) => panic!("{ended:?}"),
            });
            let latest = checkpoint::latest(&bench.path("run")).unwrap().map(|entry| entry.step);
            let lines = std::fs::read(bench.path("run/metrics.jsonl")).unwrap_or_default();
            let done = lines.iter().filter(|&&byte| byte == b'\n').count() as u64;
            let is_ahead = |step| latest.is_some_and(|latest| latest > step && done > latest);
            resumed_at.is_some_and(is_ahead) || run.has_ended()
        });
        assert!(!run.has_ended(), "it ended before it was killed");
        run.signal("KILL");
        assert_eq!(run.finish().status.code(), None);
    }
    train("3").finish().expect(0);

    let said = bench.tidemill(&["report", "run"]).expect(0);
    assert_eq!((said.stdout.trim(), said.stderr.as_str()), ("run/report.html", ""));
    let page = std::fs::read_to_string(bench.path("run/report.html")).unwrap();
    assert_well_formed(&page);
    for outside in ["src=", "href=", "url(", "@import", "http://", "https://"] {
        let found = page.matches(outside).count();
        // The name of XHTML is one.
        assert_eq!(found, usize::from(outside == "http://"), "{outside}");
    }

    let charts = page.matches("<figure").count();
    for kind in ["killed", "resumed"] {
        assert_eq!(page.matches(&format!("class=\"mark {kind} ")).count(), 3 * charts, "{kind}");
    }
    let lines = history();
    assert_eq!(lines.len(), 5, "{lines:?}");
    let mut worlds = Vec::new();
    for (line, workers) in lines.iter().zip([2, 3, 2, 3]) {
        let HistoryLine::Started(started) = line else { panic!("{line:?}") };
        assert_eq!((started.workers, started.processes), (workers, 1));
        if let Some(&(before, _)) = worlds.last() {
            assert!(started.step as f64 > before, "{lines:?}");
            let killed =
                format!("killed or failed after step {}", started.step + started.steps_again);
            assert!(page.contains(&killed), "{killed}");
            let resumed = format!("resumed after step {} with {workers} workers", started.step);
            assert!(page.contains(&resumed), "{resumed}");
        }
        worlds.push((started.step as f64, workers as f64));
    }
    assert!(matches!(lines[4], HistoryLine::Ended(ended) if ended.step == STEPS), "{lines:?}");
    assert!(page.contains(&format!("it ended after step {STEPS}")));
    let is_on = |points: &[(f64, f64)], (step, value): (f64, f64)| {
        let is_near = |point: &(f64, f64)| {
            (point.0 - step).abs() < 0.1 && (point.1 - value).abs() < 1e-3 * value.abs()
        };
        points.iter().any(is_near)
    };
    let drawn = line(chart(&page, "Workers"));
    for world in worlds {
        assert!(is_on(&drawn, world), "{world:?}: {drawn:?}");
    }

    let steps = metrics::read::<StepMetrics>(&bench.path("run")).unwrap();
    for (title, value) in [
        ("Loss (nats a token)", (|step| step.loss) as fn(&StepMetrics) -> f64),
        ("Gradient norm, before clipping", |step| step.grad_norm),
        ("Learning rate", |step| step.learning_rate),
    ] {
        let drawn = line(chart(&page, title));
        assert_eq!(drawn.len() as u64, STEPS);
        let largest = steps.iter().map(value).fold(0.0, f64::max);
        for (step, drawn) in steps.iter().zip(&drawn) {
            assert!((drawn.0 - step.step as f64).abs() < 0.1, "{title}: {drawn:?}");
            assert!((drawn.1 - value(step)).abs() < 1e-3 * largest, "{title}: {drawn:?}");
        }
    }
    let losses = chart(&page, "Loss (nats a token)");
    assert!(
        losses.contains("data-label=\"run, evaluation\"") && losses.contains("class=\"dashed\"")
    );
    for title in
        ["Tokens per second", "Time of a step (ms)", "Communication of worker 0 (ms a step)"]
    {
        assert_eq!(line(chart(&page, title)).len() as u64, STEPS, "{title}");
    }
    let config = std::fs::read_to_string(bench.path("run/run.toml")).unwrap();
    let escaped = config.replace('&', "&amp;").replace('"', "&quot;").replace('\'', "&#39;");
    assert!(page.contains(&format!("<pre>{escaped}</pre>")), "{config}");
}

#[test]
fn runs_lie_over_each_other_whatever_is_damaged_or_missing() {
    let bench = Workbench::new();
    bench.tidemill(&["train", "run.toml", "-w", "2"]).expect(0);
    let other = "run.dir=a & <b>'s";
    let set = ["--set", other, "--set", "optimizer.learning_rate=1e-3"];
    bench.tidemill(&[&["train", "run.toml", "-w", "1"], &set[..]].concat()).expect(0);
    let path = bench.path("a & <b>'s/metrics.jsonl");
    let good = std::fs::read_to_string(&path).unwrap();
    let mut lines: Vec<&str> = good.lines().collect();
    lines[2] = "{\"step\": 3, <script>";
    std::fs::write(&path, lines.join("\n") + "\n{\"step\":6,\"lo").unwrap();
    let scores = "{\"step\":2,\"tasks\":{\"arc\":{\"accuracy\":0.25}}}\n{\"step\":4,\"tasks\":{\"arc\":{\"accuracy\":0.5}}}\n";
    bench.write("run/evaluation.jsonl", scores);
    std::fs::remove_file(bench.path("run/history.jsonl")).unwrap();
    bench.write("empty/run.toml", "[run]\n");

    let both = ["report", "run", "./a & <b>'s/", "empty", "-o", "page.html"];
    let said = bench.tidemill(&both).expect(0);
    assert_eq!(said.stdout.trim(), "page.html");
    let notes = [
        "run: no history of starts",
        "a & <b>'s: metrics.jsonl: the last line is torn",
        "a & <b>'s: metrics.jsonl: left out line 3",
        "empty: metrics.jsonl has no step yet",
    ];
    let page = std::fs::read_to_string(bench.path("page.html")).unwrap();
    assert_well_formed(&page);
    for note in notes {
        assert!(said.stderr.contains(note), "{note}: {}", said.stderr);
        let escaped = note.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        assert!(page.contains(&escaped.replace('\'', "&#39;")), "{note}");
    }
    assert_eq!(line(chart(&page, "Evaluation: tasks.arc.accuracy")).len(), 2);
    let losses = chart(&page, "Loss (nats a token)");
    assert_eq!(losses.matches("<polyline").count(), 4, "two runs, two axes");
    assert!(page.contains("<td>optimizer.learning_rate</td>"));
    for index in 0..3 {
        assert!(page.contains(&format!("id=\"show{index}\"")));
    }

    assert!(!bench.path("run/report.html").exists());
    bench.tidemill(&["report"]).refused(2, &["<RUN>"]);
    bench.tidemill(&["report", "nowhere"]).refused(1, &["nowhere", "expected a folder"]);
    bench.tidemill(&["report", "run", "data"]).refused(1, &["data: ", "the folder of a run"]);
    bench.tidemill(&["report", "s3://bucket/run"]).refused(1, &["s3://bucket/run", "found a URL"]);
    bench.tidemill(&["report", "run", "-o", "no/page.html"]).refused(1, &["writing no/page.html"]);
    let pipe = bench.path("empty/metrics.jsonl");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    bench.tidemill(&["report", "empty"]).refused(1, &["empty/metrics.jsonl", "regular file"]);
}
