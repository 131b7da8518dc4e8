//! Averages of tasks above their baselines, with equal weights, as in LLM Foundry's gauntlet:
//!
//! ```text
//! score(task) = (accuracy - baseline) / (1 - baseline)
//! category = mean of its tasks' scores;  average = mean of the categories
//! ```
//!
//! A suite file:
//!
//! ```toml
//! average = "core_average"
//!
//! [[categories]]
//! name = "commonsense_reasoning"
//! tasks = [{ task = "foundry/piqa", fewshot = 0, baseline = 0.5 }]
//! ```

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use crate::error::{EvaluationError, Result};
use crate::metrics::Measured;
use crate::task::{read_text, toml_error};

/// Categories of tasks.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Suite {
    /// The name of the mean of the categories.
    pub average: String,
    /// The categories.
    pub categories: Vec<Category>,
}

/// Tasks of one mean.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Category {
    /// The name of the mean.
    pub name: String,
    /// The tasks.
    pub tasks: Vec<Entry>,
}

/// A task of a category.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// A built-in task, or a task file; a path is relative to the suite's file.
    pub task: String,
    /// Few-shot examples; default: the task's own.
    pub fewshot: Option<usize>,
    /// The accuracy of random answers, from 0 to less than 1.
    #[serde(default)]
    pub baseline: f64,
}

/// A mean of scores above baselines.
#[derive(Clone, Debug, PartialEq)]
pub struct Average {
    /// The name of the category, or that of the mean over all.
    pub name: String,
    /// Its value.
    pub value: f64,
}

impl Suite {
    /// Reads a suite file.
    ///
    /// # Errors
    /// A file that cannot be read, or is no suite.
    pub fn open(path: &Path) -> Result<Self> {
        Self::parse(&read_text(path)?, &path.display().to_string())
    }

    /// The suite in `text`, which errors call `origin`.
    ///
    /// # Errors
    /// A text that is no suite; a category without tasks; a baseline out of its bounds.
    pub fn parse(text: &str, origin: &str) -> Result<Self> {
        let suite: Self = toml::from_str(text)
            .map_err(|error| EvaluationError::task(origin, toml_error(text, &error)))?;
        suite.check().map_err(|what| EvaluationError::task(origin, what))?;
        Ok(suite)
    }

    /// Whether a file's text is that of a suite, and not of a task.
    pub(crate) fn is_one(text: &str) -> bool {
        toml::from_str::<toml::Table>(text).is_ok_and(|table| table.contains_key("categories"))
    }

    fn check(&self) -> std::result::Result<(), String> {
        if self.categories.is_empty() {
            return Err("categories: expected one or more, found none".to_owned());
        }
        for Category { name, tasks } in &self.categories {
            if tasks.is_empty() {
                return Err(format!("category {name}: expected tasks, found none"));
            }
            if let Some(entry) = tasks.iter().find(|entry| !(0.0..1.0).contains(&entry.baseline)) {
                let (task, found) = (&entry.task, entry.baseline);
                return Err(format!(
                    "category {name}: {task}: baseline: expected 0 to less than 1, found {found}"
                ));
            }
        }
        Ok(())
    }

    /// The tasks of all categories.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.categories.iter().flat_map(|category| &category.tasks)
    }

    /// The averages, given `measured`, the metrics of each task by the name of its entry. A task
    /// counts by its first metric that is an accuracy.
    ///
    /// # Panics
    /// As [`averages`](Self::averages).
    pub fn averages_of<'a>(
        &self,
        measured: impl Iterator<Item = (&'a str, &'a [Measured])>,
    ) -> Vec<Average> {
        let accuracies = measured.filter_map(|(task, measured)| {
            let accuracy = measured.iter().find(|of| of.metric.is_accuracy())?;
            Some((task.to_owned(), accuracy.value))
        });
        self.averages(&accuracies.collect())
    }

    /// The means of the categories and of all, given the accuracy of each task by the name of its
    /// entry.
    ///
    /// # Panics
    /// If the task of an entry has no accuracy: the caller must have measured all of them.
    pub fn averages(&self, accuracies: &BTreeMap<String, f64>) -> Vec<Average> {
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let mut averages: Vec<Average> = self
            .categories
            .iter()
            .map(|category| {
                let scores = category.tasks.iter().map(|entry| {
                    (accuracies[&entry.task] - entry.baseline) / (1.0 - entry.baseline)
                });
                let value = mean(&scores.collect::<Vec<_>>());
                Average { name: category.name.clone(), value }
            })
            .collect();
        let values: Vec<f64> = averages.iter().map(|average| average.value).collect();
        averages.push(Average { name: self.average.clone(), value: mean(&values) });
        averages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUITE: &str = r#"
        average = "all"
        [[categories]]
        name = "a"
        tasks = [{ task = "x", baseline = 0.25 }, { task = "y" }]
        [[categories]]
        name = "b"
        tasks = [{ task = "z", fewshot = 3, baseline = 0.5 }]
    "#;

    #[test]
    fn categories_count_equally_however_many_tasks_they_have() {
        let suite = Suite::parse(SUITE, "s.toml").expect("a suite");
        let accuracies = [("x", 0.625), ("y", 0.25), ("z", 0.375)];
        let accuracies = accuracies.map(|(task, value)| (task.to_owned(), value)).into();
        let averages = suite.averages(&accuracies);
        let found: Vec<_> = averages.iter().map(|of| (of.name.as_str(), of.value)).collect();
        // (0.5 + 0.25) / 2; below the baseline a score is negative.
        assert_eq!(found, [("a", 0.375), ("b", -0.25), ("all", 0.0625)]);
    }

    #[test]
    fn wrong_suites_are_told() {
        let wrong = |from: &str, to: &str| {
            assert!(SUITE.contains(from));
            Suite::parse(&SUITE.replace(from, to), "s.toml").unwrap_err().to_string()
        };
        assert!(wrong("0.25", "1.0").ends_with("x: baseline: expected 0 to less than 1, found 1"));
        assert!(wrong("0.25", "nan").contains("found NaN"));
        assert!(
            wrong("[{ task = \"z\", fewshot = 3, baseline = 0.5 }]", "[]").contains("category b")
        );
        assert!(wrong("fewshot", "shots").starts_with("s.toml: line 8: unknown field `shots`"));
        assert!(Suite::parse("average = \"x\"\ncategories = []", "s").is_err());
    }
}
