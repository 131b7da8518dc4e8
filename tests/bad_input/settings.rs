//! Configs, `--set` and flags.

use crate::families::{table, with_model};
use crate::support::Workbench;
use crate::support::workbench::CONFIG;

/// Trains with a config, and expects an error before anything is written.
#[track_caller]
fn refused_config(bench: &Workbench, config: &str, arguments: &[&str], parts: &[&str]) {
    bench.write("bad.toml", config);
    let arguments = [&["train", "bad.toml"], arguments].concat();
    bench.tidemill(&arguments).refused(1, parts);
    assert!(!bench.path("run").exists(), "{arguments:?}: the run folder was created");
}

/// Text of a config is quoted in errors without control characters, and cut to a length.
#[test]
fn configs_that_are_no_text_or_too_long() {
    let bench = Workbench::new();
    let refused = |config: &[u8], parts: &[&str]| {
        bench.write("bad.toml", config);
        for set in [&[][..], &["--set", "run.steps=3"]] {
            let refused = bench.tidemill(&[&["train", "bad.toml"], set].concat());
            let refused = refused.refused(1, &[&["bad.toml"], parts].concat());
            let clean = refused.stderr.chars().all(|c| c == '\n' || !c.is_control());
            assert!(clean && refused.stderr.len() < 1_000, "{refused:?}");
        }
    };
    refused(b"[run]\nstep\x1b[31ms = 1\n", &["line 2"]);
    refused(b"[run]\n\"step\\u001b[31ms\" = 1\n", &["unknown field"]);
    refused(format!("[run]\nx = {}", "1".repeat(100_000)).as_bytes(), &["1 ..."]);
    refused(format!("[run]\n{} = 1", "x".repeat(100_000)).as_bytes(), &["x ..."]);
    refused(&[0; 2 << 20], &["2097152 bytes, expected at most 1048576"]);
    refused(b"[run]\nsteps = \"\xff\"", &["no text in UTF-8 from byte 15 on"]);
}

