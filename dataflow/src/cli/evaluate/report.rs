//! The printed report on an evaluation.

use std::path::Path;

use serde_json::{Map, Value, json};
use tidemill_evaluation::metrics::Measured;
use tidemill_evaluation::plan::PlannedTask;
use tidemill_evaluation::suite::{Average, Suite};

use crate::cli::Format;
use crate::cli::output::{counted, note_line, result_line};

/// The results of all tasks.
pub(super) struct Report<'a> {
    pub model: &'a Path,
    /// The device that computed, in words.
    pub device: String,
    pub seed: u64,
    pub tasks: Vec<(&'a PlannedTask, &'a Vec<Measured>)>,
    pub suites: &'a [(String, Suite)],
    pub time: Time,
}

/// Where the time went.
pub(super) struct Time {
    /// From the start until the model was on its device.
    pub load_seconds: f64,
    /// Reading questions and making tokens of them, beside the loading.
    pub tokenize_seconds: f64,
    pub score_seconds: f64,
    /// From the start until the results were there.
    pub total_seconds: f64,
    /// Requests that were scored.
    pub requests: usize,
    /// Their tokens.
    pub tokens: usize,
}

impl Time {
    /// Things a second while they were scored; 0 of none.
    fn rate(&self, things: usize) -> f64 {
        if things == 0 { 0.0 } else { things as f64 / self.score_seconds }
    }

    fn note(&self) {
        let Self { load_seconds, tokenize_seconds, score_seconds, total_seconds, .. } = self;
        note_line!(
            "{}, {} in {total_seconds:.2} s: loading {load_seconds:.2} s, beside it tokenizing {tokenize_seconds:.2} s, \
             scoring {score_seconds:.2} s ({:.0} requests and {:.0} tokens a second)",
            counted(self.requests, "request", "requests"),
            counted(self.tokens, "token", "tokens"),
            self.rate(self.requests),
            self.rate(self.tokens),
        );
    }

    fn json(&self) -> Value {
        json!({
            "load_seconds": self.load_seconds,
            "tokenize_seconds": self.tokenize_seconds,
            "score_seconds": self.score_seconds,
            "total_seconds": self.total_seconds,
            "scored_requests": self.requests,
            "scored_tokens": self.tokens,
            "requests_per_second": self.rate(self.requests),
            "tokens_per_second": self.rate(self.tokens),
        })
    }
}

/// How many requests of a task were too long.
pub(super) fn cut_requests(task: &PlannedTask) -> usize {
    task.requests().iter().filter(|request| request.left_out > 0).count()
}

impl Report<'_> {
    pub(super) fn print(&self, format: Format) -> anyhow::Result<()> {
        self.time.note();
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
            "time": self.time.json(),
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

    fn averages(&self, suite: &Suite) -> Vec<Average> {
        let measured = self.tasks.iter();
        suite.averages_of(
            measured.map(|(task, measured)| (task.task().name.as_str(), &measured[..])),
        )
    }
}
