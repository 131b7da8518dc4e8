//! Lists of documents that are left out, because their authors want it say.
//!
//! A list is a text file with a key a line; empty lines and lines that begin with `#` are ignored. A key is
//!
//! - the path of an input, as it is reached: all documents in it;
//! - such a path, a tab, and the number of a line (from 1), row or sample (from 0), as messages have it;
//! - `xxh3-128:` and 32 digits: every document of this text, in any input and at any place.
//!
//! Keys that match no document are reported: a list without effect must not look as if it had one.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use tidemill_files::{Kind, read};

use crate::prepare::{Place, input::find::path_bytes};
use crate::{
    hash::{ContentHash, ContentHasher},
    prepare::PrepareError,
};

/// A list of documents, opened.
#[derive(Debug, Default)]
pub(crate) struct Exclusions {
    paths: HashMap<PathBuf, Excluded>,
    contents: HashMap<ContentHash, AtomicBool>,
    /// Hash of the keys in byte order, and how many there are.
    identity: Option<(ContentHash, u64)>,
}

/// The excluded documents of an input.
#[derive(Debug, Default)]
struct Excluded {
    whole: Option<AtomicBool>,
    places: HashMap<u64, AtomicBool>,
}

/// Characters of a key between a path and a place.
const TAB: char = '\t';

impl Exclusions {
    /// Reads the list; paths in it begin in the folder `base`, where there is one.
    ///
    /// # Errors
    /// An error of the operating system, or [`PrepareError::ExclusionKey`] for a line that is no key.
    pub(crate) fn open(path: &Path, base: Option<&Path>) -> Result<Exclusions, PrepareError> {
        let reached = |input: &str| match base {
            Some(base) => base.join(input.strip_prefix("./").unwrap_or(input)),
            None => input.into(),
        };
        let failed = PrepareError::io("read list of documents", path);
        let bytes = read(path, Kind::Config).map_err(failed)?;
        let mut exclusions = Exclusions::default();
        let mut keys = Vec::new();
        for (at, line) in bytes.split(|&byte| byte == b'\n').enumerate() {
            let wrong = |found: &str, expected| PrepareError::ExclusionKey {
                path: path.to_owned(),
                line: at + 1,
                found: found.to_owned(),
                expected,
            };
            let line = std::str::from_utf8(line.strip_suffix(b"\r").unwrap_or(line))
                .map_err(|_| wrong("bytes that are not UTF-8", "a path or hash in UTF-8"))?;
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            keys.push(line);
            if line.starts_with("xxh3-128:") {
                let hash = line
                    .parse()
                    .map_err(|_| wrong(line, "xxh3-128: and 32 lower case hexadecimal digits"))?;
                exclusions.contents.insert(hash, AtomicBool::new(false));
                continue;
            }
            match line.rsplit_once(TAB) {
                None => {
                    let whole = &mut exclusions.paths.entry(reached(line)).or_default().whole;
                    *whole = Some(AtomicBool::new(false));
                }
                Some((input, place)) => {
                    let expected = "the number of a line, row or sample behind the tab";
                    let place = place.parse().map_err(|_| wrong(line, expected))?;
                    let places = &mut exclusions.paths.entry(reached(input)).or_default().places;
                    places.insert(place, AtomicBool::new(false));
                }
            }
        }
        keys.sort_unstable();
        keys.dedup();
        let mut hasher = ContentHasher::new();
        for key in &keys {
            hasher.update(key.as_bytes());
            hasher.update(b"\n");
        }
        exclusions.identity = Some((hasher.finish(), keys.len() as u64));
        Ok(exclusions)
    }

    /// Whether a document is left out.
    pub(crate) fn exclude(&self, path: &Path, place: Option<Place>, text: &str) -> bool {
        self.exclude_hashed(path, place.map(Place::number), || ContentHash::of(text.as_bytes()))
    }

    /// As [`Exclusions::exclude`], for a text whose hash is known.
    pub(crate) fn exclude_hashed(
        &self,
        path: &Path,
        place: Option<u64>,
        hash: impl FnOnce() -> ContentHash,
    ) -> bool {
        if self.paths.is_empty() && self.contents.is_empty() {
            return false;
        }
        // Each of its keys is found, not only the first.
        let mut is_excluded = false;
        let mut found = |flag: Option<&AtomicBool>| {
            if let Some(flag) = flag {
                flag.store(true, Ordering::Relaxed);
                is_excluded = true;
            }
        };
        if let Some(excluded) = self.paths.get(path) {
            found(excluded.whole.as_ref());
            found(place.and_then(|place| excluded.places.get(&place)));
        }
        if !self.contents.is_empty() {
            found(self.contents.get(&hash()));
        }
        is_excluded
    }

