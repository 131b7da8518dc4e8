//! A task file: the questions, their rows, and the metrics.
//!
//! ```toml
//! kind = "multiple_choice"                      # multiple_choice | schema | language_modelling
//! context = "Question: {goal}\nAnswer:"         # columns of a row in a text
//! choices = ["{sol1}", "{sol2}"]                # or one template of a list: "{choices.text}"
//! gold = "label"                                # the column with the right choice, counted from 0
//! metrics = ["acc", "acc_norm"]
//!
//! [source]
//! file = "piqa/validation"                      # .jsonl or .parquet, in the folder of --data or of this file
//! fewshot = "piqa/train"                        # where few-shot examples come from; default: the same rows
//! ```
//!
//! | kind | a request for | the right answer is |
//! |---|---|---|
//! | `multiple_choice` | each choice behind the context | the choice with the best score |
//! | `schema` | the continuation behind each of `contexts` | the context with the best score |
//! | `language_modelling` | the continuation behind the context | every token the most likely one (greedy match) |

use std::path::Path;

use serde::Deserialize;
use tidemill_files::Kind as FileKind;

use crate::error::{EvaluationError, Result};
use crate::filter::{Filter, Tables};
use crate::template::Template;

/// The kind of question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Which of several continuations follows a context.
    MultipleChoice,
    /// Which of several contexts a continuation follows.
    Schema,
    /// How likely the continuation of a context is, and whether each of its tokens is the most
    /// likely one.
    LanguageModelling,
}

/// How a context and a continuation become tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tokenization {
    /// As lm-eval: both at once, so that a token may cross the border.
    #[default]
    Joint,
    /// As LLM Foundry: each separately.
    Separate,
}

/// The metric of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Accuracy: by the sum of log-probabilities; for language modelling, by greedy match.
    Acc,
    /// Accuracy by the sum divided by the characters of the choice.
    AccNorm,
    /// Accuracy by the sum divided by the UTF-8 bytes of the choice.
    AccBytes,
    /// Accuracy by the mean over tokens.
    AccTokens,
    /// exp of the mean negative log-likelihood of a continuation.
    Perplexity,
}

impl Metric {
    /// Whether it is a fraction of right answers.
    pub fn is_accuracy(self) -> bool {
        self != Self::Perplexity
    }

    /// Its name in task files and results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Acc => "acc",
            Self::AccNorm => "acc_norm",
            Self::AccBytes => "acc_bytes",
            Self::AccTokens => "acc_tokens",
            Self::Perplexity => "perplexity",
        }
    }
}

/// One template, or several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Templates {
    /// One template, which may be a column that holds a list.
    OfList(Template),
    /// One template for each text.
    Each(Vec<Template>),
}

/// The rows of the questions.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// A file in the data folder, or a URL; without its ending, `.jsonl` or `.parquet`.
    pub file: String,
    /// The rows of few-shot examples; default: those of `file`, except the question's own row.
    pub fewshot: Option<String>,
    /// Where a person can get the rows.
    pub origin: Option<String>,
}

/// The separators between parts of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delimiters {
    /// Between a context and its continuation.
    pub answer: String,
    /// Between few-shot examples.
    pub examples: String,
}

/// A task, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// Its name in results.
    pub name: String,
    /// The folder of its file; `None` for a built-in task.
    pub folder: Option<std::path::PathBuf>,
    /// The kind of question.
    pub kind: Kind,
    /// The rows.
    pub source: Source,
    /// The text before all others.
    pub description: String,
    /// The filters of every context and continuation.
    pub filter: Option<Filter>,
    /// One context, or one for each option.
    pub contexts: Templates,
    /// One continuation, or one for each option.
    pub continuations: Templates,
    /// The column that names the right option; `None` where there is only one option.
    pub gold: Option<Gold>,
    /// The separators between parts of a prompt.
    pub delimiters: Delimiters,
    /// How texts become tokens.
    pub tokenization: Tokenization,
    /// The number of few-shot examples, unless the user sets it.
    pub fewshot: usize,
    /// The metrics.
    pub metrics: Vec<Metric>,
    /// The tables of `look_up`.
    pub tables: Tables,
}

/// How a row names the right option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gold {
    /// The column.
    pub column: String,
    /// The column with the list of labels that contains the right one; if `None`, the column holds
    /// a number.
    pub labels: Option<String>,
    /// The number of the first option, where the column holds a number.
    pub first: u64,
}

