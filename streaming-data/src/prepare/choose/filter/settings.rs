//! Which filters a user asked for: named sets, and TOML files of the same form.
//!
//! A file has one table for each family of rules. Its tables are applied in the order of the file, and the sets of a
//! list in the order of the list: a family that drops lines passes the rest to the families after it.

use std::{
    borrow::Cow,
    fmt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Deserializer, Serialize, de};
use tidemill_files::{Kind, read};
use toml::Spanned;

use super::{
    FilterReport, FilterSet, c4::C4, fineweb::FineWeb, gopher::Gopher, judge, nemo::NemoEnglish,
    refinedweb::RefinedWeb, repetition::Repetition,
};
use crate::prepare::PrepareError;

/// The named sets, and the TOML that they are.
const NAMED: [(&str, &str); 6] = [
    ("gopher", include_str!("sets/gopher.toml")),
    ("repetition", include_str!("sets/repetition.toml")),
    ("c4", include_str!("sets/c4.toml")),
    ("fineweb", include_str!("sets/fineweb.toml")),
    ("refinedweb", include_str!("sets/refinedweb.toml")),
    ("nemo-english", include_str!("sets/nemo-english.toml")),
];

/// Filters in the order in which they are applied; by default none.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FilterSettings {
    sets: Vec<FilterSet>,
}

impl FilterSettings {
    /// Names of sets and paths of TOML files (they end in `.toml`), with commas between them.
    ///
    /// # Errors
    /// [`PrepareError::UnknownFilter`] for a name that no set has, [`PrepareError::FilterFile`] for a file
    /// that holds no filters, and an error of the operating system for one that cannot be read.
    pub fn from_list(list: &str) -> Result<FilterSettings, PrepareError> {
        let mut settings = FilterSettings::default();
        for item in list.split(',').map(str::trim) {
            if item.ends_with(".toml") {
                let bytes = read(Path::new(item), Kind::Config)
                    .map_err(PrepareError::io("read filter file", item))?;
                let text = String::from_utf8(bytes).map_err(|error| PrepareError::FilterFile {
                    path: item.into(),
                    place: String::new(),
                    problem: format!("it is not UTF-8: {}", error.utf8_error()),
                })?;
                settings.append_toml(&text, Path::new(item))?;
            } else {
                let text = FilterSettings::named(item).ok_or_else(|| {
                    let known = NAMED.map(|(name, _)| name).join(", ");
                    PrepareError::UnknownFilter { name: item.to_owned(), known }
                })?;
                settings.append_toml(text, &PathBuf::from(format!("{item}.toml")))?;
            }
        }
        Ok(settings)
    }

    /// The TOML of a named set, to be copied and changed.
    pub fn named(name: &str) -> Option<&'static str> {
        NAMED.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
    }

    /// The names of all sets.
    pub fn names() -> impl Iterator<Item = &'static str> {
        NAMED.iter().map(|(name, _)| *name)
    }

    /// Appends the filters of a TOML text; `path` is what errors name.
    ///
    /// # Errors
    /// [`PrepareError::FilterFile`] with the line and key that is wrong.
    pub fn append_toml(&mut self, text: &str, path: &Path) -> Result<(), PrepareError> {
        let wrong = |place, problem| PrepareError::FilterFile { path: path.into(), place, problem };
        let tables: Tables = toml::from_str(text).map_err(|error| {
            let line = error.span().and_then(|span| text.get(..span.start));
            let line = line.map(|before| before.matches('\n').count());
            let place = line.map_or(String::new(), |line| {
                let quoted = text.lines().nth(line).unwrap_or_default().trim();
                format!(", line {} ({quoted})", line + 1)
            });
            wrong(place, error.message().split_whitespace().collect::<Vec<_>>().join(" "))
        })?;
        let sets = tables.in_order();
        if sets.is_empty() {
            let known = NAMED.map(|(name, _)| format!("[{name}]")).join(", ");
            return Err(wrong(String::new(), format!("found no table, expected one of {known}")));
        }
        self.sets.extend(sets);
        Ok(())
    }

    /// The part of a text to train on: all of it, the rest that the filters leave, or nothing. Their effect is added to
    /// the report. The same text always has the same verdict.
    pub fn apply<'a>(&self, text: &'a str, report: &mut FilterReport) -> Option<Cow<'a, str>> {
        judge(&self.sets, text, report)
    }

    /// The filters that a data set says it was made with.
    pub(crate) fn of_sets(sets: Vec<FilterSet>) -> FilterSettings {
        FilterSettings { sets }
    }

    /// Whether nothing is filtered.
    pub fn is_empty(&self) -> bool {
        self.sets.is_empty()
    }

    /// The filters in order.
    pub(crate) fn sets(&self) -> &[FilterSet] {
        &self.sets
    }
}

