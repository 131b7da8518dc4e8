//! The bounds of memory, and harm that a tokenizer does.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::*;
use crate::prepare::{
    ByteTokenizer, Reporting, Tokenize, TokenizeError,
    choose::{admit::Rules, exclude::Exclusions},
    input::{Sources, find::find_inputs},
    output::{OutputFolder, shard::ShardFormat},
    pipeline::job::Bounds,
    tokens::pack::{Cut, Rows},
};

/// A tokenizer that may do harm, and needs documents whole or not.
struct Harmful {
    pieces: Pieces,
    encode: fn(&str) -> Result<Vec<u32>, TokenizeError>,
}

impl Tokenize for Harmful {
    fn encode(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), TokenizeError> {
        tokens.extend((self.encode)(text)?);
        Ok(())
    }
    fn vocab_size(&self) -> u32 {
        ByteTokenizer::VOCAB_SIZE
    }
    fn bos_token_id(&self) -> Option<u32> {
        None
    }
    fn eos_token_id(&self) -> u32 {
        ByteTokenizer::EOS
    }
    fn pad_token_id(&self) -> Option<u32> {
        None
    }
    fn tokenizer_json(&self) -> Option<String> {
        None
    }
    fn pieces(&self) -> Pieces {
        self.pieces
    }
}

fn run_on(
    input: PathBuf,
    tokenizer: &dyn Tokenize,
    workers: usize,
    bounds: Bounds,
) -> Result<Outcome, PrepareError> {
    run_with(&input, tokenizer, workers, bounds, Strictness::Strict)
}

fn run_with(
    input: &Path,
    tokenizer: &dyn Tokenize,
    workers: usize,
    bounds: Bounds,
    strictness: Strictness,
) -> Result<Outcome, PrepareError> {
    let mut inputs = find_inputs(&[input.to_owned()], "**/*.txt")?.inputs;
    let sources = Sources::new(&mut inputs, None)?;
    let format = ShardFormat::new(63).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut output = OutputFolder::begin(&folder.path().join("out"))?;
    let work = Work {
        inputs: &inputs,
        sources: &sources,
        rules: Rules {
            reporting: Reporting::None,
            exclusions: &Exclusions::default(),
            filters: &[],
            pass: Pass::Tokenize(None),
        },
        tokenizer,
        vocab_size: None,
        cut: Cut {
            seq_len: 63,
            row_group_samples: 100,
            shard_samples: 1000,
            rows: Rows::Overlapping,
        },
        format: &format,
        folder: folder.path(),
        strictness,
        workers,
        bounds,
        peers: None,
    };
    run(&work, Some(&mut output), None, &mut |_| ControlFlow::Continue(()))
}

const SMALL: Bounds = Bounds { piece_bytes: 1 << 16, document_bytes: 1 << 20, held_bytes: 4 << 20 };

#[test]
fn memory_is_bounded_however_large_a_document_or_however_many() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.txt");
    let line = "a line of 32 bytes, with an é.\n";
    assert_eq!(line.len(), 32);
    fs::write(&path, line.repeat(2 << 20)).unwrap();
    let outcome = run_on(path, &ByteTokenizer, 3, SMALL).unwrap();
    assert_eq!((outcome.text_bytes, outcome.tokens), (64 << 20, (64 << 20) + 1));
    // A row group may be completed by a text that brings only its last token.
    let row_group = (100 * 63 + 1) * HELD_BYTES_PER_TOKEN;
    let peak = outcome.peak_held_bytes;
    assert!(peak <= SMALL.held_bytes + row_group, "held {peak} bytes");
    assert!(peak > SMALL.held_bytes / 2, "the threads are kept busy, held {peak} bytes");

    for number in 0..3000 {
        fs::write(folder.path().join(format!("{number}.txt")), "").unwrap();
    }
    fs::remove_file(folder.path().join("large.txt")).unwrap();
    let outcome = run_on(folder.path().to_owned(), &ByteTokenizer, 2, SMALL).unwrap();
    assert_eq!((outcome.empty, outcome.tokens), (3000, 0));
    assert!(outcome.peak_held_bytes <= SMALL.held_bytes);
}

