//! Damaged tokenizers: an error, or a tokenizer that works as well as it can; never a panic.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use serde_json::{Value, json};
use tidemill_streaming_data::prepare::{ByteTokenizer, Tokenize};

use super::tests::{bpe_of_characters, byte_level, unigram, word_level, word_piece};
use crate::cli::tokenizer::TextTokenizer;

const CASES: u64 = 3000;

/// Draws that follow from a seed.
struct Draws(u64);

impl Draws {
    fn below(&mut self, most: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % most.max(1)
    }
}

/// Small files of every kind.
fn files() -> Vec<String> {
    let made =
        [byte_level("<|endoftext|>"), bpe_of_characters(), unigram(), word_piece(), word_level()];
    let mut files: Vec<String> =
        made.iter().map(|tokenizer| tokenizer.to_string(false).expect("is JSON")).collect();
    files.push(ByteTokenizer.tokenizer_json().expect("has one"));
    files
}

/// A value somewhere in `value`.
fn any_within<'v>(value: &'v mut Value, draws: &mut Draws) -> &'v mut Value {
    let count = match value {
        Value::Array(values) => values.len(),
        Value::Object(values) => values.len(),
        _ => 0,
    };
    // The deeper, the rarer.
    if count == 0 || draws.below(4) == 0 {
        return value;
    }
    let at = draws.below(count);
    let inner = match value {
        Value::Array(values) => values.get_mut(at),
        Value::Object(values) => values.values_mut().nth(at),
        _ => None,
    };
    any_within(inner.expect("counted above"), draws)
}

/// A value of another kind, for the place of a value.
fn other(draws: &mut Draws) -> Value {
    let words = ["", "WordPiece", "ByteLevel", "Sequence", "[UNK]", "\u{0}", "(((", "\u{10ffff}"];
    match draws.below(10) {
        0 => Value::Null,
        1 => json!(true),
        2 => json!(-1),
        3 => json!(u64::MAX),
        4 => json!(1e300),
        5 => json!([]),
        6 => json!({}),
        7 => json!([["a", 0.0], ["b", -1e30], ["a", 3]]),
        8 => {
            json!({"type": words[draws.below(words.len())], "decoders": [], "pattern": {"Regex": "(?<"}})
        }
        _ => json!(words[draws.below(words.len())]),
    }
}

/// A file with some damage.
fn damaged(files: &[String], draws: &mut Draws) -> Vec<u8> {
    let mut bytes = files[draws.below(files.len())].clone().into_bytes();
    let at = draws.below(bytes.len());
    match draws.below(6) {
        0 => bytes.truncate(at),
        1 => bytes[at] ^= 1 << draws.below(8),
        2 => {
            let end = (at + draws.below(40)).min(bytes.len());
            bytes.drain(at..end);
        }
        3 => {
            let more = "[{\"\\\u{1}:,".bytes().take(1 + draws.below(7));
            bytes.splice(at..at, more);
        }
        _ => {
            let mut json: Value = serde_json::from_slice(&bytes).expect("is JSON");
            for _ in 0..=draws.below(3) {
                *any_within(&mut json, draws) = other(draws);
            }
            bytes = json.to_string().into_bytes();
        }
    }
    bytes
}

#[test]
fn a_tokenizer_with_any_damage_is_an_error_or_a_tokenizer_and_never_a_panic() {
    let files = files();
    let (mut opened, mut refused) = (0, 0);
    for seed in 0..CASES {
        let bytes = damaged(&files, &mut Draws(seed));
        let used = catch_unwind(AssertUnwindSafe(|| {
            let Ok(tokenizer) = TextTokenizer::of_bytes(&bytes, Path::new("t")) else {
                return false;
            };
            let tokens = tokenizer.encode("The tide, in é 🦀.").unwrap_or_default();
            let _ = (tokenizer.decode(&tokens), tokenizer.decode(&[0, 7, u32::MAX]));
            let _ = (tokenizer.vocab_size(), tokenizer.special_tokens());
            true
        }));
        match used {
            Ok(true) => opened += 1,
            Ok(false) => refused += 1,
            Err(_) => panic!("seed {seed}: {}", String::from_utf8_lossy(&bytes)),
        }
    }
    assert!(opened > CASES / 20 && refused > CASES / 2, "{opened} opened, {refused} refused");
}

#[test]
fn a_download_that_was_cut_off_is_told_as_what_it_is() {
    for file in files() {
        for end in (0..file.len()).step_by(file.len() / 200 + 1) {
            let bytes = &file.as_bytes()[..end];
            let error = TextTokenizer::of_bytes(bytes, Path::new("t")).err().expect("refused");
            let error = error.to_string();
            assert!(error.starts_with("t: expected a Hugging Face tokenizer.json: "), "{error}");
            assert!(error.contains("EOF") || error.contains("UTF-8"), "{end}: {error}");
        }
    }
}

/// Input that nests without end is refused, in whichever part of the file it is.
#[test]
fn a_decoder_that_is_no_json_or_nests_too_deeply_is_refused() {
    let whole: Value = serde_json::from_str(&files()[0]).expect("is JSON");
    for part in ["decoder", "normalizer", "pre_tokenizer", "post_processor", "model"] {
        for wrong in
            ["{\"type\": }", "1e999", "\"\\ud800\"", &"[".repeat(5000), &"{\"a\":".repeat(200)]
        {
            let mut json = whole.clone();
            json[part] = "HERE".into();
            let text = json.to_string().replacen("\"HERE\"", wrong, 1);
            let error = TextTokenizer::of_bytes(text.as_bytes(), Path::new("t")).err();
            let error = error.expect("refused").to_string();
            assert!(!error.contains("Helper"), "{part}: {error}");
        }
    }
}
