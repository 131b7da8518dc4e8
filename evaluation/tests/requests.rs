//! The requests of built-in tasks, to the character, against lm-eval (0.4) and LLM Foundry (its
//! in-context learning tasks).
//!
//! Seen red: with an extra delimiter, with examples behind the question, and with a metric by bytes
//! in place of characters.

use serde_json::{Value, json};
use tidemill_evaluation::builtin::find;
use tidemill_evaluation::metrics::Answer;
use tidemill_evaluation::plan::{PlannedTask, Settings};
use tidemill_evaluation::task::Task;
use tidemill_evaluation::tokens::{Encode, EncodeError, SpecialTokens, Vocabulary};

/// A token for each byte.
struct Bytes;

impl Encode for Bytes {
    fn encode(&self, text: &str, _: SpecialTokens) -> Result<Vec<u32>, EncodeError> {
        Ok(text.bytes().map(u32::from).collect())
    }
}

/// A task whose questions are `rows`, and whose examples are `examples`.
fn planned(task: &str, rows: &[Value], examples: &[Value], shots: usize) -> PlannedTask {
    let task = find(task).expect("built in").tasks.remove(0).0;
    plan(task, rows, examples, shots).unwrap_or_else(|error| panic!("{error}"))
}

fn plan(
    task: Task,
    rows: &[Value],
    examples: &[Value],
    shots: usize,
) -> tidemill_evaluation::Result<PlannedTask> {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |file: &str, rows: &[Value]| {
        let path = folder.path().join(format!("{file}.jsonl"));
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
        std::fs::write(path, lines.join("\n")).expect("written");
    };
    write(&task.source.file, rows);
    if let Some(file) = &task.source.fewshot {
        write(file, examples);
    }
    let data = Some(folder.path().to_str().expect("UTF-8").to_owned());
    let settings = Settings { data, fewshot: Some(shots), ..Settings::default() };
    let vocabulary = Vocabulary { tokenizer: &Bytes, prefix: None, end: None, positions: None };
    PlannedTask::new(task, None, &settings, &vocabulary)
}

/// Context and continuation of each request.
fn asked(planned: &PlannedTask) -> Vec<[String; 2]> {
    let text = |tokens: &[u32]| {
        String::from_utf8(tokens.iter().map(|&token| token as u8).collect()).expect("UTF-8")
    };
    let split = |request: &tidemill_evaluation::tokens::Request| {
        let (context, continuation) = request.tokens.split_at(request.first);
        [text(context), text(continuation)]
    };
    planned.requests().iter().map(split).collect()
}

/// The requests of one row, and the right option.
fn of_row(task: &str, row: Value) -> (Vec<[String; 2]>, usize) {
    let planned = planned(task, &[row], &[], 0);
    (asked(&planned), planned.documents()[0].gold)
}

/// One context, and several continuations.
fn pairs(context: &str, continuations: &[&str]) -> Vec<[String; 2]> {
    continuations.iter().map(|&of| [context.to_owned(), of.to_owned()]).collect()
}

#[test]
fn tasks_of_lm_eval_ask_to_the_character() {
    let row = json!({ "text": "He saw the  mill\nand the wheel" });
    let expected = pairs("He saw the  mill\nand the", &[" wheel"]);
    assert_eq!(of_row("lambada_openai", row), (expected, 0));

    let row = json!({
        "activity_label": "Home [x] and Garden", "ctx_a": "[header] How to mill [title] Dry it.",
        "ctx_b": "the WOMAN", "endings": ["turns [step] it.", " sings  on"], "label": "1",
    });
    let context = "Home and Garden: How to mill. Dry it. The woman";
    assert_eq!(of_row("hellaswag", row), (pairs(context, &[" turns it.", " sings on"]), 1));

    let row = json!({ "goal": "Go on", "sol1": "walk", "sol2": "größer", "label": 0 });
    let expected = pairs("Question: Go on\nAnswer:", &[" walk", " größer"]);
    assert_eq!(of_row("piqa", row), (expected, 0));

    let choices = json!({ "text": ["sun", "moon", "sea"], "label": ["1", "2", "3"] });
    let row = json!({ "question": "What shines?", "choices": choices, "answerKey": "3" });
    let expected = pairs("Question: What shines?\nAnswer:", &[" sun", " moon", " sea"]);
    assert_eq!(of_row("arc_easy", row.clone()), (expected.clone(), 2));
    assert_eq!(of_row("arc_challenge", row), (expected, 2));

    let choices = json!({ "text": ["sun", "moon"], "label": ["A", "B"] });
    let row =
        json!({ "question_stem": "What shines is the", "choices": choices, "answerKey": " B" });
    assert_eq!(of_row("openbookqa", row), (pairs("What shines is the", &[" sun", " moon"]), 1));

    let row = json!({ "passage": "Mills.", "question": "do they turn", "label": 1 });
    let expected = pairs("Mills.\nQuestion: do they turn?\nAnswer:", &[" no", " yes"]);
    assert_eq!(of_row("boolq", row), (expected, 1));

    let row = json!({
        "premise": " The tide rose. ", "question": "effect", "choice1": "The mill turned.",
        "choice2": "Étienne slept.", "label": 0,
    });
    let expected = pairs("The tide rose therefore", &["  the mill turned.", "  étienne slept."]);
    assert_eq!(of_row("copa", row), (expected, 0));

    let row = json!({
        "sentence": "Ann taught Eve as _ knew more _.", "option1": "Ann", "option2": "Eve", "answer": "1",
    });
    let of = |option: &str| [format!("Ann taught Eve as {option}"), " knew more _.".to_owned()];
    assert_eq!(of_row("winogrande", row), (vec![of("Ann"), of("Eve")], 0));
}

