//! Tasks in a run's evaluations: the answers are the same for any number of workers, each line is
//! written once however often the run is started, and the answers are close to those of `evaluate`
//! on the checkpoint.

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

/// Both are above random answers.
const SUITE: &str = r#"
average = "all"

[[categories]]
name = "choices"
tasks = [{ task = "ends.toml", baseline = 0.25 }]

[[categories]]
name = "texts"
tasks = [{ task = "likely.toml" }]
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

/// A run that learns which letters occur.
fn longer_config() -> String {
    let config = config().replace("steps = 5", "steps = 20");
    config.replace("learning_rate = 3e-3", "learning_rate = 3e-2")
}

/// The same with a suite, whose task has some answers that the trained model writes.
fn suite_bench() -> Workbench {
    let bench = bench();
    bench.write("run.toml", longer_config());
    bench.tidemill(&["train", "run.toml", "-w", "2", "--set", "run.dir=first"]).expect(0);
    let continuation = |goal: &str| {
        let generate = ["generate", "--model", "first", "--temperature", "0", "--ignore-eos"];
        let asked = ["--prompt", goal, "--max-new-tokens", "2", "--format", "json"];
        let written = bench.tidemill(&[&generate[..], &asked].concat()).expect(0).json();
        written["text"].as_str().unwrap().to_owned()
    };
    let goals = ["tide mi", "the wat", "stone", "und of", "wheel a", "turns gr"];
    let rows = goals.into_iter().enumerate().map(|(index, goal)| {
        let written = continuation(goal);
        assert!(!written.is_empty() && !written.contains('\u{fffd}'), "{goal}: {written:?}");
        let continuation = if index % 3 == 2 { format!("{written}#") } else { written };
        serde_json::json!({ "goal": goal, "continuation": continuation })
    });
    let rows: Vec<Value> = rows.collect();
    let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
    bench.write("questions/likely.jsonl", lines.join("\n"));
    bench.write("likely.toml", LIKELY);
    bench.write("suite.toml", SUITE);
    let tasks = TASKS.split_once("[[evaluation.tasks]]").unwrap().0;
    let suite = "[[evaluation.tasks]]\ntask = \"suite.toml\"\ndata = \"questions\"\n";
    bench.write("run.toml", longer_config() + tasks + suite);
    bench
}

const LIKELY: &str = r#"
kind = "language_modelling"
context = "{goal}"
continuation = "{continuation}"
answer_delimiter = ""
metrics = ["acc"]
source = { file = "likely" }
"#;

/// Greedy matches and averages of suites, in the names and numbers that `evaluate` prints.
#[test]
fn a_run_has_the_averages_of_a_suite_as_evaluate_has() {
    let bench = suite_bench();
    let told = bench.tidemill(&["train", "run.toml", "-w", "2"]).expect(0).stderr;
    assert!(told.contains("step 20: suite: all "), "{told}");
    let last: Value = serde_json::from_str(lines(&bench, "run").last().unwrap()).unwrap();
    let evaluate = ["evaluate", "--model", "run", "--data", "questions", "--max-length", "17"];
    let asked = ["--format", "json", "--tasks", "suite.toml"];
    let evaluated = bench.tidemill(&[&evaluate[..], &asked].concat()).expect(0).json();
    assert_eq!(last["suites"], evaluated["suites"], "{last}");
    for (task, metric) in [("ends", "acc"), ("ends", "acc_norm"), ("likely", "acc")] {
        let expected = &evaluated["tasks"][task]["metrics"][metric]["value"];
        assert_eq!(&last["tasks"][task][metric], expected, "{task} {metric} of {last}");
    }
    let likely = last["tasks"]["likely"]["acc"].as_f64().unwrap();
    assert!(likely > 0.0 && likely < 1.0, "some are written greedily: {likely}");
    let more = ["--set", "run.dir=more", "-w", "1", "--set", "batch.microbatch_grains=1"];
    bench.tidemill(&[&["train", "run.toml"][..], &more].concat()).expect(0);
    assert_eq!(lines(&bench, "more"), lines(&bench, "run"));
    bench.tidemill(&["report", "run", "-o", "page.html"]).expect(0);
    let page = std::fs::read_to_string(bench.path("page.html")).unwrap();
    assert!(page.contains("Evaluation: suites.suite.all"), "a picture for each average");
    bench.write("likely.toml", LIKELY.replace("\"acc\"", "\"perplexity\""));
    for program in [&evaluate[..5], &["train", "run.toml", "--set", "run.dir=never"]] {
        let asked = if program[0] == "evaluate" { &asked[2..] } else { &[] };
        let refused = [program, asked].concat();
        bench
            .tidemill(&refused)
            .refused(1, &["suite: likely.toml: expected a task with an accuracy"]);
    }
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
    assert!(told.contains("step 4: words: acc "), "{told}");
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
    // The run that stopped after 3 steps was evaluated there too.
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

/// A run and `evaluate` compute with other kernels, from the same weights.
#[test]
fn a_run_answers_as_evaluate_does() {
    let bench = bench();
    bench.tidemill(&["train", "run.toml", "-w", "2"]).expect(0);
    let lines = lines(&bench, "run");
    let last: Value = serde_json::from_str(lines.last().unwrap()).unwrap();
    // As many tokens as a sample of the run has.
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
    let (found, expected) = of(&words, "words", "acc");
    assert_eq!(found, expected, "acc of {last}");
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
    std::fs::remove_file(bench.path("data/tokenizer.json")).unwrap();
    let index = std::fs::read_to_string(bench.path("data/index.json")).unwrap();
    let mut index: Value = serde_json::from_str(&index).unwrap();
    index["tokenizer_file"] = Value::Null;
    bench.write("data/index.json", index.to_string());
    refused("", "", &["evaluation.tasks", "a data.dataset with a tokenizer.json", "none"]);
}