#[test]
fn configs() {
    let bench = Workbench::new();
    let replaced = |from: &str, to: &str| {
        assert!(CONFIG.contains(from), "{from}");
        CONFIG.replace(from, to)
    };
    let line = |text: &str| {
        let index = CONFIG.lines().position(|line| line == text).unwrap();
        format!("line {}", index + 1)
    };
    let cases: &[(&str, &str, &[&str])] = &[
        (
            "steps = 5",
            "",
            &["run.steps, run.tokens, run.epochs, run.chinchilla: expected exactly one of them"],
        ),
        ("steps = 5", "steps = 5\nepochs = 1", &["run.steps", "found 2"]),
        ("steps = 5", "stepz = 5", &["bad.toml", &line("steps = 5"), "`stepz`", "`steps`"]),
        ("steps = 5", "steps = \"many\"", &["bad.toml", &line("steps = 5"), "steps = \"many\""]),
        ("steps = 5", "steps = -1", &["bad.toml", &line("steps = 5"), "-1"]),
        ("steps = 5", "steps = 5\nsteps = 6", &["bad.toml", "line 5", "duplicate"]),
        ("steps = 5", "steps = 0", &["run.steps", "at least 1"]),
        ("steps = 5", "epochs = nan", &["run.epochs", "NaN"]),
        ("steps = 5", "chinchilla = 0.0", &["run.chinchilla", "above 0"]),
        ("warmup_steps = 2", "warmup_tokens = 100000", &["schedule.warmup_tokens", "5 steps"]),
        (
            "warmup_steps = 2",
            "warmup_steps = 2\nwarmup_fraction = 0.1",
            &["schedule.warmup_fraction", "schedule.warmup_steps"],
        ),
        ("dir = \"run\"\n", "", &["bad.toml", "`dir`"]),
        ("[run]", "[running]", &["bad.toml", "`running`"]),
        ("[run]", "[run", &["bad.toml", "line 2"]),
        ("[data]", "[data]\nshuffle = \"sometimes\"", &["bad.toml", "`sometimes`", "`window`"]),
        ("dataset = \"data\"", "", &["bad.toml", "data.dataset, data.streams", "neither"]),
        ("dataset = \"data\"", "dataset = \"nowhere\"", &["nowhere"]),
        ("dataset = \"data\"", "dataset = \"data-text\"", &["data-text", "no samples"]),
        ("kind = \"mamba\"", "", &["model", "exactly one of preset, from and kind"]),
        ("kind = \"mamba\"", "kind = \"mumba\"", &["bad.toml", "`mumba`", "`mamba`"]),
        ("kind = \"mamba\"", "preset = \"mamba-11m\"", &["model.preset", "mamba-10m", "mamba-11m"]),
        (
            "kind = \"mamba\"",
            "kind = \"mamba\"\nvocab_size = 258",
            &["model.vocab_size", "259", "258"],
        ),
        ("kind = \"mamba\"", "kind = \"mamba\"\nn_heads = 2", &["model.n_heads"]),
        ("d_model = 20\n", "", &["model.d_model", "no preset"]),
        ("d_state = 5", "d_state = 0", &["model.d_state", "0"]),
        (
            "[run]",
            "[parallel]\nshard = \"weights\"\n[run]",
            &["bad.toml", "line 3", "`weights`", "`optimizer`, `gradients`, `parameters`"],
        ),
        ("[run]", "[parallel]\nshards = 2\n[run]", &["bad.toml", "`shards`", "`shard`"]),
        ("lanes = 8", "lanes = 6", &["batch.lanes", "power of two", "6"]),
        ("lanes = 8", "lanes = 64", &["batch.lanes", "samples_per_step (45)", "64"]),
        ("lanes = 8", "lanes = 0", &["batch.lanes", "power of two", "0"]),
        ("grain_samples = 2", "grain_samples = 0", &["batch.grain_samples", "at least 1"]),
        ("microbatch_grains = 2", "microbatch_grains = \"some\"", &["auto", "some"]),
        ("steps = 5", "epochs = 1e300", &["run.epochs", "steps of 45 samples", "found 1"]),
        ("steps = 5", "steps = 9223372036854775807", &["run.steps", "steps of 45 samples"]),
        ("warmup_steps = 2", "final_fraction = 1.5", &["schedule.final_fraction", "1.5"]),
        ("learning_rate = 3e-3", "learning_rate = nan", &["optimizer.learning_rate", "NaN"]),
        ("learning_rate = 3e-3", "betas = [0.9]", &["bad.toml", "betas = [0.9]"]),
        ("learning_rate = 3e-3", "betas = [0.9, 0.95, \"x\"]", &["bad.toml", "betas = ["]),
        ("learning_rate = 3e-3", "betas = [0.9, 0.95, 0.99]", &["betas = [", "two numbers"]),
        ("learning_rate = 3e-3", "betas = [0.9, 0.9999999999]", &["optimizer.betas", "in fp32"]),
        ("learning_rate = 3e-3", "learning_rate = 1e39", &["optimizer.learning_rate", "in fp32"]),
        ("learning_rate = 3e-3", "weight_decay = 1e300", &["optimizer.weight_decay", "in fp32"]),
        ("learning_rate = 3e-3", "eps = 0.0", &["optimizer.eps", "above 0"]),
        ("warmup_steps = 2", "warmup_steps = 6", &["schedule.warmup_steps", "5", "6"]),
        ("every_steps = 2", "every_steps = 0", &["checkpoint.every_steps", "at least 1"]),
        (
            "[checkpoint]",
            "[metrics]\ntensorboards = true\n[checkpoint]",
            &["`tensorboards`", "`tensorboard`"],
        ),
        ("every_steps = 2", "keep = 0", &["checkpoint.keep", "at least 1"]),
        ("[checkpoint]", "[device]\nthreads = 0\n[checkpoint]", &["device.threads", "at least 1"]),
        ("[checkpoint]", "[evaluation]\ndataset = \"nowhere\"\n[checkpoint]", &["nowhere"]),
    ];
    for (from, to, parts) in cases {
        refused_config(&bench, &replaced(from, to), &["-w", "1"], parts);
    }
    let most =
        "workers: expected at most 8 over all processes, one for each of batch.lanes, found 9";
    refused_config(&bench, CONFIG, &["-w", "9"], &[most]);
    refused_config(&bench, CONFIG, &["-w", "3", "-n", "3"], &[most]);
    refused_config(&bench, CONFIG, &["-w", "0"], &["-w", "at least 1"]);
    refused_config(&bench, CONFIG, &["-n", "0"], &["-n", "at least 1"]);
    let error = b"[run]\ndir = \"\xff\"";
    bench.write("bad.toml", error);
    bench.tidemill(&["train", "bad.toml"]).refused(1, &["bad.toml", "UTF-8"]);
    bench.tidemill(&["train", "missing.toml"]).refused(1, &["missing.toml", "No such file"]);
}

