//! Data sets, checkpoints and metrics that were damaged after they were written.

use super::{nothing_half_written, training};
use crate::support::Workbench;
use crate::support::outcome::files;

#[test]
fn damaged_data_sets() {
    for processes in ["1", "2"] {
        let bench = Workbench::new();
        let shard = bench.path("data/shard-00001.parquet");
        let (index_path, index) =
            (bench.path("data/index.json"), std::fs::read(bench.path("data/index.json")).unwrap());
        let good = std::fs::read(&shard).unwrap();
        let mut flipped = good.clone();
        flipped[good.len() / 3] ^= 1;
        // Some samples of every shard are in the first step.
        let whole =
            ["--set", "data.shuffle=full", "--set", "batch.samples_per_step=400", "-n", processes];
        for bad in [&flipped[..], &good[..good.len() / 2], &[]] {
            std::fs::write(&shard, bad).unwrap();
            training(&bench, &whole).failed(1, &["data/shard-00001.parquet"]);
            nothing_half_written(&bench);
        }
        std::fs::remove_file(&shard).unwrap();
        training(&bench, &whole).refused(1, &["data/shard-00001.parquet"]);
        // Without an index the files themselves must show it.
        std::fs::remove_file(&index_path).unwrap();
        let vocab_size = ["--set", "model.vocab_size=259"];
        for bad in [&good[..good.len() / 2], &[]] {
            std::fs::write(&shard, bad).unwrap();
            training(&bench, &[&whole[..], &vocab_size].concat())
                .refused(1, &["data/shard-00001.parquet"]);
            nothing_half_written(&bench);
        }
        std::fs::write(&shard, &good).unwrap();
        for bad in ["{", "[]", "{}", "\u{fffd}"] {
            std::fs::write(&index_path, bad).unwrap();
            training(&bench, &whole).refused(1, &["data/index.json"]);
        }
        std::fs::write(&index_path, &index).unwrap();
        training(&bench, &whole).expect(0);
    }
}

/// A data set whose index promises fewer tokens than the shards have, or none.
#[test]
fn tokens_outside_the_vocabulary() {
    for processes in ["1", "2"] {
        let bench = Workbench::new();
        let index = std::fs::read_to_string(bench.path("data/index.json")).unwrap();
        // All bytes of ö and ß are above 0x7f; special tokens are left out so that the index agrees with itself.
        let mut lying: serde_json::Value = serde_json::from_str(&index).unwrap();
        lying["vocab_size"] = 128.into();
        for key in ["bos_token_id", "eos_token_id", "pad_token_id"] {
            lying[key] = serde_json::Value::Null;
        }
        std::fs::write(bench.path("data/index.json"), lying.to_string()).unwrap();
        let parts = ["data/shard-0000", ".parquet", "row ", "128"];
        training(&bench, &["-n", processes]).failed(1, &parts);
        nothing_half_written(&bench);
        std::fs::remove_file(bench.path("data/index.json")).unwrap();
        training(&bench, &["-n", processes, "--set", "model.vocab_size=128"]).failed(1, &parts);
        nothing_half_written(&bench);
    }
}

/// A damaged latest checkpoint is an error: it is not skipped, and the older one stays unchanged.
#[test]
fn damaged_checkpoints() {
    let bench = Workbench::new();
    training(&bench, &[]).expect(0);
    let latest = bench.path("run/checkpoints/step-00000005");
    let whole = files(&bench.path("run"));
    let names: Vec<String> = files(&latest).into_keys().collect();
    assert_eq!(names.len(), 5);
    for name in &names {
        let path = latest.join(name);
        let good = std::fs::read(&path).unwrap();
        let mut flipped = good.clone();
        flipped[good.len() / 2] ^= 2;
        let damages: [(&str, Option<&[u8]>); 4] = [
            ("flipped", Some(&flipped)),
            ("truncated", Some(&good[..good.len() - 7])),
            ("empty", Some(&[])),
            ("missing", None),
        ];
        for (what, damage) in damages {
            match damage {
                Some(bytes) => std::fs::write(&path, bytes).unwrap(),
                None => std::fs::remove_file(&path).unwrap(),
            }
            let before = files(&bench.path("run"));
            for arguments in [&["-n", "1"], &["-n", "2"]] {
                let refused = training(&bench, arguments).refused(1, &["step-00000005", name]);
                assert!(
                    files(&bench.path("run")) == before,
                    "{what}: {refused:?}: something was written"
                );
            }
            // Without trainer.json the folder is a model like any other.
            if name != "trainer.json" {
                let generate = ["generate", "--model", "run", "--prompt", "a"];
                let inspect = ["inspect", "run/checkpoints/step-00000005"];
                for command in [&generate[..], &inspect] {
                    let answered = bench.tidemill(command);
                    // Only a resumed run reads the optimizer's state.
                    match name.as_str() {
                        "optimizer.safetensors" => answered.expect(0),
                        _ => answered.refused(1, &["step-00000005", name]),
                    };
                }
            }
            std::fs::write(&path, &good).unwrap();
        }
    }
    assert!(files(&bench.path("run")) == whole);
    let renamed = bench.path("run/checkpoints/step-00000009");
    std::fs::rename(&latest, &renamed).unwrap();
    training(&bench, &[]).refused(1, &["step-00000009", "it is of step 5"]);
    std::fs::rename(&renamed, &latest).unwrap();
    training(&bench, &[]).expect(0);
}

#[test]
fn broken_metrics() {
    let bench = Workbench::new();
    training(&bench, &[]).expect(0);
    let good = std::fs::read_to_string(bench.path("run/metrics.jsonl")).unwrap();
    let mut lines: Vec<&str> = good.lines().collect();
    lines[2] = "{\"step\": 3";
    std::fs::write(bench.path("run/metrics.jsonl"), lines.join("\n") + "\n").unwrap();
    let before = files(&bench.path("run"));
    training(&bench, &[]).refused(1, &["run/metrics.jsonl", "line 3"]);
    bench.tidemill(&["inspect", "run"]).refused(1, &["run/metrics.jsonl", "line 3"]);
    assert!(files(&bench.path("run")) == before, "something was written");
}
