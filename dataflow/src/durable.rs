//! Files that are there after a power cut, wholly or not at all.
//!
//! A file system may keep what was written last and lose what was written before: what a file relies on is synced before the
//! file gets its name, and a name is kept once the folder that it stands in is synced.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::Path;

/// Writes a new file whose bytes are kept; its name is once the folder is synced.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Puts `bytes` in the place of the file `path`. Whatever happens, it has either these or those from before.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut aside = path.as_os_str().to_owned();
    aside.push(".partial");
    write(aside.as_ref(), bytes)?;
    std::fs::rename(&aside, path)?;
    path.parent().map_or(Ok(()), sync_folder)
}

/// Keeps the bytes of a file that others append to; one that is not there has none.
pub(crate) fn sync_if_there(path: &Path) -> io::Result<()> {
    match File::open(path) {
        Ok(file) => file.sync_all(),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Keeps the names in a folder.
pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    // The parent of a relative name of one part.
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    File::open(path)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_and_nothing_is_left_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.toml");
        for bytes in [&b"steps = 1"[..], b"steps = 20"] {
            replace(&path, bytes).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        replace(&folder.path().join("absent/run.toml"), b"").unwrap_err();
        sync_if_there(&folder.path().join("absent")).unwrap();
    }
}
