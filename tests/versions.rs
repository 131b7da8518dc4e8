//! A data set that is kept up to date may change under a run: the run stays on the version that it began with.

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use tidemill::job::{Observer, ResolvedRun, RunConfig, StopRequest, TrainEvent, TrainOptions};
use tidemill::streaming_data::data_set::index::Index;
use tidemill::streaming_data::prepare::{ByteTokenizer, UpdateSettings, update};

use crate::support::outcome::files;
use crate::support::processes::wait_until;
use crate::support::workbench::{causes, config};
use crate::support::{Job, Outcome, Running, Workbench, assert_same};

/// Of a small data set that is kept up to date.
const UPDATABLE: [&str; 9] = [
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

/// Prepares, or updates, and returns the program's JSON.
fn prepare(bench: &Workbench, arguments: &[&str]) -> serde_json::Value {
    let arguments = [&["prepare", "--format", "json", "-w", "2"], arguments].concat();
    serde_json::from_str(&bench.tidemill(&arguments).expect(0).stdout).unwrap()
}

#[test]
fn a_run_goes_on_with_the_version_that_it_began_with() {
    let bench = Workbench::new();
    let first = prepare(&bench, &UPDATABLE);
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
    let gone = ["data: expected version", "which the latest checkpoint has read", "`prune`"];
    bench.tidemill(&arguments).refused(1, &gone);
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

/// Changes the inputs in one of several ways, and updates the data set.
fn change(bench: &Workbench, way: usize) {
    let new = "a text that is new ".repeat(30 + 10 * way);
    bench.write(&format!("data-text/new-{way}.txt"), new);
    fs::remove_file(bench.path(&format!("data-text/{}.txt", 3 + way))).unwrap();
    let mut settings = UpdateSettings::new(bench.path("kept"));
    settings.workers = NonZeroUsize::new(2).unwrap();
    update(&settings, &ByteTokenizer, &mut |_| ControlFlow::Continue(())).unwrap();
}

/// The results of a run, and its position in the data.
fn learned(outcome: &Outcome) -> (&[[u64; 5]], &BTreeMap<String, Vec<u8>>) {
    (&outcome.steps, outcome.latest())
}

#[test]
fn a_run_that_follows_moves_at_the_end_of_an_epoch() {
    const SAMPLES_PER_STEP: u64 = 45;
    let bench = Workbench::new();
    let first = prepare(&bench, &UPDATABLE);
    let moved = first["samples"].as_u64().unwrap().div_ceil(SAMPLES_PER_STEP);
    assert!((8..22).contains(&moved), "{moved}");
    let end = 3 * moved;
    let kept = format!("data.dataset={:?}", bench.path("kept"));
    let steps = |steps: u64| format!("run.steps={steps}");
    let (horizon, follow) = (format!("schedule.steps={end}"), "data.follow=latest");
    let train = |dir: &str, workers: usize, until: u64, follow: &str| {
        let set = [&kept, &horizon, follow, &steps(until), "checkpoint.every_steps=7"];
        bench.train(Job { dir, workers, set: &set })
    };
    let processes = |until: u64| {
        let arguments = ["train", "run.toml", "-n", "2", "-w", "2"];
        let keys = ["run.dir=processes", &kept, &horizon, follow, &steps(until)];
        let keys: Vec<&str> = keys.into_iter().flat_map(|key| ["--set", key]).collect();
        bench.tidemill(&[&arguments[..], &keys].concat()).expect(0).stderr
    };
    let began = "data.follow=began";
    for (dir, workers) in [("reference", 1), ("elastic", 3), ("processes", 2)] {
        train(dir, workers, 4, follow);
    }
    train("stays", 1, 4, began);
    change(&bench, 0);
    let second = newest(&bench);
    assert_ne!(second, first["fingerprint"]);

    train("reference", 1, moved + 6, follow);
    // Ended right before it moves, right after it, and once more.
    for (workers, until) in [(2, moved), (3, moved + 1), (1, moved + 5)] {
        train("elastic", workers, until, follow);
    }
    let said = processes(moved + 6);
    assert!(said.contains(&format!("note: after step {moved} the data is version {second}")));
    change(&bench, 1);
    let third = newest(&bench);

    let expected = train("reference", 1, end, follow);
    let state: serde_json::Value =
        serde_json::from_slice(&expected.latest()["trainer.json"]).unwrap();
    let (cursor, moves) = (&state["cursor"], state["cursor"]["moves"].as_array().unwrap());
    assert_eq!((&state["format_version"], moves.len()), (&2.into(), 2));
    assert_eq!(cursor["stream"]["fingerprint"], first["fingerprint"]);
    let epoch = moves[0]["stream"]["samples"].as_u64().unwrap().div_ceil(SAMPLES_PER_STEP);
    for (at, (step, version)) in [(moved, second), (moved + epoch, third)].into_iter().enumerate() {
        let moved_to = &moves[at];
        assert_eq!(moved_to["stream"]["fingerprint"], version);
        assert_eq!(moved_to["position"], step * SAMPLES_PER_STEP);
        // Each epoch of the run has an order of its own.
        assert_eq!(moved_to["epoch"], at + 1);
    }
    let elastic = train("elastic", 2, end, follow);
    assert_eq!(learned(&elastic), learned(&expected));
    processes(end);
    assert_eq!(learned(&bench.outcome("processes")), learned(&expected));

    let stays = train("stays", 1, end, began);
    let until = usize::try_from(moved).unwrap();
    assert_eq!(stays.steps[..until], expected.steps[..until]);
    assert_ne!(stays.steps[until], expected.steps[until]);
    // A run that began on the first version may set `follow` later.
    let mut follows = train("follows", 1, 2, began);
    assert_ne!(follows.steps[0], expected.steps[0], "it began with the third version");
    follows = train("follows", 2, moved + 1, follow);
    let state: serde_json::Value =
        serde_json::from_slice(&follows.latest()["trainer.json"]).unwrap();
    assert_eq!(state["cursor"].get("moves"), None);

    let refused = bench.try_train(Job { dir: "none", workers: 1, set: &[follow] }).unwrap_err();
    let refused = causes(&refused);
    assert!(refused.contains("data.follow") && refused.contains("--updatable"), "{refused}");
}

/// The same bits as those of a run that was resumed after the update. Whether a stop after some
/// step ended the run or not makes no difference; its epochs are those of the data that it began
/// with, however many samples there are later.
#[test]
fn a_run_that_was_stopped_moves_as_one_that_was_not() {
    let outcome = |stopped: Option<u64>, workers: usize| {
        let bench = Arc::new(Workbench::new());
        prepare(&bench, &UPDATABLE);
        let kept = format!("data.dataset={:?}", bench.path("kept"));
        let dir = format!("run.dir={:?}", bench.path("run"));
        let set = [&kept, &dir, "schedule.steps=60", "data.follow=latest"];
        let set = set.map(str::to_owned);
        let train = |workers: usize, stopped: Option<u64>| {
            let (changed, stop) = (Arc::clone(&bench), StopRequest::default());
            let request = stop.clone();
            let observer: Observer = Arc::new(move |event| {
                if let TrainEvent::Step(metrics) = event {
                    if metrics.step == 4 {
                        change(&changed, 0);
                    }
                    if stopped.is_some_and(|step| metrics.step >= step) {
                        request.request();
                    }
                }
            });
            let text = config().replace("steps = 5", "epochs = 2.5");
            let config = RunConfig::parse(&text, "run.toml", &set).unwrap();
            let options = TrainOptions { observer, stop, ..TrainOptions::threads(workers) };
            tidemill::job::train(ResolvedRun::new(config, workers).unwrap(), options).unwrap()
        };
        if stopped.is_some() {
            assert!(train(workers, stopped).stopped);
        }
        let summary = train(3 - workers, None);
        assert_eq!((summary.stopped, summary.step), (false, summary.steps));
        bench.outcome("run")
    };
    let expected = outcome(None, 1);
    let state: serde_json::Value =
        serde_json::from_slice(&expected.latest()["trainer.json"]).unwrap();
    let moved = &state["cursor"]["moves"][0];
    assert_ne!(moved["stream"]["samples"], state["cursor"]["stream"]["samples"]);
    let step = moved["position"].as_u64().unwrap() / 45;
    for (stopped, workers) in [(4, 2), (step + 2, 1)] {
        let found = outcome(Some(stopped), workers);
        // No file of a run contains the names of inputs.
        assert_eq!(learned(&found), learned(&expected), "stopped after step {stopped}");
    }
}

/// The newest version of a data set, which is complete: every file equals its entry in the index.
fn newest(bench: &Workbench) -> String {
    bench.tidemill(&["inspect", "kept"]).expect(0);
    Index::read(&bench.path("kept")).unwrap().fingerprint().to_string()
}

/// The data set equals a preparation of its present inputs.
fn assert_is_new(bench: &Workbench) {
    let mut anew = UPDATABLE;
    anew[3] = "anew";
    prepare(bench, &anew);
    let without_looks = |folder: &Path| -> BTreeMap<String, Vec<u8>> {
        let files = files(folder).into_iter();
        files.filter(|(name, _)| name != "state/seen").collect()
    };
    let found = without_looks(&bench.path("kept"));
    for (name, content) in without_looks(&bench.path("anew")) {
        assert!(found.get(&name) == Some(&content), "{name}");
    }
    fs::remove_dir_all(bench.path("anew")).unwrap();
}

#[test]
fn a_data_set_follows_its_inputs_until_it_is_stopped() {
    let bench = Workbench::new();
    let first = prepare(&bench, &UPDATABLE);
    let arguments =
        ["prepare", "--output", "kept", "--follow", "--look-seconds", "1", "--format", "json"];
    let mut follow = Running::start_in_shell(bench.folder(), "exec \"$@\" 2>told", &arguments);
    let mut versions = vec![first["fingerprint"].as_str().unwrap().to_owned()];
    let mut wait_for_a_version = |follow: &mut Running| {
        let before = versions.last().unwrap();
        wait_until("a new version", || follow.has_ended() || newest(&bench) != *before);
        versions.push(newest(&bench));
    };
    bench.write("data-text/new.txt", "a text that is new ".repeat(30));
    wait_for_a_version(&mut follow);
    fs::remove_file(bench.path("data-text/3.txt")).unwrap();
    wait_for_a_version(&mut follow);

    // Errors in inputs are reported, and the next change may mend them.
    fs::rename(bench.path("data-text"), bench.path("elsewhere")).unwrap();
    let told = || fs::read_to_string(bench.path("told")).unwrap();
    wait_until("a note", || follow.has_ended() || told().contains("stays for now"));
    fs::remove_file(bench.path("elsewhere/new.txt")).unwrap();
    fs::rename(bench.path("elsewhere"), bench.path("data-text")).unwrap();
    wait_for_a_version(&mut follow);
    follow.signal("TERM");
    let ended = follow.finish().expect(0);
    let notes = told();
    assert!(notes.contains("the version before stays for now: ") && notes.contains("data-text"));
    assert_eq!(notes.lines().count(), 1, "{notes}");
    let lines = ended.stdout.lines();
    let lines: Vec<serde_json::Value> =
        lines.map(|line| serde_json::from_str(line).unwrap()).collect();
    let printed: Vec<_> = lines.iter().map(|line| line["fingerprint"].as_str().unwrap()).collect();
    assert!(printed.ends_with(&[&versions[1], &versions[2], &versions[3]]), "{ended:?}");
    assert_is_new(&bench);

    let wrong = ["prepare", "--output", "data", "--follow"];
    bench.tidemill(&wrong).refused(1, &["data", "--updatable"]);
    let wrong = ["prepare", "--output", "kept", "--follow", "--update"];
    bench.tidemill(&wrong).refused(2, &["--follow", "--update"]);
}

/// Killed at its first write, or as soon as a file is in place: the newest version is complete each
/// time.
#[test]
fn an_update_that_is_killed_leaves_a_version() {
    let bench = Workbench::new();
    prepare(&bench, &UPDATABLE);
    let count = |folder: &str| fs::read_dir(bench.path(folder)).unwrap().count();
    let mut killed = 0;
    for round in 0..10 {
        bench.write(&format!("data-text/new-{round}.txt"), format!("round {round} ").repeat(90));
        let before = (newest(&bench), count("kept"), count("kept/state"));
        let mut update = bench.start(&["prepare", "--output", "kept", "--update", "-w", "2"]);
        wait_until("an update that writes", || {
            let is_writing = match round % 2 {
                0 => count("kept") > before.1,
                _ => count("kept/state") > before.2 + 1,
            };
            is_writing || update.has_ended()
        });
        update.signal("KILL");
        killed += u32::from(update.finish().status.code().is_none());
        newest(&bench);
    }
    // The others ended before the signal came, as most may on a busy machine.
    assert!(killed > 0, "none was killed in time");
    prepare(&bench, &["--output", "kept", "--update"]);
    assert_is_new(&bench);
}
