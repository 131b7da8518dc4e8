//! Questions with known answers: an answer agrees with `score`, independent of other questions in
//! the batch, and a second run continues where the first ended.
//!
//! Seen red: with the answers of a batch in reverse.

use serde_json::{Value, json};

use crate::support::Workbench;
use crate::support::web_server::WebServer;

/// A trained model of bytes, and questions of several lengths.
fn trained() -> Workbench {
    let bench = Workbench::new();
    bench.tidemill(&["train", "run.toml", "-w", "2"]).expect(0);
    let questions = (0..7).map(|index| {
        let goal = "the tide mill turns ".repeat(1 + index % 3) + &"x".repeat(index);
        json!({ "goal": goal, "ends": ["wheel", "the grain", "größer"], "label": index % 3 })
            .to_string()
    });
    bench.write("questions/ends.jsonl", questions.collect::<Vec<_>>().join("\n"));
    bench.write("ends.toml", ENDS);
    bench.write("words.toml", WORDS);
    bench
}

const ENDS: &str = r#"
kind = "multiple_choice"
context = "Question: {goal|strip}\nAnswer:"
choices = "{ends}"
gold = "label"
metrics = ["acc", "acc_norm", "acc_bytes", "acc_tokens"]
source = { file = "ends" }
"#;

const WORDS: &str = r#"
kind = "language_modelling"
context = '{goal|strip|before_last " "}'
continuation = '{goal|strip|after_last " "}'
metrics = ["acc", "perplexity"]
source = { file = "ends" }
"#;

const EVALUATE: [&str; 7] =
    ["evaluate", "--model", "run", "--tasks", "ends.toml,words.toml", "--data", "questions"];

fn evaluated(bench: &Workbench, more: &[&str]) -> Value {
    let arguments = [&EVALUATE[..], &["--format", "json"], more].concat();
    let outcome = bench.tidemill(&arguments).expect(0);
    assert!(outcome.stderr.contains(" requests and "), "{}", outcome.stderr);
    without_time(outcome.json())
}

/// The parts of the output that are the same each time; the times are present.
fn without_time(mut results: Value) -> Value {
    let time = results.as_object_mut().unwrap().remove("time").unwrap();
    for key in ["load_seconds", "tokenize_seconds", "score_seconds", "total_seconds"] {
        assert!(time[key].as_f64().unwrap() >= 0.0, "{key} of {time}");
    }
    let scored = time["scored_requests"].as_u64().unwrap();
    assert_eq!(time["requests_per_second"].as_f64().unwrap() > 0.0, scored > 0, "{time}");
    results
}

