//! Files of LLM Foundry and DeepSpeed become a `RUN.toml` that `train` accepts, and none of their keys is dropped.
//!
//! Seen red: without the list of unknown keys, and with a rule that reads a key without a comment
//! for it.

use std::collections::BTreeSet;

use serde_json::Value;
use tidemill::job::RunConfig;
use tidemill::streaming_data::DataSet;

use crate::support::Workbench;
use crate::support::workbench::SEQ_LEN;

const FILES: [(&str, &str); 10] = [
    ("mpt_125m.yaml", include_str!("fixtures/import/mpt_125m.yaml")),
    ("mpt_1b.yaml", include_str!("fixtures/import/mpt_1b.yaml")),
    ("mpt_7b.yaml", include_str!("fixtures/import/mpt_7b.yaml")),
    ("mpt_small_cpu.yaml", include_str!("fixtures/import/mpt_small_cpu.yaml")),
    ("finetuning.yaml", include_str!("fixtures/import/finetuning.yaml")),
    ("zero1.json", include_str!("fixtures/import/zero1.json")),
    ("zero1_lamb.json", include_str!("fixtures/import/zero1_lamb.json")),
    ("zero2.json", include_str!("fixtures/import/zero2.json")),
    ("zero3_auto.json", include_str!("fixtures/import/zero3_auto.json")),
    ("zero3_nvme.json", include_str!("fixtures/import/zero3_nvme.json")),
];

fn text_of(name: &str) -> &'static str {
    FILES.iter().find(|(other, _)| *other == name).map(|(_, text)| *text).unwrap()
}

/// The output of `import` for a file.
fn imported(bench: &Workbench, name: &str) -> String {
    bench.write(name, text_of(name));
    bench.tidemill(&["import", name]).expect(0).stdout
}

/// The paths of the leaves of a file, walked without the program's own reader: JSON by serde_json, YAML by the indentation of
/// files in block style.
fn paths(name: &str, text: &str) -> BTreeSet<String> {
    let mut paths = BTreeSet::new();
    if name.ends_with(".json") {
        walk_json("", &serde_json::from_str(text).unwrap(), &mut paths);
        return paths;
    }
    // The open keys by indentation; for a list, the number of tables that have begun.
    let mut open: Vec<(usize, String, Option<usize>)> = Vec::new();
    let lines = text.lines().map(|line| line.split(" #").next().unwrap());
    for line in lines.filter(|line| !line.trim().is_empty() && !line.starts_with('#')) {
        let mut indentation = line.len() - line.trim_start().len();
        let mut rest = line.trim();
        if let Some(item) = rest.strip_prefix("- ") {
            while open.last().is_some_and(|(other, ..)| *other > indentation) {
                open.pop();
            }
            if !item.contains(": ") {
                continue;
            }
            let (_, key, index) = open.last_mut().unwrap();
            paths.remove(&*key);
            *index = Some(index.map_or(0, |index| index + 1));
            (indentation, rest) = (indentation + 2, item);
        }
        while open.last().is_some_and(|(other, _, index)| {
            *other > indentation
                || (*other == indentation && index.is_none_or(|_| !line.trim().starts_with("- ")))
        }) {
            open.pop();
        }
        let (key, _) = rest.split_once(':').unwrap();
        let path = match open.last() {
            None => key.to_owned(),
            Some((_, table, index)) => {
                paths.remove(table);
                let index = index.map_or(String::new(), |index| format!(".{index}"));
                format!("{table}{index}.{key}")
            }
        };
        paths.insert(path.clone());
        open.push((indentation, path, None));
    }
    paths
}

fn walk_json(path: &str, value: &Value, paths: &mut BTreeSet<String>) {
    match value {
        Value::Object(entries) if !entries.is_empty() => {
            for (key, value) in entries {
                let dot = if path.is_empty() { "" } else { "." };
                walk_json(&format!("{path}{dot}{key}"), value, paths);
            }
        }
        _ => {
            paths.insert(path.to_owned());
        }
    }
}

