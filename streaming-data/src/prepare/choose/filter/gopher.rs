//! Gopher's rules of quality (Rae et al. 2021, appendix A1.1), as datatrove applies them.

use serde::{Deserialize, Serialize};

use super::{
    Judge, Judged, Measured, Rule,
    settings::{Amount, Share},
    symbols::{characters, is_space, lines},
    words::is_all_symbols,
};

/// The table `[gopher]`: a rule whose key is left out is not applied.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Gopher {
    min_words: Option<u64>,
    max_words: Option<u64>,
    min_mean_word_characters: Option<Amount>,
    max_mean_word_characters: Option<Amount>,
    max_hashes_per_word: Option<Amount>,
    max_ellipses_per_word: Option<Amount>,
    max_bullet_lines: Option<Share>,
    max_ellipsis_lines: Option<Share>,
    min_alphabetic_words: Option<Share>,
    min_common_words: Option<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    common_words: Vec<String>,
}

impl Judge for Gopher {
    fn judge(&self, document: &Measured<'_>) -> Judged {
        let rule = |key| Err(Rule { table: "gopher", key });
        let words = document.words();
        let counted = words.iter().filter(|word| !is_all_symbols(word));
        let (count, letters) = counted
            .fold((0_u64, 0_u64), |(n, letters), word| (n + 1, letters + characters(word) as u64));
        if self.min_words.is_some_and(|least| count < least) {
            return rule("min_words");
        }
        if self.max_words.is_some_and(|most| count > most) {
            return rule("max_words");
        }
        if count > 0 {
            let mean = letters as f64 / count as f64;
            if self.min_mean_word_characters.is_some_and(|least| mean < least.0) {
                return rule("min_mean_word_characters");
            }
            if self.max_mean_word_characters.is_some_and(|most| mean > most.0) {
                return rule("max_mean_word_characters");
            }
        }
        let per_word = |count: usize| count as f64 / words.len().max(1) as f64;
        let text = document.text;
        let hashes = text.bytes().filter(|&byte| byte == b'#').count();
        if self.max_hashes_per_word.is_some_and(|most| per_word(hashes) > most.0) {
            return rule("max_hashes_per_word");
        }
        let ellipses = text.matches("...").count() + text.matches('…').count();
        if self.max_ellipses_per_word.is_some_and(|most| per_word(ellipses) > most.0) {
            return rule("max_ellipses_per_word");
        }
        let (mut all, mut bullets, mut open) = (0_usize, 0_usize, 0_usize);
        for line in lines(text) {
            all += 1;
            bullets += usize::from(line.trim_start_matches(is_space).starts_with(['•', '-']));
            let end = line.trim_end_matches(is_space);
            open += usize::from(end.ends_with("...") || end.ends_with('…'));
        }
        let of_lines = |count: usize| count as f64 / all.max(1) as f64;
        if self.max_bullet_lines.is_some_and(|most| of_lines(bullets) > most.0) {
            return rule("max_bullet_lines");
        }
        if self.max_ellipsis_lines.is_some_and(|most| of_lines(open) > most.0) {
            return rule("max_ellipsis_lines");
        }
        let alphabetic = words.iter().filter(|word| word.chars().any(char::is_alphabetic)).count();
        if self.min_alphabetic_words.is_some_and(|least| per_word(alphabetic) < least.0) {
            return rule("min_alphabetic_words");
        }
        if let Some(least) = self.min_common_words {
            let common = self.common_words.iter().filter(|common| words.contains(&common.as_str()));
            if (common.count() as u64) < least {
                return rule("min_common_words");
            }
        }
        Ok(None)
    }
}
