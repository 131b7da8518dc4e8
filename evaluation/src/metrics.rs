//! Answers to accuracies, perplexities and their standard errors.
//!
//! For a question with options, with s the sum of log-probabilities over the tokens of an option's
//! continuation:
//!
//! ```text
//! acc = [argmax s = gold]                acc_norm = [argmax s / characters = gold]
//! acc_bytes = [argmax s / bytes = gold]  acc_tokens = [argmax s / tokens = gold]
//! ```
//!
//! The first of equal options counts. Characters and bytes are those of the choice without the
//! delimiter before it, as in lm-eval; `acc_tokens` is LLM Foundry's argmin of the mean
//! cross-entropy. For language modelling, acc is 1 if every token is the most likely one, and
//! `perplexity = exp(-mean s)` over questions.
//!
//! A mean's standard error is the sample's standard deviation (over n - 1) divided by the square
//! root of n. That of a perplexity p is p times the standard error of the mean of s (the delta
//! method; lm-eval draws bootstrap samples instead).

use crate::document::Document;
use crate::error::{EvaluationError, Result};
use crate::task::{Kind, Metric, Task};
use crate::tokens::Request;

/// A model's answer to a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Answer {
    /// The sum of the log-probabilities of the continuation's tokens, in nats.
    pub log_likelihood: f64,
    /// Whether each of them is the most likely token; `None` if this was not asked for.
    pub greedy: Option<bool>,
}

/// A metric over all questions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// The kind of metric.
    pub metric: Metric,
    /// Its value.
    pub value: f64,
    /// The standard error; `None` for a single question.
    pub standard_error: Option<f64>,
}

/// The metrics of a task. `requests` and `answers` are in the order of the documents, and of each document's options.
///
/// # Errors
/// A log-likelihood that is not a finite number.
pub fn measure(
    task: &Task,
    documents: &[Document],
    requests: &[Request],
    answers: &[Answer],
) -> Result<Vec<Measured>> {
    let mut scores = vec![Vec::with_capacity(documents.len()); task.metrics.len()];
    let mut first = 0;
    for document in documents {
        let of_document = first..first + document.options();
        first = of_document.end;
        let answers = &answers[of_document.clone()];
        if let Some(wrong) = answers.iter().find(|answer| !answer.log_likelihood.is_finite()) {
            let (task, place) = (task.name.clone(), document.place.clone());
            return Err(EvaluationError::Answer { task, place, found: wrong.log_likelihood });
        }
        for (metric, scores) in task.metrics.iter().zip(&mut scores) {
            scores.push(score(
                task.kind,
                *metric,
                document,
                &requests[of_document.clone()],
                answers,
            ));
        }
    }
    let measured = task.metrics.iter().zip(&scores).map(|(&metric, scores)| {
        let (mean, error) = mean(scores);
        let (value, standard_error) = match metric {
            Metric::Perplexity => {
                let perplexity = (-mean).exp();
                (perplexity, error.map(|error| perplexity * error))
            }
            _ => (mean, error),
        };
        Measured { metric, value, standard_error }
    });
    Ok(measured.collect())
}

/// The contribution of one question to a mean.
fn score(
    kind: Kind,
    metric: Metric,
    document: &Document,
    requests: &[Request],
    answers: &[Answer],
) -> f64 {
    if kind == Kind::LanguageModelling {
        return match metric {
            Metric::Perplexity => answers[0].log_likelihood,
            _ => f64::from(answers[0].greedy == Some(true)),
        };
    }
    let length = |option: usize| match metric {
        Metric::AccNorm => document.continuation(option).chars().count() as f64,
        Metric::AccBytes => document.continuation(option).len() as f64,
        Metric::AccTokens => requests[option].continuation_tokens() as f64,
        Metric::Acc | Metric::Perplexity => 1.0,
    };
    let of_option = |option: usize| answers[option].log_likelihood / length(option);
    let first_greatest = |best: usize, option: usize| {
        if of_option(option) > of_option(best) { option } else { best }
    };
    let best = (1..answers.len()).fold(0, first_greatest);
    f64::from(best == document.gold)
}

/// The mean, and its standard error where there are two or more.
pub fn mean(values: &[f64]) -> (f64, Option<f64>) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean) * (value - mean)).sum();
    let error = (values.len() > 1).then(|| (squares / (count - 1.0)).sqrt() / count.sqrt());
    (mean, error)
}