/// Whether comments name a path, and not only as part of a longer one.
fn names(text: &str, path: &str) -> bool {
    let comments = text.lines().filter_map(|line| line.split_once('#'));
    let part =
        |next: Option<char>| next.is_some_and(|it| it.is_alphanumeric() || "_.".contains(it));
    comments
        .flat_map(|(_, comment)| comment.match_indices(path).map(move |found| (comment, found.0)))
        .any(|(comment, at)| {
            let after = &comment[at + path.len()..];
            // A full stop may end a sentence.
            let after = after.strip_prefix(". ").unwrap_or(after);
            !part(comment[..at].chars().next_back()) && !part(after.chars().next())
        })
}

#[test]
fn every_key_of_a_file_is_in_what_is_written() {
    let bench = Workbench::new();
    for (name, text) in FILES {
        let written = imported(&bench, name);
        let paths = paths(name, text);
        assert!(paths.len() > 15, "{name}: {paths:?}");
        let dropped: Vec<_> = paths.iter().filter(|path| !names(&written, path)).collect();
        assert!(dropped.is_empty(), "{name} drops {dropped:?}:\n{written}");
        // One of them has a key that is of no framework.
        let unknown = written.contains("Not known here");
        assert_eq!(unknown, name == "mpt_1b.yaml", "{name}:\n{written}");
    }
}

/// `train --print-config` of the output, once it is filled in.
fn accepted(bench: &Workbench, name: &str, set: &[&str]) -> Value {
    bench.write("imported.toml", imported(bench, name));
    let mut arguments = vec!["train", "imported.toml", "-w", "1", "--print-config"];
    // On this machine's device, which may have no bf16.
    for assignment in [&["device.backend=\"cpu\"", "device.precision=\"fp32\""][..], set].concat() {
        arguments.extend(["--set", assignment]);
    }
    let toml = bench.tidemill(&arguments).expect(0).stdout;
    serde_json::to_value(RunConfig::parse(&toml, "what is printed", &[]).unwrap()).unwrap()
}

const DATA: &str = "data.dataset=\"data\"";
const EVALUATION: &str = "evaluation.dataset=\"validation\"";
const STREAMS: &str =
    "data.streams=[{dataset=\"data\", proportion=0.75}, {dataset=\"validation\", proportion=0.25}]";