#[test]
fn examples_stand_before_the_question() {
    let row =
        |goal: &str, label: u32| json!({ "goal": goal, "sol1": "a", "sol2": "b", "label": label });
    let planned_piqa = planned("piqa", &[row("Q", 0)], &[row("E", 1), row("E", 1)], 2);
    let context = "Question: E\nAnswer: b\n\nQuestion: E\nAnswer: b\n\nQuestion: Q\nAnswer:";
    assert_eq!(asked(&planned_piqa), pairs(context, &[" a", " b"]));

    let row = |sentence: &str| json!({ "sentence": sentence, "option1": "x", "option2": "y", "answer": "2" });
    let example = row("is _ here ");
    let schema = planned("winogrande", &[row("as _ is.")], &[example], 1);
    let of = |option: &str| [format!("is y here\n\nas {option}"), " is.".to_owned()];
    assert_eq!(asked(&schema), [of("x"), of("y")]);

    // Where examples come from the questions, none is its own example.
    let rows: Vec<Value> = (0..4)
        .map(|index| json!({ "query": format!("q{index}"), "choices": ["a", "b"], "gold": index % 2 }))
        .collect();
    let own = planned("foundry/copa", &rows, &[], 3);
    for (index, [context, _]) in asked(&own).iter().step_by(2).enumerate() {
        let asked_again = context.matches(&format!("q{index}")).count();
        assert_eq!((asked_again, context.lines().count()), (1, 4), "{context}");
        assert!(context.ends_with(&format!("\nq{index}")), "{context}");
    }
}

#[test]
fn tasks_of_llm_foundry_ask_to_the_character() {
    let row = |query: &str, gold: u32| json!({ "query": query, "choices": [" sun", "moon"], "gold": gold });
    let asked_of = |task, rows: &[Value], shots| asked(&planned(task, rows, &[], shots));
    // A byte is a token, so " a" is not a single one, and no continuation needs a space.
    let alone = asked_of("foundry/piqa", &[row("Question: what shines?\n", 0)], 0);
    assert_eq!(alone, pairs("Question: what shines?\nAnswer:", &[" sun", "moon"]));
    let two = asked_of("foundry/arc_easy", &[row("Q", 1), row("E", 0)], 1);
    // White space around a choice stays: single texts are stripped, those of a list are not.
    assert_eq!(two[..2], pairs("E\nAnswer:  sun\nQ\nAnswer:", &[" sun", "moon"]));
    assert_eq!(two[2..], pairs("Q\nAnswer: moon\nE\nAnswer:", &[" sun", "moon"]));

    let row =
        json!({ "context_options": ["as Ann", "as Eve"], "continuation": "knew more.", "gold": 1 });
    let of = |option: &str| [format!("as {option}"), "knew more.".to_owned()];
    assert_eq!(of_row("foundry/winograd", row), (vec![of("Ann"), of("Eve")], 1));

    let row = json!({ "context": " He saw the \n", "continuation": "wheel" });
    assert_eq!(of_row("foundry/lambada_openai", row), (pairs("He saw the", &["wheel"]), 0));
}