/// Also with several processes: before a worker starts.
#[test]
fn groups_of_parameters() {
    let bench = Workbench::new();
    let cases: &[(&str, &[&str])] = &[
        (
            "match = [\"*.norm.*\", \"embedding.*\"]\nweight_decay = 0.0",
            &[
                "optimizer.groups (group 1, match)",
                "\"embedding.*\", which matches none",
                "backbone.embeddings.weight, backbone.layers.0.",
            ],
        ),
        (
            "match = [\"*\"]\nweight_decay = 0.0\n[[optimizer.groups]]\nmatch = [\"*.norm.*\"]\nlearning_rate_factor = 2.0",
            &["optimizer.groups (group 2, match)", "no group before it takes", "*.norm.*"],
        ),
        ("match = [\"*\"]", &["optimizer.groups (group 1, its settings)", "neither"]),
        ("match = []\nweight_decay = 0.1", &["(group 1, match)", "at least one pattern"]),
        ("match = [\"a[b\"]\nweight_decay = 0.1", &["(group 1, match)", "glob pattern", "a[b"]),
        ("match = \"*\"\nweight_decay = 0.1", &["bad.toml", "match = \"*\"", "sequence"]),
        ("weight_decay = 0.1", &["bad.toml", "`match`"]),
        (
            "match = [\"*\"]\nweight_decay = -0.1",
            &["(group 1, weight_decay)", "at least 0", "-0.1"],
        ),
        (
            "match = [\"*\"]\nlearning_rate_factor = -2.0",
            &["(group 1, learning_rate_factor)", "-2"],
        ),
        (
            "match = [\"*\"]\nlearning_rate_factor = inf",
            &["(group 1, learning_rate_factor)", "inf"],
        ),
        (
            "match = [\"*\"]\nlearning_rate_factor = nan",
            &["(group 1, learning_rate_factor)", "NaN"],
        ),
        ("match = [\"*\"]\nlr = 1.0", &["bad.toml", "`lr`", "`learning_rate_factor`"]),
    ];
    for (group, parts) in cases {
        let config = format!("{CONFIG}\n[[optimizer.groups]]\n{group}\n");
        refused_config(&bench, &config, &["-w", "1"], parts);
    }
    let config = format!("{CONFIG}\n[[optimizer.groups]]\n{}\n", cases[0].0);
    refused_config(&bench, &config, &["-w", "1", "-n", "2"], cases[0].1);
}

#[test]
fn overrides() {
    let bench = Workbench::new();
    let cases: &[(&str, &[&str])] = &[
        ("run.steps", &["--set", "key=value", "run.steps"]),
        ("=5", &["--set", "a key before the ="]),
        ("run.steps=many", &["run.steps", "many"]),
        ("run.stepz=5", &["`stepz`"]),
        ("optimizer.betas=[1, 2, 3]", &["optimizer.betas"]),
        ("optimizer.adafactor.clip_threshold=2.0", &["optimizer.adafactor", "no value, as adamw"]),
        (
            "optimizer={name=\"adafactor\", adafactor={step_size=\"half\"}}",
            &["`half`", "`relative` or `absolute`"],
        ),
        (
            "optimizer={name=\"adafactor\", adafactor={decay_exponent=0.0}}",
            &["optimizer.adafactor.decay_exponent", "above 0"],
        ),
        ("optimizer={name=\"adafactor\", betas=[0.9, 0.9]}", &["optimizer.betas", "no value, as"]),
        ("batch.lanes=[", &["batch.lanes"]),
        ("run.steps.more=5", &["--set", "run.steps.more"]),
        ("checkpoint=5", &["checkpoint"]),
        (
            "parallel.shard=weights",
            &["parallel.shard", "`weights`", "`optimizer`, `gradients`, `parameters`"],
        ),
    ];
    for (assignment, parts) in cases {
        refused_config(&bench, CONFIG, &["-w", "1", "--set", assignment], parts);
    }
}

