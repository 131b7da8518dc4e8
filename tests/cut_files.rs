//! A model in several files works like one in a single file: resuming, generating, scoring, and
//! training from it. The files do not depend on which processes write them.
//!
//! Seen red: an index that places every tensor in the first file, and files that are sent to another worker than the one that
//! writes them.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tidemill::checkpoint::{
    CheckpointFiles, CheckpointWriter, FilePlan, StateFiles, checkpoint_path,
};
use tidemill::cluster::{Abort, ClusterSettings};
use tidemill::job::{ResolvedRun, RunConfig, TrainOptions, train};
use tidemill::model::optimizer::OptimizerSettings;
use tidemill::model::{Blueprint, ModelConfig};
use tidemill::operators::StatePart;

use crate::support::outcome::files;
use crate::support::workbench::config;
use crate::support::{Job, Outcome, Workbench, assert_same};

/// The model has some ten times as many.
const FILE_BYTES: u64 = 9_000;

/// Writes the checkpoint of `step` again, in files of `file_bytes` bytes.
fn cut(run: &Path, step: u64, file_bytes: u64) -> PathBuf {
    let path = checkpoint_path(run, step);
    let model = Blueprint::new(&ModelConfig::read(&path).unwrap()).unwrap();
    let layout = model.layout();
    let states = OptimizerSettings::default().states();
    let stored = StateFiles::open(&path, layout, states).unwrap();
    let all = 0..layout.parameter_elements();
    let state = stored.read(std::slice::from_ref(&all), &Abort::new()).unwrap().unwrap();
    let read = |name: &str| std::fs::read(path.join(name)).unwrap();
    let files = CheckpointFiles {
        plan: Arc::new(FilePlan::new(layout, states, file_bytes)),
        config: serde_json::from_slice(&read("config.json")).unwrap(),
        tokenizer: Some(read("tokenizer.json").into()),
        keep: 9,
    };
    std::fs::remove_dir_all(&path).unwrap();
    let mut writer = CheckpointWriter::begin(files, run, stored.state().clone()).unwrap();
    let arenas = std::iter::once(&state.parameters).chain(&state.states);
    for (part, arena) in StatePart::all(states.len()).zip(arenas) {
        writer.write(part, 0, arena).unwrap();
    }
    writer.commit().unwrap()
}

#[test]
fn a_checkpoint_in_several_files_is_as_good_as_in_one() {
    let bench = Workbench::new();
    let mut expected = bench.train(Job { dir: "whole", workers: 1, set: &[] });
    let begun = ["run.steps=4", "schedule.steps=5"];
    bench.train(Job { dir: "cut", workers: 2, set: &begun });
    let path = cut(&bench.path("cut"), 4, FILE_BYTES);
    let names: Vec<_> = files(&path).into_keys().collect();
    let is_part = |name: &&String| name.starts_with("model-0") || name.starts_with("optimizer-0");
    assert!(names.iter().filter(is_part).count() > 4, "{names:?}");

    let (whole, parts) = ("whole/checkpoints/step-00000004", "cut/checkpoints/step-00000004");
    bench.write("lines.jsonl", "{\"text\": \"the tide turns the stone\"}\n");
    let generate = ["--prompt", "the tide", "--max-new-tokens", "9", "--temperature", "0"];
    for (command, more) in [("generate", &generate[..]), ("score", &["--input", "lines.jsonl"])] {
        let answer =
            |model| bench.tidemill(&[&[command, "--model", model], more].concat()).expect(0);
        assert_eq!(answer(parts).stdout, answer(whole).stdout, "{command}");
    }
    let inspected = bench.tidemill(&["inspect", parts, "--format", "json"]).expect(0).stdout;
    let inspected: serde_json::Value = serde_json::from_str(&inspected).unwrap();
    let listed = |key: &str| inspected[key].to_string();
    assert!(listed("verified").contains("model-00001-of-"), "{inspected}");
    assert!(listed("not_verified").contains("optimizer-00001-of-"), "{inspected}");

    let begin = |dir: &str, from: &str| {
        let from = format!("model={{from={:?}}}", bench.path(from));
        bench.train(Job { dir, workers: 1, set: &[&from, "run.steps=3"] })
    };
    assert_same(&begin("from-cut", parts), &begin("from-whole", whole), "model.from");

    // Of two processes each reads what it needs of them.
    let arguments = ["train", "run.toml", "-n", "2", "-w", "2", "--set", "run.dir=cut"];
    bench.tidemill(&arguments).expect(0);
    let mut found = bench.outcome("cut");
    assert_eq!(found.checkpoints.remove(&4).unwrap().into_keys().collect::<Vec<_>>(), names);
    expected.checkpoints.remove(&4);
    assert_same(&found, &expected, "gone on with");
}

/// Trains up to `steps` in processes that are threads of this one, each with its own run folder and
/// this many workers.
fn train_together(bench: &Workbench, dirs: &[&str], workers: usize, steps: u64) {
    let listeners: Vec<_> =
        dirs.iter().map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let addresses: Vec<_> =
        listeners.iter().map(|it| it.local_addr().unwrap().to_string()).collect();
    let start = |(process, listener)| {
        let set = [
            format!("run.dir={:?}", bench.path(dirs[process])),
            format!("data.dataset={:?}", bench.path("data")),
            format!("run.steps={steps}"),
            "schedule.steps=5".to_owned(),
        ];
        let config = RunConfig::parse(&config(), "run.toml", &set).unwrap();
        let mut run = ResolvedRun::new(config, workers).unwrap();
        run.file_bytes = FILE_BYTES;
        let mut cluster = ClusterSettings::process(workers, process, addresses.clone());
        cluster.listener = Some(listener);
        let options = TrainOptions { cluster, ..TrainOptions::threads(workers) };
        std::thread::spawn(move || train(run, options).unwrap())
    };
    let processes: Vec<_> = listeners.into_iter().enumerate().map(start).collect();
    for process in processes {
        process.join().unwrap();
    }
}

#[test]
fn files_are_the_same_whichever_processes_write_them() {
    let bench = Workbench::new();
    let outcome = |dir: &str| -> Outcome { bench.outcome(dir) };
    train_together(&bench, &["alone"], 1, 5);
    let expected = outcome("alone");
    assert_eq!(expected.checkpoint_steps(), [2, 4, 5]);
    let names = expected.latest().keys();
    assert!(names.filter(|name| name.ends_with(".safetensors")).count() > 6);
    std::os::unix::fs::symlink("together", bench.path("link")).unwrap();
    // With one more process, then with one that cannot see the folder in the middle, then with a
    // single one.
    for (dirs, workers, steps) in [
        (&["together", "together"][..], 1, 2),
        (&["together", "elsewhere", "link"], 2, 4),
        (&["together", "link"], 3, 5),
    ] {
        train_together(&bench, dirs, workers, steps);
    }
    assert_same(&outcome("together"), &expected, "by several processes");
    assert!(!bench.path("elsewhere").exists());
    train_together(&bench, &["moved", "moved", "moved"], 1, 4);
    train_together(&bench, &["moved"], 2, 5);
    assert_same(&outcome("moved"), &expected, "begun by three, ended by one");
}
