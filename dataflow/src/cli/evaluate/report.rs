//! What is printed of an evaluation.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value, json};
use tidemill_evaluation::metrics::Measured;
use tidemill_evaluation::plan::PlannedTask;
use tidemill_evaluation::suite::{Average, Suite};
use tidemill_evaluation::task::Metric;

use crate::cli::Format;
use crate::cli::output::result_line;

/// The results of all tasks.
pub(super) struct Report<'a> {
    pub model: &'a Path,
    /// What computed, in words.
    pub device: String,
    pub seed: u64,
    pub tasks: Vec<(&'a PlannedTask, &'a Vec<Measured>)>,
    pub suites: &'a [(String, Suite)],
}

/// How many requests of a task were too long.
pub(super) fn cut_requests(task: &PlannedTask) -> usize {
    task.requests().iter().filter(|request| request.left_out > 0).count()
}

impl Report<'_> {
    pub(super) fn print(&self, format: Format) -> anyhow::Result<()> {
        match format {
            Format::Json => result_line!("{}", self.json()),
            Format::Text => self.print_table(),
        }
    }

    fn json(&self) -> Value {
        let tasks = self.tasks.iter().map(|(task, measured)| {
            let metrics = measured.iter().map(|of| {
                let value = json!({ "value": of.value, "standard_error": of.standard_error });
                (of.metric.name().to_owned(), value)
            });
            let value = json!({
                "fewshot": task.shots(),
                "questions": task.documents().len(),
                "requests": task.requests().len(),
                "cut_requests": cut_requests(task),
                "metrics": metrics.collect::<Map<_, _>>(),
            });
            (task.task().name.clone(), value)
        });
        let suites = self.suites.iter().map(|(name, suite)| {
            let averages = self.averages(suite).into_iter().map(|of| (of.name, of.value.into()));
            (name.clone(), Value::Object(averages.collect()))
        });
        let mut report = json!({
            "model": self.model,
            "device": self.device,
            "seed": self.seed,
            "tasks": tasks.collect::<Map<_, _>>(),
        });
        if !self.suites.is_empty() {
            report["suites"] = Value::Object(suites.collect());
        }
        report
    }

    fn print_table(&self) -> anyhow::Result<()> {
        let name = |(task, _): &(&PlannedTask, _)| task.task().name.len();
        let width = self.tasks.iter().map(name).max().unwrap_or(0).max("task".len());
        result_line!(
            "{:width$}  {:>7}  {:>9}  {:10}  {:>10}  {:>8}",
            "task",
            "fewshot",
            "questions",
            "metric",
            "value",
            "+-"
        )?;
        for (task, measured) in &self.tasks {
            let (name, shots, questions) =
                (&task.task().name, task.shots(), task.documents().len());
            for Measured { metric, value, standard_error } in *measured {
                let error =
                    standard_error.map_or_else(|| "-".to_owned(), |error| format!("{error:.4}"));
                let metric = metric.name();
                result_line!(
                    "{name:width$}  {shots:>7}  {questions:>9}  {metric:10}  {value:>10.4}  {error:>8}"
                )?;
            }
        }
        for (name, suite) in self.suites {
            for average in self.averages(suite) {
                result_line!("{name}: {}: {:.4}", average.name, average.value)?;
            }
        }
        Ok(())
    }

    /// The averages of a suite, of each task's first accuracy.
    fn averages(&self, suite: &Suite) -> Vec<Average> {
        let accuracies: BTreeMap<String, f64> = self
            .tasks
            .iter()
            .filter_map(|(task, measured)| {
                let accuracy = measured.iter().find(|of| of.metric != Metric::Perplexity)?;
                Some((task.task().name.clone(), accuracy.value))
            })
            .collect();
        suite.averages(&accuracies)
    }
}
