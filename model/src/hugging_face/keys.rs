//! Reads a JSON object key by key, so that every error names the file and the key.
//!
//! A derived `Deserialize` would say `invalid type: string "x", expected usize at line 3 column
//! 20`; the author of a `config.json` needs the key. Unknown keys are ignored: these files hold
//! many.

use std::ops::RangeInclusive;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{ModelError, Result};

/// The keys of one JSON object in the file `path`.
pub(crate) struct Keys<'a> {
    path: &'a Path,
    map: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    /// The keys of `value`.
    pub(crate) fn of(path: &'a Path, value: &'a Value) -> Result<Self> {
        match value {
            Value::Object(map) => Ok(Self { path, map }),
            other => {
                let what = format!("expected a JSON object, found {}", kind(other));
                Err(ModelError::format(path, what))
            }
        }
    }

    /// Whether the object has `key`.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// The error that the value of `key` should have been `expected`.
    pub(crate) fn wrong(&self, key: &str, expected: &str) -> ModelError {
        let found = self.map.get(key).map_or_else(|| "nothing".to_owned(), shown);
        ModelError::format(self.path, format!("{key}: expected {expected}, found {found}"))
    }

    /// `error` of a check over several keys, with the name of the file added.
    pub(crate) fn refused(&self, error: ModelError) -> ModelError {
        ModelError::format(self.path, error.to_string())
    }

    /// The value of `key`, unless it is absent or null.
    pub(crate) fn value(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// A nested object, or nothing.
    pub(crate) fn object(&self, key: &str) -> Result<Option<Keys<'a>>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Keys { path: self.path, map })),
            Some(_) => Err(self.wrong(key, "a JSON object")),
        }
    }

    /// A whole number in `range`.
    pub(crate) fn size(
        &self,
        key: &str,
        default: Option<usize>,
        range: RangeInclusive<usize>,
    ) -> Result<usize> {
        let expected = || format!("a whole number from {} to {}", range.start(), range.end());
        let size = match (self.value(key), default) {
            (None, Some(default)) => return Ok(default),
            (None, None) => None,
            (Some(value), _) => value.as_u64().and_then(|size| usize::try_from(size).ok()),
        };
        size.filter(|size| range.contains(size)).ok_or_else(|| self.wrong(key, &expected()))
    }

    /// A token id, or nothing.
    pub(crate) fn token(&self, key: &str) -> Result<Option<u32>> {
        match self.value(key) {
            None => Ok(None),
            Some(value) => value
                .as_u64()
                .and_then(|id| u32::try_from(id).ok())
                .map(Some)
                .ok_or_else(|| self.wrong(key, "a token id or null")),
        }
    }

    /// A number.
    pub(crate) fn number(&self, key: &str, default: f64) -> Result<f64> {
        match self.value(key) {
            None => Ok(default),
            Some(value) => value.as_f64().ok_or_else(|| self.wrong(key, "a number")),
        }
    }

    /// A finite number above 0.
    pub(crate) fn positive(&self, key: &str, default: f64) -> Result<f64> {
        let value = self.number(key, default)?;
        if value > 0.0 && value.is_finite() {
            Ok(value)
        } else {
            Err(self.wrong(key, "a finite number above 0"))
        }
    }

    /// A finite number above 0, or nothing.
    pub(crate) fn positive_or_none(&self, key: &str) -> Result<Option<f64>> {
        self.value(key).map(|_| self.positive(key, 1.0)).transpose()
    }

    /// `true` or `false`.
    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.value(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.wrong(key, "true or false")),
        }
    }

    /// A string.
    pub(crate) fn text(&self, key: &str, default: &str) -> Result<String> {
        match self.value(key) {
            None => Ok(default.to_owned()),
            Some(Value::String(text)) => Ok(text.clone()),
            Some(_) => Err(self.wrong(key, "a string")),
        }
    }

    /// Whether `key` is the string `text`.
    pub(crate) fn is(&self, key: &str, text: &str) -> bool {
        self.value(key).and_then(Value::as_str) == Some(text)
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A value as an error shows it: short, on one line.
fn shown(value: &Value) -> String {
    match value {
        Value::Array(_) | Value::Object(_) => kind(value).to_owned(),
        scalar => {
            let text = scalar.to_string();
            if text.chars().count() > 40 {
                format!("{}...", text.chars().take(40).collect::<String>())
            } else {
                text
            }
        }
    }
}