#[test]
fn flags() {
    let bench = Workbench::new();
    let cases: &[(&[&str], &str)] = &[
        (&["train", "run.toml", "--bogus"], "--bogus"),
        (&["train"], "RUN.toml"),
        (&["train", "run.toml", "-w", "two"], "two"),
        (&["train", "run.toml", "-n", "2", "-p", "0", "--hosts", "hosts"], "--processes"),
        (&["train", "run.toml", "-p", "0"], "--hosts"),
        (&["grind"], "grind"),
        (&["prepare", "--input", "data-text"], "--output"),
        (&["prepare", "--input", "data-text", "--output", "o", "--seq-len", "0"], "--seq-len"),
        (&["generate", "--model", "run"], "--prompt"),
        (&["generate", "--model", "run", "--tokens", "1,x"], "x"),
        (&["generate", "--model", "run", "--prompt", "a", "--tokens", "1"], "--tokens"),
        (&["generate", "--model", "run", "--prompt", "a", "--input", "p.jsonl"], "--input"),
        (&["generate", "--model", "run", "--prompt", "a", "--batch", "2"], "--batch"),
        (&["generate", "--model", "run", "--input", "p.jsonl", "--batch", "0"], "--batch"),
        (&["generate", "--model", "run", "--input", "p.jsonl", "--batch", "-1"], "--batch"),
        (&["generate", "--model", "run", "--prompt", "a", "--top-k", "-1"], "--top-k"),
        (&["generate", "--model", "run", "--prompt", "a", "--temperature", "x"], "--temperature"),
        (&["generate", "--model", "run", "--prompt", "a", "--seed", "-1"], "--seed"),
        (
            &["generate", "--model", "run", "--prompt", "a", "--max-new-tokens", "-1"],
            "--max-new-tokens",
        ),
        (&["score", "--model", "run", "--input", "p.jsonl", "--batch", "0"], "--batch"),
        (&["score", "--model", "run"], "--input"),
        (&["bench", "generate", "--plot", "p.jpg"], ".svg or .png"),
        (&["bench", "generate", "--batches", "1,0"], "--batches"),
        (&["inspect", "data", "--format", "xml"], "xml"),
        (&["bench", "train", "--steps", "0"], "--steps"),
    ];
    for (arguments, part) in cases {
        bench.tidemill(arguments).refused(2, &["tidemill: ", part]);
    }
    assert!(!bench.path("run").exists() && !bench.path("o").exists());
    let beyond = ["--preset", "gpt-neo-125m", "--prompt-tokens", "2047", "--new-tokens", "3"];
    bench.tidemill(&[&["bench", "generate"], &beyond[..]].concat()).refused(
        1,
        &["--new-tokens: expected at most 2 after 2047 tokens", "gpt-neo-125m", "found 3"],
    );
    let long = ["bench", "train", "--preset", "mpt-125m", "--seq-len", "4096"];
    bench
        .tidemill(&long)
        .refused(1, &["--seq-len: expected at most 2048, the positions of mpt-125m, found 4096"]);
    let kernels = ["bench", "kernels", "--kernel", "adamw", "--kernel", "nope"];
    let expected = "--kernel: expected a word of one of selective_scan, selective_scan_documents, ";
    bench.tidemill(&kernels).refused(1, &[expected, "weight_gradient, found \"nope\""]);
    let hosts = |content: &str, index: &str, parts: &[&str]| {
        bench.write("hosts", content);
        let arguments = ["train", "run.toml", "-p", index, "--hosts", "hosts", "-w", "1"];
        bench.tidemill(&arguments).refused(1, parts);
    };
    hosts("127.0.0.1:7001\n", "1", &["process index 1"]);
    hosts("127.0.0.1\n", "0", &["hosts", "127.0.0.1"]);
    hosts("", "0", &["hosts"]);
}

