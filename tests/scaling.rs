//! `bench train`, `bench collective` and metrics measure workers in processes as they measure
//! threads: in processes that are started here, and in those of a hosts file.
//!
//! Seen red: with processes that train each for itself, and with a result that every process prints.

use serde_json::Value;
use tidemill::metrics::{self, StepMetrics};

use crate::support::device::backend;
use crate::support::program::is_of_shared_gpu;
use crate::support::{Finished, Workbench, program};

/// A step of a quick model, of two samples.
const TINY: [&str; 14] = [
    "bench",
    "train",
    "--preset",
    "mamba-10m",
    "--vocab-size",
    "31",
    "--seq-len",
    "4",
    "--samples-per-step",
    "2",
    "--steps",
    "2",
    "--format",
    "json",
];

/// The output of each of two processes of a hosts file, process 0 first; `flags` are those of each.
fn of_hosts(bench: &Workbench, command: &[&str], flags: [&[&str]; 2]) -> [Finished; 2] {
    bench.write("hosts", program::free_hosts(2));
    let start = |process: &str, flags: &[&str]| {
        bench.start(&[command, &["-p", process, "--hosts", "hosts", "-w", "1"], flags].concat())
    };
    [start("0", flags[0]), start("1", flags[1])].map(|process| process.finish())
}

/// The trained weights are the same to the bit, so that the measurement is of one run over all
/// workers.
#[test]
fn training_is_measured_over_processes() {
    let bench = Workbench::new();
    let tidemill = |flags: &[&str]| bench.tidemill(&[&TINY, flags].concat());
    let threads = tidemill(&["-w", "2"]).expect(0).json();
    let check = |result: &Value, processes: u64| {
        let counts = ["workers", "processes", "lanes"].map(|key| result[key].as_u64().unwrap());
        assert_eq!(counts, [2, processes, 2], "{result}");
        for key in ["tokens_per_second", "step_milliseconds", "peak_memory_bytes"] {
            assert!(result[key].as_f64().unwrap() > 0.0, "{key}: {result}");
        }
        for key in ["first_loss", "last_loss", "samples_per_step", "grain_samples", "parameters"] {
            assert_eq!(result[key], threads[key], "{key}");
        }
    };
    check(&threads, 1);
    check(&tidemill(&["-n", "2", "-w", "1"]).expect(0).json(), 2);
    // Without a number of workers, as many as there are lanes.
    let said = tidemill(&["-n", "2"]).expect(0);
    check(&said.json(), 2);
    assert!(said.stderr.lines().all(is_of_shared_gpu), "{said:?}");
    let [first, second] = of_hosts(&bench, &TINY, [&[], &[]]).map(|process| process.expect(0));
    check(&first.json(), 2);
    assert_eq!(second.stdout, "");
    assert!(second.stderr.lines().all(is_of_shared_gpu), "{second:?}");
    let words = bench.tidemill(&[&TINY[..12], &["-n", "2", "-w", "1"]].concat()).expect(0);
    let device = if backend() == "cpu" { "the CPU" } else { "" };
    let workers = format!("with 2 workers of 2 processes on {device}");
    for part in [workers.as_str(), "peak memory of process 0 "] {
        assert!(words.stdout.contains(part), "{words:?}");
    }
}

