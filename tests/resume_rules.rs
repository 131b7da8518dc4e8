//! What a resumed run may change and what it may not, key by key.
//!
//! Seen red: with `run.seed` and with `optimizer` left out of the saved settings, with moments that are not restored,
//! and with a horizon that follows `run.steps`.

use tidemill::JobError;
use tidemill::run_folder::RunFolder;

use crate::support::device::{backend, precision};
use crate::support::outcome::files;
use crate::support::program::{Running, free_hosts};
use crate::support::workbench::causes;
use crate::support::{Job, Workbench, assert_same};

/// A key that may not change, its value in the config of the workbench, and another value.
const FORBIDDEN: &[(&str, &str, &str)] = &[
    ("run.seed", "17", "18"),
    ("model.vocab_size", "259", "263"),
    ("model.d_model", "20", "24"),
    ("model.n_layers", "2", "3"),
    ("model.d_state", "5", "6"),
    ("model.d_conv", "3", "4"),
    ("model.expand", "3", "2"),
    ("model.dt_rank", "2", "3"),
    ("data.shuffle", "window", "full"),
    ("data.window_samples", "100", "101"),
    ("data.document_boundaries", "ignore", "reset"),
    ("batch.samples_per_step", "45", "44"),
    ("batch.lanes", "8", "4"),
    ("batch.grain_samples", "2", "1"),
    ("optimizer.name", "adamw", "decoupled_adamw"),
    ("optimizer.name", "adamw", "lion"),
    ("optimizer.name", "adamw", "adafactor"),
    ("optimizer.learning_rate", "0.003", "0.004"),
    ("optimizer.betas", "[0.9,0.95]", "[0.9,0.99]"),
    ("optimizer.eps", "1e-8", "1e-9"),
    ("optimizer.weight_decay", "0.1", "0.2"),
    ("optimizer.clip_norm", "1.0", "2.0"),
    ("schedule.name", "cosine", "linear"),
    ("schedule.warmup_steps", "2", "1"),
    ("schedule.final_fraction", "0.1", "0.2"),
    ("schedule.steps", "4", "5"),
];

#[test]
fn a_forbidden_change_names_the_key_and_both_values() {
    let bench = Workbench::new();
    bench.train(Job { dir: "run", workers: 2, set: &["run.steps=4"] });
    let before = files(&bench.path("run"));
    // The CPU has one precision only.
    let on_gpus: &[(&str, &str, &str)] = match (backend().as_str(), precision().as_str()) {
        ("cpu", _) => &[],
        (_, "bf16") => &[("device.precision", "bf16", "fp32")],
        _ => &[("device.precision", "fp32", "bf16")],
    };
    for &(key, saved, now) in FORBIDDEN.iter().chain(on_gpus) {
        let set = format!("{key}={now}");
        let job = Job { dir: "run", workers: 1, set: &["run.steps=4", &set] };
        let error = causes(&bench.try_train(job).expect_err(key));
        for part in [key, saved, now, "step-00000004", "cannot change"] {
            assert!(error.contains(part), "{key}: {part:?} is not in {error:?}");
        }
        assert!(files(&bench.path("run")) == before, "{key}: something was written");
    }
}

