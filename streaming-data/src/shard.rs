//! One shard: a Parquet file whose rows are samples.
//!
//! What must be known before any sample is read (where the file is, how many samples it has, what
//! it should hash to) is here and costs no I/O. The rest is read when a sample is asked for: the
//! [`Footer`] once, then one row group at a time.

use std::{
    any::Any,
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use parquet::errors::ParquetError;

use crate::{error::DataError, hash::ContentHash};

mod chunk;
mod decode;
mod footer;
mod pages;
mod tokens;

pub(crate) use decode::Pieces;
pub(crate) use footer::Footer;
pub(crate) use pages::Scratch;
pub(crate) use tokens::DecodedTokens;

/// A shard of a data set.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    samples: u64,
    bytes: u64,
    hash: Option<ContentHash>,
    /// Whether the file was found to have the hash; readers wait for each other at this lock
    /// rather than hash a file twice.
    is_verified: Mutex<bool>,
}

/// What every row of a data set must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowRule {
    /// `seq_len + 1`.
    pub(crate) row_tokens: usize,
    /// The vocabulary, where it is known.
    pub(crate) vocab_size: Option<u32>,
}

impl RowRule {
    /// The largest token.
    fn last_token(self) -> u32 {
        self.vocab_size.map_or(u32::MAX, |size| size.saturating_sub(1))
    }
}

impl Shard {
    pub(crate) fn new(path: PathBuf, samples: u64, bytes: u64, hash: Option<ContentHash>) -> Shard {
        Shard { path, samples, bytes, hash, is_verified: Mutex::new(false) }
    }

    /// Where the file is.
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
            let (path, expected) = (self.path.clone(), self.bytes);
            return Err(DataError::ShardBytes { path, expected, found });
        }
        Ok(())
    }

    /// Hashes the file and compares, once; does nothing where no hash is known.
    ///
    /// # Errors
    /// [`DataError::ShardBytes`] and [`DataError::ShardHash`] for a file that is not the one which
    /// was indexed, [`DataError::MissingShard`] and [`DataError::Io`] when it cannot be read.
    pub fn verify(&self) -> Result<(), DataError> {
        let Some(expected) = self.hash else { return Ok(()) };
        let mut is_verified = self.is_verified.lock().unwrap_or_else(PoisonError::into_inner);
        if !*is_verified {
            self.check_size()?;
            let found = ContentHash::of_file(&self.path)?;
            if found != expected {
                return Err(DataError::ShardHash { path: self.path.clone(), expected, found });
            }
            *is_verified = true;
        }
        Ok(())
    }

    /// Verifies the file, then reads its footer and checks it against what is known.
    pub(crate) fn open(&self, rule: RowRule) -> Result<Footer, DataError> {
        self.verify()?;
        let footer = Footer::read(&self.path)?;
        footer.check_column(&self.path, rule)?;
        if footer.samples() != self.samples {
            return Err(DataError::ShardSamples {
                path: self.path.clone(),
                expected: self.samples,
                found: footer.samples(),
            });
        }
        Ok(footer)
    }
}

/// Runs code of the Parquet reader, which may panic on a damaged file.
fn guarded<T>(
    action: &'static str,
    path: &Path,
    parse: impl FnOnce() -> Result<T, ParquetError>,
) -> Result<T, DataError> {
    // What `parse` was changing when it panicked is dropped with it.
    let result = catch_unwind(AssertUnwindSafe(parse)).unwrap_or_else(|panic| {
        Err(ParquetError::General(format!("the Parquet reader panicked: {}", panic_text(&*panic))))
    });
    result.map_err(|source| DataError::ShardFormat { action, path: path.to_owned(), source })
}

/// What a panic said.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}
