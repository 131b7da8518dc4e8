//! Wrong input is one clear line on standard error that names the file or the key, exit code 1 (2 for flags), no
//! panic, and nothing half-written.
//!
//! Seen red: with a checkpoint that is not verified when it is opened, with the latest one skipped where it is damaged,
//! with tokens that are not compared with the vocabulary, and with a run folder that is created before its config is
//! checked.

use std::collections::BTreeMap;
use std::path::Path;

use crate::support::outcome::files;
use crate::support::workbench::CONFIG;
use crate::support::{Finished, Running, Workbench};

/// Trains with a config, and expects to be refused before anything is written.
#[track_caller]
fn refused_config(bench: &Workbench, config: &str, arguments: &[&str], parts: &[&str]) {
    bench.write("bad.toml", config);
    let arguments = [&["train", "bad.toml"], arguments].concat();
    bench.tidemill(&arguments).refused(1, parts);
    assert!(!bench.path("run").exists(), "{arguments:?}: the run folder was created");
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
        ("steps = 5", "", &["run.steps, run.tokens, run.epochs: expected exactly one of them"]),
        ("steps = 5", "steps = 5\nepochs = 1", &["run.steps", "found 2"]),
        ("steps = 5", "stepz = 5", &["bad.toml", &line("steps = 5"), "`stepz`", "`steps`"]),
        ("steps = 5", "steps = \"many\"", &["bad.toml", &line("steps = 5"), "steps = \"many\""]),
        ("steps = 5", "steps = -1", &["bad.toml", &line("steps = 5"), "-1"]),
        ("steps = 5", "steps = 5\nsteps = 6", &["bad.toml", "line 5", "duplicate"]),
        ("steps = 5", "steps = 0", &["run.steps", "at least 1"]),
        ("steps = 5", "epochs = nan", &["run.epochs", "NaN"]),
        ("dir = \"run\"\n", "", &["bad.toml", "`dir`"]),
        ("[run]", "[running]", &["bad.toml", "`running`"]),
        ("[run]", "[run", &["bad.toml", "line 2"]),
        ("[data]", "[data]\nshuffle = \"sometimes\"", &["bad.toml", "`sometimes`", "`window`"]),
        ("dataset = \"data\"", "", &["bad.toml", "`dataset`"]),
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
        ("lanes = 8", "lanes = 6", &["batch.lanes", "power of two", "6"]),
        ("lanes = 8", "lanes = 64", &["batch.lanes", "samples_per_step (45)", "64"]),
        ("lanes = 8", "lanes = 0", &["batch.lanes", "power of two", "0"]),
        ("grain_samples = 2", "grain_samples = 0", &["batch.grain_samples", "at least 1"]),
        ("microbatch_grains = 2", "microbatch_grains = \"some\"", &["auto", "some"]),
        ("learning_rate = 3e-3", "learning_rate = nan", &["optimizer.learning_rate", "NaN"]),
        ("learning_rate = 3e-3", "betas = [0.9]", &["bad.toml", "betas = [0.9]"]),
        ("learning_rate = 3e-3", "eps = 0.0", &["optimizer.eps", "above 0"]),
        ("warmup_steps = 2", "warmup_steps = 6", &["schedule.warmup_steps", "5", "6"]),
        ("every_steps = 2", "every_steps = 0", &["checkpoint.every_steps", "at least 1"]),
        ("every_steps = 2", "keep = 0", &["checkpoint.keep", "at least 1"]),
        ("[checkpoint]", "[device]\nthreads = 0\n[checkpoint]", &["device.threads", "1 to 1024"]),
        ("[checkpoint]", "[evaluation]\ndataset = \"nowhere\"\n[checkpoint]", &["nowhere"]),
    ];
    for (from, to, parts) in cases {
        refused_config(&bench, &replaced(from, to), &["-w", "1"], parts);
    }
    refused_config(&bench, CONFIG, &["-w", "9"], &["batch.lanes", "at least the 9 workers", "8"]);
    refused_config(&bench, CONFIG, &["-w", "3", "-n", "3"], &["batch.lanes", "9 workers"]);
    refused_config(&bench, CONFIG, &["-w", "0"], &["-w", "at least 1"]);
    refused_config(&bench, CONFIG, &["-n", "0"], &["-n", "at least 1"]);
    let error = b"[run]\ndir = \"\xff\"";
    bench.write("bad.toml", error);
    bench.tidemill(&["train", "bad.toml"]).refused(1, &["bad.toml", "UTF-8"]);
    bench.tidemill(&["train", "missing.toml"]).refused(1, &["missing.toml", "No such file"]);
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
        ("batch.lanes=[", &["batch.lanes"]),
        ("run.steps.more=5", &["--set", "run.steps.more"]),
        ("checkpoint=5", &["checkpoint"]),
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
    let hosts = |content: &str, index: &str, parts: &[&str]| {
        bench.write("hosts", content);
        let arguments = ["train", "run.toml", "-p", index, "--hosts", "hosts", "-w", "1"];
        bench.tidemill(&arguments).refused(1, parts);
    };
    hosts("127.0.0.1:7001\n", "1", &["process index 1"]);
    hosts("127.0.0.1\n", "0", &["hosts", "127.0.0.1"]);
    hosts("", "0", &["hosts"]);
}