/// Also if the run began without groups, or resumes without them.
#[test]
fn groups_of_parameters_may_not_change() {
    let bench = Workbench::new();
    let set = |factor| {
        format!(r#"optimizer.groups=[{{match=["*norm*"],learning_rate_factor={factor}}}]"#)
    };
    let json = |factor| format!(r#"[{{"learning_rate_factor":{factor},"match":["*norm*"]}}]"#);
    let (half, third) = (set("0.5"), set("0.3"));
    let sets: [&[&str]; 3] = [&[], &[&half], &[&third]];
    let words = ["not set".to_owned(), json("0.5"), json("0.3")];
    for (dir, begun, now) in [("none", 0, 1), ("gone", 1, 0), ("other", 1, 2)] {
        bench.train(Job { dir, workers: 1, set: sets[begun] });
        let before = files(&bench.path(dir));
        let error =
            causes(&bench.try_train(Job { dir, workers: 2, set: sets[now] }).expect_err(dir));
        let said = format!("optimizer.groups is {} in ", words[begun]);
        assert!(error.contains(&said) || begun == 0, "{error}");
        for part in ["optimizer.groups", &words[begun], &words[now], "cannot change"] {
            assert!(error.contains(part), "{dir}: {part:?} is not in {error:?}");
        }
        assert!(files(&bench.path(dir)) == before, "{dir}: something was written");
    }
}

#[test]
fn other_data_is_a_forbidden_change() {
    let bench = Workbench::new();
    bench.train(Job { dir: "run", workers: 1, set: &[] });
    let before = files(&bench.path("run"));
    let other = format!("data.dataset={:?}", bench.path("validation"));
    let job = Job { dir: "run", workers: 1, set: &[&other] };
    let error = causes(&bench.try_train(job).unwrap_err());
    assert!(error.contains("data.") && error.contains("cannot change"), "{error}");
    assert!(files(&bench.path("run")) == before, "something was written");
}

/// The program prints it in one line, with one process and with several.
#[test]
fn a_forbidden_change_is_exit_code_1() {
    let bench = Workbench::new();
    bench.tidemill(&["train", "run.toml", "-w", "2"]).expect(0);
    let before = files(&bench.path("run"));
    for world in [["-n", "1"], ["-n", "2"]] {
        let arguments =
            [&["train", "run.toml", "-w", "1", "--set", "batch.lanes=4"], &world[..]].concat();
        let said = "batch.lanes is 8 in run/checkpoints/step-00000005, but 4 now";
        bench.tidemill(&arguments).refused(1, &[said]);
        assert!(files(&bench.path("run")) == before, "something was written");
    }
}

#[test]
fn everything_else_may_change() {
    let bench = Workbench::new();
    let validation = format!("evaluation.dataset={:?}", bench.path("validation"));
    let reference = bench.train(Job { dir: "reference", workers: 1, set: &["checkpoint.keep=9"] });
    let backend = format!("device.backend={}", backend());
    let changes: &[(usize, &[&str])] = &[
        (5, &[]),
        (1, &["batch.microbatch_grains=1"]),
        (2, &["batch.microbatch_grains=\"auto\"", "data.read_ahead_steps=1", "data.cache_mib=8"]),
        (3, &["device.threads=2", &backend, "run.peer_deadline_seconds=5"]),
        (1, &[&validation, "evaluation.samples=3"]),
        (1, &["schedule.steps=5"]),
    ];
    for (index, &(workers, set)) in changes.iter().enumerate() {
        let dir = format!("run-{index}");
        // It begins as a run of five steps and is stopped by a shorter `run.steps`.
        let begun = ["checkpoint.keep=9", "schedule.steps=5", "run.steps=2"];
        bench.train(Job { dir: &dir, workers: 2, set: &begun });
        let set = [set, &["checkpoint.keep=9"]].concat();
        let mut found = bench.train(Job { dir: &dir, workers, set: &set });
        found.evaluations.clear();
        assert_same(&found, &reference, &format!("{workers} workers {set:?}"));
    }
}

/// More steps continue the curve that was begun, as if the longer run had had that horizon from the
/// start.
#[test]
fn a_longer_run_keeps_its_horizon() {
    let bench = Workbench::new();
    bench.train(Job { dir: "run", workers: 1, set: &["run.steps=4"] });
    let longer = bench.train(Job { dir: "run", workers: 2, set: &["run.steps=9"] });
    let set = ["run.steps=9", "schedule.steps=4"];
    let reference = bench.train(Job { dir: "reference", workers: 1, set: &set });
    assert_same(&longer, &reference, "a longer run");
    let rates: Vec<f64> = longer.steps.iter().map(|line| f64::from_bits(line[3])).collect();
    assert!(rates[4..].iter().all(|&rate| (rate - 3e-4).abs() < 1e-12), "{rates:?}");
    let stretched = bench.train(Job { dir: "stretched", workers: 1, set: &["run.steps=9"] });
    assert_ne!(stretched.latest()["model.safetensors"], longer.latest()["model.safetensors"]);
}

/// A run may also end early: its warm-up belongs to the curve that was begun, not to the remaining
/// steps.
#[test]
fn a_run_may_be_made_shorter() {
    let bench = Workbench::new();
    let long = ["run.steps=9", "schedule.warmup_steps=6", "checkpoint.keep=9"];
    let reference = bench.train(Job { dir: "reference", workers: 1, set: &long });
    let dir = bench.path("run");
    for (from, to) in [("reference/checkpoints/step-00000002", "run/checkpoints/step-00000002")] {
        std::fs::create_dir_all(bench.path(to)).unwrap();
        for (name, bytes) in files(&bench.path(from)) {
            std::fs::write(bench.path(to).join(name), bytes).unwrap();
        }
    }
    assert!(dir.exists());
    let shorter = ["run.steps=4", "schedule.warmup_steps=6", "checkpoint.keep=9"];
    let found = bench.train(Job { dir: "run", workers: 2, set: &shorter });
    assert_eq!(found.steps, reference.steps[2..4]);
    assert_eq!(found.checkpoints[&4], reference.checkpoints[&4]);
    // With fewer steps than are done there is nothing left to do, and nothing is undone.
    let fewer = ["run.steps=1", "schedule.warmup_steps=6", "checkpoint.keep=9"];
    let done = bench.train(Job { dir: "run", workers: 1, set: &fewer });
    assert_same(&done, &found, "fewer steps than are done");
}

#[test]
fn as_many_checkpoints_as_asked_for_are_kept() {
    let bench = Workbench::new();
    let every = "checkpoint.every_steps=1";
    let kept = |keep: &str, steps: &str| {
        let set = [every, &format!("checkpoint.keep={keep}"), &format!("run.steps={steps}")];
        bench.train(Job { dir: "run", workers: 2, set: &set.map(|set| set) }).checkpoint_steps()
    };
    assert_eq!(kept("2", "4"), [3, 4]);
    assert_eq!(kept("4", "6"), [3, 4, 5, 6]);
    assert_eq!(kept("1", "7"), [7]);
}

/// A caller may open the run folder again as soon as `train` has returned.
#[test]
fn a_run_that_has_returned_has_let_go_of_its_folder() {
    let bench = Workbench::new();
    for steps in 1..=12 {
        let steps = format!("run.steps={steps}");
        let set = [steps.as_str(), "schedule.steps=12", "checkpoint.every_steps=1"];
        bench.try_train(Job { dir: "run", workers: 1, set: &set }).unwrap();
        RunFolder::hold(&bench.path("run")).unwrap();
    }
}

/// Only process 0's folder counts: if another machine becomes process 0, the run must not silently
/// begin anew.
#[test]
fn a_run_whose_checkpoints_lie_with_another_process_does_not_begin_anew() {
    let bench = Workbench::new();
    bench.train(Job { dir: "run-1", workers: 1, set: &[] });
    bench.write("hosts", free_hosts(2));
    let start = |process: &str, dir: &str| {
        let set = format!("run.dir={dir}");
        let world = ["-p", process, "--hosts", "hosts", "-w", "1", "--set", &set];
        bench.start(&[&["train", "run.toml"], &world[..]].concat())
    };
    let both =
        |first: &str, second: &str| [start("0", first), start("1", second)].map(Running::finish);
    for finished in both("run-0", "run-1") {
        finished.refused(
            1,
            &["run.dir run-0 of process 0 has no checkpoint, but run-1 of process 1 has step 5: copy"],
        );
    }
    assert!(!bench.path("run-0").exists(), "something was written");
    // Nor does it continue from an earlier step.
    bench.train(Job { dir: "run-2", workers: 1, set: &["run.steps=2", "schedule.steps=5"] });
    for finished in both("run-2", "run-1") {
        finished.refused(1, &["run-2 of process 0 has step 2 at most, but run-1 of process 1"]);
    }
    // If process 0 has at least as late a checkpoint, the run continues.
    for finished in both("run-1", "run-2") {
        finished.expect(0);
    }
}

/// The contents identify a data set, not its place.
#[test]
fn a_data_set_may_move() {
    let bench = Workbench::new();
    let reference = bench.train(Job { dir: "reference", workers: 1, set: &[] });
    bench.train(Job { dir: "run", workers: 1, set: &["run.steps=2", "schedule.steps=5"] });
    std::fs::rename(bench.path("data"), bench.path("elsewhere")).unwrap();
    let gone = bench.try_train(Job { dir: "run", workers: 1, set: &[] });
    assert!(matches!(gone, Err(JobError::Data(_))), "{gone:?}");
    let moved = format!("data.dataset={:?}", bench.path("elsewhere"));
    assert_same(&bench.train(Job { dir: "run", workers: 3, set: &[&moved] }), &reference, "moved");
}
