//! The versions of a data set that is kept up to date: an index for each, by its fingerprint.

use std::{cmp::Reverse, fs, io::ErrorKind, path::Path, time::SystemTime};

use tidemill_files::{Kind, read};

use super::{INDEX_FILE, Index, VERSIONS_FOLDER, version_file_of};
use crate::{
    error::DataError,
    hash::ContentHash,
    store::{Location, RemoteFolder, StoreSettings},
};

/// A version of a data set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// Its identity.
    pub fingerprint: ContentHash,
    /// The index of the version.
    pub index: Index,
    /// When it was written, by the clock of the machine or of the store; one that was written again counts from then.
    pub written: SystemTime,
}

/// The fingerprint in the name of a version's index below the data set's folder; `None` for other names.
pub(crate) fn fingerprint_of(name: &str) -> Option<ContentHash> {
    let digits = name.strip_prefix(VERSIONS_FOLDER)?.strip_prefix('/')?.strip_suffix(".json")?;
    ContentHash::of_digits(digits)
}

/// The versions of a data set. The newest, which `index.json` is, comes first; the others follow from the one that was
/// written last to the oldest. One that has no versions has none.
///
/// # Errors
/// The errors of reading an index, and of the store.
pub fn versions(location: &Location, settings: &StoreSettings) -> Result<Vec<Version>, DataError> {
    match location.local() {
        Some(folder) => versions_in_folder(folder),
        None => versions_in_store(&RemoteFolder::open(location.clone(), settings)?),
    }
}

/// As [`versions`], of a folder of this machine.
pub(crate) fn versions_in_folder(folder: &Path) -> Result<Vec<Version>, DataError> {
    let newest = Index::read(folder)?;
    let versions = folder.join(VERSIONS_FOLDER);
    let entries = match fs::read_dir(&versions) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(DataError::io("list folder", &versions))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(DataError::io("list folder", &versions))?;
        let name = format!("{VERSIONS_FOLDER}/{}", entry.file_name().to_string_lossy());
        let Some(fingerprint) = fingerprint_of(&name) else { continue };
        let path = entry.path();
        let bytes = read(&path, Kind::Index).map_err(DataError::io("read", &path))?;
        let index = Index::from_bytes(&bytes, &path)?;
        let written = entry.metadata().and_then(|metadata| metadata.modified());
        let written = written.unwrap_or(SystemTime::UNIX_EPOCH);
        found.push(Version { fingerprint, index, written });
    }
    Ok(newest_first(newest, found))
}

/// As [`versions`], of a folder of a store.
pub(crate) fn versions_in_store(folder: &RemoteFolder) -> Result<Vec<Version>, DataError> {
    let read = |name: &str| {
        let path = folder.location().join(name).to_string();
        Index::from_bytes(&folder.get(name)?, Path::new(&path))
    };
    let newest = read(INDEX_FILE)?;
    let mut found = Vec::new();
    for entry in folder.folder(VERSIONS_FOLDER).list()? {
        let name = format!("{VERSIONS_FOLDER}/{}", entry.name);
        if let Some(fingerprint) = fingerprint_of(&name) {
            found.push(Version { fingerprint, index: read(&name)?, written: entry.modified });
        }
    }
    Ok(newest_first(newest, found))
}

/// The versions with the newest in front; none where it has no state, as it is then no version of others.
fn newest_first(newest: Index, mut versions: Vec<Version>) -> Vec<Version> {
    if newest.state.is_none() {
        return Vec::new();
    }
    let fingerprint = newest.fingerprint();
    if !versions.iter().any(|version| version.fingerprint == fingerprint) {
        versions.push(Version { fingerprint, index: newest, written: SystemTime::UNIX_EPOCH });
    }
    versions.sort_by_key(|version| {
        (version.fingerprint != fingerprint, Reverse(version.written), version.fingerprint)
    });
    versions
}

/// The index of a version in a folder, where there is one.
pub(crate) fn read_version(
    folder: &Path,
    fingerprint: ContentHash,
) -> Result<Option<Index>, DataError> {
    let path = folder.join(version_file_of(fingerprint));
    match read(&path, Kind::Index) {
        Ok(bytes) => Ok(Some(Index::from_bytes(&bytes, &path)?)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(DataError::io("read", &path)(error)),
    }
}
