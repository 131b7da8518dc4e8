//! What is too large for one file is as good in several: a run goes on from it, and it is generated from, scored with and
//! trained on from.
//!
//! Seen red: an index that places every tensor in the first file.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tidemill::checkpoint::{
    CheckpointFiles, CheckpointWriter, FilePlan, StateFiles, checkpoint_path,
};
use tidemill::cluster::Abort;
use tidemill::model::{Model, ModelConfig};
use tidemill::operators::StatePart;

use crate::support::outcome::files;
use crate::support::{Job, Workbench, assert_same};

/// Writes the checkpoint of `step` again, in files of `file_bytes` bytes.
fn cut(run: &Path, step: u64, file_bytes: u64) -> PathBuf {
    let path = checkpoint_path(run, step);
    let model = Model::new(&ModelConfig::read(&path).unwrap()).unwrap();
    let layout = model.layout();
    let stored = StateFiles::open(&path, layout).unwrap();
    let all = 0..layout.parameter_elements();
    let state = stored.read(layout, std::slice::from_ref(&all), &Abort::new()).unwrap().unwrap();
    let read = |name: &str| std::fs::read(path.join(name)).unwrap();
    let files = CheckpointFiles {
        plan: Arc::new(FilePlan::new(layout, file_bytes)),
        config: serde_json::from_slice(&read("config.json")).unwrap(),
        tokenizer: Some(read("tokenizer.json").into()),
        keep: 9,
    };
    std::fs::remove_dir_all(&path).unwrap();
    let mut writer = CheckpointWriter::begin(files, run, stored.state().clone()).unwrap();
    writer.write(StatePart::Parameter, 0, &state.parameters).unwrap();
    writer.write(StatePart::ExpAvg, 0, &state.moments[0]).unwrap();
    writer.write(StatePart::ExpAvgSq, 0, &state.moments[1]).unwrap();
    writer.commit().unwrap()
}

#[test]
fn a_checkpoint_in_several_files_is_as_good_as_in_one() {
    let bench = Workbench::new();
    let mut expected = bench.train(Job { dir: "whole", workers: 1, set: &[] });
    let begun = ["run.steps=4", "schedule.steps=5"];
    bench.train(Job { dir: "cut", workers: 2, set: &begun });
    let path = cut(&bench.path("cut"), 4, 9_000);
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