/// A task in the form of a file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TaskFile {
    kind: Kind,
    source: Source,
    #[serde(default)]
    description: String,
    filter: Option<String>,
    context: Option<String>,
    contexts: Option<TemplateTexts>,
    continuation: Option<String>,
    choices: Option<TemplateTexts>,
    gold: Option<String>,
    gold_labels: Option<String>,
    #[serde(default)]
    gold_first: u64,
    answer_delimiter: Option<String>,
    example_delimiter: Option<String>,
    #[serde(default)]
    tokenization: Tokenization,
    #[serde(default)]
    fewshot: usize,
    metrics: Vec<Metric>,
    #[serde(default)]
    tables: Tables,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a template, or a list of templates")]
enum TemplateTexts {
    One(String),
    Several(Vec<String>),
}

impl Task {
    /// Reads a task file. The name of the task is that of the file.
    ///
    /// # Errors A file that cannot be read, or is no task.
    pub fn open(path: &Path) -> Result<Self> {
        let text = read_text(path)?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let task = Self::parse(&name, &text, &path.display().to_string())?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        Ok(Self { folder: Some(folder.unwrap_or(Path::new(".")).to_owned()), ..task })
    }

    /// The task in `text`, which errors call `origin`.
    ///
    /// # Errors
    /// A text that is no task: the error names the key and the fault.
    pub fn parse(name: &str, text: &str, origin: &str) -> Result<Self> {
        let file: TaskFile = toml::from_str(text)
            .map_err(|error| EvaluationError::task(origin, toml_error(text, &error)))?;
        file.check(name).map_err(|what| EvaluationError::task(origin, what))
    }
}

impl TaskFile {
    /// The rules that involve several keys.
    fn check(self, name: &str) -> std::result::Result<Task, String> {
        let (kind, gold) = (self.kind, &self.gold);
        let (wanted, unwanted): (&[_], &[_]) = match kind {
            Kind::MultipleChoice => {
                (&["context", "choices", "gold"], &["contexts", "continuation"])
            }
            Kind::Schema => (&["contexts", "continuation", "gold"], &["context", "choices"]),
            Kind::LanguageModelling => {
                (&["context", "continuation"], &["contexts", "choices", "gold", "gold_labels"])
            }
        };
        let given = |key: &str| match key {
            "context" => self.context.is_some(),
            "contexts" => self.contexts.is_some(),
            "continuation" => self.continuation.is_some(),
            "choices" => self.choices.is_some(),
            "gold" => gold.is_some(),
            "gold_labels" => self.gold_labels.is_some(),
            _ => false,
        };
        if let Some(key) = wanted.iter().find(|key| !given(key)) {
            return Err(format!("a task of this kind needs the key {key}, found none"));
        }
        if let Some(key) = unwanted.iter().find(|key| given(key)) {
            return Err(format!("a task of this kind has no key {key}"));
        }
        if self.gold_labels.is_some() && self.gold_first != 0 {
            return Err("gold_first counts options, gold_labels names them: give one".to_owned());
        }
        check_metrics(kind, &self.metrics)?;
        if self.source.file.is_empty() {
            return Err("source.file: expected the name of a file, found an empty text".to_owned());
        }
        let filter = self.filter.map(|name| Filter::parse(&name, None)).transpose();
        let filter = filter.map_err(|what| format!("filter: {what}"))?;
        let contexts = templates("context", self.context, self.contexts)?;
        let continuations = templates("continuation", self.continuation, self.choices)?;
        let task = Task {
            name: name.to_owned(),
            folder: None,
            kind,
            source: self.source,
            description: self.description,
            filter,
            contexts,
            continuations,
            gold: self.gold.map(|column| Gold {
                column,
                labels: self.gold_labels,
                first: self.gold_first,
            }),
            delimiters: Delimiters {
                answer: self.answer_delimiter.unwrap_or_else(|| " ".to_owned()),
                examples: self.example_delimiter.unwrap_or_else(|| match self.tokenization {
                    Tokenization::Joint => "\n\n".to_owned(),
                    Tokenization::Separate => "\n".to_owned(),
                }),
            },
            tokenization: self.tokenization,
            fewshot: self.fewshot,
            metrics: self.metrics,
            tables: self.tables,
        };
        task.check_tables()?;
        Ok(task)
    }
}

impl Task {
    fn check_tables(&self) -> std::result::Result<(), String> {
        for templates in [&self.contexts, &self.continuations] {
            let templates = match templates {
                Templates::OfList(template) => std::slice::from_ref(template),
                Templates::Each(templates) => templates,
            };
            for filter in templates.iter().flat_map(Template::filters) {
                if let Filter::LookUp(table) = filter
                    && !self.tables.contains_key(table)
                {
                    return Err(format!(
                        "look_up {table:?}: expected a table tables.{table}, found none"
                    ));
                }
            }
        }
        Ok(())
    }
}

