//! Processes of this program that it starts itself and watches over: those of `-n`.

use std::process::Command;

use anyhow::Context;

use super::exit::ExitCode;
use super::output::note_line;
use super::signals::on_requests_to_stop;
use crate::cluster::{ExitClass, Killed, Supervisor, SupervisorOutcome, SupervisorSettings};

/// Where a supervised process finds its supervisor.
pub(super) const INVITATION_VARIABLE: &str = "TIDEMILL_INVITATION";

/// Starts the processes, each with the arguments that `arguments` gives it, and answers when all have ended. How those ended
/// that have no exit code is said.
pub(super) fn run(
    settings: SupervisorSettings,
    mut arguments: impl FnMut(&mut Command),
) -> anyhow::Result<SupervisorOutcome> {
    let program = std::env::current_exe().context("finding this program's own file failed")?;
    let supervisor = Supervisor::new(settings)?;
    let stop = supervisor.stop_handle();
    on_requests_to_stop(move |requests| match requests {
        1 => stop.stop(),
        2 => stop.end(),
        // Our own children end with us, but for those that are stopped.
        _ => ExitCode::from(ExitClass::Restart.exit_code()).leave_unflushed(),
    })?;
    let outcome = supervisor.run(|_process, invitation| {
        let mut command = Command::new(&program);
        arguments(&mut command);
        command.env(INVITATION_VARIABLE, invitation.to_string());
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
