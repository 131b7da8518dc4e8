//! Processes of this program that it starts itself and watches over, as `-n` asks.

use std::ffi::OsString;
use std::process::Command;

use anyhow::Context;

use super::output::note_line;
use super::processes::leave;
use super::signals::on_requests_to_stop;
use crate::cluster::{Killed, Supervisor, SupervisorOutcome, SupervisorSettings};

/// Where a supervised process finds its supervisor.
pub(super) const INVITATION_VARIABLE: &str = "TIDEMILL_INVITATION";

/// Starts the processes, each with the command line of this one and the flags `settled` that it leaves open, and answers when
/// all have ended. How those ended that have no exit code is said.
pub(super) fn run(
    settings: SupervisorSettings,
    settled: &[String],
) -> anyhow::Result<SupervisorOutcome> {
    let program = std::env::current_exe().context("finding this program's own file failed")?;
    let arguments = with_flags(std::env::args_os().skip(1).collect(), settled);
    let supervisor = Supervisor::new(settings)?;
    let stop = supervisor.stop_handle();
    on_requests_to_stop(move |requests| match requests {
        1 => stop.stop(),
        2 => stop.end(),
        // Our own children end with us, except those that are stopped.
        _ => leave(),
    })?;
    let outcome = supervisor.run(|_process, invitation| {
        let mut command = Command::new(&program);
        command.args(&arguments).env(INVITATION_VARIABLE, invitation.to_string());
        command
    })?;
    if outcome.stopped_early && outcome.exit_code() == 0 {
        return Ok(outcome);
    }
    for (process, child) in outcome.children.iter().enumerate() {
        if child.status.code().is_none() {
            let how = match child.killed {
                None => "ended",
                Some(Killed::Silent) => "was silent and was killed",
                Some(Killed::Asked) => "was killed at the second signal",
                Some(Killed::Outlived) => "did not end with the others and was killed",
            };
            note_line!("tidemill: process {process} {how}: {}", child.status);
        }
    }
    Ok(outcome)
}

/// `arguments` with `flags` before the first of their own, as behind a `--` none would be one.
fn with_flags(mut arguments: Vec<OsString>, flags: &[String]) -> Vec<OsString> {
    let is_flag = |argument: &OsString| argument.to_string_lossy().starts_with('-');
    let first = arguments.iter().position(is_flag).unwrap_or(arguments.len());
    arguments.splice(first..first, flags.iter().map(OsString::from));
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_that_are_settled_are_flags_of_a_line_that_ends_its_own() {
        let line = |words: &str| words.split(' ').map(OsString::from).collect::<Vec<_>>();
        let settled = ["-w".to_owned(), "3".to_owned()];
        for (own, expected) in [
            ("train -n 2 -- -run.toml", "train -w 3 -n 2 -- -run.toml"),
            ("bench train -n 2", "bench train -w 3 -n 2"),
            ("train run.toml -n 2", "train run.toml -w 3 -n 2"),
        ] {
            assert_eq!(with_flags(line(own), &settled), line(expected));
        }
    }
}
