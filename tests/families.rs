//! Every family of models trains, resumes and is elastic to the bit, and what it leaves can be used.
//!
//! [`elastic`](super::elastic) says it of Mamba, in every way there is; here each other family goes through one run cut at a
//! checkpoint, with other workers, microbatches and memory.

use crate::support::workbench::{causes, config};
use crate::support::{Job, Workbench, assert_same};

/// The `[model]` tables: heads that are no power of two, windows shorter than samples, every switch once.
pub const MODELS: [(&str, &str); 4] = [
    (
        "mpt",
        "kind = \"mpt\"\nd_model = 18\nn_layers = 2\nn_heads = 3\nexpansion = 3\nmax_seq_len = 64\nalibi = true\n\
         no_bias = true",
    ),
    (
        "foundry",
        "kind = \"mpt\"\nd_model = 16\nn_layers = 2\nn_heads = 2\nexpansion = 4\nmax_seq_len = 17\nqk_ln = true\n\
         clip_qkv = 2\nlogit_scale = \"inv_sqrt_d_model\"",
    ),
    (
        "gpt-neo",
        "kind = \"gpt_neo\"\nd_model = 12\nn_layers = 3\nn_heads = 2\nexpansion = 4\nmax_seq_len = 20\nwindow_size = 5",
    ),
    (
        "hybrid",
        "kind = \"hybrid\"\nd_model = 12\nn_layers = 4\nlayer_pattern = \"ma\"\nd_state = 5\nd_conv = 3\nexpand = 2\n\
         n_heads = 3\nexpansion = 2",
    ),
];

/// The config of the workbench with another `[model]` table.
pub fn with_model(table: &str) -> String {
    let config = config();
    let start = config.find("[model]").expect("a table");
    let end = config.find("[data]").expect("a table");
    format!("{}[model]\n{table}\n\n{}", &config[..start], &config[end..])
}

#[test]
fn every_family_is_elastic_and_resumes() {
    let bench = Workbench::new();
    for (name, table) in MODELS {
        let config = with_model(table);
        let train = |dir: &str, workers, set: &[&str]| {
            let dir = format!("{name}-{dir}");
            let job = Job { dir: &dir, workers, set };
            bench
                .try_train_with(&config, job)
                .unwrap_or_else(|error| panic!("{name}: {}", causes(&error)));
            bench.outcome(&dir)
        };
        let keep = "checkpoint.keep=9";
        let reference = train("reference", 1, &[keep]);
        assert!(reference.loss(4) < reference.loss(0) - 0.05, "{name}: {:?}", reference.steps);
        train("run", 2, &[keep, "schedule.steps=5", "run.steps=2"]);
        let set = [keep, "batch.microbatch_grains=3", "model.recompute=block"];
        assert_same(&train("run", 3, &set), &reference, name);
        let dir = format!("{name}-run");
        let generate =
            ["generate", "--model", &dir, "--prompt", "the tide", "--max-new-tokens", "4"];
        bench.tidemill(&generate).expect(0);
        let facts = bench.tidemill(&["inspect", &dir]);
        facts.expect(0);
    }
}

#[test]
fn samples_longer_than_the_learned_positions_are_refused() {
    let bench = Workbench::new();
    let (_, table) = MODELS[2];
    let config = with_model(&table.replace("max_seq_len = 20", "max_seq_len = 16"));
    let error = bench
        .try_train_with(&config, Job { dir: "run", workers: 1, set: &[] })
        .expect_err("17 positions");
    let expected = "model.max_seq_len: expected at least 17, the data set's seq_len, found 16";
    assert!(causes(&error).contains(expected), "{}", causes(&error));
}

#[test]
fn a_changed_switch_is_named_as_the_table_names_it() {
    let bench = Workbench::new();
    let (_, table) = MODELS[1];
    let config = with_model(table);
    let run = |set: &[&str]| bench.try_train_with(&config, Job { dir: "run", workers: 1, set });
    run(&["run.steps=1", "schedule.warmup_steps=0"]).expect("trains");
    for (key, now) in [("model.clip_qkv", "3"), ("model.n_heads", "4"), ("model.qk_ln", "false")] {
        let change = format!("{key}={now}");
        let error = causes(&run(&["schedule.warmup_steps=0", &change]).expect_err(key));
        assert!(error.contains(key) && error.contains("cannot change"), "{key}: {error}");
    }
}
