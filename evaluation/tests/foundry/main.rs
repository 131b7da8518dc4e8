//! The built-in tasks of LLM Foundry's gauntlet, against its rules as `rules` writes them down: the same requests, the same
//! accuracies and the same averages for a small random model.
//!
//! Seen red: with choices that are stripped, with the best sum in place of the best mean, with the end of a sequence left behind the
//! examples, and with another baseline.

mod model;
mod rules;

use std::collections::BTreeMap;

use serde_json::{Value, json};
use tidemill_evaluation::builtin::find;
use tidemill_evaluation::metrics::Answer;
use tidemill_evaluation::plan::{PlannedTask, Settings};
use tidemill_evaluation::prompt::{Pool, examples};
use tidemill_evaluation::tokens::Vocabulary;

use crate::model::{END, Letters, Model, Random, Small};
use crate::rules::{Asked, Asks, BENCHMARKS, Benchmark, Tokenizer, averages};

const QUESTIONS: usize = 20;
const SEED: u64 = 7;

/// Questions with white space in the places where a row may have it, and answers of one or two
/// letters, so that the model writes some of them greedily.
fn rows(asks: Asks, random: &mut Random) -> Vec<Value> {
    const WORDS: [&str; 6] = ["the mill", " turns", "größer ", "it", "\n", "Who? "];
    let digits = ["1", "2", "12", "21", "1 2"];
    let row = |_| {
        let mut sentence = |words: usize| -> String {
            (0..words).map(|_| WORDS[random.below(WORDS.len())]).collect()
        };
        let [query, left, right] = [sentence(5), sentence(1), sentence(2)];
        let digit = digits[random.below(digits.len())];
        match asks {
            Asks::Choice => json!({
                "query": format!(" Q {query}"),
                "choices": [left, format!(" x{right}"), format!("{digit}{left}"), format!("y{digit}\t")],
                "gold": random.below(4),
            }),
            Asks::Schema => json!({
                "context_options": [format!("as {query}"), format!(" as {right} ")],
                "continuation": format!("a{left} "),
                "gold": random.below(2),
            }),
            Asks::Words => json!({ "context": format!("c{query}"), "continuation": digit }),
        }
    };
    (0..QUESTIONS).map(row).collect()
}

/// The crate's plan of a built-in task over `rows`, with the number of examples that its suite
/// sets.
fn planned(name: &str, rows: &[Value], tokenizer: &Small, positions: usize) -> PlannedTask {
    let folder = tempfile::tempdir().expect("a folder");
    let found = find("foundry").expect("built in").tasks;
    let (task, shots) =
        found.into_iter().find(|(task, _)| task.name == name).expect("a task of the suite");
    let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
    let path = folder.path().join(format!("{}.jsonl", task.source.file));
    std::fs::write(path, lines.join("\n")).expect("written");
    let data = Some(folder.path().to_str().expect("UTF-8").to_owned());
    let settings = Settings { data, seed: SEED, ..Settings::default() };
    let vocabulary =
        Vocabulary { tokenizer, prefix: None, end: Some(END), positions: Some(positions) };
    PlannedTask::new(task, shots, &settings, &vocabulary).unwrap_or_else(|error| panic!("{error}"))
}

/// The model's answers in the crate's form.
fn answer(Asked { tokens, context }: &Asked, logits: &[Vec<f64>]) -> Answer {
    let (mut log_likelihood, mut greedy) = (0.0, true);
    for place in *context..tokens.len() {
        let (token, logits) = (tokens[place] as usize, &logits[place - 1]);
        let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|logit| (logit - most).exp()).sum();
        log_likelihood += logits[token] - most - sum.ln();
        greedy &= logits[token] == most;
    }
    Answer { log_likelihood, greedy: Some(greedy) }
}