#[test]
fn files_of_llm_foundry_come_to_the_numbers_that_they_have() {
    let bench = Workbench::new();
    let small = accepted(&bench, "mpt_125m.yaml", &[DATA, EVALUATION]);
    for (key, expected) in [
        ("/run/steps", Value::from(4800)),
        ("/run/seed", 17.into()),
        ("/model/kind", "mpt".into()),
        ("/model/d_model", 768.into()),
        ("/model/n_layers", 12.into()),
        ("/model/expansion", 4.into()),
        ("/model/max_seq_len", 2048.into()),
        ("/model/vocab_size", 50_368.into()),
        ("/model/no_bias", false.into()),
        ("/model/alibi", false.into()),
        ("/batch/samples_per_step", 256.into()),
        ("/batch/microbatch_grains", 16.into()),
        ("/optimizer/name", "decoupled_adamw".into()),
        ("/optimizer/learning_rate", 6e-4.into()),
        ("/optimizer/weight_decay", 0.0.into()),
        ("/optimizer/clip_norm", 1.0.into()),
        ("/schedule/name", "cosine".into()),
        ("/schedule/warmup_steps", 100.into()),
        ("/schedule/final_fraction", 0.1.into()),
        ("/checkpoint/every_steps", 500.into()),
        ("/checkpoint/keep", 1.into()),
        ("/evaluation/every_steps", 500.into()),
        ("/parallel/shard", "parameters".into()),
    ] {
        assert_eq!(small.pointer(key), Some(&expected), "{key} of {small}");
    }
    let large = accepted(&bench, "mpt_1b.yaml", &[STREAMS, "run.dir=\"run-1b\""]);
    for (key, expected) in [
        // In samples of the workbench's data.
        ("/run/steps", Value::from(26_000_000_000_u64.div_ceil(512 * SEQ_LEN as u64))),
        ("/model/alibi", true.into()),
        ("/model/qk_ln", true.into()),
        ("/model/clip_qkv", 6.0.into()),
        ("/model/logit_scale", "inv_sqrt_d_model".into()),
        ("/model/recompute", "block".into()),
        ("/optimizer/name", "lion".into()),
        // 1e-4 that is not multiplied by the rate of 1e-4.
        ("/optimizer/weight_decay", 1.0.into()),
        ("/optimizer/clip_norm", 1e9.into()),
        ("/schedule/name", "linear".into()),
        ("/schedule/final_fraction", 0.0.into()),
        // A tenth of the 24,796 steps of 512 samples of 2,048 tokens.
        ("/checkpoint/every_steps", 2479.into()),
        ("/parallel/shard", "gradients".into()),
    ] {
        assert_eq!(large.pointer(key), Some(&expected), "{key} of {large}");
    }
    assert!(large.get("evaluation").is_none(), "{large}");
    let largest = accepted(&bench, "mpt_7b.yaml", &[DATA, EVALUATION]);
    assert_eq!(largest.pointer("/evaluation/samples"), Some(&32.into()));
    // An epoch.
    let samples = DataSet::open(bench.path("data")).unwrap().samples();
    let at_once = largest.pointer("/batch/samples_per_step").and_then(Value::as_u64).unwrap();
    assert_eq!(largest.pointer("/run/steps"), Some(&samples.div_ceil(at_once).into()));
}

#[test]
fn configs_of_deepspeed_come_to_the_numbers_that_they_have() {
    let bench = Workbench::new();
    let first = accepted(&bench, "zero1.json", &[DATA]);
    for (key, expected) in [
        ("/run/steps", Value::from(5000)),
        ("/batch/samples_per_step", 256.into()),
        ("/batch/microbatch_grains", 8.into()),
        // The schedule's rate, not the optimizer's.
        ("/optimizer/learning_rate", 3e-4.into()),
        ("/optimizer/weight_decay", 0.1.into()),
        ("/schedule/name", "linear".into()),
        ("/schedule/warmup_steps", 200.into()),
        ("/parallel/shard", "optimizer".into()),
    ] {
        assert_eq!(first.pointer(key), Some(&expected), "{key} of {first}");
    }
    let second = accepted(&bench, "zero2.json", &[DATA]);
    assert_eq!(second.pointer("/parallel/shard"), Some(&"gradients".into()));
    assert_eq!(second.pointer("/schedule/final_fraction"), Some(&0.1.into()));
    for name in ["zero3_auto.json", "zero3_nvme.json"] {
        let third = accepted(&bench, name, &[DATA]);
        assert_eq!(third.pointer("/parallel/shard"), Some(&"parameters".into()));
    }
    let lamb = accepted(&bench, "zero1_lamb.json", &[DATA]);
    for (key, expected) in [
        ("/run/steps", Value::from(90_000)),
        ("/batch/samples_per_step", 1024.into()),
        ("/optimizer/name", "adamw".into()),
        ("/optimizer/learning_rate", 2e-4.into()),
        ("/optimizer/betas", vec![0.9, 0.98].into()),
        ("/optimizer/eps", 1e-6.into()),
        ("/optimizer/clip_norm", 0.5.into()),
        ("/schedule/warmup_steps", 600.into()),
    ] {
        assert_eq!(lamb.pointer(key), Some(&expected), "{key} of {lamb}");
    }
}

