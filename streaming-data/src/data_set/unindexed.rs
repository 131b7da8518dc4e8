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

use super::{Content, FOOTERS_BYTES, OPEN_FILES, PIECES_BYTES, path_of};
use crate::{
    cache::BoundedCache,
    error::DataError,
    hash::{ContentHash, ContentHasher},
    index::{INDEX_FILE, fingerprint},
    shard::{Footer, RowRule, Shard, ShardFile},
    store::{Entry, Location, RemoteFolder, StoreFailure, Version},
};

/// Where the files are.
pub(super) enum Folder<'a> {
    Local(&'a Path),
    Remote(&'a RemoteFolder),
}

/// A shard, by what its footer says.
struct Found {
    shard: Shard,
    rule: RowRule,
    /// Samples and hash that enter the fingerprint.
    identity: (u64, ContentHash),
}

pub(super) fn open(folder: Folder<'_>, location: Location) -> Result<Content, DataError> {
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
    let no_shards = || DataError::NoShards { path: path_of(&location) };
    // The first file says what the others must be.
    let first = entries.first().ok_or_else(no_shards)?;
    let first = read(&folder, &location, first, None)?;
    let rule = first.rule;
    let others =
        in_parallel(&entries[1..], at_once, |entry| read(&folder, &location, entry, Some(rule)))?;
    let all: Vec<Found> = std::iter::once(first).chain(others).collect();
    Ok(Content {
        path: path_of(&location),
        location,
        remote: None,
        row_tokens: rule.row_tokens,
        vocab_size: rule.vocab_size,
        bos_token_id: None,
        eos_token_id: None,
        pad_token_id: None,
        tokenizer_file: None,
        fingerprint: fingerprint(all.iter().map(|found| found.identity)),
        samples: all.iter().map(|found| found.shard.samples()).sum(),
        shards: all.into_iter().map(|found| found.shard).collect(),
        footers: BoundedCache::new(FOOTERS_BYTES),
        pieces: BoundedCache::new(PIECES_BYTES),
        files: BoundedCache::new(OPEN_FILES),
    })
}

/// Says what would help where a store cannot list.
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

/// Reads a footer. `rule` is that of the data set, once it is known.
fn read(
    folder: &Folder<'_>,
    location: &Location,
    entry: &Entry,
    rule: Option<RowRule>,
) -> Result<Found, DataError> {
    let path = path_of(&location.join(&entry.name));
    let file = match folder {
        Folder::Local(_) => ShardFile::open(&path)?,
        Folder::Remote(folder) => {
            let version = Version { bytes: Some(entry.bytes), e_tag: entry.e_tag.clone() };
            ShardFile::of_object(&path, (*folder).clone(), &entry.name, version, entry.bytes)
        }
    };
    let footer = Footer::read(&file)?;
    if footer.samples() == 0 {
        return Err(DataError::EmptyShard { path });
    }
    let rule = match rule {
        None => first_rule(&footer, &file)?,
        Some(rule) => {
            footer.check_column(&path, rule)?;
            rule
        }
    };
    let mut identity = ContentHasher::new();
    identity.update(&footer.file_bytes().to_be_bytes());
    identity.update(&footer.hash().to_be_bytes());
    let identity = (footer.samples(), identity.finish());
    let shard =
        Shard::new(location, entry.name.clone(), footer.samples(), footer.file_bytes(), None)
            .told_by(footer.hash(), entry.e_tag.clone());
    Ok(Found { shard, rule, identity })
}

/// The rule that the first shard of a data set without an index sets for all.
fn first_rule(footer: &Footer, file: &ShardFile) -> Result<RowRule, DataError> {
    let row_tokens = footer.first_row_tokens(file)?;
    if row_tokens < 2 {
        return Err(DataError::RowLength {
            path: file.path().to_owned(),
            row: 0,
            expected: 2,
            found: row_tokens,
        });
    }
    Ok(RowRule { row_tokens, vocab_size: None })
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
                    // What stands behind a failure is not looked at.
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
            let bytes = path.metadata().map_err(DataError::io("look at shard", &path))?.len();
            files.push(Entry { name: name.to_owned(), bytes, e_tag: None });
        }
    }
    files.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(files)
}
