//! Filters: functions of a column's text, applied before it enters a prompt.

use std::collections::BTreeMap;

/// White space as in Python's `str.strip`: Unicode's, and the four separators of ASCII.
pub(crate) fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&character)
}

/// One of the functions that a template may call, `{column|name "argument"}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Filter {
    /// `strip`: without white space around it.
    Strip,
    /// `capitalize`: the first character in upper case, all others in lower case.
    Capitalize,
    /// `uncapitalize`: the first character in lower case.
    Uncapitalize,
    /// `drop_last`: without its last character.
    DropLast,
    /// `before "x"`: the text before the first x; an error if there is none.
    Before(String),
    /// `after "x"`: the text after the first x; an error if there is none.
    After(String),
    /// `before_last "x"`: the text before the last x; empty if there is none.
    BeforeLast(String),
    /// `after_last "x"`: the text after the last x; the whole text if there is none.
    AfterLast(String),
    /// `wikihow`: the cleaning of HellaSwag's texts: stripped, ` [title]` becomes `. `, text in
    /// brackets is removed, and two spaces become one, in one pass.
    Wikihow,
    /// `look_up "table"`: the entry of the text in one of the task's `tables`.
    LookUp(String),
}

impl Filter {
    /// The names of all filters, for errors.
    pub const NAMES: &str = "strip, capitalize, uncapitalize, drop_last, before, after, before_last, after_last, \
                             wikihow, look_up";

    /// The filter of this name.
    ///
    /// # Errors
    /// An unknown name, a missing argument, or one too many, in words.
    pub fn parse(name: &str, argument: Option<String>) -> Result<Self, String> {
        let with = |make: fn(String) -> Self| {
            let argument = argument.clone().filter(|argument| !argument.is_empty());
            argument.map(make).ok_or_else(|| format!("{name} needs a text in quotes behind it"))
        };
        let without = |filter: Self| match &argument {
            None => Ok(filter),
            Some(argument) => Err(format!("{name} takes no argument, found {argument:?}")),
        };
        match name {
            "strip" => without(Self::Strip),
            "capitalize" => without(Self::Capitalize),
            "uncapitalize" => without(Self::Uncapitalize),
            "drop_last" => without(Self::DropLast),
            "wikihow" => without(Self::Wikihow),
            "before" => with(Self::Before),
            "after" => with(Self::After),
            "before_last" => with(Self::BeforeLast),
            "after_last" => with(Self::AfterLast),
            "look_up" => with(Self::LookUp),
            _ => Err(format!("expected one of {}, found {name:?}", Self::NAMES)),
        }
    }

    /// Applies the filter to `text`.
    ///
    /// # Errors What was not found in the text or the table, in words.
    pub fn apply(&self, text: &str, tables: &Tables) -> Result<String, String> {
        let split = |at: &str| {
            text.split_once(at).ok_or_else(|| format!("expected {at:?} in {text:?}, found none"))
        };
        Ok(match self {
            Self::Strip => text.trim_matches(is_space).to_owned(),
            Self::Capitalize => {
                first_changed(text, |first| first.to_uppercase().collect(), str::to_lowercase)
            }
            Self::Uncapitalize => {
                first_changed(text, |first| first.to_lowercase().collect(), str::to_owned)
            }
            Self::DropLast => {
                let mut characters = text.chars();
                characters.next_back();
                characters.as_str().to_owned()
            }
            Self::Before(at) => split(at)?.0.to_owned(),
            Self::After(at) => split(at)?.1.to_owned(),
            Self::BeforeLast(at) => {
                text.rsplit_once(at).map_or("", |(before, _)| before).to_owned()
            }
            Self::AfterLast(at) => text.rsplit_once(at).map_or(text, |(_, after)| after).to_owned(),
            Self::Wikihow => wikihow(text),
            Self::LookUp(table) => {
                let table =
                    tables.get(table).ok_or_else(|| format!("there is no table {table}"))?;
                let words = || table.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
                let word = table.get(text);
                word.ok_or_else(|| format!("expected one of {}, found {text:?}", words()))?.clone()
            }
        })
    }
}

