//! Text to tokens and back, by any tokenizer.json.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use tidemill_evaluation::tokens::{Encode, EncodeError, SpecialTokens};
use tidemill_files::Kind;

use super::quiet::caught;
use crate::error::JobError;

/// A tokenizer read from a tokenizer.json.
pub(crate) struct TextTokenizer {
    tokenizer: tokenizers::Tokenizer,
    path: String,
}

impl TextTokenizer {
    /// Reads `path`. Lengths that it was saved with (those of a training long ago) are not applied: every text is
    /// tokenized whole, and nothing is filled up.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        let bytes = tidemill_files::read(path, Kind::Tokenizer)
            .with_context(|| format!("reading {} failed", path.display()))?;
        Self::of_bytes(&bytes, path)
    }

    /// As [`open`](Self::open), of what `path` holds.
    pub(crate) fn of_bytes(bytes: &[u8], path: &Path) -> anyhow::Result<Self> {
        let path = path.display().to_string();
        let wrong = |said: &dyn std::fmt::Display| {
            let what = format!("expected a Hugging Face tokenizer.json: {said}");
            JobError::Config { origin: path.clone(), what }
        };
        // The library panics where it meets a mistake of JSON in certain places.
        serde_json::from_slice::<AnyJson>(bytes).map_err(|error| wrong(&error))?;
        let read = || {
            let mut tokenizer = tokenizers::Tokenizer::from_bytes(bytes)?;
            tokenizer.with_truncation(None)?.with_padding(None);
            Ok(tokenizer)
        };
        let tokenizer: tokenizers::Result<_> = caught(read).map_err(|said| wrong(&said))?;
        Ok(Self { tokenizer: tokenizer.map_err(|error| wrong(&error))?, path })
    }

    /// The tokenizer.json in `folder`, where there is one.
    pub(crate) fn beside(folder: &Path) -> anyhow::Result<Option<Self>> {
        let path = folder.join("tokenizer.json");
        if path.exists() { Self::open(&path).map(Some) } else { Ok(None) }
    }

    /// The tokens of `text`, without special tokens around it.
    pub(crate) fn encode(&self, text: &str) -> anyhow::Result<Vec<u32>> {
        self.encode_with(text, SpecialTokens::LeftOut)
    }

    /// The tokens of `text`, with or without the tokens that the tokenizer puts around it.
    pub(crate) fn encode_with(
        &self,
        text: &str,
        special: SpecialTokens,
    ) -> anyhow::Result<Vec<u32>> {
        let added = special == SpecialTokens::Added;
        let encoding = caught(|| self.tokenizer.encode_fast(text, added))
            .map_err(|said| self.failed("tokenizing", &said))?;
        Ok(encoding.map_err(|error| self.failed("tokenizing", &error))?.get_ids().to_vec())
    }

    /// The text of `tokens`, special tokens left out.
    pub(crate) fn decode(&self, tokens: &[u32]) -> anyhow::Result<String> {
        let text = caught(|| self.tokenizer.decode(tokens, true))
            .map_err(|said| self.failed("decoding", &said))?;
        text.map_err(|error| self.failed("decoding", &error).into())
    }

    /// The error of a tokenizer that failed at `action`.
    fn failed(&self, action: &str, said: &dyn std::fmt::Display) -> JobError {
        let what = format!("{action} failed: {said}");
        JobError::Config { origin: self.path.clone(), what }
    }

    /// Decodes tokens one by one.
    pub(crate) fn text_stream(&self) -> TextStream<'_> {
        TextStream { tokenizer: self, window: Vec::new(), told: 0 }
    }

    /// One more than the largest id, added tokens included: ids may have gaps.
    pub(crate) fn vocab_size(&self) -> u32 {
        self.tokenizer.get_vocab(true).into_values().max().map_or(0, |id| id.saturating_add(1))
    }

    /// Its special tokens, in the order of their ids.
    pub(crate) fn special_tokens(&self) -> Vec<String> {
        let added: BTreeMap<u32, _> =
            self.tokenizer.get_added_tokens_decoder().into_iter().collect();
        added.into_values().filter(|token| token.special).map(|token| token.content).collect()
    }

    /// The texts of all added tokens, special or not, in the order of their ids.
    pub(crate) fn added_tokens(&self) -> Vec<String> {
        let added: BTreeMap<u32, _> =
            self.tokenizer.get_added_tokens_decoder().into_iter().collect();
        added.into_values().map(|token| token.content).collect()
    }

    /// The text of a token, as the tokenizer names it.
    pub(crate) fn token_text(&self, token: u32) -> Option<String> {
        self.tokenizer.id_to_token(token)
    }

    /// The id of a token by its text.
    pub(crate) fn token_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }
}

impl Encode for TextTokenizer {
    fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, EncodeError> {
        Ok(self.encode_with(text, special)?)
    }
}

/// Any JSON, which a deserializer reads whole and drops: in memory it would be many times as large.
struct AnyJson;

impl<'de> Deserialize<'de> for AnyJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for AnyJson {
    type Value = Self;

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Self, A::Error> {
        while values.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut values: A) -> Result<Self, A::Error> {
        while values.next_entry::<Self, Self>()?.is_some() {}
        Ok(self)
    }
}

