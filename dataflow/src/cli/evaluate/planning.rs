//! Tasks to requests that a model can take.

use std::num::NonZeroUsize;

use anyhow::Context;
use tidemill_evaluation::plan::{PlannedTask, Settings};
use tidemill_evaluation::task::Task;
use tidemill_evaluation::tokens::Vocabulary;
use tidemill_kernels::Backend;

use super::EvaluateArguments;
use crate::cli::quiet::caught;
use crate::cli::tokenizer::TextTokenizer;
use crate::error::JobError;
use crate::inference::{LoadedModel, ModelFiles};

/// All requests of all tasks, with the few-shot examples that suites ask for.
///
/// # Errors
/// A model without a tokenizer, more positions than it has, or the errors of a task.
pub(super) fn plan(
    arguments: &EvaluateArguments,
    files: &ModelFiles,
    tasks: Vec<(Task, Option<usize>)>,
) -> anyhow::Result<Vec<PlannedTask>> {
    let folder = files.folder();
    let tokenizer = TextTokenizer::beside(folder)?.ok_or_else(|| {
        let what =
            "expected tokenizer.json, found none: put the model's tokenizer there".to_owned();
        JobError::Config { origin: folder.display().to_string(), what }
    })?;
    let positions = match (arguments.max_length.map(NonZeroUsize::get), files.learned_positions()) {
        (Some(asked), Some(learned)) if asked > learned => {
            let expected = format!("at most {learned}, the positions of the model");
            return Err(JobError::value("--max-length", expected, asked).into());
        }
        (asked, learned) => asked.or(learned),
    };
    let special = files.special_tokens();
    let prefix = special.bos.or(special.eos);
    let prefix_text = prefix.and_then(|prefix| tokenizer.token_text(prefix));
    let vocabulary = Vocabulary {
        tokenizer: &tokenizer,
        prefix: prefix.zip(prefix_text.as_deref()),
        end: special.eos,
        positions,
    };
    let settings = Settings {
        data: arguments.data.clone(),
        fewshot: arguments.fewshot,
        limit: arguments.limit.map(NonZeroUsize::get),
        seed: arguments.seed,
    };
    let planned = tasks.into_iter().map(|(task, shots)| {
        let name = task.name.clone();
        // A library panics where it meets a Parquet file that is damaged in certain places.
        let planned = caught(|| PlannedTask::new(task, shots, &settings, &vocabulary));
        let planned = planned.map_err(|said| JobError::Config {
            origin: name,
            what: format!("expected rows that can be read: {said}"),
        })?;
        Ok(planned?)
    });
    planned.collect()
}

/// Refuses requests that the model cannot take.
///
/// # Errors
/// The first of them, with its place.
pub(super) fn check<B: Backend>(
    model: &LoadedModel<B>,
    planned: &[PlannedTask],
) -> anyhow::Result<()> {
    for task in planned {
        for (index, request) in task.requests().iter().enumerate() {
            let place = || task.documents()[task.asked(index).0].place.clone();
            model.check_text(&request.tokens).with_context(place)?;
        }
    }
    Ok(())
}
