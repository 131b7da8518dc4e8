//! Devices: a missing device is one clear line that says what to change, and a run prints and
//! records the devices that it computes on.
//!
//! Runs on a GPU need one: `TIDEMILL_TEST_BACKEND=cuda` makes every test of these promises train there, and fail
//! where there is none. Runs that move between the CPU and a GPU are promised in `dataflow/tests/cuda.rs`, which says where
//! they did not run.
//!
//! Seen red: with bf16 that is let through on the CPU, with `auto` that fails where there is no GPU, and with flags that
//! are called by the keys of a config; with a program that is linked to HIP's runtime, and with one that does not start
//! where the runtime is missing.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::support::device::{backend, precision};
use crate::support::program::program;
use crate::support::workbench::CONFIG;
use crate::support::{Finished, Running, Workbench};

/// The program on a machine without GPUs, which this one may not be.
fn without_gpus(bench: &Workbench, arguments: &[&str]) -> Finished {
    let line = "CUDA_VISIBLE_DEVICES= HIP_VISIBLE_DEVICES=-1 \"$@\"";
    Running::start_in_shell(bench.folder(), line, arguments).finish()
}

#[test]
fn a_device_that_is_not_there_is_one_line_with_what_to_change() {
    let bench = Workbench::new();
    let cases: &[(&str, &[&str])] = &[
        ("backend = \"cuda\"", &["device.backend: cuda", "\"cpu\"", "\"auto\""]),
        ("backend = \"rocm\"", &["device.backend: rocm", "AMD's HIP runtime", "\"cpu\""]),
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

/// The libraries of NVIDIA's and AMD's GPUs, by the beginnings of their names.
const GPU_LIBRARIES: [&str; 12] = [
    "libcuda",
    "libnvrtc",
    "libcublas",
    "libnccl",
    "libnvidia",
    "libamdhip",
    "libhip",
    "librocblas",
    "librccl",
    "librocm",
    "libhsa",
    "libamd_comgr",
];

fn is_of_a_gpu(library: &str) -> bool {
    GPU_LIBRARIES.iter().any(|beginning| library.starts_with(beginning))
}

/// One program for all machines: the libraries that it is linked to, directly or not, exist without
/// any GPU's software.
#[test]
fn the_program_is_linked_to_no_library_of_a_gpu() {
    let listed = Command::new("ldd").arg(program()).output().expect("ldd comes with the C library");
    let text = String::from_utf8(listed.stdout).unwrap();
    let libraries: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .map(|library| library.rsplit('/').next().unwrap_or(library))
        .collect();
    assert!(libraries.iter().any(|library| library.starts_with("libc.so")), "{text}");
    assert!(!libraries.iter().any(|library| is_of_a_gpu(library)), "{text}");
    assert!(!text.contains("not found"), "{text}");
}

/// It runs there, although it has looked for GPUs.
#[test]
fn the_program_runs_where_no_library_of_a_gpu_is() {
    let folder = tempfile::tempdir().unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/devices/no_gpu_library.cpp");
    let auditor = folder.path().join("no_gpu_library.so");
    let compiled = Command::new("g++")
        .args(["-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o"])
        .args([&auditor, Path::new(source)])
        .output()
        .expect("these tests need g++");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let refused = folder.path().join("refused");
    let path_of = |path: &Path| path.to_str().unwrap().to_owned();
    let environment = [
        ("LD_AUDIT", path_of(&auditor)),
        ("HIDDEN", GPU_LIBRARIES.join(" ")),
        ("REFUSED", path_of(&refused)),
    ];
    let environment = environment.map(|(name, value)| (name.to_owned(), value));
    let run =
        |arguments: &[&str]| Running::start_with(&environment, folder.path(), arguments).finish();

    let page = run(&["doctor", "--format", "json"]).expect(0).json();
    assert_eq!(page["verdict"], "auto computes on cpu, which works");
    for section in page["backends"].as_array().unwrap() {
        assert_eq!(section["is_here"], section["backend"] == "cpu", "{section:#}");
    }
    let looked_for = std::fs::read_to_string(&refused).unwrap();
    for library in ["libcuda.so", "libamdhip64.so"] {
        assert!(looked_for.lines().any(|line| line.starts_with(library)), "{looked_for}");
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
