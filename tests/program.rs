//! The standard output of the program, and that its output and files can be used again.
//!
//! Seen red: with a line for people beside the JSON, with a config that loses a key when it is printed, and with a
//! sampler that ignores `--temperature 0`.

use serde_json::Value;
use tidemill::streaming_data::DataSet;

use crate::support::outcome::files;
use crate::support::workbench::SEQ_LEN;
use crate::support::{Workbench, assert_same};

fn trained() -> Workbench {
    let bench = Workbench::new();
    bench.tidemill(&["train", "run.toml", "-w", "2"]).expect(0);
    bench
}

#[test]
fn json_is_alone_on_standard_output() {
    let bench = trained();
    let arguments = ["prepare", "--input", "data-text", "--output", "again", "--seq-len", "17"];
    let json = |arguments: &[&str]| {
        bench.tidemill(&[arguments, &["--format", "json"]].concat()).expect(0).json()
    };
    let prepared = json(&arguments);
    assert_eq!(prepared["documents"], 9);
    assert!(prepared.get("rejected").is_none(), "{prepared}");
    let filter = ["prepare", "--input", "data-text", "--output", "good", "--seq-len", "17"];
    bench.write("mine.toml", "[gopher]\nmin_words = 0\n[repetition]\n");
    bench.write("keys.txt", "nowhere.txt\n");
    let left_out = ["--filter", "mine.toml", "--dedup", "near", "--exclude", "keys.txt"];
    let filtered = json(&[&filter[..], &left_out].concat());
    let counted = ["documents", "copies", "near_copies"].map(|key| filtered[key].as_u64().unwrap());
    assert_eq!((counted.iter().sum(), counted[0] > 0), (9_u64, true));
    assert_eq!(filtered["unused_exclusions"], serde_json::json!(["nowhere.txt"]));
    assert_eq!((&filtered["excluded"], &filtered["rejected"]), (&0.into(), &serde_json::json!({})));
    let data = json(&["inspect", "good"]);
    assert_eq!(data["selection"]["dedup"]["kind"], "near");
    assert_eq!(data["selection"]["filters"][0]["gopher"]["min_words"], 0);
    let data = json(&["inspect", "again"]);
    assert_eq!((&data["kind"], &data["seq_len"]), (&"data set".into(), &17.into()));
    assert_eq!(data["samples"], prepared["samples"]);
    let run = json(&["inspect", "run"]);
    assert_eq!((&run["kind"], &run["steps_done"]), (&"run".into(), &5.into()));
    assert_eq!(run["checkpoints"], serde_json::json!([2, 4, 5]));
    let checkpoint = json(&["inspect", "run/checkpoints/step-00000004"]);
    assert_eq!((&checkpoint["kind"], &checkpoint["step"]), (&"checkpoint".into(), &4.into()));
    let generated =
        json(&["generate", "--model", "run", "--prompt", "the tide", "--max-new-tokens", "4"]);
    assert!(generated["tokens"].as_array().unwrap().len() <= 4, "{generated}");
    assert!(generated["text"].is_string());
    let read = json(&["bench", "data", "data", "--batch", "8", "--seconds", "0.01"]);
    assert!(read["samples_per_second"].as_f64().unwrap() > 0.0);
    assert!(read["first_batch_seconds"].as_f64().unwrap() > 0.0);
    let sizes = ["--seq-len", "8", "--samples-per-step", "2", "--steps", "1", "-w", "2"];
    let lengths = ["--prompt-tokens", "5", "--new-tokens", "3", "--batches", "3,1"];
    let written = ["bench", "generate", "--against", "mamba-10m", "--plot", "p.svg", "p.png"];
    let written = json(&[&written, &lengths[..]].concat());
    assert_eq!(written["models"][1]["parameters"], 4_552_960);
    let rows = written["models"][0]["rows"].as_array().unwrap();
    assert_eq!((&rows[0]["batch"], &rows[1]["batch"]), (&1.into(), &3.into()));
    assert!(rows[1]["decode_tokens_per_second"].as_f64().unwrap() > 0.0, "{written}");
    assert!(bench.path("p.svg").exists() && bench.path("p.png").exists());
    let train = ["bench", "train", "--preset", "mamba-10m"];
    for (shard, flags) in [("optimizer", &[][..]), ("parameters", &["--shard", "parameters"])] {
        let trained = json(&[&train, &sizes[..], flags].concat());
        assert!(trained["tokens_per_second"].as_f64().unwrap() > 0.0);
        assert_eq!((&trained["shard"], &trained["workers"]), (&shard.into(), &2.into()));
    }
}

