//! One shard: a Parquet file whose rows are samples.
//!
//! A [`Shard`] holds all that must be known before any sample is read (the place of the file, its number of
//! samples, its expected hash), and costs no I/O. The rest is read when a sample is asked for: the
//! [`Footer`] once, then one row group at a time.

use std::{
    any::Any,
    fs, io,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use arrow_schema::SchemaRef;
use parquet::errors::ParquetError;

use crate::{
    cache::disk::Key,
    error::DataError,
    hash::ContentHash,
    store::{Location, Origin, RemoteFolder, StoreFailure, Version},
};

mod chunk;
mod columns;
mod decode;
mod file;
mod footer;
mod group_hashes;
mod pages;
mod tokens;

pub(crate) use columns::{Rows, SliceReader};
pub(crate) use decode::Pieces;
pub(crate) use file::{FETCHES, ShardFile};
pub(crate) use footer::{Footer, footer_at_end};
pub use footer::{FooterEntry, TOKENS_COLUMN};
pub(crate) use group_hashes::{CREATED_BY, GROUP_HASHES_KEY, GroupHashes};
pub(crate) use pages::{HEADER_BYTES, MAX_HEADER_BYTES, PageContent, PageHeader, Scratch};
pub(crate) use tokens::DecodedTokens;

/// A shard of a data set.
#[derive(Debug)]
pub struct Shard {
    /// Name below the data set's folder, with `/` between folders.
    name: String,
    path: PathBuf,
    samples: u64,
    version: Version,
    bytes: u64,
    hash: Option<ContentHash>,
    /// The footer, as the index says, or as it was on opening.
    footer: Option<FooterEntry>,
    /// Hash of the metadata of the footer that was read on opening, where the whole has none.
    footer_hash: Option<ContentHash>,
    /// Whether the file was found to have the hash; readers wait for each other at this lock
    /// rather than hash a file twice.
    is_verified: Mutex<bool>,
}

/// The form of the rows of a data set of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowRule {
    /// `seq_len + 1`.
    pub(crate) row_tokens: usize,
    /// The vocabulary, where it is known.
    pub(crate) vocab_size: Option<u32>,
}

/// The form of the rows of all shards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RowKind {
    /// Rows of this many tokens.
    Tokens(RowRule),
    /// Rows that have these columns, of these types, among others.
    Columns(SchemaRef),
}

impl RowRule {
    /// The largest token.
    fn last_token(self) -> u32 {
        self.vocab_size.map_or(u32::MAX, |size| size.saturating_sub(1))
    }
}

impl Shard {
    pub(crate) fn new(
        folder: &Location,
        name: String,
        samples: u64,
        bytes: u64,
        hash: Option<ContentHash>,
    ) -> Shard {
        let path = match folder.local() {
            Some(folder) => folder.join(&name),
            None => folder.join(&name).to_string().into(),
        };
        Shard {
            name,
            path,
            samples,
            version: Version { bytes: Some(bytes), e_tag: None },
            bytes,
            hash,
            footer: None,
            footer_hash: None,
            is_verified: Mutex::new(false),
        }
    }

    /// The same shard, whose footer is known.
    pub(crate) fn with_footer(self, footer: Option<FooterEntry>) -> Shard {
        Shard { footer, ..self }
    }

    /// The same shard, with an etag and the hash of its footer, which differ for a later shard where no index tells.
    pub(crate) fn told_by(self, footer_hash: ContentHash, e_tag: Option<String>) -> Shard {
        let version = Version { e_tag, ..self.version };
        Shard { version, footer_hash: Some(footer_hash), ..self }
    }

    /// Name below the data set's folder, with `/` between folders.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The version of the object, which differs for a later object of the same name.
    pub(crate) fn version(&self) -> &Version {
        &self.version
    }

    /// The remote shard, to be read by ranges.
    pub(crate) fn ranges(&self, folder: &RemoteFolder) -> ShardFile {
        ShardFile::of_object(
            &self.path,
            folder.clone(),
            &self.name,
            self.version.clone(),
            self.bytes,
            self.footer.map(|footer| footer.bytes),
        )
    }

    /// Where the file is; for a remote one, the text of its URL.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Rows of the file.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Size of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Hash of the file, where an index states it.
    pub fn hash(&self) -> Option<ContentHash> {
        self.hash
    }

    /// Compares the file's size with the one known, without opening it.
    pub(crate) fn check_size(&self) -> Result<(), DataError> {
        let found = match fs::metadata(&self.path) {
            Ok(metadata) if metadata.is_file() => metadata.len(),
            Ok(_) => return Err(DataError::MissingShard { path: self.path.clone() }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(DataError::MissingShard { path: self.path.clone() });
            }
            Err(error) => return Err(DataError::io("look at shard", &self.path)(error)),
        };
        if found != self.bytes {
            return Err(self.wrong_bytes(found));
        }
        Ok(())
    }

