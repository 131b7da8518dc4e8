//! Texts with columns in them: `Question: {goal}\nAnswer:`.
//!
//! A column is in braces, a field of one behind a dot (`{choices.text}`), and filters behind bars (`{sentence|after "_"|strip}`,
//! [`Filter`]). `{{` and `}}` are braces. A template that is a single column in braces may name one that holds a list.

use serde_json::{Map, Value};

use crate::filter::{Filter, Tables};

/// A row: its columns by name.
pub type Row = Map<String, Value>;

/// A text with columns in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Column(Column),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Column {
    path: String,
    filters: Vec<Filter>,
}

impl Template {
    /// Reads a template.
    ///
    /// # Errors
    /// The fault, in words: an unmatched brace, a column without a name, or an unknown filter.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (mut parts, mut plain, mut rest) = (Vec::new(), String::new(), text);
        while let Some(at) = rest.find(['{', '}']) {
            let (before, from) = rest.split_at(at);
            plain.push_str(before);
            if let Some(after) = from.strip_prefix("{{").or_else(|| from.strip_prefix("}}")) {
                plain.push_str(&from[..1]);
                rest = after;
                continue;
            }
            let Some(inside) = from.strip_prefix('{') else {
                return Err(format!(
                    "expected {{ before }} in {text:?} (a brace is written twice)"
                ));
            };
            let end = end_of_column(inside).ok_or_else(|| {
                format!("expected }} behind {{ in {text:?} (a brace is written twice)")
            })?;
            if !plain.is_empty() {
                parts.push(Part::Text(std::mem::take(&mut plain)));
            }
            parts.push(Part::Column(Column::parse(&inside[..end])?));
            rest = &inside[end + 1..];
        }
        plain.push_str(rest);
        if !plain.is_empty() {
            parts.push(Part::Text(plain));
        }
        Ok(Self { parts })
    }

    /// The filters in the template.
    pub fn filters(&self) -> impl Iterator<Item = &Filter> {
        self.parts.iter().flat_map(|part| match part {
            Part::Text(_) => &[][..],
            Part::Column(column) => &column.filters,
        })
    }

    /// The text for `row`.
    ///
    /// # Errors The fault of the row, in words: a column that is missing or holds no text or
    /// number, or a text that a filter refuses.
    pub fn render(&self, row: &Row, tables: &Tables) -> Result<String, String> {
        let mut text = String::new();
        for part in &self.parts {
            match part {
                Part::Text(plain) => text.push_str(plain),
                Part::Column(column) => {
                    text.push_str(&column.text(value(row, &column.path)?, tables)?);
                }
            }
        }
        Ok(text)
    }

    /// The texts for `row`: those of the list, if the template is a single column that holds one;
    /// else one text.
    ///
    /// # Errors
    /// As [`render`](Self::render).
    pub fn render_each(&self, row: &Row, tables: &Tables) -> Result<Vec<String>, String> {
        if let [Part::Column(column)] = &self.parts[..]
            && let Value::Array(values) = value(row, &column.path)?
        {
            return values.iter().map(|value| column.text(value, tables)).collect();
        }
        Ok(vec![self.render(row, tables)?])
    }
}

impl Column {
    fn parse(text: &str) -> Result<Self, String> {
        let mut parts = split_outside_quotes(text).into_iter();
        let path = parts.next().unwrap_or_default().trim().to_owned();
        if path.split('.').any(str::is_empty) {
            return Err(format!("expected the name of a column in {{{text}}}"));
        }
        let filters = parts.map(|part| {
            let part = part.trim();
            match part.split_once(char::is_whitespace) {
                None => Filter::parse(part, None),
                Some((name, argument)) => {
                    let argument = argument.trim();
                    let inner = argument.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
                    let inner =
                        inner.ok_or_else(|| format!("expected {argument} in double quotes"))?;
                    Filter::parse(name, Some(inner.to_owned()))
                }
            }
        });
        Ok(Self { path, filters: filters.collect::<Result<_, _>>()? })
    }

