//! Byte-pair encoding at speed: by `fastokens`, where that gives what `tokenizers` gives.
//!
//! Tokens are those of Hugging Face's library, which `transformers` reads a tokenizer.json with; another is used for its speed alone,
//! and only while it agrees. Before any document is tokenized both encode texts that are made to be difficult, and then documents
//! of the data set: the first ones, and one of every few hundred, chosen by its text.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;

use crate::cli::quiet::caught;
use crate::cli::tokenizer::TextTokenizer;

/// The first documents of a data set, in any order, which are all compared.
const FIRST_DOCUMENTS: usize = 32;
/// After these, one document of so many is compared: the slower library then takes a tenth of the time.
const ONE_OF: u64 = 256;
/// The longest document that is compared, in bytes.
const LONGEST_COMPARED: usize = 1 << 20;

/// A tokenizer that agrees with another on difficult texts.
pub(super) struct FastTokenizer {
    tokenizer: fastokens::Tokenizer,
    documents: AtomicUsize,
}

impl FastTokenizer {
    /// The fast tokenizer of a tokenizer.json which `reference` has read; `None` where this library lacks its kind, or gives other tokens
    /// for any of the texts that are tried.
    pub(super) fn open(mut json: Value, reference: &TextTokenizer) -> Option<Self> {
        // No lengths that it was saved with, no tokens around a text, and nothing is decoded.
        for part in ["truncation", "padding", "post_processor", "decoder"] {
            json[part] = Value::Null;
        }
        let tokenizer = caught(|| fastokens::Tokenizer::from_json(json)).ok()?.ok()?;
        let opened = Self { tokenizer, documents: AtomicUsize::new(0) };
        let agrees = |text: &String| {
            reference.encode(text).is_ok_and(|expected| opened.encode(text) == Some(expected))
        };
        let (added, words) = (reference.added_tokens(), words(reference));
        difficult_texts(added, words).all(|text| agrees(&text)).then_some(opened)
    }

    /// The tokens of `text`; `None` where the library does not give any.
    pub(super) fn encode(&self, text: &str) -> Option<Vec<u32>> {
        caught(|| self.tokenizer.encode(text)).ok()?.ok()
    }

    /// Whether the tokens of this document are to be compared.
    pub(super) fn is_compared(&self, text: &str) -> bool {
        if text.len() > LONGEST_COMPARED {
            return false;
        }
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        hasher.finish().is_multiple_of(ONE_OF)
            || self.documents.load(Ordering::Relaxed) < FIRST_DOCUMENTS
                && self.documents.fetch_add(1, Ordering::Relaxed) < FIRST_DOCUMENTS
    }
}

/// The texts of tokens of `tokenizer`, from all over its vocabulary.
fn words(tokenizer: &TextTokenizer) -> Vec<String> {
    const MOST: usize = 8192;
    let size = tokenizer.vocab_size();
    let every = (size as usize).div_ceil(MOST).max(1);
    let texts = (0..size).step_by(every).filter_map(|token| tokenizer.decode(&[token]).ok());
    texts.filter(|text| !text.is_empty()).collect()
}

/// Texts in which characters of every kind meet, `words`, and the added tokens of a tokenizer whole and in parts: the same each
/// time.
fn difficult_texts(added_tokens: Vec<String>, words: Vec<String>) -> impl Iterator<Item = String> {
    /// Characters that tokenizers tell apart, or change.
    const KINDS: [&str; 14] = [
        "abcdefghijklmnopqrstuvwxyz",
        "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        "0123456789",
        " \t\n\r",
        "\u{b}\u{c}\u{85}\u{a0}\u{2003}\u{2028}\u{3000}",
        "'\"`’“”«»",
        "!?.,;:-_()[]{}<>|/\\@#$%^&*+=~",
        "éàüßñçøåÆŒŽšđĳǆ",
        "\u{301}\u{300}\u{308}\u{327}\u{323}\u{200d}\u{fe0f}\u{200b}",
        "漢字仮名交じり文한국어조선각",
        "مرحباשלוםनमस्तेไทย",
        "😀👩🏽🇩🇪🎉",
        "\u{0}\u{1}\u{1f}\u{7f}\u{fffd}\u{e000}",
        "ⅠⅡ①²½³٣४ﬁﬂÅΩK",
    ];
    /// Texts whose meaning is in more than single characters.
    const RUNS: [&str; 12] = [
        "the", " don't", " I'LL", "it's", "    ", "\r\n", "\n\n\n", " \n ", "1234567", "--------",
        "▁", "éé",
    ];
    const TEXTS: usize = 600;
    let kinds: Vec<Vec<char>> = KINDS.iter().map(|kind| kind.chars().collect()).collect();
    let mut state = 0_u64;
    // Knuth's multiplier (MMIX); the upper bits are the better ones.
    let mut pick = move |choices: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % choices
    };
    (0..TEXTS).map(move |_| {
        let mut text = String::new();
        for _ in 0..1 + pick(60) {
            match pick(10) {
                0 if !added_tokens.is_empty() => {
                    let token = &added_tokens[pick(added_tokens.len())];
                    let whole = pick(3) > 0;
                    let characters = token.chars().count();
                    let end = if whole { characters } else { pick(characters + 1) };
                    text.extend(token.chars().take(end));
                }
                0 | 1 => text.push_str(RUNS[pick(RUNS.len())]),
                2 => {
                    let kind = &kinds[pick(kinds.len())];
                    let character = kind[pick(kind.len())];
                    text.extend(std::iter::repeat_n(character, pick(40)));
                }
                3..6 if !words.is_empty() => text.push_str(&words[pick(words.len())]),
                _ => {
                    let kind = &kinds[pick(kinds.len())];
                    text.extend((0..1 + pick(9)).map(|_| kind[pick(kind.len())]));
                }
            }
            if pick(3) == 0 {
                text.push(' ');
            }
        }
        text
    })
}