/// A file of filters.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Tables {
    gopher: Option<Spanned<Gopher>>,
    repetition: Option<Spanned<Repetition>>,
    c4: Option<Spanned<C4>>,
    fineweb: Option<Spanned<FineWeb>>,
    refinedweb: Option<Spanned<RefinedWeb>>,
    nemo_english: Option<Spanned<NemoEnglish>>,
}

impl Tables {
    /// The tables in the order of the file.
    fn in_order(self) -> Vec<FilterSet> {
        fn set<T>(
            table: Option<Spanned<T>>,
            set: impl FnOnce(T) -> FilterSet,
        ) -> Option<(usize, FilterSet)> {
            table.map(|table| (table.span().start, set(table.into_inner())))
        }
        let mut sets: Vec<_> = [
            set(self.gopher, FilterSet::Gopher),
            set(self.repetition, FilterSet::Repetition),
            set(self.c4, FilterSet::C4),
            set(self.fineweb, FilterSet::Fineweb),
            set(self.refinedweb, FilterSet::Refinedweb),
            set(self.nemo_english, |rules| FilterSet::NemoEnglish(Box::new(rules))),
        ]
        .into_iter()
        .flatten()
        .collect();
        sets.sort_by_key(|(start, _)| *start);
        sets.into_iter().map(|(_, set)| set).collect()
    }
}

/// A part of a whole: 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Share(pub(super) f64);

impl<'de> Deserialize<'de> for Share {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Share, D::Error> {
        let share = f64::deserialize(deserializer)?;
        match (0.0..=1.0).contains(&share) {
            true => Ok(Share(share)),
            false => Err(unexpected(share, "a share from 0 to 1")),
        }
    }
}

/// A number of things for each of others: 0 or more.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Amount(pub(super) f64);

impl<'de> Deserialize<'de> for Amount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Amount, D::Error> {
        let amount = f64::deserialize(deserializer)?;
        match amount.is_finite() && amount >= 0.0 {
            true => Ok(Amount(amount)),
            false => Err(unexpected(amount, "a number from 0")),
        }
    }
}

fn unexpected<E: de::Error>(found: f64, expected: impl fmt::Display) -> E {
    E::custom(format!("found {found}, expected {expected}"))
}

/// Phrases that are compared with texts in small letters.
pub(super) fn lower_case<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<String>, D::Error> {
    let phrases = Vec::<String>::deserialize(deserializer)?;
    Ok(phrases.iter().map(|phrase| phrase.to_lowercase()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<FilterSettings, String> {
        let mut settings = FilterSettings::default();
        let appended = settings.append_toml(text, Path::new("mine.toml"));
        appended.map(|()| settings).map_err(|error| error.to_string())
    }

    /// The names of the sets, as an index has them.
    fn tables(settings: &FilterSettings) -> Vec<String> {
        let table = |set: &FilterSet| {
            let set = serde_json::to_value(set).unwrap();
            set.as_object().unwrap().keys().next().unwrap().clone()
        };
        settings.sets().iter().map(table).collect()
    }

    #[test]
    fn tables_are_applied_as_they_stand_in_the_file() {
        let settings = parsed("[fineweb]\n[c4]\nmin_line_words = 3\n[gopher]\n").unwrap();
        assert_eq!(tables(&settings), ["fineweb", "c4", "gopher"]);
        let list = FilterSettings::from_list("gopher, c4,repetition").unwrap();
        assert_eq!(tables(&list), ["gopher", "c4", "repetition"]);
    }

    #[test]
    fn every_named_set_is_the_table_of_its_name() {
        for name in FilterSettings::names() {
            let settings = FilterSettings::from_list(name).unwrap();
            assert_eq!(tables(&settings), [name]);
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_its_file_and_line() {
        for (text, expected) in [
            (
                "[gopher]\nmin_word = 3\n",
                "filter file mine.toml, line 2 (min_word = 3): unknown field `min_word`",
            ),
            ("\n[gophr]\n", "line 2 ([gophr]): unknown field `gophr`, expected one of `gopher`"),
            ("[c4]\nmin_sentences = -1", "line 2 (min_sentences = -1): invalid value"),
            (
                "[gopher]\n\nmax_bullet_lines = 1.5",
                "line 3 (max_bullet_lines = 1.5): found 1.5, expected a share",
            ),
            (
                "[gopher]\nmin_mean_word_characters = nan",
                "line 2 (min_mean_word_characters = nan): found NaN",
            ),
            ("[c4", "line 1 ([c4)"),
            ("", "mine.toml: found no table, expected one of [gopher], [repetition]"),
        ] {
            let message = parsed(text).unwrap_err();
            assert!(message.contains(expected), "{text}: {message}");
            assert!(!message.contains('\n'), "{message}");
        }
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let error = FilterSettings::from_list("gopher,c5").unwrap_err().to_string();
        let known = "gopher, repetition, c4, fineweb, refinedweb, nemo-english";
        assert!(error.contains("\"c5\"") && error.contains(known), "{error}");
    }
}
