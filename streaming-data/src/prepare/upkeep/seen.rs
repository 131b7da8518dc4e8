//! Looks of inputs when they were read: an input with the same look is not read again.
//!
//! The looks are no part of a data set's content: they only say that a file of this size and time had these
//! documents. So they have a file of their own, which no version names; without it all inputs are read.
//!
//! A file that changed shortly before it was looked at could change once more and keep its time. Such times
//! are not noted, so that the next update reads the file.

use std::{
    collections::HashMap,
    path::Path,
    time::{Duration, SystemTime},
};

use super::{
    part::{sealed, unsealed},
    record::{RecordWriter, number},
};

/// Name of the file of looks, in the folder of the state.
pub(crate) const SEEN_FILE: &str = "seen";

/// File systems tell times in steps of up to two seconds.
const STEP: Duration = Duration::from_secs(2);

/// The size and time of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Look {
    pub bytes: u64,
    /// When it was last changed, in nanoseconds since 1970.
    pub changed: u64,
}

impl Look {
    /// The look of a file, if it tells that the file is unchanged for as long as it is the same; `now` is
    /// not later than the look.
    pub(crate) fn of(bytes: u64, changed: Option<SystemTime>, now: SystemTime) -> Option<Look> {
        let changed = changed.filter(|changed| *changed + STEP <= now)?;
        let since = changed.duration_since(SystemTime::UNIX_EPOCH).ok()?;
        let changed = u64::try_from(since.as_nanos()).ok()?;
        Some(Look { bytes, changed })
    }
}

/// Looks of inputs, and the digests of their documents then.
#[derive(Debug, Default)]
pub(crate) struct Seen(HashMap<Vec<u8>, (Look, u128)>);

impl Seen {
    pub(crate) fn insert(&mut self, path: &[u8], look: Look, digest: u128) {
        self.0.insert(path.to_owned(), (look, digest));
    }

    /// Whether the documents of an input have this digest, as far as its look tells.
    pub(crate) fn tells(&self, path: &[u8], look: Look, digest: u128) -> bool {
        self.0.get(path) == Some(&(look, digest))
    }

    /// Its bytes.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut entries: Vec<_> = self.0.iter().collect();
        entries.sort_unstable_by_key(|(path, _)| *path);
        let mut content = Vec::new();
        for (path, (look, digest)) in entries {
            let mut numbers = RecordWriter::default();
            numbers.number(path.len() as u64);
            content.extend(numbers.take_bytes());
            content.extend_from_slice(path);
            numbers.number(look.bytes);
            numbers.number(look.changed);
            content.extend(numbers.take_bytes());
            content.extend_from_slice(&digest.to_le_bytes());
        }
        sealed(&content)
    }

    /// The looks in the bytes; none where the bytes are damaged or of another version.
    pub(crate) fn from_bytes(bytes: &[u8], path: &Path) -> Seen {
        let entries = unsealed(bytes, path).map(entries);
        match entries {
            Ok(Some(entries)) => Seen(entries),
            Ok(None) => Seen::default(),
            Err(error) => {
                tracing::warn!("all inputs are read again: {error}");
                Seen::default()
            }
        }
    }
}

fn entries(mut content: &[u8]) -> Option<HashMap<Vec<u8>, (Look, u128)>> {
    let mut entries = HashMap::new();
    while !content.is_empty() {
        let length = usize::try_from(number(&mut content).ok()?).ok()?;
        let (path, rest) = content.split_at_checked(length)?;
        content = rest;
        let (bytes, changed) = (number(&mut content).ok()?, number(&mut content).ok()?);
        let (digest, rest) = content.split_first_chunk()?;
        content = rest;
        entries.insert(path.to_owned(), (Look { bytes, changed }, u128::from_le_bytes(*digest)));
    }
    Some(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_are_read_back_and_recent_ones_are_none() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let look = Look::of(7, Some(now - STEP), now).unwrap();
        assert_eq!(look.changed, 1_699_999_998_000_000_000);
        assert_eq!(Look::of(7, Some(now - STEP + Duration::from_nanos(1)), now), None);
        assert_eq!(Look::of(7, None, now), None);
        let mut seen = Seen::default();
        for at in 0..300_u16 {
            let changed = look.changed + u64::from(at);
            seen.insert(&at.to_le_bytes(), Look { changed, ..look }, u128::from(at));
        }
        let (bytes, path) = (seen.to_bytes(), Path::new("seen"));
        let read = Seen::from_bytes(&bytes, path);
        assert_eq!(read.0, seen.0);
        assert!(read.tells(&[0, 0], look, 0) && !read.tells(&[0, 0], look, 1));
        assert!(!read.tells(&[1, 0], look, 1) && !read.tells(b"other", look, 0));
        for at in [3, 9, 20, 40, bytes.len() - 1] {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert!(Seen::from_bytes(&other, path).0.is_empty());
            assert!(Seen::from_bytes(&bytes[..at], path).0.is_empty());
        }
    }
}
