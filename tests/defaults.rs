//! A default is never refused: it fits the given keys.

use tidemill::JobError;
use tidemill::job::{ResolvedRun, RunConfig};
use tidemill::streaming_data::order::statistics::OrderStatistics;

use crate::support::device::backend;
use crate::support::outcome::files;
use crate::support::workbench::{SEQ_LEN, causes, config, random};
use crate::support::{Job, Workbench, assert_same};

/// A key, and values of it.
type Key = (&'static str, &'static [&'static str]);

/// A key and a value, alone in a config with nothing but the run's folder, its length, its model
/// and its data. `run.steps` is 200 unless it is the key.
const EVERYWHERE: &[Key] = &[
    ("run.seed", &["0", "9223372036854775807"]),
    ("run.steps", &["1", "2", "10", "19", "20", "21", "1000000000"]),
    ("run.tokens", &["1", "1000", "1000000000000000"]),
    ("run.epochs", &["0.0001", "0.5", "3.0", "1e6"]),
    ("run.chinchilla", &["1e-9", "0.5", "20.0"]),
    ("data.shuffle", &["none", "shard", "window", "full"]),
    ("data.window_samples", &["1", "5", "9223372036854775807"]),
    ("data.cache_mib", &["1", "16777216"]),
    ("data.read_ahead_steps", &["1", "1024"]),
    ("data.document_boundaries", &["ignore", "reset"]),
    ("batch.samples_per_step", &["1", "2", "3", "7", "33", "100000", "16777216"]),
    ("batch.lanes", &["1", "2", "8", "64", "4096"]),
    ("batch.grain_samples", &["1", "3", "1000", "9223372036854775807"]),
    ("batch.microbatch_grains", &["1", "1000000", "9223372036854775807", "\"auto\""]),
    ("optimizer.name", &["adamw", "decoupled_adamw", "lion", "adafactor", "muon"]),
    ("optimizer.learning_rate", &["0.0", "1e-9", "10.0"]),
    ("optimizer.betas", &["[0.0, 0.0]", "[0.999, 0.9999]"]),
    ("optimizer.eps", &["1e-30", "1.0"]),
    ("optimizer.weight_decay", &["0.0", "1.0"]),
    ("optimizer.clip_norm", &["1e-9", "1e9"]),
    ("schedule.name", &["constant", "cosine", "linear"]),
    ("schedule.warmup_steps", &["0", "1", "200"]),
    ("schedule.warmup_tokens", &["0", "1", "100"]),
    ("schedule.warmup_fraction", &["0.0", "0.01", "1.0"]),
    ("schedule.final_fraction", &["0.0", "1.0"]),
    ("schedule.steps", &["1", "5", "20", "1000000000"]),
    ("checkpoint.every_steps", &["1", "9223372036854775807"]),
    ("checkpoint.keep", &["1", "9223372036854775807"]),
    ("evaluation.every_steps", &["1", "9223372036854775807"]),
    ("evaluation.samples", &["1", "9223372036854775807"]),
    ("device.threads", &["1", "3", "9223372036854775807"]),
    ("device.precision", &["fp32"]),
    ("parallel.shard", &["optimizer", "gradients", "parameters"]),
    ("model.vocab_size", &["259", "100000"]),
    ("model.n_layers", &["1", "3"]),
    ("model.recompute", &["block"]),
];

/// The sizes of each family, over a preset.
const FAMILIES: [(&str, &[Key]); 5] = [
    (
        "mamba-10m",
        &[
            ("model.d_model", &["1", "7", "250", "1031"]),
            ("model.d_state", &["1", "256"]),
            ("model.d_conv", &["1", "16"]),
            ("model.expand", &["1", "5"]),
            ("model.dt_rank", &["1", "63"]),
        ],
    ),
    (
        "mamba2-10m",
        &[
            ("model.d_model", &["1", "7", "250", "256", "1031", "2048"]),
            ("model.d_state", &["1", "256"]),
            ("model.d_conv", &["1", "16"]),
            ("model.expand", &["1", "5"]),
            ("model.head_width", &["1", "256"]),
            ("model.n_groups", &["1", "8"]),
        ],
    ),
    (
        "mpt-10m",
        &[
            ("model.d_model", &["1", "7", "250", "256", "512", "1031", "2048"]),
            ("model.n_heads", &["1", "2", "256"]),
            ("model.expansion", &["1", "7"]),
            ("model.max_seq_len", &["17", "100000"]),
            ("model.alibi", &["true", "false"]),
            ("model.no_bias", &["true", "false"]),
            ("model.qk_ln", &["true", "false"]),
            ("model.clip_qkv", &["0.5"]),
            ("model.softmax_scale", &["0.5"]),
            ("model.logit_scale", &["2.0", "\"inv_sqrt_d_model\""]),
        ],
    ),
    (
        "gpt-neo-125m",
        &[
            ("model.d_model", &["1", "7", "250", "1024", "1031"]),
            ("model.n_heads", &["4", "768"]),
            ("model.expansion", &["1", "7"]),
            ("model.max_seq_len", &["17", "100000"]),
            ("model.window_size", &["1", "100000"]),
        ],
    ),
    (
        "llama-10m",
        &[
            ("model.d_model", &["2", "12", "250", "256", "1024", "2048"]),
            ("model.n_heads", &["2", "128"]),
            ("model.n_kv_heads", &["1", "4"]),
            ("model.mlp_width", &["1", "700"]),
            ("model.max_seq_len", &["17", "100000"]),
            ("model.rope_theta", &["10000.0"]),
            ("model.window_size", &["1", "100000"]),
            ("model.qkv_bias", &["true", "false"]),
            ("model.qk_norm", &["true", "false"]),
            ("model.head_width", &["2", "96"]),
            ("model.norm_eps", &["1e-6"]),
        ],
    ),
];

/// The keys that set the length of a run.
const LENGTHS: [&str; 4] = ["run.steps", "run.tokens", "run.epochs", "run.chinchilla"];

/// The resolved config of one that has only the required keys, and `written`.
fn resolved(
    bench: &Workbench,
    preset: &str,
    written: &[(&str, &str)],
) -> Result<ResolvedRun, JobError> {
    let says = |start: &str| written.iter().any(|(key, _)| key.starts_with(start));
    let mut set = vec![
        format!("run.dir={:?}", bench.path("run")),
        format!("data.dataset={:?}", bench.path("data")),
        format!("model.preset={preset}"),
        "device.backend=cpu".to_owned(),
    ];
    if !LENGTHS.into_iter().any(says) {
        set.push("run.steps=200".to_owned());
    }
    if says("evaluation") {
        set.push(format!("evaluation.dataset={:?}", bench.path("validation")));
    }
    set.extend(written.iter().map(|(key, value)| format!("{key}={value}")));
    let run = ResolvedRun::new(RunConfig::parse("", "run.toml", &set)?, 1)?;
    run.check_beginning()?;
    Ok(run)
}

#[test]
fn one_thing_that_is_written_is_never_refused_for_what_is_not() {
    let bench = Workbench::new();
    for (preset, sizes) in FAMILIES {
        for (key, values) in EVERYWHERE.iter().chain(sizes) {
            for value in *values {
                let run = resolved(&bench, preset, &[(key, value)]);
                let run = run.unwrap_or_else(|error| panic!("{preset} {key}={value}: {error}"));
                // The printed config is complete, and gives the same run.
                let printed = run.to_toml();
                let again = RunConfig::parse(&printed, "printed", &[]).expect(&printed);
                let again = ResolvedRun::new(again, 1).expect(&printed);
                assert_eq!(again.to_toml(), printed, "{key}={value}");
            }
        }
    }
}

/// Two given keys may contradict each other; then the error names one of them, and nothing else.
#[test]
fn of_two_things_that_are_written_one_is_named_or_neither_refused() {
    let bench = Workbench::new();
    let mut refused = 0;
    for seed in 0..900 {
        let (preset, sizes) = FAMILIES[seed as usize % FAMILIES.len()];
        let keys: Vec<_> = EVERYWHERE.iter().chain(sizes).collect();
        let pick = |from: usize, salt: u64| (random(seed << 8 | salt) % from as u64) as usize;
        let [(one, ones), (other, others)] = [1_u64, 2].map(|salt| keys[pick(keys.len(), salt)]);
        let is_length = |key: &str| LENGTHS.contains(&key);
        if one == other || (is_length(one) && is_length(other)) {
            continue;
        }
        let written = [(*one, ones[pick(ones.len(), 3)]), (*other, others[pick(others.len(), 4)])];
        if let Err(error) = resolved(&bench, preset, &written) {
            refused += 1;
            let text = causes(&error);
            // An error that concerns one table names the file.
            let told = text.strip_prefix("run.toml: ").unwrap_or(&text);
            let named = told.split(':').next().unwrap_or_default();
            assert!([*one, *other].contains(&named), "seed {seed}: {preset} {written:?}: {text}");
        }
    }
    assert!((1..200).contains(&refused), "{refused} pairs contradict each other");
}

#[test]
fn ten_steps_with_nothing_else_said_are_trained() {
    let bench = Workbench::new();
    let model = "kind = \"mamba\"\nd_model = 4\nn_layers = 1\nd_state = 2\nd_conv = 2\nexpand = 1";
    let config =
        format!("[run]\ndir = \"run\"\nsteps = 10\n[model]\n{model}\n[data]\ndataset = \"data\"");
    bench.write("ten.toml", config);
    bench.tidemill(&["train", "ten.toml", "-w", "1"]).expect(0);
    assert_eq!(bench.outcome("run").steps.len(), 10);
    // A given value that no run can have is refused.
    let set = ["--set", "schedule.warmup_steps=11", "--set", "run.dir=other"];
    let refused = bench.tidemill(&[&["train", "ten.toml", "-w", "1"], &set[..]].concat());
    refused.refused(1, &["schedule.warmup_steps: expected at most the 10 steps", "found 11"]);
    assert!(!bench.path("other").exists());
}

/// A default is part of the numbers too: it keeps the value from the beginning of the run, and
/// `run.toml` records it.
#[test]
fn a_warm_up_that_was_not_written_stays_when_the_run_is_made_longer() {
    let bench = Workbench::new();
    let begun = ["run.steps=3", "checkpoint.every_steps=1", "checkpoint.keep=9"];
    let longer = ["run.steps=8", "checkpoint.every_steps=1", "checkpoint.keep=9"];
    let config = crate::support::workbench::config().replace("warmup_steps = 2", "");
    let train = |dir: &str, set: &[&str]| {
        let job = Job { dir, workers: 2, set };
        bench.try_train_with(&config, job).unwrap_or_else(|error| panic!("{}", causes(&error)));
        bench.outcome(dir)
    };
    train("run", &begun);
    let found = train("run", &longer);
    let spelled = [&longer[..], &["schedule.steps=3", "schedule.warmup_steps=3"]].concat();
    assert_same(&found, &train("reference", &spelled), "a longer run");
    // So does the config that the run has written down.
    let written = String::from_utf8(files(&bench.path("run"))["run.toml"].clone()).unwrap();
    let more = [format!("run.dir={:?}", bench.path("run")), "run.steps=9".to_owned()];
    let again = RunConfig::parse(&written, "run/run.toml", &more).unwrap();
    assert_eq!((again.schedule.steps, again.schedule.warmup_steps), (Some(3), Some(3)));
    let again = ResolvedRun::new(again, 1).unwrap();
    tidemill::job::train(again, tidemill::job::TrainOptions::threads(1)).unwrap();
}

/// Learned positions reach to the end of the samples where a preset sets their number, but not
/// where the user does.
#[test]
fn a_preset_has_as_many_positions_as_the_samples() {
    let bench = Workbench::new();
    let long = bench.write("long.txt", crate::support::workbench::text(3, 3000));
    let settings = ["--seq-len", "2100", "--output", "long"];
    let input = ["prepare", "--input", long.to_str().unwrap()];
    bench.tidemill(&[&input[..], &settings].concat()).expect(0);
    let dataset = format!("{:?}", bench.path("long"));
    let written: &[(&str, &str)] = &[("data.dataset", &dataset)];
    for (preset, positions) in [("gpt-neo-125m", 2100), ("mpt-125m", 2100), ("mpt-10m", 2048)] {
        let run = resolved(&bench, preset, written).unwrap();
        assert_eq!(run.config.model.max_seq_len, Some(positions), "{preset}");
    }
    let error = resolved(&bench, "mpt-125m", &[written[0], ("model.max_seq_len", "2048")]);
    let error = error.unwrap_err().to_string();
    assert!(error.starts_with("model.max_seq_len: expected at least 2100"), "{error}");
}

/// A model trains on samples as long as they are, and on the order that windows give; a run notes
/// it if another length or a better order may be wanted.
#[test]
fn lengths_and_orders_that_may_surprise_are_remarked() {
    let bench = Workbench::new();
    let remarks = |preset: &str, written: &[(&str, &str)]| {
        let run = resolved(&bench, preset, written).unwrap_or_else(|error| panic!("{error}"));
        (run.remarks.join("; "), run)
    };
    for (preset, written, part) in [
        ("gpt-neo-125m", None, "samples have 17 tokens and the model has 2048 positions"),
        ("gpt-neo-125m", Some("18"), "model.max_seq_len = 17 fewer positions"),
        ("gpt-neo-125m", Some("17"), ""),
        ("mpt-10m", None, ""),
        ("mpt-10m", Some("17"), ""),
        ("mpt-10m", Some("16"), "model.max_seq_len is 16 and samples have 17 tokens"),
        ("llama-1b", Some("4096"), "model.max_seq_len is 4096 and samples have 17 tokens"),
        ("mamba-10m", None, ""),
    ] {
        let small = [("model.n_layers", "1"), ("model.d_model", "64")];
        let length = written.map(|length| ("model.max_seq_len", length));
        let keys: Vec<_> = small.into_iter().chain(length).collect();
        let (found, _) = remarks(preset, &keys);
        assert!(found.contains(part), "{preset} {written:?}: {found:?}");
        assert_eq!(found.is_empty(), part.is_empty(), "{preset} {written:?}: {found:?}");
    }
    let batch = std::num::NonZeroU64::new(32).unwrap();
    for (order, window, is_named) in [
        ("window", "5", true),
        ("window", "90", true),
        ("window", "16384", false),
        ("full", "5", false),
    ] {
        let written = [("data.shuffle", order), ("data.window_samples", window)];
        let (found, run) = remarks("mamba-10m", &written);
        assert_eq!(found.contains(&format!("{window} neighbours at a time")), is_named, "{found}");
        let measured = OrderStatistics::new(&run.data, batch, None).effective_batch;
        assert_eq!(measured < 16.0, is_named, "{order} {window}: worth {measured}");
    }
    let set = ["model.preset=mpt-125m", "model.n_layers=1", "model.d_model=16", "model.n_heads=1"];
    let set = set.map(|key| ["--set", key]).concat();
    let config = "[run]\ndir = \"run\"\nsteps = 1\n[model]\n[data]\ndataset = \"data\"";
    bench.write("short.toml", config);
    let trained =
        bench.tidemill(&[&["train", "short.toml", "-n", "2", "-w", "1"], &set[..]].concat());
    let trained = trained.expect(0);
    let notes =
        trained.stderr.matches("note: samples have 17 tokens and the model has 2048").count();
    assert_eq!(notes, 1, "of two processes one says it: {}", trained.stderr);
}

/// A grain longer than every lane is the whole lane. In an evaluation it keeps its length, and its
/// loss is that of a lane with room for all of it, to the bit.
#[test]
fn a_grain_of_a_billion_samples_takes_no_more_room_than_a_lane() {
    let bench = Workbench::new();
    let validation = format!("evaluation.dataset={:?}", bench.path("validation"));
    let train = |dir: &str, set: &[&str]| {
        let set = [&[validation.as_str(), "evaluation.samples=45", "run.steps=2"], set].concat();
        bench.train(Job { dir, workers: 1, set: &set })
    };
    let billion = "batch.grain_samples=1000000000";
    let lane = train("lane", &["batch.grain_samples=6"]);
    let longer = train("longer", &[billion]);
    assert_eq!(longer.latest()["model.safetensors"], lane.latest()["model.safetensors"]);
    assert_eq!(longer.steps, lane.steps);
    // Parameters that never change are the same for any lanes.
    let fixed = "optimizer.learning_rate=0.0";
    let whole = train("whole", &[fixed, "batch.lanes=1", "batch.grain_samples=45"]);
    let pieces = train("pieces", &[fixed, billion]);
    assert_eq!(pieces.evaluations, whole.evaluations);
}

/// Threads are not part of the numbers: a run has at most as many as cores, and says so once.
#[test]
fn more_compute_threads_than_cores_are_said_once() {
    let bench = Workbench::new();
    for processes in ["1", "2"] {
        let dir = format!("run.dir=run-{processes}");
        let set = ["--set", "device.threads=1000", "--set", "run.steps=2", "--set", &dir];
        let world = ["train", "run.toml", "-w", "1", "-n", processes];
        let finished = bench.tidemill(&[&world[..], &set].concat()).expect(0);
        let said = finished.stderr.matches("1000 compute threads (device.threads)").count();
        // GPUs have no compute threads.
        assert_eq!(said, usize::from(backend() == "cpu"), "{}", finished.stderr);
    }
}

/// By parameters, which `inspect` counts, and with a warm-up of the schedule's tenth.
#[test]
fn a_length_by_parameters_comes_out_as_steps() {
    let bench = Workbench::new();
    let text = config().replace("steps = 5\n", "").replace("warmup_steps = 2\n", "");
    bench.write("long.toml", &text);
    let set = ["--set", "run.chinchilla=0.02", "--set", "schedule.warmup_fraction=0.1"];
    let train = [&["train", "long.toml", "-w", "1"], &set[..]].concat();
    let printed = bench.tidemill(&[&train[..], &["--print-config"]].concat()).expect(0).stdout;
    let number = |key: &str| -> u64 {
        let key = format!("{key} = ");
        let found = printed.lines().find_map(|line| line.strip_prefix(&key)).expect(&key);
        found.parse().expect(found)
    };
    bench.tidemill(&train).expect(0);
    let last = format!("run/checkpoints/step-{:08}", number("steps"));
    let said = bench.tidemill(&["inspect", &last, "--format", "json"]).expect(0).stdout;
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    let parameters = said["model"]["parameters"].as_u64().expect("a number");
    let tokens = (0.02 * 20.0 * parameters as f64).ceil() as u64;
    let tokens_per_step = number("samples_per_step") * SEQ_LEN as u64;
    assert_eq!(number("steps"), tokens.div_ceil(tokens_per_step));
    assert_eq!(number("warmup_steps"), number("steps").div_ceil(10));
    assert_eq!(said["step"], number("steps"));
}