/// A tokenizer is the same to the byte for any number of threads and any form of the documents, and
/// `prepare` accepts it.
#[test]
fn a_tokenizer_is_trained_on_documents() {
    let bench = Workbench::new();
    std::fs::create_dir(bench.path("lines")).unwrap();
    let texts: Vec<String> = files(&bench.path("data-text"))
        .into_values()
        .map(|text| String::from_utf8(text).unwrap())
        .collect();
    let lines = texts.iter().map(|text| serde_json::json!({ "text": text }).to_string() + "\n");
    bench.write("lines/all.jsonl", lines.collect::<String>());
    let train = |input: &str, output: &str, more: &[&str]| {
        let arguments = ["tokenizer", "--input", input, "--output", output, "--vocab-size", "290"];
        bench.tidemill(&[&arguments[..], more].concat())
    };
    let json = train("data-text", "one.json", &["-w", "1", "--format", "json"]).expect(0).json();
    assert_eq!((&json["documents"], &json["vocab_size"]), (&9.into(), &290.into()));
    train("data-text", "three.json", &["-w", "3"]).expect(0);
    train("lines", "made/here/lines.json", &[]).expect(0);
    let read = |name| std::fs::read(bench.path(name)).unwrap();
    assert!(
        read("one.json") == read("three.json") && read("one.json") == read("made/here/lines.json")
    );
    let prepare = ["prepare", "--input", "data-text", "--output", "own", "--seq-len", "17"];
    let prepare = [&prepare[..], &["--tokenizer", "one.json", "--format", "json"]].concat();
    let prepared = bench.tidemill(&prepare).expect(0).json();
    let bytes: usize = texts.iter().map(String::len).sum();
    assert!(prepared["tokens"].as_u64().unwrap() < bytes as u64 / 2, "{prepared} of {bytes}");
    assert_eq!(prepared["vocab_size"], 290);

    train("data-text", "one.json", &[]).refused(1, &["--output", "one.json", "a new file"]);
    train("nowhere", "no.json", &[]).refused(1, &["nowhere"]);
    train("data-text", "no.json", &["--special-token", ""]).refused(1, &["--special-token"]);
    train("data", "no.json", &["--glob", "*.parquet"]).refused(1, &["data"]);
    let small = ["tokenizer", "--input", "lines", "--output", "no.json", "--vocab-size", "256"];
    bench.tidemill(&small).refused(1, &["--vocab-size", "at least 257", "256"]);
    assert!(!bench.path("no.json").exists());
}