    /// Opens the local file and compares its size. Its content is verified as its footer is read.
    ///
    /// # Errors
    /// [`DataError::ShardBytes`] for a file that is not the one which was indexed,
    /// [`DataError::MissingShard`] and [`DataError::Io`] when it cannot be read.
    pub(crate) fn open_local(&self) -> Result<ShardFile, DataError> {
        let file = tidemill_files::open(&self.path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => DataError::MissingShard { path: self.path.clone() },
            _ => DataError::io("open shard", &self.path)(error),
        })?;
        let file = ShardFile::of_file(&self.path, file)?;
        if file.bytes() != self.bytes {
            return Err(self.wrong_bytes(file.bytes()));
        }
        Ok(file)
    }

    /// Hashes a local file and compares, once, where its hash is known.
    fn verify_whole(&self, file: &ShardFile) -> Result<(), DataError> {
        let Some(expected) = self.hash.filter(|_| file.is_local() && !file.is_verified()) else {
            return Ok(());
        };
        let mut is_verified = self.is_verified.lock().unwrap_or_else(PoisonError::into_inner);
        if !*is_verified {
            let found = file.hash()?;
            if found != expected {
                return Err(self.wrong_hash(found));
            }
            *is_verified = true;
        }
        Ok(())
    }

    /// Its identity in a cache.
    pub(crate) fn key(&self, origin: Origin) -> Key {
        match self.hash {
            Some(hash) => Key::of_content(origin, hash, self.bytes),
            None => {
                let (url, e_tag) = (self.path.display().to_string(), self.version.e_tag.as_deref());
                Key::of_place(origin, &url, self.footer_hash, e_tag, self.bytes)
            }
        }
    }

    /// The error of the shard for an error of its store.
    pub(crate) fn error_of(&self, error: DataError) -> DataError {
        match error {
            DataError::Store { source: StoreFailure::Size { found, .. }, .. } => {
                self.wrong_bytes(found)
            }
            DataError::Store { source: StoreFailure::NotFound { .. }, .. }
                if self.hash.is_some() =>
            {
                DataError::MissingShard { path: self.path.clone() }
            }
            error => error,
        }
    }

    /// The content has a hash that is not the one known.
    pub(crate) fn wrong_hash(&self, found: ContentHash) -> DataError {
        let expected = self.hash.unwrap_or(found);
        DataError::ShardHash { path: self.path.clone(), expected, found }
    }

    /// Hashes the file of a local data set and compares, once; does nothing more than to look at
    /// its size where no hash is known. Remote shards are verified when they are fetched.
    ///
    /// # Errors
    /// [`DataError::ShardBytes`] and [`DataError::ShardHash`] for a file that is not the one which
    /// was indexed, [`DataError::MissingShard`] and [`DataError::Io`] when it cannot be read.
    pub fn verify(&self) -> Result<(), DataError> {
        self.verify_whole(&self.open_local()?)
    }

    pub(crate) fn wrong_bytes(&self, found: u64) -> DataError {
        DataError::ShardBytes { path: self.path.clone(), expected: self.bytes, found }
    }

    /// Reads the footer and checks it against the known facts of the shard, and the types of its columns against
    /// the schema of rows.
    pub(crate) fn footer(&self, file: &ShardFile, rows: &RowKind) -> Result<Footer, DataError> {
        let footer = self.footer_of_any_rows(file)?;
        footer.check_rows(&self.path, rows)?;
        Ok(footer)
    }

    /// Reads the footer and checks it against the known facts of the shard. A footer in a store is fetched
    /// again where its hash is not the one known. A local file is verified as a whole where nothing
    /// will say which row groups it should have.
    pub(crate) fn footer_of_any_rows(&self, file: &ShardFile) -> Result<Footer, DataError> {
        let footer = match self.footer {
            Some(known) => {
                let range = file.bytes().saturating_sub(known.bytes)..file.bytes();
                let bytes = file.read_verified(range, known.hash)?;
                Footer::of_bytes(
                    file,
                    bytes.map_err(|found| self.wrong_footer(known.hash, found))?,
                )?
            }
            None => {
                // A footer that nothing describes is not believed before the whole is.
                self.verify_whole(file)?;
                Footer::read(file)?
            }
        };
        if !footer.has_group_hashes() {
            self.verify_whole(file)?;
        }
        if footer.samples() != self.samples {
            return Err(DataError::ShardSamples {
                path: self.path.clone(),
                expected: self.samples,
                found: footer.samples(),
            });
        }
        Ok(footer)
    }

    /// Verifies a whole download by its footer and row groups, where no index states a hash of the whole;
    /// answers the defect, if there is one.
    pub(crate) fn check_parts(&self, file: &ShardFile) -> Result<Result<(), DataError>, DataError> {
        let footer = self.footer_of_any_rows(file);
        match footer.and_then(|footer| footer.verify_groups(file)) {
            Ok(()) => Ok(Ok(())),
            Err(
                wrong @ (DataError::ShardFooter { .. }
                | DataError::ShardFormat { .. }
                | DataError::ShardSamples { .. }
                | DataError::RowGroupHash { .. }),
            ) => Ok(Err(wrong)),
            Err(error) => Err(error),
        }
    }

    /// The footer has a hash that is not the one known.
    fn wrong_footer(&self, expected: ContentHash, found: ContentHash) -> DataError {
        let path = self.path.clone();
        match self.hash {
            Some(_) => DataError::FooterHash { path, expected, found },
            None => DataError::ShardFooter { path, expected, found },
        }
    }
}

/// Runs code of the Parquet reader, which may panic on a damaged file.
fn guarded<T>(
    action: &'static str,
    path: &Path,
    parse: impl FnOnce() -> Result<T, ParquetError>,
) -> Result<T, DataError> {
    // Values that `parse` was changing when it panicked are dropped with it.
    let result = catch_unwind(AssertUnwindSafe(parse)).unwrap_or_else(|panic| {
        Err(ParquetError::General(format!("the Parquet reader panicked: {}", panic_text(&*panic))))
    });
    result.map_err(|source| DataError::ShardFormat { action, path: path.to_owned(), source })
}

/// The message of a panic.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}
