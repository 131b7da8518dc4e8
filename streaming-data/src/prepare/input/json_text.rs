//! The text in a line of JSON.
//!
//! The line is walked once and nothing is built of it but the one text, so that long records of
//! which a single field is wanted cost little.

use std::{borrow::Cow, fmt};

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::prepare::input::skip::BrokenReason;

/// The text at `key` of the object that `line` is. Dots go into nested objects; where a key itself
/// has dots, the longest existing key counts, and of equal keys the last.
///
/// # Errors
/// [`BrokenReason`] for a line that is not JSON, no object, or has no text there.
pub(crate) fn text_of<'a>(line: &'a str, key: &str) -> Result<Cow<'a, str>, BrokenReason> {
    let mut deserializer = serde_json::Deserializer::from_str(line);
    let found = Wanted { key: Some(key) }.deserialize(&mut deserializer);
    match found.and_then(|found| deserializer.end().map(|()| found)).map_err(not_json)? {
        Found::Text(text) => Ok(text),
        Found::Other(found) => Err(BrokenReason::NotText { key: key.to_owned(), found }),
        Found::NoKey => Err(BrokenReason::NoKey { key: key.to_owned() }),
        Found::NotAnObject(found) => Err(BrokenReason::NotAnObject { found }),
    }
}

/// The error of a text that is a single line, without the number of that line.
fn not_json(error: serde_json::Error) -> BrokenReason {
    let (line, column) = (error.line(), error.column());
    let text = error.to_string();
    let place = format!(" at line {line} column {column}");
    let problem = text.strip_suffix(&place).unwrap_or(&text).to_owned();
    BrokenReason::NotJson { column, problem }
}

/// The kind of a value.
enum Found<'a> {
    Text(Cow<'a, str>),
    Other(&'static str),
    NoKey,
    NotAnObject(&'static str),
}

/// The value that is wanted: that at a key of this one, or this one itself.
struct Wanted<'k> {
    key: Option<&'k str>,
}

impl<'de> Wanted<'_> {
    fn other<E>(&self, what: &'static str) -> Result<Found<'de>, E> {
        Ok(if self.key.is_some() { Found::NotAnObject(what) } else { Found::Other(what) })
    }

    fn text<E>(&self, text: Cow<'de, str>) -> Result<Found<'de>, E> {
        if self.key.is_some() { self.other("a string") } else { Ok(Found::Text(text)) }
    }
}

impl<'de> DeserializeSeed<'de> for Wanted<'_> {
    type Value = Found<'de>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Found<'de>, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Wanted<'_> {
    type Value = Found<'de>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Found<'de>, E> {
        self.text(Cow::Borrowed(text))
    }

    fn visit_str<E>(self, text: &str) -> Result<Found<'de>, E> {
        self.text(Cow::Owned(text.to_owned()))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Found<'de>, E> {
        self.other("a boolean")
    }

    fn visit_i64<E>(self, _: i64) -> Result<Found<'de>, E> {
        self.other("a number")
    }

    fn visit_u64<E>(self, _: u64) -> Result<Found<'de>, E> {
        self.other("a number")
    }

    fn visit_f64<E>(self, _: f64) -> Result<Found<'de>, E> {
        self.other("a number")
    }

    fn visit_unit<E>(self) -> Result<Found<'de>, E> {
        self.other("null")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Found<'de>, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        self.other("a list")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Found<'de>, A::Error> {
        let Some(wanted) = self.key else {
            while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
            return Ok(Found::Other("an object"));
        };
        let mut found = Found::NoKey;
        let mut found_key_bytes = 0;
        while let Some(key) = entries.next_key_seed(Key { wanted })? {
            match key {
                Some(KeyMatch { key_bytes, rest }) if key_bytes >= found_key_bytes => {
                    found_key_bytes = key_bytes;
                    found = match entries.next_value_seed(Wanted { key: rest })? {
                        Found::NotAnObject(_) => Found::NoKey,
                        found => found,
                    };
                }
                _ => {
                    entries.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(found)
    }
}

/// Compares a key with the one that is wanted, without keeping it.
struct Key<'k> {
    wanted: &'k str,
}

/// A key that is a prefix of the wanted one, and the rest of the wanted one.
struct KeyMatch<'k> {
    key_bytes: usize,
    rest: Option<&'k str>,
}

