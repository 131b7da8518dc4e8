//! A configuration file as a list of leaves: dotted path, value, line.
//!
//! YAML is read by events of a parser, JSON by the same, since JSON is YAML; a plain scalar means the same as in OmegaConf, by which
//! LLM Foundry reads its files: `1e-4` is a number, `on` is true. A list of scalars is one leaf; one of tables has a leaf for each of
//! theirs, whose paths have the index (`eval_loader.0.label`).

use std::collections::{BTreeMap, BTreeSet};

use saphyr_parser::{Event, Parser, ScalarStyle, ScanError, Span, StrInput};

use crate::printable::printable;

/// Tables and lists inside each other at most.
const MOST_DEPTH: usize = 32;
/// Values of a file at most, those that aliases repeat included.
const MOST_VALUES: usize = 100_000;
/// Bytes of a value that are quoted, at most.
const LONGEST_QUOTE_BYTES: usize = 120;

/// A value without keys.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    /// Nothing, or `null`.
    Null,
    /// `true`, `yes`, `on` and their opposites.
    Flag(bool),
    /// A whole number.
    Whole(i64),
    /// Any other number.
    Number(f64),
    /// All else.
    Text(String),
    /// Values without keys.
    List(Vec<Value>),
    /// A table without a key.
    EmptyTable,
}

impl Value {
    /// The value of a plain scalar, which has no quotes.
    fn of_plain(text: &str) -> Self {
        let lower = text.to_ascii_lowercase();
        let starts_numeric = text
            .trim_start_matches(['+', '-'])
            .starts_with(|first: char| first.is_ascii_digit() || first == '.');
        match lower.as_str() {
            "" | "~" | "null" => return Self::Null,
            "true" | "yes" | "on" => return Self::Flag(true),
            "false" | "no" | "off" => return Self::Flag(false),
            ".inf" | "+.inf" => return Self::Number(f64::INFINITY),
            "-.inf" => return Self::Number(f64::NEG_INFINITY),
            ".nan" => return Self::Number(f64::NAN),
            _ if !starts_numeric => return Self::Text(text.to_owned()),
            _ => {}
        }
        let digits = lower.replace('_', "");
        match (digits.parse::<i64>(), digits.parse::<f64>()) {
            (Ok(whole), _) => Self::Whole(whole),
            (Err(_), Ok(number)) => Self::Number(number),
            (Err(_), Err(_)) => Self::Text(text.to_owned()),
        }
    }

    /// A number that is finite.
    pub(super) fn number(&self) -> Option<f64> {
        match self {
            Self::Whole(whole) => Some(*whole as f64),
            Self::Number(number) => Some(*number),
            Self::Text(text) => text.parse().ok(),
            Self::Null | Self::Flag(_) | Self::List(_) | Self::EmptyTable => None,
        }
        .filter(|number: &f64| number.is_finite())
    }

    /// The numbers of a list; none where it is no list.
    pub(super) fn numbers(&self) -> Vec<Option<f64>> {
        match self {
            Self::List(values) => values.iter().map(Self::number).collect(),
            _ => Vec::new(),
        }
    }

    /// As comments and errors quote it.
    pub(super) fn quoted(&self) -> String {
        match self {
            Self::Text(text) => format!("{:?}", printable(text, LONGEST_QUOTE_BYTES)),
            other => printable(&other.as_text(), LONGEST_QUOTE_BYTES),
        }
    }

    /// The value's form inside a longer text.
    pub(super) fn as_text(&self) -> String {
        match self {
            Self::Null => "null".to_owned(),
            Self::Flag(flag) => flag.to_string(),
            Self::Whole(whole) => whole.to_string(),
            Self::Number(number) => number.to_string(),
            Self::Text(text) => text.clone(),
            Self::List(values) => {
                format!("[{}]", values.iter().map(Self::quoted).collect::<Vec<_>>().join(", "))
            }
            Self::EmptyTable => "{}".to_owned(),
        }
    }
}

/// A value with the path of its keys.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Leaf {
    /// Its keys, with dots between them.
    pub(super) path: String,
    /// The value.
    pub(super) value: Value,
    /// The line of the value, from 1.
    pub(super) line: usize,
}

/// A value with its line, and its content.
#[derive(Clone, Debug)]
struct Node {
    line: usize,
    content: Content,
}

#[derive(Clone, Debug)]
enum Content {
    Scalar(Value),
    List(Vec<Node>),
    Table(Vec<(String, Node)>),
}

