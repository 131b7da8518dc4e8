//! Requests to a model: prompts, texts and sampling settings.

use super::{train_family, training};
use crate::support::{Finished, Running, Workbench};

/// Broken lines are named by number; results of the lines before have been printed.
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
        ("{\"token\": [1, 2]}", "unknown field `token`, expected one of `tokens`, `text`, `id`"),
        ("{\"prompt\": \"x\"}", "unknown field `prompt`, expected one of `tokens`, `text`, `id`"),
        ("{}", "expected one of tokens and text"),
        ("{\"tokens\": [1, 2], \"text\": \"x\"}", "expected one of tokens and text"),
        ("{\"tokens\": [1, 2, 259]}", "259"),
        ("{\"tokens\": [1]}", "line 3"),
        ("not json", "no JSON object"),
        ("[[1, 2], null, null, null]", "no JSON object"),
        ("{\"text\": \"x", "at column 11"),
    ];
    for (broken, part) in cases {
        let finished = score(&format!("{good}\n{broken}\n{good}")).expect(1);
        let Finished { stdout, stderr, .. } = &finished;
        assert_eq!(stdout.lines().count(), 1, "the line before: {finished:?}");
        assert_eq!(stderr.matches('\n').count(), 1, "{finished:?}");
        assert!(stderr.contains("input.jsonl: line 3") && stderr.contains(part), "{finished:?}");
    }
    let endless = ["score", "--model", "run", "--input", "/dev/zero"];
    bench.tidemill(&endless).refused(1, &["/dev/zero: line 1: expected a line of at most"]);
    bench.write("latin1.jsonl", b"{\"text\": \"gr\xf6\xdfer\"}\n");
    let arguments = ["score", "--model", "run", "--input", "latin1.jsonl"];
    bench.tidemill(&arguments).refused(1, &["latin1.jsonl: line 1", "UTF-8"]);
    let arguments = ["score", "--model", "run", "--input", "missing.jsonl"];
    bench.tidemill(&arguments).refused(1, &["missing.jsonl", "No such file"]);
}

/// Every prompt is checked before any is continued: the error names the line, and nothing is
/// printed.
#[test]
fn prompts_to_continue() {
    let bench = Workbench::new();
    training(&bench, &[]).expect(0);
    let good = "{\"tokens\": [1, 2, 3]}\n";
    let cases = [
        ("{\"tokens\": [1, 2", "at column 16"),
        ("{\"tokens\": [1, 2", "expected {\"tokens\": [...]} or {\"prompt\": \"...\"}"),
        ("[[1, 2], null, null, null]", "found no JSON object"),
        ("{\"tokens\": []}", "prompt: expected at least 1 token, found none"),
        ("{\"prompt\": \"\"}", "prompt: expected at least 1 token, found none"),
        ("{\"text\": \"x\"}", "unknown field `text`, expected one of `tokens`, `prompt`, `id`"),
        ("{\"token\": [1]}", "unknown field `token`, expected one of `tokens`, `prompt`, `id`"),
        ("{\"tokens\": [1], \"prompt\": \"x\"}", "expected one of tokens and prompt"),
        ("{\"tokens\": [1, 259]}", "position 1: token 259"),
        ("{\"id\": 3}", "expected one of tokens and prompt"),
    ];
    let arguments = ["generate", "--model", "run", "--input", "input.jsonl"];
    for (broken, part) in cases {
        bench.write("input.jsonl", format!("{good}\n{broken}\n{good}"));
        bench.tidemill(&arguments).refused(1, &["input.jsonl: line 3: ", part]);
    }
    // An empty file of requests has no results, and a message says so.
    for empty in ["", "\n \n"] {
        bench.write("input.jsonl", empty);
        for command in ["generate", "score"] {
            let arguments = [command, "--model", "run", "--input", "input.jsonl"];
            let Finished { stdout, stderr, .. } = bench.tidemill(&arguments).expect(0);
            assert_eq!(stdout, "", "{command}");
            assert_eq!(
                stderr, "note: input.jsonl has no line that asks for anything\n",
                "{command}"
            );
        }
    }
}

/// Lines of prompts or texts of this many letters, a token each.
fn write_letters(bench: &Workbench, key: &str, lengths: &[usize]) {
    let line = |&length: &usize| format!("{{\"{key}\": {:?}}}\n", "a".repeat(length));
    bench.write("input.jsonl", lengths.iter().map(line).collect::<String>());
}

/// How many tokens each answer has.
fn answered(finished: &Finished) -> Vec<usize> {
    let tokens = |line: &str| {
        let answer: serde_json::Value = serde_json::from_str(line).expect(line);
        answer["tokens"].as_array().map_or(0, Vec::len)
    };
    finished.stdout.lines().map(tokens).collect()
}

