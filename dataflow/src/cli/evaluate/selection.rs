//! Which tasks are asked: named tasks, and the tasks of suites.

use tidemill_evaluation::EvaluationError;
use tidemill_evaluation::builtin;
use tidemill_evaluation::suite::Suite;
use tidemill_evaluation::task::Task;

/// Tasks, each once.
pub(super) struct Selection {
    /// The tasks, with the few-shot examples that a suite asks for.
    pub tasks: Vec<(Task, Option<usize>)>,
    /// The suites by their names.
    pub suites: Vec<(String, Suite)>,
}

impl Selection {
    /// The tasks and suites that the names and files mean. A task that is named twice is asked once.
    ///
    /// # Errors
    /// Neither a name nor a file, or two tasks of one name.
    pub(super) fn of(names: &[String]) -> Result<Self, EvaluationError> {
        let mut selection = Self { tasks: Vec::new(), suites: Vec::new() };
        for name in names {
            let found = builtin::find(name)?;
            for (task, shots) in found.tasks {
                selection.add(task, shots)?;
            }
            selection.suites.extend(found.suite);
        }
        Ok(selection)
    }

    fn add(&mut self, task: Task, shots: Option<usize>) -> Result<(), EvaluationError> {
        let examples = |task: &Task, shots: Option<usize>| shots.unwrap_or(task.fewshot);
        let same = self.tasks.iter().find(|(other, _)| other.name == task.name);
        match same {
            None => self.tasks.push((task, shots)),
            Some((other, others))
                if *other == task && examples(other, *others) == examples(&task, shots) => {}
            Some(_) => {
                let what = "expected tasks of different names, found two that differ in their files or few-shot examples: \
                            ask them one after the other, or rename a file";
                let (origin, what) = (task.name, what.to_owned());
                return Err(EvaluationError::Task { origin, what });
            }
        }
        Ok(())
    }
}
