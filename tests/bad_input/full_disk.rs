//! Full disks, and closed pipes.

use std::collections::BTreeMap;
use std::path::Path;

use super::training;
use crate::support::outcome::files;
use crate::support::{Running, Workbench};

/// A limit on the size of files acts as a full disk: the checkpoint is absent, older ones are
/// unchanged, and with more room the run continues as if nothing had happened. The exit code does
/// not blame the input.
#[test]
fn a_full_disk() {
    let bench = Workbench::new();
    training(&bench, &["--set", "run.dir=reference"]).expect(0);
    let reference = bench.outcome("reference");
    let bytes = |name: &str| reference.latest()[name].len();
    // In blocks of 512 bytes: room for the model but not for the optimizer's state.
    let blocks = (bytes("model.safetensors") + bytes("optimizer.safetensors")) / 2 / 512;
    for (index, world) in [["-n", "1"], ["-n", "2"]].into_iter().enumerate() {
        let dir = format!("full-{index}");
        let run_dir = format!("run.dir={dir}");
        let begun = ["--set", &run_dir, "--set", "run.steps=3", "--set", "schedule.steps=5"];
        training(&bench, &begun).expect(0);
        let before = files(&bench.path(&dir).join("checkpoints"));
        assert_eq!(before.len(), 2 * 5, "{:?}", before.keys());
        let line = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$@\"");
        let limited = [
            &["train", "run.toml", "-w", "1", "--set", &run_dir, "--set", "checkpoint.keep=2"],
            &world[..],
        ]
        .concat();
        let full = Running::start_in_shell(bench.folder(), &line, &limited).finish().expect(75);
        let said: Vec<&str> =
            full.stderr.lines().filter(|line| line.starts_with("tidemill: ")).collect();
        assert!(said.len() == 1 && said[0].contains("optimizer.safetensors"), "{full:?}");
        assert!(files(&bench.path(&dir).join("checkpoints")) == before, "older checkpoints");
        assert_eq!(
            folders(&bench.path(&dir).join("checkpoints")),
            ["step-00000002", "step-00000003"]
        );
        training(&bench, &["--set", &run_dir]).expect(0);
        let resumed = bench.outcome(&dir);
        assert_eq!(resumed.steps, reference.steps);
        assert_eq!(resumed.latest(), reference.latest());
    }
}

/// A data set without enough room, in its folder or where shards wait for a store: one line of
/// error, and nothing is left.
#[test]
fn a_full_disk_under_prepare() {
    let bench = Workbench::new();
    let line = "trap '' XFSZ; ulimit -f 4; exec \"$@\"";
    let before = folders(bench.folder());
    let prepare = ["prepare", "--input", "data-text", "--seq-len", "17", "--output", "out/deep"];
    let full = Running::start_in_shell(bench.folder(), line, &prepare).finish();
    full.refused(75, &["out/.deep.preparing-", "shard-00000.parquet", "File too large"]);
    assert_eq!(folders(bench.folder()), before);
    bench.tidemill(&prepare).expect(0);
}

fn folders(path: &Path) -> Vec<String> {
    let names = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = names.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Standard output on a full disk is an error like any other; a closed pipe is none.
#[test]
fn standard_output_that_takes_nothing() {
    let bench = Workbench::new();
    training(&bench, &[]).expect(0);
    bench.write("input.jsonl", "{\"tokens\": [1, 2, 3]}\n");
    let commands: BTreeMap<&str, &[&str]> = BTreeMap::from([
        ("inspect", &["inspect", "data"][..]),
        ("inspect json", &["inspect", "run", "--format", "json"]),
        ("config", &["train", "run.toml", "--print-config"]),
        ("train", &["train", "run.toml", "-w", "1"]),
        ("generate", &["generate", "--model", "run", "--tokens", "1", "--max-new-tokens", "3"]),
        ("generate json", &["generate", "--model", "run", "--tokens", "1", "--format", "json"]),
        ("score", &["score", "--model", "run", "--input", "input.jsonl"]),
        ("bench data", &["bench", "data", "data", "--seconds", "0.01"]),
    ]);
    for (what, arguments) in commands {
        let to = |line: &str| Running::start_in_shell(bench.folder(), line, arguments).finish();
        let full = to("exec \"$@\" > /dev/full").expect(75);
        let said = full.stderr.lines().filter(|line| line.starts_with("tidemill: ")).count();
        assert!(said == 1 && full.stderr.contains("No space left"), "{what}: {full:?}");
        to("exec \"$@\" 2> /dev/full").expect(0);
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let closed =
            Running::start_into(writer.into(), bench.folder(), arguments).finish().expect(0);
        assert!(!closed.stderr.contains("tidemill: "), "{what}: {closed:?}");
    }
}
