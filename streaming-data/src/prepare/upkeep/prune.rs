//! Removing what only older versions of a data set have.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    num::NonZeroUsize,
    path::Path,
};

use tidemill_files::{Kind, read};

use super::{
    part::PART_SUFFIX,
    state::{STATE_SUFFIX, State},
};
use crate::{
    error::DataError,
    hash::ContentHash,
    index::{STATE_FOLDER, VERSIONS_FOLDER, Version, version_file_of, versions},
    prepare::{PrepareError, output::WriterLock},
    store::{Location, StoreSettings},
};

/// What was removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PruneReport {
    /// Versions that are left, the newest first.
    pub kept: Vec<ContentHash>,
    /// Versions that are gone, the newest first.
    pub removed: Vec<ContentHash>,
    /// Files that were removed, of those versions and of updates that did not end.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Removes all but the newest versions of a data set in a folder, and what no version has.
///
/// Only files are removed that an update or a preparation wrote: those that a version lists, and those whose
/// name is the hash of their content.
///
/// # Errors
/// [`PrepareError::NotUpdatable`] for a data set without versions, [`PrepareError::UpdateRunning`],
/// what is wrong with an index or the state of a version that is kept, [`DataError::Location`] for a URL, and
/// [`DataError::Io`] where something cannot be removed. Whatever is there is complete all the same.
pub fn prune(data_set: &Path, keep: NonZeroUsize) -> Result<PruneReport, PrepareError> {
    let location = Location::of_path(data_set)?;
    let Some(folder) = location.local() else {
        let (text, found) = (location.to_string(), "a URL".to_owned());
        let expected = "a folder on this machine: of a store, versions are not removed".to_owned();
        return Err(DataError::Location { text, found, expected }.into());
    };
    let none = || PrepareError::NotUpdatable { path: folder.to_owned() };
    if versions(&location, &StoreSettings::default())?.is_empty() {
        return Err(none());
    }
    let _lock = WriterLock::take(folder)?;
    let all = versions(&location, &StoreSettings::default())?;
    let (kept, removed) = all.split_at(keep.get().min(all.len()));
    let mut wanted = BTreeSet::new();
    for version in kept {
        wanted.extend(files_of(folder, version)?);
    }
    let mut listed = BTreeSet::new();
    for version in removed {
        listed.insert(version_file_of(version.fingerprint));
        // What its state lists is found by content, if the state is gone or damaged.
        listed.extend(files_of(folder, version).unwrap_or_default());
    }
    let mut report = PruneReport {
        kept: kept.iter().map(|version| version.fingerprint).collect(),
        removed: removed.iter().map(|version| version.fingerprint).collect(),
        ..PruneReport::default()
    };
    // Indexes first: what is killed then leaves no version without its files.
    for inside in [VERSIONS_FOLDER, "", STATE_FOLDER] {
        for (name, bytes) in named_by_content(folder, inside)? {
            let path = folder.join(&name);
            if wanted.contains(&name) {
                continue;
            }
            if !listed.contains(&name) && !is_own(&name, &path)? {
                continue;
            }
            fs::remove_file(&path).map_err(PrepareError::io("remove", &path))?;
            report.files += 1;
            report.bytes += bytes;
        }
    }
    Ok(report)
}

/// The names of all files of a version, below the folder.
fn files_of(folder: &Path, version: &Version) -> Result<BTreeSet<String>, PrepareError> {
    let mut files = BTreeSet::from([version_file_of(version.fingerprint)]);
    files.extend(version.index.shards.iter().map(|shard| shard.file.clone()));
    if let Some(state) = &version.index.state {
        let path = folder.join(&state.file);
        let bytes = read(&path, Kind::Index).map_err(PrepareError::io("read", &path))?;
        let parts = State::parse(&bytes, &version.index, &path)?.parts;
        files.extend(parts.into_iter().map(|part| part.file));
        files.insert(state.file.clone());
    }
    Ok(files)
}

/// The files in a folder of the data set whose names are those of content, and their sizes.
fn named_by_content(folder: &Path, inside: &str) -> Result<BTreeMap<String, u64>, PrepareError> {
    let path = folder.join(inside);
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(&path).map_err(PrepareError::io("list folder", &path))? {
        let entry = entry.map_err(PrepareError::io("list folder", &path))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let name = if inside.is_empty() { name } else { format!("{inside}/{name}") };
        let metadata = entry.metadata().map_err(PrepareError::io("look at", entry.path()))?;
        if metadata.is_file() && hash_of_name(&name).is_some() {
            files.insert(name, metadata.len());
        }
    }
    Ok(files)
}

/// The hash that a name below the folder stands for.
fn hash_of_name(name: &str) -> Option<ContentHash> {
    let digits = match name.split_once('/') {
        None => {
            let digits = name.strip_prefix("shard-")?.strip_suffix(".parquet")?;
            match digits.split_once('-') {
                Some((digits, again)) if again.parse::<u64>().is_ok() => digits,
                Some(_) => return None,
                None => digits,
            }
        }
        Some((VERSIONS_FOLDER, file)) => file.strip_suffix(".json")?,
        Some((STATE_FOLDER, file)) => {
            let (digits, suffix) = file.split_once('.')?;
            [PART_SUFFIX, STATE_SUFFIX].contains(&suffix).then_some(digits)?
        }
        Some(_) => return None,
    };
    ContentHash::of_digits(digits)
}

/// Whether a file that no version lists is what its name says: an update that did not end wrote it.
fn is_own(name: &str, path: &Path) -> Result<bool, PrepareError> {
    match name.starts_with(VERSIONS_FOLDER) {
        // All of these are versions.
        true => Ok(false),
        false => Ok(hash_of_name(name) == Some(ContentHash::of_file(path)?)),
    }
}