/// The sum of the scores that `score` gives the last bytes of a text.
fn scored(bench: &Workbench, context: &str, continuation: &str) -> f64 {
    let text = json!({ "text": format!("{context}{continuation}") }).to_string();
    bench.write("text.jsonl", text);
    let line = bench.tidemill(&["score", "--model", "run", "--input", "text.jsonl"]).expect(0);
    let line: Value = serde_json::from_str(&line.stdout).unwrap();
    let numbers: Vec<f64> = line["logprobs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|number| number.as_f64().unwrap())
        .collect();
    numbers[numbers.len() - continuation.len()..].iter().sum()
}

#[test]
fn answers_depend_on_the_question_alone_and_wait_for_a_second_run() {
    let bench = trained();
    let reference = evaluated(&bench, &["--output", "answers.jsonl"]);
    let answers = std::fs::read(bench.path("answers.jsonl")).unwrap();
    let counts = ["questions", "requests", "cut_requests", "fewshot"];
    assert_eq!(counts.map(|key| reference["tasks"]["ends"][key].as_u64().unwrap()), [7, 21, 0, 0]);
    assert_eq!(counts.map(|key| reference["tasks"]["words"][key].as_u64().unwrap()), [7, 7, 0, 0]);
    for (index, more) in [["--batch", "1"], ["--batch", "5"], ["-w", "2"]].iter().enumerate() {
        let output = format!("other-{index}.jsonl");
        let other = evaluated(&bench, &[&more[..], &["--output", &output]].concat());
        assert_eq!(other, reference, "{more:?}");
        assert!(std::fs::read(bench.path(&output)).unwrap() == answers, "{more:?}");
    }
    // Cut after some lines, and within one: the rest is answered, with the same bytes.
    let lines: Vec<usize> = answers
        .iter()
        .enumerate()
        .filter(|(_, byte)| **byte == b'\n')
        .map(|(at, _)| at + 1)
        .collect();
    assert_eq!(lines.len(), 1 + 21 + 7);
    for kept in [lines[0] - 3, lines[11], lines[11] + 9, answers.len()] {
        bench.write("cut.jsonl", &answers[..kept]);
        let goes_on = ["--output", "cut.jsonl", "--batch", "2"];
        assert_eq!(evaluated(&bench, &goes_on), reference, "{kept} bytes");
        assert!(std::fs::read(bench.path("cut.jsonl")).unwrap() == answers, "{kept} bytes");
    }
    // Answers to other requests cannot be continued.
    for more in [["--limit", "6"], ["--fewshot", "1"]] {
        let arguments = [&EVALUATE[..], &["--output", "answers.jsonl"], &more].concat();
        bench
            .tidemill(&arguments)
            .refused(1, &["answers.jsonl", "ends are to other requests", "--output"]);
    }
    assert!(std::fs::read(bench.path("answers.jsonl")).unwrap() == answers);
}

/// Questions may lie in a store, with the results of those in a folder.
#[test]
fn questions_are_read_from_urls() {
    let bench = trained();
    let server = WebServer::start(bench.folder());
    let here = evaluated(&bench, &[]);
    let remote =
        ["evaluate", "--model", "run", "--tasks", "ends.toml,words.toml", "--format", "json"];
    let url = server.url("questions");
    let there = bench.tidemill(&[&remote[..], &["--data", &url]].concat()).expect(0).json();
    assert_eq!(without_time(there), here);
    assert!(server.count("/questions/ends.jsonl") > 0);
    let source = server.url("questions/ends.jsonl");
    bench.write("ends.toml", ENDS.replace("file = \"ends\"", &format!("file = {source:?}")));
    bench.write("words.toml", WORDS.replace("file = \"ends\"", &format!("file = {source:?}")));
    assert_eq!(without_time(bench.tidemill(&remote).expect(0).json()), here);
    let missing = server.url("nowhere");
    let arguments = ["evaluate", "--model", "run", "--tasks", "piqa", "--data", &missing];
    bench.tidemill(&arguments).refused(1, &["nowhere", "piqa/validation.jsonl"]);
}

#[test]
fn answers_are_the_sums_of_scores() {
    let bench = trained();
    let results = evaluated(&bench, &["--output", "answers.jsonl"]);
    let text = std::fs::read_to_string(bench.path("answers.jsonl")).unwrap();
    let lines: Vec<Value> =
        text.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |task: &str, question: usize, option: usize| {
        let line = lines.iter().find(|line| {
            (&line["task"], &line["question"], &line["option"])
                == (&task.into(), &question.into(), &option.into())
        });
        line.unwrap()["log_likelihood"].as_f64().unwrap()
    };
    let questions = std::fs::read_to_string(bench.path("questions/ends.jsonl")).unwrap();
    let mut right = [0; 4];
    let mut sum = 0.0;
    for (index, line) in questions.lines().enumerate() {
        let question: Value = serde_json::from_str(line).unwrap();
        let goal = question["goal"].as_str().unwrap().trim();
        let (context, word) = goal.rsplit_once(' ').unwrap();
        let expected = scored(&bench, context, &format!(" {word}"));
        assert!((of("words", index, 0) - expected).abs() < 1e-9);
        sum += expected;
        let ends = ["wheel", "the grain", "größer"];
        let sums: Vec<f64> = (0..3).map(|option| of("ends", index, option)).collect();
        let context = format!("Question: {goal}\nAnswer:");
        let expected = scored(&bench, &context, &format!(" {}", ends[index % 3]));
        assert!((sums[index % 3] - expected).abs() < 1e-9, "{index}");
        // Tokens are bytes, those of the delimiter among them.
        let lengths: [fn(&str) -> usize; 4] =
            [|_| 1, |end| end.chars().count(), str::len, |end| end.len() + 1];
        for (right, length) in right.iter_mut().zip(lengths) {
            let by = |option: usize| sums[option] / length(ends[option]) as f64;
            let best = (0..3).max_by(|&one, &other| by(one).total_cmp(&by(other))).unwrap();
            *right += usize::from(best == index % 3);
        }
    }
    let metric = |task: &str, name: &str, key: &str| {
        results["tasks"][task]["metrics"][name][key].as_f64().unwrap()
    };
    for (name, right) in ["acc", "acc_norm", "acc_bytes", "acc_tokens"].into_iter().zip(right) {
        let share = right as f64 / 7.0;
        assert!((metric("ends", name, "value") - share).abs() < 1e-12, "{name}");
        let error = (share * (1.0 - share) / 6.0).sqrt();
        assert!((metric("ends", name, "standard_error") - error).abs() < 1e-12, "{name}");
    }
    let perplexity = (-sum / 7.0).exp();
    assert!((metric("words", "perplexity", "value") / perplexity - 1.0).abs() < 1e-9);
    let table = bench.tidemill(&EVALUATE).expect(0).stdout;
    assert_eq!(table.lines().count(), 1 + 4 + 2, "{table}");
    assert!(table.contains("perplexity") && table.starts_with("task "), "{table}");
}

#[test]
fn wrong_tasks_and_questions_are_told() {
    let bench = trained();
    let refused = |more: &[&str], code, parts: &[&str]| {
        let arguments = [&["evaluate", "--model", "run", "--data", "questions"], more].concat();
        bench.tidemill(&arguments).refused(code, parts);
    };
    let with = |task: &str, parts: &[&str]| {
        bench.write("wrong.toml", task);
        refused(&["--tasks", "wrong.toml"], 1, parts);
    };
    refused(&["--tasks", "hellaswagg"], 1, &["hellaswagg", "hellaswag, lambada_openai"]);
    refused(
        &["--tasks", "piqa"],
        1,
        &["piqa/validation.jsonl", "huggingface.co/datasets/baber/piqa"],
    );
    refused(&["--tasks", "nowhere.toml"], 1, &["nowhere.toml", "No such file"]);
    refused(&["--tasks", "ends.toml", "--limit", "0"], 2, &["--limit"]);
    refused(&["--tasks", "ends.toml", "--batch", "-1"], 2, &["--batch"]);
    refused(&["--tasks", "ends.toml", "-w", "999"], 1, &["-w: expected at most 256"]);
    refused(&["--tasks", "ends.toml", "--fewshot", "7"], 1, &["ends: expected at most 6 few-shot"]);
    refused(
        &["--tasks", "ends.toml", "--max-length", "9"],
        1,
        &["ends.jsonl: line", "at most 9 tokens"],
    );
    refused(&[], 2, &["--tasks"]);
    with("kind = 1", &["wrong.toml: line 1"]);
    with(
        &ENDS.replace("{ends}", "{end}"),
        &["ends.jsonl: line 1", "expected a column end, found ends, goal, label"],
    );
    with(
        &ENDS.replace("\"label\"", "\"goal\""),
        &["ends.jsonl: line 1", "column goal: expected a number from 0 below 3"],
    );
    with(
        &ENDS.replace("\"acc\", ", "\"perplexity\", "),
        &["wrong.toml: metrics", "found perplexity"],
    );
    bench.write("questions/empty.jsonl", "\n");
    with(
        &ENDS.replace("file = \"ends\"", "file = \"empty\""),
        &["empty.jsonl: expected rows, found none"],
    );
    bench.write("questions/broken.jsonl", "{\"goal\": \n");
    with(
        &ENDS.replace("file = \"ends\"", "file = \"broken\""),
        &["broken.jsonl: line 1: expected a JSON object"],
    );
    bench.write("questions/broken.parquet", "PAR1 or not");
    with(
        &ENDS.replace("file = \"ends\"", "file = \"broken.parquet\""),
        &["broken.parquet", "Parquet"],
    );
    std::fs::create_dir(bench.path("bare")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        let from = bench.path("run/checkpoints/step-00000005").join(name);
        std::fs::copy(from, bench.path("bare").join(name)).unwrap();
    }
    let bare = ["evaluate", "--model", "bare", "--tasks", "ends.toml", "--data", "questions"];
    bench.tidemill(&bare).refused(1, &["bare: expected tokenizer.json, found none"]);
}
