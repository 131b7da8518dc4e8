//! The tokenizer `bytes`: a token is a byte of UTF-8.
//!
//! It needs no training and no file, fits any text, and its vocabulary is small enough for a first
//! model on a laptop. Its `tokenizer.json` says the same in the words of Hugging Face tokenizers:
//! byte-level BPE without merges, in which the character that GPT-2 writes for byte `b` has id
//! `b`. One difference is theirs to make: they read the names of special tokens inside a text
//! (`<|endoftext|>`) as these tokens, where this tokenizer sees only bytes.

use super::tokenize::{Pieces, Tokenize, TokenizeError};

/// Bytes as tokens: 0 to 255 are bytes, then bos, eos and pad.
#[derive(Debug, Clone, Copy, Default)]
pub struct ByteTokenizer;

impl ByteTokenizer {
    /// Begins a text: `<|bos|>`.
    pub const BOS: u32 = 256;
    /// Ends a document: `<|endoftext|>`.
    pub const EOS: u32 = 257;
    /// Fills: `<|pad|>`.
    pub const PAD: u32 = 258;
    /// Size of the vocabulary.
    pub const VOCAB_SIZE: u32 = 259;
}

impl Tokenize for ByteTokenizer {
    fn encode(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), TokenizeError> {
        tokens.extend(text.bytes().map(u32::from));
        Ok(())
    }

    fn vocab_size(&self) -> u32 {
        ByteTokenizer::VOCAB_SIZE
    }

    fn bos_token_id(&self) -> Option<u32> {
        Some(ByteTokenizer::BOS)
    }

    fn eos_token_id(&self) -> u32 {
        ByteTokenizer::EOS
    }

    fn pad_token_id(&self) -> Option<u32> {
        Some(ByteTokenizer::PAD)
    }

    fn tokenizer_json(&self) -> Option<String> {
        // Assembled as text, entry by entry: the order of keys in a `serde_json::Map` depends on
        // features that any other crate of the build may turn on.
        let added: Vec<String> = [
            (ByteTokenizer::BOS, "<|bos|>"),
            (ByteTokenizer::EOS, "<|endoftext|>"),
            (ByteTokenizer::PAD, "<|pad|>"),
        ]
        .map(|(id, content)| {
            format!(
                "    {{\"id\": {id}, \"content\": \"{content}\", \"single_word\": false, \
                 \"lstrip\": false, \"rstrip\": false, \"normalized\": false, \"special\": true}}"
            )
        })
        .into();
        let vocab: Vec<String> = byte_characters()
            .iter()
            .enumerate()
            .map(|(byte, character)| match character {
                '"' | '\\' => format!("      \"\\{character}\": {byte}"),
                _ => format!("      \"{character}\": {byte}"),
            })
            .collect();
        let byte_level = "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \
                          \"trim_offsets\": false, \"use_regex\": false}";
        Some(format!(
            "{{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n  \
             \"added_tokens\": [\n{added}\n  ],\n  \"normalizer\": null,\n  \
             \"pre_tokenizer\": {byte_level},\n  \"post_processor\": null,\n  \
             \"decoder\": {byte_level},\n  \"model\": {{\n    \"type\": \"BPE\",\n    \
             \"dropout\": null,\n    \"unk_token\": null,\n    \
             \"continuing_subword_prefix\": null,\n    \"end_of_word_suffix\": null,\n    \
             \"fuse_unk\": false,\n    \"byte_fallback\": false,\n    \"ignore_merges\": false,\n    \
             \"vocab\": {{\n{vocab}\n    }},\n    \"merges\": []\n  }}\n}}\n",
            added = added.join(",\n"),
            vocab = vocab.join(",\n"),
        ))
    }

    fn pieces(&self) -> Pieces {
        Pieces::AtCharacters
    }
}

/// The character that byte-level BPE writes for each byte: itself where it is printable Latin-1,
/// else the next unused one from U+0100 on (`bytes_to_unicode` of GPT-2's `encoder.py`).
fn byte_characters() -> [char; 256] {
    let mut unprintable = '\u{100}'..;
    std::array::from_fn(|byte| match char::from(byte as u8) {
        printable @ ('!'..='~' | '¡'..='¬' | '®'..='ÿ') => printable,
        _ => unprintable.next().expect("there are 68 unprintable bytes and more characters"),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn tokens_are_the_bytes_of_the_text() {
        let text = "a\0\n é 🦀 <|endoftext|>";
        let mut tokens = vec![7];
        ByteTokenizer.encode(text, &mut tokens).unwrap();
        let bytes: Vec<u32> = text.bytes().map(u32::from).collect();
        assert_eq!(tokens[0], 7, "encode appends");
        assert_eq!(tokens[1..], bytes);
    }

    #[test]
    fn tokenizer_json_gives_each_byte_its_own_id() {
        let json = ByteTokenizer.tokenizer_json().unwrap();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let vocab = json["model"]["vocab"].as_object().unwrap();
        let ids: BTreeSet<u64> = vocab.values().map(|id| id.as_u64().unwrap()).collect();
        assert_eq!(ids, (0..256).collect());
        // From GPT-2's table: printable bytes stand for themselves, the others are moved up.
        for (character, byte) in [("A", 65), ("\"", 34), ("\\", 92), ("Ā", 0), ("Ċ", 10), ("Ġ", 32)]
        {
            assert_eq!(vocab[character], byte, "{character}");
        }
        for (character, byte) in [("ġ", 127), ("Ģ", 128), ("ł", 160), ("Ń", 173), ("ÿ", 255)] {
            assert_eq!(vocab[character], byte, "{character}");
        }
        let special: Vec<_> = json["added_tokens"].as_array().unwrap().iter().collect();
        let ids: Vec<_> = special.iter().map(|token| token["id"].as_u64().unwrap()).collect();
        assert_eq!(ids, [256, 257, 258]);
        assert_eq!(json["model"]["merges"].as_array().unwrap().len(), 0);
    }
}
