//! Texts cut into words, as GPT-2 does it.

use std::sync::LazyLock;

use regex_syntax::hir::{Class, HirKind};

/// The part that a character plays in a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Letter,
    Number,
    Space,
    Other,
}

/// The words of a text, which together are all of it: the matches of this expression, one after the other.
///
/// ```text
/// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
/// ```
///
/// So a space belongs to the word after it, and of several spaces before a word only the last does.
///
/// ```
/// let words: Vec<&str> = tidemill_streaming_data::tokenizer::words("we're  in 2026!").collect();
/// assert_eq!(words, ["we", "'re", " ", " in", " 2026", "!"]);
/// ```
pub fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (word, behind) = rest.split_at(first_word(rest)?);
        rest = behind;
        Some(word)
    })
}

/// The length of the first word; `None` at the end.
fn first_word(text: &str) -> Option<usize> {
    const CONTRACTIONS: [&str; 7] = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"];
    let first = text.chars().next()?;
    let contraction = |ending: &&&str| text.starts_with(**ending);
    if first == '\''
        && let Some(ending) = CONTRACTIONS.iter().find(contraction)
    {
        return Some(ending.len());
    }
    let before = usize::from(first == ' ');
    let of = text[before..].chars().next().map(Kind::of);
    match (Kind::of(first), of) {
        (Kind::Space, Some(Kind::Space) | None) => Some(spaces(text)),
        (Kind::Space, Some(kind)) if before == 1 => Some(before + run(&text[before..], kind)),
        (Kind::Space, Some(_)) => Some(spaces(text)),
        (kind, _) => Some(run(text, kind)),
    }
}

/// Bytes of the characters of `kind` with which the text begins.
fn run(text: &str, kind: Kind) -> usize {
    text.find(|character| Kind::of(character) != kind).unwrap_or(text.len())
}

/// Bytes of the white space at the beginning of the text, without its last character if there are several and other characters follow.
fn spaces(text: &str) -> usize {
    let all = run(text, Kind::Space);
    let last = text[..all].chars().next_back().map_or(0, char::len_utf8);
    if all == text.len() || last == all { all } else { all - last }
}

impl Kind {
    fn of(character: char) -> Self {
        match character {
            'a'..='z' | 'A'..='Z' => Self::Letter,
            '0'..='9' => Self::Number,
            _ if character.is_whitespace() => Self::Space,
            '\0'..='\x7f' => Self::Other,
            _ if LETTERS.contains(character) => Self::Letter,
            _ if NUMBERS.contains(character) => Self::Number,
            _ => Self::Other,
        }
    }
}

/// The characters of a general category.
struct Category(Vec<(char, char)>);

/// The tables of the regular expressions with which Hugging Face's library cuts: the same version of Unicode.
static LETTERS: LazyLock<Category> = LazyLock::new(|| Category::new(r"\p{L}"));
static NUMBERS: LazyLock<Category> = LazyLock::new(|| Category::new(r"\p{N}"));

impl Category {
    fn new(expression: &str) -> Self {
        let parsed = regex_syntax::parse(expression).map(regex_syntax::hir::Hir::into_kind);
        let ranges = match parsed {
            Ok(HirKind::Class(Class::Unicode(class))) => {
                class.ranges().iter().map(|range| (range.start(), range.end())).collect()
            }
            other => unreachable!("{expression} is a class of characters: {other:?}"),
        };
        Self(ranges)
    }

    fn contains(&self, character: char) -> bool {
        let behind = self.0.partition_point(|&(_, last)| last < character);
        self.0.get(behind).is_some_and(|&(first, _)| first <= character)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_gpt_2() {
        let cut = |text| words(text).collect::<Vec<_>>();
        assert_eq!(cut(""), [""; 0]);
        assert_eq!(cut("don't we'll I'd 's"), ["don", "'t", " we", "'ll", " I", "'d", " '", "s"]);
        assert_eq!(cut("it'S 'tis"), ["it", "'", "S", " '", "tis"]);
        assert_eq!(cut("a1b2 3c"), ["a", "1", "b", "2", " 3", "c"]);
        assert_eq!(cut("x +=  y;\n\n  z"), ["x", " +=", " ", " y", ";", "\n\n ", " z"]);
        assert_eq!(cut("a\nb\n\nc\t d"), ["a", "\n", "b", "\n", "\n", "c", "\t", " d"]);
        assert_eq!(cut("a  "), ["a", "  "]);
        assert_eq!(cut(" \u{a0}b \u{3000} c"), [" ", "\u{a0}", "b", " \u{3000}", " c"]);
        assert_eq!(cut("naïve Ⅷ½ 漢字かな¡"), ["naïve", " Ⅷ½", " 漢字かな", "¡"]);
        // Marks are no letters.
        assert_eq!(cut("e\u{301}x"), ["e", "\u{301}", "x"]);
    }
}
