//! NeMo Curator's heuristics for English, in the order of its configuration.
//!
//! Its words lie between white space, symbols included, and its lines are the lines that are not blank. Of
//! equally frequent runs of words it takes any; here it is the first.

use serde::{Deserialize, Serialize};

use super::{
    Judge, Judged, Measured, Rule,
    grams::{Equality, Grams, duplicate_runs, top_runs},
    repetition::Duplicates,
    settings::{Amount, Share, lower_case},
    symbols::{characters, is_space, split_at_space, strip},
};

/// The table `[nemo-english]`: a rule whose key is left out is not applied.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NemoEnglish {
    max_other_characters: Option<Share>,
    max_symbol_words: Option<Share>,
    max_digit_characters: Option<Share>,
    max_url_characters: Option<Share>,
    max_space_characters: Option<Share>,
    max_bracket_characters: Option<Share>,
    max_boilerplate_paragraphs: Option<Share>,
    #[serde(default, deserialize_with = "lower_case", skip_serializing_if = "Vec::is_empty")]
    boilerplate: Vec<String>,
    min_distinct_lines: Option<Share>,
    min_distinct_paragraphs: Option<Share>,
    min_distinct_line_characters: Option<Share>,
    min_distinct_paragraph_characters: Option<Share>,
    min_words: Option<u64>,
    max_words: Option<u64>,
    max_unterminated_lines: Option<Share>,
    min_alphabetic_words: Option<Share>,
    min_common_words: Option<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    common_words: Vec<String>,
    min_mean_word_characters: Option<Amount>,
    max_mean_word_characters: Option<Amount>,
    max_word_characters: Option<u64>,
    max_ellipsis_lines: Option<Share>,
    max_top_2_gram_characters: Option<Share>,
    max_top_3_gram_characters: Option<Share>,
    max_top_4_gram_characters: Option<Share>,
    max_duplicate_5_gram_characters: Option<Share>,
    max_duplicate_6_gram_characters: Option<Share>,
    max_duplicate_7_gram_characters: Option<Share>,
    max_duplicate_8_gram_characters: Option<Share>,
    max_duplicate_9_gram_characters: Option<Share>,
    max_duplicate_10_gram_characters: Option<Share>,
    max_bullet_lines: Option<Share>,
}

/// Ends of lines that are sentences.
const ENDS: [char; 5] = ['.', '?', '!', '"', '\''];

const ELLIPSES: [&str; 8] = ["...", "[...]", "…", "(...)", "[…]", "-»", "read more..", "read more"];

const BULLETS: [char; 12] = ['•', '‣', '⁃', '⁌', '⁍', '∙', '○', '●', '◘', '◦', '⦾', '⦿'];

const BRACKETS: [char; 8] = ['{', '}', '⟨', '⟩', '[', ']', '(', ')'];

/// A document as these rules see it.
struct Parts<'a> {
    text: &'a str,
    characters: usize,
    words: Vec<&'a str>,
    /// The lines that are not blank.
    lines: Vec<&'a str>,
    paragraphs: Vec<&'a str>,
}

impl Parts<'_> {
    /// The share of `count` in all characters.
    fn of_characters(&self, count: usize) -> f64 {
        count as f64 / self.characters.max(1) as f64
    }

    fn share_of_characters(&self, is_counted: impl Fn(char) -> bool) -> f64 {
        self.of_characters(self.text.chars().filter(|&c| is_counted(c)).count())
    }

    fn share_of_words(&self, is_counted: impl Fn(&str) -> bool) -> f64 {
        share_of(&self.words, is_counted)
    }

    fn share_of_lines(&self, is_counted: impl Fn(&str) -> bool) -> f64 {
        share_of(&self.lines, is_counted)
    }
}

fn share_of(items: &[&str], is_counted: impl Fn(&str) -> bool) -> f64 {
    items.iter().filter(|item| is_counted(item)).count() as f64 / items.len().max(1) as f64
}

/// Shares of the items, and of their characters, that occur for the first time.
fn distinct(items: &[&str]) -> (f64, f64) {
    let duplicates = Duplicates::among(items.iter().copied());
    let all: usize = items.iter().map(|item| characters(item)).sum();
    let share = |all: usize, duplicate| (all - duplicate) as f64 / all.max(1) as f64;
    (share(items.len(), duplicates.duplicates), share(all, duplicates.characters))
}

