//! The selections that `prepare` was asked to make: filters and deduplication.
//!
//! The index states the selection, so that nothing is ever added to a data set by other rules than the rest of it, and
//! so that a reader knows which documents were left out. Opening a data set to train on it ignores the selection: one with
//! rules of a later version can be read.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Settings of filters as JSON objects, lists and values, whose keys are in byte order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Selection(Value);

/// The first setting in which two selections differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelectionDifference {
    /// The keys from the outermost on, with dots between them.
    pub key: String,
    /// The value in the first selection.
    pub found: String,
    /// The value in the other selection.
    pub other: String,
}

impl Selection {
    /// Takes the settings.
    pub(crate) fn new(settings: Value) -> Selection {
        Selection(sorted(settings))
    }

    /// The settings.
    pub fn settings(&self) -> &Value {
        &self.0
    }

    /// The first setting in which another selection differs, if one does; `None` is a selection that leaves
    /// nothing out.
    pub fn difference(
        selection: Option<&Selection>,
        other: Option<&Selection>,
    ) -> Option<SelectionDifference> {
        let value = |selection: Option<&Selection>| {
            selection.map_or(Value::Object(Map::new()), |selection| selection.0.clone())
        };
        difference("", &value(selection), &value(other))
    }
}

/// The value with the keys of its objects in byte order, and without null values: the order in which
/// a map gives them depends on how the JSON library was built, and a rule that is off is as good as none.
fn sorted(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let is_set = |(_, value): &(String, Value)| !value.is_null();
            let mut entries: Vec<_> = map.into_iter().filter(is_set).collect();
            entries.sort_by(|a, b| a.0.cmp(&b.0));
            Value::Object(entries.into_iter().map(|(key, value)| (key, sorted(value))).collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(sorted).collect()),
        value => value,
    }
}

fn difference(key: &str, found: &Value, other: &Value) -> Option<SelectionDifference> {
    let inside = |name: &str| match key {
        "" => name.to_owned(),
        key => format!("{key}.{name}"),
    };
    match (found, other) {
        (Value::Object(found), Value::Object(other)) => {
            let mut keys: Vec<&String> = found.keys().chain(other.keys()).collect();
            keys.sort();
            keys.dedup();
            let value = |map: &Map<String, Value>, key| map.get(key).cloned().unwrap_or_default();
            keys.into_iter()
                .find_map(|key| difference(&inside(key), &value(found, key), &value(other, key)))
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => a
            .iter()
            .zip(b)
            .enumerate()
            .find_map(|(at, (a, b))| difference(&inside(&at.to_string()), a, b)),
        (found, other) if found == other => None,
        (found, other) => {
            let told = |value: &Value| match value {
                Value::Null => "nothing".to_owned(),
                value => shortened(value.to_string()),
            };
            let (found, other) = (told(found), told(other));
            Some(SelectionDifference { key: key.to_owned(), found, other })
        }
    }
}

/// The beginning of a text that is too long for a message.
fn shortened(text: String) -> String {
    const LONGEST: usize = 80;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        let difference = |a: Value, b: Value| {
            let (a, b) = (Selection::new(a), Selection::new(b));
            let found = Selection::difference(Some(&a), Some(&b));
            found.map(|found| (found.key, found.found, found.other))
        };
        let told = |key: &str, a: &str, b: &str| Some((key.into(), a.into(), b.into()));
        let one = json!({"filters": [{"c4": {"min_sentences": 5}}], "words": "words-1"});
        let with_null =
            json!({"filters": [{"c4": {"a": null, "min_sentences": 5}}], "words": "words-1"});
        assert_eq!(Selection::new(with_null), Selection::new(one.clone()));
        assert_eq!(difference(one.clone(), one.clone()), None);
        let mut other = one.clone();
        other["filters"][0]["c4"]["min_sentences"] = json!(3);
        assert_eq!(difference(one.clone(), other), told("filters.0.c4.min_sentences", "5", "3"));
        assert_eq!(
            difference(one.clone(), json!({"words": "words-1"})),
            told("filters", "[{\"c4\":{\"min_sentences\":5}}]", "nothing")
        );
        let one = Selection::new(one);
        let none = Selection::difference(None, Some(&one)).unwrap();
        assert_eq!((none.key.as_str(), none.found.as_str()), ("filters", "nothing"));
        assert_eq!(Selection::difference(None, None), None);
    }
}
