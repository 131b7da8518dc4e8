//! FineWeb's own rules (Penedo et al. 2024), as datatrove applies them.

use serde::{Deserialize, Serialize};

use super::{
    Judge, Judged, Measured, Rule,
    repetition::Duplicates,
    settings::{Amount, Share},
    symbols::{characters, is_space, is_terminal},
};

/// The table `[fineweb]`: a rule whose key is left out is not applied.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FineWeb {
    min_terminated_lines: Option<Share>,
    max_short_lines: Option<Share>,
    #[serde(default)]
    short_line_characters: u64,
    max_duplicate_line_characters: Option<Share>,
    max_line_feeds_per_word: Option<Amount>,
}

impl Judge for FineWeb {
    fn judge(&self, document: &Measured<'_>) -> Judged {
        let rule = |key| Err(Rule { table: "fineweb", key });
        let text = document.text;
        let lines: Vec<&str> =
            text.split('\n').filter(|line| !line.chars().all(is_space)).collect();
        if lines.is_empty() {
            return rule("empty");
        }
        let share = |count: usize| count as f64 / lines.len() as f64;
        let terminated = lines.iter().filter(|line| line.ends_with(is_terminal)).count();
        if self.min_terminated_lines.is_some_and(|least| share(terminated) < least.0) {
            return rule("min_terminated_lines");
        }
        let is_short = |line: &&&str| characters(line) as u64 <= self.short_line_characters;
        let short = lines.iter().filter(is_short).count();
        if self.max_short_lines.is_some_and(|most| share(short) > most.0) {
            return rule("max_short_lines");
        }
        let line_feeds = memchr::memchr_iter(b'\n', text.as_bytes()).count();
        if let Some(most) = self.max_duplicate_line_characters {
            let duplicate = Duplicates::among(lines.iter().copied()).characters;
            let all = document.characters() - line_feeds;
            if duplicate as f64 / all.max(1) as f64 > most.0 {
                return rule("max_duplicate_line_characters");
            }
        }
        if let Some(most) = self.max_line_feeds_per_word {
            let words = document.words().len().max(1);
            if line_feeds as f64 / words as f64 > most.0 {
                return rule("max_line_feeds_per_word");
            }
        }
        Ok(None)
    }
}
