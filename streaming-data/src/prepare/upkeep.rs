//! Data sets that are kept up to date: an update reads the changes, and its result equals a preparation of the
//! same inputs from scratch.
//!
//! Such a data set has shards and a state: for each input its size and a hash of its documents, for each
//! document the hash of its text, the filters' verdict, its signature, and the number of its tokens if kept.
//! The state determines the verdicts and where shards end; tokens of documents that stay are taken out of
//! existing shards. So texts are read only in inputs that changed, and tokenized only where no shard
//! has them: new documents, and documents that come back because their original is gone.
//!
//! # Contract
//! - Shards, `index.json`, `index/<fingerprint>.json`, the tokenizer and the state are a function of the
//!   inputs and settings alone: the same to the byte for any number of workers and any history of updates.
//!   Exceptions are `state/seen`, which has the looks of inputs, and the files of older versions.
//! - The newest version is complete at any time, also when the process is killed, and older ones stay until
//!   [`prune`] removes them.
//! - An input counts as unchanged if its size and time are the same; [`Verify::All`] reads it. A file
//!   that was changed less than two seconds before it was listed is read again by the next update, as is one
//!   that could not be read to its end.
//! - With [`Reporting::Files`](super::Reporting::Files) records have the length of each document, and each version has its report
//!   ([`data_report`](super::data_report)).
//! - Memory: as of [`prepare`](super::prepare()), and about 300 bytes for each document of the inputs that are
//!   read, 40 for each that is tokenized, and 200 for each input.
//!
//! | module | holds |
//! |---|---|
//! | [`stored_settings`] | the settings, as the state has them |
//! | [`record`], [`part`], [`state`], [`copies`] | records of documents; files of records; all records of a version; the copies that a store has of them |
//! | [`seen`] | sizes and times of inputs |
//! | [`former`], [`former_shards`] | the state of the previous version, and tokens out of its shards |
//! | [`recorder`], [`spool`] | the first pass: records of all documents |
//! | [`wanted`], [`cut`], [`assembler`] | the second pass: the inputs that are read for their tokens, the ends of shards, and the shards |
//! | [`build`] | both of them |
//! | [`follow`] | updates whenever inputs change |
//! | [`mod@prune`] | removing older versions |

mod assembler;
mod build;
mod copies;
mod cut;
mod follow;
mod former;
mod former_shards;
mod part;
mod prune;
mod record;
mod recorder;
mod seen;
mod spool;
mod state;
mod stored_settings;
mod wanted;

#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap, num::NonZeroUsize, ops::ControlFlow, path::PathBuf, time::SystemTime,
};

use self::stored_settings::StoredSettings;
pub(crate) use self::{
    assembler::fate,
    build::{Upkeep, build},
    former::{FormerRecords, Known},
    prune::Unpruned,
    record::{Document, Fate, Judged, Record, RecordReader, RecordWriter},
    spool::{Spool, SpoolReader},
    state::{Version, tokenizer_identity},
    wanted::Wanted,
};
pub use self::{
    build::Verify,
    follow::Follow,
    prune::{PruneReport, prune, prune_in_store},
};
use super::{
    PrepareError, PrepareReport, PrepareSettings, Progress, Tokenize,
    choose::duplicates::DEDUP_MEMORY_BYTES,
    output::{Output, UpdatedFolder, UpdatedStore, WriterLock},
    prepare_in,
    together::Peers,
};
use crate::{
    hash::ContentHash,
    store::{Location, RemoteFolder, StoreSettings},
};

/// The version that an update begins with.
pub(crate) type Former<'a> = &'a FormerVersion;

/// A version, and whether inputs that look as before are read all the same.
pub(crate) struct FormerVersion {
    version: Version,
    verify: Verify,
}

impl std::ops::Deref for FormerVersion {
    type Target = Version;

    fn deref(&self) -> &Version {
        &self.version
    }
}

/// The data set to update, and how.
#[derive(Debug, Clone)]
pub struct UpdateSettings {
    /// The folder or URL of a data set that was prepared with
    /// [`Layout::Updatable`](super::Layout::Updatable). Its state has the other settings.
    pub output: PathBuf,
    /// How the store of a URL is used.
    pub store: StoreSettings,
    /// Threads that read, tokenize and encode; they change no byte.
    pub workers: NonZeroUsize,
    /// Memory for records of documents while they are compared, in bytes; it changes no byte of the data set.
    pub dedup_memory_bytes: u64,
    /// Which inputs are read.
    pub verify: Verify,
}

impl UpdateSettings {
    /// The settings with a default for all that has one.
    pub fn new(output: PathBuf) -> UpdateSettings {
        UpdateSettings {
            output,
            store: StoreSettings::default(),
            workers: NonZeroUsize::MIN,
            dedup_memory_bytes: DEDUP_MEMORY_BYTES,
            verify: Verify::No,
        }
    }
}

/// The new part of a data set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// Inputs that were read.
    pub inputs_read: u64,
    /// Inputs that look as they did before, and were not read.
    pub inputs_kept: u64,
    /// Inputs of the previous version that are gone.
    pub inputs_gone: u64,
    /// Inputs that had changed although they look as before: only [`Verify::All`] finds them.
    pub unnoticed: Vec<PathBuf>,
    /// Documents of the inputs that were read.
    pub texts_read: u64,
    /// Documents that were tokenized.
    pub texts_tokenized: u64,
    /// Documents that filters reject, by the first rule that each broke, including documents of inputs that were not
    /// read.
    pub rejected: BTreeMap<String, u64>,
    /// Shards of the previous version that stay.
    pub shards_kept: u64,
    /// Other shards of the previous version that tokens were taken from.
    pub shards_read: u64,
}