    fn text(&self, value: &Value, tables: &Tables) -> Result<String, String> {
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Number(number) => number.to_string(),
            other => {
                let found = kind_of(other);
                return Err(format!(
                    "column {}: expected a text or number, found {found}",
                    self.path
                ));
            }
        };
        self.filters.iter().try_fold(text, |text, filter| {
            filter.apply(&text, tables).map_err(|what| format!("column {}: {what}", self.path))
        })
    }
}

/// The value of a column or of a field of one.
///
/// # Errors The existing columns, in words, if it is not one of them.
pub fn value<'r>(row: &'r Row, path: &str) -> Result<&'r Value, String> {
    let mut names = path.split('.');
    let first = names.next().and_then(|name| row.get(name));
    let found = first.and_then(|value| names.try_fold(value, |value, name| value.get(name)));
    found.ok_or_else(|| {
        let mut columns: Vec<&str> = row.keys().map(String::as_str).collect();
        columns.sort_unstable();
        format!("expected a column {path}, found {}", columns.join(", "))
    })
}

/// The type of a value, for errors.
pub(crate) fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The place of the brace that ends a column.
fn end_of_column(inside: &str) -> Option<usize> {
    let mut quoted = false;
    inside.char_indices().find_map(|(at, character)| {
        quoted ^= character == '"';
        (character == '}' && !quoted).then_some(at)
    })
}

fn split_outside_quotes(text: &str) -> Vec<&str> {
    let mut quoted = false;
    text.split(|character| {
        quoted ^= character == '"';
        character == '|' && !quoted
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row() -> Row {
        let row = json!({
            "goal": "Go?", "n": 7, "is": true, "sentence": "a _ b",
            "choices": {"text": ["x", " y "], "label": ["A", "B"]},
        });
        row.as_object().expect("an object").clone()
    }

    fn rendered(template: &str) -> Result<String, String> {
        Template::parse(template).expect("a template").render(&row(), &Tables::new())
    }

    #[test]
    fn columns_stand_in_texts() {
        assert_eq!(rendered("Q: {goal}\nA:").unwrap(), "Q: Go?\nA:");
        assert_eq!(rendered("{{{n}}} {goal}{goal}").unwrap(), "{7} Go?Go?");
        assert_eq!(
            rendered("{sentence|before \"_\"}| {sentence|after \"_\"|strip}").unwrap(),
            "a | b"
        );
        assert_eq!(rendered("{sentence|after_last \"|\"}").unwrap(), "a _ b");
        assert_eq!(rendered("{sentence|after_last \"}\"}").unwrap(), "a _ b");
        assert_eq!(rendered("").unwrap(), "");
        let each =
            |template: &str| Template::parse(template).unwrap().render_each(&row(), &Tables::new());
        assert_eq!(each("{choices.text|strip}").unwrap(), ["x", "y"]);
        assert_eq!(each("{goal}").unwrap(), ["Go?"]);
        assert_eq!(each("- {goal}").unwrap(), ["- Go?"]);
    }

    #[test]
    fn wrong_templates_and_rows_are_told() {
        let parse = |template: &str| Template::parse(template).unwrap_err();
        assert!(parse("a { b").contains("expected } behind {"), "{}", parse("a { b"));
        assert!(parse("a } b").contains("expected { before }"), "{}", parse("a } b"));
        assert!(parse("{}").contains("the name of a column"));
        assert!(parse("{a.}").contains("the name of a column"));
        assert!(parse("{a|shout}").contains("found \"shout\""));
        assert!(parse("{a|before _}").contains("expected _ in double quotes"));
        let missing = rendered("{gaol}").unwrap_err();
        assert_eq!(missing, "expected a column gaol, found choices, goal, is, n, sentence");
        assert!(
            rendered("{choices.texts}").unwrap_err().starts_with("expected a column choices.texts")
        );
        assert_eq!(
            rendered("{is}").unwrap_err(),
            "column is: expected a text or number, found a truth value"
        );
        assert!(rendered("- {choices.text}").unwrap_err().ends_with("found a list"));
    }
}
