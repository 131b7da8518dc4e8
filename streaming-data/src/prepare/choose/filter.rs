//! Filters: which documents are trained on, and which of their lines.
//!
//! A verdict is a pure function of the document's text and the settings, so any thread may give it. A
//! document is kept, with all or a part of its text, or rejected by the first rule that it breaks; a rule
//! is named by its table and key in the TOML ([`FilterSettings`]), which is where its threshold is changed.
//! Whether rules do what their sources do is tested on what these gave for real texts.
//!
//! | module | holds |
//! |---|---|
//! | [`settings`], `sets/*.toml` | lists, files, and the named sets |
//! | [`gopher`], [`repetition`], [`c4`], [`fineweb`], [`refinedweb`], [`nemo`] | a family of rules each |
//! | [`words`], [`symbols`] | how a text is split into words, sentences and lines |
//! | [`grams`] | runs of n words |

pub(crate) mod c4;
pub(crate) mod fineweb;
pub(crate) mod gopher;
mod grams;
pub(crate) mod nemo;
pub(crate) mod refinedweb;
pub(crate) mod repetition;
mod settings;
mod symbols;
mod words;

use std::{
    borrow::Cow,
    cell::{OnceCell, RefCell},
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Mutex, PoisonError},
};

use serde::{Deserialize, Serialize};

pub use self::settings::FilterSettings;
pub(crate) use self::words::SPLITTER;
use self::{
    c4::C4, fineweb::FineWeb, gopher::Gopher, nemo::NemoEnglish, refinedweb::RefinedWeb,
    repetition::Repetition,
};

/// A rule that a document or line broke, as `table.key`; the key is `empty` where nothing was left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rule {
    /// The table in the TOML.
    pub table: &'static str,
    /// The key in that table.
    pub key: &'static str,
}

impl fmt::Display for Rule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}", self.table, self.key)
    }
}

/// How many names of tables and keys of rules there may be, and how long they are: there are some hundred.
const MOST_NAMES: usize = 4096;
const LONGEST_NAME: usize = 128;

impl Rule {
    /// The rule of these names, which need not be one of this program.
    pub(crate) fn named(table: &str, key: &str) -> Option<Rule> {
        Some(Rule { table: kept(table)?, key: kept(key)? })
    }

    /// The rule that is written so.
    pub(crate) fn parse(rule: &str) -> Option<Rule> {
        rule.split_once('.').and_then(|(table, key)| Rule::named(table, key))
    }
}

/// A name that lives as long as the process, like the names of its own rules; none if there are too many.
fn kept(name: &str) -> Option<&'static str> {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(kept) = names.get(name) {
        return Some(kept);
    }
    if names.len() >= MOST_NAMES || name.len() > LONGEST_NAME {
        return None;
    }
    let kept: &'static str = Box::leak(name.to_owned().into_boxed_str());
    names.insert(kept);
    Some(kept)
}

/// Documents and lines that filters removed, counted by rule.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FilterReport {
    /// Documents that were rejected, by the first rule that each broke.
    pub rejected: BTreeMap<Rule, u64>,
    /// Lines that were dropped from documents that are kept, by rule.
    pub dropped_lines: BTreeMap<Rule, u64>,
}

impl FilterReport {
    /// How many documents were rejected.
    pub fn rejected_documents(&self) -> u64 {
        self.rejected.values().sum()
    }

    /// Adds the counts of another report.
    pub(crate) fn add(&mut self, other: &FilterReport) {
        for (rule, count) in &other.rejected {
            *self.rejected.entry(*rule).or_default() += count;
        }
        for (rule, count) in &other.dropped_lines {
            *self.dropped_lines.entry(*rule).or_default() += count;
        }
    }
}

/// A family of rules with its thresholds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum FilterSet {
    Gopher(Gopher),
    Repetition(Repetition),
    C4(C4),
    Fineweb(FineWeb),
    Refinedweb(RefinedWeb),
    NemoEnglish(Box<NemoEnglish>),
}

impl FilterSet {
    fn rules(&self) -> &dyn Judge {
        match self {
            Self::Gopher(rules) => rules,
            Self::Repetition(rules) => rules,
            Self::C4(rules) => rules,
            Self::Fineweb(rules) => rules,
            Self::Refinedweb(rules) => rules,
            Self::NemoEnglish(rules) => &**rules,
        }
    }
}

/// The new text of a document that is kept, if it has one, or the rule that rejects it.
type Judged = Result<Option<String>, Rule>;

/// A family of rules.
trait Judge {
    fn judge(&self, document: &Measured<'_>) -> Judged;
}

/// A text, and what several rules want to know of it.
struct Measured<'a> {
    text: &'a str,
    words: OnceCell<Vec<&'a str>>,
    characters: OnceCell<usize>,
    dropped_lines: RefCell<BTreeMap<Rule, u64>>,
}

impl<'a> Measured<'a> {
    fn new(text: &'a str) -> Measured<'a> {
        Measured {
            text,
            words: OnceCell::new(),
            characters: OnceCell::new(),
            dropped_lines: RefCell::default(),
        }
    }

    /// Its words, symbols among them.
    fn words(&self) -> &[&'a str] {
        self.words.get_or_init(|| words::words(self.text))
    }

    fn characters(&self) -> usize {
        *self.characters.get_or_init(|| symbols::characters(self.text))
    }

    fn line_dropped(&self, rule: Rule) {
        *self.dropped_lines.borrow_mut().entry(rule).or_default() += 1;
    }
}

/// The part of a text that is trained on, where the text is not empty: all of it, the text that the filters leave, or
/// nothing. The rejected documents and dropped lines are added to the report.
pub(crate) fn judge<'a>(
    sets: &[FilterSet],
    text: &'a str,
    report: &mut FilterReport,
) -> Option<Cow<'a, str>> {
    let mut text = Cow::Borrowed(text);
    let mut sets = sets.iter();
    let mut dropped_lines = FilterReport::default();
    loop {
        let changed = {
            let measured = Measured::new(&text);
            let mut judged = sets.by_ref().map(|set| set.rules().judge(&measured));
            let changed = judged.find_map(Result::transpose);
            let dropped_lines = &mut dropped_lines.dropped_lines;
            for (rule, count) in measured.dropped_lines.borrow().iter() {
                *dropped_lines.entry(*rule).or_default() += count;
            }
            changed
        };
        match changed {
            Some(Ok(changed)) => text = Cow::Owned(changed),
            Some(Err(rule)) => {
                *report.rejected.entry(rule).or_default() += 1;
                return None;
            }
            None => {
                report.add(&dropped_lines);
                return Some(text);
            }
        }
    }
}

#[cfg(test)]
mod tests;
