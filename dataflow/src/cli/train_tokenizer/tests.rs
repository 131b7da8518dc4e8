//! Trained tokenizers are those that Hugging Face's library would train, if that counts right.

use std::ops::ControlFlow;

use tokenizers::models::bpe::BpeTrainer;
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

use super::*;

/// Texts of several scripts, with spaces of every kind and endings with apostrophes.
fn texts() -> Vec<String> {
    let pieces = [
        "the tide turns the mill",
        "The mill's wheel won't turn, they'll say: \"it's done\".",
        " ",
        "\n\n",
        "\t",
        "  ",
        "fn main() { let x_1 = 0xff; }",
        "größer naïve coöperate",
        "漢字かな交じり文",
        "Ⅷ ½ ٣٤",
        "e\u{301}a\u{300}",
        "🦀🦀 ok",
        "\u{a0}\u{3000}\u{2009}x",
        "\r\n",
        "don'T I'VE 'tis 's",
        "a'b'c",
        "1,234.5e-6",
        "\u{85}",
        "\u{1c}\u{200b}",
        "x\u{0}y",
    ];
    let mut state = 5_u64;
    let mut next = move |below: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    (0..300).map(|_| (0..1 + next(12)).map(|_| pieces[next(pieces.len())]).collect()).collect()
}

fn byte_texts(text: &str) -> String {
    text.bytes().map(tidemill_streaming_data::tokenizer::byte_char).collect()
}

#[test]
fn words_are_those_of_the_reference() {
    let bytes = ByteLevel::new(false, true, true);
    for text in texts() {
        let mut cut = PreTokenizedString::from(text.as_str());
        bytes.pre_tokenize(&mut cut).unwrap();
        let splits = cut.get_splits(OffsetReferential::Original, OffsetType::Byte);
        let expected: Vec<String> = splits.into_iter().map(|(word, ..)| word.to_owned()).collect();
        let found: Vec<String> =
            tidemill_streaming_data::tokenizer::words(&text).map(byte_texts).collect();
        assert_eq!(found, expected, "{text:?}");
    }
}

fn trained(scale: u64, size: usize, least_count: u64) -> BytePairs {
    let counts = WordCounts::default();
    texts().iter().for_each(|text| counts.add_text(text));
    let words = counts.into_words().map(|(word, count)| (word.into_string(), count * scale));
    let go_on = &mut |_| ControlFlow::Continue(());
    BytePairs::train(words, size, least_count, go_on).unwrap()
}

/// The vocabulary and the merges of the reference, by special tokens, of the same counts.
#[test]
fn byte_pairs_are_those_of_the_reference() {
    let special = special_tokens(&["<|endoftext|>".to_owned(), "<|pad|>".to_owned()]).unwrap();
    for (size, least_count) in [(300, 1), (420, 2), (700, 1), (5_000, 3)] {
        let counts = WordCounts::default();
        texts().iter().for_each(|text| counts.add_text(text));
        let words = counts.into_words().map(|(word, count)| (byte_texts(&word).into(), count));
        let counts = words.collect();
        let trainer = BpeTrainer::builder()
            .show_progress(false)
            .vocab_size(size)
            .min_frequency(least_count)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .special_tokens(special.clone())
            .build();
        let mut expected = BPE::default();
        trainer.do_train(&counts, &mut expected).unwrap();
        let json = json(&trained(1, size - special.len(), least_count), &special).unwrap();
        let found: serde_json::Value = serde_json::from_str(&json).unwrap();
        let expected = serde_json::to_value(&expected).unwrap();
        assert_eq!(found["model"]["vocab"], expected["vocab"], "{size}");
        assert_eq!(found["model"]["merges"], expected["merges"], "{size}");
    }
}

/// Counts too large for the 31 bits of a library change nothing.
#[test]
fn ten_terabytes_give_the_vocabulary_of_ten_kilobytes() {
    assert_eq!(trained(1 << 34, 500, 1), trained(1, 500, 1));
}

#[test]
fn what_is_written_tokenizes_and_gives_texts_back() {
    let special = special_tokens(&["<|endoftext|>".to_owned()]).unwrap();
    let pairs = trained(1, 500, 1);
    let json = json(&pairs, &special).unwrap();
    let tokenizer = Tokenizer::from_bytes(&json).unwrap();
    assert_eq!(tokenizer.token_to_id("<|endoftext|>"), Some(0));
    assert_eq!((pairs.tokens().len(), tokenizer.get_vocab_size(true)), (500, 501));
    let mut tokens = 0;
    for text in texts() {
        let encoded = tokenizer.encode(text.as_str(), false).unwrap();
        tokens += encoded.get_ids().len();
        assert_eq!(tokenizer.decode(encoded.get_ids(), false).unwrap(), text);
    }
    let bytes: usize = texts().iter().map(String::len).sum();
    assert!(tokens * 2 < bytes, "{tokens} tokens of {bytes} bytes");
}

#[test]
fn settings_that_cannot_be_met_are_refused() {
    let twice = special_tokens(&["a".to_owned(), "a".to_owned()]).unwrap_err().to_string();
    assert!(twice.contains("each once"), "{twice}");
    assert!(special_tokens(&[String::new()]).is_err());
    let small = merged_tokens(NonZeroU32::new(256).unwrap(), 1).unwrap_err().to_string();
    assert!(small.contains("at least 257"), "{small}");
    let special = special_tokens(&["the".to_owned()]).unwrap();
    let taken = json(&trained(1, 700, 1), &special).unwrap_err().to_string();
    assert!(taken.contains("--special-token"), "{taken}");
}
