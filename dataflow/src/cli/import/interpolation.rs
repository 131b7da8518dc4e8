//! `${variables.x}` and `${x}` of OmegaConf, put in place.

use std::collections::{BTreeMap, BTreeSet};

use super::document::{Leaf, Value};

/// Texts that interpolation makes have at most this many bytes.
const LONGEST_TEXT_BYTES: usize = 1 << 16;

/// Puts into every leaf what its references name; answers the paths that some leaf names.
///
/// # Errors
/// A reference to nothing, to a table, in a circle, to a resolver of OmegaConf (`${oc.env:HOME}`), or one without its end: with its line.
pub(super) fn resolve(leaves: &mut [Leaf]) -> Result<BTreeSet<String>, String> {
    let by_path = leaves.iter().map(|leaf| (leaf.path.as_str(), leaf)).collect();
    let mut resolver = Resolver { by_path, resolved: BTreeMap::new(), named: BTreeSet::new() };
    for leaf in leaves.iter() {
        resolver.leaf(leaf, &mut Vec::new())?;
    }
    let Resolver { mut resolved, named, .. } = resolver;
    for leaf in leaves {
        leaf.value = resolved.remove(&leaf.path).expect("every leaf was resolved");
    }
    Ok(named)
}

struct Resolver<'a> {
    by_path: BTreeMap<&'a str, &'a Leaf>,
    resolved: BTreeMap<String, Value>,
    named: BTreeSet<String>,
}

impl<'a> Resolver<'a> {
    /// The value of `leaf`, which the leaves of `open` lead to.
    fn leaf(&mut self, leaf: &'a Leaf, open: &mut Vec<&'a str>) -> Result<Value, String> {
        if let Some(value) = self.resolved.get(&leaf.path) {
            return Ok(value.clone());
        }
        // Deeper than any file is, and shallower than the stack.
        if open.contains(&leaf.path.as_str()) || open.len() > 100 {
            return Err(format!("{}: expected a value, found a circle of references", at(leaf)));
        }
        open.push(&leaf.path);
        let value = self.value(&leaf.value, leaf, open)?;
        open.pop();
        self.resolved.insert(leaf.path.clone(), value.clone());
        Ok(value)
    }

    fn value(
        &mut self,
        value: &Value,
        leaf: &'a Leaf,
        open: &mut Vec<&'a str>,
    ) -> Result<Value, String> {
        match value {
            Value::Text(text) if text.contains("${") => self.text(text, leaf, open),
            Value::List(values) => {
                let values = values.iter().map(|value| self.value(value, leaf, open));
                Ok(Value::List(values.collect::<Result<_, _>>()?))
            }
            other => Ok(other.clone()),
        }
    }

    fn text(
        &mut self,
        text: &str,
        leaf: &'a Leaf,
        open: &mut Vec<&'a str>,
    ) -> Result<Value, String> {
        let mut whole = String::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("${") {
            let end = after.find('}').ok_or_else(|| format!("{}: ${{ without }}", at(leaf)))?;
            let path = after[..end].trim();
            let found = self.reference(path, leaf, open)?;
            rest = &after[end + 1..];
            if before.is_empty() && whole.is_empty() && rest.is_empty() {
                return Ok(found);
            }
            whole.push_str(before);
            whole.push_str(&found.as_text());
            if whole.len() > LONGEST_TEXT_BYTES {
                return Err(format!("{}: more than {LONGEST_TEXT_BYTES} bytes", at(leaf)));
            }
        }
        whole.push_str(rest);
        Ok(Value::Text(whole))
    }

    fn reference(
        &mut self,
        path: &str,
        leaf: &'a Leaf,
        open: &mut Vec<&'a str>,
    ) -> Result<Value, String> {
        if let Some(&target) = self.by_path.get(path) {
            self.named.insert(path.to_owned());
            return self.leaf(target, open);
        }
        let table = format!("{path}.");
        let found = if path.contains([':', '$', '{']) {
            "which is no name of a key: write its value there"
        } else if self.by_path.keys().any(|key| key.starts_with(&table)) {
            "which is a table: write its keys there"
        } else {
            "which is not in this file"
        };
        Err(format!("{}: expected the key of a value in ${{{path}}}, {found}", at(leaf)))
    }
}

fn at(leaf: &Leaf) -> String {
    format!("line {}: {}", leaf.line, leaf.path)
}

#[cfg(test)]
mod tests {
    use super::super::document::leaves;
    use super::*;

    #[test]
    fn references_become_values_and_texts() {
        let text = "variables:\n  size: 2048\n  name: mpt-${variables.size}\nmax: ${variables.size}\nrun: ${variables.name}/a${max}\nall: [1, '${max}']\n";
        let mut leaves = leaves(text).unwrap();
        let named = resolve(&mut leaves).unwrap();
        let value = |path| &leaves.iter().find(|leaf| leaf.path == path).unwrap().value;
        assert_eq!(value("max"), &Value::Whole(2048));
        assert_eq!(value("run"), &Value::Text("mpt-2048/a2048".to_owned()));
        assert_eq!(value("all"), &Value::List(vec![Value::Whole(1), Value::Whole(2048)]));
        assert!(named.iter().eq(["max", "variables.name", "variables.size"]), "{named:?}");
    }

    #[test]
    fn a_reference_to_nothing_is_said_with_its_line() {
        let mut doubling = "a0: xxxxxxxx\n".to_owned();
        for level in 1..60 {
            doubling += &format!("a{level}: ${{a{0}}}${{a{0}}}\n", level - 1);
        }
        for (text, said) in [
            ("a: 1\nb: ${c}\n", "line 2: b: expected the key of a value in ${c}, which is not in"),
            (
                "a:\n  x: 1\nb: ${a}\n",
                "line 3: b: expected the key of a value in ${a}, which is a table",
            ),
            (
                "a: ${oc.env:HOME}\n",
                "line 1: a: expected the key of a value in ${oc.env:HOME}, which is no name",
            ),
            ("a: ${b}\nb: ${a}\n", "a circle"),
            ("a: ${b\n", "line 1: a: ${ without }"),
            (&doubling, "more than 65536 bytes"),
        ] {
            let error = resolve(&mut leaves(text).unwrap()).expect_err(text);
            assert!(error.contains(said), "{error}");
        }
    }
}