/// The leaves of `text`, in their order.
///
/// # Errors
/// A text that is neither YAML nor JSON, no table at the top, a key twice, a tag, several documents, too much or too deep: each with its
/// line.
pub(super) fn leaves(text: &str) -> Result<Vec<Leaf>, String> {
    if text.trim_start().starts_with('{') {
        // Its own errors say what JSON expects.
        serde_json::from_str::<serde::de::IgnoredAny>(text)
            .map_err(|error| format!("no JSON: {error}"))?;
    }
    let mut reader =
        Reader { parser: Parser::new_from_str(text), anchors: BTreeMap::new(), values: 0 };
    let root = reader.document()?;
    let Content::Table(entries) = root.content else {
        return Err(format!("line {}: expected a table of keys and values", root.line));
    };
    let mut leaves = Vec::new();
    for (key, node) in entries {
        flatten(key, node, &mut leaves);
    }
    let mut paths = BTreeSet::new();
    if let Some(twice) = leaves.iter().find(|leaf| !paths.insert(leaf.path.as_str())) {
        return Err(format!("line {}: {} stands there twice", twice.line, twice.path));
    }
    Ok(leaves)
}

fn flatten(path: String, node: Node, leaves: &mut Vec<Leaf>) {
    let line = node.line;
    let value = match node.content {
        Content::Scalar(value) => value,
        Content::Table(entries) if entries.is_empty() => Value::EmptyTable,
        Content::Table(entries) => {
            for (key, node) in entries {
                flatten(format!("{path}.{key}"), node, leaves);
            }
            return;
        }
        Content::List(nodes) => {
            let scalar = |node: &Node| match &node.content {
                Content::Scalar(value) => Some(value.clone()),
                Content::List(_) | Content::Table(_) => None,
            };
            match nodes.iter().map(scalar).collect() {
                Some(values) => Value::List(values),
                None => {
                    for (index, node) in nodes.into_iter().enumerate() {
                        flatten(format!("{path}.{index}"), node, leaves);
                    }
                    return;
                }
            }
        }
    };
    leaves.push(Leaf { path, value, line });
}

/// Nodes from events.
struct Reader<'input> {
    parser: Parser<'input, StrInput<'input>>,
    /// For each anchor the node that its aliases repeat, and the number of values in it.
    anchors: BTreeMap<usize, (Node, usize)>,
    values: usize,
}

impl<'input> Reader<'input> {
    fn next(&mut self) -> Result<(Event<'input>, usize), String> {
        match self.parser.next_event() {
            Some(Ok((event, Span { start, .. }))) => Ok((event, start.line())),
            Some(Err(error)) => Err(broken(&error)),
            None => Err("the file ends in the middle".to_owned()),
        }
    }

    /// The only document.
    fn document(&mut self) -> Result<Node, String> {
        let mut root = None;
        loop {
            match self.next()? {
                (Event::StreamEnd, _) => {
                    return root.ok_or_else(|| "the file is empty".to_owned());
                }
                (Event::DocumentStart(_), line) if root.is_some() => {
                    return Err(format!("line {line}: expected one document, found a second"));
                }
                (Event::DocumentStart(_), _) => {
                    let (event, line) = self.next()?;
                    root = Some(self.node(event, line, 0)?);
                }
                _ => {}
            }
        }
    }

    fn node(&mut self, event: Event<'input>, line: usize, depth: usize) -> Result<Node, String> {
        if depth > MOST_DEPTH {
            return Err(format!("line {line}: expected at most {MOST_DEPTH} levels of keys"));
        }
        let before = self.values;
        self.count(1, line)?;
        let (anchor, content) = match event {
            Event::Scalar(.., Some(_))
            | Event::SequenceStart(_, Some(_))
            | Event::MappingStart(_, Some(_)) => {
                return Err(format!("line {line}: expected no tag (such as !!int) before a value"));
            }
            Event::Scalar(text, style, anchor, None) => {
                let value = match style {
                    ScalarStyle::Plain => Value::of_plain(&text),
                    _ => Value::Text(text.into_owned()),
                };
                (anchor, Content::Scalar(value))
            }
            Event::SequenceStart(anchor, None) => (anchor, self.list(depth)?),
            Event::MappingStart(anchor, None) => (anchor, self.table(depth)?),
            Event::Alias(anchor) => {
                let Some((node, values)) = self.anchors.get(&anchor).cloned() else {
                    return Err(format!("line {line}: an alias of a value that it is part of"));
                };
                self.count(values, line)?;
                return Ok(node);
            }
            _ => return Err(format!("line {line}: expected a value")),
        };
        let node = Node { line, content };
        if anchor > 0 {
            self.anchors.insert(anchor, (node.clone(), self.values - before));
        }
        Ok(node)
    }

