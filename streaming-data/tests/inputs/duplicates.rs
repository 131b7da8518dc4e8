//! Duplicates and lists: what is left is prepared as if there were nothing else, for any number of workers,
//! order of inputs, form of the documents and bound of memory.
//!
//! Seen red with documents numbered by part and not in all, with the last of a bucket kept, with rejected
//! documents among the compared ones, without the digests of parts, and with hashes of a list passed over.

use std::{fs, ops::ControlFlow};

use tidemill_streaming_data::{
    hash::ContentHash,
    prepare::{
        ByteTokenizer, Dedup, DedupReport, DedupSettings, FilterSettings, Phase, PrepareError,
        PrepareSettings, prepare,
    },
};

use crate::support::{Bench, Files, number};

/// A text of its own: words that no other seed has in such an order.
fn text(seed: u32, words: usize) -> Vec<String> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let mut word = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let letter = |at: u32| char::from(b'a' + ((state >> (7 + at)) % 26) as u8);
        (0..4).map(|at| letter(5 * at)).collect()
    };
    (0..words).map(|_| word()).collect()
}

/// Documents, and those that are not like an earlier one, by how much two may be alike.
fn documents(dedup: Dedup) -> (Vec<String>, Vec<String>, DedupReport) {
    let (mut given, mut left, mut report) = (Vec::new(), Vec::new(), DedupReport::default());
    for at in 0..1500_u32 {
        let words = text(at % 600, 80 + (at % 7) as usize * 20);
        let (round, own) = (at / 600, at % 600);
        let words = if round == 0 { words } else { text(own, 80 + (own % 7) as usize * 20) };
        let plain = words.join(" ");
        let (document, kind) = match (round, own % 3) {
            (0, _) => (plain, Dedup::None),
            (_, 0) => (plain, Dedup::Exact),
            (_, 1) => (plain.to_uppercase().replace(' ', ",\n"), Dedup::ExactWords),
            _ => (format!("{plain} and one word more"), Dedup::Near),
        };
        let is_copy = match kind {
            Dedup::None => false,
            Dedup::Exact => dedup != Dedup::None,
            Dedup::ExactWords => matches!(dedup, Dedup::ExactWords | Dedup::Near),
            _ => dedup == Dedup::Near,
        };
        // From the second round on, the third has copies of its own.
        let is_copy = is_copy || (round == 2 && dedup != Dedup::None);
        if !is_copy {
            left.push(document.clone());
        } else if kind == Dedup::Exact || round == 2 || dedup == Dedup::ExactWords {
            report.copies += 1;
        } else {
            report.near_copies += 1;
        }
        given.push(document);
    }
    (given, left, report)
}

fn lines(documents: &[String]) -> String {
    documents.iter().map(|text| format!("{}\n", serde_json::json!({"text": text}))).collect()
}

fn without_index(files: &Files) -> Vec<&(String, Vec<u8>)> {
    files.iter().filter(|(name, _)| name != "index.json").collect()
}

#[test]
fn the_first_of_each_kind_is_kept_whatever_the_workers_memory_and_form() {
    let bench = Bench::new();
    let (given, _, _) = documents(Dedup::None);
    bench.write("a.jsonl", lines(&given[..700]));
    bench.write("b.jsonl", lines(&given[700..]));
    for (at, document) in given.iter().enumerate() {
        bench.write(&format!("texts/{at:06}.txt"), document);
    }
    for dedup in [Dedup::Exact, Dedup::ExactWords, Dedup::Near] {
        let (_, left, expected_report) = documents(dedup);
        let (_, expected) = bench.as_lines(&left);
        let cases: [(&[&str], usize, u64); 4] = [
            (&["a.jsonl", "b.jsonl"], 1, 1 << 30),
            (&["b.jsonl", "a.jsonl"], 3, 1 << 30),
            // Entries are merged from files.
            (&["a.jsonl", "b.jsonl"], 2, 20_000),
            (&["texts"], 3, 0),
        ];
        for (inputs, workers, memory_bytes) in cases {
            let settings = PrepareSettings {
                dedup: DedupSettings { dedup, memory_bytes },
                workers: number(workers),
                ..bench.settings(inputs)
            };
            let (report, files) = bench.prepare_in_phases(&settings).unwrap();
            assert_eq!(report.dedup, expected_report, "{dedup:?} {inputs:?}");
            assert_eq!(report.documents, left.len() as u64);
            assert!(without_index(&files) == without_index(&expected), "{dedup:?} {inputs:?}");
            let index = files.iter().find(|(name, _)| name == "index.json").unwrap();
            let index: serde_json::Value = serde_json::from_slice(&index.1).unwrap();
            assert!(index["selection"]["dedup"]["kind"].is_string());
        }
    }
}