fn check_metrics(kind: Kind, metrics: &[Metric]) -> std::result::Result<(), String> {
    let of_kind: &[Metric] = match kind {
        Kind::MultipleChoice => {
            &[Metric::Acc, Metric::AccNorm, Metric::AccBytes, Metric::AccTokens]
        }
        Kind::Schema => &[Metric::Acc, Metric::AccTokens],
        Kind::LanguageModelling => &[Metric::Acc, Metric::Perplexity],
    };
    let names: Vec<&str> = of_kind.iter().map(|metric| metric.name()).collect();
    let expected = format!("metrics: expected some of {}", names.join(", "));
    match metrics.iter().find(|metric| !of_kind.contains(metric)) {
        Some(other) => Err(format!("{expected}, found {}", other.name())),
        None if metrics.is_empty() => Err(format!("{expected}, found none")),
        None => Ok(()),
    }
}

/// The templates of a key, or of its plural.
fn templates(
    key: &str,
    one: Option<String>,
    several: Option<TemplateTexts>,
) -> std::result::Result<Templates, String> {
    let parse = |text: &String| Template::parse(text).map_err(|what| format!("{key}: {what}"));
    match (one, several) {
        (Some(text), _) => Ok(Templates::Each(vec![parse(&text)?])),
        (None, Some(TemplateTexts::One(text))) => Ok(Templates::OfList(parse(&text)?)),
        (None, Some(TemplateTexts::Several(texts))) if texts.len() > 1 => {
            Ok(Templates::Each(texts.iter().map(parse).collect::<std::result::Result<_, _>>()?))
        }
        _ => Err(format!("{key}: expected two templates or more")),
    }
}

/// The text of a small file.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    let failed =
        |source| EvaluationError::File { action: "reading", path: path.to_owned(), source };
    let bytes = tidemill_files::read(path, FileKind::RunConfig).map_err(failed)?;
    String::from_utf8(bytes)
        .map_err(|_| EvaluationError::task(&path.display().to_string(), "expected UTF-8 text"))
}

/// The fault of a TOML text, and its line.
pub(crate) fn toml_error(text: &str, error: &toml::de::Error) -> String {
    let message = error.message().replace('\n', " ");
    match error.span().and_then(|span| text.get(..span.start)) {
        Some(before) => format!("line {}: {message}", before.matches('\n').count() + 1),
        None => message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TASK: &str = r#"
        kind = "multiple_choice"
        context = "{goal}"
        choices = ["{a}", "{b}"]
        gold = "label"
        metrics = ["acc"]
        source = { file = "x" }
    "#;

    fn wrong(text: &str) -> String {
        Task::parse("x", text, "x.toml").unwrap_err().to_string()
    }

    #[test]
    fn a_task_has_defaults() {
        let task = Task::parse("x", TASK, "x.toml").expect("a task");
        assert_eq!((task.fewshot, task.tokenization), (0, Tokenization::Joint));
        assert_eq!(
            (task.delimiters.answer.as_str(), task.delimiters.examples.as_str()),
            (" ", "\n\n")
        );
        let separate = TASK.to_owned() + "tokenization = \"separate\"\n";
        let task = Task::parse("x", &separate, "x.toml").expect("a task");
        assert_eq!(task.delimiters.examples, "\n");
    }

    #[test]
    fn wrong_tasks_are_told() {
        let replaced = |from: &str, to: &str| {
            assert!(TASK.contains(from));
            wrong(&TASK.replace(from, to))
        };
        assert_eq!(
            replaced("gold = \"label\"", ""),
            "x.toml: a task of this kind needs the key gold, found none"
        );
        assert_eq!(
            replaced("gold =", "continuation = \"x\"\ngold ="),
            "x.toml: a task of this kind has no key continuation"
        );
        assert!(replaced("gold =", "golden =").starts_with("x.toml: line 5: unknown field"));
        assert!(replaced("{goal}", "{goal").contains("context: expected } behind {"));
        assert!(
            replaced("[\"{a}\", \"{b}\"]", "[\"{a}\"]").contains("expected two templates or more")
        );
        assert!(replaced("[\"acc\"]", "[]").contains("acc_tokens, found none"));
        assert!(replaced("[\"acc\"]", "[\"perplexity\"]").contains("acc_tokens, found perplexity"));
        assert!(replaced("[\"acc\"]", "[\"f1\"]").contains("line 6: unknown variant `f1`"));
        assert!(
            replaced("{goal}", "{goal|look_up \\\"t\\\"}").contains("expected a table tables.t")
        );
        assert!(replaced("\"x\"", "\"\"").contains("source.file"));
        assert!(replaced("multiple_choice", "generation").contains("line 2: unknown variant"));
        assert!(
            replaced("gold =", "gold_labels = \"l\"\ngold_first = 1\ngold =").contains("give one")
        );
    }
}
