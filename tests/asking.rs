//! Tasks that a run is asked while it trains: the same answers for any number of workers, a line once however often the run is
//! started, and those that `evaluate` has of the checkpoint.

use serde_json::Value;

use crate::support::Workbench;
use crate::support::workbench::config;

const ENDS: &str = r#"
kind = "multiple_choice"
context = "Q: {goal}\nA:"
choices = "{ends}"
gold = "label"
metrics = ["acc", "acc_norm"]
source = { file = "ends" }
"#;

const WORDS: &str = r#"
kind = "language_modelling"
context = '{goal|before_last " "}'
continuation = '{goal|after_last " "}'
metrics = ["acc", "perplexity"]
source = { file = "ends" }
"#;

const TASKS: &str = r#"
[evaluation]
dataset = "validation"
every_steps = 2
samples = 7

[[evaluation.tasks]]
task = "ends.toml"
data = "questions"

[[evaluation.tasks]]
task = "words.toml"
data = "questions"
limit = 3
"#;

fn bench() -> Workbench {
    let bench = Workbench::new();
    let questions = (0..5).map(|index| {
        let goal = format!("{} mill {}", "tide ".repeat(index), "x".repeat(index + 1));
        let label = index % 3;
        serde_json::json!({ "goal": goal, "ends": ["wheel", "a", "größer"], "label": label })
    });
    let questions: Vec<String> = questions.map(|it| it.to_string()).collect();
    bench.write("questions/ends.jsonl", questions.join("\n"));
    bench.write("ends.toml", ENDS);
    bench.write("words.toml", WORDS);
    bench.write("run.toml", config() + TASKS);
    bench
}

/// The lines of `evaluation.jsonl`.
fn lines(bench: &Workbench, run: &str) -> Vec<String> {
    let text = std::fs::read_to_string(bench.path(run).join("evaluation.jsonl")).unwrap();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn tasks_have_the_same_answers_for_any_workers_and_after_a_resume() {
    let bench = bench();
    let train = |dir: &str, more: &[&str]| {
        let dir = format!("run.dir={dir}");
        let set = ["train", "run.toml", "--set", &dir, "--set", "schedule.steps=5"];
        bench.tidemill(&[&set[..], more].concat()).expect(0)
    };
    let told = train("one", &["-w", "1"]).stderr;
    assert!(told.contains("step 4: ends: acc "), "{told}");
    assert!(told.contains("note: words: acc is not measured while a run trains"), "{told}");
    let reference = lines(&bench, "one");
    assert_eq!(reference.len(), 3, "after 2, 4 and 5 steps: {reference:?}");
    for (index, more) in [
        &["-w", "2"][..],
        &["-n", "2", "-w", "1"],
        &["-w", "1", "--set", "batch.microbatch_grains=1"],
        &["-w", "2", "--set", "parallel.shard=parameters"],
    ]
    .into_iter()
    .enumerate()
    {
        let dir = format!("other-{index}");
        train(&dir, more);
        assert_eq!(lines(&bench, &dir), reference, "{more:?}");
    }
    for steps in ["run.steps=3", "run.steps=5", "run.steps=5"] {
        train("again", &["-w", "2", "--set", steps, "--set", "metrics.tensorboard=true"]);
    }
    // The run that stopped after 3 steps was evaluated there, too.
    let again = lines(&bench, "again");
    let of_steps: Vec<&String> =
        again.iter().filter(|line| !line.starts_with("{\"step\":3,")).collect();
    assert_eq!(of_steps, reference.iter().collect::<Vec<_>>());
    assert_eq!(again.len(), 4, "{again:?}");
    let files = std::fs::read_dir(bench.path("again/tensorboard")).unwrap();
    let told = files.map(|file| std::fs::read(file.unwrap().path()).unwrap());
    let tag = b"evaluation/words/perplexity";
    let tags = told.map(|bytes| bytes.windows(tag.len()).filter(|part| part == tag).count());
    assert_eq!(tags.sum::<usize>(), 4);
    bench.tidemill(&["report", "again", "-o", "page.html"]).expect(0);
    let page = std::fs::read_to_string(bench.path("page.html")).unwrap();
    assert!(page.contains("Evaluation: tasks.ends.acc_norm"), "a picture for each metric");
}

/// The numbers of a run and of `evaluate` come from other kernels, of the same weights.
#[test]
fn a_run_answers_as_evaluate_does() {
    let bench = bench();
    bench.tidemill(&["train", "run.toml", "-w", "2"]).expect(0);
    let lines = lines(&bench, "run");
    let last: Value = serde_json::from_str(lines.last().unwrap()).unwrap();
    // As many tokens as a sample of the run holds.
    let tasks = ["evaluate", "--model", "run", "--data", "questions", "--max-length", "17"];
    let evaluated = |task: &str, more: &[&str]| {
        let arguments = [&tasks[..], &["--format", "json", "--tasks", task], more].concat();
        bench.tidemill(&arguments).expect(0).json()
    };
    let (ends, words) = (evaluated("ends.toml", &[]), evaluated("words.toml", &["--limit", "3"]));
    let of = |found: &Value, task: &str, metric: &str| {
        let expected = found["tasks"][task]["metrics"][metric]["value"].as_f64().unwrap();
        (last["tasks"][task][metric].as_f64().unwrap(), expected)
    };
    for metric in ["acc", "acc_norm"] {
        let (found, expected) = of(&ends, "ends", metric);
        assert_eq!(found, expected, "{metric} of {last}");
    }
    let (found, expected) = of(&words, "words", "perplexity");
    assert!((found / expected - 1.0).abs() < 1e-4, "{found} is about {expected}");
    assert!(last["tasks"]["words"].get("acc").is_none(), "{last}");
}

#[test]
fn wrong_tasks_end_a_run_before_it_begins() {
    let bench = bench();
    let refused = |from: &str, to: &str, parts: &[&str]| {
        bench.write("wrong.toml", (config() + TASKS).replace(from, to));
        bench.tidemill(&["train", "wrong.toml", "-w", "2"]).refused(1, parts);
        bench.tidemill(&["train", "wrong.toml", "-n", "2"]).refused(1, parts);
        assert!(!bench.path("run").exists(), "{parts:?}");
    };
    refused("\"ends.toml\"", "\"piqua\"", &["piqua", "hellaswag, lambada_openai"]);
    refused("\"ends.toml\"", "\"nowhere.toml\"", &["nowhere.toml", "No such file"]);
    refused("\"ends.toml\"", "\"words.toml\"", &["evaluation.tasks", "each task once", "words"]);
    refused("data = \"questions\"", "data = \"data\"", &["data", "ends.jsonl or ends.parquet"]);
    refused("limit = 3", "limit = 0", &["limit"]);
    refused("limit = 3", "fewshot = 5", &["words: expected at most 4 few-shot"]);
    refused("limit = 3", "questions = 3", &["questions"]);
    bench.write("words.toml", WORDS.replace(", \"perplexity\"", ""));
    refused("", "", &["words: evaluation.tasks: expected a metric besides acc"]);
    bench.write("words.toml", WORDS);
    std::fs::remove_file(bench.path("data/tokenizer.json")).unwrap();
    let index = std::fs::read_to_string(bench.path("data/index.json")).unwrap();
    let mut index: Value = serde_json::from_str(&index).unwrap();
    index["tokenizer_file"] = Value::Null;
    bench.write("data/index.json", index.to_string());
    refused("", "", &["evaluation.tasks", "a data.dataset with a tokenizer.json", "none"]);
}