/// The `[model]` tables of families with attention; [`configs`] has those of Mamba.
#[test]
fn model_tables() {
    let bench = Workbench::new();
    let cases: &[(&str, &str, &str, &[&str])] = &[
        ("mpt", "\"mpt\"", "\"rwkv\"", &["bad.toml", "`rwkv`", "`gpt_neo`, `llama`, `hybrid`"]),
        ("mpt", "n_heads = 3", "n_heads = 4", &["model.n_heads", "divisor of d_model", "18", "4"]),
        ("mpt", "n_heads = 3", "n_heads = 0", &["model.n_heads", "divisor of d_model", "found 0"]),
        ("mpt", "alibi = true", "alibi = 1", &["bad.toml", "alibi = 1", "a boolean"]),
        ("mpt", "alibi = true", "rope = true", &["bad.toml", "unknown field `rope`", "`n_heads`"]),
        ("mpt", "alibi = true", "window_size = 4", &["model.window_size", "mpt model"]),
        ("mpt", "alibi = true", "layer_pattern = \"m\"", &["model.layer_pattern", "mpt model"]),
        ("mpt", "max_seq_len = 64\n", "", &["model.max_seq_len", "found none"]),
        ("foundry", "qk_ln = true", "qk_ln = \"yes\"", &["bad.toml", "qk_ln", "a boolean"]),
        ("foundry", "clip_qkv = 2", "clip_qkv = 0", &["model.clip_qkv", "above 0", "found 0"]),
        ("foundry", "clip_qkv = 2", "clip_qkv = nan", &["model.clip_qkv", "above 0", "NaN"]),
        ("foundry", "clip_qkv = 2", "softmax_scale = -1", &["model.softmax_scale", "above 0"]),
        ("foundry", "\"inv_sqrt_d_model\"", "\"half\"", &["bad.toml", "inv_sqrt_d_model", "half"]),
        ("foundry", "\"inv_sqrt_d_model\"", "0", &["model.logit_scale", "above 0", "found 0"]),
        ("foundry", "max_seq_len = 17", "max_seq_len = 16", &["model.max_seq_len", "17", "16"]),
        ("gpt-neo", "n_heads = 2", "n_heads = 5", &["model.n_heads", "12", "found 5"]),
        ("gpt-neo", "window_size = 5", "window_size = 0", &["model.window_size", "found 0"]),
        ("gpt-neo", "window_size = 5", "", &["model.window_size", "found none"]),
        ("gpt-neo", "expansion = 4", "expansion = 0", &["model.expansion", "1 to 64", "found 0"]),
        ("gpt-neo", "expansion = 4", "expansion = 4\nalibi = true", &["model.alibi", "gpt_neo"]),
        ("llama", "n_kv_heads = 2", "n_kv_heads = 4", &["model.n_kv_heads", "6", "found 4"]),
        ("llama", "n_kv_heads = 2\n", "", &["model.n_kv_heads", "found none"]),
        ("llama", "n_heads = 6", "n_heads = 8", &["model.n_heads", "even", "3 columns"]),
        ("llama", "rope_theta = 100", "rope_theta = 0", &["model.rope_theta", "above 0"]),
        (
            "llama",
            "rope_theta",
            "qk_norm = true\nrope_theta",
            &["model.qkv_bias", "beside qk_norm"],
        ),
        ("qwen3", "head_width = 6", "head_width = 7", &["model.head_width", "even", "7 columns"]),
        ("hybrid", "\"ma\"", "\"\"", &["bad.toml", "layer_pattern", "letters m", "found \"\""]),
        ("hybrid", "\"ma\"", "\"mxa\"", &["bad.toml", "layer_pattern", "letters m", "\"mxa\""]),
        ("hybrid", "\"ma\"", "\"m\"", &["model.layer_pattern", "two kinds", "found only m"]),
        ("hybrid", "\"ma\"", "\"aaaam\"", &["model.layer_pattern", "among 4 blocks, found only a"]),
        ("hybrid", "\"ma\"", "3", &["bad.toml", "layer_pattern", "a string"]),
        ("hybrid", "layer_pattern = \"ma\"\n", "", &["model.layer_pattern", "found none"]),
        ("hybrid", "n_heads = 3", "n_heads = 5", &["model.n_heads", "12", "found 5"]),
        ("hybrid", "n_heads = 3\n", "", &["model.n_heads", "found none"]),
        ("hybrid", "d_conv = 3", "d_conv = 17", &["model.d_conv", "1 to 16", "found 17"]),
        ("hybrid", "n_heads = 3", "max_seq_len = 9\nn_heads = 3", &["model.max_seq_len", "hybrid"]),
        ("hybrid", "n_heads = 3", "mlp_width = 9\nn_heads = 3", &["model.mlp_width", "has no l"]),
        ("hybrid", "\"ma\"", "\"ml\"", &["model.n_kv_heads", "(missing too: mlp_width)"]),
        (
            "hybrid-of-all",
            "n_kv_heads = 1",
            "n_kv_heads = 2",
            &["model.n_kv_heads", "n_heads", "3"],
        ),
        ("hybrid-of-all", "n_kv_heads = 1\n", "", &["model.n_kv_heads", "found none"]),
        ("hybrid-of-all", "\"mals\"", "\"mas\"", &["model.head_width", "layer_pattern has no l"]),
        (
            "hybrid-of-all",
            "mamba2_head_width = 6",
            "mamba2_head_width = 5",
            &["model.mamba2_head_width", "divisor", "24", "found 5"],
        ),
        ("hybrid-of-all", "n_groups = 2", "n_groups = 3", &["model.n_groups", "4 heads"]),
    ];
    for (family, from, to, parts) in cases {
        let table = table(family);
        assert!(table.contains(from), "{family}: {from}");
        let config = with_model(&table.replace(from, to));
        refused_config(&bench, &config, &["-w", "1"], parts);
    }
}
