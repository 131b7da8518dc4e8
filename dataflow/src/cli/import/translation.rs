//! A file of another framework on its way to a `RUN.toml`: the outcome of each of its leaves.
//!
//! Reading a leaf settles nothing. A leaf is settled when a key is written because of it, when a remark beside a key names it, or when it
//! is listed as not taken over. Leaves that are not settled in the end are listed as unknown, so that none is dropped.

use std::collections::{BTreeMap, BTreeSet};

use super::document::{Leaf, Value};

/// Tables of a `RUN.toml`, in its order.
pub(super) const TABLES: [&str; 10] = [
    "run",
    "model",
    "data",
    "batch",
    "optimizer",
    "schedule",
    "checkpoint",
    "evaluation",
    "device",
    "parallel",
];

/// Why a leaf that no rule knows is not taken over.
pub(super) const UNKNOWN: &str = "Not known here, so without any effect";

/// A key of the output.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Key {
    /// Its name in its table.
    pub(super) name: String,
    /// Its value.
    pub(super) value: toml::Value,
    /// The comment beside it, or above it if it is long.
    pub(super) remark: String,
}

/// A table of the output.
#[derive(Clone, Debug, Default)]
pub(super) struct Table {
    /// Comments below its name: leaves, by reason.
    pub(super) remarks: Reasons,
    /// Its keys.
    pub(super) keys: Vec<Key>,
}

/// Leaves as they are quoted, by the reason that they share; reasons are in the order of their first leaves.
#[derive(Clone, Debug, Default)]
pub(super) struct Reasons(pub(super) Vec<(String, Vec<String>)>);

impl Reasons {
    fn add(&mut self, reason: &str, quoted: impl IntoIterator<Item = String>) {
        let found = self.0.iter().position(|(other, _)| other == reason);
        let index = found.unwrap_or_else(|| {
            self.0.push((reason.to_owned(), Vec::new()));
            self.0.len() - 1
        });
        self.0[index].1.extend(quoted);
    }
}

/// The leaves of the input, and their translation.
#[derive(Debug)]
pub(super) struct Translation {
    leaves: Vec<Leaf>,
    settled: BTreeSet<String>,
    /// Leaves that are not taken over.
    pub(super) left: Reasons,
    /// Keys that must be filled in, as `table.key`.
    pub(super) to_fill_in: Vec<String>,
    /// Keyed by the names of [`TABLES`].
    pub(super) tables: BTreeMap<&'static str, Table>,
}

impl Translation {
    pub(super) fn new(leaves: Vec<Leaf>) -> Self {
        Self {
            leaves,
            settled: BTreeSet::new(),
            left: Reasons::default(),
            to_fill_in: Vec::new(),
            tables: BTreeMap::new(),
        }
    }

    /// The value of a leaf; none where it is null.
    pub(super) fn value(&self, path: &str) -> Option<&Value> {
        let leaf = self.leaves.iter().find(|leaf| leaf.path == path);
        leaf.map(|leaf| &leaf.value).filter(|value| **value != Value::Null)
    }

    /// Whether there is such a leaf or table.
    pub(super) fn has(&self, path: &str) -> bool {
        self.leaves.iter().any(|leaf| is_below(&leaf.path, path))
    }

    /// The names of the keys of a table.
    pub(super) fn keys_of(&self, table: &str) -> Vec<String> {
        let mut keys: Vec<String> = Vec::new();
        for leaf in &self.leaves {
            let below = leaf.path.strip_prefix(table).and_then(|rest| rest.strip_prefix('.'));
            let Some(key) = below.and_then(|below| below.split('.').next()) else { continue };
            if keys.last().is_none_or(|last| last != key) {
                keys.push(key.to_owned());
            }
        }
        keys
    }

    /// The error message on a leaf with a value of the wrong kind.
    pub(super) fn wrong(&self, path: &str, expected: &str) -> String {
        let leaf = self.leaves.iter().find(|leaf| leaf.path == path);
        let (line, found) = leaf.map_or((0, String::new()), |it| (it.line, it.value.quoted()));
        format!("line {line}: {path}: expected {expected}, found {found}")
    }

    /// A text; none where there is none.
    pub(super) fn text(&self, path: &str) -> Result<Option<String>, String> {
        match self.value(path) {
            None => Ok(None),
            Some(Value::List(_) | Value::EmptyTable) => Err(self.wrong(path, "a text")),
            Some(value) => Ok(Some(value.as_text())),
        }
    }

    /// A number.
    pub(super) fn number(&self, path: &str) -> Result<Option<f64>, String> {
        match self.value(path) {
            None => Ok(None),
            Some(value) => match value.number() {
                Some(number) => Ok(Some(number)),
                None => Err(self.wrong(path, "a number")),
            },
        }
    }

    /// A whole number, not below 0.
    pub(super) fn whole(&self, path: &str) -> Result<Option<u64>, String> {
        // Beyond it numbers are not exact, and nothing here is as large.
        let whole = |number: f64| {
            (number >= 0.0 && number.fract() == 0.0 && number < 9e15).then_some(number as u64)
        };
        match self.number(path)? {
            None => Ok(None),
            Some(number) => match whole(number) {
                Some(whole) => Ok(Some(whole)),
                None => Err(self.wrong(path, "a whole number")),
            },
        }
    }

