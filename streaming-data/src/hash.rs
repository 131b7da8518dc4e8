//! Content hashes: XXH3 with 128 bits, written `xxh3-128:<32 hexadecimal digits>`.
//!
//! They detect damage and distinguish data sets; they are no defence against a forger. The
//! text begins with the algorithm, so that a later one can be distinguished from this one.

use std::{fmt, io::Read, path::Path, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::error::DataError;

/// Name of the algorithm, as an index has it.
pub const HASH_ALGORITHM: &str = "xxh3-128";

/// How much of a file is read at once when it is hashed.
const BLOCK_BYTES: usize = 1 << 20;

/// A hash of some content, and an algorithm's name in its text form.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContentHash(u128);

impl ContentHash {
    /// Hash of the bytes.
    pub fn of(bytes: &[u8]) -> ContentHash {
        ContentHash(xxh3_128(bytes))
    }

    /// Hash of a whole file, read in blocks.
    ///
    /// # Errors
    /// [`DataError::Io`] when the file cannot be opened or read.
    pub fn of_file(path: &Path) -> Result<ContentHash, DataError> {
        let mut file = tidemill_files::open(path).map_err(DataError::io("open", path))?;
        let mut hasher = ContentHasher::new();
        let mut block = vec![0_u8; BLOCK_BYTES];
        loop {
            match file.read(&mut block).map_err(DataError::io("read", path))? {
                0 => return Ok(hasher.finish()),
                length => hasher.update(&block[..length]),
            }
        }
    }

    /// A hash that was kept as a number.
    pub(crate) fn of_bits(bits: u128) -> ContentHash {
        ContentHash(bits)
    }

    /// The hash with these hexadecimal digits, if they are one.
    pub(crate) fn of_digits(digits: &str) -> Option<ContentHash> {
        let are_digits = digits.len() == 32 && digits.bytes().all(|d| d.is_ascii_hexdigit());
        u128::from_str_radix(digits, 16).ok().filter(|_| are_digits).map(ContentHash)
    }

    /// The 32 hexadecimal digits of the hash.
    pub(crate) fn digits(self) -> String {
        format!("{:032x}", self.0)
    }

    /// The 16 bytes of the hash, most significant first.
    pub fn to_be_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }
}

impl fmt::Display for ContentHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{HASH_ALGORITHM}:{}", self.digits())
    }
}

impl fmt::Debug for ContentHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

/// The text is not a content hash.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("found hash {found:?}, expected {HASH_ALGORITHM}: and 32 lower case hexadecimal digits")]
pub struct ParseHashError {
    /// The text.
    pub found: String,
}

impl FromStr for ContentHash {
    type Err = ParseHashError;

    fn from_str(text: &str) -> Result<ContentHash, ParseHashError> {
        let digits = text.strip_prefix(HASH_ALGORITHM).and_then(|rest| rest.strip_prefix(':'));
        digits
            .and_then(ContentHash::of_digits)
            .ok_or_else(|| ParseHashError { found: text.to_owned() })
    }
}

impl Serialize for ContentHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ContentHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<ContentHash, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// Hashes content that arrives in pieces: the hash is that of their concatenation.
#[derive(Clone, Default)]
pub struct ContentHasher(Xxh3);

impl ContentHasher {
    /// Begins with no content.
    pub fn new() -> ContentHasher {
        ContentHasher::default()
    }

    /// Appends bytes to the content.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Hash of all content so far.
    pub fn finish(&self) -> ContentHash {
        ContentHash(self.0.digest128())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_form_is_read_back_and_names_its_algorithm() {
        // The reference value of the empty input, from the test vectors of xxHash.
        let empty = ContentHash::of(b"");
        assert_eq!(empty.to_string(), "xxh3-128:99aa06d3014798d86001c324468d497f");
        assert_eq!(empty.to_string().parse(), Ok(empty));
        for wrong in
            ["", "99aa06d3014798d86001c324468d497f", "xxh3-128:", "xxh3-128:+9", "sha256:00"]
        {
            assert!(wrong.parse::<ContentHash>().is_err(), "{wrong:?} must not parse");
        }
    }

    #[test]
    fn pieces_hash_like_the_whole() {
        let content: Vec<u8> = (0..3000_u32).map(|i| (i * 7 % 251) as u8).collect();
        let mut hasher = ContentHasher::new();
        content.chunks(17).for_each(|piece| hasher.update(piece));
        assert_eq!(hasher.finish(), ContentHash::of(&content));
    }
}
