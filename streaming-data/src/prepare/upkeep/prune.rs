//! Removing what only older versions of a data set have.

mod files;
mod mark;

use std::{
    collections::{BTreeSet, HashMap},
    num::NonZeroUsize,
    path::Path,
};

pub(crate) use self::mark::Unpruned;
use self::{
    files::{Files, named_by_content},
    mark::Mark,
};
use super::state::{STATE_SUFFIX, State, state_file};
use crate::{
    data_set::index::{Index, STATE_FOLDER, ShardEntry, VERSIONS_FOLDER, Version, version_file_of},
    hash::ContentHash,
    prepare::{
        PrepareError,
        data_report::report_files,
        output::{WriterLock, remove_unfinished, shard::repeated_content_name},
    },
    store::{Location, RemoteFolder, StoreSettings},
};

/// The files that were removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PruneReport {
    /// Versions that are left, the newest first.
    pub kept: Vec<ContentHash>,
    /// Versions that are gone, the newest first.
    pub removed: Vec<ContentHash>,
    /// Files that were removed: of those versions, and of unfinished updates.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Removes all but the newest versions of a data set, and files that belong to no version.
///
/// Only files are removed that an update or a preparation wrote: files that a version lists, and files whose
/// name is the hash of their content. In a store a version that was written after the newest one stays too: an
/// update is about to publish it. One that has not come so far is refused when it does, and has to be done again.
///
/// # Errors
/// [`PrepareError::NotUpdatable`] for a data set without versions, [`PrepareError::UpdateRunning`] in a folder,
/// [`PrepareError::UpdateOvertaken`] where another process prunes the same data set in a store,
/// the errors of reading an index or the state of a version that is kept, and [`PrepareError::Data`] where something
/// cannot be read or removed. Whatever is there is complete all the same.
pub fn prune(data_set: &Path, keep: NonZeroUsize) -> Result<PruneReport, PrepareError> {
    let location = Location::of_path(data_set)?;
    let Some(folder) = location.local() else {
        return prune_in_store(&RemoteFolder::open(location, &StoreSettings::default())?, keep);
    };
    let files = Files::Local(folder);
    // A folder without an updatable data set is left as it is.
    versions(&files)?;
    let _lock = WriterLock::take(folder)?;
    remove_unfinished(folder);
    remove(&files, versions(&files)?, keep, || Ok(()))
}

/// As [`prune`], in a folder of a store that the caller made.
///
/// # Errors
/// As [`prune`].
pub fn prune_in_store(
    folder: &RemoteFolder,
    keep: NonZeroUsize,
) -> Result<PruneReport, PrepareError> {
    let files = Files::Remote(folder);
    versions(&files)?;
    let mark = Mark::put(folder)?;
    // Behind the mark: what an update publishes without having seen it has its version here.
    let report = remove(&files, versions(&files)?, keep, || mark.check())?;
    mark.end()?;
    Ok(report)
}

/// The versions, at least one. They decide which files are removed: an index with one wrong byte would cost a version its
/// files.
fn versions(files: &Files<'_>) -> Result<Vec<Version>, PrepareError> {
    let versions = files.versions()?;
    let Some(newest) = versions.first() else {
        return Err(PrepareError::NotUpdatable { path: files.path("") });
    };
    let damaged = |name: &str, found: &str, expected: &str| PrepareError::StateDamaged {
        path: files.path(name),
        found: found.to_owned(),
        expected: expected.to_owned(),
    };
    let newest = version_file_of(newest.fingerprint);
    if !named_by_content(files, VERSIONS_FOLDER)?.contains_key(&newest) {
        return Err(damaged(&newest, "nothing", "the index of the newest version"));
    }
    for Version { fingerprint, index, .. } in &versions {
        let name = version_file_of(*fingerprint);
        if index.fingerprint() != *fingerprint {
            return Err(damaged(&name, "another version", "that of its name"));
        }
        if !has_names_of_content(index) {
            return Err(damaged(&name, "other names", "those of the content of its files"));
        }
    }
    Ok(versions)
}

/// Whether all files that an index lists have the names that follow from their hashes.
fn has_names_of_content(index: &Index) -> bool {
    let mut before: HashMap<ContentHash, usize> = HashMap::new();
    let mut is_named = |shard: &ShardEntry| {
        let before = before.entry(shard.hash).or_default();
        *before += 1;
        shard.file == repeated_content_name(shard.hash, *before - 1)
    };
    let state = index.state.as_ref();
    index.shards.iter().all(&mut is_named)
        && state.is_none_or(|state| state.file == state_file(state.hash, STATE_SUFFIX))
}

/// Removes files, each after `may` has not refused.
fn remove(
    files: &Files<'_>,
    all: Vec<Version>,
    keep: NonZeroUsize,
    may: impl Fn() -> Result<(), PrepareError>,
) -> Result<PruneReport, PrepareError> {
    let newest = all[0].written;
    let (published, unpublished): (Vec<_>, Vec<_>) =
        all.into_iter().enumerate().partition(|(place, version)| match files {
            // The lock says that there is none.
            Files::Local(_) => true,
            Files::Remote(_) => *place == 0 || version.written < newest,
        });
    let published: Vec<Version> = published.into_iter().map(|(_, version)| version).collect();
    let (kept, removed) = published.split_at(keep.get().min(published.len()));
    let mut wanted = BTreeSet::new();
    for version in kept.iter().chain(unpublished.iter().map(|(_, version)| version)) {
        wanted.extend(files_of(files, version)?);
    }
    for version in kept.iter().chain(unpublished.iter().map(|(_, version)| version)) {
        wanted.extend(report_files(version.fingerprint));
    }
    let mut listed = BTreeSet::new();
    for version in removed {
        listed.insert(version_file_of(version.fingerprint));
        // If the state is gone or damaged, the files that it lists are found by content.
        listed.extend(files_of(files, version).unwrap_or_default());
    }
    let mut report = PruneReport {
        kept: kept.iter().map(|version| version.fingerprint).collect(),
        removed: removed.iter().map(|version| version.fingerprint).collect(),
        ..PruneReport::default()
    };
    // Indexes first: after a kill no version is without its files.
    for inside in [VERSIONS_FOLDER, "", STATE_FOLDER] {
        for (name, bytes) in named_by_content(files, inside)? {
            if wanted.contains(&name) || !(listed.contains(&name) || files.is_own(&name)?) {
                continue;
            }
            may()?;
            files.remove(&name)?;
            report.files += 1;
            report.bytes += bytes;
        }
    }
    Ok(report)
}

/// The names of all files of a version, below the folder.
fn files_of(files: &Files<'_>, version: &Version) -> Result<BTreeSet<String>, PrepareError> {
    let mut names = BTreeSet::from([version_file_of(version.fingerprint)]);
    names.extend(version.index.shards.iter().map(|shard| shard.file.clone()));
    if let Some(state) = &version.index.state {
        let bytes = files.read(&state.file)?;
        let parts = State::parse(&bytes, &version.index, &files.path(&state.file))?.parts;
        names.extend(parts.into_iter().map(|part| part.file));
        names.insert(state.file.clone());
    }
    Ok(names)
}
