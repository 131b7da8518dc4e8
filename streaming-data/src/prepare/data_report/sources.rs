//! Where tokens come from: inputs, or the folders that they are in where there are many.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::tally::OfInput;

/// Sources that a report lists.
pub const SOURCES: usize = 50;

/// Where the documents come from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sources {
    /// The sources with the most tokens, at most [`SOURCES`], the greatest first.
    pub listed: Vec<Source>,
    /// The sum of the sources that are not listed.
    pub others: OtherSources,
}

/// An input, or all inputs below a folder.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// Path of the source; the path of a folder ends with `/`.
    pub path: String,
    /// Number of inputs.
    pub inputs: u64,
    /// Documents in them, kept or not.
    pub documents: u64,
    /// Documents in the stream.
    pub kept: u64,
    /// Tokens of the kept documents.
    pub tokens: u64,
}

/// Sources that are not listed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherSources {
    /// Number of sources.
    pub sources: u64,
    /// Their inputs.
    pub inputs: u64,
    /// Documents in these.
    pub documents: u64,
    /// Documents in the stream.
    pub kept: u64,
    /// Tokens of the kept documents.
    pub tokens: u64,
}

/// The sources of inputs with these paths and counts. Inputs are listed by themselves where there are at most [`SOURCES`];
/// otherwise by folders, of the greatest depth with at most as many folders, or of the least depth that separates any two.
pub(crate) fn sources(inputs: &[(String, OfInput)]) -> Sources {
    let depth = inputs.iter().map(|(path, _)| path.matches('/').count()).max().unwrap_or(0);
    let mut groups = grouped(inputs, usize::MAX);
    for depth in (0..depth).rev() {
        if groups.len() <= SOURCES {
            break;
        }
        let coarser = grouped(inputs, depth);
        if coarser.len() < 2 {
            break;
        }
        groups = coarser;
    }
    let mut listed: Vec<Source> = groups.into_values().collect();
    listed.sort_by(|a, b| b.tokens.cmp(&a.tokens).then_with(|| a.path.cmp(&b.path)));
    let mut others = OtherSources::default();
    for source in listed.drain(SOURCES.min(listed.len())..) {
        others.sources += 1;
        others.inputs += source.inputs;
        others.documents = others.documents.saturating_add(source.documents);
        others.kept = others.kept.saturating_add(source.kept);
        others.tokens = others.tokens.saturating_add(source.tokens);
    }
    Sources { listed, others }
}

/// Sources by the first `depth` folders of their paths; inputs that are in fewer folders are sources of their own.
fn grouped(inputs: &[(String, OfInput)], depth: usize) -> BTreeMap<&str, Source> {
    let mut groups: BTreeMap<&str, Source> = BTreeMap::new();
    for (path, counts) in inputs {
        let folder = path.match_indices('/').nth(depth).map_or(&path[..], |(at, _)| &path[..=at]);
        let group = groups.entry(folder).or_default();
        if group.inputs == 0 {
            group.path = folder.to_owned();
        }
        group.inputs += 1;
        group.documents = group.documents.saturating_add(counts.documents);
        group.kept = group.kept.saturating_add(counts.kept);
        group.tokens = group.tokens.saturating_add(counts.tokens);
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(paths: impl IntoIterator<Item = String>) -> Vec<(String, OfInput)> {
        let counts = |at| OfInput { documents: 2, kept: 1, tokens: at };
        paths.into_iter().zip(1..).map(|(path, at)| (path, counts(at))).collect()
    }

    fn paths(sources: &Sources) -> Vec<&str> {
        sources.listed.iter().map(|source| source.path.as_str()).collect()
    }

    #[test]
    fn few_inputs_stand_by_themselves_and_many_by_their_folders() {
        let few = sources(&inputs(["/d/a.txt", "/d/b/c.txt"].map(str::to_owned)));
        assert_eq!(paths(&few), ["/d/b/c.txt", "/d/a.txt"]);
        let many = (0..60).map(|at| format!("/data/{}/{}/{at}.txt", at % 3, at % 20));
        let many = sources(&inputs(many));
        assert_eq!(paths(&many), ["/data/2/", "/data/1/", "/data/0/"]);
        assert_eq!((many.listed[0].inputs, many.listed[0].documents), (20, 40));
        assert_eq!(many.others, OtherSources::default());
        let flat = sources(&inputs((0..60).map(|at| format!("in/{at:02}.txt"))));
        assert_eq!((flat.listed.len(), flat.others.sources), (SOURCES, 10));
        assert_eq!((paths(&flat)[0], flat.others.tokens), ("in/59.txt", (1..=10).sum()));
        let one_by_one = sources(&inputs((0..40).map(|at| format!("in/a/{at}"))));
        assert_eq!(one_by_one.listed.len(), 40);
    }
}
