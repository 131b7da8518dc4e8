//! The characters that filters count as symbols, as white space and as ends of lines.
//!
//! The symbols are datatrove's, as the sets use its thresholds; white space and ends of lines are Python's, the
//! language of all the sources: one space more or less changes verdicts.

/// Symbols that end a sentence, in many scripts.
#[rustfmt::skip]
const TERMINAL: [(char, char); 82] = [
    ('\u{21}', '\u{21}'), ('\u{2e}', '\u{2e}'), ('\u{3f}', '\u{3f}'), ('\u{589}', '\u{589}'),
    ('\u{61d}', '\u{61f}'), ('\u{6d4}', '\u{6d4}'), ('\u{700}', '\u{702}'),
    ('\u{7f9}', '\u{7f9}'), ('\u{837}', '\u{837}'), ('\u{839}', '\u{839}'),
    ('\u{83d}', '\u{83e}'), ('\u{964}', '\u{965}'), ('\u{104a}', '\u{104b}'),
    ('\u{1362}', '\u{1362}'), ('\u{1367}', '\u{1368}'), ('\u{166e}', '\u{166e}'),
    ('\u{1735}', '\u{1736}'), ('\u{17d4}', '\u{17d6}'), ('\u{17d9}', '\u{17da}'),
    ('\u{1803}', '\u{1803}'), ('\u{1809}', '\u{1809}'), ('\u{1944}', '\u{1945}'),
    ('\u{1aa8}', '\u{1aab}'), ('\u{1b5a}', '\u{1b5b}'), ('\u{1b5e}', '\u{1b5f}'),
    ('\u{1b7d}', '\u{1b7e}'), ('\u{1c3b}', '\u{1c3c}'), ('\u{1c7e}', '\u{1c7f}'),
    ('\u{203c}', '\u{203d}'), ('\u{2047}', '\u{2049}'), ('\u{2e2e}', '\u{2e2e}'),
    ('\u{2e3c}', '\u{2e3c}'), ('\u{2e53}', '\u{2e54}'), ('\u{3002}', '\u{3002}'),
    ('\u{a4ff}', '\u{a4ff}'), ('\u{a60e}', '\u{a60f}'), ('\u{a6f3}', '\u{a6f3}'),
    ('\u{a6f7}', '\u{a6f7}'), ('\u{a876}', '\u{a877}'), ('\u{a8ce}', '\u{a8cf}'),
    ('\u{a92f}', '\u{a92f}'), ('\u{a9c8}', '\u{a9c9}'), ('\u{aa5d}', '\u{aa5f}'),
    ('\u{aaf0}', '\u{aaf1}'), ('\u{abeb}', '\u{abeb}'), ('\u{fe52}', '\u{fe52}'),
    ('\u{fe56}', '\u{fe57}'), ('\u{ff01}', '\u{ff01}'), ('\u{ff0e}', '\u{ff0e}'),
    ('\u{ff1f}', '\u{ff1f}'), ('\u{ff61}', '\u{ff61}'), ('\u{10a56}', '\u{10a57}'),
    ('\u{10f55}', '\u{10f59}'), ('\u{10f86}', '\u{10f89}'), ('\u{11047}', '\u{11048}'),
    ('\u{110be}', '\u{110c1}'), ('\u{11141}', '\u{11143}'), ('\u{111c5}', '\u{111c6}'),
    ('\u{111cd}', '\u{111cd}'), ('\u{111de}', '\u{111df}'), ('\u{11238}', '\u{11239}'),
    ('\u{1123b}', '\u{1123c}'), ('\u{112a9}', '\u{112a9}'), ('\u{1144b}', '\u{1144c}'),
    ('\u{115c2}', '\u{115c3}'), ('\u{115c9}', '\u{115d7}'), ('\u{11641}', '\u{11642}'),
    ('\u{1173c}', '\u{1173e}'), ('\u{11944}', '\u{11944}'), ('\u{11946}', '\u{11946}'),
    ('\u{11a42}', '\u{11a43}'), ('\u{11a9b}', '\u{11a9c}'), ('\u{11c41}', '\u{11c42}'),
    ('\u{11ef7}', '\u{11ef8}'), ('\u{11f43}', '\u{11f44}'), ('\u{16a6e}', '\u{16a6f}'),
    ('\u{16af5}', '\u{16af5}'), ('\u{16b37}', '\u{16b38}'), ('\u{16b44}', '\u{16b44}'),
    ('\u{16e98}', '\u{16e98}'), ('\u{1bc9f}', '\u{1bc9f}'), ('\u{1da88}', '\u{1da88}'),
];

