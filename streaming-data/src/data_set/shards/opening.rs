//! A folder or URL that is opened, before the form of its rows is known.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{
    Listed, OfFirst, Remote, Shards, open, path_of, shards_of,
    unindexed::{Folder, unindexed},
};
use crate::{
    data_set::{
        DataSettings,
        index::{INDEX_FILE, Index, read_version, version_file_of},
    },
    error::DataError,
    hash::ContentHash,
    shard::{RowKind, Shard},
    store::{Location, RemoteFolder},
};

/// See the [module](self).
pub(crate) struct Opened {
    location: Location,
    /// Where it is remote.
    remote: Option<Remote>,
    /// The index, where there is one.
    index: Option<Index>,
}

impl Opened {
    /// Opens a folder, or a path that is a URL.
    ///
    /// # Errors
    /// [`DataError::NotAFolder`], [`DataError::Location`], [`DataError::Store`],
    /// [`DataError::Io`], and defects of the index.
    pub(crate) fn new(path: &Path, settings: &DataSettings) -> Result<Opened, DataError> {
        let location = Location::of_path(path)?;
        let Some(path) = location.local().map(Path::to_owned) else {
            return Opened::of_store(RemoteFolder::open(location, &settings.store)?, settings);
        };
        let found = match fs::metadata(&path) {
            Ok(metadata) if metadata.is_dir() => None,
            Ok(_) => Some("a file"),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Some("nothing"),
            Err(error) => return Err(DataError::io("open data set", &path)(error)),
        };
        if let Some(found) = found {
            return Err(DataError::NotAFolder { path, found });
        }
        let file = path.join(INDEX_FILE);
        let has_index = file.try_exists().map_err(DataError::io("look at index", &file))?;
        let index = if has_index { Some(Index::read(&path)?) } else { None };
        Ok(Opened { location, remote: None, index })
    }

    /// Opens a version in a folder, or in a path that is a URL; none where there is no such version.
    ///
    /// # Errors
    /// As [`Opened::new`].
    pub(crate) fn version(
        path: &Path,
        fingerprint: ContentHash,
        settings: &DataSettings,
    ) -> Result<Option<Opened>, DataError> {
        let location = Location::of_path(path)?;
        if let Some(path) = location.local() {
            let index = read_version(path, fingerprint)?;
            return Ok(index.map(|index| Opened { location, remote: None, index: Some(index) }));
        }
        let folder = RemoteFolder::open(location, &settings.store)?;
        let name = version_file_of(fingerprint);
        let Some(bytes) = folder.get_if_there(&name)? else { return Ok(None) };
        let path = PathBuf::from(folder.location().join(&name).to_string());
        let index = Index::from_bytes(&bytes, &path)?;
        Ok(Some(Opened::with_index(folder, index, settings)))
    }

    /// Opens a folder of a remote store.
    ///
    /// # Errors
    /// [`DataError::Store`], and defects of the index.
    pub(crate) fn of_store(
        folder: RemoteFolder,
        settings: &DataSettings,
    ) -> Result<Opened, DataError> {
        let location = folder.location().clone();
        let index = match folder.get_if_there(INDEX_FILE)? {
            Some(bytes) => {
                let path = PathBuf::from(location.join(INDEX_FILE).to_string());
                Some(Index::from_bytes(&bytes, &path)?)
            }
            None => None,
        };
        let remote = Some(Remote { folder, settings: settings.clone() });
        Ok(Opened { location, remote, index })
    }

    /// A folder of a remote store whose index was read.
    pub(crate) fn with_index(
        folder: RemoteFolder,
        index: Index,
        settings: &DataSettings,
    ) -> Opened {
        let location = folder.location().clone();
        let remote = Some(Remote { folder, settings: settings.clone() });
        Opened { location, remote, index: Some(index) }
    }

    /// The index, where there is one.
    pub(crate) fn index(&self) -> Option<&Index> {
        self.index.as_ref()
    }

    /// The shards that the index lists, whose rows are these. The sizes of local ones are compared.
    ///
    /// # Errors
    /// [`DataError::MissingShard`], [`DataError::ShardBytes`].
    pub(crate) fn indexed(&self, index: &Index, rows: RowKind) -> Result<Shards, DataError> {
        let listed = Listed::of_index(index, self.listed(index)?, rows);
        Ok(Shards::new(listed, self.location.clone(), self.remote.clone()))
    }

    /// As [`Opened::indexed`], where `of_first` learns from the first shard what the rows of all
    /// must be.
    ///
    /// # Errors
    /// As [`Opened::indexed`], and defects of the first shard.
    pub(crate) fn indexed_by_first<T>(
        &self,
        index: &Index,
        of_first: &OfFirst<'_, T>,
    ) -> Result<(Shards, T), DataError> {
        let shards = self.listed(index)?;
        let no_shards = || DataError::NoShards { path: path_of(&self.location) };
        let first = shards.first().ok_or_else(no_shards)?;
        let file = open(first, self.remote.as_ref())?;
        let footer = first.footer_of_any_rows(&file)?;
        let (rows, of_first) = of_first(&footer, &file)?;
        let listed = Listed::of_index(index, shards, rows);
        let shards = Shards::new(listed, self.location.clone(), self.remote.clone());
        Ok((shards.with_first(file, footer), of_first))
    }

    /// The shards of the index.
    fn listed(&self, index: &Index) -> Result<Vec<Shard>, DataError> {
        let shards = shards_of(index, &self.location);
        if self.remote.is_none() {
            shards.iter().try_for_each(Shard::check_size)?;
        }
        Ok(shards)
    }

    /// The shards that are there. `of_first` learns the type of all rows from the first.
    ///
    /// # Errors
    /// [`DataError::NoShards`], and defects of a footer.
    pub(crate) fn unindexed<T>(&self, of_first: &OfFirst<'_, T>) -> Result<(Shards, T), DataError> {
        let folder = match (&self.remote, self.location.local()) {
            (Some(remote), _) => Folder::Remote(&remote.folder),
            (None, path) => Folder::Local(path.unwrap_or(Path::new(""))),
        };
        let (listed, of_first) = unindexed(folder, &self.location, of_first)?;
        Ok((Shards::new(listed, self.location.clone(), self.remote.clone()), of_first))
    }
}
