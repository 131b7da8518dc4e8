//! Compiled kernels on disk, named by the hash of everything that they follow from.
//!
//! The folder is `TIDEMILL_KERNEL_CACHE`, else `tidemill/kernels` in the user's cache folder. It can be deleted at any
//! time; a file in it is complete or absent. A cache that cannot be read or written only costs compile time.

use std::io::Write;
use std::path::PathBuf;

use xxhash_rust::xxh3::Xxh3;

use crate::gpu::source::{HEADERS, Source};

/// The variable that names the folder.
pub const FOLDER_VARIABLE: &str = "TIDEMILL_KERNEL_CACHE";

/// A place for one compiled source.
#[derive(Debug)]
pub struct CacheEntry {
    path: Option<PathBuf>,
}

impl CacheEntry {
    /// The entry of `source`, compiled by `compiler` (name and version) with `options`; `extension` says what it is.
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

    /// Where it is, or would be.
    pub fn path(&self) -> Option<&std::path::Path> {
        self.path.as_deref()
    }

    /// What is there.
    pub fn read(&self) -> Option<Vec<u8>> {
        std::fs::read(self.path.as_deref()?).ok().filter(|bytes| !bytes.is_empty())
    }

    /// Puts it there: written aside, then renamed.
    pub fn write(&self, bytes: &[u8]) {
        let Some(path) = &self.path else { return };
        let Some(folder) = path.parent() else { return };
        let written = (|| {
            std::fs::create_dir_all(folder)?;
            let mut aside = tempfile::NamedTempFile::new_in(folder)?;
            aside.write_all(bytes)?;
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