#[test]
fn documents_that_are_appended_change_no_earlier_verdict() {
    let bench = Bench::new();
    let near = |inputs: &[&str]| PrepareSettings {
        dedup: DedupSettings { dedup: Dedup::Near, ..DedupSettings::default() },
        ..bench.settings(inputs)
    };
    // Each document shares most of its words with the one before: a chain without an end.
    let all = text(1, 2000);
    let chain: Vec<String> = all.windows(100).step_by(9).map(|words| words.join(" ")).collect();
    bench.write("a.jsonl", lines(&chain[..90]));
    bench.write("b.jsonl", lines(&chain[90..]));
    let (first, _) = bench.prepare_in_phases(&near(&["a.jsonl"])).unwrap();
    let (both, _) = bench.prepare_in_phases(&near(&["a.jsonl", "b.jsonl"])).unwrap();
    assert!(first.dedup.near_copies > 0);
    // The documents that are kept of the first file are a prefix of those that are kept of both.
    let settings = near(&["a.jsonl"]);
    let kept = |settings: &PrepareSettings| {
        let (_, files) = bench.prepare_in_phases(settings).unwrap();
        files
    };
    assert!(both.documents > first.documents);
    let tokens = |files: &Files| {
        let shard = files.iter().find(|(name, _)| name.starts_with("shard-")).unwrap();
        let path = bench.write("shard.parquet", &shard.1);
        crate::support::tokens(&path)
    };
    let (a, b) = (tokens(&kept(&settings)), tokens(&kept(&near(&["a.jsonl", "b.jsonl"]))));
    assert!(b.len() > a.len() && b[..a.len()] == a);
}

#[test]
fn lists_and_filters_come_first() {
    let bench = Bench::new();
    let good = |seed: u32| {
        let sentence = |at: usize| text(seed * 10 + at as u32, 12).join(" ") + " is the end.";
        (0..6).map(sentence).collect::<Vec<_>>().join("\n")
    };
    let given = vec![
        // C4 rejects it, so that the next is the first of its kind.
        good(1) + "\nThis { is no prose at all.",
        good(1),
        // A copy of it once the menu is gone.
        good(1).replacen('\n', "\nMenu\n", 1),
        // Left out by its place; its copy is not.
        good(2),
        good(2),
        // Left out by their text, both of them.
        good(3),
        good(3),
    ];
    let left = vec![good(1), good(2)];
    let (_, expected) = bench.as_lines(&left);
    let input = bench.write("in.jsonl", lines(&given));
    let input = input.display();
    let hash = ContentHash::of(good(3).as_bytes());
    let unused = ContentHash::of(b"nothing");
    let list = format!("# asked for\n{input}\t4\n{hash}\n{input}\t99\n{unused}\nelsewhere.txt\n");
    let settings = PrepareSettings {
        filters: FilterSettings::from_list("c4").unwrap(),
        dedup: DedupSettings { dedup: Dedup::Near, ..DedupSettings::default() },
        exclude: Some(bench.write("keys.txt", list)),
        workers: number(2),
        ..bench.settings(&["in.jsonl"])
    };
    let (report, files) = bench.prepare_in_phases(&settings).unwrap();
    assert!(without_index(&files) == without_index(&expected));
    assert_eq!((report.documents, report.excluded), (2, 3));
    assert_eq!(report.filtered.rejected_documents(), 1);
    assert_eq!(report.filtered.dropped_lines.len(), 0, "the menu was in a copy");
    assert_eq!(report.dedup, DedupReport { copies: 1, near_copies: 0 });
    let unused = ["elsewhere.txt".to_owned(), format!("{input}\t99"), unused.to_string()];
    let mut expected_unused = unused.to_vec();
    expected_unused.sort();
    assert_eq!(report.unused_exclusions, expected_unused);
    // Without comparing, one pass does the same.
    let settings = PrepareSettings { dedup: DedupSettings::default(), ..settings };
    let (report, _) = bench.prepare(&settings).unwrap();
    assert_eq!((report.documents, report.excluded), (3, 3));
}

#[test]
fn inputs_that_change_between_the_passes_are_an_error() {
    let (given, _, _) = documents(Dedup::Exact);
    type Change = fn(&Bench);
    let changes: [(&str, Change); 4] = [
        ("a.jsonl", |bench| {
            let text = fs::read_to_string(bench.path("in/a.jsonl")).unwrap();
            bench.write("in/a.jsonl", text.replacen('a', "b", 1));
        }),
        ("a.jsonl", |bench| {
            bench.write("in/a.jsonl", "{\"text\": \"all of it\"}\n");
        }),
        ("b.txt", |bench| fs::remove_file(bench.path("in/b.txt")).unwrap()),
        ("b.txt", |bench| {
            bench.write("in/b.txt", "the others");
        }),
    ];
    for (name, change) in changes {
        let bench = Bench::new();
        bench.write("in/a.jsonl", lines(&given));
        bench.write("in/b.txt", "the other!");
        let settings = PrepareSettings {
            dedup: DedupSettings { dedup: Dedup::Exact, ..DedupSettings::default() },
            ..bench.settings(&["in"])
        };
        let mut is_changed = false;
        let prepared = prepare(&settings, &ByteTokenizer, &mut |progress| {
            if progress.phase == Phase::Sorting && !is_changed {
                change(&bench);
                is_changed = true;
            }
            ControlFlow::Continue(())
        });
        let error = prepared.unwrap_err();
        assert!(matches!(&error, PrepareError::InputChanged { .. }), "{error}");
        assert!(error.to_string().contains(name), "{error}");
        assert!(!settings.output.exists());
    }
}

#[test]
fn each_phase_can_be_broken_off() {
    let (given, _, _) = documents(Dedup::Exact);
    for phase in [Phase::Comparing, Phase::Sorting, Phase::Tokenizing] {
        let bench = Bench::new();
        bench.write("in.jsonl", lines(&given));
        let settings = PrepareSettings {
            dedup: DedupSettings { dedup: Dedup::Near, memory_bytes: 20_000 },
            ..bench.settings(&["in.jsonl"])
        };
        let prepared = prepare(&settings, &ByteTokenizer, &mut |progress| {
            if progress.phase == phase { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert!(matches!(prepared, Err(PrepareError::Interrupted)), "{phase:?}");
        assert!(!settings.output.exists());
    }
}
