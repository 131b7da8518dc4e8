//! How the program ends: one clear line on standard error, and an exit code that says whose turn it is.

use std::error::Error;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use tidemill_evaluation::EvaluationError;
use tidemill_kernels::KernelError;
use tidemill_model::ModelError;
use tidemill_streaming_data::DataError;
use tidemill_streaming_data::prepare::PrepareError;

use super::output::note_line;
use crate::cluster::{Classified, ClusterError, ExitClass};
use crate::error::JobError;

/// The program's answer to its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExitCode(u8);

impl ExitCode {
    /// All is done.
    pub(crate) const SUCCESS: Self = Self(0);

    /// Ends the process. A device thread may still compute, and would not survive the exit handlers of its libraries.
    pub(crate) fn leave(self) -> ! {
        // A full disk or a closed pipe has been reported, or is not worth a message.
        let _ = std::io::stdout().lock().flush();
        let _ = std::io::stderr().lock().flush();
        self.leave_unflushed()
    }

    /// Ends the process in a few seconds if it has not ended by then: the remaining messages may find no reader.
    pub(crate) fn leave_soon(self) {
        const TIME_FOR_WORDS: Duration = Duration::from_secs(2);
        let name = "exit".to_owned();
        let waiting = std::thread::Builder::new().name(name).spawn(move || {
            let until = Instant::now() + TIME_FOR_WORDS;
            while let Some(left) = until.checked_duration_since(Instant::now()) {
                std::thread::park_timeout(left);
            }
            self.leave_unflushed()
        });
        if waiting.is_err() {
            self.leave_unflushed();
        }
    }

    /// Ends the process where it stands, from any thread: another may hold the locks of the outputs, and wait for a reader
    /// that never comes.
    pub(crate) fn leave_unflushed(self) -> ! {
        tidemill_kernels::process::exit_at_once(self.0)
    }
}

impl From<u8> for ExitCode {
    fn from(code: u8) -> Self {
        Self(code)
    }
}

/// Libraries that carry requests to stores. Of their logs only warnings and news are kept: details have addresses as
/// they are used, in which a redirect or a proxy may have a password.
const LIBRARIES_OF_REQUESTS: [&str; 6] =
    ["h2", "hyper", "hyper_util", "object_store", "reqwest", "rustls"];

/// Logs messages of this level at least, or those that `TIDEMILL_LOG` asks for, to standard error.
pub(crate) fn start_logging(level: &str) {
    let mut filter = tracing_subscriber::EnvFilter::try_from_env("TIDEMILL_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(level));
    for library in LIBRARIES_OF_REQUESTS {
        let directive = format!("{library}=info").parse().expect("a target and a level");
        filter = filter.add_directive(directive);
    }
    // As the library has it where nothing is set (https://no-color.org), and on terminals alone.
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(!no_color && std::io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        .init();
}

/// The whole chain of causes on one line.
pub(super) fn one_line(error: &(dyn Error + 'static)) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let text = inner.to_string();
        if !line.contains(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        cause = inner.source();
    }
    line.split('\n').map(str::trim).collect::<Vec<_>>().join(" ")
}

/// The exit code of a wrong flag.
const WRONG_FLAG: u8 = 2;

/// Flags that are wrong, on one line; or help, where that was asked for.
pub(crate) fn wrong_flags(error: &clap::Error) -> ExitCode {
    use clap::error::ErrorKind::{
        DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion,
    };
    if let DisplayHelp | DisplayHelpOnMissingArgumentOrSubcommand | DisplayVersion = error.kind() {
        // Help without a reader is not worth a message.
        let _ = error.print();
        return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(WRONG_FLAG));
    }
    let text = error.to_string();
    let words: Vec<&str> = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        .filter(|line| !line.is_empty())
        .collect();
    let words = words.join(" ");
    note_line!("tidemill: {} (--help shows how)", words.trim_start_matches("error: "));
    ExitCode::from(WRONG_FLAG)
}

/// Prints the error, if there is one, and chooses the exit code.
pub(crate) fn report(result: anyhow::Result<ExitCode>) -> ExitCode {
    match result {
        Ok(code) => code,
        Err(error) => {
            // A closed pipe downstream (`tidemill ... | head`) is not worth a message.
            if error.chain().any(is_broken_pipe) {
                return ExitCode::SUCCESS;
            }
            note_line!("tidemill: {}", message(&error));
            ExitCode::from(exit_class(&error).exit_code())
        }
    }
}

/// The exit class of `error`: that of the first cause in its chain that has one. An error without a class
/// is not known to be the input's fault.
fn exit_class(error: &anyhow::Error) -> ExitClass {
    error.chain().find_map(class_of).unwrap_or(ExitClass::Restart)
}

fn class_of(cause: &(dyn Error + 'static)) -> Option<ExitClass> {
    fn of<E: Classified + Error + 'static>(cause: &(dyn Error + 'static)) -> Option<ExitClass> {
        cause.downcast_ref::<E>().map(Classified::exit_class)
    }
    of::<JobError>(cause)
        .or_else(|| of::<ClusterError>(cause))
        .or_else(|| of::<EvaluationError>(cause))
        .or_else(|| of::<PrepareError>(cause))
        .or_else(|| of::<DataError>(cause))
        .or_else(|| of::<ModelError>(cause))
        .or_else(|| of::<KernelError>(cause))
        .or_else(|| of::<std::io::Error>(cause))
}

/// The message for the user, without the worker that noticed wrong input and without other obstacles to preparing documents: they
/// say nothing about the cause.
fn message(error: &anyhow::Error) -> String {
    match cluster_error(error) {
        Some(ClusterError::Failed { exit_class, cause, .. })
            if *exit_class == ExitClass::FixInput || cause.is::<PrepareError>() =>
        {
            one_line(cause.as_ref())
        }
        _ => one_line(error.as_ref()),
    }
}

fn is_broken_pipe(cause: &(dyn Error + 'static)) -> bool {
    cause
        .downcast_ref::<std::io::Error>()
        .is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// The error of a run's workers or processes that caused `error`, if one did.
pub(super) fn cluster_error(error: &anyhow::Error) -> Option<&ClusterError> {
    error.chain().find_map(|cause| match cause.downcast_ref::<JobError>() {
        Some(JobError::Cluster(cluster)) => Some(cluster),
        _ => cause.downcast_ref::<ClusterError>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;
    use std::io;

    #[test]
    fn what_is_not_known_to_be_the_inputs_fault_is_75() {
        let code = |error: anyhow::Error| exit_class(&error).exit_code();
        let answer = |kind: io::ErrorKind| Err::<(), _>(io::Error::from(kind));
        assert_eq!(code(anyhow::anyhow!("an error of which nothing is known")), 75);
        assert_eq!(code(JobError::value("--seconds", "a time", "x").into()), 1);
        let missing = answer(io::ErrorKind::NotFound).context("reading lines.jsonl failed");
        assert_eq!(code(missing.unwrap_err()), 1);
        let full = answer(io::ErrorKind::StorageFull).context("writing loss.svg failed");
        assert_eq!(code(full.unwrap_err()), 75);
        let said = JobError::value("--model", "a folder", "a file");
        let behind_others = Err::<(), _>(said).context("line 3").context("lines.jsonl");
        assert_eq!(code(behind_others.unwrap_err()), 1);
    }
}