impl<'de, 'k> DeserializeSeed<'de> for Key<'k> {
    type Value = Option<KeyMatch<'k>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'k> Visitor<'_> for Key<'k> {
    type Value = Option<KeyMatch<'k>>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a key")
    }

    fn visit_str<E>(self, key: &str) -> Result<Self::Value, E> {
        let rest = match self.wanted.strip_prefix(key) {
            Some("") => None,
            Some(rest) => match rest.strip_prefix('.') {
                Some(rest) => Some(rest),
                None => return Ok(None),
            },
            None => return Ok(None),
        };
        Ok(Some(KeyMatch { key_bytes: key.len(), rest }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_found_at_keys_of_any_depth() {
        for (line, key, expected) in [
            (r#"{"text": "a"}"#, "text", "a"),
            (
                r#" { "id": [1, {"text": "no"}], "text" : "a\n\u00e9\ud83e\udd80\"" } "#,
                "text",
                "a\né🦀\"",
            ),
            (r#"{"a": {"b": {"c": "deep"}, "c": "no"}}"#, "a.b.c", "deep"),
            (r#"{"a.b": "literal"}"#, "a.b", "literal"),
            (r#"{"a.b": "literal", "a": {"b": "nested"}}"#, "a.b", "literal"),
            (r#"{"a": {"b": "nested"}, "a.b": "literal"}"#, "a.b", "literal"),
            (r#"{"a.b": {"c": "both"}, "a": {"b.c": "no"}}"#, "a.b.c", "both"),
            (r#"{"te\u0078t": "escaped key"}"#, "text", "escaped key"),
            (r#"{"text": 1, "text": "last"}"#, "text", "last"),
            (r#"{"text": ""}"#, "text", ""),
        ] {
            assert_eq!(text_of(line, key).as_deref(), Ok(expected), "{line}");
        }
    }

    #[test]
    fn what_is_wrong_is_told_with_its_column() {
        for (line, key, expected) in [
            (r#"{"text": "a"#, "text", "it is not JSON at column 11: EOF while parsing a string"),
            (r#"{"text": "a"} x"#, "text", "it is not JSON at column 15: trailing characters"),
            (r#"{"text": "\ud800"}"#, "text", "it is not JSON at column 17: "),
            (r#"{"text": "a", "b": }"#, "text", "it is not JSON at column 20: expected value"),
            (r#"text"#, "text", "it is not JSON at column 2: expected ident"),
            (r#"["text"]"#, "text", "found a list, expected an object"),
            (r#""text""#, "text", "found a string, expected an object"),
            (r#"{"Text": "a"}"#, "text", "it has no key \"text\""),
            (r#"{"a": {"c": "x"}}"#, "a.b", "it has no key \"a.b\""),
            (r#"{"a": "x"}"#, "a.b", "it has no key \"a.b\""),
            (r#"{"text": null}"#, "text", "\"text\" is null, expected a string"),
            (r#"{"text": -3}"#, "text", "\"text\" is a number, expected a string"),
            (r#"{"text": 1e400}"#, "text", "it is not JSON at column 14: number out of range"),
            (r#"{"text": true}"#, "text", "\"text\" is a boolean, expected a string"),
            (r#"{"text": ["a"]}"#, "text", "\"text\" is a list, expected a string"),
            (r#"{"text": {"a": 1}}"#, "text", "\"text\" is an object, expected a string"),
        ] {
            let reason = text_of(line, key).unwrap_err().to_string();
            assert!(reason.starts_with(expected), "{line}: {reason}");
        }
        // No depth is too much for a thread.
        let deep = format!("{{\"a\": {}", "[{\"a\":".repeat(100_000));
        for key in ["text", "a", "a.a.a"] {
            let reason = text_of(&deep, key).unwrap_err().to_string();
            assert!(reason.contains("EOF while parsing"), "{reason}");
        }
    }
}
