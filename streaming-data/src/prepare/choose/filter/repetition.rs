//! Gopher's rules of repetition (Rae et al. 2021, table A1), as datatrove applies them.
//!
//! Shares are of all characters of the text, white space included, although runs of words are counted
//! without it: so it was done where the thresholds are from.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::{
    Judge, Judged, Measured, Rule,
    grams::{Equality, Grams, duplicate_runs, top_runs},
    settings::Share,
    symbols::{characters, strip},
};

/// The table `[repetition]`: a rule whose key is left out is not applied.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Repetition {
    max_duplicate_paragraphs: Option<Share>,
    max_duplicate_paragraph_characters: Option<Share>,
    max_duplicate_lines: Option<Share>,
    max_duplicate_line_characters: Option<Share>,
    max_top_2_gram_characters: Option<Share>,
    max_top_3_gram_characters: Option<Share>,
    max_top_4_gram_characters: Option<Share>,
    max_duplicate_5_gram_characters: Option<Share>,
    max_duplicate_6_gram_characters: Option<Share>,
    max_duplicate_7_gram_characters: Option<Share>,
    max_duplicate_8_gram_characters: Option<Share>,
    max_duplicate_9_gram_characters: Option<Share>,
    max_duplicate_10_gram_characters: Option<Share>,
}

impl Judge for Repetition {
    fn judge(&self, document: &Measured<'_>) -> Judged {
        let rule = |key| Err(Rule { table: "repetition", key });
        let text = document.text;
        let all = document.characters().max(1) as f64;

        let paragraphs = Duplicates::among(split_at_line_feeds(strip(text), 2));
        if self.max_duplicate_paragraphs.is_some_and(|most| paragraphs.share() > most.0) {
            return rule("max_duplicate_paragraphs");
        }
        let duplicate = paragraphs.characters as f64 / all;
        if self.max_duplicate_paragraph_characters.is_some_and(|most| duplicate > most.0) {
            return rule("max_duplicate_paragraph_characters");
        }
        let lines = Duplicates::among(split_at_line_feeds(text, 1));
        if self.max_duplicate_lines.is_some_and(|most| lines.share() > most.0) {
            return rule("max_duplicate_lines");
        }
        let duplicate = lines.characters as f64 / all;
        if self.max_duplicate_line_characters.is_some_and(|most| duplicate > most.0) {
            return rule("max_duplicate_line_characters");
        }

        let top = top_runs!(self);
        if top.iter().any(|(_, most, _)| most.is_some()) {
            let mut grams = Grams::new(document.words(), Equality::Words);
            for (length, most, key) in top {
                let Some(most) = most else { continue };
                grams.grow_to(length);
                if grams.most_frequent_characters() as f64 / all > most.0 {
                    return rule(key);
                }
            }
        }
        let duplicate = duplicate_runs!(self);
        if duplicate.iter().any(|(_, most, _)| most.is_some()) {
            let mut grams = Grams::new(document.words(), Equality::Letters);
            for (length, most, key) in duplicate {
                let Some(most) = most else { continue };
                grams.grow_to(length);
                if grams.repeated_characters() as f64 / all > most.0 {
                    return rule(key);
                }
            }
        }
        Ok(None)
    }
}

/// The repeated items of a list.
#[derive(Debug, Default)]
pub(super) struct Duplicates {
    items: usize,
    pub(super) duplicates: usize,
    /// Characters of the duplicates.
    pub(super) characters: usize,
}

impl Duplicates {
    pub(super) fn among<'a>(items: impl Iterator<Item = &'a str>) -> Duplicates {
        let mut seen = HashSet::new();
        let mut found = Duplicates::default();
        for item in items {
            found.items += 1;
            if !seen.insert(item) {
                found.duplicates += 1;
                found.characters += characters(item);
            }
        }
        found
    }

    fn share(&self) -> f64 {
        self.duplicates as f64 / self.items.max(1) as f64
    }
}

/// The text split at runs of at least `at_least` line feeds; the parts before the first run and after the last
/// may be empty.
fn split_at_line_feeds(text: &str, at_least: usize) -> impl Iterator<Item = &str> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest?;
        let mut from = 0;
        while let Some(at) = memchr::memchr(b'\n', &text.as_bytes()[from..]) {
            let first = from + at;
            let run = text[first..].bytes().take_while(|&byte| byte == b'\n').count();
            from = first + run;
            if run >= at_least {
                rest = Some(&text[from..]);
                return Some(&text[..first]);
            }
        }
        rest = None;
        Some(text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_split_as_regular_expressions_split_it() {
        let split = |text, at_least| split_at_line_feeds(text, at_least).collect::<Vec<_>>();
        assert_eq!(split("\na\n\nb\n", 1), ["", "a", "b", ""]);
        assert_eq!(split("a\nb\n\n\nc", 2), ["a\nb", "c"]);
        assert_eq!(split("", 1), [""]);
    }
}