/// The outcome of an update.
#[derive(Debug)]
pub struct UpdateReport {
    /// The identity of the previous version.
    pub former: ContentHash,
    /// The version that is the newest now. Of filters, bytes of text and broken documents that are named, it
    /// counts what was read.
    pub prepared: PrepareReport,
}

impl<'a> Upkeep<'a> {
    /// Upkeep of a data set that is prepared with these settings, or of `former` with the settings in its state.
    ///
    /// # Errors
    /// [`PrepareError::PathNotUtf8`], [`PrepareError::OtherTokenizer`], and the errors of reading the previous
    /// version.
    pub(crate) fn of(
        settings: &PrepareSettings,
        tokenizer: &dyn Tokenize,
        former: Option<Former<'a>>,
    ) -> Result<Upkeep<'a>, PrepareError> {
        let (identity, now) = (tokenizer_identity(tokenizer), SystemTime::now());
        let Some(former) = former else {
            return Ok(Upkeep {
                settings: StoredSettings::of(settings)?,
                tokenizer: identity,
                dedup: settings.dedup,
                former: None,
                verify: Verify::No,
                now,
            });
        };
        let expected = former.state.tokenizer;
        if identity != expected {
            let path = settings.output.clone();
            return Err(PrepareError::OtherTokenizer { path, found: identity, expected });
        }
        Ok(Upkeep {
            settings: former.state.settings.clone(),
            tokenizer: identity,
            dedup: settings.dedup,
            former: Some((&former.version, former.version.seen()?)),
            verify: former.verify,
            now,
        })
    }
}

/// Makes a new version of a data set from its inputs as they are now. `progress` is called with the position, and
/// its answer can stop the update. The tokenizer is the one that the data set was prepared with.
///
/// # Errors
/// - [`PrepareError::NotUpdatable`], [`PrepareError::StateVersion`], [`PrepareError::StateDamaged`],
///   [`PrepareError::OtherTokenizer`]: the data set cannot be updated.
/// - [`PrepareError::UpdateRunning`], [`PrepareError::UpdateOvertaken`], [`PrepareError::PruneRunning`]: another update, or
///   [`prune`], was there first.
/// - [`PrepareError::Readmitted`], [`PrepareError::OtherText`], [`PrepareError::InputChanged`]: a text that is
///   needed cannot be read, or is another.
/// - [`PrepareError::Interrupted`] when `progress` answered [`ControlFlow::Break`].
/// - As [`prepare`](super::prepare()) for inputs and documents, and [`PrepareError::Data`] where something
///   cannot be read or written.
///
/// After an error the previous version is still the newest. Where it is the store whose last answer did not come, the new one
/// may be: it is complete then, and the next update finds it.
pub fn update(
    settings: &UpdateSettings,
    tokenizer: &dyn Tokenize,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<UpdateReport, PrepareError> {
    update_with(None, settings, tokenizer, progress)
}

/// As [`update`], with other processes where there are some.
pub(crate) fn update_with(
    peers: Option<&dyn Peers>,
    settings: &UpdateSettings,
    tokenizer: &dyn Tokenize,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<UpdateReport, PrepareError> {
    let output = Location::of_path(&settings.output)?;
    let Some(folder) = output.local() else {
        let folder = RemoteFolder::open(output, &settings.store)?;
        return update_in(&folder, (settings, peers), tokenizer, progress);
    };
    // A folder without an updatable data set is left as it is.
    Version::open_local(folder)?;
    let lock = WriterLock::take(folder)?;
    let version = Version::open_local(folder)?;
    update_version((settings, peers), version, tokenizer, progress, |version| {
        Ok(Box::new(UpdatedFolder::begin(folder, version.files(), lock)?))
    })
}

/// As [`update`], in a folder of a store that the caller made; the output and the store of the settings are
/// not looked at.
///
/// # Errors
/// As [`update`].
pub fn update_in_store(
    folder: &RemoteFolder,
    settings: &UpdateSettings,
    tokenizer: &dyn Tokenize,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<UpdateReport, PrepareError> {
    update_in(folder, (settings, None), tokenizer, progress)
}

fn update_in(
    folder: &RemoteFolder,
    settings: (&UpdateSettings, Option<&dyn Peers>),
    tokenizer: &dyn Tokenize,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<UpdateReport, PrepareError> {
    let version = Version::open_remote(folder)?;
    let unpruned = Unpruned::look(folder)?;
    update_version(settings, version, tokenizer, progress, |version| {
        let found = version.found.clone().expect("what is in a store was found there");
        Ok(Box::new(UpdatedStore::begin(folder.clone(), (found, unpruned), version.files())))
    })
}

fn update_version(
    (settings, peers): (&UpdateSettings, Option<&dyn Peers>),
    version: Version,
    tokenizer: &dyn Tokenize,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    begin_output: impl FnOnce(&Version) -> Result<Box<dyn Output>, PrepareError>,
) -> Result<UpdateReport, PrepareError> {
    let prepare = version.state.settings.settings(settings);
    let former = FormerVersion { version, verify: settings.verify };
    let begin = || begin_output(&former.version);
    let with = (Some(&former), peers);
    let prepared = prepare_in(&prepare, tokenizer, progress, with, begin)?;
    Ok(UpdateReport { former: former.index.fingerprint(), prepared })
}
