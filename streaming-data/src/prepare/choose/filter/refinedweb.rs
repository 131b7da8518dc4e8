//! RefinedWeb's corrections of lines (Penedo et al. 2023, appendix G.2), as DCLM applies them.
//!
//! One rule after the other goes over all lines. The text without the dropped lines and cut phrases is
//! trained on.

use serde::{Deserialize, Serialize};

use super::{
    Judge, Judged, Measured, Rule,
    settings::{Share, lower_case},
    symbols::{characters, is_space, split_at_space, strip},
};

/// The table `[refinedweb]`: a rule whose key is left out is not applied.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RefinedWeb {
    max_line_uppercase_characters: Option<Share>,
    #[serde(default)]
    drop_digit_lines: bool,
    #[serde(default, deserialize_with = "lower_case", skip_serializing_if = "Vec::is_empty")]
    drop_counter_lines: Vec<String>,
    min_line_words: Option<u64>,
    #[serde(default)]
    short_line_words: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    cut_in_short_lines: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    cut_behind_short_lines: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    cut_before_short_lines: Vec<String>,
    max_removed_words: Option<Share>,
}

const TABLE: &str = "refinedweb";

impl Judge for RefinedWeb {
    fn judge(&self, document: &Measured<'_>) -> Judged {
        let mut text = document.text.to_owned();
        // As in the reference implementation, the text is trimmed after each rule.
        let drop_lines = |text: &mut String, key, goes: &dyn Fn(&str) -> bool| {
            let mut kept = Vec::new();
            for line in text.split('\n') {
                if goes(line) {
                    document.line_dropped(Rule { table: TABLE, key });
                } else {
                    kept.push(line);
                }
            }
            *text = strip(&kept.join("\n")).to_owned();
        };
        if let Some(most) = self.max_line_uppercase_characters {
            drop_lines(&mut text, "max_line_uppercase_characters", &|line| {
                let upper = line.chars().filter(|c| c.is_uppercase()).count();
                !line.is_empty() && upper as f64 / characters(line) as f64 > most.0
            });
        }
        if self.drop_digit_lines {
            drop_lines(&mut text, "drop_digit_lines", &|line| {
                !line.is_empty() && line.chars().all(char::is_numeric)
            });
        }
        if !self.drop_counter_lines.is_empty() {
            drop_lines(&mut text, "drop_counter_lines", &|line| self.is_counter(line));
        }
        if let Some(least) = self.min_line_words {
            drop_lines(&mut text, "min_line_words", &|line| {
                !line.is_empty() && words_up_to(line, least) < least
            });
        }
        for (key, place, phrases) in [
            ("cut_in_short_lines", Place::Anywhere, &self.cut_in_short_lines),
            ("cut_behind_short_lines", Place::End, &self.cut_behind_short_lines),
            ("cut_before_short_lines", Place::Start, &self.cut_before_short_lines),
        ] {
            for phrase in phrases {
                let most = self.short_line_words;
                let is_short = |line| words_up_to(line, most.saturating_add(1)) <= most;
                let mut kept = Vec::new();
                for line in text.split('\n') {
                    let cut = if is_short(line) { cut(line, phrase, place) } else { None };
                    match cut {
                        Some(rest) if rest.chars().all(is_space) => {
                            document.line_dropped(Rule { table: TABLE, key });
                        }
                        Some(rest) => kept.push(rest),
                        None => kept.push(line.to_owned()),
                    }
                }
                text = strip(&kept.join("\n")).to_owned();
            }
        }
        if text.is_empty() {
            return Err(Rule { table: TABLE, key: "empty" });
        }
        if let Some(most) = self.max_removed_words {
            let (before, after) = (counted_words(document.text), counted_words(&text));
            let removed = (before as f64 - after as f64) / before as f64;
            if before == 0 || removed > most.0 {
                return Err(Rule { table: TABLE, key: "max_removed_words" });
            }
        }
        Ok((text != document.text).then_some(text))
    }
}

