//! `[[evaluation.tasks]]`: the tasks of a run as requests, by the tokenizer of its data set.

use std::path::Path;
use std::sync::Arc;

use tidemill_evaluation::EvaluationError;
use tidemill_evaluation::builtin;
use tidemill_evaluation::metrics::Answer;
use tidemill_evaluation::plan::{PlannedTask, Settings};
use tidemill_evaluation::task::{Kind, Metric, Task};
use tidemill_evaluation::tokens::Vocabulary;
use tidemill_model::Family;
use tidemill_streaming_data::hash::ContentHasher;

use super::output::note_line;
use super::processes::is_supervised;
use super::quiet::caught;
use super::tokenizer::TextTokenizer;
use crate::error::{JobError, Result};
use crate::job::ResolvedRun;
use crate::job::config::TaskSettings;
use crate::job::questions::{Questions, Request};
use crate::operators::TaskScores;

/// The key that errors name.
const KEY: &str = "evaluation.tasks";

/// Tasks, and their requests one after the other.
#[derive(Debug)]
struct PlannedTasks {
    tasks: Vec<PlannedTask>,
    requests: Vec<Request>,
}

/// What the run is asked at each evaluation; none where its config has no tasks.
///
/// # Errors
/// A task that there is not or that is given twice, questions that cannot be read or made requests of, or a data set without a tokenizer.
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
    let (mut tasks, mut without_acc) = (Vec::<PlannedTask>::new(), Vec::new());
    for settings in settings {
        for (mut task, shots) in builtin::find(&settings.task)?.tasks {
            if keep_measurable(&mut task)? {
                without_acc.push(task.name.clone());
            }
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
    // Processes that are supervised leave it to the supervisor.
    if !without_acc.is_empty() && !is_supervised() {
        let names = without_acc.join(", ");
        note_line!(
            "note: {names}: acc is not measured while a run trains; `tidemill evaluate` does"
        );
    }
    Ok(Some(Arc::new(PlannedTasks { tasks, requests })))
}

/// Leaves a task those metrics that follow from losses alone, which do not tell whether each token is the likeliest. Whether it had others.
fn keep_measurable(task: &mut Task) -> std::result::Result<bool, EvaluationError> {
    if task.kind != Kind::LanguageModelling {
        return Ok(false);
    }
    let all = task.metrics.len();
    task.metrics.retain(|metric| *metric != Metric::Acc);
    if task.metrics.is_empty() {
        let what = "evaluation.tasks: expected a metric besides acc, which only `tidemill evaluate` measures of language modelling";
        return Err(EvaluationError::Task { origin: task.name.clone(), what: what.to_owned() });
    }
    Ok(task.metrics.len() < all)
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

    fn measure(&self, log_likelihoods: &[f64]) -> Result<TaskScores> {
        let mut rest = log_likelihoods;
        let of_task = |task: &PlannedTask| {
            let (own, others) = rest.split_at(task.requests().len());
            rest = others;
            let answer = |&log_likelihood: &f64| Answer { log_likelihood, greedy: None };
            let measured = task.measure(&own.iter().map(answer).collect::<Vec<_>>());
            let measured = measured.map_err(|error| JobError::Config {
                origin: KEY.to_owned(),
                what: error.to_string(),
            })?;
            let metrics = measured.into_iter().map(|of| (of.metric.name().to_owned(), of.value));
            Ok((task.task().name.clone(), metrics.collect()))
        };
        self.tasks.iter().map(of_task).collect()
    }
}
