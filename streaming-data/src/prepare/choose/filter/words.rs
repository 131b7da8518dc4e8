//! Words and sentences as filters count them: one stated way to split, for all of them.
//!
//! Sources differ in the library that splits for them, and its versions; thresholds were set for words of
//! natural languages with symbols apart. Here a text is split so:
//!
//! 1. at white space, which is in no word;
//! 2. a symbol (see [`super::symbols`]) ends a word and is one itself; a run of `.` or of `-` is a single one;
//! 3. but a symbol stays in a word, between two characters that are no symbols, if it is `'`, `’`, `.`, `@`,
//!    `_` or `&`; between two digits also `,`, `:`, `-` and `/`; and a period stays after a single letter
//!    (`J.`, `U.S.`, `e.g.`);
//! 4. English endings after an apostrophe are words: `it` `'s`, `do` `n't`;
//! 5. between white space, what holds `://` is one word, without the symbols at its ends.
//!
//! A sentence ends with a symbol that ends sentences, if a word that is no symbol follows.
//!
//! Languages without spaces between words have too few words by this; filters that count them are for
//! others.

use super::symbols::{is_symbol, is_terminal, split_at_space};

/// Name and version of this way to split; the index of data that was filtered by it states it.
pub(crate) const SPLITTER: &str = "words-1";

/// Endings that are words of their own after an apostrophe.
const ENDINGS: [&str; 6] = ["s", "m", "d", "re", "ve", "ll"];

/// The words of a text, symbols among them.
pub(super) fn words(text: &str) -> Vec<&str> {
    let mut words = Vec::with_capacity(text.len() / 5);
    for piece in split_at_space(text) {
        split_piece(piece, &mut words);
    }
    words
}

/// Whether all characters of a word are symbols.
pub(super) fn is_all_symbols(word: &str) -> bool {
    word.chars().all(is_symbol)
}

/// How many sentences a text has, at least one.
pub(super) fn sentences(text: &str) -> usize {
    let mut sentences = 1;
    let mut has_ended = false;
    for word in words(text) {
        let mut characters = word.chars();
        let first = characters.next();
        if first.is_some_and(is_terminal) && characters.next().is_none() {
            has_ended = true;
        } else if has_ended && !is_all_symbols(word) {
            sentences += 1;
            has_ended = false;
        }
    }
    sentences
}

fn split_piece<'a>(piece: &'a str, words: &mut Vec<&'a str>) {
    if !piece.contains("://") {
        return split_plain(piece, words);
    }
    let first = piece.find(|character| !is_symbol(character)).unwrap_or(piece.len());
    let (before, rest) = piece.split_at(first);
    let middle = rest.trim_end_matches(is_symbol);
    split_plain(before, words);
    if !middle.is_empty() {
        words.push(middle);
    }
    split_plain(&rest[middle.len()..], words);
}

fn split_plain<'a>(piece: &'a str, words: &mut Vec<&'a str>) {
    // The current word lies between `start` and the next symbol that ends it.
    let mut start = 0;
    let mut at = 0;
    while let Some(symbol) = piece[at..].chars().next() {
        let next = at + symbol.len_utf8();
        let word = &piece[start..at];
        if !is_symbol(symbol) || stays(word, symbol, piece[next..].chars().next()) {
            at = next;
            continue;
        }
        push_word(word, words);
        let same = |&character: &char| matches!(symbol, '.' | '-') && character == symbol;
        let run: usize = piece[next..].chars().take_while(same).map(char::len_utf8).sum();
        words.push(&piece[at..next + run]);
        at = next + run;
        start = at;
    }
    push_word(&piece[start..], words);
}

/// Whether a symbol belongs to the word in front of it.
fn stays(word: &str, symbol: char, following: Option<char>) -> bool {
    let Some(last) = word.chars().next_back() else { return false };
    if let Some(following) = following.filter(|&following| !is_symbol(following)) {
        if matches!(symbol, '\'' | '’' | '.' | '@' | '_' | '&') {
            return true;
        }
        let between_digits = last.is_ascii_digit() && following.is_ascii_digit();
        if between_digits && matches!(symbol, ',' | ':' | '-' | '/') {
            return true;
        }
    }
    symbol == '.' && following != Some('.') && ends_in_single_letter(word)
}

/// Whether a period after the word abbreviates it: `J`, `U.S`, `e.g`.
fn ends_in_single_letter(word: &str) -> bool {
    let last = word.rsplit('.').next().unwrap_or(word);
    let mut characters = last.chars();
    characters.next().is_some_and(char::is_alphabetic) && characters.next().is_none()
}

/// Appends a word, and its English ending as another.
fn push_word<'a>(word: &'a str, words: &mut Vec<&'a str>) {
    if word.is_empty() {
        return;
    }
    let cut = ['\'', '’'].into_iter().find_map(|apostrophe| ending(word, apostrophe));
    match cut {
        Some(cut) => words.extend([&word[..cut], &word[cut..]]),
        None => words.push(word),
    }
}

/// Where the English ending of a word begins, if it has one after that apostrophe.
fn ending(word: &str, apostrophe: char) -> Option<usize> {
    let (before, ending) = word.rsplit_once(apostrophe)?;
    if before.is_empty() {
        return None;
    }
    if ENDINGS.iter().any(|known| ending.eq_ignore_ascii_case(known)) {
        return Some(before.len());
    }
    let is_not = ending.eq_ignore_ascii_case("t") && before.ends_with(['n', 'N']);
    (is_not && before.len() > 1).then(|| before.len() - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_split_as_stated() {
        for (text, expected) in [
            ("", vec![]),
            ("Hello, world!", vec!["Hello", ",", "world", "!"]),
            (
                "It's e.g. the U.S. (J. Doe).",
                vec!["It", "'s", "e.g.", "the", "U.S.", "(", "J.", "Doe", ")", "."],
            ),
            ("don’t WON'T 'tis", vec!["do", "n’t", "WO", "N'T", "'", "tis"]),
            (
                "1,000 a,b 10:30 2020-01-02 1/2",
                vec!["1,000", "a", ",", "b", "10:30", "2020-01-02", "1/2"],
            ),
            ("wait... --- !!", vec!["wait", "...", "---", "!", "!"]),
            ("well-known", vec!["well", "-", "known"]),
            ("(https://a.org/b?c=d).", vec!["(", "https://a.org/b?c=d", ")", "."]),
            ("me@b.org snake_case AT&T _x_", vec!["me@b.org", "snake_case", "AT&T", "_", "x", "_"]),
            ("終。了\u{3000}文", vec!["終", "。", "了", "文"]),
        ] {
            assert_eq!(words(text), expected, "{text}");
        }
    }

    #[test]
    fn sentences_end_where_a_word_comes_behind() {
        for (text, expected) in [
            ("", 1),
            ("One.", 1),
            ("One. Two! Three?", 3),
            ("He said \"Stop.\" Then he went.", 2),
            ("Mr. J. Doe of the U.S. came...", 2),
            ("No end here... or here", 1),
        ] {
            assert_eq!(sentences(text), expected, "{text}");
        }
    }
}
