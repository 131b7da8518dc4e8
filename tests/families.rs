//! Every family of models trains, resumes and is elastic to the bit, and what it leaves can be used.
//!
//! [`elastic`](super::elastic) says it of Mamba, in every way there is; here each other family goes through one run cut at a
//! checkpoint, with other workers, microbatches and memory, through runs of two threads and of two processes, and through
//! runs whose documents are apart.

use crate::support::workbench::{causes, config};
use crate::support::{Job, Outcome, Workbench, assert_same};

/// The `[model]` tables: heads that are no power of two, windows shorter than samples, every switch once.
pub const MODELS: [(&str, &str); 8] = [
    (
        "mamba2",
        "kind = \"mamba2\"\nd_model = 18\nn_layers = 2\nd_state = 5\nd_conv = 3\nexpand = 2\nhead_width = 6\nn_groups = 3",
    ),
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
        "llama",
        "kind = \"llama\"\nd_model = 24\nn_layers = 2\nn_heads = 6\nn_kv_heads = 2\nmlp_width = 33\nrope_theta = 100\nqkv_bias = true",
    ),
    (
        "qwen3",
        "kind = \"llama\"\nd_model = 20\nn_layers = 2\nn_heads = 4\nn_kv_heads = 2\nhead_width = 6\nmlp_width = 33\nrope_theta = 100\n\
         qk_norm = true",
    ),
    (
        "hybrid",
        "kind = \"hybrid\"\nd_model = 12\nn_layers = 4\nlayer_pattern = \"ma\"\nd_state = 5\nd_conv = 3\nexpand = 2\n\
         n_heads = 3\nexpansion = 2",
    ),
    (
        "hybrid-of-all",
        "kind = \"hybrid\"\nd_model = 12\nn_layers = 4\nlayer_pattern = \"mals\"\nd_state = 5\nd_conv = 3\nexpand = 2\n\
         n_heads = 3\nexpansion = 2\nn_kv_heads = 1\nmlp_width = 17\nhead_width = 6\nrope_theta = 100\nwindow_size = 9\n\
         mamba2_head_width = 6\nn_groups = 2",
    ),
];

/// The config of the workbench with another `[model]` table.
pub fn with_model(table: &str) -> String {
    let config = config();
    let start = config.find("[model]").expect("a table");
    let end = config.find("[data]").expect("a table");
    format!("{}[model]\n{table}\n\n{}", &config[..start], &config[end..])
}

/// The `[model]` table of one of [`MODELS`].
pub fn table(name: &str) -> &'static str {
    MODELS.iter().find(|(model, _)| *model == name).expect(name).1
}

/// Runs of one of [`MODELS`], each in a folder of its own.
struct Runs<'a> {
    bench: &'a Workbench,
    name: &'a str,
    config: String,
}

impl<'a> Runs<'a> {
    fn new(bench: &'a Workbench, (name, table): (&'a str, &str)) -> Self {
        let config = with_model(table);
        bench.write(&format!("{name}.toml"), &config);
        Self { bench, name, config }
    }

    fn folder(&self, dir: &str) -> String {
        format!("{}-{dir}", self.name)
    }

    /// Trains with the library.
    fn train(&self, dir: &str, workers: usize, set: &[&str]) -> Outcome {
        let dir = self.folder(dir);
        self.bench
            .try_train_with(&self.config, Job { dir: &dir, workers, set })
            .unwrap_or_else(|error| panic!("{}: {}", self.name, causes(&error)));
        self.bench.outcome(&dir)
    }

    /// Trains with two processes of one worker each.
    fn train_in_two_processes(&self, set: &[&str]) -> Outcome {
        let dir = self.folder("processes");
        let (config, run_dir) = (format!("{}.toml", self.name), format!("run.dir={dir}"));
        let set = set.iter().copied().chain([run_dir.as_str()]);
        let mut arguments = vec!["train", &config, "-n", "2", "-w", "1"];
        arguments.extend(set.flat_map(|assignment| ["--set", assignment]));
        self.bench.tidemill(&arguments).expect(0);
        self.bench.outcome(&dir)
    }
}

#[test]
fn every_family_is_elastic_and_resumes() {
    let bench = Workbench::new();
    for model in MODELS {
        let runs = Runs::new(&bench, model);
        let (name, keep) = (runs.name, "checkpoint.keep=9");
        let reference = runs.train("reference", 1, &[keep]);
        assert!(reference.loss(4) < reference.loss(0) - 0.05, "{name}: {:?}", reference.steps);
        let gradients = "parallel.shard=gradients";
        runs.train("run", 2, &[keep, "schedule.steps=5", "run.steps=2", gradients]);
        let parameters = "parallel.shard=parameters";
        let set = [keep, "batch.microbatch_grains=3", "model.recompute=block", parameters];
        assert_same(&runs.train("run", 3, &set), &reference, name);
        let threads = runs.train("threads", 1, &[keep, "device.threads=2"]);
        assert_same(&threads, &reference, &format!("{name}: two threads"));
        let processes = runs.train_in_two_processes(&[keep]);
        assert_same(&processes, &reference, &format!("{name}: two processes"));
        let dir = runs.folder("run");
        let generate =
            ["generate", "--model", &dir, "--prompt", "the tide", "--max-new-tokens", "4"];
        bench.tidemill(&generate).expect(0);
        let facts = bench.tidemill(&["inspect", &dir]);
        facts.expect(0);
    }
}

/// The same, where documents of a sample see nothing of each other.
#[test]
fn every_family_is_elastic_with_documents_apart() {
    let bench = Workbench::new();
    for model in MODELS {
        let runs = Runs::new(&bench, model);
        let (name, reset) = (runs.name, "data.document_boundaries=reset");
        let reference = runs.train("reference", 1, &[reset]);
        assert!(reference.loss(4) < reference.loss(0) - 0.05, "{name}: {:?}", reference.steps);
        // What follows the end of a document is not predicted.
        let tokens = reference.steps[4][4];
        assert!(tokens < 5 * 45 * 17 && tokens > 4 * 45 * 17, "{name}: {tokens} tokens");
        let set = [reset, "batch.microbatch_grains=3", "model.recompute=block", "device.threads=2"];
        let set = [&set[..], &["parallel.shard=parameters"]].concat();
        assert_same(&runs.train("run", 3, &set), &reference, name);
        let processes = runs.train_in_two_processes(&[reset, "batch.microbatch_grains=1"]);
        assert_same(&processes, &reference, &format!("{name}: two processes"));
    }
}

#[test]
fn samples_longer_than_the_learned_positions_are_refused() {
    let bench = Workbench::new();
    let table = table("gpt-neo");
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
    let foundry = [("model.clip_qkv", "3"), ("model.n_heads", "4"), ("model.qk_ln", "false")];
    for (name, changes) in [("foundry", &foundry[..]), ("llama", &[("model.mlp_width", "34")])] {
        let config = with_model(table(name));
        let run = |set: &[&str]| bench.try_train_with(&config, Job { dir: name, workers: 1, set });
        run(&["run.steps=1", "schedule.warmup_steps=0"]).expect("trains");
        for (key, now) in changes {
            let change = format!("{key}={now}");
            let error = causes(&run(&["schedule.warmup_steps=0", &change]).expect_err(key));
            assert!(error.contains(key) && error.contains("cannot change"), "{key}: {error}");
        }
    }
}
