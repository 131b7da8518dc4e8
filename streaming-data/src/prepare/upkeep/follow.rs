//! A data set that follows its inputs: updates for as long as it is asked, where there is something to do.
//!
//! Between updates, only names, sizes and times of the inputs and of the list of exclusions are looked at.
//! So as long as nothing changes, a call costs a listing; an update reads the state, a fraction of a second for a
//! million documents, and works only on what is new.

use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
    time::SystemTime,
};

use super::{UpdateReport, UpdateSettings, Verify, seen::Look, state::Version, update};
use crate::{
    prepare::{
        PrepareError, PrepareSettings, Progress, SkipReason, SkippedDocument, Tokenize,
        input::find::find_inputs,
    },
    store::{Location, RemoteFolder},
};

/// Keeps a data set up to date; see [`update()`].
///
/// ```no_run
/// use std::ops::ControlFlow;
/// use tidemill_streaming_data::prepare::{ByteTokenizer, Follow, UpdateSettings};
///
/// # fn wait() {}
/// let mut follow = Follow::new(UpdateSettings::new("data".into()));
/// loop {
///     if let Some(updated) = follow.catch_up(&ByteTokenizer, &mut |_| ControlFlow::Continue(()))? {
///         println!("version {}", updated.prepared.fingerprint);
///     }
///     wait();
/// }
/// # #[allow(unreachable_code)]
/// # Ok::<(), tidemill_streaming_data::prepare::PrepareError>(())
/// ```
#[derive(Debug)]
pub struct Follow {
    settings: UpdateSettings,
    /// The settings of the data set, once they were read.
    asked: Option<PrepareSettings>,
    /// Looks of the inputs of the newest version; `None` where looks do not tell whether inputs change.
    made_of: Option<Looks>,
    /// Inputs that could not be read: their looks do not change when they can be read again.
    unreadable: Vec<PathBuf>,
}

/// Looks of the inputs, and paths in their folders that can be no inputs.
#[derive(Debug, PartialEq, Eq)]
struct Looks {
    inputs: Vec<(PathBuf, Look)>,
    /// Paths and reasons.
    others: Vec<String>,
}

impl Follow {
    /// Follows the inputs of a data set that was prepared with [`Layout::Updatable`](crate::prepare::Layout::Updatable).
    pub fn new(settings: UpdateSettings) -> Follow {
        Follow { settings, asked: None, made_of: None, unreadable: Vec::new() }
    }

    /// Makes a new version of the data set if its inputs look otherwise than when this last made one; the first time, always.
    /// An input that was changed less than two seconds ago may change once more and keep its time: it counts as changed. So does
    /// one that could not be read, once it can be.
    ///
    /// # Errors
    /// As [`update()`]; after an error the next call updates in any case.
    pub fn catch_up(
        &mut self,
        tokenizer: &dyn Tokenize,
        progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Option<UpdateReport>, PrepareError> {
        let (asked, made_of) = (self.asked.take(), self.made_of.take());
        let asked = asked.map_or_else(|| asked_of(&self.settings), Ok)?;
        // Before the update lists them: what changes meanwhile looks otherwise the next time.
        let looks = match self.settings.verify {
            Verify::No => looks(&asked)?,
            Verify::All => None,
        };
        let can_be_read = |path: &PathBuf| fs::File::open(path).is_ok();
        let is_as_before =
            looks.is_some() && looks == made_of && !self.unreadable.iter().any(can_be_read);
        let updated = match is_as_before {
            true => None,
            false => Some(update(&self.settings, tokenizer, progress)?),
        };
        (self.asked, self.made_of) = (Some(asked), looks);
        if let Some(updated) = &updated {
            let unreadable = updated.prepared.skipped.iter().filter(|skipped| {
                matches!(skipped.reason, SkipReason::Unreadable { .. }) && skipped.path.is_file()
            });
            self.unreadable = unreadable.map(|skipped| skipped.path.clone()).collect();
        }
        Ok(updated)
    }
}

fn asked_of(settings: &UpdateSettings) -> Result<PrepareSettings, PrepareError> {
    let output = Location::of_path(&settings.output)?;
    let version = match output.local() {
        Some(folder) => Version::open_local(folder)?,
        None => Version::open_remote(&RemoteFolder::open(output, &settings.store)?)?,
    };
    Ok(version.state.settings.settings(settings))
}

/// The looks of the inputs; `None` where the look of one does not tell whether it changes.
fn looks(asked: &PrepareSettings) -> Result<Option<Looks>, PrepareError> {
    let now = SystemTime::now();
    let mut found = find_inputs(&asked.inputs, &asked.glob)?;
    found.leave_out(&asked.output, &asked.inputs);
    let others = found.skipped.iter().map(SkippedDocument::line).collect();
    let list = asked.exclude.as_deref().map(listed).transpose()?;
    let inputs = found.inputs.into_iter().map(|input| (input.path, input.bytes, input.changed));
    let looks = inputs
        .chain(list)
        .map(|(path, bytes, changed)| Look::of(bytes, changed, now).map(|look| (path, look)));
    Ok(looks.collect::<Option<_>>().map(|inputs| Looks { inputs, others }))
}

/// A file's path, size and time.
fn listed(path: &Path) -> Result<(PathBuf, u64, Option<SystemTime>), PrepareError> {
    let metadata = fs::metadata(path).map_err(PrepareError::io("look at", path))?;
    Ok((path.to_owned(), metadata.len(), metadata.modified().ok()))
}