#[test]
fn metrics_follow_from_answers() {
    let task = r#"
        kind = "multiple_choice"
        context = "{q}"
        choices = "{a}"
        gold = "g"
        metrics = ["acc", "acc_norm", "acc_bytes", "acc_tokens"]
        source = { file = "x" }
    "#;
    let task = Task::parse("x", task, "x.toml").expect("a task");
    // Lengths: 2 and 3 characters, 4 and 3 bytes, 5 and 4 tokens (with the delimiter).
    let row = json!({ "q": "?", "a": ["éé", "abc"], "g": 0 });
    let rows = [row.clone(), row.clone(), row.clone(), row];
    let planned = plan(task, &rows, &[], 0).expect("a plan");
    let answers = [[-8.0, -9.0], [-8.5, -6.0], [-6.0, -6.0], [-9.0, -6.0]];
    let answers: Vec<Answer> = answers
        .into_iter()
        .flatten()
        .map(|log_likelihood| Answer { log_likelihood, greedy: None })
        .collect();
    let measured = planned.measure(&answers).expect("numbers");
    // acc: right, wrong, a tie (the first), wrong. By characters -4 < -3, -4.25 < -2, -3 < -2: all wrong. By bytes -2 > -3,
    // -2.125 < -2, -1.5 > -2, -2.25 < -2. By tokens -1.6 > -2.25, -1.7 < -1.5, -1.2 > -1.5, -1.8 < -1.5.
    let values: Vec<f64> = measured.iter().map(|of| of.value).collect();
    assert_eq!(values, [0.5, 0.0, 0.5, 0.5]);
    // The sample's standard deviation is the root of 4 / 4 / 3.
    let error = (1.0_f64 / 3.0).sqrt() / 2.0;
    assert!((measured[0].standard_error.expect("of four") - error).abs() < 1e-15);
    assert_eq!(measured[1].standard_error, Some(0.0));
    let mut wrong = answers;
    wrong[5].log_likelihood = f64::NAN;
    let said = planned.measure(&wrong).unwrap_err().to_string();
    assert!(said.contains("x: ") && said.contains("line 3: the model answered NaN"), "{said}");

    let words = planned_words(&["a b", "c d", "e f"]);
    let answers = [(-1.0, true), (-2.0, false), (-6.0, true)];
    let answers =
        answers.map(|(log_likelihood, greedy)| Answer { log_likelihood, greedy: Some(greedy) });
    let [perplexity, acc] = words.measure(&answers).expect("numbers")[..] else { panic!("two") };
    assert!((perplexity.value - 3.0_f64.exp()).abs() < 1e-12);
    // The sample's variance of -1, -2 and -6 is 7.
    let error = 3.0_f64.exp() * (7.0_f64 / 3.0).sqrt();
    assert!((perplexity.standard_error.expect("of three") - error).abs() < 1e-12);
    assert!((acc.value - 2.0 / 3.0).abs() < 1e-15);
    let alone = planned_words(&["a b"]);
    let measured = alone.measure(&answers[..1]).expect("numbers");
    assert_eq!((measured[1].value, measured[1].standard_error), (1.0, None));
}

fn planned_words(texts: &[&str]) -> PlannedTask {
    let rows: Vec<Value> = texts.iter().map(|text| json!({ "text": text })).collect();
    planned("lambada_openai", &rows, &[], 0)
}

#[test]
fn wrong_rows_are_told_with_their_places() {
    let wrong = |task: &str, row: Value| {
        let task = find(task).expect("built in").tasks.remove(0).0;
        plan(task, &[row], &[], 0).unwrap_err().to_string()
    };
    let choices = json!({ "text": ["sun", "moon"], "label": ["A", "B"] });
    let row = |choices: &Value, key: &str| json!({ "question": "Q", "choices": choices, "answerKey": key });
    let said = wrong("arc_easy", row(&choices, "C"));
    assert!(said.ends_with("test.jsonl: line 1: column answerKey: expected one of column choices.label, found \"C\""), "{said}");
    let said = wrong("arc_easy", row(&json!({ "text": ["sun"], "label": ["A"] }), "A"));
    assert!(said.ends_with("expected two options or more, found 1"), "{said}");
    let said = wrong("arc_easy", row(&json!({ "text": [], "label": [] }), "A"));
    assert!(said.ends_with("expected a list of options, found an empty one"), "{said}");
    let said = wrong("arc_easy", row(&json!({ "text": ["sun", ""], "label": ["A", "B"] }), "A"));
    assert!(said.ends_with("continuation 1: expected a text, found an empty one"), "{said}");
    let piqa = |label: Value| json!({ "goal": "G", "sol1": "a", "sol2": "b", "label": label });
    for label in [json!(2), json!(-1), json!("x"), json!(0.5)] {
        let said = wrong("piqa", piqa(label));
        assert!(said.contains("column label: expected a number from 0 below 2, found"), "{said}");
    }
    assert!(wrong("piqa", piqa(Value::Null)).ends_with("expected a label, found null"));
    let said = wrong("piqa", json!({ "goal": "G" }));
    assert!(said.ends_with("expected a column sol1, found goal"), "{said}");
}
