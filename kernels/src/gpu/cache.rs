//! Compiled kernels on disk, named by the hash of everything that they depend on.
//!
//! The folder is `TIDEMILL_KERNEL_CACHE`, else `tidemill/kernels` in the user's cache folder. It can be deleted at any
//! time. A cache that cannot be read or written only costs compile time.
//!
//! A file ends with a checksum of its contents: a truncated or damaged file counts as absent,
//! because the behaviour of a driver with a broken image is unknown. A library that is loaded from
//! its path ignores the checksum behind its end.

use std::io::Write;
use std::path::PathBuf;

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::gpu::source::{HEADERS, Source};

/// The variable that names the folder.
const FOLDER_VARIABLE: &str = "TIDEMILL_KERNEL_CACHE";

/// The bytes at the end of a file: the checksum and the number of the bytes before them.
const SEAL_BYTES: usize = 24;

fn seal(image: &[u8]) -> [u8; SEAL_BYTES] {
    let mut seal = [0; SEAL_BYTES];
    seal[..16].copy_from_slice(&xxh3_128(image).to_le_bytes());
    seal[16..].copy_from_slice(&(image.len() as u64).to_le_bytes());
    seal
}

/// A place for one compiled source.
#[derive(Debug)]
pub struct CacheEntry {
    path: Option<PathBuf>,
}

impl CacheEntry {
    /// The entry of `source`, compiled by `compiler` (name and version) with `options`; `extension` is the ending of its file's
    /// name.
    pub fn new(source: &Source, compiler: &str, options: &[String], extension: &str) -> Self {
        let mut hash = Xxh3::new();
        let mut part = |text: &str| {
            hash.update(&(text.len() as u64).to_le_bytes());
            hash.update(text.as_bytes());
        };
        part(compiler);
        options.iter().for_each(|option| part(option));
        HEADERS.iter().for_each(|header| part(header.text));
        part(source.text);
        let stem = source.name.split('.').next().unwrap_or(source.name);
        let file = format!("{stem}-{:032x}.{extension}", hash.digest128());
        Self { path: folder().map(|folder| folder.join(file)) }
    }

    /// The path of the file, for a library that is opened by its path.
    #[cfg(feature = "emulator")]
    pub fn path(&self) -> Option<&std::path::Path> {
        self.path.as_deref()
    }

    /// The bytes in the file, if they are those that were written.
    pub fn read(&self) -> Option<Vec<u8>> {
        let path = self.path.as_deref()?;
        let mut bytes = std::fs::read(path).ok()?;
        let image_bytes = bytes.len().checked_sub(SEAL_BYTES)?;
        let (image, sealed) = bytes.split_at(image_bytes);
        if image.is_empty() || sealed != seal(image) {
            tracing::warn!(path = %path.display(), "a damaged kernel is compiled again");
            return None;
        }
        bytes.truncate(image_bytes);
        Some(bytes)
    }

    /// Puts it there: written aside, then renamed.
    pub fn write(&self, image: &[u8]) {
        let Some(path) = &self.path else { return };
        let Some(folder) = path.parent() else { return };
        let written = (|| {
            std::fs::create_dir_all(folder)?;
            let mut aside = tempfile::NamedTempFile::new_in(folder)?;
            aside.write_all(image)?;
            aside.write_all(&seal(image))?;
            aside.persist(path).map_err(|error| error.error)?;
            std::io::Result::Ok(())
        })();
        if let Err(error) = written {
            tracing::debug!(%error, path = %path.display(), "a compiled kernel was not kept");
        }
    }
}

fn folder() -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os(FOLDER_VARIABLE).filter(|folder| !folder.is_empty()) {
        return Some(PathBuf::from(folder));
    }
    let of_user = std::env::var_os("XDG_CACHE_HOME").filter(|folder| !folder.is_empty());
    let of_user = of_user.map(PathBuf::from);
    let of_home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    Some(of_user.or_else(of_home)?.join("tidemill").join("kernels"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGE: [u8; 1000] = [7; 1000];

    #[test]
    fn what_was_put_there_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let entry = CacheEntry { path: Some(folder.path().join("new").join("kernels.cubin")) };
        assert_eq!(entry.read(), None);
        entry.write(&IMAGE);
        assert_eq!(entry.read().as_deref(), Some(&IMAGE[..]));
        entry.write(&IMAGE[..1]);
        assert_eq!(entry.read().as_deref(), Some(&IMAGE[..1]));
    }

    /// A crash leaves files that are short or hold zeros; a bad disk flips bits.
    #[test]
    fn what_was_damaged_is_absent() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kernels.cubin");
        let entry = CacheEntry { path: Some(path.clone()) };
        entry.write(&IMAGE);
        let whole = std::fs::read(&path).unwrap();
        let mut damaged = vec![vec![0; whole.len()], seal(&[]).to_vec(), IMAGE.to_vec()];
        damaged.extend(
            [0, 1, SEAL_BYTES - 1, SEAL_BYTES, 500, whole.len() - 1]
                .map(|bytes| whole[..bytes].to_vec()),
        );
        for place in [0, 500, IMAGE.len() - 1, IMAGE.len(), whole.len() - 1] {
            let mut flipped = whole.clone();
            flipped[place] ^= 1;
            damaged.push(flipped);
        }
        damaged.push([&whole[..], &[0]].concat());
        damaged.push(whole[1..].to_vec());
        for bytes in damaged {
            std::fs::write(&path, &bytes).unwrap();
            assert_eq!(entry.read(), None, "{} bytes", bytes.len());
        }
        entry.write(&IMAGE);
        assert_eq!(entry.read().as_deref(), Some(&IMAGE[..]));
    }
}
