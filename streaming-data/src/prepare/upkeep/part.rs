//! A part of the state: the records of a shard's documents, and of the documents left out between them.
//!
//! ```text
//! "tidemill"  version (4 bytes)  xxh3-128 of what follows (16)
//! tail: how many tokens, 4 bytes each    records
//! ```
//!
//! The tail holds the tokens that are in no row of the shard. Documents after the last shard that fill no
//! row form a part without a shard. All numbers are little-endian.

use std::{ops::Range, path::Path};

use super::record::{RecordWriter, number};
use crate::{hash::ContentHash, prepare::PrepareError};

/// The version of the state that is written, and the only one that is read.
pub(crate) const STATE_VERSION: u64 = 1;

const MAGIC: &[u8; 8] = b"tidemill";
const HEADER_BYTES: usize = 28;

/// The end of the name of a part.
pub(crate) const PART_SUFFIX: &str = "part";

/// A part that was opened, and whose bytes agree with their hash.
#[derive(Debug)]
pub(crate) struct Part {
    /// Tokens that are in no row.
    pub tail: Vec<u32>,
    bytes: Vec<u8>,
    records: Range<usize>,
}

/// The bytes of a file of the state: a header, then its content.
pub(crate) fn sealed(content: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + content.len());
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&(STATE_VERSION as u32).to_le_bytes());
    bytes.extend_from_slice(&ContentHash::of(content).to_be_bytes());
    bytes.extend_from_slice(content);
    bytes
}

/// The content of a file of the state, without its header; errors name the file as `path`.
///
/// # Errors
/// [`PrepareError::StateVersion`], [`PrepareError::StateDamaged`].
pub(crate) fn unsealed<'a>(bytes: &'a [u8], path: &Path) -> Result<&'a [u8], PrepareError> {
    let too_short = || damaged(path, format!("{} bytes", bytes.len()), "a whole file of the state");
    let (header, content) = bytes.split_at_checked(HEADER_BYTES).ok_or_else(too_short)?;
    if &header[..8] != MAGIC {
        return Err(damaged(path, "another file".to_owned(), "a file of the state"));
    }
    let version = u32::from_le_bytes([header[8], header[9], header[10], header[11]]).into();
    check_version(version, path)?;
    let found = ContentHash::of(content);
    match found.to_be_bytes() == header[12..] {
        true => Ok(content),
        false => Err(damaged(path, format!("hash {found}"), "the hash that its header says")),
    }
}

fn damaged(path: &Path, found: String, expected: &str) -> PrepareError {
    PrepareError::StateDamaged { path: path.to_owned(), found, expected: expected.to_owned() }
}

/// The bytes of a part.
pub(crate) fn part_bytes(tail: &[u32], records: &[u8]) -> Vec<u8> {
    let mut count = RecordWriter::default();
    count.number(tail.len() as u64);
    let mut content = count.take_bytes();
    content.extend(tail.iter().flat_map(|token| token.to_le_bytes()));
    content.extend_from_slice(records);
    sealed(&content)
}

impl Part {
    /// Opens the bytes of a part; `path` is what errors name.
    ///
    /// # Errors
    /// As [`unsealed`].
    pub(crate) fn open(bytes: Vec<u8>, path: &Path) -> Result<Part, PrepareError> {
        let mut unread = unsealed(&bytes, path)?;
        let mut parse = || {
            let count = usize::try_from(number(&mut unread).ok()?).ok()?;
            let (tail, records) = unread.split_at_checked(count.checked_mul(4)?)?;
            let token = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            Some((tail.chunks_exact(4).map(token).collect(), records.len()))
        };
        let no_part = || damaged(path, "another file of the state".to_owned(), "a part of it");
        let (tail, length) = parse().ok_or_else(no_part)?;
        let records = bytes.len() - length..bytes.len();
        Ok(Part { tail, bytes, records })
    }

    /// The bytes of its records.
    pub(crate) fn records(&self) -> &[u8] {
        &self.bytes[self.records.clone()]
    }
}

/// Whether a state of this version can be read.
///
/// # Errors
/// [`PrepareError::StateVersion`].
pub(crate) fn check_version(found: u64, path: &Path) -> Result<(), PrepareError> {
    match found == STATE_VERSION {
        true => Ok(()),
        false => {
            let path = path.to_owned();
            Err(PrepareError::StateVersion { path, found, supported: STATE_VERSION })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_read_back_and_every_change_is_noticed() {
        let path = Path::new("set/state/1.part");
        let bytes = part_bytes(&[7, 1 << 30], b"records");
        let part = Part::open(bytes.clone(), path).unwrap();
        assert_eq!(part.tail, [7, 1 << 30]);
        assert_eq!(part.records(), b"records");
        for at in 0..bytes.len() {
            let mut other = bytes.clone();
            other[at] ^= 4;
            let error = Part::open(other, path).unwrap_err();
            let is_version = matches!(error, PrepareError::StateVersion { .. });
            assert_eq!(is_version, (8..12).contains(&at), "{at}: {error}");
            assert!(error.to_string().contains("set/state/1.part"), "{error}");
            Part::open(bytes[..at].to_vec(), path).unwrap_err();
        }
        let empty = Part::open(part_bytes(&[], b""), path).unwrap();
        assert_eq!((&empty.tail[..], empty.records()), (&[][..], &b""[..]));
    }
}
