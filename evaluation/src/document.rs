//! One question: contexts, continuations, and the right option.

use serde_json::Value;

use crate::error::{EvaluationError, Result};
use crate::rows::Rows;
use crate::task::{Gold, Kind, Task, Templates};
use crate::template::{Row, kind_of, value};

/// A row as a task asks about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// The place of the row, for errors.
    pub place: String,
    /// One context, or one for each option.
    contexts: Vec<String>,
    /// One continuation, or one for each option.
    continuations: Vec<String>,
    /// The option that is right.
    pub gold: usize,
}

impl Document {
    /// The document of row `index`.
    ///
    /// # Errors
    /// A row without a required column or with another type of value in it; fewer than two options;
    /// a right option out of range; an empty continuation.
    pub fn new(task: &Task, rows: &Rows, index: usize) -> Result<Self> {
        let place = rows.place(index);
        Self::of_row(task, &rows.rows[index], place.clone())
            .map_err(|what| EvaluationError::row(&place, what))
    }

    fn of_row(task: &Task, row: &Row, place: String) -> std::result::Result<Self, String> {
        let contexts = texts(task, &task.contexts, row)?;
        let continuations = texts(task, &task.continuations, row)?;
        let options = contexts.len().max(continuations.len());
        if task.kind != Kind::LanguageModelling && options < 2 {
            return Err(format!("expected two options or more, found {options}"));
        }
        if let Some(option) = continuations.iter().position(String::is_empty) {
            return Err(format!("continuation {option}: expected a text, found an empty one"));
        }
        let gold = task.gold.as_ref().map_or(Ok(0), |gold| gold.of(row, options))?;
        Ok(Self { place, contexts, continuations, gold })
    }

    /// The number of options; 1 for language modelling.
    pub fn options(&self) -> usize {
        self.contexts.len().max(self.continuations.len())
    }

    /// The context of an option.
    pub fn context(&self, option: usize) -> &str {
        &self.contexts[option.min(self.contexts.len() - 1)]
    }

    /// The continuation of an option, without the delimiter before it.
    pub fn continuation(&self, option: usize) -> &str {
        &self.continuations[option.min(self.continuations.len() - 1)]
    }
}

fn texts(
    task: &Task,
    templates: &Templates,
    row: &Row,
) -> std::result::Result<Vec<String>, String> {
    let mut texts = match templates {
        Templates::OfList(template) => template.render_each(row, &task.tables)?,
        Templates::Each(templates) => templates
            .iter()
            .map(|template| template.render(row, &task.tables))
            .collect::<std::result::Result<_, _>>()?,
    };
    if texts.is_empty() {
        return Err("expected a list of options, found an empty one".to_owned());
    }
    if let Some(filter) = &task.filter {
        for text in &mut texts {
            *text = filter.apply(text, &task.tables)?;
        }
    }
    Ok(texts)
}

impl Gold {
    /// The right option of a row with `options` options.
    fn of(&self, row: &Row, options: usize) -> std::result::Result<usize, String> {
        let column = &self.column;
        let found = value(row, column)?;
        let text = match found {
            Value::String(text) => text.trim().to_owned(),
            Value::Number(number) => number.to_string(),
            other => {
                let found = kind_of(other);
                return Err(format!("column {column}: expected a label, found {found}"));
            }
        };
        let index = match &self.labels {
            Some(labels) => {
                let is_label =
                    |label: &Value| label.as_str().is_some_and(|label| label.trim() == text);
                let labels = value(row, labels)?.as_array();
                labels.and_then(|labels| labels.iter().position(is_label))
            }
            None => {
                let number = text.parse::<u64>().ok();
                let index = number.and_then(|number| number.checked_sub(self.first));
                index.and_then(|index| usize::try_from(index).ok())
            }
        };
        index.filter(|&index| index < options).ok_or_else(|| {
            let expected = match &self.labels {
                Some(labels) => format!("one of column {labels}"),
                None => {
                    format!("a number from {} below {}", self.first, self.first + options as u64)
                }
            };
            format!("column {column}: expected {expected}, found {text:?}")
        })
    }
}