/// The output trains once the folders of data set and evaluation are filled in.
#[test]
fn a_small_file_trains_as_it_is_imported() {
    let bench = Workbench::new();
    bench.write("imported.toml", imported(&bench, "mpt_small_cpu.yaml"));
    let missing = "FILL-IN still stands for data.dataset, evaluation.dataset";
    bench.tidemill(&["train", "imported.toml"]).refused(1, &["imported.toml", missing]);
    let filled_in = ["--set", DATA, "--set", EVALUATION, "--set", "device.backend=\"cpu\""];
    bench.tidemill(&[&["train", "imported.toml", "-w", "2"][..], &filled_in].concat()).expect(0);
    let run = bench.path("runs/mpt-small-cpu");
    let steps = tidemill::metrics::read::<tidemill::metrics::StepMetrics>(&run).unwrap();
    let rates: Vec<f64> = steps.iter().map(|line| line.learning_rate).collect();
    assert_eq!(rates, [5e-4, 1e-3, 1e-3, 1e-3]);
    let evaluated = std::fs::read_to_string(run.join("evaluation.jsonl")).unwrap();
    assert_eq!(evaluated.lines().count(), 2, "every 2 of 4 steps: {evaluated}");
    assert_eq!(steps[0].memory.is_some(), cfg!(target_os = "linux"), "{:?}", steps[0]);
}

#[test]
fn what_is_not_taken_over_stands_at_the_top() {
    let bench = Workbench::new();
    for (name, paths) in [
        ("mpt_1b.yaml", &["precision", "model.attn_config.attn_pdrop", "some_new_key"][..]),
        ("mpt_7b.yaml", &["model.attn_config.rope", "scheduler.name", "optimizer.name"]),
        ("mpt_small_cpu.yaml", &["eval_gauntlet", "loggers.mlflow.experiment_name"]),
        ("finetuning.yaml", &["model.peft_config.r", "train_loader.name"]),
        ("zero1_lamb.json", &["optimizer.type", "optimizer.params.max_coeff", "fp16.enabled"]),
        ("zero3_nvme.json", &["zero_optimization.offload_param.nvme_path", "aio.block_size"]),
        ("zero2.json", &["fp16.enabled", "optimizer.type"]),
    ] {
        let written = imported(&bench, name);
        let top = written.split("\n[run]").next().unwrap();
        let top = top.split_once("What this file does not take over:").expect("a list").1;
        for path in paths {
            assert!(names(top, path), "{name}: {path} is not in\n{top}");
        }
    }
}

#[test]
fn what_cannot_be_read_is_one_line_and_writes_nothing() {
    let bench = Workbench::new();
    let start = "model:\n  name: mpt_causal_lm\nmax_duration: ";
    for (text, parts) in [
        ("a: 1\n", &["LLM Foundry", "DeepSpeed", "neither"][..]),
        ("model: [1\nmax_duration: 1ep\n", &["line", "no YAML"]),
        ("{\"train_batch_size\": 8,}", &["no JSON", "line 1"]),
        (
            &format!("{start}${{variables.none}}\n"),
            &["line 3", "variables.none", "not in this file"],
        ),
        (&format!("{start}a while\n"), &["line 3", "max_duration", "100ba"]),
        (
            "{\"train_batch_size\": 10,\n\"train_micro_batch_size_per_gpu\": 4}",
            &["line 1", "train_batch_size", "multiple", "found 10"],
        ),
    ] {
        bench.write("wrong", text);
        bench.tidemill(&["import", "wrong", "-o", "out.toml"]).refused(1, parts);
        assert!(!bench.path("out.toml").exists());
    }
    bench.write("right", text_of("zero1.json"));
    bench.tidemill(&["import", "right", "-o", "out.toml"]).expect(0);
    assert!(bench.path("out.toml").exists());
    bench.tidemill(&["import", "right", "-o", "out.toml"]).refused(1, &["--output", "nothing is"]);
}
