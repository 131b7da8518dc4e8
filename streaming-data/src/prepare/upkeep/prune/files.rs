//! The files of a data set, in a folder of this machine or in a store.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use tempfile::NamedTempFile;
use tidemill_files::{Kind, read};

use crate::{
    data_set::index::{
        STATE_FOLDER, VERSIONS_FOLDER, Version, versions_in_folder, versions_in_store,
    },
    hash::ContentHash,
    prepare::{
        PrepareError,
        data_report::REPORT_SUFFIXES,
        upkeep::{part::PART_SUFFIX, state::STATE_SUFFIX},
    },
    store::RemoteFolder,
};

/// Where the files are. Names are relative to the folder.
pub(super) enum Files<'a> {
    Local(&'a Path),
    Remote(&'a RemoteFolder),
}

impl Files<'_> {
    /// The path or URL of a file in error messages; of the data set where the name is empty.
    pub fn path(&self, name: &str) -> PathBuf {
        match self {
            Files::Local(folder) if name.is_empty() => folder.to_path_buf(),
            Files::Local(folder) => folder.join(name),
            Files::Remote(folder) if name.is_empty() => folder.location().to_string().into(),
            Files::Remote(folder) => folder.location().join(name).to_string().into(),
        }
    }

    pub fn versions(&self) -> Result<Vec<Version>, PrepareError> {
        Ok(match self {
            Files::Local(folder) => versions_in_folder(folder)?,
            Files::Remote(folder) => versions_in_store(folder)?,
        })
    }

    pub fn read(&self, name: &str) -> Result<Vec<u8>, PrepareError> {
        match self {
            Files::Local(_) => {
                let path = self.path(name);
                read(&path, Kind::Index).map_err(PrepareError::io("read", &path))
            }
            Files::Remote(folder) => Ok(folder.get(name)?.into()),
        }
    }

    pub fn remove(&self, name: &str) -> Result<(), PrepareError> {
        match self {
            Files::Local(_) => {
                let path = self.path(name);
                fs::remove_file(&path).map_err(PrepareError::io("remove", &path))
            }
            Files::Remote(folder) => Ok(folder.delete(name)?),
        }
    }

    /// Whether a file that no version lists is what its name says: an update that did not end wrote it.
    pub fn is_own(&self, name: &str) -> Result<bool, PrepareError> {
        if name.starts_with(VERSIONS_FOLDER) {
            // All of these are versions, or reports on them: one on no version is of an update that did not end.
            return Ok(is_report(name));
        }
        let content = match self {
            Files::Local(_) => ContentHash::of_file(&self.path(name))?,
            Files::Remote(folder) => {
                let failed = PrepareError::io("create a file in", std::env::temp_dir());
                let copy = NamedTempFile::new().map_err(failed)?;
                folder.get_file(name, copy.path())?;
                ContentHash::of_file(copy.path())?
            }
        };
        Ok(hash_of_name(name) == Some(content))
    }

    /// The files directly in a folder of the data set, and their sizes.
    fn list(&self, inside: &str) -> Result<Vec<(String, u64)>, PrepareError> {
        let path = self.path(inside);
        match self {
            Files::Local(_) => {
                let mut found = Vec::new();
                for entry in fs::read_dir(&path).map_err(PrepareError::io("list folder", &path))? {
                    let entry = entry.map_err(PrepareError::io("list folder", &path))?;
                    let metadata = entry.metadata();
                    let metadata = metadata.map_err(PrepareError::io("look at", entry.path()))?;
                    if metadata.is_file() {
                        let name = entry.file_name().to_string_lossy().into_owned();
                        found.push((name, metadata.len()));
                    }
                }
                Ok(found)
            }
            Files::Remote(folder) => {
                let entries = folder.folder(inside).list()?;
                Ok(entries.into_iter().map(|entry| (entry.name, entry.bytes)).collect())
            }
        }
    }
}

/// The files in a folder of the data set that are named by their content, and their sizes.
pub(super) fn named_by_content(
    files: &Files<'_>,
    inside: &str,
) -> Result<BTreeMap<String, u64>, PrepareError> {
    let named = files.list(inside)?.into_iter().map(|(name, bytes)| match inside.is_empty() {
        true => (name, bytes),
        false => (format!("{inside}/{name}"), bytes),
    });
    Ok(named.filter(|(name, _)| hash_of_name(name).is_some()).collect())
}

/// Whether a name below the folder is that of a report on a version.
fn is_report(name: &str) -> bool {
    REPORT_SUFFIXES.iter().any(|suffix| name.ends_with(suffix))
}

/// The hash in a file's name below the folder.
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
        Some((VERSIONS_FOLDER, file)) => {
            let of_report = REPORT_SUFFIXES.iter().find_map(|suffix| file.strip_suffix(suffix));
            of_report.or_else(|| file.strip_suffix(".json"))?
        }
        Some((STATE_FOLDER, file)) => {
            let (digits, suffix) = file.split_once('.')?;
            [PART_SUFFIX, STATE_SUFFIX].contains(&suffix).then_some(digits)?
        }
        Some(_) => return None,
    };
    ContentHash::of_digits(digits)
}
