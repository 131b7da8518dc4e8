//! `tidemill prepare --follow`: a data set that is kept up to date until this is stopped.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use tidemill_streaming_data::DataSet;
use tidemill_streaming_data::prepare::{Follow, PrepareError};
use tidemill_streaming_data::store::Location;

use super::phases::Phases;
use super::places::cores;
use super::{PrepareArguments, update};
use crate::cli::exit::{ExitCode, one_line};
use crate::cli::output::note_line;
use crate::cli::processes::leave;
use crate::cli::signals::on_requests_to_stop;
use crate::job::StopRequest;

/// Updates the data set at `output` whenever its inputs change, and prints the changes each time.
pub(super) fn run(arguments: &PrepareArguments, output: &Location) -> anyhow::Result<ExitCode> {
    let stop = stop_on_signals()?;
    let (settings, tokenizer) = update::update(arguments, arguments.workers.unwrap_or(cores()))?;
    let mut follow = Follow::new(settings);
    let between = Duration::from_secs(arguments.look_seconds.get().into());
    let mut newest = None;
    // The last message: the same again is no news.
    let mut told = None;
    while !stop.is_asked() {
        let mut phases = Phases::new();
        let caught_up = follow.catch_up(tokenizer.as_ref(), &mut |now| phases.show(now, &stop));
        phases.finish();
        match caught_up {
            Ok(updated) => {
                told = None;
                if let Some(updated) = updated.filter(|it| newest != Some(it.prepared.fingerprint))
                {
                    newest = Some(updated.prepared.fingerprint);
                    update::print(&updated, output, arguments.format)?;
                }
            }
            Err(PrepareError::Interrupted) if stop.is_asked() => break,
            Err(error) if newest.is_some() && may_pass(&error, output) => {
                let line = one_line(&error);
                if told.as_ref() != Some(&line) {
                    note_line!("the version before stays for now: {line}");
                    told = Some(line);
                }
            }
            Err(error) => return Err(error.into()),
        }
        wait(between, &stop);
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether the next change of the inputs, or time, may mend it: not a fault of the data set itself.
fn may_pass(error: &PrepareError, output: &Location) -> bool {
    match error {
        PrepareError::Data(error) => {
            let is_there = |folder: &Path| DataSet::open(folder).is_ok();
            error.may_succeed_later() && output.local().is_none_or(is_there)
        }
        PrepareError::NoDocuments { .. }
        | PrepareError::TooFewTokens { .. }
        | PrepareError::Document { .. }
        | PrepareError::BrokenDocument { .. }
        | PrepareError::InputColumn { .. }
        | PrepareError::MixedInputs { .. }
        | PrepareError::SampleLength { .. }
        | PrepareError::ShardDigest { .. }
        | PrepareError::DamagedMdsShard { .. }
        | PrepareError::Sample { .. }
        | PrepareError::SampleToken { .. }
        | PrepareError::ExclusionKey { .. }
        | PrepareError::InputNotUpdatable { .. }
        | PrepareError::OtherText { .. }
        | PrepareError::PathNotUtf8 { .. } => true,
        PrepareError::Panic { .. } => false,
        error => error.may_succeed_later(),
    }
}

/// The request to stop that the first Ctrl-C (or SIGTERM) makes, which wakes this thread; the second ends the process at once.
fn stop_on_signals() -> anyhow::Result<StopRequest> {
    let stop = StopRequest::default();
    let (asked, waiting) = (stop.clone(), thread::current());
    on_requests_to_stop(move |requests| match requests {
        1 => {
            asked.request();
            waiting.unpark();
        }
        _ => leave(),
    })?;
    Ok(stop)
}

/// Waits for as long, or until `stop` is asked.
fn wait(time: Duration, stop: &StopRequest) {
    let until = Instant::now() + time;
    while !stop.is_asked()
        && let Some(left) = until.checked_duration_since(Instant::now())
    {
        thread::park_timeout(left);
    }
}
