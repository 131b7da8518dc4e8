//! Filters: what is trained on is what a preparation of the kept texts alone would have, for any number of
//! workers and in whatever form the documents come; and the index says by which rules.
//!
//! Seen red with tokens of the unchanged text.

use tidemill_streaming_data::prepare::{FilterSettings, PrepareSettings};

use crate::support::{Bench, Files, number};

const SENTENCE: &str = "The tide turns the mill twice a day, and that is what it is for.";

/// Documents that C4 keeps whole, keeps in part, and rejects; and what is left of them.
fn documents() -> (Vec<String>, Vec<String>) {
    let (mut given, mut left) = (Vec::new(), Vec::new());
    for at in 0..3000_usize {
        let own = format!("Number {at} of the mills is the one that I have seen today.");
        let kept = format!("{own}\n{}", [SENTENCE; 6].join("\n"));
        match at % 3 {
            0 => {
                given.push(kept.clone());
                left.push(kept);
            }
            1 => {
                given.push(kept.replacen('\n', "\nMenu\nbuttons to press\n", 1));
                left.push(kept);
            }
            _ => given.push(format!("{own} {SENTENCE}")),
        }
    }
    given.insert(7, String::new());
    (given, left)
}

/// The files without the index, which names the filters.
fn without_index(files: &Files) -> Vec<&(String, Vec<u8>)> {
    files.iter().filter(|(name, _)| name != "index.json").collect()
}

fn index(files: &Files) -> serde_json::Value {
    let (_, index) = files.iter().find(|(name, _)| name == "index.json").unwrap();
    serde_json::from_slice(index).unwrap()
}

#[test]
fn what_is_left_is_prepared_for_any_number_of_workers_and_any_form() {
    let bench = Bench::new();
    let (given, left) = documents();
    let (_, expected) = bench.as_lines(&left);
    assert!(index(&expected).get("selection").is_none(), "nothing is said where nothing is asked");
    let line = |text: &String| format!("{}\n", serde_json::json!({"text": text}));
    bench.write("lines.jsonl", given.iter().map(line).collect::<String>());
    for (at, document) in given.iter().enumerate() {
        bench.write(&format!("texts/{at:06}.txt"), document);
    }
    let filters = FilterSettings::from_list("c4").unwrap();
    let mut indexes = Vec::new();
    for (input, workers) in [("lines.jsonl", 1), ("lines.jsonl", 3), ("texts", 2)] {
        let workers = number(workers);
        let filters = filters.clone();
        let settings = PrepareSettings { filters, workers, ..bench.settings(&[input]) };
        let (report, files) = bench.prepare(&settings).unwrap();
        assert!(without_index(&files) == without_index(&expected), "{input}");
        assert_eq!((report.documents, report.empty), (2000, 1), "{input}");
        let count = |counts: &std::collections::BTreeMap<_, u64>| {
            counts.iter().map(|(rule, n)| (format!("{rule}"), *n)).collect::<Vec<_>>()
        };
        assert_eq!(count(&report.filtered.rejected), [("c4.min_sentences".to_owned(), 1000)]);
        let dropped = [("c4.drop_unterminated_lines".to_owned(), 2000)];
        assert_eq!(count(&report.filtered.dropped_lines), dropped);
        indexes.push(index(&files));
    }
    assert_eq!(indexes[0]["selection"]["words"], "words-1");
    assert_eq!(indexes[0]["selection"]["filters"][0]["c4"]["min_sentences"], 5);
    assert!(indexes.iter().all(|index| *index == indexes[0]));
}

#[test]
fn a_data_set_of_other_rules_and_tokens_are_refused() {
    let bench = Bench::new();
    let (given, _) = documents();
    let line = |text: &String| format!("{}\n", serde_json::json!({"text": text}));
    bench.write("lines.jsonl", given.iter().map(line).collect::<String>());
    let with = |list: &str| PrepareSettings {
        filters: FilterSettings::from_list(list).unwrap(),
        ..bench.settings(&["lines.jsonl"])
    };
    // The data set stays.
    let progress = &mut |_| std::ops::ControlFlow::Continue(());
    let tokenizer = tidemill_streaming_data::prepare::ByteTokenizer;
    let mut again = |settings: &PrepareSettings| {
        let prepared = tidemill_streaming_data::prepare::prepare(settings, &tokenizer, progress);
        prepared.map(|_| ()).map_err(|error| error.to_string())
    };
    again(&with("c4")).unwrap();
    let message = again(&with("c4")).unwrap_err();
    assert!(message.contains("a folder that is not empty"), "{message}");
    let message = again(&with("c4,gopher")).unwrap_err();
    assert!(
        message.contains("cannot go on with data set") && message.contains("filters is"),
        "{message}"
    );
    bench.write("mine.toml", "[c4]\nmin_sentences = 3\n");
    let message = again(&with(bench.path("mine.toml").to_str().unwrap())).unwrap_err();
    assert!(
        message.contains("filters.0.c4.cut_citations is true in it, expected false"),
        "{message}"
    );
    let message = again(&bench.settings(&["lines.jsonl"])).unwrap_err();
    assert!(message.contains("expected nothing as it was asked for now"), "{message}");
    std::fs::remove_dir_all(bench.path("out")).unwrap();

    let mds = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/mds/tokens-int32");
    let tokens = PrepareSettings { inputs: vec![mds.into()], seq_len: None, ..with("gopher") };
    let message = bench.refused(&tokens);
    assert!(message.contains("cannot filter") && message.contains("tokens-int32"), "{message}");
    let nothing = PrepareSettings {
        filters: FilterSettings::from_list("nemo-english").unwrap(),
        ..with("c4")
    };
    bench.write("lines.jsonl", line(&"too short".to_owned()));
    let message = bench.refused(&nothing);
    assert!(
        message.contains("filters rejected 1 others, most of them by nemo-english."),
        "{message}"
    );
}