/// The accuracy of a benchmark by the rules, which the crate must reproduce; and how many of its
/// requests were cut on the left.
fn compared(benchmark: &Benchmark, letters: Letters, longest: usize) -> (f64, usize) {
    let tokenizer = Small(letters);
    let digits: &[&str] = if benchmark.asks == Asks::Words { &["1", "2", " 1", " 2"] } else { &[] };
    let favoured: Vec<_> = digits.iter().map(|text| tokenizer.tokens(text, false)).collect();
    let model = Model::new(SEED, &favoured.concat());
    let name = format!("foundry/{}", benchmark.name);
    let rows = rows(benchmark.asks, &mut Random(name.len() as u64));
    let planned = planned(&name, &rows, &tokenizer, longest);
    assert_eq!(planned.shots(), benchmark.shots, "{name}");
    let (mut answers, mut right, mut otherwise) = (Vec::new(), 0, 0);
    for (question, row) in rows.iter().enumerate() {
        // The choice of rows is this crate's own; the rule says only that they differ from the
        // question and from each other.
        let shots = examples(benchmark.shots, rows.len(), Pool::Same, question, SEED);
        let shots = shots.expect("enough rows");
        let mut distinct = shots.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert!(distinct.len() == benchmark.shots && !shots.contains(&question));
        let asked = benchmark.asked(&rows, (question, &shots), (&tokenizer, longest));
        let first = planned.request_of(question, 0).expect("asked");
        let requests = &planned.requests()[first..first + asked.len()];
        assert_eq!(planned.request_of(question, asked.len()), None, "{name}: options");
        let requests: Vec<Asked> = requests
            .iter()
            .map(|request| Asked { tokens: request.tokens.clone(), context: request.first })
            .collect();
        assert_eq!(requests, asked, "{name}, {letters:?}, question {question}");
        let logits = asked.iter().map(|asked| model.logits(&asked.tokens, asked.context - 1));
        let logits: Vec<_> = logits.collect();
        let is_right = benchmark.is_right(row, &asked, &logits);
        right += usize::from(is_right);
        let of: Vec<Answer> =
            asked.iter().zip(&logits).map(|(asked, logits)| answer(asked, logits)).collect();
        let sums = of.iter().map(|of| of.log_likelihood).enumerate();
        let best = sums.max_by(|(_, one), (_, other)| one.total_cmp(other)).expect("one").0;
        otherwise += usize::from((row["gold"] == best) != is_right);
        answers.extend(of);
    }
    let accuracy = right as f64 / rows.len() as f64;
    let measured = planned.measure(&answers).expect("numbers");
    assert_eq!(measured.len(), 1, "{name} has one metric");
    assert!((measured[0].value - accuracy).abs() < 1e-12, "{name}: {measured:?}, {accuracy}");
    // The data can tell another rule of counting from this one.
    assert!(0 < right && right < rows.len(), "{name}: {right} right");
    assert!(benchmark.asks != Asks::Choice || otherwise > 0, "{name}: as by sums");
    let cut = planned.requests().iter().filter(|request| request.left_out > 0).count();
    (accuracy, cut)
}

#[test]
fn built_in_tasks_follow_the_rules_of_llm_foundry() {
    for (letters, longest) in
        [(Letters::Spaced, 4096), (Letters::Bytes, 4096), (Letters::Spaced, 60)]
    {
        let compared = BENCHMARKS.iter().map(|of| compared(of, letters, longest));
        let (accuracies, cut): (Vec<f64>, Vec<usize>) = compared.unzip();
        assert_eq!(cut.iter().any(|cut| *cut > 0), longest < 4096, "{cut:?}");
        let suite = find("foundry").expect("built in").suite.expect("a suite").1;
        let of_tasks: BTreeMap<String, f64> = BENCHMARKS
            .iter()
            .zip(&accuracies)
            .map(|(of, accuracy)| (format!("foundry/{}", of.name), *accuracy))
            .collect();
        let found = suite.averages(&of_tasks);
        let expected = averages(&accuracies);
        assert_eq!(found.len(), expected.len());
        for (found, (name, value)) in found.iter().zip(expected) {
            assert_eq!(found.name, name);
            assert!((found.value - value).abs() < 1e-12, "{name}: {} {value}", found.value);
        }
    }
}