/// What a refused run may leave: no checkpoint, nothing that is half written.
#[track_caller]
fn nothing_half_written(bench: &Workbench) {
    let left = files(&bench.path("run"));
    let partial =
        left.keys().any(|name| name.contains(".partial") || name.contains("checkpoints/"));
    assert!(!partial, "{:?}", left.keys());
}

fn training(bench: &Workbench, arguments: &[&str]) -> Finished {
    bench.tidemill(&[&["train", "run.toml", "-w", "2"], arguments].concat())
}

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
        // Without an index the files themselves must say so.
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

/// A data set whose index promises fewer tokens than there are, or none.
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

/// The latest checkpoint is damaged: that is said, it is not skipped, and the older one stays as it is.
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
            // Without trainer.json it is a model like any other.
            if name != "trainer.json" {
                let generate = ["generate", "--model", "run", "--prompt", "a"];
                bench.tidemill(&generate).refused(1, &["step-00000005", name]);
                let inspect = ["inspect", "run/checkpoints/step-00000005"];
                bench.tidemill(&inspect).refused(1, &["step-00000005", name]);
            }
            std::fs::write(&path, &good).unwrap();
        }
    }
    assert!(files(&bench.path("run")) == whole);
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

/// Broken lines are named by number; what was scored before them has been printed.
#[test]
fn lines_to_score() {
    let bench = Workbench::new();
    training(&bench, &[]).expect(0);
    let score = |text: &str| {
        bench.write("input.jsonl", text);
        bench.tidemill(&["score", "--model", "run", "--input", "input.jsonl"])
    };
    let good = "{\"tokens\": [1, 2, 3]}\n";
    let cases = [
        ("{\"tokens\": [1, 2", "line 3"),
        ("{\"tokens\": [1, \"x\"]}", "line 3"),
        ("{\"tokens\": [1, -2]}", "line 3"),
        ("{\"token\": [1, 2]}", "`token`"),
        ("{}", "expected one of tokens and text"),
        ("{\"tokens\": [1, 2], \"text\": \"x\"}", "expected one of tokens and text"),
        ("{\"tokens\": [1, 2, 259]}", "259"),
        ("{\"tokens\": [1]}", "line 3"),
        ("not json", "line 3"),
    ];
    for (broken, part) in cases {
        let finished = score(&format!("{good}\n{broken}\n{good}")).expect(1);
        let Finished { stdout, stderr, .. } = &finished;
        assert_eq!(stdout.lines().count(), 1, "the line before: {finished:?}");
        assert_eq!(stderr.matches('\n').count(), 1, "{finished:?}");
        assert!(stderr.contains("input.jsonl: line 3") && stderr.contains(part), "{finished:?}");
    }
    bench.write("latin1.jsonl", b"{\"text\": \"gr\xf6\xdfer\"}\n");
    let arguments = ["score", "--model", "run", "--input", "latin1.jsonl"];
    bench.tidemill(&arguments).refused(1, &["latin1.jsonl: line 1", "UTF-8"]);
    let arguments = ["score", "--model", "run", "--input", "missing.jsonl"];
    bench.tidemill(&arguments).refused(1, &["missing.jsonl", "No such file"]);
}

