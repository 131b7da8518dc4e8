//! AMD GPUs through the program's HIP driver: runs are as elastic as on any device and continue
//! after a GPU was lost, and a missing part, or a model that does not fit, is one clear line.
//!
//! The ROCm libraries are those of `kernels/tests/hip_runtime`, on the CPU: three GPUs, of which
//! the first two are of one kind.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use serde_json::Value;

use crate::support::processes::wait_until;
use crate::support::workbench::CONFIG;
use crate::support::{Finished, Outcome, Running, Workbench, assert_same, hip_runtime};

/// A few samples: an emulated thread takes microseconds.
const DEVICE: &str = "\n[device]\nbackend = \"rocm\"\n";
const SMALL: [&str; 4] = ["--set", "batch.samples_per_step=9", "--set", "batch.lanes=4"];

/// The variables of the environment.
type Variables<'a> = &'a [(&'a str, &'a str)];

fn start(
    bench: &Workbench,
    libraries: &Path,
    variables: Variables<'_>,
    arguments: &[&str],
) -> Running {
    let libraries = libraries.to_str().unwrap();
    let hidden = [("CUDA_VISIBLE_DEVICES", ""), ("LD_LIBRARY_PATH", libraries)];
    let environment: Vec<_> = hidden
        .iter()
        .chain(variables)
        .map(|&(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    Running::start_with(&environment, bench.folder(), arguments)
}

fn tidemill_with(
    bench: &Workbench,
    libraries: &Path,
    variables: Variables<'_>,
    arguments: &[&str],
) -> Finished {
    start(bench, libraries, variables, arguments).finish()
}

fn tidemill(bench: &Workbench, variables: Variables<'_>, arguments: &[&str]) -> Finished {
    tidemill_with(bench, hip_runtime::folder(), variables, arguments)
}

/// Trains in the run folder `dir`.
fn train(bench: &Workbench, dir: &str, variables: Variables<'_>, more: &[&str]) -> Finished {
    let dir = format!("run.dir={dir}");
    let arguments = [&["train", "rocm.toml", "--set", &dir], &SMALL[..], more].concat();
    tidemill(bench, variables, &arguments)
}

struct Reference {
    bench: Workbench,
    run: Finished,
    outcome: Outcome,
}

/// A run of one GPU.
static REFERENCE: LazyLock<Reference> = LazyLock::new(|| {
    let bench = Workbench::new();
    bench.write("rocm.toml", format!("{CONFIG}{DEVICE}"));
    let run = train(&bench, "reference", &[], &["-w", "1"]).expect(0);
    let outcome = bench.outcome("reference");
    Reference { bench, run, outcome }
});

fn devices(bench: &Workbench, dir: &str) -> Value {
    let text = std::fs::read_to_string(bench.path(dir).join("devices.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

#[test]
fn a_gpu_is_named_and_learns() {
    let Reference { bench, run, outcome } = &*REFERENCE;
    let words = "1 worker on emulated AMD GPU (gfx942:sramecc+:xnack-), fp32";
    assert!(run.stderr.contains(words), "{run:?}");
    let list = devices(bench, "reference");
    assert_eq!(list["kind"]["backend"], "rocm");
    assert_eq!(list["kind"]["architecture"], "gfx942:sramecc+:xnack-");
    assert!(outcome.loss(4) < outcome.loss(0), "{} {}", outcome.loss(0), outcome.loss(4));
}

#[test]
fn two_gpus_leave_the_bits_of_one() {
    let Reference { bench, outcome, .. } = &*REFERENCE;
    for (dir, world) in [("threads", ["-w", "2", "-n", "1"]), ("processes", ["-w", "1", "-n", "2"])]
    {
        train(bench, dir, &[], &world).expect(0);
        assert_same(&bench.outcome(dir), outcome, dir);
    }
}

/// If no device is configured, AMD GPUs of one kind are used.
#[test]
fn auto_takes_the_gpus_that_work_together() {
    let Reference { bench, outcome, .. } = &*REFERENCE;
    let run = train(bench, "auto", &[], &["--set", "device.backend=auto"]).expect(0);
    assert!(run.stderr.contains("2 workers on emulated AMD GPU"), "{run:?}");
    assert!(run.stderr.contains("2 of 3 GPUs compute"), "{run:?}");
    assert_same(&bench.outcome("auto"), outcome, "auto");
}

#[test]
fn a_run_whose_gpu_was_lost_goes_on_on_others() {
    let Reference { bench, outcome, .. } = &*REFERENCE;
    let lost = train(bench, "lost", &[("EMULATED_HIP_LOST_AFTER", "900")], &["-w", "1"]);
    assert_eq!(lost.status.code(), Some(75), "{lost:?}");
    assert!(lost.stderr.contains("unspecified launch failure"), "{lost:?}");
    assert!(bench.outcome("lost").steps.len() < outcome.steps.len());
    train(bench, "lost", &[("HIP_VISIBLE_DEVICES", "1,0")], &["-w", "2"]).expect(0);
    assert_same(&bench.outcome("lost"), outcome, "lost and resumed");
}

/// At checkpoints the devices agree in the state, and closely in the numbers.
#[test]
fn a_run_moves_from_the_cpu_to_amd_and_back() {
    let Reference { bench, .. } = &*REFERENCE;
    let steps = |steps: u32| format!("run.steps={steps}");
    let on = |dir: &str, device: &str, until: u32| {
        let (backend, until) = (format!("device.backend={device}"), steps(until));
        let set = ["--set", &backend, "--set", &until, "--set", "schedule.steps=5"];
        let run = train(bench, dir, &[], &set).expect(0);
        run.stderr.contains("note: the kind of device changed")
    };
    assert!(!on("stayed", "cpu", 5));
    assert!(!on("moved", "cpu", 2));
    assert!(on("moved", "rocm", 4));
    assert_eq!(devices(bench, "moved")["kind"]["backend"], "rocm");
    assert!(on("moved", "cpu", 5));
    let (stayed, moved) = (bench.outcome("stayed"), bench.outcome("moved"));
    assert_eq!(moved.steps.len(), 5);
    for step in 0..5 {
        let (expected, found) = (stayed.loss(step), moved.loss(step));
        assert!((found - expected).abs() < 1e-5 * expected, "step {step}: {found}, {expected}");
    }
}

/// At a known place: its GPU never ends a kernel there.
#[test]
fn a_run_that_was_killed_goes_on() {
    let Reference { bench, outcome, .. } = &*REFERENCE;
    let arguments = ["train", "rocm.toml", "--set", "run.dir=killed", "-w", "1"];
    let arguments = [&arguments[..], &SMALL[..]].concat();
    let hangs = [("EMULATED_HIP_HANGS_AFTER", "900")];
    let mut run = start(bench, hip_runtime::folder(), &hangs, &arguments);
    let checkpoint = bench.path("killed/checkpoints/step-00000002/trainer.json");
    wait_until("a checkpoint", || run.has_ended() || checkpoint.exists());
    run.signal("KILL");
    assert_eq!(run.finish().status.code(), None, "it was killed before its end");
    train(bench, "killed", &[], &["-w", "2"]).expect(0);
    assert_same(&bench.outcome("killed"), outcome, "killed and resumed");
}

/// As on any GPU: the error has the source, the architecture and the compiler's first error, and
/// nothing is half-written.
#[test]
fn a_kernel_that_does_not_compile_is_one_line() {
    let Reference { bench, .. } = &*REFERENCE;
    let cache = bench.path("empty-cache");
    let refused = [
        ("EMULATED_HIP_REFUSED_SOURCES", ".cu"),
        ("TIDEMILL_KERNEL_CACHE", cache.to_str().unwrap()),
    ];
    let run = train(bench, "uncompiled", &refused, &["-w", "1"]);
    let parts =
        ["compiling ", ".cu for gfx942:sramecc+:xnack- failed: ", "error: refused for a test"];
    run.failed(1, &parts);
    assert!(!bench.path("uncompiled/checkpoints/step-00000002").exists());
}

#[test]
fn what_was_trained_is_used() {
    let Reference { bench, .. } = &*REFERENCE;
    let arguments = [
        "generate",
        "--model",
        "reference",
        "--prompt",
        "the tide",
        "--max-new-tokens",
        "3",
        "--backend",
        "rocm",
        "--temperature",
        "0",
        "--ignore-eos",
        "--format",
        "json",
    ];
    let generated = tidemill(bench, &[], &arguments).expect(0).json();
    assert_eq!(generated["tokens"].as_array().unwrap().len(), 3, "{generated}");
    assert_eq!(tidemill(bench, &[], &arguments).expect(0).json(), generated);
}

#[test]
fn a_gpu_that_is_not_there_or_has_no_kernels_is_one_line() {
    let Reference { bench, .. } = &*REFERENCE;
    let cases: [(Variables<'_>, &[&str]); 3] = [
        (&[("HIP_VISIBLE_DEVICES", "-1")], &["AMD's HIP runtime answers: no ROCm-capable device"]),
        (&[("EMULATED_HIP_DEVICES", "gfx1100")], &["\"gfx1100\", expected one of gfx90a, gfx942"]),
        (&[("EMULATED_HIP_BYTES", "5000000")], &["does not fit", "out of memory"]),
    ];
    for (variables, parts) in cases {
        let refused = train(bench, "refused", variables, &["-w", "1"]);
        assert_eq!(refused.status.code(), Some(1), "{refused:?}");
        for part in parts {
            assert!(refused.stderr.contains(part), "{part:?}: {refused:?}");
        }
    }
}

/// The ROCm of this machine without one library.
fn without(bench: &Workbench, missing: &str) -> PathBuf {
    let folder = bench.path("rocm-without");
    std::fs::create_dir(&folder).unwrap();
    for (library, ..) in hip_runtime::LIBRARIES {
        if !library.starts_with(missing) {
            symlink(hip_runtime::folder().join(library), folder.join(library)).unwrap();
        }
    }
    folder
}

/// Any device can continue from its checkpoint. The library of matrix products is part of the kind
/// of device, so the run prints that bits may differ from there on.
#[test]
fn a_run_goes_on_where_hipblaslt_is_not() {
    let bench = Workbench::new();
    bench.write("rocm.toml", format!("{CONFIG}{DEVICE}"));
    let without = without(&bench, "libhipblaslt");
    let train = |dir: &str, libraries: &Path, steps: u32| {
        let (dir, steps) = (format!("run.dir={dir}"), format!("run.steps={steps}"));
        let set = ["--set", &dir, "--set", &steps, "--set", "schedule.steps=5", "-w", "1"];
        let arguments = [&["train", "rocm.toml"], &SMALL[..], &set].concat();
        tidemill_with(&bench, libraries, &[], &arguments).expect(0)
    };
    let library = |dir: &str| {
        let kind = devices(&bench, dir)["kind"]["matrix_library"].clone();
        kind.as_str().unwrap().to_owned()
    };
    train("stayed", hip_runtime::folder(), 5);
    train("moved", hip_runtime::folder(), 2);
    assert!(library("moved").starts_with("hipBLASLt 1.2.3, solutions "), "{}", library("moved"));
    let moved = train("moved", &without, 5);
    assert!(library("moved").starts_with("rocBLAS 5.0.0.emulated, "), "{}", library("moved"));
    for part in [
        "resuming after step 2",
        "the kind of device changed (matrix_library was \"hipBLASLt 1.2.3, ",
    ] {
        assert!(moved.stderr.contains(part), "{part:?}: {moved:?}");
    }
    let (stayed, moved) = (bench.outcome("stayed"), bench.outcome("moved"));
    assert_eq!(moved.steps.len(), 5);
    for step in 0..2 {
        assert_eq!(moved.loss(step).to_bits(), stayed.loss(step).to_bits(), "step {step}");
    }
    for step in 2..5 {
        let (expected, found) = (stayed.loss(step), moved.loss(step));
        assert!((found - expected).abs() < 1e-5 * expected, "step {step}: {found}, {expected}");
    }
}

#[test]
fn a_runtime_that_is_broken_is_said_to_be() {
    let Reference { bench, .. } = &*REFERENCE;
    let broken = bench.path("broken");
    bench.write("broken/libamdhip64.so.7", "no library");
    let arguments = ["train", "rocm.toml", "-w", "1", "--set", "run.dir=broken-run"];
    let parts = ["device.backend: rocm", "libamdhip64.so.7 cannot be opened: ", "use \"cpu\""];
    tidemill_with(bench, &broken, &[], &arguments).refused(1, &parts);
}