/// The tables of a task, by name: each maps texts to texts.
pub type Tables = BTreeMap<String, BTreeMap<String, String>>;

fn first_changed(
    text: &str,
    first: impl Fn(char) -> String,
    rest: impl Fn(&str) -> String,
) -> String {
    let mut characters = text.chars();
    let head = characters.next().map(first).unwrap_or_default();
    // The upper case of some characters has several characters; all but the first become lower case
    // again.
    let mut head = head.chars();
    let leading: String = head.next().into_iter().collect();
    leading + &rest(head.as_str()) + &rest(characters.as_str())
}

fn wikihow(text: &str) -> String {
    let text = text.trim_matches(is_space).replace(" [title]", ". ");
    let (mut kept, mut rest) = (String::new(), text.as_str());
    // Text between brackets on one line is removed; a bracket without its end on that line stays.
    while let Some(open) = rest.find('[') {
        let inside = &rest[open + 1..];
        match inside.find([']', '\n']).filter(|&end| inside[end..].starts_with(']')) {
            Some(end) => {
                kept.push_str(&rest[..open]);
                rest = &inside[end + 1..];
            }
            None => {
                kept.push_str(&rest[..=open]);
                rest = inside;
            }
        }
    }
    kept.push_str(rest);
    kept.replace("  ", " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(name: &str, argument: Option<&str>, text: &str) -> Result<String, String> {
        let words = [("cause".to_owned(), "because".to_owned())];
        let tables = Tables::from([("connectors".to_owned(), words.into())]);
        Filter::parse(name, argument.map(str::to_owned)).expect("a filter").apply(text, &tables)
    }

    #[test]
    fn texts_are_changed_as_python_changes_them() {
        let changed = |name, argument, text| applied(name, argument, text).expect("applies");
        assert_eq!(changed("strip", None, "\u{1f} \n a b\t"), "a b");
        assert_eq!(changed("capitalize", None, "he Is. Éa"), "He is. éa");
        assert_eq!(changed("capitalize", None, "ßA"), "Ssa");
        assert_eq!(changed("capitalize", None, ""), "");
        assert_eq!(changed("uncapitalize", None, "The Cook"), "the Cook");
        assert_eq!(changed("drop_last", None, "Élan é"), "Élan ");
        assert_eq!(changed("before", Some("_"), "a _ b _"), "a ");
        assert_eq!(changed("after", Some("_"), "a _ b _"), " b _");
        assert_eq!(changed("before_last", Some(" "), "a b c"), "a b");
        assert_eq!(changed("after_last", Some(" "), "a b c"), "c");
        assert_eq!(changed("before_last", Some(" "), "abc"), "");
        assert_eq!(changed("after_last", Some(" "), "abc"), "abc");
        assert_eq!(changed("look_up", Some("connectors"), "cause"), "because");
        assert_eq!(
            applied("before", Some("_"), "ab").unwrap_err(),
            "expected \"_\" in \"ab\", found none"
        );
        let unknown = applied("look_up", Some("connectors"), "effect").unwrap_err();
        assert_eq!(unknown, "expected one of cause, found \"effect\"");
    }

    #[test]
    fn texts_of_wikihow_are_cleaned() {
        let cleaned = |text| applied("wikihow", None, text).expect("applies");
        assert_eq!(
            cleaned(" How to [title] Do it. [step] Now  go [substeps] on "),
            "How to. Do it. Now go on"
        );
        // One pass: three spaces become two. A bracket that ends on another line stays.
        assert_eq!(cleaned("a   b"), "a  b");
        assert_eq!(cleaned("a [b\nc] d [e] f"), "a [b\nc] d f");
        assert_eq!(cleaned("[[x]] y ["), "] y [");
    }

    #[test]
    fn wrong_filters_are_told() {
        let parse = |name, argument: Option<&str>| {
            Filter::parse(name, argument.map(str::to_owned)).unwrap_err()
        };
        assert!(parse("upper", None).contains("wikihow"), "{}", parse("upper", None));
        assert_eq!(parse("before", None), "before needs a text in quotes behind it");
        assert_eq!(parse("strip", Some("x")), "strip takes no argument, found \"x\"");
    }
}
