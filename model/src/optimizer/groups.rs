//! Groups of parameters: `[[optimizer.groups]]`, which selects tensors by name and changes their
//! learning rate or weight decay.

use globset::{Glob, GlobSet};
use serde::{Deserialize, Serialize};

use super::terms::{UpdateTerms, WeightDecay};
use crate::error::{ModelError, Result};
use crate::layout::Layout;

/// One of `[[optimizer.groups]]`. The first group that matches a tensor's name takes the tensor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupSettings {
    /// Glob patterns for the names of tensors, as in checkpoints; `*` matches dots too.
    #[serde(rename = "match")]
    pub patterns: Vec<String>,
    /// A factor on the schedule's learning rate: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learning_rate_factor: Option<f64>,
    /// Weight decay in place of that of `[optimizer]`, also for tensors that `[optimizer]` does not
    /// decay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
}

/// An error about `key` of the group with index `place`.
fn wrong(place: usize, key: &str, expected: &str, found: impl ToString) -> ModelError {
    let key = format!("optimizer.groups (group {}, {key})", place + 1);
    ModelError::config(key, expected, found)
}

impl GroupSettings {
    /// Checks every value, but not whether patterns match; `place` is the index of the group, from
    /// 0.
    ///
    /// # Errors
    /// A value that no update can use, or a group that changes nothing.
    pub(super) fn check(&self, place: usize) -> Result<()> {
        let numbers = [
            ("learning_rate_factor", self.learning_rate_factor),
            ("weight_decay", self.weight_decay),
        ];
        for (key, number) in numbers {
            if let Some(number) = number
                && !((number as f32).is_finite() && number >= 0.0)
            {
                return Err(wrong(place, key, "a finite number of at least 0, in fp32", number));
            }
        }
        if numbers.iter().all(|(_, number)| number.is_none()) {
            let expected = "learning_rate_factor, weight_decay or both";
            return Err(wrong(place, "its settings", expected, "neither"));
        }
        if self.patterns.is_empty() {
            return Err(wrong(place, "match", "at least one pattern", "none"));
        }
        self.globs(place).map(drop)
    }

    /// The patterns, each compiled by itself, so that an error can name the one that matches
    /// nothing.
    fn globs(&self, place: usize) -> Result<Vec<GlobSet>> {
        // Building a set returns an error where a pattern is too large; a single glob would panic.
        let glob = |pattern: &String| GlobSet::builder().add(Glob::new(pattern)?).build();
        let globs = self.patterns.iter().map(|pattern| {
            glob(pattern).map_err(|error| {
                let found = format!("{:?} ({})", shortened(pattern), error.kind());
                wrong(place, "match", "a glob pattern", found)
            })
        });
        globs.collect()
    }

    /// The terms of a tensor of this group: those that the group sets, else those of `other`.
    fn terms(&self, other: UpdateTerms) -> UpdateTerms {
        UpdateTerms {
            learning_rate_factor: self.learning_rate_factor.unwrap_or(other.learning_rate_factor),
            weight_decay: self.weight_decay.map_or(other.weight_decay, WeightDecay::OfGroup),
        }
    }
}

/// The most characters of a pattern that errors quote.
const LONGEST_QUOTE_CHARS: usize = 200;

fn shortened(pattern: &str) -> String {
    pattern.chars().take(LONGEST_QUOTE_CHARS).collect()
}

/// The terms of each tensor of `layout`.
///
/// # Errors
/// The errors of [`OptimizerSettings::check`](super::OptimizerSettings::check) for groups, a
/// pattern that matches no tensor, and a group whose tensors all belong to earlier groups.
pub fn update_terms(groups: &[GroupSettings], layout: &Layout) -> Result<Vec<UpdateTerms>> {
    let tensors = layout.tensors();
    let mut terms: Vec<_> = tensors.iter().map(|tensor| UpdateTerms::of(tensor.decay)).collect();
    let mut is_taken = vec![false; tensors.len()];
    for (place, group) in groups.iter().enumerate() {
        group.check(place)?;
        let globs = group.globs(place)?;
        for (pattern, glob) in group.patterns.iter().zip(&globs) {
            if !tensors.iter().any(|tensor| glob.is_match(&tensor.name)) {
                let expected =
                    format!("a pattern that matches a tensor, such as {}", names(layout));
                let found = format!("{:?}, which matches none", shortened(pattern));
                return Err(wrong(place, "match", &expected, found));
            }
        }
        let mut takes_any = false;
        for (index, tensor) in tensors.iter().enumerate() {
            if !is_taken[index] && globs.iter().any(|glob| glob.is_match(&tensor.name)) {
                terms[index] = group.terms(terms[index]);
                (is_taken[index], takes_any) = (true, true);
            }
        }
        if !takes_any {
            let expected = "a tensor that no group before it takes";
            let patterns: Vec<_> = group.patterns.iter().map(|it| shortened(it)).collect();
            return Err(wrong(place, "match", expected, format!("{patterns:?}")));
        }
    }
    Ok(terms)
}