/// The other symbols: of ASCII all that is no letter, digit, tab or line feed, and what is usual elsewhere.
#[rustfmt::skip]
const OTHER: [(char, char); 27] = [
    ('\u{0}', '\u{8}'), ('\u{b}', '\u{1f}'), ('\u{22}', '\u{2d}'), ('\u{2f}', '\u{2f}'),
    ('\u{3a}', '\u{3e}'), ('\u{40}', '\u{40}'), ('\u{5b}', '\u{60}'), ('\u{7b}', '\u{9f}'),
    ('\u{ab}', '\u{ab}'), ('\u{b4}', '\u{b4}'), ('\u{bb}', '\u{bb}'), ('\u{2013}', '\u{2014}'),
    ('\u{2019}', '\u{2019}'), ('\u{201c}', '\u{201e}'), ('\u{2026}', '\u{2026}'),
    ('\u{2236}', '\u{2236}'), ('\u{2501}', '\u{2501}'), ('\u{25ba}', '\u{25ba}'),
    ('\u{3001}', '\u{3001}'), ('\u{3008}', '\u{300d}'), ('\u{3010}', '\u{3011}'),
    ('\u{ff05}', '\u{ff05}'), ('\u{ff08}', '\u{ff09}'), ('\u{ff0c}', '\u{ff0c}'),
    ('\u{ff11}', '\u{ff11}'), ('\u{ff1a}', '\u{ff1b}'), ('\u{ff5e}', '\u{ff5e}'),
];

/// Whether a character is a symbol: no part of a word, except as [`super::words`] says.
pub(super) fn is_symbol(character: char) -> bool {
    match character {
        '0'..='9' | 'A'..='Z' | 'a'..='z' | '\t' | '\n' => false,
        '\0'..='\u{9f}' => character != ' ',
        _ => is_among(&OTHER, character) || is_among(&TERMINAL, character),
    }
}

/// Whether a symbol ends a sentence.
pub(super) fn is_terminal(character: char) -> bool {
    match character {
        '.' | '!' | '?' => true,
        '\0'..='\u{9f}' => false,
        _ => is_among(&TERMINAL, character),
    }
}

fn is_among(ranges: &[(char, char)], character: char) -> bool {
    let behind = ranges.partition_point(|&(first, _)| first <= character);
    behind > 0 && character <= ranges[behind - 1].1
}

/// White space as Python's `str.isspace` has it: Unicode's, and four control characters.
pub(super) fn is_space(character: char) -> bool {
    character.is_whitespace() || matches!(character, '\u{1c}'..='\u{1f}')
}

/// The text without white space at its ends, as Python's `str.strip`.
pub(super) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// The text split at white space, as Python's `str.split`.
pub(super) fn split_at_space(text: &str) -> impl Iterator<Item = &str> {
    text.split(is_space).filter(|piece| !piece.is_empty())
}

/// The lines of a text, as Python's `str.splitlines`: nine characters end a line, and a carriage return with
/// the line feed after it is one end.
pub(super) fn lines(text: &str) -> impl Iterator<Item = &str> {
    let ends_line = |character| {
        matches!(
            character,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'
                ..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let Some(end) = rest.find(ends_line) else {
            return Some(std::mem::take(&mut rest));
        };
        let (line, behind) = rest.split_at(end);
        let mut characters = behind.chars();
        let first = characters.next();
        rest = characters.as_str();
        if first == Some('\r') {
            rest = rest.strip_prefix('\n').unwrap_or(rest);
        }
        Some(line)
    })
}

/// Number of characters.
pub(super) fn characters(text: &str) -> usize {
    text.chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_end_where_python_ends_them() {
        let text = "a\r\nb\rc\n\nd\u{2028}e\u{1d}f\u{85}";
        assert_eq!(lines(text).collect::<Vec<_>>(), ["a", "b", "c", "", "d", "e", "f"]);
        assert_eq!(lines("").count(), 0);
        assert_eq!(lines("\n").collect::<Vec<_>>(), [""]);
    }

    #[test]
    fn tables_are_sorted_and_apart_and_agree_with_the_short_cuts() {
        for table in [&TERMINAL[..], &OTHER[..]] {
            assert!(table.iter().all(|(first, last)| first <= last));
            assert!(table.windows(2).all(|pair| pair[0].1 < pair[1].0));
        }
        for character in '\0'..='\u{2ffff}' {
            let terminal = is_among(&TERMINAL, character);
            let symbol = terminal || is_among(&OTHER, character);
            assert_eq!(is_symbol(character), symbol, "{character:?}");
            assert_eq!(is_terminal(character), terminal, "{character:?}");
        }
    }
}
