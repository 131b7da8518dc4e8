//! With independent documents in a sample, all promises about other runs hold.

use crate::support::{Job, Workbench, assert_same};

const RESET: &str = "data.document_boundaries=reset";

#[test]
fn a_run_with_documents_apart_is_elastic_and_goes_on() {
    let bench = Workbench::new();
    let validation = format!("evaluation.dataset={:?}", bench.path("validation"));
    let evaluated = "evaluation.every_steps=1";
    let keys = [RESET, validation.as_str(), evaluated, "schedule.steps=5", "checkpoint.keep=9"];
    let run = |dir: &str, workers: usize, set: &[&str]| {
        bench.train(Job { dir, workers, set: &[&keys, set].concat() })
    };
    let expected = run("reference", 1, &[]);
    // The token after the end of a document is not predicted.
    let tokens = expected.steps.last().unwrap()[4];
    assert!(tokens < 5 * 45 * 17 && tokens > 4 * 45 * 17, "{tokens} tokens");
    assert!(expected.loss(4) < expected.loss(0) - 0.1);
    for (workers, microbatch) in [(3, "1"), (5, "3"), (8, "\"auto\"")] {
        let set = format!("batch.microbatch_grains={microbatch}");
        let found = run(&format!("elastic-{workers}"), workers, &[&set]);
        assert_same(&found, &expected, &format!("{workers} workers, {set}"));
    }
    run("resumed", 2, &["run.steps=2"]);
    let found = run("resumed", 3, &["batch.microbatch_grains=1"]);
    assert_same(&found, &expected, "resumed");
    let arguments = ["train", "run.toml", "-n", "2", "-w", "1", "--set", "run.dir=processes"];
    let set: Vec<_> = keys.iter().flat_map(|key| ["--set", key]).collect();
    bench.tidemill(&[&arguments[..], &set].concat()).expect(0);
    assert_same(&bench.outcome("processes"), &expected, "processes");

    let ignored = Job { dir: "ignored", workers: 1, set: &keys[1..] };
    let ignored = bench.train(ignored);
    assert_ne!(ignored.latest()["model.safetensors"], expected.latest()["model.safetensors"]);
}

/// The token that ends a document must be known.
#[test]
fn documents_without_an_end_are_refused() {
    let bench = Workbench::new();
    let printed = bench.tidemill(&["train", "run.toml", "--print-config"]).expect(0).stdout;
    assert!(printed.contains("document_boundaries = \"ignore\""), "{printed}");
    let index_path = bench.path("data/index.json");
    let index = std::fs::read_to_string(&index_path).unwrap();
    let mut index: serde_json::Value = serde_json::from_str(&index).unwrap();
    index["eos_token_id"] = serde_json::Value::Null;
    std::fs::write(&index_path, index.to_string()).unwrap();
    for world in ["1", "2"] {
        let arguments = ["train", "run.toml", "-n", world, "-w", "1", "--set", RESET];
        let parts = ["data.document_boundaries", "eos_token_id", "reset"];
        bench.tidemill(&arguments).refused(1, &parts);
    }
    assert!(!bench.path("run").exists());
    let set = ["--set", "data.document_boundaries=apart"];
    let arguments = [&["train", "run.toml", "-w", "1"], &set[..]].concat();
    bench.tidemill(&arguments).refused(1, &["document_boundaries", "apart", "reset"]);
}
