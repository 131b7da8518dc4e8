//! The tasks and suites that come with this crate, and the lookup of a task by name or file.

use std::path::{Path, PathBuf};

use crate::error::{EvaluationError, Result};
use crate::suite::{Entry, Suite};
use crate::task::{Task, read_text};

/// Files of `tasks/`, by their names without the ending.
macro_rules! tasks {
    ($($name:literal)*) => { [$(($name, include_str!(concat!("../tasks/", $name, ".toml")))),*] };
}

/// Tasks as lm-eval defines them; the tasks of `foundry/` as LLM Foundry does.
const TASKS: [(&str, &str); 20] = tasks! {
    "arc_challenge" "arc_easy" "boolq" "copa" "hellaswag" "lambada_openai" "openbookqa" "piqa" "winogrande"
    "foundry/arc_challenge" "foundry/arc_easy" "foundry/boolq" "foundry/copa" "foundry/hellaswag"
    "foundry/lambada_openai" "foundry/openbook_qa" "foundry/piqa" "foundry/simple_arithmetic_nospaces"
    "foundry/winograd" "foundry/winogrande"
};

const SUITES: [(&str, &str); 1] = [("foundry", include_str!("../suites/foundry.toml"))];

/// The task or suite of a name or file.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The tasks, each with the number of few-shot examples that a suite sets.
    pub tasks: Vec<(Task, Option<usize>)>,
    /// The suite, with the names of its tasks in results, and its own name.
    pub suite: Option<(String, Suite)>,
}

/// The names of all built-in tasks and suites, for help and errors.
pub fn names() -> impl Iterator<Item = &'static str> {
    SUITES.iter().chain(&TASKS).map(|(name, _)| *name)
}

/// The task or suite of a name or file.
///
/// # Errors
/// A name that is neither built in nor a file, a file that is no task or suite, or a suite with a
/// task without an accuracy.
pub fn find(name: &str) -> Result<Found> {
    if let Some((name, text)) = SUITES.iter().find(|(own, _)| *own == name) {
        return of_suite(name, Suite::parse(text, name)?, None);
    }
    if TASKS.iter().any(|(own, _)| *own == name) {
        return Ok(Found { tasks: vec![(task(name, None)?, None)], suite: None });
    }
    let path = Path::new(name);
    if !name.ends_with(".toml") {
        let names: Vec<&str> = names().collect();
        let what = format!("expected a task or suite file (.toml) or one of {}", names.join(", "));
        return Err(EvaluationError::task(name, what));
    }
    if Suite::is_one(&read_text(path)?) {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        return of_suite(&stem, Suite::open(path)?, path.parent());
    }
    Ok(Found { tasks: vec![(Task::open(path)?, None)], suite: None })
}

fn of_suite(own_name: &str, mut suite: Suite, folder: Option<&Path>) -> Result<Found> {
    let mut tasks = Vec::new();
    for Entry { task: name, fewshot, .. } in
        suite.categories.iter_mut().flat_map(|of| &mut of.tasks)
    {
        let task = task(name, folder)?;
        if !task.metrics.iter().any(|metric| metric.is_accuracy()) {
            let what =
                format!("{name}: expected a task with an accuracy, which averages are formed of");
            return Err(EvaluationError::task(own_name, what));
        }
        name.clone_from(&task.name);
        tasks.push((task, *fewshot));
    }
    Ok(Found { tasks, suite: Some((own_name.to_owned(), suite)) })
}

/// A built-in task, or that of a file; a relative path starts at `folder`.
fn task(name: &str, folder: Option<&Path>) -> Result<Task> {
    match TASKS.iter().find(|(own, _)| *own == name) {
        Some((name, text)) => Task::parse(name, text, name),
        None if name.ends_with(".toml") => {
            Task::open(&folder.map_or_else(|| PathBuf::from(name), |folder| folder.join(name)))
        }
        None => Err(EvaluationError::task(name, "expected a task file (.toml) or a built-in task")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::{Kind, Metric};

    #[test]
    fn all_that_is_built_in_can_be_read() {
        for name in names() {
            let found = find(name).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(found.suite.is_some(), name == "foundry");
            assert!(found.tasks.iter().all(|(task, _)| task.folder.is_none()));
        }
        let found = find("winogrande").expect("a task");
        assert_eq!(
            (found.tasks[0].0.kind, &found.tasks[0].0.metrics[..]),
            (Kind::Schema, &[Metric::Acc][..])
        );
        let found = find("foundry").expect("a suite");
        assert_eq!(found.tasks.len(), found.suite.expect("one").1.entries().count());
    }

    #[test]
    fn files_are_found_from_where_they_are_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).expect("written");
            path.to_str().expect("UTF-8").to_owned()
        };
        let text = TASKS.iter().find(|(name, _)| *name == "piqa").expect("there").1;
        let path = write("mine.toml", text);
        let found = find(&path).expect("a task");
        let mine = &found.tasks[0].0;
        assert_eq!((mine.name.as_str(), mine.folder.as_deref()), ("mine", Some(folder.path())));
        let suite = write(
            "suite.toml",
            "average = \"all\"\n[[categories]]\nname = \"a\"\ntasks = [{ task = \"mine.toml\", fewshot = 2 }, { task = \"copa\" }]\n",
        );
        let found = find(&suite).expect("a suite");
        let names: Vec<_> =
            found.tasks.iter().map(|(task, shots)| (task.name.as_str(), *shots)).collect();
        assert_eq!(names, [("mine", Some(2)), ("copa", None)]);
        assert_eq!(found.suite.expect("one").1.categories[0].tasks[0].task, "mine");
        let perplexity = text.replace(r#"["acc", "acc_norm"]"#, r#"["perplexity"]"#);
        assert_ne!(perplexity, text);
        let perplexity = perplexity
            .replace("multiple_choice", "language_modelling")
            .replace("choices = [\"{sol1}\", \"{sol2}\"]", "continuation = \"{sol1}\"")
            .replace("gold = \"label\"", "");
        write("mine.toml", &perplexity);
        let wrong = find(&suite).unwrap_err().to_string();
        assert!(wrong.starts_with("suite: mine.toml: expected a task with an accuracy"), "{wrong}");
        let wrong = find("piqua").unwrap_err().to_string();
        assert!(
            wrong.starts_with("piqua: expected a task or suite file (.toml) or one of foundry, "),
            "{wrong}"
        );
        assert!(find("nowhere.toml").unwrap_err().to_string().contains("nowhere.toml"));
    }
}
