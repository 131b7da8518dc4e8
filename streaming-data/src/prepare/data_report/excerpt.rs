//! Beginnings of documents, and how a text is shown that may hold anything.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

/// Characters (Unicode scalar values) of a document that a report shows.
pub const EXCERPT_CHARACTERS: usize = 240;

/// The bytes that such a beginning may have.
pub(crate) const EXCERPT_BYTES: usize = 4 * EXCERPT_CHARACTERS;

/// How a document begins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Excerpt {
    /// Its first [`EXCERPT_CHARACTERS`] characters, as they were read.
    pub text: String,
    /// Bytes of the whole document.
    pub document_bytes: u64,
}

impl Excerpt {
    /// The excerpt of a text.
    pub(crate) fn of(text: &str) -> Excerpt {
        let end = text.char_indices().nth(EXCERPT_CHARACTERS).map_or(text.len(), |(at, _)| at);
        Excerpt { text: text[..end].to_owned(), document_bytes: text.len() as u64 }
    }

    /// Whether there is more of the document.
    pub fn is_cut(&self) -> bool {
        (self.text.len() as u64) < self.document_bytes
    }
}

/// A piece of a text as it is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shown {
    /// A character that is shown as it is.
    Plain(char),
    /// A character that would not be seen, or would change how others are: by its symbol.
    Symbol(char),
    /// Such a character that has no symbol: by its number.
    Number(u32),
}

/// How a character is shown. A character that moves, hides or reorders others is shown as a symbol or a number: control
/// characters, marks of direction, joiners and spaces without width, tags, and numbers that are no characters.
pub(crate) fn shown(character: char) -> Shown {
    let number = u32::from(character);
    let symbol = |number| char::from_u32(number).map_or(Shown::Number(number), Shown::Symbol);
    match number {
        0..=0x1f => symbol(0x2400 + number),
        0x7f => symbol(0x2421),
        0x80..=0x9f
        | 0xad
        | 0x34f
        | 0x61c
        | 0x115f..=0x1160
        | 0x17b4..=0x17b5
        | 0x180b..=0x180f
        | 0x200b..=0x200f
        | 0x2028..=0x202e
        | 0x2060..=0x206f
        | 0x3164
        | 0xe000..=0xf8ff
        | 0xfdd0..=0xfdef
        | 0xfe00..=0xfe0f
        | 0xfeff
        | 0xffa0
        | 0xfff0..=0xfffb
        | 0x1d173..=0x1d17a
        | 0xe0000..=0x10_ffff => Shown::Number(number),
        _ if number & 0xfffe == 0xfffe => Shown::Number(number),
        _ => Shown::Plain(character),
    }
}

/// A text in one line that a terminal shows as it is: characters that are not plain become symbols or numbers.
pub fn in_a_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for character in text.chars() {
        match shown(character) {
            Shown::Plain(character) | Shown::Symbol(character) => line.push(character),
            Shown::Number(number) => _ = write!(line, "<U+{number:04X}>"),
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_excerpt_ends_between_characters() {
        for character in ["a", "ß", "水", "🌊"] {
            let whole = character.repeat(EXCERPT_CHARACTERS);
            let excerpt = Excerpt::of(&whole);
            assert!(excerpt.text == whole && !excerpt.is_cut() && whole.len() <= EXCERPT_BYTES);
            let longer = Excerpt::of(&(whole.clone() + "\0"));
            assert!(longer.text == whole && longer.is_cut());
            assert_eq!(longer.document_bytes, whole.len() as u64 + 1);
        }
        assert_eq!(Excerpt::of("").text, "");
    }

    #[test]
    fn what_is_not_seen_is_told() {
        let hostile =
            "a\0b\u{1b}[31m\r\n\u{7f}\u{85}\u{202e}cod\u{2066}\u{200b}\u{feff}\u{ffff}\u{e0041}é水";
        assert_eq!(
            in_a_line(hostile),
            "a␀b␛[31m␍␊␡<U+0085><U+202E>cod<U+2066><U+200B><U+FEFF><U+FFFF><U+E0041>é水"
        );
    }
}