/// Every prompt is looked at before any is continued: a wrong one is named by its line, and nothing is printed.
#[test]
fn prompts_to_continue() {
    let bench = Workbench::new();
    training(&bench, &[]).expect(0);
    let good = "{\"tokens\": [1, 2, 3]}\n";
    let cases = [
        ("{\"tokens\": [1, 2", "expected {\"tokens\": [...]} or {\"prompt\": \"...\"}"),
        ("{\"tokens\": []}", "prompt: expected at least 1 token, found none"),
        ("{\"prompt\": \"\"}", "prompt: expected at least 1 token, found none"),
        ("{\"text\": \"x\"}", "expected one of tokens and prompt"),
        ("{\"tokens\": [1], \"prompt\": \"x\"}", "expected one of tokens and prompt"),
        ("{\"tokens\": [1, 259]}", "position 1: token 259"),
        ("{\"id\": 3}", "expected one of tokens and prompt"),
    ];
    let arguments = ["generate", "--model", "run", "--input", "input.jsonl"];
    for (broken, part) in cases {
        bench.write("input.jsonl", format!("{good}\n{broken}\n{good}"));
        bench.tidemill(&arguments).refused(1, &["input.jsonl: line 3: ", part]);
    }
    bench.write("input.jsonl", "");
    assert!(bench.tidemill(&arguments).expect(0).stdout.is_empty());
}

#[test]
fn model_folders() {
    let bench = Workbench::new();
    training(&bench, &[]).expect(0);
    let generate = |model: &str, parts: &[&str]| {
        bench.tidemill(&["generate", "--model", model, "--prompt", "a"]).refused(1, parts);
        let from = format!("model={{from = \"{model}\"}}");
        let train = ["train", "run.toml", "-w", "1", "--set", &from, "--set", "run.dir=other"];
        bench.tidemill(&train).failed(1, &[model]);
        assert!(!bench.path("other/checkpoints").exists());
    };
    generate("nowhere", &["nowhere", "expected a checkpoint"]);
    generate("data-text", &["data-text", "expected a checkpoint"]);
    generate("run.toml", &["run.toml"]);
    // A Hugging Face folder has no checksums: its files must be believed or refused by themselves.
    let model = bench.path("model");
    let good = files(&bench.path("run/checkpoints/step-00000005"));
    let write = |name: &str, bytes: &[u8]| {
        std::fs::create_dir_all(&model).unwrap();
        for (name, bytes) in &good {
            if !["trainer.json", "optimizer.safetensors"].contains(&name.as_str()) {
                std::fs::write(model.join(name), bytes).unwrap();
            }
        }
        std::fs::write(model.join(name), bytes).unwrap();
    };
    let weights = &good["model.safetensors"];
    write("config.json", b"{");
    generate("model", &["model/config.json"]);
    write("config.json", b"{\"model_type\": \"gpt2\"}");
    generate("model", &["model/config.json"]);
    let config = String::from_utf8_lossy(&good["config.json"])
        .replace("\"hidden_size\": 20", "\"hidden_size\": 24");
    write("config.json", config.as_bytes());
    generate("model", &["model"]);
    for bad in [&weights[..weights.len() - 3], &weights[..100], &[], &[0xff; 64]] {
        write("model.safetensors", bad);
        generate("model", &["model/model.safetensors"]);
    }
    write("model.safetensors", weights);
    std::fs::remove_file(model.join("model.safetensors")).unwrap();
    generate("model", &["model: ", "model.safetensors"]);
    write("tokenizer.json", b"{}");
    bench
        .tidemill(&["generate", "--model", "model", "--prompt", "a"])
        .refused(1, &["model/tokenizer.json"]);
    write("model.safetensors", weights);
    let cases: [(&[&str], &str); 7] = [
        (&["--tokens", "259"], "259"),
        (&["--prompt", ""], "prompt"),
        (&["--tokens", "1", "--temperature", "-1"], "temperature"),
        (&["--tokens", "1", "--temperature", "nan"], "temperature"),
        (&["--tokens", "1", "--top-p", "0"], "top_p"),
        (&["--tokens", "1", "--min-p", "1.5"], "min_p"),
        (&["--tokens", "1", "--repetition-penalty", "0"], "repetition_penalty"),
    ];
    for (arguments, part) in cases {
        bench.tidemill(&[&["generate", "--model", "run"], arguments].concat()).refused(1, &[part]);
    }
}