    /// `true` or `false`.
    pub(super) fn flag(&self, path: &str) -> Result<Option<bool>, String> {
        match self.value(path) {
            None => Ok(None),
            Some(Value::Flag(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.wrong(path, "true or false")),
        }
    }

    /// Writes a key because of the leaves `paths`, with a remark on it.
    pub(super) fn write(
        &mut self,
        key: &str,
        value: impl Into<toml::Value>,
        paths: &[&str],
        remark: &str,
    ) {
        let (table, name) = key.split_once('.').expect("keys are written as table.key");
        let table = TABLES.into_iter().find(|it| *it == table).expect("a table of a RUN.toml");
        let value = value.into();
        let mut quoted = Vec::new();
        for leaf in self.take(paths) {
            quoted.push(if same(&leaf.value, &value) { leaf.path } else { quote(&leaf) });
        }
        let remark = match (quoted.is_empty(), remark.is_empty()) {
            (true, _) => remark.to_owned(),
            (false, true) => quoted.join(", "),
            (false, false) => format!("{}: {remark}", quoted.join(", ")),
        };
        let key = Key { name: name.to_owned(), value, remark };
        self.tables.entry(table).or_default().keys.push(key);
    }

    /// Writes a key that the input cannot say, as something that is to be replaced.
    pub(super) fn fill_in(
        &mut self,
        key: &str,
        placeholder: impl Into<toml::Value>,
        paths: &[&str],
        what: &str,
    ) {
        self.write(key, placeholder, paths, "");
        let table = key.split('.').next().unwrap_or_default();
        let keys = self.tables.get_mut(table).map(|table| &mut table.keys);
        if let Some(key) = keys.and_then(|keys| keys.last_mut()) {
            let of = if key.remark.is_empty() { "" } else { "; of " };
            key.remark = format!("fill in: {what}{of}{}", key.remark);
        }
        self.to_fill_in.push(key.to_owned());
    }

    /// Says below the name of a table why leaves need no key there, or in which way the key differs. A path names all that is below it.
    pub(super) fn remark(&mut self, table: &'static str, paths: &[&str], reason: &str) {
        let taken: Vec<String> = self.take(paths).iter().map(quote).collect();
        if !taken.is_empty() {
            self.tables.entry(table).or_default().remarks.add(reason, taken);
        }
    }

    /// Adds a remark below the name of a table that is about no leaf.
    pub(super) fn say(&mut self, table: &'static str, what: &str) {
        self.tables.entry(table).or_default().remarks.add(what, []);
    }

    /// Says at the top why leaves are not taken over. A path names all that is below it.
    pub(super) fn leave(&mut self, paths: &[&str], reason: &str) {
        let taken: Vec<String> = self.take(paths).iter().map(quote).collect();
        if !taken.is_empty() {
            self.left.add(reason, taken);
        }
    }

    /// Adds a remark at the top on a difference that comes from no leaf.
    pub(super) fn warn(&mut self, what: &str) {
        self.left.add(what, []);
    }

    /// Settles leaves without a value, before any rule sees them.
    pub(super) fn settle_nulls(&mut self) {
        self.settle(&|leaf| leaf.value == Value::Null, |this, paths| {
            this.remark("run", paths, "Without a value there, so as if it were not there");
        });
    }

    /// Settles the leaves that no rule has settled: leaves that `${...}` names, and unknown ones.
    pub(super) fn settle_the_rest(&mut self, named: &BTreeSet<String>) {
        self.settle(&|leaf| named.contains(&leaf.path), |this, paths| {
            this.remark("run", paths, "Written out where ${...} named it");
        });
        self.settle(&|leaf| is_below(&leaf.path, "variables"), |this, paths| {
            this.remark("run", paths, "A variable that no key names");
        });
        self.settle(&|_| true, |this, paths| this.leave(paths, UNKNOWN));
    }

    fn settle(&mut self, picked: &dyn Fn(&Leaf) -> bool, how: impl FnOnce(&mut Self, &[&str])) {
        let open = self.leaves.iter().filter(|leaf| !self.settled.contains(&leaf.path));
        let paths: Vec<String> =
            open.filter(|leaf| picked(leaf)).map(|leaf| leaf.path.clone()).collect();
        how(self, &paths.iter().map(String::as_str).collect::<Vec<_>>());
    }

    /// Settles the leaves below `paths` that are not yet, and answers them.
    fn take(&mut self, paths: &[&str]) -> Vec<Leaf> {
        let wanted = |leaf: &&Leaf| paths.iter().any(|path| is_below(&leaf.path, path));
        let open = |leaf: &&Leaf| !self.settled.contains(&leaf.path);
        let taken: Vec<Leaf> = self.leaves.iter().filter(wanted).filter(open).cloned().collect();
        self.settled.extend(taken.iter().map(|leaf| leaf.path.clone()));
        taken
    }
}

/// Whether a leaf is `path` or is below it.
fn is_below(leaf: &str, path: &str) -> bool {
    leaf.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn quote(leaf: &Leaf) -> String {
    format!("{} = {}", leaf.path, leaf.value.quoted())
}

/// Whether a value of the output means the same as a value of the input.
fn same(input: &Value, output: &toml::Value) -> bool {
    match (input, output) {
        (Value::Flag(one), toml::Value::Boolean(other)) => one == other,
        (Value::Whole(one), toml::Value::Integer(other)) => one == other,
        (Value::Whole(one), toml::Value::Float(other)) => *one as f64 == *other,
        (Value::Number(one), toml::Value::Float(other)) => one == other,
        (Value::Text(one), toml::Value::String(other)) => one == other,
        (Value::List(one), toml::Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| same(one, other))
        }
        _ => false,
    }
}
