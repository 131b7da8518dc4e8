//! Runs of normalised words, as hashes.
//!
//! Words are runs of letters and digits in lower case, a run of ASCII digits being one `0`; everything else
//! separates words. A shingle is a run of five words; a shorter text has one shingle, of all its words. A test pins
//! the hashes, since signatures made by different versions of this program are compared.

/// Words in a shingle.
pub(crate) const SHINGLE_WORDS: usize = 5;

/// A number all of whose bits depend on all bits of `x`, and back.
pub(super) fn mix(mut x: u64) -> u64 {
    x ^= x >> 32;
    x = x.wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^= x >> 32;
    x = x.wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 32)
}

/// The hash of a word, character by character.
#[derive(Default)]
struct Word {
    hash: u64,
    characters: u64,
}

impl Word {
    fn push(&mut self, character: u32) {
        let mixed = (self.hash ^ u64::from(character)).wrapping_mul(0x9e37_79b9_7f4a_7c55);
        self.hash = mixed.rotate_left(23);
        self.characters += 1;
    }

    /// Ends the word, if there is one.
    fn end(&mut self, words: &mut Vec<u64>) {
        if self.characters > 0 {
            words.push(mix(self.hash ^ self.characters));
            *self = Word::default();
        }
    }
}

/// Replaces the hashes by the hashes of the words of a text.
pub(super) fn words(text: &str, words: &mut Vec<u64>) {
    words.clear();
    let bytes = text.as_bytes();
    let mut word = Word::default();
    let mut is_behind_digit = false;
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        if byte.is_ascii() {
            at += 1;
            let is_digit = byte.is_ascii_digit();
            if is_digit && !is_behind_digit {
                word.push(u32::from(b'0'));
            } else if byte.is_ascii_alphabetic() {
                word.push(u32::from(byte.to_ascii_lowercase()));
            } else if !is_digit {
                word.end(words);
            }
            is_behind_digit = is_digit;
            continue;
        }
        is_behind_digit = false;
        let Some(character) = text[at..].chars().next() else { break };
        at += character.len_utf8();
        if character.is_alphanumeric() {
            character.to_lowercase().for_each(|character| word.push(u32::from(character)));
        } else {
            word.end(words);
        }
    }
    word.end(words);
}

/// Replaces the hashes by the hashes of the shingles; none if there is no word.
pub(super) fn shingles(words: &[u64], shingles: &mut Vec<u64>) {
    let hash = |words: &[u64]| {
        mix(words.iter().fold(words.len() as u64, |hash, word| {
            hash.rotate_left(13).wrapping_mul(0x9fb2_1c65_1e98_df25) ^ word
        }))
    };
    shingles.clear();
    match words.len() {
        0 => {}
        1..SHINGLE_WORDS => shingles.push(hash(words)),
        _ => shingles.extend(words.windows(SHINGLE_WORDS).map(hash)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words_of(text: &str) -> Vec<u64> {
        let mut hashes = Vec::new();
        words(text, &mut hashes);
        hashes
    }

    #[test]
    fn case_digits_and_what_is_between_words_do_not_matter() {
        let expected = words_of("the tide of 0 comes at 0h");
        for text in ["The TIDE of 1872, comes -- at 12h!", " the\ntide «of» 7 comes\u{2028}at 99h"]
        {
            assert_eq!(words_of(text), expected, "{text}");
        }
        assert_eq!(words_of("ÉTÉ à Ωμέγα"), words_of("été À ωΜΈΓΑ"));
        let distinct = ["a", "ab", "b", "ba", "a0", "0a", "0", "aa", "é", "日本"];
        let mut hashes: Vec<u64> = distinct.iter().flat_map(|text| words_of(text)).collect();
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), distinct.len());
        assert!(words_of(" .,!\n—").is_empty());
    }

    #[test]
    fn short_texts_have_one_shingle() {
        let count = |text| {
            let mut hashes = Vec::new();
            shingles(&words_of(text), &mut hashes);
            hashes.len()
        };
        assert_eq!(["", "a", "a b c d", "a b c d e", "a b c d e f g"].map(count), [0, 1, 1, 1, 3]);
    }
}