impl RefinedWeb {
    /// Whether a line is a count of something: `1.2K likes`.
    fn is_counter(&self, line: &str) -> bool {
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        // Most lines are none, and need not be written in small letters for it.
        if !line.trim_start_matches(|c| !is_word(c)).starts_with(char::is_numeric) {
            return false;
        }
        let lower = line.to_lowercase();
        let number = lower.trim_start_matches(|c| !is_word(c));
        let unit = number.trim_start_matches(|c: char| c.is_numeric() || c == ',' || c == '.');
        let space = unit.strip_prefix(['k', 'm', 'b']).unwrap_or(unit);
        let counted = space.trim_start_matches(is_space);
        let is_end = |rest: &str| !rest.contains(is_word);
        counted.len() < space.len()
            && self
                .drop_counter_lines
                .iter()
                .any(|word| counted.strip_prefix(word.as_str()).is_some_and(is_end))
    }
}

/// Words of a line, counted up to `most`.
fn words_up_to(line: &str, most: u64) -> u64 {
    split_at_space(line).take(usize::try_from(most).unwrap_or(usize::MAX)).count() as u64
}

/// Words that begin with a letter or digit.
fn counted_words(text: &str) -> usize {
    split_at_space(text).filter(|word| word.starts_with(char::is_alphanumeric)).count()
}

#[derive(Debug, Clone, Copy)]
enum Place {
    Anywhere,
    End,
    Start,
}

/// The line without the phrase, in whatever case, and one adjacent white space; `None` if it is not there.
fn cut(line: &str, phrase: &str, place: Place) -> Option<String> {
    let is_here = |at: usize| {
        line.get(at..at + phrase.len()).is_some_and(|text| text.eq_ignore_ascii_case(phrase))
    };
    match place {
        Place::Start => {
            let rest = is_here(0).then(|| &line[phrase.len()..])?;
            Some(rest.strip_prefix(is_space).unwrap_or(rest).to_owned())
        }
        Place::End => {
            let at = line.len().checked_sub(phrase.len()).filter(|&at| is_here(at))?;
            let rest = &line[..at];
            Some(rest.strip_suffix(is_space).unwrap_or(rest).to_owned())
        }
        Place::Anywhere => {
            let (mut rest, mut copied_to, mut at) = (String::new(), 0, 0);
            while let Some(next) = line[at..].chars().next() {
                if !is_here(at) {
                    at += next.len_utf8();
                    continue;
                }
                let before = &line[copied_to..at];
                rest.push_str(before.strip_suffix(is_space).unwrap_or(before));
                at += phrase.len();
                copied_to = at;
            }
            (copied_to > 0).then(|| rest + &line[copied_to..])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phrases_are_cut_where_they_may_be() {
        let cut = |line, phrase, place| cut(line, phrase, place);
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(cut("3 Items in cart now", "items in cart", Place::Anywhere), some("3 now"));
        assert_eq!(cut("é items in cart", "items in cart", Place::Anywhere), some("é"));
        assert_eq!(cut("The tide. Read More...", "read more...", Place::End), some("The tide."));
        assert_eq!(cut("Read more... later", "read more...", Place::End), None);
        assert_eq!(cut("sign-in to go on", "Sign-in", Place::Start), some("to go on"));
        assert_eq!(cut("Please sign-in", "Sign-in", Place::Start), None);
        assert_eq!(cut("", "Sign-in", Place::Start), None);
    }

    #[test]
    fn counters_are_numbers_with_a_word() {
        let rules = RefinedWeb {
            max_line_uppercase_characters: None,
            drop_digit_lines: false,
            drop_counter_lines: vec!["likes".to_owned(), "views".to_owned()],
            min_line_words: None,
            short_line_words: 0,
            cut_in_short_lines: Vec::new(),
            cut_behind_short_lines: Vec::new(),
            cut_before_short_lines: Vec::new(),
            max_removed_words: None,
        };
        for line in ["3 likes", "• 1,204 Likes!", "1.2K views", "(7 likes)"] {
            assert!(rules.is_counter(line), "{line}");
        }
        for line in ["likes", "3likes", "3 likes of it", "I have 3 likes", "3 shares", ""] {
            assert!(!rules.is_counter(line), "{line}");
        }
    }
}
