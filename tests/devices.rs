//! What computes: devices that are not there are one clear line that says what to change, and a run says and writes down
//! what it computes on.
//!
//! Runs on a GPU need one: `TIDEMILL_TEST_BACKEND=cuda` makes every test of these promises train there, and fail
//! where there is none.
//!
//! Seen red: with bf16 that is let through on the CPU, with `auto` that fails where there is no GPU, and with flags that
//! are called by the keys of a config.

use serde_json::Value;

use crate::support::device::{backend, precision};
use crate::support::workbench::CONFIG;
use crate::support::{Finished, Running, Workbench};

/// The program on a machine without NVIDIA GPUs, which this one may not be.
fn without_gpus(bench: &Workbench, arguments: &[&str]) -> Finished {
    let line = "CUDA_VISIBLE_DEVICES= \"$@\"";
    Running::start_in_shell(bench.folder(), line, arguments).finish()
}

#[test]
fn a_device_that_is_not_there_is_one_line_with_what_to_change() {
    let bench = Workbench::new();
    let cases: &[(&str, &[&str])] = &[
        ("backend = \"cuda\"", &["device.backend: cuda", "\"cpu\"", "\"auto\""]),
        ("backend = \"rocm\"", &["device.backend: rocm", "no ROCm driver yet", "\"cpu\""]),
        (
            "backend = \"cpu\"\nprecision = \"bf16\"",
            &["device.precision: expected fp32 on the CPU, found bf16"],
        ),
        (
            "precision = \"bf16\"",
            &["device.precision: expected fp32 on the CPU (no GPU: ", "), found bf16"],
        ),
        ("backend = \"tpu\"", &["config.toml: line ", "`tpu`", "`cuda`"]),
    ];
    for (device, parts) in cases {
        bench.write("config.toml", format!("{CONFIG}\n[device]\n{device}\n"));
        for processes in ["1", "2"] {
            let arguments = ["train", "config.toml", "-w", "1", "-n", processes];
            without_gpus(&bench, &arguments).refused(1, parts);
        }
        assert!(!bench.path("run").exists(), "{device}: the run folder was created");
    }
}

#[test]
fn flags_name_themselves() {
    let bench = Workbench::new();
    let commands: [&[&str]; 3] = [
        &["generate", "--model", "run", "--prompt", "a"],
        &["score", "--model", "run", "--input", "rows.jsonl"],
        &["bench", "train", "--steps", "1"],
    ];
    let cases: &[(&[&str], &[&str])] = &[
        (&["--backend", "cuda"], &["--backend: cuda is not available", "\"cpu\""]),
        (&["--backend", "rocm"], &["--backend: rocm is not available", "\"auto\""]),
        (
            &["--backend", "cpu", "--precision", "bf16"],
            &["--precision: expected fp32 on the CPU, found bf16"],
        ),
    ];
    for command in commands {
        for (flags, parts) in cases {
            without_gpus(&bench, &[command, flags].concat()).refused(1, parts);
        }
        let flags = ["--backend", "tpu"];
        without_gpus(&bench, &[command, &flags].concat()).refused(2, &["tpu", "cuda", "auto"]);
    }
}

#[test]
fn auto_without_a_gpu_is_the_cpu() {
    let bench = Workbench::new();
    bench.write("auto.toml", CONFIG);
    let run = without_gpus(&bench, &["train", "auto.toml", "-w", "2"]).expect(0);
    assert!(run.stderr.contains("2 workers on the CPU ("), "{run:?}");
    let list = devices(&bench);
    assert_eq!(list["kind"]["backend"], "cpu");
}

fn devices(bench: &Workbench) -> Value {
    let text = std::fs::read_to_string(bench.path("run/devices.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

#[test]
fn a_run_says_and_writes_down_what_it_computes_on() {
    let bench = Workbench::new();
    let run = bench.tidemill(&["train", "run.toml", "-w", "3"]).expect(0);
    assert!(run.stderr.contains("3 workers on "), "{run:?}");
    assert!(run.stderr.contains(&format!("), {}", precision())), "{run:?}");
    let list = devices(&bench);
    assert_eq!(list["kind"]["backend"], Value::from(backend()));
    assert_eq!(list["precision"], Value::from(precision()));
    let workers = list["workers"].as_array().unwrap();
    assert_eq!(workers.len(), 3);
    assert!(workers.iter().all(|worker| worker["name"].is_string()), "{list}");
}

/// Whether runs can move between the CPU and another device here; says so where they cannot.
fn can_move() -> bool {
    let can = backend() != "cpu" && precision() == "fp32";
    if !can {
        eprintln!(
            "not run: moving between devices needs another than {} {}",
            backend(),
            precision()
        );
    }
    can
}

#[test]
fn a_run_may_move_to_another_device_and_back_at_a_checkpoint() {
    if !can_move() {
        return;
    }
    let bench = Workbench::new();
    let train = |dir: &str, backend: &str, steps: usize| {
        let set = [
            format!("run.dir={dir}"),
            format!("device.backend={backend}"),
            format!("run.steps={steps}"),
            "schedule.steps=6".to_owned(),
        ];
        let flags = set.iter().flat_map(|set| ["--set", set.as_str()]).collect::<Vec<_>>();
        bench.tidemill(&[&["train", "run.toml", "-w", "2"], &flags[..]].concat()).expect(0)
    };
    train("reference", "cpu", 6);
    train("moving", "cpu", 2);
    for (device, steps) in [(backend().as_str(), 4), ("cpu", 6)] {
        let moved = train("moving", device, steps);
        let notes = moved.stderr.lines().filter(|line| line.starts_with("note: the kind"));
        assert_eq!(notes.count(), 1, "{moved:?}");
    }
    let (reference, moving) = (bench.outcome("reference"), bench.outcome("moving"));
    for step in 0..6 {
        let (expected, found) = (reference.loss(step), moving.loss(step));
        assert!((expected - found).abs() < 1e-3, "step {}: {expected} {found}", step + 1);
    }
}

#[test]
fn peers_on_another_kind_of_device_are_refused() {
    if !can_move() {
        return;
    }
    let bench = Workbench::new();
    bench.write("hosts", crate::support::program::free_hosts(2));
    let start = |process: &str, backend: &str| {
        let set = format!("device.backend={backend}");
        let place = ["train", "run.toml", "-p", process, "--hosts", "hosts", "-w", "1"];
        bench.start(&[&place[..], &["--set", &set]].concat())
    };
    for run in [start("0", "cpu"), start("1", &backend())] {
        run.finish().refused(1, &["peers disagree on device.backend", "cpu ", &backend()]);
    }
    assert!(!bench.path("run").exists());
}
