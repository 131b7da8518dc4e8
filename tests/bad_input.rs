//! Wrong input is one clear line on standard error that names the file or the key, exit code 1 (2 for flags), no
//! panic, and nothing half-written.
//!
//! Seen red: with a checkpoint that is not verified when it is opened, with the latest one skipped where it is damaged,
//! with tokens that are not compared with the vocabulary, and with a run folder that is created before its config is
//! checked.

mod damage;
mod full_disk;
mod full_updates;
mod inputs;
mod losses;
mod models;
mod requests;
mod settings;
mod strangers;

use crate::families::{MODELS, with_model};
use crate::support::outcome::files;
use crate::support::workbench::{causes, config};
use crate::support::{Finished, Job, Workbench};

/// What a refused run may leave: no checkpoint, and nothing that is half-written.
#[track_caller]
fn nothing_half_written(bench: &Workbench) {
    let left = files(&bench.path("run"));
    let partial =
        left.keys().any(|name| name.contains(".partial") || name.contains("checkpoints/"));
    assert!(!partial, "{:?}", left.keys());
}

fn training(bench: &Workbench, arguments: &[&str]) -> Finished {
    bench.tidemill(&[&["train", "run.toml", "-w", "2"], arguments].concat())
}

/// Takes one step with a small model of `family`; returns the name of the run's folder.
fn train_family(bench: &Workbench, family: &str) -> String {
    let table = MODELS.iter().find(|(name, _)| *name == family);
    let config = table.map_or_else(config, |(_, table)| with_model(table));
    let dir = format!("{family}-run");
    let job = Job { dir: &dir, workers: 1, set: &["run.steps=1", "schedule.warmup_steps=0"] };
    let trained = bench.try_train_with(&config, job);
    trained.unwrap_or_else(|error| panic!("{family}: {}", causes(&error)));
    dir
}

#[test]
fn run_folders() {
    let bench = Workbench::new();
    training(&bench, &[]).expect(0);
    let hold = tidemill::run_folder::RunFolder::hold(&bench.path("run")).unwrap();
    let before = files(&bench.path("run"));
    for processes in ["1", "2"] {
        let refused = training(&bench, &["-n", processes]).expect(1);
        let holder = format!("run is in use by another run (process {} on ", std::process::id());
        let said: Vec<&str> = refused.stderr.lines().collect();
        assert!(said.len() == 2, "that it waits, and that it gave up: {refused:?}");
        assert!(said[0].contains("waiting for run, which is in use by process "), "{refused:?}");
        assert!(said[1].contains(&holder), "{refused:?}");
    }
    drop(hold);
    assert!(files(&bench.path("run")) == before);
    training(&bench, &["--set", "run.dir=run.toml/run"]).refused(1, &["run.toml/run"]);
    bench.tidemill(&["inspect", "nowhere"]).refused(1, &["nowhere"]);
    bench.tidemill(&["inspect", "data-text"]).refused(1, &["data-text"]);
    bench.tidemill(&["bench", "data", "nowhere"]).refused(1, &["nowhere"]);
    bench.tidemill(&["bench", "train", "--preset", "mamba-9m"]).refused(1, &["mamba-9m"]);
}

#[test]
fn documents() {
    let bench = Workbench::new();
    std::fs::create_dir(bench.path("texts")).unwrap();
    bench.write("texts/a.txt", "a".repeat(100));
    bench.write("texts/b.txt", b"gr\xf6\xdfer");
    let prepare = |arguments: &[&str]| {
        let all = ["prepare", "--output", "out", "--seq-len", "16", "--input"];
        bench.tidemill(&[&all, arguments].concat())
    };
    let cases: [(&[&str], &str); 6] = [
        (&["nowhere"], "nowhere"),
        (&["texts", "--strict"], "texts/b.txt"),
        (&["texts", "--glob", "*.md"], "*.md"),
        (&["texts", "--glob", "["], "["),
        (&["texts", "--seq-len", "1000"], "at least 1001"),
        (&["texts", "--tokenizer", "run.toml"], "run.toml"),
    ];
    for (arguments, part) in cases {
        let arguments: Vec<&str> = arguments.to_vec();
        let all = ["prepare", "--output", "out", "--input"];
        let seq_len: &[&str] =
            if arguments.contains(&"--seq-len") { &[] } else { &["--seq-len", "16"] };
        bench.tidemill(&[&all, &arguments[..], seq_len].concat()).refused(1, &[part]);
        assert!(!bench.path("out").exists(), "{arguments:?}");
    }
    let skipping = prepare(&["texts"]).expect(0);
    assert!(skipping.stderr.contains("texts/b.txt"), "{skipping:?}");
    let before = files(&bench.path("out"));
    prepare(&["texts"]).refused(1, &["out"]);
    assert!(files(&bench.path("out")) == before);
}
