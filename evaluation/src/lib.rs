//! Evaluation of language models on questions with known answers: tasks, requests to a model, and
//! metrics of its answers.
//!
//! ```text
//! task file -> Task --rows of its source--> documents --few-shot examples--> texts --tokenizer--> requests
//! requests --a model, outside of this crate--> answers --metrics--> results --suite--> averages
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`task`] | a task file: the questions, their rows, and the metrics |
//! | [`builtin`] | the tasks and suites that come with this crate, and the lookup of a task by name or file |
//! | [`template`], [`filter`] | texts with columns in them, and functions of a column's text |
//! | [`rows`] | rows of JSON lines or Parquet, from a folder or a store |
//! | [`document`] | one question: contexts, continuations, and the right option |
//! | [`prompt`] | few-shot examples, and the text before an answer |
//! | [`tokens`] | texts to the tokens of requests, as lm-eval or LLM Foundry split them |
//! | [`metrics`] | answers to accuracies, perplexities and their standard errors |
//! | [`suite`] | weighted averages of tasks above their baselines |
//! | [`answers`] | the file that keeps answers, so that a second run can continue |
//! | [`plan`] | all of it in order: tasks to requests, answers to results |
//!
//! Definitions follow lm-eval (github.com/EleutherAI/lm-evaluation-harness, 0.4) and LLM Foundry
//! (github.com/mosaicml/llm-foundry, its in-context learning tasks and gauntlet v0.3).
//!
//! Start here: [`plan`].

#![forbid(unsafe_code)]

pub mod answers;
pub mod builtin;
pub mod document;
pub mod error;
pub mod filter;
pub mod metrics;
pub mod plan;
pub mod prompt;
pub mod rows;
pub mod suite;
pub mod task;
pub mod template;
pub mod tokens;

pub use error::{EvaluationError, Result};