    fn list(&mut self, depth: usize) -> Result<Content, String> {
        let mut nodes = Vec::new();
        loop {
            match self.next()? {
                (Event::SequenceEnd, _) => return Ok(Content::List(nodes)),
                (event, line) => nodes.push(self.node(event, line, depth + 1)?),
            }
        }
    }

    fn table(&mut self, depth: usize) -> Result<Content, String> {
        let mut entries = Vec::new();
        let mut keys = BTreeSet::new();
        loop {
            let (key, line) = match self.next()? {
                (Event::MappingEnd, _) => return Ok(Content::Table(entries)),
                (Event::Scalar(key, ..), line) => (printable(&key, LONGEST_QUOTE_BYTES), line),
                (_, line) => return Err(format!("line {line}: expected a key")),
            };
            if key == "<<" {
                let expected = "expected the keys themselves in place of a merge (<<)";
                return Err(format!("line {line}: {expected}"));
            }
            if !keys.insert(key.clone()) {
                return Err(format!("line {line}: the key {key} stands there twice"));
            }
            let (event, line) = self.next()?;
            let node = self.node(event, line, depth + 1)?;
            entries.push((key, node));
        }
    }

    fn count(&mut self, values: usize, line: usize) -> Result<(), String> {
        self.values += values;
        if self.values > MOST_VALUES {
            return Err(format!("line {line}: expected at most {MOST_VALUES} values"));
        }
        Ok(())
    }
}

fn broken(error: &ScanError) -> String {
    let what = printable(error.info(), LONGEST_QUOTE_BYTES);
    format!("line {}: no YAML: {what}", error.marker().line())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_scalars_mean_what_omegaconf_makes_of_them() {
        let text = "a: 6.0e-4\nb: 1e-8\nc: 2_048\nd: yes\ne: ~\nf: 100ba\ng: '17'\nh: [0.9, 0.95]\ni: {}\nj: -1\n";
        let values: Vec<Value> = leaves(text).unwrap().into_iter().map(|leaf| leaf.value).collect();
        let expected = [
            Value::Number(6e-4),
            Value::Number(1e-8),
            Value::Whole(2048),
            Value::Flag(true),
            Value::Null,
            Value::Text("100ba".to_owned()),
            Value::Text("17".to_owned()),
            Value::List(vec![Value::Number(0.9), Value::Number(0.95)]),
            Value::EmptyTable,
            Value::Whole(-1),
        ];
        assert_eq!(values, expected);
    }

    #[test]
    fn leaves_have_paths_and_lines_and_json_is_read_alike() {
        let yaml = "base: &base\n  local: x\nlist:\n- label: one\n  dataset: *base\n- label: two\n";
        let json = "{\n\t\"base\": {\"local\": \"x\"},\n\t\"list\": [{\"label\": \"one\", \"dataset\": {\"local\": \"x\"}},\n\t{\"label\": \"two\"}]}";
        let paths = ["base.local", "list.0.label", "list.0.dataset.local", "list.1.label"];
        for text in [yaml, json] {
            let leaves = leaves(text).unwrap();
            assert!(leaves.iter().map(|leaf| leaf.path.as_str()).eq(paths), "{leaves:?}");
        }
        assert_eq!(leaves(yaml).unwrap()[3].line, 6);
    }

    #[test]
    fn what_cannot_be_read_is_said_with_its_line() {
        let deep = format!("a: {}", "[".repeat(40));
        let mut bomb = "a0: &a0 [1, 1]\n".to_owned();
        for level in 1..40 {
            bomb += &format!("a{level}: &a{level} [*a{0}, *a{0}]\n", level - 1);
        }
        for (text, said) in [
            ("a: 1\nb: [1, 2\n", "no YAML"),
            ("a: 1\na: 2\n", "line 2: the key a stands there twice"),
            ("{\"a\": 1,}", "no JSON"),
            ("{\"a\": 1, \"a\": 2}", "line 1: the key a stands there twice"),
            ("- 1\n", "line 1: expected a table"),
            ("", "the file is empty"),
            ("a: !!python/name:os.system x\n", "line 1: expected no tag"),
            ("a: 1\n---\nb: 2\n", "a second"),
            ("a: 1\n<<: {b: 1}\n", "line 2: expected the keys themselves"),
            ("a: &x [*x]\n", "alias"),
            (&deep, "line 1: expected at most 32 levels"),
            (&bomb, "expected at most"),
        ] {
            let error = leaves(text).expect_err(text);
            assert!(error.contains(said), "{error} of {}", &text[..text.len().min(40)]);
        }
    }
}