impl Judge for NemoEnglish {
    fn judge(&self, document: &Measured<'_>) -> Judged {
        let text = document.text;
        let parts = Parts {
            text,
            characters: document.characters(),
            words: split_at_space(text).collect(),
            lines: text.split('\n').filter(|line| !line.chars().all(is_space)).collect(),
            paragraphs: text.split("\n\n").collect(),
        };
        let broken = self
            .breaks_shares(&parts)
            .or_else(|| self.breaks_words(&parts))
            .or_else(|| self.breaks_runs(&parts))
            .or_else(|| {
                let is_bullet = |line: &str| strip(line).starts_with(BULLETS);
                let bullets = |most: Share| parts.share_of_lines(is_bullet) > most.0;
                self.max_bullet_lines.is_some_and(bullets).then_some("max_bullet_lines")
            });
        match broken {
            Some(key) => Err(Rule { table: "nemo-english", key }),
            None => Ok(None),
        }
    }
}

impl NemoEnglish {
    /// The first rule about shares of characters, lines and paragraphs that the document breaks.
    fn breaks_shares(&self, parts: &Parts<'_>) -> Option<&'static str> {
        let above = |most: Option<Share>, found: &dyn Fn() -> f64| {
            most.is_some_and(|most| found() > most.0)
        };
        let below = |least: Option<Share>, found: f64| least.is_some_and(|least| found < least.0);
        let is_usual =
            |c: char| c.is_ascii_alphanumeric() || matches!(c, '\n' | '?' | '!' | ',' | '.');
        if above(self.max_other_characters, &|| parts.share_of_characters(|c| !is_usual(c))) {
            return Some("max_other_characters");
        }
        if above(self.max_symbol_words, &|| parts.share_of_words(is_symbol_word)) {
            return Some("max_symbol_words");
        }
        if above(self.max_digit_characters, &|| parts.share_of_characters(char::is_numeric)) {
            return Some("max_digit_characters");
        }
        if above(self.max_url_characters, &|| parts.of_characters(url_characters(parts.text))) {
            return Some("max_url_characters");
        }
        let is_space = |c: char| matches!(c, '\t' | '\n' | '\r' | '\u{8}' | ' ');
        if above(self.max_space_characters, &|| parts.share_of_characters(is_space)) {
            return Some("max_space_characters");
        }
        if above(self.max_bracket_characters, &|| {
            parts.share_of_characters(|c| BRACKETS.contains(&c))
        }) {
            return Some("max_bracket_characters");
        }
        if above(self.max_boilerplate_paragraphs, &|| self.boilerplate_paragraphs(parts)) {
            return Some("max_boilerplate_paragraphs");
        }
        let (lines, line_characters) = distinct(&parts.lines);
        if below(self.min_distinct_lines, lines) {
            return Some("min_distinct_lines");
        }
        let (paragraphs, paragraph_characters) = distinct(&parts.paragraphs);
        if below(self.min_distinct_paragraphs, paragraphs) {
            return Some("min_distinct_paragraphs");
        }
        if below(self.min_distinct_line_characters, line_characters) {
            return Some("min_distinct_line_characters");
        }
        if below(self.min_distinct_paragraph_characters, paragraph_characters) {
            return Some("min_distinct_paragraph_characters");
        }
        None
    }

    /// Which share of the paragraphs is boilerplate; all of them where one is filler text.
    fn boilerplate_paragraphs(&self, parts: &Parts<'_>) -> f64 {
        let mut found = 0_usize;
        for paragraph in &parts.paragraphs {
            let lower = paragraph.to_lowercase();
            if lower.contains("lorem ipsum") {
                return 1.0;
            }
            let is_boilerplate = self.boilerplate.iter().any(|text| lower.contains(text.as_str()));
            found += usize::from(is_boilerplate);
        }
        found as f64 / parts.paragraphs.len() as f64
    }

    /// The first rule about words and ends of lines that the document breaks.
    fn breaks_words(&self, parts: &Parts<'_>) -> Option<&'static str> {
        let words = parts.words.len() as u64;
        if self.min_words.is_some_and(|least| words < least) {
            return Some("min_words");
        }
        if self.max_words.is_some_and(|most| words > most) {
            return Some("max_words");
        }
        let is_open = |line: &str| !strip(line).ends_with(ENDS);
        if self.max_unterminated_lines.is_some_and(|most| parts.share_of_lines(is_open) > most.0) {
            return Some("max_unterminated_lines");
        }
        let has_letter = |word: &str| word.chars().any(char::is_alphabetic);
        if self.min_alphabetic_words.is_some_and(|least| parts.share_of_words(has_letter) < least.0)
        {
            return Some("min_alphabetic_words");
        }
        let is_common = |word: &&&str| self.common_words.iter().any(|common| common == **word);
        if let Some(least) = self.min_common_words
            && (parts.words.iter().filter(is_common).take(least as usize).count() as u64) < least
        {
            return Some("min_common_words");
        }
        let letters: usize = parts.words.iter().map(|word| characters(word)).sum();
        let mean = letters as f64 / parts.words.len().max(1) as f64;
        if self.min_mean_word_characters.is_some_and(|least| mean < least.0) {
            return Some("min_mean_word_characters");
        }
        if self.max_mean_word_characters.is_some_and(|most| mean > most.0) {
            return Some("max_mean_word_characters");
        }
        let is_long = |most: u64| parts.words.iter().any(|word| characters(word) as u64 > most);
        if self.max_word_characters.is_some_and(is_long) {
            return Some("max_word_characters");
        }
        let is_cut = |line: &str| {
            let lower = strip(line).to_lowercase();
            ELLIPSES.iter().any(|ellipsis| lower.ends_with(ellipsis))
        };
        if self.max_ellipsis_lines.is_some_and(|most| parts.share_of_lines(is_cut) > most.0) {
            return Some("max_ellipsis_lines");
        }
        None
    }

    /// The first rule about runs of words that the document breaks.
    fn breaks_runs(&self, parts: &Parts<'_>) -> Option<&'static str> {
        let mut grams = Grams::new(&parts.words, Equality::Words);
        for (length, most, key) in top_runs!(self) {
            let Some(most) = most else { continue };
            grams.grow_to(length);
            // A text of fewer words breaks the rule, as in its source.
            let Some((at, _)) = grams.most_frequent() else { return Some(key) };
            let run = parts.words[at..at + length].join(" ");
            // Its occurrences in the text count, with single spaces.
            let removed = parts.text.matches(run.as_str()).count() * characters(&run);
            if parts.of_characters(removed) > most.0 {
                return Some(key);
            }
        }
        for (length, most, key) in duplicate_runs!(self) {
            let Some(most) = most else { continue };
            grams.grow_to(length);
            let is_too_short = parts.words.len() < length;
            if is_too_short || parts.of_characters(grams.covered_characters()) > most.0 {
                return Some(key);
            }
        }
        None
    }
}

/// Whether a word is an ellipsis, or more than half of it are runs of `#` (each counts once).
fn is_symbol_word(word: &str) -> bool {
    let runs = word.split(|c| c != '#').filter(|run| !run.is_empty()).count();
    ELLIPSES.contains(&word) || runs as f64 / characters(word) as f64 > 0.5
}

/// Characters of what begins with `http://` or `https://` and goes on with characters of URLs.
fn url_characters(text: &str) -> usize {
    let mut found = 0;
    let mut rest = text;
    while let Some(at) = rest.find("http") {
        rest = &rest[at..];
        let scheme = ["https://", "http://"].into_iter().find(|scheme| rest.starts_with(scheme));
        let length = scheme.map_or(0, |scheme| url_tail_bytes(&rest.as_bytes()[scheme.len()..]));
        match scheme {
            Some(scheme) if length > 0 => {
                found += scheme.len() + length;
                rest = &rest[scheme.len() + length..];
            }
            _ => rest = &rest["http".len()..],
        }
    }
    found
}

/// Length of the longest beginning of only characters of URLs, all of them ASCII.
fn url_tail_bytes(bytes: &[u8]) -> usize {
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        if byte.is_ascii_alphanumeric() || b"$-_@.&+/:=?#~!*(),".contains(&byte) {
            at += 1;
        } else if byte == b'%'
            && bytes.get(at + 1..at + 3).is_some_and(|code| code.iter().all(u8::is_ascii_hexdigit))
        {
            at += 3;
        } else {
            break;
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_end_where_no_url_goes_on() {
        for (text, expected) in [
            ("", 0),
            ("see https://a.org/b%20c?d=e; and http://b.org.", 23 + 13),
            ("http:// https://é httphttp://x", 8),
            ("https://a%zz", 9),
        ] {
            assert_eq!(url_characters(text), expected, "{text}");
        }
    }
}