#[test]
fn run_folders() {
    let bench = Workbench::new();
    training(&bench, &[]).expect(0);
    let before = files(&bench.path("run"));
    let hold = tidemill::run_folder::RunFolder::hold(&bench.path("run")).unwrap();
    for processes in ["1", "2"] {
        training(&bench, &["-n", processes]).refused(1, &["run", "in use by another run"]);
    }
    drop(hold);
    assert!(files(&bench.path("run")) == before);
    training(&bench, &["--set", "run.dir=run.toml/run"]).refused(1, &["run.toml/run"]);
    bench.tidemill(&["inspect", "nowhere"]).refused(1, &["nowhere"]);
    bench.tidemill(&["inspect", "data-text"]).refused(1, &["data-text"]);
    bench.tidemill(&["bench", "data", "nowhere"]).refused(1, &["nowhere"]);
    bench.tidemill(&["bench", "train", "--preset", "mamba-9m"]).refused(1, &["mamba-9m"]);
}

#[test]
fn documents() {
    let bench = Workbench::new();
    std::fs::create_dir(bench.path("texts")).unwrap();
    bench.write("texts/a.txt", "a".repeat(100));
    bench.write("texts/b.txt", b"gr\xf6\xdfer");
    let prepare = |arguments: &[&str]| {
        let all = ["prepare", "--output", "out", "--seq-len", "16", "--input"];
        bench.tidemill(&[&all, arguments].concat())
    };
    let cases: [(&[&str], &str); 6] = [
        (&["nowhere"], "nowhere"),
        (&["texts", "--strict"], "texts/b.txt"),
        (&["texts", "--glob", "*.md"], "*.md"),
        (&["texts", "--glob", "["], "["),
        (&["texts", "--seq-len", "1000"], "at least 1001"),
        (&["texts", "--tokenizer", "run.toml"], "run.toml"),
    ];
    for (arguments, part) in cases {
        let arguments: Vec<&str> = arguments.to_vec();
        let all = ["prepare", "--output", "out", "--input"];
        let seq_len: &[&str] =
            if arguments.contains(&"--seq-len") { &[] } else { &["--seq-len", "16"] };
        bench.tidemill(&[&all, &arguments[..], seq_len].concat()).refused(1, &[part]);
        assert!(!bench.path("out").exists(), "{arguments:?}");
    }
    let skipping = prepare(&["texts"]).expect(0);
    assert!(skipping.stderr.contains("texts/b.txt"), "{skipping:?}");
    let before = files(&bench.path("out"));
    prepare(&["texts"]).refused(1, &["out"]);
    assert!(files(&bench.path("out")) == before);
}

/// A file that may not grow beyond a limit is a disk that is full: the checkpoint is not there, older ones are, and
/// with room the run goes on as if nothing had been.
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
        let full = Running::start_in_shell(bench.folder(), &line, &limited).finish().expect(1);
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

fn folders(path: &Path) -> Vec<String> {
    let names = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = names.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Standard output on a full disk is an error like any other; a pipe that nobody reads any more is none.
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
        let full = to("exec \"$@\" > /dev/full").expect(1);
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
