//! A folder of Parquet files without an index: their footers are one.

use std::{
    ffi::OsStr,
    fs, io,
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use super::{Listed, OfFirst, path_of};
use crate::{
    data_set::index::{INDEX_FILE, fingerprint},
    error::DataError,
    hash::{ContentHash, ContentHasher},
    shard::{Footer, RowKind, Shard, ShardFile},
    store::{Entry, Location, RemoteFolder, StoreFailure, Version},
};

/// Where the files are.
pub(super) enum Folder<'a> {
    Local(&'a Path),
    Remote(&'a RemoteFolder),
}

/// A shard, by its footer.
struct Found {
    shard: Shard,
    /// Samples and hash that enter the fingerprint.
    identity: (u64, ContentHash),
}

/// Lists the shards and reads their footers. `of_first` learns from the first of them what every
/// row must be.
pub(super) fn unindexed<T>(
    folder: Folder<'_>,
    location: &Location,
    of_first: &OfFirst<'_, T>,
) -> Result<(Listed, T), DataError> {
    let entries = match folder {
        Folder::Local(path) => parquet_files(path)?,
        Folder::Remote(folder) => {
            let mut entries = folder.list().map_err(without_listing)?;
            entries.retain(|entry| entry.name.ends_with(".parquet"));
            entries
        }
    };
    let at_once = match folder {
        Folder::Local(_) => 1,
        Folder::Remote(folder) => folder.settings().requests.get(),
    };
    let no_shards = || DataError::NoShards { path: path_of(location) };
    let first = entries.first().ok_or_else(no_shards)?;
    let (file, footer) = read(&folder, location, first)?;
    let (rows, of_first) = of_first(&footer, &file)?;
    let first = found(location, first, &footer, &rows)?;
    let others = in_parallel(&entries[1..], at_once, |entry| {
        let (_, footer) = read(&folder, location, entry)?;
        found(location, entry, &footer, &rows)
    })?;
    let all: Vec<Found> = std::iter::once(first).chain(others).collect();
    let fingerprint = fingerprint(all.iter().map(|found| found.identity));
    let shards = all.into_iter().map(|found| found.shard).collect();
    Ok((Listed { rows, fingerprint, shards }, of_first))
}

/// Advice for a store that cannot list.
fn without_listing(error: DataError) -> DataError {
    match error {
        DataError::Store { action, url, attempts, source: StoreFailure::Unsupported { said } } => {
            let said = format!(
                "there is no {INDEX_FILE}, and the store lists no files: expected one of them ({said})"
            );
            DataError::Store { action, url, attempts, source: StoreFailure::Unsupported { said } }
        }
        error => error,
    }
}

/// Opens a file and reads its footer.
fn read(
    folder: &Folder<'_>,
    location: &Location,
    entry: &Entry,
) -> Result<(ShardFile, Footer), DataError> {
    let path = path_of(&location.join(&entry.name));
    let file = match folder {
        Folder::Local(_) => ShardFile::open(&path)?,
        Folder::Remote(folder) => {
            let version = Version { bytes: Some(entry.bytes), e_tag: entry.e_tag.clone() };
            ShardFile::of_object(&path, (*folder).clone(), &entry.name, version, entry.bytes, None)
        }
    };
    let footer = Footer::read(&file)?;
    if footer.samples() == 0 {
        return Err(DataError::EmptyShard { path });
    }
    Ok((file, footer))
}

/// A shard whose rows are as they must be.
fn found(
    location: &Location,
    entry: &Entry,
    footer: &Footer,
    rows: &RowKind,
) -> Result<Found, DataError> {
    footer.check_rows(&path_of(&location.join(&entry.name)), rows)?;
    let mut identity = ContentHasher::new();
    identity.update(&footer.file_bytes().to_be_bytes());
    identity.update(&footer.hash().to_be_bytes());
    let identity = (footer.samples(), identity.finish());
    let shard =
        Shard::new(location, entry.name.clone(), footer.samples(), footer.file_bytes(), None)
            .with_footer(Some(footer.entry()))
            .told_by(footer.hash(), entry.e_tag.clone());
    Ok(Found { shard, identity })
}

/// Does the same to all, in order, on some threads; the error of the first that failed.
fn in_parallel<T: Send>(
    entries: &[Entry],
    threads: usize,
    work: impl Fn(&Entry) -> Result<T, DataError> + Sync,
) -> Result<Vec<T>, DataError> {
    if threads <= 1 || entries.len() <= 1 {
        return entries.iter().map(work).collect();
    }
    let (next, failed_at) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX));
    let results: Vec<Mutex<Option<Result<T, DataError>>>> =
        entries.iter().map(|_| Mutex::new(None)).collect();
    thread::scope(|scope| {
        for _ in 0..threads.min(entries.len()) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    // Entries after a failure are ignored.
                    if at >= entries.len() || at > failed_at.load(Ordering::Relaxed) {
                        break;
                    }
                    let result = work(&entries[at]);
                    if result.is_err() {
                        failed_at.fetch_min(at, Ordering::Relaxed);
                    }
                    *results[at].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
                }
            });
        }
    });
    // Every place before the first failure was worked on.
    results
        .into_iter()
        .map_while(|result| result.into_inner().unwrap_or_else(PoisonError::into_inner))
        .collect()
}

/// The Parquet files of a folder in byte order of their names.
fn parquet_files(folder: &Path) -> Result<Vec<Entry>, DataError> {
    let io = |error| DataError::io("list data set", folder)(error);
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension().is_some_and(|extension| extension == "parquet") && path.is_file() {
            let name = path.file_name().and_then(OsStr::to_str).ok_or_else(|| {
                let kind = io::ErrorKind::InvalidFilename;
                DataError::io("use a name that is not UTF-8:", &path)(kind.into())
            })?;
            let looked_at = path.metadata().and_then(|it| Ok((it.len(), it.modified()?)));
            let (bytes, modified) = looked_at.map_err(DataError::io("look at shard", &path))?;
            files.push(Entry { name: name.to_owned(), bytes, modified, e_tag: None });
        }
    }
    files.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(files)
}