/// A prompt longer than the learned positions is refused by line; an answer ends at the last
/// position, with a message.
#[test]
fn learned_positions() {
    let bench = Workbench::new();
    for (family, positions) in [("foundry", 17), ("gpt-neo", 20)] {
        let model = train_family(&bench, family);
        let run = |command: &str, arguments: &[&str]| {
            bench.tidemill(&[&[command, "--model", &model], arguments].concat())
        };
        let has = format!("as the model has {positions} positions, found");
        let longer = "a".repeat(positions + 1);
        let prompt =
            format!("prompt: expected at most {positions} tokens, {has} {}", positions + 1);
        run("generate", &["--prompt", &longer]).refused(1, &[&prompt]);
        write_letters(&bench, "prompt", &[1, positions + 1, 1]);
        run("generate", &["--input", "input.jsonl"])
            .refused(1, &[&format!("input.jsonl: line 2: {prompt}")]);
        write_letters(&bench, "text", &[positions + 1, positions + 2, 3]);
        let scored = run("score", &["--input", "input.jsonl"]).expect(1);
        let text =
            format!("tokens: expected at most {} tokens, {has} {}", positions + 1, positions + 2);
        assert_eq!(scored.stderr, format!("tidemill: input.jsonl: line 2: {text}\n"));
        assert_eq!(scored.stdout.lines().count(), 1, "the line before: {scored:?}");

        let ended = |answers: &str, asked: usize| {
            format!(
                "note: the model has {positions} positions, so {answers} answers ended before {asked} new tokens\n"
            )
        };
        let json = ["--format", "json", "--ignore-eos"];
        let alone = run("generate", &[&["--prompt", "aaa"], &json[..]].concat()).expect(0);
        assert_eq!(answered(&alone), [positions - 2]);
        assert_eq!(alone.stderr, ended("1 of 1", 128));
        write_letters(&bench, "prompt", &[3, positions, 1, positions - 3]);
        let arguments = ["--input", "input.jsonl", "--max-new-tokens", "5"];
        for batch in ["1", "3", "4"] {
            let arguments = [&arguments[..], &["--batch", batch], &json].concat();
            let many = run("generate", &arguments).expect(0);
            assert_eq!(answered(&many), [5, 1, 5, 4], "--batch {batch}");
            assert_eq!(many.stderr, ended("2 of 4", 5), "--batch {batch}");
        }
    }
}

/// Without learned positions neither a prompt nor an answer is too long, whatever `max_seq_len` says.
#[test]
fn positions_that_are_not_learned() {
    let bench = Workbench::new();
    for family in ["mpt", "hybrid"] {
        let model = train_family(&bench, family);
        write_letters(&bench, "prompt", &[1, 99]);
        let arguments = ["generate", "--model", &model, "--input", "input.jsonl", "--ignore-eos"];
        let more = ["--max-new-tokens", "3", "--format", "json"];
        let finished = bench.tidemill(&[&arguments[..], &more].concat()).expect(0);
        assert_eq!(answered(&finished), [3, 3], "{family}");
        assert_eq!(finished.stderr, "", "{family}");
        write_letters(&bench, "text", &[99]);
        bench.tidemill(&["score", "--model", &model, "--input", "input.jsonl"]).expect(0);
    }
}

/// An allocation that fails says which setting would need less memory, as the CPU has no other way
/// to compute it.
#[test]
fn answers_without_room() {
    let bench = Workbench::new();
    let model = train_family(&bench, "mpt");
    bench.write("input.jsonl", "{\"tokens\": [1]}");
    let much = ["--max-new-tokens", "1000000000000000", "--backend", "cpu"];
    for (asked, smaller) in [
        (["--tokens", "1"], "lower --max-new-tokens: "),
        (["--input", "input.jsonl"], "lower --batch or --max-new-tokens: "),
    ] {
        let arguments = [&["generate", "--model", &model], &asked[..], &much].concat();
        // 64 GiB of addresses, which the keys of 4 billion positions exceed on a machine of any size.
        let limited = "ulimit -v 67108864; exec \"$@\"";
        let line = format!("tidemill: this does not fit into the device's memory: {smaller}");
        Running::start_in_shell(bench.folder(), limited, &arguments)
            .finish()
            .refused(1, &[&line, "on the CPU failed: out of memory"]);
    }
}

/// Settings that no token can be chosen by are named by their flags, before a model is opened.
#[test]
fn sampling_flags() {
    let bench = Workbench::new();
    let cases = [
        ("--temperature", "a finite number of at least 0", &["-1", "nan", "inf"][..]),
        ("--top-p", "a number above 0 and at most 1", &["0", "-0.1", "1.5", "nan"]),
        ("--min-p", "a number from 0 to 1", &["-0.1", "1.5", "nan"]),
        ("--repetition-penalty", "a finite number above 0", &["0", "-1", "nan", "inf"]),
    ];
    for (flag, expected, values) in cases {
        for value in values {
            let arguments = ["generate", "--model", "nowhere", "--tokens", "1", flag, value];
            let line = format!("tidemill: {flag}: expected {expected}, found ");
            bench.tidemill(&arguments).refused(1, &[&line]);
        }
    }
    // 0 switches a filter off.
    training(&bench, &[]).expect(0);
    let generate = |more: &[&str]| {
        let arguments = ["generate", "--model", "run", "--tokens", "1", "--format", "json"];
        bench.tidemill(&[&arguments, more].concat()).expect(0).stdout
    };
    assert_eq!(generate(&["--top-k", "0", "--min-p", "0"]), generate(&[]));
    assert_ne!(generate(&["--top-k", "1"]), generate(&[]));
}
