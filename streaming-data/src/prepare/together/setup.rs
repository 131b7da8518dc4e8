//! The first message of process 0 to the others: how documents are read, chosen and tokenized.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{
    order::{Order, give_order},
    peers::Peers,
};
use crate::{
    hash::ContentHash,
    prepare::{
        Dedup, DedupSettings, PrepareError, PrepareSettings, Reporting, Strictness, Tokenize,
        choose::{exclude::Exclusions, filter::FilterSet},
        input::{Contents, find::path_bytes},
        upkeep::tokenizer_identity,
    },
};

/// See the [module](self).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub tokenizer: ContentHash,
    pub filters: Vec<FilterSet>,
    pub strictness: Strictness,
    pub text_key: Option<String>,
    pub dedup: Dedup,
    pub dedup_memory_bytes: u64,
    pub reporting: Reporting,
    /// The list of documents to leave out, the folder in which its paths begin, and its identity.
    exclude: Option<(Vec<u8>, Option<Vec<u8>>, ContentHash)>,
    /// Tokens of a row; none of documents, and within it none where no row is known.
    row_tokens: Option<Option<usize>>,
    pub vocab_size: Option<u32>,
    pub seq_len: usize,
}

impl Setup {
    /// The message for these settings.
    pub(crate) fn new(
        settings: &PrepareSettings,
        tokenizer: &dyn Tokenize,
        (exclusions, base): (&Exclusions, Option<&Path>),
        (contents, vocab_size, seq_len): (Contents, Option<u32>, usize),
    ) -> Setup {
        let identity = exclusions.identity().map(|(hash, _)| hash);
        Setup {
            tokenizer: tokenizer_identity(tokenizer),
            filters: settings.filters.sets().to_vec(),
            strictness: settings.strictness,
            text_key: settings.text_key.clone(),
            dedup: settings.dedup.dedup,
            dedup_memory_bytes: settings.dedup.memory_bytes,
            reporting: settings.reporting,
            exclude: settings.exclude.clone().zip(identity).map(|(path, identity)| {
                let bytes = |path: &Path| path_to_bytes(path).to_vec();
                (bytes(&path), base.map(bytes), identity)
            }),
            row_tokens: match contents {
                Contents::Documents => None,
                Contents::Samples { row_tokens } => Some(row_tokens),
            },
            vocab_size,
            seq_len,
        }
    }

    pub(super) fn contents(&self) -> Contents {
        match self.row_tokens {
            None => Contents::Documents,
            Some(row_tokens) => Contents::Samples { row_tokens },
        }
    }

    pub(super) fn dedup_settings(&self) -> DedupSettings {
        DedupSettings { dedup: self.dedup, memory_bytes: self.dedup_memory_bytes }
    }

    /// The list of documents to leave out, opened by process `process`.
    ///
    /// # Errors
    /// [`PrepareError::OtherProcess`] for another list, and errors of the operating system.
    pub(super) fn open_exclusions(&self, process: usize) -> Result<Exclusions, PrepareError> {
        let Some((path, base, expected)) = &self.exclude else { return Ok(Exclusions::default()) };
        let base = base.as_deref().map(path_of_bytes);
        let exclusions = Exclusions::open(&path_of_bytes(path), base.as_deref())?;
        let found = exclusions.identity().map(|(hash, _)| hash);
        match found {
            Some(found) if found != *expected => {
                Err(other(process, "a list of documents to leave out with", found, *expected))
            }
            _ => Ok(exclusions),
        }
    }

    /// Whether process `process` has the tokenizer that process 0 has.
    ///
    /// # Errors
    /// [`PrepareError::OtherProcess`].
    pub(super) fn check_tokenizer(
        &self,
        tokenizer: &dyn Tokenize,
        process: usize,
    ) -> Result<(), PrepareError> {
        let found = tokenizer_identity(tokenizer);
        match found == self.tokenizer {
            true => Ok(()),
            false => Err(other(process, "a tokenizer with", found, self.tokenizer)),
        }
    }
}

fn other(
    process: usize,
    what: &'static str,
    found: ContentHash,
    expected: ContentHash,
) -> PrepareError {
    PrepareError::OtherProcess { process, what, found, expected }
}

/// Sends the setup to all other processes, if there are any.
///
/// # Errors
/// [`PrepareError::Parted`].
pub(crate) fn greet(
    peers: Option<&dyn Peers>,
    setup: impl FnOnce() -> Setup,
) -> Result<(), PrepareError> {
    let Some(peers) = peers else { return Ok(()) };
    give_order(peers, &Order::setup(&setup()), &mut || Ok(()))
}

/// The bytes of a path in a message.
pub(super) fn path_to_bytes(path: &Path) -> &[u8] {
    path_bytes(path)
}

/// The path of such bytes, on a machine that names files in the same way.
pub(super) fn path_of_bytes(bytes: &[u8]) -> PathBuf {
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt;
        std::ffi::OsStr::from_bytes(bytes).into()
    }
    #[cfg(not(unix))]
    {
        String::from_utf8_lossy(bytes).into_owned().into()
    }
}
