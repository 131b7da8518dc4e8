//! C4's rules (Raffel et al. 2020), as datatrove applies them: they drop lines, and reject some documents.
//!
//! The text without the dropped lines is trained on. The list of bad words is not among the rules.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::{
    Judge, Judged, Measured, Rule,
    settings::lower_case,
    symbols::{characters, lines, split_at_space, strip},
    words::sentences,
};

/// The table `[c4]`: a rule whose key is left out is not applied.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct C4 {
    max_line_word_characters: Option<u64>,
    #[serde(default)]
    cut_citations: bool,
    #[serde(default)]
    drop_unterminated_lines: bool,
    min_line_words: Option<u64>,
    #[serde(default)]
    reject_lorem_ipsum: bool,
    #[serde(default)]
    drop_javascript_lines: bool,
    #[serde(default)]
    reject_curly_brackets: bool,
    #[serde(default, deserialize_with = "lower_case", skip_serializing_if = "Vec::is_empty")]
    drop_lines_with: Vec<String>,
    min_sentences: Option<u64>,
}

const TABLE: &str = "c4";

/// Ends of lines that are sentences.
const ENDS: [char; 5] = ['.', '?', '!', '"', '\''];

/// Whether a line stays, or why not.
enum Line<'a> {
    Kept(Cow<'a, str>),
    Dropped(&'static str),
    /// The whole document goes.
    Rejects(&'static str),
}

impl Judge for C4 {
    fn judge(&self, document: &Measured<'_>) -> Judged {
        let mut text = String::with_capacity(document.text.len());
        let (mut kept, mut found) = (0_u64, 0_u64);
        for line in lines(document.text) {
            match self.line(line) {
                Line::Kept(line) => {
                    if self.min_sentences.is_some() {
                        found += sentences(&line) as u64;
                    }
                    if kept > 0 {
                        text.push('\n');
                    }
                    text.push_str(&line);
                    kept += 1;
                }
                Line::Dropped(key) => document.line_dropped(Rule { table: TABLE, key }),
                Line::Rejects(key) => return Err(Rule { table: TABLE, key }),
            }
        }
        if self.min_sentences.is_some_and(|least| found < least) {
            return Err(Rule { table: TABLE, key: "min_sentences" });
        }
        match strip(&text) {
            "" => Err(Rule { table: TABLE, key: "empty" }),
            text if text == document.text => Ok(None),
            text => Ok(Some(text.to_owned())),
        }
    }
}

impl C4 {
    fn line<'a>(&self, line: &'a str) -> Line<'a> {
        let line = strip(line);
        let too_long = |most| split_at_space(line).any(|word| characters(word) as u64 > most);
        if self.max_line_word_characters.is_some_and(too_long) {
            return Line::Dropped("max_line_word_characters");
        }
        let words = split_at_space(line).count() as u64;
        let line = if self.cut_citations { without_citations(line) } else { line.into() };
        if self.drop_unterminated_lines && (!line.ends_with(ENDS) || line.ends_with("...")) {
            return Line::Dropped("drop_unterminated_lines");
        }
        if self.min_line_words.is_some_and(|least| words < least) {
            return Line::Dropped("min_line_words");
        }
        let lower = line.to_lowercase();
        if self.reject_lorem_ipsum && lower.contains("lorem ipsum") {
            return Line::Rejects("reject_lorem_ipsum");
        }
        if self.drop_javascript_lines && lower.contains("javascript") {
            return Line::Dropped("drop_javascript_lines");
        }
        if self.reject_curly_brackets && line.contains('{') {
            return Line::Rejects("reject_curly_brackets");
        }
        if self.drop_lines_with.iter().any(|phrase| lower.contains(phrase.as_str())) {
            return Line::Dropped("drop_lines_with");
        }
        Line::Kept(line)
    }
}

/// The line without `[12]`, `[]`, `[edit]` and `[citation needed]`.
fn without_citations(line: &str) -> Cow<'_, str> {
    let mut cut = String::new();
    let mut rest = line;
    let mut copied_to = 0;
    while let Some(open) = rest.find('[') {
        let at = line.len() - rest.len() + open;
        let inside = &rest[open + 1..];
        let digits = inside.trim_start_matches(char::is_numeric);
        let behind = digits
            .strip_prefix(']')
            .or_else(|| inside.strip_prefix("edit]"))
            .or_else(|| inside.strip_prefix("citation needed]"));
        match behind {
            Some(behind) => {
                cut.push_str(&line[copied_to..at]);
                copied_to = line.len() - behind.len();
                rest = behind;
            }
            None => rest = inside,
        }
    }
    if copied_to == 0 {
        return line.into();
    }
    cut.push_str(&line[copied_to..]);
    cut.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn citations_are_cut_and_nothing_else() {
        for (line, expected) in [
            ("plain", "plain"),
            ("a[1] b[] c[edit]d [citation needed].", "a b cd ."),
            ("[x] [1a] [[2] [edit", "[x] [1a] [ [edit"),
            ("[12]", ""),
        ] {
            assert_eq!(without_citations(line), expected, "{line}");
        }
    }
}