#[test]
fn pieces_make_the_same_shards_as_whole_documents() {
    let folder = tempfile::tempdir().unwrap();
    let text: String = (0..60_000_u32).map(|i| ['a', 'é', '€', '🦀'][i as usize % 4]).collect();
    fs::write(folder.path().join("a.txt"), &text).unwrap();
    fs::write(folder.path().join("b.txt"), &text[..100_001 / 10 * 10]).unwrap();
    let bytes: fn(&str) -> _ = |text| Ok(text.bytes().map(u32::from).collect());
    let mut all = Vec::new();
    for (pieces, piece_bytes, workers) in [
        (Pieces::Whole, 10, 1),
        (Pieces::AtCharacters, u64::MAX, 2),
        (Pieces::AtCharacters, 1001, 3),
        (Pieces::AtCharacters, 99_991, 2),
    ] {
        let tokenizer = Harmful { pieces, encode: bytes };
        let bounds = Bounds { piece_bytes, held_bytes: 1 << 20, ..SMALL };
        let outcome = run_on(folder.path().to_owned(), &tokenizer, workers, bounds).unwrap();
        assert_eq!(outcome.documents, 2);
        all.push((outcome.shards, outcome.tokens, outcome.dropped_tokens, outcome.text_bytes));
    }
    assert!(all[0].0.len() > 1, "several shards");
    assert!(all.iter().all(|one| *one == all[0]), "{all:?}");
}

#[test]
fn harm_done_by_a_tokenizer_ends_the_run_with_an_error_that_names_the_document() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a", "b", "c", "d"] {
        fs::write(folder.path().join(name).with_extension("txt"), name).unwrap();
    }
    let fail = |encode| {
        let tokenizer = Harmful { pieces: Pieces::Whole, encode };
        run_on(folder.path().to_owned(), &tokenizer, 3, SMALL).unwrap_err()
    };
    // Every document but the first is refused: the first refused in order is the one named.
    for _ in 0..20 {
        let error = fail(|text| if text == "a" { Ok(vec![1]) } else { Err("no".into()) });
        assert!(matches!(&error, PrepareError::Tokenize { .. }), "{error}");
        assert!(error.to_string().ends_with("b.txt"), "{error}");
    }
    let error = fail(|text| Ok(vec![if text == "c" { 259 } else { 258 }]));
    let message = error.to_string();
    assert!(message.contains("c.txt: the tokenizer gave token 259"), "{message}");
    let error = fail(|text| if text == "b" { panic!("at {text}") } else { Ok(vec![]) });
    let message = error.to_string();
    assert!(message.contains("b.txt: at b"), "{message}");
}

#[test]
fn memory_is_bounded_however_many_lines_and_a_line_above_the_bound_is_broken() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.jsonl");
    let line = format!("{{\"text\": \"{}\"}}\n", "a".repeat(100));
    let limit = SMALL.document_bytes as usize;
    let of_bytes = |bytes: usize| format!("{{\"text\": \"{}\"}}", "b".repeat(bytes - 12));
    let content = [
        line.repeat(30_000),
        of_bytes(limit),
        format!("\n{}\n", of_bytes(limit + 1)),
        line.repeat(30_000),
        format!("{}\n", of_bytes(20 * limit)),
        line.repeat(30_000),
        of_bytes(2 * limit),
    ];
    fs::write(&path, content.concat()).unwrap();
    let mut outcomes = Vec::new();
    for workers in [1, 3] {
        let strictness = Strictness::Lenient;
        let outcome = run_with(&path, &ByteTokenizer, workers, SMALL, strictness).unwrap();
        let text_bytes = 9_000_000 + limit as u64 - 12;
        assert_eq!((outcome.documents, outcome.text_bytes), (90_001, text_bytes));
        let places: Vec<_> = outcome.broken.named.iter().map(|one| one.place.to_string()).collect();
        assert_eq!(places, ["line 30002", "line 60003", "line 90004"]);
        let reason = outcome.broken.named[1].reason.to_string();
        assert!(reason.contains("longer than 1048576 bytes"), "{reason}");
        let row_group = (100 * 63 + 1) * HELD_BYTES_PER_TOKEN;
        let longest = SMALL.document_bytes * HELD_BYTES_PER_TEXT_BYTE;
        let peak = outcome.peak_held_bytes;
        assert!(peak <= SMALL.held_bytes + longest + 2 * row_group, "held {peak} bytes");
        outcomes.push(outcome.shards);
    }
    assert_eq!(outcomes[0], outcomes[1]);
}
