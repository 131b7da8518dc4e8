//! `[[evaluation.tasks]]`: the tasks of a run as requests, by the tokenizer of its data set.

use std::path::Path;
use std::sync::Arc;

use tidemill_evaluation::builtin;
use tidemill_evaluation::metrics::{Answer, Measured};
use tidemill_evaluation::plan::{PlannedTask, Settings};
use tidemill_evaluation::suite::Suite;
use tidemill_evaluation::task::Task;
use tidemill_evaluation::tokens::Vocabulary;
use tidemill_model::Family;
use tidemill_streaming_data::hash::ContentHasher;

use super::quiet::caught;
use super::tokenizer::TextTokenizer;
use crate::error::{JobError, Result};
use crate::job::ResolvedRun;
use crate::job::config::TaskSettings;
use crate::job::questions::{Questions, Request};
use crate::operators::Scores;

/// The key that errors name.
const KEY: &str = "evaluation.tasks";

/// Tasks, and their requests one after the other.
#[derive(Debug)]
struct PlannedTasks {
    tasks: Vec<PlannedTask>,
    requests: Vec<Request>,
    /// The suites with their names.
    suites: Vec<(String, Suite)>,
}

/// The questions of each evaluation of the run; none where its config has no tasks.
///
/// # Errors
/// An unknown task or one that is given twice, questions that cannot be read or made into requests, or a data set without a tokenizer.
pub(super) fn questions(run: &ResolvedRun) -> anyhow::Result<Option<Arc<dyn Questions>>> {
    let settings = run.config.evaluation.as_ref().map_or(&[][..], |evaluation| &evaluation.tasks);
    if settings.is_empty() {
        return Ok(None);
    }
    let Some(bytes) = run.tokenizer()? else {
        let expected = "a data.dataset with a tokenizer.json, which makes tokens of questions";
        return Err(JobError::value(KEY, expected, "none").into());
    };
    let tokenizer = TextTokenizer::of_bytes(&bytes, Path::new("tokenizer.json of data.dataset"))?;
    let special = run.model.config().special_tokens();
    let prefix = special.bos.or(special.eos);
    let prefix_text = prefix.and_then(|prefix| tokenizer.token_text(prefix));
    let vocabulary = Vocabulary {
        tokenizer: &tokenizer,
        prefix: prefix.zip(prefix_text.as_deref()),
        end: special.eos,
        positions: Some(run.data.seq_len()),
    };
    let (mut tasks, mut suites) = (Vec::<PlannedTask>::new(), Vec::new());
    for settings in settings {
        let found = builtin::find(&settings.task)?;
        suites.extend(found.suite);
        for (task, shots) in found.tasks {
            let planned = plan(task, shots, settings, &vocabulary)?;
            if tasks.iter().any(|other| other.task().name == planned.task().name) {
                let expected = "each task once";
                return Err(JobError::value(KEY, expected, &planned.task().name).into());
            }
            tasks.push(planned);
        }
    }
    let mut requests = Vec::new();
    for task in &tasks {
        for (index, request) in task.requests().iter().enumerate() {
            let vocab_size = run.model.vocab_size();
            if let Some(token) = request.tokens.iter().find(|token| **token as usize >= vocab_size)
            {
                let place = &task.documents()[task.asked(index).0].place;
                let expected = format!("tokens below the model's {vocab_size}");
                return Err(JobError::value(format!("{KEY}: {place}"), expected, token).into());
            }
            requests.push(Request { tokens: request.tokens.clone(), first: request.first });
        }
    }
    Ok(Some(Arc::new(PlannedTasks { tasks, requests, suites })))
}

fn plan(
    task: Task,
    shots: Option<usize>,
    settings: &TaskSettings,
    vocabulary: &Vocabulary<'_>,
) -> anyhow::Result<PlannedTask> {
    let name = task.name.clone();
    let TaskSettings { data, fewshot, limit, .. } = settings;
    let settings = Settings {
        data: data.clone(),
        fewshot: *fewshot,
        limit: limit.map(|it| it.get()),
        seed: 0,
    };
    // A library panics where it meets a Parquet file that is damaged in certain places.
    let planned = caught(|| PlannedTask::new(task, shots, &settings, vocabulary));
    let planned = planned.map_err(|said| JobError::Config {
        origin: name,
        what: format!("expected rows that can be read: {said}"),
    })?;
    Ok(planned?)
}

impl Questions for PlannedTasks {
    fn requests(&self) -> &[Request] {
        &self.requests
    }

    fn fingerprint(&self) -> String {
        let mut hasher = ContentHasher::new();
        for task in &self.tasks {
            hasher.update(format!("{} {}\n", task.task().name, task.fingerprint()).as_bytes());
        }
        hasher.finish().to_string()
    }

    fn measure(&self, answers: &[Answer]) -> Result<Scores> {
        let failed = |what: String| JobError::Config { origin: KEY.to_owned(), what };
        let mut rest = answers;
        let mut measured: Vec<(&str, Vec<Measured>)> = Vec::with_capacity(self.tasks.len());
        for task in &self.tasks {
            let (own, others) = rest.split_at(task.requests().len());
            rest = others;
            let name = task.task().name.as_str();
            if task.asks_greedy() && own.iter().any(|answer| answer.greedy.is_none()) {
                let what = "expected a model that tells its likeliest tokens, found none";
                return Err(failed(format!("{name}: {what}")));
            }
            measured.push((name, task.measure(own).map_err(|error| failed(error.to_string()))?));
        }
        let of_tasks = || measured.iter().map(|(task, measured)| (*task, &measured[..]));
        let tasks = of_tasks().map(|(task, measured)| {
            let metrics = measured.iter().map(|of| (of.metric.name().to_owned(), of.value));
            (task.to_owned(), metrics.collect())
        });
        let suites = self.suites.iter().map(|(name, suite)| {
            let averages = suite.averages_of(of_tasks()).into_iter();
            (name.clone(), averages.map(|of| (of.name, of.value)).collect())
        });
        Ok(Scores { tasks: tasks.collect(), suites: suites.collect() })
    }
}
