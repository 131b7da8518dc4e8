//! A data set that is kept up to date may change under a run: the run stays on the version that it began with.

use std::fs;

use crate::support::{Job, Workbench, assert_same};

/// Prepares, or updates, and returns what the program says in JSON.
fn prepare(bench: &Workbench, arguments: &[&str]) -> serde_json::Value {
    let arguments = [&["prepare", "--format", "json", "-w", "2"], arguments].concat();
    serde_json::from_str(&bench.tidemill(&arguments).expect(0).stdout).unwrap()
}

#[test]
fn a_run_goes_on_with_the_version_that_it_began_with() {
    let bench = Workbench::new();
    let updatable = [
        "--input",
        "data-text",
        "--output",
        "kept",
        "--seq-len",
        "17",
        "--shard-samples",
        "40",
        "--updatable",
    ];
    let first = prepare(&bench, &updatable);
    let kept = format!("data.dataset={:?}", bench.path("kept"));
    let keys = [kept.as_str(), "schedule.steps=5", "checkpoint.keep=9"];
    let run = |dir: &str, workers: usize, set: &[&str]| {
        bench.train(Job { dir, workers, set: &[&keys, set].concat() })
    };
    let expected = run("reference", 1, &[]);
    run("resumed", 2, &["run.steps=2"]);
    run("removed", 1, &["run.steps=2"]);

    fs::write(bench.path("data-text/new.txt"), "a text that is new ".repeat(30)).unwrap();
    fs::remove_file(bench.path("data-text/3.txt")).unwrap();
    let update = ["--output", "kept", "--update"];
    let second = prepare(&bench, &update);
    assert_eq!(second["former_fingerprint"], first["fingerprint"]);
    assert_ne!(second["fingerprint"], first["fingerprint"]);
    assert_eq!(second["changes"]["texts_tokenized"], 1);
    assert_eq!(second["changes"]["inputs_gone"], 1);
    let inspected = bench.tidemill(&["inspect", "kept", "--format", "json"]).expect(0).stdout;
    let inspected: serde_json::Value = serde_json::from_str(&inspected).unwrap();
    let versions = inspected["versions"].as_array().unwrap();
    let names: Vec<_> = versions.iter().map(|version| &version["fingerprint"]).collect();
    assert_eq!(names, [&second["fingerprint"], &first["fingerprint"]]);
    assert!(bench.tidemill(&["inspect", "kept"]).expect(0).stdout.contains("versions: 2"));

    let found = run("resumed", 3, &[]);
    assert_same(&found, &expected, "resumed behind an update");
    let newer = run("newer", 1, &[]);
    assert_ne!(newer.latest()["model.safetensors"], expected.latest()["model.safetensors"]);

    let pruned = bench.tidemill(&["prune", "kept", "--format", "json"]).expect(0).stdout;
    let pruned: serde_json::Value = serde_json::from_str(&pruned).unwrap();
    assert_eq!(pruned["removed"][0], first["fingerprint"]);
    let arguments = [
        "train",
        "run.toml",
        "-w",
        "1",
        "--set",
        "run.dir=removed",
        "--set",
        "data.dataset=kept",
        "--set",
        "schedule.steps=5",
    ];
    bench.tidemill(&arguments).refused(1, &["data."]);
}

#[test]
fn what_stands_in_the_data_set_is_not_asked_for_again() {
    let bench = Workbench::new();
    let updated = bench.tidemill(&["prepare", "--output", "data", "--update"]);
    updated.refused(1, &["data", "--updatable"]);
    bench.tidemill(&["prune", "data"]).refused(1, &["data", "--updatable"]);
    for flag in [&["--input", "data-text"][..], &["--dedup", "near"], &["--updatable"]] {
        let arguments = [&["prepare", "--output", "data", "--update"], flag].concat();
        bench.tidemill(&arguments).refused(2, &[flag[0], "--update"]);
    }
    let arguments = ["prepare", "--input", "data-text", "--output", "new", "--verify"];
    bench.tidemill(&arguments).refused(2, &["--verify", "--input"]);
}