    /// The keys that no document had, in byte order.
    pub(crate) fn unused(&self) -> Vec<String> {
        let is_unused = |flag: &AtomicBool| !flag.load(Ordering::Relaxed);
        let mut unused = Vec::new();
        for (path, excluded) in &self.paths {
            let path = String::from_utf8_lossy(path_bytes(path));
            if excluded.whole.as_ref().is_some_and(is_unused) {
                unused.push(path.clone().into_owned());
            }
            let places = excluded.places.iter().filter(|(_, flag)| is_unused(flag));
            unused.extend(places.map(|(place, _)| format!("{path}{TAB}{place}")));
        }
        let contents = self.contents.iter().filter(|(_, flag)| is_unused(flag));
        unused.extend(contents.map(|(hash, _)| hash.to_string()));
        unused.sort_unstable();
        unused
    }

    /// All flags, in an order that depends on the keys alone.
    fn flags(&self) -> Vec<&AtomicBool> {
        let mut paths: Vec<_> = self.paths.iter().collect();
        paths.sort_unstable_by_key(|(path, _)| *path);
        let mut flags = Vec::new();
        for (_, excluded) in paths {
            flags.extend(&excluded.whole);
            let mut places: Vec<_> = excluded.places.iter().collect();
            places.sort_unstable_by_key(|(place, _)| *place);
            flags.extend(places.into_iter().map(|(_, flag)| flag));
        }
        let mut contents: Vec<_> = self.contents.iter().collect();
        contents.sort_unstable_by_key(|(hash, _)| *hash);
        flags.extend(contents.into_iter().map(|(_, flag)| flag));
        flags
    }

    /// Which keys some document had, a bit for each.
    pub(crate) fn used(&self) -> Vec<u8> {
        let flags = self.flags();
        let mut used = vec![0; flags.len().div_ceil(8)];
        for (at, flag) in flags.into_iter().enumerate() {
            used[at / 8] |= u8::from(flag.load(Ordering::Relaxed)) << (at % 8);
        }
        used
    }

    /// Learns which keys documents had elsewhere, by [`Exclusions::used`] of the same list.
    pub(crate) fn note_used(&self, used: &[u8]) {
        for (at, flag) in self.flags().into_iter().enumerate() {
            if used.get(at / 8).is_some_and(|byte| byte >> (at % 8) & 1 == 1) {
                flag.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Hash of the keys, and how many there are; none without a list.
    pub(crate) fn identity(&self) -> Option<(ContentHash, u64)> {
        self.identity
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(text: &str) -> Result<Exclusions, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.txt");
        std::fs::write(&path, text).unwrap();
        Exclusions::open(&path, None).map_err(|error| error.to_string())
    }

    #[test]
    fn keys_are_paths_places_and_hashes() {
        let hash = ContentHash::of(b"mine");
        let list =
            open(&format!("# opt-outs\n\nin/a.txt\r\nin/b.jsonl\t7\nin/c\n{hash}\n")).unwrap();
        let line = |line| Some(Place::Line(line));
        let path = Path::new("in/b.jsonl");
        assert!(list.exclude(Path::new("in/a.txt"), None, "a"));
        assert!(list.exclude(path, line(7), "b") && !list.exclude(path, line(8), "b"));
        assert!(list.exclude(path, line(9), "mine"));
        assert!(!list.exclude(Path::new("in/d"), Some(Place::Row(7)), "d"));
        assert_eq!(list.unused(), ["in/c"]);
        let again = open(&format!("{hash}\nin/c\nin/b.jsonl\t7\nin/a.txt\nin/c")).unwrap();
        assert_eq!(list.identity(), again.identity(), "order and comments do not matter");
        assert_eq!(list.identity().unwrap().1, 4);
        assert_eq!(again.unused().len(), 4);
        assert!(!Exclusions::default().exclude(path, line(7), "mine"));
    }

    #[test]
    fn what_was_used_elsewhere_is_used() {
        let text: String = (0..40)
            .map(|at| format!("in/{at}\t{at}\n{}\nin/{at}\n", ContentHash::of(&[at])))
            .collect();
        let (here, there) = (open(&text).unwrap(), open(&text).unwrap());
        for at in [3, 17, 39_u8] {
            there.exclude(Path::new("out"), None, std::str::from_utf8(&[at]).unwrap());
        }
        there.exclude(Path::new("in/11"), Some(Place::Line(11)), "");
        here.exclude(Path::new("in/12"), None, "");
        here.note_used(&there.used());
        here.exclude(Path::new("in/12"), Some(Place::Line(12)), "");
        there.note_used(&here.used());
        assert_eq!(here.unused(), there.unused());
        assert_eq!(here.unused().len(), 120 - 3 - 4);
    }

    #[test]
    fn what_is_no_key_is_named_with_its_line() {
        for (text, expected) in [
            ("a\nb\tseven\n", "keys.txt, line 2: found \"b\\tseven\", expected the number"),
            ("xxh3-128:7", "line 1: found \"xxh3-128:7\", expected xxh3-128: and 32"),
        ] {
            let message = open(text).unwrap_err();
            assert!(message.contains(expected), "{message}");
        }
    }
}