#[test]
fn processes_that_measure_something_else_are_refused() {
    let bench = Workbench::new();
    let wrong: [(&[&str], i32, &[&str]); 7] = [
        (&["-n", "2", "-p", "0", "--hosts", "hosts"], 2, &["--processes", "--process"]),
        (&["-p", "0"], 2, &["--hosts"]),
        (&["--hosts", "hosts"], 2, &["--process"]),
        (&["-w", "1", "--insecure"], 2, &["--process"]),
        (&["-n", "0"], 1, &["-n: expected at least 1 process"]),
        (&["-n", "2", "-w", "0"], 1, &["-w: expected at least 1 worker"]),
        (&["-n", "3"], 1, &["-w: expected at most 2 over all processes", "--lanes, found 3"]),
    ];
    for (flags, code, parts) in wrong {
        bench.tidemill(&[&TINY, flags].concat()).refused(code, parts);
    }
    bench.tidemill(&["bench", "train", "--lanes", "3"]).refused(1, &["--lanes: expected a power"]);
    let collective = ["bench", "collective", "--backend", "cpu", "--megabytes", "1"];
    for (command, flag) in [(&TINY[..10], "--steps"), (&collective, "--rounds")] {
        let flags: [&[&str]; 2] = [&[flag, "2"], &[flag, "3"]];
        for process in of_hosts(&bench, command, flags) {
            process.refused(1, &["peers disagree on", flag, "2", "3"]);
        }
    }
}

#[test]
fn an_exchange_between_processes_of_a_hosts_file_is_measured() {
    let bench = Workbench::new();
    let command = ["bench", "collective", "--backend", "cpu", "--megabytes", "1", "--rounds", "1"];
    let flags: &[&str] = &["--format", "json"];
    let [first, second] =
        of_hosts(&bench, &command, [flags, flags]).map(|process| process.expect(0));
    let result = first.json();
    assert_eq!((&result["workers"], &result["processes"]), (&2.into(), &2.into()), "{result}");
    assert_eq!((second.stdout.as_str(), second.stderr.as_str()), ("", ""));
}

/// Each line has the bytes that worker 0 received: in the first step of a run its sums, in the
/// others also the parameters gathered before the step. The lines of a single worker lack it, and a
/// resumed run reads both kinds.
#[test]
fn metrics_say_what_communication_took() {
    let bench = Workbench::new();
    bench.tidemill(&["train", "run.toml", "-w", "1"]).expect(0);
    let text = std::fs::read_to_string(bench.path("run/metrics.jsonl")).unwrap();
    assert!(!text.contains("communication"), "{text}");
    let goes_on = |workers: &[&str]| -> Vec<[u64; 2]> {
        for step in [4, 5] {
            let checkpoint = bench.path(&format!("run/checkpoints/step-{step:08}"));
            std::fs::remove_dir_all(checkpoint).unwrap();
        }
        bench.tidemill(&[&["train", "run.toml"], workers].concat()).expect(0);
        let lines = metrics::read::<StepMetrics>(&bench.path("run")).unwrap();
        assert!(lines.iter().map(|line| line.step).eq(1..=5), "{lines:?}");
        let (before, after) = lines.split_at(2);
        assert!(before.iter().all(|line| line.communication.is_none()), "{before:?}");
        let told = after.iter().map(|line| {
            let told = line.communication.unwrap_or_else(|| panic!("of {workers:?}: {line:?}"));
            assert!(told.milliseconds.is_finite() && told.milliseconds > 0.0, "{line:?}");
            assert!((0.0..=told.milliseconds).contains(&told.exposed_milliseconds), "{line:?}");
            [told.bytes_from_memory, told.bytes_from_processes]
        });
        told.collect()
    };
    let threads = goes_on(&["-w", "2"]);
    assert!(threads.iter().all(|of_step| of_step[0] > 0 && of_step[1] == 0), "{threads:?}");
    assert!(threads[0][0] < threads[1][0] && threads[1] == threads[2], "{threads:?}");
    // Equally many bytes, on another way.
    let swapped =
        |steps: Vec<[u64; 2]>| -> Vec<_> { steps.into_iter().map(|[a, b]| [b, a]).collect() };
    assert_eq!(swapped(goes_on(&["-n", "2", "-w", "1"])), threads);
    let both = goes_on(&["-n", "2", "-w", "2"]);
    // Between GPUs of several processes each worker receives all of its bytes in one way.
    let by_memory = backend() == "cpu";
    assert!(both.iter().all(|it| (it[0] > 0) == by_memory && it[1] > 0), "{both:?}");
}