/// Rates of sums that were compared, over threads and over processes; for one worker there is nothing to exchange.
#[test]
fn an_exchange_between_workers_is_measured_by_the_size_of_a_bucket() {
    let bench = Workbench::new();
    let collective = |arguments: &[&str]| {
        bench.tidemill(&[&["bench", "collective", "--backend", "cpu"], arguments].concat())
    };
    let sizes = ["--megabytes", "3", "--buckets", "1,2", "--rounds", "1"];
    for (threads, processes, through) in
        [("2", "1", "memory"), ("3", "1", "memory"), ("1", "2", "host"), ("2", "2", "host")]
    {
        let workers = ["-w", threads, "-n", processes, "--format", "json"];
        let result = collective(&[&sizes, &workers[..]].concat()).expect(0).json();
        let [threads, processes] = [threads, processes].map(|n| n.parse::<u64>().unwrap());
        assert_eq!(result["workers"], threads * processes);
        assert_eq!(result["processes"], processes);
        assert_eq!((&result["through"], &result["arena_mebibytes"]), (&through.into(), &3.into()));
        let rows = result["buckets"].as_array().unwrap();
        for (row, bucket) in rows.iter().zip([1, 2]) {
            assert_eq!(row["bucket_mebibytes"], bucket);
            for key in ["summed_gigabytes_per_second", "gathered_gigabytes_per_second"] {
                assert!(row[key].as_f64().unwrap() > 0.0, "{key}: {result}");
            }
            assert_eq!(row["nccl_alone"], Value::Null, "{result}");
        }
        assert_eq!(rows.len(), 2, "{result}");
    }
    let words = collective(&[&sizes[..], &["-w", "2"]].concat()).expect(0);
    assert!(words.stdout.contains("threads read each other's memory"), "{words:?}");
    assert_eq!((words.stdout.lines().count(), words.stderr.as_str()), (5, ""), "{words:?}");
    let two = |arguments: &[&'static str]| collective(&[&["-w", "2"], arguments].concat());
    collective(&["-w", "1"]).refused(1, &["-w: expected at least 2 workers", "found 1"]);
    collective(&["-w", "0", "-n", "3"]).refused(1, &["-w: expected at least 1 worker"]);
    collective(&["-w", "18446744073709551615", "-n", "9"]).refused(1, &["-w", "256"]);
    collective(&["-n", "0"]).refused(1, &["-n: expected at least 1 process"]);
    collective(&["-n", "18446744073709551615"]).refused(1, &["-n: expected at most 1024"]);
    collective(&["-n", "2", "--hosts", "nowhere"]).refused(2, &["cannot be used with"]);
    two(&["--megabytes", "0"]).refused(2, &["--megabytes"]);
    two(&["--megabytes", "18446744073709551615"]).refused(1, &["--megabytes: expected at most"]);
    two(&["--megabytes", "8", "--buckets", "4,16"]).refused(1, &["--buckets", "at most 8", "16"]);
    for list in ["1,,2", "0", "1,x", ""] {
        two(&["--buckets", list]).refused(2, &["--buckets"]);
    }
    two(&["--rounds", "0"]).refused(2, &["--rounds"]);
}

/// The output of `bench generate` is the same to the byte when it is run again, and so is the
/// picture.
#[test]
fn an_earlier_measurement_is_drawn_again() {
    let bench = Workbench::new();
    let generate = |arguments: &[&str]| {
        bench.tidemill(&[&["bench", "generate", "--format", "json"], arguments].concat())
    };
    let lengths = ["--prompt-tokens", "5", "--new-tokens", "3", "--batches", "3,1"];
    let measured = generate(&[&lengths[..], &["--plot", "p.svg"]].concat()).expect(0).stdout;
    std::fs::write(bench.path("p.json"), &measured).unwrap();
    let again = generate(&["--from", "p.json", "--plot", "again.svg"]).expect(0).stdout;
    assert_eq!(again, measured);
    let [first, second] =
        ["p.svg", "again.svg"].map(|name| std::fs::read_to_string(bench.path(name)).unwrap());
    assert_eq!(first, second);
    assert_eq!(first.matches("<circle").count(), 6, "two sizes in three charts");
    let tokens = r#""decode_tokens_per_second":1e308"#;
    let (before, after) = measured.split_once(r#""decode_tokens_per_second":"#).unwrap();
    let after = after.split_once(',').unwrap().1;
    std::fs::write(bench.path("huge.json"), format!("{before}{tokens},{after}")).unwrap();
    generate(&["--from", "huge.json", "--plot", "huge.svg"]).expect(0);
    let huge = std::fs::read_to_string(bench.path("huge.svg")).unwrap();
    assert_eq!(huge.matches("<circle").count(), 5, "what nothing can measure is not drawn");
    generate(&["--from", "p.json", "--batches", "1"]).refused(2, &["--from", "--batches"]);
    generate(&["--from", "p.json", "--backend", "cpu"]).refused(2, &["--from", "--backend"]);
    generate(&["--from", "none.json"]).refused(1, &["none.json"]);
    std::fs::write(bench.path("p.json"), "{}").unwrap();
    generate(&["--from", "p.json"]).refused(1, &["p.json", "device"]);
}

/// A step of attention reads the keys and values of every sequence; memory is measured while they
/// are held.
#[cfg(target_os = "linux")]
#[test]
fn memory_of_generation_grows_by_what_sequences_remember() {
    let bench = Workbench::new();
    let sizes = ["--prompt-tokens", "62", "--new-tokens", "2", "--batches", "1,64"];
    let arguments = ["bench", "generate", "--preset", "mpt-10m", "--format", "json"];
    let measured = bench.tidemill(&[&arguments[..], &sizes, &["--backend", "cpu"]].concat());
    let measured = measured.expect(0).json();
    let memory = |row: usize| measured["models"][0]["rows"][row]["memory_bytes"].as_u64().unwrap();
    // Layers, keys and values, width, bytes of a number.
    let position = 8 * 2 * 256 * 4;
    let remembered = 63 * 64 * position;
    assert!(memory(1) > memory(0) + remembered, "{measured}");
}

/// `bench kernels` measures what its help lists.
#[test]
fn every_kernel_is_measured() {
    let bench = Workbench::new();
    let help = bench.tidemill(&["bench", "kernels", "--help"]).expect(0).stdout;
    let listed: Vec<&str> = help.split([' ', ',', '\n']).collect();
    let sizes = ["--backend", "cpu", "--shape", "1,8,512,4", "--repeats", "1", "--format", "json"];
    let rows = bench.tidemill(&[&["bench", "kernels"], &sizes[..]].concat()).expect(0).json();
    let rows: Vec<[&str; 2]> = rows
        .as_array()
        .unwrap()
        .iter()
        .inspect(|row| assert!(row["milliseconds"].as_f64().unwrap() > 0.0, "{row}"))
        .map(|row| ["kernel", "direction"].map(|key| row[key].as_str().unwrap()))
        .collect();
    let in_training =
        ["selective_scan", "head_scan", "causal_conv1d_silu", "attention", "rms_norm"];
    let variants = [
        "selective_scan_documents",
        "causal_conv1d_silu_documents",
        "attention_alibi",
        "attention_shared_keys",
    ];
    let transformer = ["layer_norm", "rms_norm_heads", "gelu", "bias", "embedding"];
    for kernel in in_training.into_iter().chain(variants).chain(transformer) {
        assert!(listed.contains(&kernel), "{kernel} is not in {help}");
        for direction in ["forward", "backward"] {
            assert!(rows.contains(&[kernel, direction]), "{kernel} {direction}: {rows:?}");
        }
    }
    for kernel in ["cross_entropy", "adamw", "accumulate", "sums_of_squares", "matmul"] {
        assert!(listed.contains(&kernel), "{kernel} is not in {help}");
        assert!(rows.iter().any(|row| row[0] == kernel), "{kernel}: {rows:?}");
    }
}

/// The same as text: standard error has the progress, standard output the result.
#[test]
fn words_for_people() {
    let bench = trained();
    let data = bench.tidemill(&["inspect", "data"]).expect(0);
    assert!(data.stdout.contains("seq len: 17") && data.stderr.is_empty(), "{data:?}");
    let run = bench.tidemill(&["inspect", "run"]).expect(0);
    assert!(run.stdout.contains("steps done: 5"), "{run:?}");
    for arguments in [&["--help"][..], &["train", "--help"], &["--version"]] {
        let help = bench.tidemill(arguments).expect(0);
        assert!(!help.stdout.is_empty() && help.stderr.is_empty(), "{help:?}");
    }
}

#[test]
fn a_printed_config_is_the_same_run() {
    let bench = Workbench::new();
    let groups = "optimizer.groups=[{match=[\"*.norm.*\"], learning_rate_factor=0.5}]";
    let betas = "optimizer.betas=[0.8, 0.9]";
    let set = ["--set", betas, "--set", groups, "--set", "batch.microbatch_grains=\"auto\""];
    let print = |config: &str, set: &[&str]| {
        bench.tidemill(&[&["train", config, "--print-config"], set].concat()).expect(0).stdout
    };
    let printed = print("run.toml", &set);
    for part in [
        "betas = [0.8, 0.9]",
        "[[optimizer.groups]]\nmatch = [\"*.norm.*\"]\nlearning_rate_factor = 0.5\n",
        "seed = 17",
        "vocab_size = 259",
        "dt_rank = 2",
        "lanes = 8",
        "steps = 5",
    ] {
        assert!(printed.contains(part), "{part:?} is not in {printed}");
    }
    bench.write("printed.toml", &printed);
    assert_eq!(print("printed.toml", &[]), printed);
    assert!(!bench.path("run").exists(), "printing is not running");
    // The run writes the same config into its folder, and both give the requested run.
    bench.tidemill(&[&["train", "run.toml", "-w", "2"], &set[..]].concat()).expect(0);
    let reference = bench.outcome("run");
    assert_eq!(std::fs::read_to_string(bench.path("run/run.toml")).unwrap(), printed);
    std::fs::rename(bench.path("run"), bench.path("first")).unwrap();
    bench.tidemill(&["train", "printed.toml", "-w", "1"]).expect(0);
    assert_same(&bench.outcome("run"), &reference, "the printed config");
}

/// Presets, epochs and tokens are resolved to sizes and steps.
#[test]
fn a_printed_config_shows_what_it_comes_to() {
    let bench = Workbench::new();
    bench.write(
        "short.toml",
        "[run]\ndir = \"r\"\nepochs = 2\n[model]\npreset = \"mamba-10m\"\nn_layers = 3\n[data]\ndataset = \"data\"\n",
    );
    let printed = bench.tidemill(&["train", "short.toml", "--print-config"]).expect(0).stdout;
    let samples = DataSet::open(bench.path("data")).unwrap().samples();
    let steps = format!("steps = {}\n", (2 * samples).div_ceil(32));
    for part in
        [&steps, "d_model = 256", "n_layers = 3", "samples_per_step = 32", "warmup_steps = 20"]
    {
        assert!(printed.contains(part), "{part:?} is not in {printed}");
    }
    bench.write("printed.toml", &printed);
    let again = bench.tidemill(&["train", "printed.toml", "--print-config"]).expect(0).stdout;
    assert_eq!(again, printed);
}

#[test]
fn greedy_generation_is_deterministic() {
    let bench = trained();
    let generate = |arguments: &[&str]| {
        let all = [
            "generate",
            "--model",
            "run",
            "--max-new-tokens",
            "12",
            "--ignore-eos",
            "--format",
            "json",
        ];
        let json = bench.tidemill(&[&all, arguments].concat()).expect(0).json();
        let tokens = json["tokens"].as_array().unwrap().iter().map(|token| token.as_u64().unwrap());
        (tokens.collect::<Vec<_>>(), json["text"].clone())
    };
    let greedy = generate(&["--prompt", "tide", "--temperature", "0"]);
    assert_eq!(greedy.0.len(), 12);
    assert_eq!(generate(&["--prompt", "tide", "--temperature", "0", "--seed", "5"]), greedy);
    // The tokens of "tide" are its bytes.
    let tokens = ["--tokens", "116,105,100,101", "--temperature", "0"];
    assert_eq!(generate(&tokens), greedy);
    assert_eq!(generate(&["--prompt", "tide", "--top-k", "1"]), greedy);
    let drawn = |seed| generate(&["--prompt", "tide", "--temperature", "1.5", "--seed", seed]);
    assert_eq!(drawn("1"), drawn("1"));
    assert_ne!(drawn("1"), drawn("2"));
    // As text it is the same text.
    let arguments = [
        "generate",
        "--model",
        "run",
        "--max-new-tokens",
        "12",
        "--ignore-eos",
        "--prompt",
        "tide",
    ];
    let text = bench.tidemill(&[&arguments[..], &["--temperature", "0"]].concat()).expect(0).stdout;
    assert_eq!(Some(text.strip_suffix('\n').unwrap()), greedy.1.as_str());
}

/// Many prompts get, in order, what each gets alone, for any number at a time.
#[test]
fn many_prompts_at_once() {
    let bench = trained();
    let prompts = [
        r#"{"prompt": "the tide"}"#,
        r#"{"tokens": [116, 105], "id": "short"}"#,
        "",
        r#"{"prompt": "a mill by the sea turns with the tide and grinds", "id": 7}"#,
        r#"{"tokens": [109]}"#,
    ];
    bench.write("prompts.jsonl", prompts.join("\n"));
    let generate = |arguments: &[&str]| {
        let all = ["generate", "--model", "run", "--max-new-tokens", "10", "--format", "json"];
        let finished = bench.tidemill(&[&all, arguments].concat()).expect(0);
        let lines = finished.stdout.lines().map(|line| serde_json::from_str(line).unwrap());
        lines.collect::<Vec<Value>>()
    };
    let greedy = generate(&["--input", "prompts.jsonl", "--temperature", "0"]);
    assert_eq!(greedy.len(), 4);
    assert!(greedy[0].get("id").is_none());
    assert_eq!((&greedy[1]["id"], &greedy[2]["id"]), (&"short".into(), &7.into()));
    let alone = generate(&["--prompt", "the tide", "--temperature", "0"]);
    assert_eq!(alone, greedy[..1]);
    let alone = generate(&["--tokens", "109", "--temperature", "0"]);
    assert_eq!(alone, greedy[3..]);
    let drawn = |batch: &[&str]| {
        let all = ["--input", "prompts.jsonl", "--seed", "5", "--min-p", "0.01"];
        generate(&[&all, batch].concat())
    };
    let three = drawn(&["--batch", "3"]);
    assert_eq!(drawn(&["--batch", "1"]), three);
    assert_eq!(drawn(&[]), three);
    assert_ne!(three, greedy);
    // The draws of a prompt do not depend on its line; a repeated prompt gets new draws.
    let alone = generate(&["--tokens", "109", "--seed", "5", "--min-p", "0.01"]);
    assert_eq!(alone, three[3..]);
    bench.write("prompts.jsonl", [prompts[4], prompts[0], prompts[4], prompts[1]].join("\n"));
    for batch in ["1", "3"] {
        let moved = drawn(&["--batch", batch]);
        assert_eq!([&moved[0], &moved[1], &moved[3]], [&three[3], &three[0], &three[1]]);
        assert_ne!(moved[2], moved[0], "equal prompts draw apart");
    }
    bench.write("prompts.jsonl", prompts.join("\n"));
    // For people, each under its name.
    let arguments = ["generate", "--model", "run", "--input", "prompts.jsonl"];
    let words = bench.tidemill(&arguments).expect(0).stdout;
    for name in ["--- prompts.jsonl: line 1\n", "--- short\n", "--- 7\n"] {
        assert!(words.contains(name), "{words}");
    }
    // Scores too are the same for any number of lines at a time.
    let lines = [
        r#"{"tokens": [1, 2, 3], "id": "a"}"#,
        r#"{"text": "the tide mill"}"#,
        r#"{"tokens": [9, 8]}"#,
    ];
    bench.write("texts.jsonl", lines.join("\n"));
    let score = |batch: &str| {
        let arguments = ["score", "--model", "run", "--input", "texts.jsonl", "--batch", batch];
        bench.tidemill(&arguments).expect(0).stdout
    };
    assert_eq!(score("1").lines().count(), 3);
    assert_eq!(score("1"), score("3"));
    assert_eq!(score("2"), score("3"));
}

/// The scores of the evaluated samples add up to the evaluated loss.
#[test]
fn scores_are_the_negative_losses() {
    const SAMPLES: usize = 10;
    let bench = Workbench::new();
    let samples = format!("evaluation={{dataset = \"validation\", samples = {SAMPLES}}}");
    bench.tidemill(&["train", "run.toml", "-w", "2", "--set", &samples]).expect(0);
    // The stream: each document's bytes, then 257; a row begins with the last token of the row before.
    let mut stream: Vec<u32> = Vec::new();
    for (_, bytes) in files(&bench.path("validation-text")) {
        stream.extend(bytes.into_iter().map(u32::from));
        stream.push(257);
    }
    let row = |index: usize| &stream[index * SEQ_LEN..=(index + 1) * SEQ_LEN];
    let lines: String =
        (0..SAMPLES).map(|index| format!("{{\"tokens\": {:?}}}\n", row(index))).collect();
    bench.write("rows.jsonl", lines);
    let scored = bench.tidemill(&["score", "--model", "run", "--input", "rows.jsonl"]).expect(0);
    let mut sum = 0.0;
    for line in scored.stdout.lines() {
        let score: Value = serde_json::from_str(line).unwrap();
        let numbers = score["logprobs"].as_array().unwrap();
        assert_eq!(numbers.len(), SEQ_LEN);
        let line_sum: f64 = numbers.iter().map(|number| number.as_f64().unwrap()).sum();
        assert!((line_sum - score["sum"].as_f64().unwrap()).abs() < 1e-6);
        sum += line_sum;
    }
    assert_eq!(scored.stdout.lines().count(), SAMPLES);
    let evaluated = bench.outcome("run").evaluations[0];
    let (loss, mean) = (f64::from_bits(evaluated[1]), -sum / (SAMPLES * SEQ_LEN) as f64);
    assert!((loss - mean).abs() < 1e-5 * loss, "{loss} {mean}");
    // Text is its bytes.
    bench.write("text.jsonl", "{\"text\": \"mill\"}\n\n{\"tokens\": [109, 105, 108, 108]}");
    let twice = bench.tidemill(&["score", "--model", "run", "--input", "text.jsonl"]).expect(0);
    let lines: Vec<&str> = twice.stdout.lines().collect();
    assert!(lines.len() == 2 && lines[0] == lines[1], "{twice:?}");
}

#[test]
fn a_finished_run_has_nothing_left_to_do() {
    let bench = trained();
    let checkpoints = files(&bench.path("run"));
    for world in [["-w", "1"], ["-n", "2"]] {
        let again = bench.tidemill(&[&["train", "run.toml"], &world[..]].concat()).expect(0);
        assert!(again.stdout.starts_with("done: 5 steps"), "{again:?}");
        assert!(again.stdout.contains("run/checkpoints/step-00000005"), "{again:?}");
        assert!(files(&bench.path("run")) == checkpoints, "something was written");
    }
}
