//! The page of `tidemill report` in a headless browser: its layout is sound, its script runs, and
//! it loads nothing.
//!
//! A script that throws, overlapping labels, an element that hides nothing, or a picture from
//! elsewhere turn the tests red.

use std::process::Command;

use serde_json::Value;
use tidemill::metrics::{self, StepMetrics};

use crate::support::Workbench;

const PROBE: &str = include_str!("report_in_a_browser/probe.js");

/// The contents of `page` in a browser window of `width` pixels.
fn seen(bench: &Workbench, page: &str, width: u32) -> Value {
    // The page's own policy forbids loading anything, and the browser reports refused loads.
    let listener = "window.errors = []; addEventListener('error', event => window.errors.push(event.message)); \
        addEventListener('securitypolicyviolation', event => window.errors.push('refused ' + event.blockedURI));";
    let probed = page
        .replacen("<head>", &format!("<head><script>{listener}</script>"), 1)
        .replacen("</body>", &format!("<script>{PROBE}</script></body>"), 1);
    bench.write("probed.html", probed);
    let said = Command::new("timeout")
        .args(["120", "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"])
        .args(["--no-first-run", "--disable-background-networking", "--disable-component-update"])
        .args(["--disable-sync", "--virtual-time-budget=5000", "--dump-dom"])
        .arg(format!("--user-data-dir={}", bench.path("browser").display()))
        .arg(format!("--window-size={width},1000"))
        .arg(format!("file://{}", bench.path("probed.html").display()))
        .output()
        .expect("`timeout` of coreutils");
    let log = String::from_utf8_lossy(&said.stderr);
    assert!(
        said.status.success(),
        "chromium, Debian's package of that name: {}\n{log}",
        said.status
    );
    let dom = String::from_utf8(said.stdout).unwrap();
    let behind = dom.split_once("<pre id=\"seen\">");
    let (_, behind) = behind.unwrap_or_else(|| panic!("the probe saw nothing: {log}"));
    serde_json::from_str(behind.split_once('<').unwrap().0).unwrap()
}

fn texts(value: &Value) -> Vec<&str> {
    let texts = value.as_array().unwrap_or_else(|| panic!("{value}"));
    texts.iter().map(|text| text.as_str().unwrap()).collect()
}

/// Fails unless the box under the pointer shows `step` and the `losses` of the runs there, within
/// the precision of a pixel.
fn assert_hover(hover: &Value, step: u64, losses: &[(&str, f64)]) {
    let rows = texts(hover);
    assert_eq!(rows[0], format!("step {step}"));
    for (label, loss) in losses {
        let row = rows.iter().find_map(|row| row.strip_prefix(&format!("{label}: ")));
        let shown: f64 = row.unwrap_or_else(|| panic!("{label}: {rows:?}")).parse().unwrap();
        assert!((shown - loss).abs() < 1e-3 * loss, "{label}: {shown} for {loss}");
    }
}

#[test]
#[ignore = "needs chromium, which is no program of every machine"]
fn a_page_of_two_runs_is_laid_out_and_moves() {
    let bench = Workbench::new();
    let evaluation = ["--set", "evaluation={dataset=\"validation\", every_steps=2, samples=5}"];
    let other = ["--set", "run.dir=<other> & more", "--set", "optimizer.learning_rate=1e-3"];
    bench.tidemill(&[&["train", "run.toml", "-w", "2"], &evaluation[..]].concat()).expect(0);
    bench.tidemill(&[&["train", "run.toml", "-w", "1"], &other[..]].concat()).expect(0);
    bench.tidemill(&["report", "run", "<other> & more"]).expect(0);
    let page = std::fs::read_to_string(bench.path("run/report.html")).unwrap();
    let steps = |run: &str| metrics::read::<StepMetrics>(&bench.path(run)).unwrap();
    let (first, second) = (steps("run"), steps("<other> & more"));

    for width in [1400, 500] {
        let seen = seen(&bench, &page, width);
        assert_eq!(seen["errors"], serde_json::json!([]));
        let fits = seen["scrollWidth"].as_u64().unwrap() <= seen["width"].as_u64().unwrap();
        assert!(fits, "wider than a window of {width}: {}", seen["scrollWidth"]);
        let charts = seen["charts"].as_array().unwrap();
        assert_eq!(charts[0]["title"], "Loss (nats a token)");
        assert!(charts.len() >= 6, "{charts:?}");
        for chart in charts {
            assert!(chart["width"].as_f64().unwrap() >= 400.0, "{chart}");
            assert_eq!(chart["isInside"], true, "{chart}");
            assert_eq!(chart["overlaps"], serde_json::json!([]), "{chart}");
        }
        // The axis begins with step 0, so the middle of five steps is between two of them.
        let of = |index: usize| {
            [("run, training", first[index].loss), ("<other> & more, training", second[index].loss)]
        };
        assert_hover(&seen["hovers"][0], 1, &of(0));
        assert_hover(&seen["hovers"][2], 5, &of(4));
        assert_eq!(seen["hoverLeft"], false);

        let count = |name: &str| seen[name].as_u64().unwrap();
        assert!(count("linear") > 0 && count("both") == 0, "{seen}");
        assert_eq!(count("linear"), count("logarithmic"));
        let middle = texts(&seen["hovers"][1]);
        let value = |row: &str| {
            let (label, value) = row.rsplit_once(": ").unwrap();
            (label.to_owned(), value.parse::<f64>().unwrap())
        };
        let losses: Vec<(String, f64)> = middle[1..].iter().map(|row| value(row)).collect();
        let losses: Vec<(&str, f64)> =
            losses.iter().map(|(label, loss)| (label.as_str(), *loss)).collect();
        let step = middle[0].strip_prefix("step ").unwrap().parse().unwrap();
        assert_hover(&seen["logarithmicHover"], step, &losses);
        assert!(count("withoutFirst") < count("linear") && count("withoutFirst") > 0, "{seen}");
        let rest = texts(&seen["hoverWithoutFirst"]);
        assert!(rest[1..].iter().all(|row| row.starts_with("<other> & more, ")), "{rest:?}");
        let configs = texts(&seen["configs"]);
        assert_eq!(configs.len(), 2);
        assert!(configs[1].contains("dir = \"<other> & more\""), "{}", configs[1]);
    }
}