/// A few names of tensors: the first ones, and the last one.
fn names(layout: &Layout) -> String {
    let mut names: Vec<&str> = layout.tensors().iter().map(|tensor| &tensor.name[..]).collect();
    if names.len() > 4 {
        names.drain(3..names.len() - 1);
    }
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Decay;

    fn layout() -> Layout {
        let mut layout = Layout::new();
        layout.segment("all");
        layout.tensor("backbone.embeddings.weight", &[3, 5], Decay::Decayed, 1);
        for index in 0..2 {
            layout.tensor(format!("backbone.layers.{index}.norm.weight"), &[5], Decay::Exempt, 1);
            layout.tensor(format!("backbone.layers.{index}.in.weight"), &[5, 5], Decay::Decayed, 1);
        }
        layout.tensor("backbone.norm_f.weight", &[5], Decay::Exempt, 1);
        layout
    }

    fn group(patterns: &[&str], factor: Option<f64>, weight_decay: Option<f64>) -> GroupSettings {
        let patterns = patterns.iter().map(|&pattern| pattern.to_owned()).collect();
        GroupSettings { patterns, learning_rate_factor: factor, weight_decay }
    }

    fn terms(groups: &[GroupSettings]) -> Vec<(f64, WeightDecay)> {
        let terms = update_terms(groups, &layout()).expect("allowed");
        terms.into_iter().map(|it| (it.learning_rate_factor, it.weight_decay)).collect()
    }

    #[test]
    fn the_first_group_that_matches_takes_a_tensor() {
        use WeightDecay::{Exempt, OfGroup, OfRule};
        let none = [OfRule, Exempt, OfRule, Exempt, OfRule, Exempt];
        assert_eq!(terms(&[]), none.map(|decay| (1.0, decay)));
        let groups = [
            group(&["*.norm.*", "*embeddings*"], Some(0.5), None),
            group(&["backbone.layers.1.*"], None, Some(0.0)),
            group(&["*"], Some(2.0), Some(0.25)),
        ];
        let expected = [
            (0.5, OfRule),
            (0.5, Exempt),
            (2.0, OfGroup(0.25)),
            // The second group matches this tensor too.
            (0.5, Exempt),
            (1.0, OfGroup(0.0)),
            (2.0, OfGroup(0.25)),
        ];
        assert_eq!(terms(&groups), expected);
    }

    #[test]
    fn patterns_are_of_whole_names() {
        let is_match = |pattern: &str, name: &str| {
            let globs = group(&[pattern], Some(1.0), None).globs(0).expect("a pattern");
            globs[0].is_match(name)
        };
        for (pattern, name, matches) in [
            ("*", "a.b/c", true),
            ("*.weight", "a.b.weight", true),
            ("*.weight", "a.weight.b", false),
            ("a.*.b", "a.x.y.b", true),
            ("a.*.b", "ab", false),
            ("norm.*", "a.norm.weight", false),
            ("*.norm.*", "norm.weight", false),
            ("a.?.b", "a.1.b", true),
            ("a.?.b", "a.12.b", false),
            ("a.[0-3].b", "a.3.b", true),
            ("a.[!0-3].b", "a.3.b", false),
            ("a.{x,y}", "a.y", true),
            ("A.*", "a.b", false),
            ("a+b", "aab", false),
        ] {
            assert_eq!(is_match(pattern, name), matches, "{pattern} of {name}");
        }
    }

    #[test]
    fn groups_that_cannot_be_meant_are_refused() {
        let refused = |groups: &[GroupSettings]| {
            update_terms(groups, &layout()).expect_err("refused").to_string()
        };
        let good = || group(&["*norm*"], Some(0.5), None);
        assert_eq!(
            refused(&[good(), group(&["*embeddings*", "embedding.*"], None, Some(0.0))]),
            "optimizer.groups (group 2, match): expected a pattern that matches a tensor, such as \
             backbone.embeddings.weight, backbone.layers.0.norm.weight, backbone.layers.0.in.weight, \
             backbone.norm_f.weight, found \"embedding.*\", which matches none"
        );
        let shadowed = refused(&[good(), group(&["*norm_f*"], None, Some(0.0))]);
        assert!(
            shadowed.contains("(group 2, match): expected a tensor that no group"),
            "{shadowed}"
        );
        for (group, part) in [
            (group(&["*"], None, None), "(group 1, its settings): expected learning_rate_factor,"),
            (group(&["*"], Some(-1.0), None), "(group 1, learning_rate_factor): expected a finite"),
            (group(&["*"], Some(f64::INFINITY), None), "found inf"),
            (group(&["*"], None, Some(-0.1)), "(group 1, weight_decay): expected a finite number"),
            (group(&["*"], None, Some(f64::NAN)), "found NaN"),
            (group(&[], Some(1.0), None), "(group 1, match): expected at least one pattern"),
            (group(&["a[b"], Some(1.0), None), "expected a glob pattern, found \"a[b\" ("),
            (group(&[&"{a,b}?".repeat(9_000)], Some(1.0), None), "found \"{a,b}?{a,b}?"),
        ] {
            let error = refused(&[group]);
            assert!(error.contains(part), "{part:?} is not in {error:?}");
        }
    }
}
