//! The output of `prepare --report`, and how `inspect` shows it.

use std::fs;

use serde_json::Value;

use crate::support::Workbench;
use crate::support::outcome::files;

const ASKED: [&str; 14] = [
    "prepare",
    "--input",
    "data-text",
    "--seq-len",
    "17",
    "--shard-samples",
    "40",
    "--updatable",
    "--report",
    "--dedup",
    "exact",
    "-w",
    "2",
    "--output",
];

/// The reports in a folder of the bench.
fn reports(bench: &Workbench, name: &str) -> Vec<(String, Vec<u8>)> {
    let files = files(&bench.path(name)).into_iter();
    files.filter(|(name, _)| name.contains("report.")).collect()
}

#[test]
fn inspect_says_what_the_report_does() {
    let bench = Workbench::new();
    fs::copy(bench.path("data-text/3.txt"), bench.path("data-text/z\u{1b}[2J.txt")).unwrap();
    let said = bench.tidemill(&[&ASKED[..], &["kept"]].concat()).expect(0).stdout;
    assert!(said.contains("report.html"), "{said}");
    let written: Value =
        serde_json::from_slice(&fs::read(bench.path("kept/report.json")).unwrap()).unwrap();
    let inspected = bench.tidemill(&["inspect", "kept", "--format", "json"]).expect(0).stdout;
    let inspected: Value = serde_json::from_str(&inspected).unwrap();
    assert_eq!(inspected["report"], written);
    assert_eq!(written["format_version"], 1);
    let kept = written["documents"]["kept"].as_u64().unwrap();
    let words = bench.tidemill(&["inspect", "kept"]).expect(0).stdout;
    for part in [
        format!("kept: {kept} documents of {}", kept + 1),
        "copy: 1 document".to_owned(),
        "data-text/z␛[2J.txt".to_owned(),
        "are in 1 group".to_owned(),
        "tokens by source:".to_owned(),
    ] {
        assert!(words.contains(&part), "{part:?} is not in {words}");
    }
    assert!(!words.contains('\u{1b}'), "nothing that a terminal obeys");

    // Two processes write the same report.
    bench.tidemill(&[&ASKED[..], &["kept-2", "-n", "2"]].concat()).expect(0);
    assert_eq!(reports(&bench, "kept-2"), reports(&bench, "kept"));
    assert_eq!(reports(&bench, "kept").len(), 4);

    fs::remove_file(bench.path("data-text/3.txt")).unwrap();
    bench.tidemill(&["prepare", "--output", "kept", "--update"]).expect(0);
    let words = bench.tidemill(&["inspect", "kept"]).expect(0).stdout;
    for part in [
        "the update, against version",
        "inputs: 0 added, 1 removed, 0 changed",
        "1 document: copy, now kept",
    ] {
        assert!(words.contains(part), "{part:?} is not in {words}");
    }
    let both = ["prepare", "--output", "kept", "--update", "--report"];
    bench.tidemill(&both).refused(2, &["--update", "--report"]);
}

#[test]
fn without_a_report_inspect_says_how_to_get_one() {
    let bench = Workbench::new();
    bench
        .tidemill(&["prepare", "--input", "data-text", "--output", "plain", "--seq-len", "17"])
        .expect(0);
    let words = bench.tidemill(&["inspect", "plain"]).expect(0).stdout;
    assert!(words.contains("report: none; `tidemill prepare --report`"), "{words}");
    let inspected = bench.tidemill(&["inspect", "plain", "--format", "json"]).expect(0).stdout;
    let inspected: Value = serde_json::from_str(&inspected).unwrap();
    assert_eq!((&inspected["report"], &inspected["kind"]), (&Value::Null, &"data set".into()));
    assert!(!bench.path("plain/report.json").exists() && !bench.path("plain/report.html").exists());
}