/// The text of tokens that come one by one, in parts that together are the text of all.
///
/// The text of a token may depend on the one before it (a space, say, that a decoder leaves out where a text begins), but not
/// on all: so the tokens of the part told last are decoded again with those that follow it, and no earlier ones.
pub(crate) struct TextStream<'a> {
    tokenizer: &'a TextTokenizer,
    /// The tokens of the part told last, then those whose text is not told yet.
    window: Vec<u32>,
    /// How many of them are of the part told last.
    told: usize,
}

impl TextStream<'_> {
    /// The part that ends with `token`; none while a character is incomplete.
    ///
    /// # Errors
    /// Tokens that cannot be decoded.
    pub(crate) fn push(&mut self, token: u32) -> anyhow::Result<Option<String>> {
        self.window.push(token);
        let part = self.rest()?;
        if part.is_empty() || part.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(None);
        }
        self.window.drain(..self.told);
        self.told = self.window.len();
        Ok(Some(part))
    }

    /// The text that has not been told, which may end within a character.
    ///
    /// # Errors
    /// Tokens that cannot be decoded.
    pub(crate) fn rest(&self) -> anyhow::Result<String> {
        let (told, untold) = self.window.split_at(self.told);
        let (before, all) = (self.tokenizer.decode(told)?, self.tokenizer.decode(&self.window)?);
        match all.strip_prefix(&before) {
            Some(rest) => Ok(rest.to_owned()),
            // Bytes that make no text can also spoil the bytes before them; text that was returned stays.
            None => self.tokenizer.decode(untold),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use tidemill_streaming_data::prepare::{ByteTokenizer, Tokenize};

    fn tokenizer(json: &str) -> TextTokenizer {
        let tokenizer = tokenizers::Tokenizer::from_bytes(json).expect("a tokenizer");
        TextTokenizer { tokenizer, path: "tokenizer.json".to_owned() }
    }

    /// Words by their places in a list, then decoded.
    fn of_words(words: &[&str], decoder: &Value) -> TextTokenizer {
        let vocab: serde_json::Map<String, Value> =
            words.iter().enumerate().map(|(id, word)| ((*word).to_owned(), id.into())).collect();
        let model = json!({"type": "WordLevel", "vocab": vocab, "unk_token": words[0]});
        let json = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": null, "post_processor": null,
            "decoder": decoder, "model": model,
        });
        tokenizer(&json.to_string())
    }

    /// The parts of the text as they are returned, and then the rest.
    fn parts(tokenizer: &TextTokenizer, tokens: &[u32]) -> Vec<String> {
        let mut stream = tokenizer.text_stream();
        let mut parts: Vec<String> = Vec::new();
        for &token in tokens {
            parts.extend(stream.push(token).expect("decodes"));
        }
        parts.push(stream.rest().expect("decodes"));
        parts
    }

    /// As many tokens below `most`, which follow from `seed`.
    fn made_up(seed: u64, count: usize, most: u64) -> Vec<u32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % most
        };
        (0..count).map(|_| next() as u32).collect()
    }

    fn bytes() -> TextTokenizer {
        tokenizer(&ByteTokenizer.tokenizer_json().expect("has one"))
    }

    #[test]
    fn parts_are_the_text_of_all_tokens() {
        let words = ["a", "▁", "▁b", "▁▁c", ".", "▁not", "##d", "e"];
        let metaspace =
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"});
        let stripped = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]});
        let pieces = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
        let tokenizers = [metaspace, stripped, pieces]
            .map(|decoder| (of_words(&words, &decoder), words.len() as u64));
        // Most bytes in a row are no text, and three tokens are special.
        for (tokenizer, most) in tokenizers.into_iter().chain([(bytes(), 259)]) {
            for seed in 0..200 {
                let tokens = made_up(seed, 30, most);
                let all = tokenizer.decode(&tokens).expect("decodes");
                assert_eq!(parts(&tokenizer, &tokens).concat(), all, "{tokens:?}");
            }
        }
        let text: Vec<u32> = "größer 🦀".bytes().map(u32::from).collect();
        let expected = ["g", "r", "ö", "ß", "e", "r", " ", "🦀", ""];
        assert_eq!(parts(&bytes(), &text), expected);
        assert_eq!(parts(&bytes(), &text[..4]), ["g", "r", "ö", ""]);
        assert_eq!(parts(&bytes(), &text[..3]), ["g", "r", "\u{fffd}"]);
    }

    #[test]
    fn what_was_told_stays_where_later_bytes_make_it_no_text() {
        let words = ["?", "<0x41>", "<0xFF>", "b"];
        let tokenizer = of_words(&words, &json!({"type": "ByteFallback"}));
        assert_eq!(tokenizer.decode(&[1, 2]).expect("decodes"), "\u{fffd}\u{fffd}");
        assert_eq!(parts(&tokenizer, &[1, 2, 3, 3]), ["A", "\u{fffd}b", "b", ""]);
    }

    #[test]
    fn a_part_is_decoded_from_few_tokens_however_long_the_text() {
        let tokenizer = bytes();
        let mut stream = tokenizer.text_stream();
        for byte in "größer 🦀".repeat(50).bytes() {
            stream.push(u32::from(byte)).expect("decodes");
            assert!(stream.window.len() <= 8, "two characters: {:?}", stream.window);
        }
    }
}
