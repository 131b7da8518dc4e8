//! Files that are there after a power cut, wholly or not at all.
//!
//! A file system may keep what was written last and lose what was written before: what a file relies
//! on is synced before the file gets its name, and a name is kept once the folder that it stands in
//! is synced.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind, Write},
    path::Path,
};

/// Writes a new file whose bytes are kept; its name is once the folder is synced.
///
/// # Errors
/// What the operating system says.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Puts `bytes` in the place of the file `path`. Whatever happens, it has either these or those from
/// before.
///
/// # Errors
/// What the operating system says.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut aside = OsString::from(path);
    aside.push(".partial");
    write(aside.as_ref(), bytes)?;
    fs::rename(&aside, path)?;
    sync_parent(path)
}

/// Keeps the bytes of a file that others wrote.
///
/// # Errors
/// What the operating system says.
pub fn sync(path: &Path) -> io::Result<()> {
    // Not every system syncs what is open for reading alone.
    OpenOptions::new().append(true).open(path)?.sync_all()
}

/// As [`sync`]; a file that is not there has no bytes to be kept.
///
/// # Errors
/// What the operating system says.
pub fn sync_if_there(path: &Path) -> io::Result<()> {
    match sync(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// Keeps the names in a folder; only Unix lets a folder be opened for that.
///
/// # Errors
/// What the operating system says.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) }
}

/// Keeps the name of a file or folder.
///
/// # Errors
/// What the operating system says.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        // Of a relative name of one part.
        Some(parent) if parent.as_os_str().is_empty() => sync_folder(Path::new(".")),
        Some(parent) => sync_folder(parent),
        None => Ok(()),
    }
}

/// Makes a folder, and those above it, where there is none. The names of those that it makes are kept.
///
/// # Errors
/// What the operating system says.
pub fn make_folders(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    match fs::create_dir(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            path.parent().map_or(Err(error), make_folders)?;
            return make_folders(path);
        }
        // Another has just made it.
        Err(error) if error.kind() != ErrorKind::AlreadyExists || !path.is_dir() => {
            return Err(error);
        }
        _ => {}
    }
    sync_parent(path)
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
            assert_eq!(fs::read(&path).unwrap(), bytes);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        replace(&folder.path().join("absent/run.toml"), b"").unwrap_err();
        sync_if_there(&folder.path().join("absent")).unwrap();
        sync(&folder.path().join("absent")).unwrap_err();
    }

    #[test]
    fn folders_are_made_where_there_are_none() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("a/b/c");
        for _ in 0..2 {
            make_folders(&deep).unwrap();
            assert!(deep.is_dir());
        }
        fs::write(deep.join("file"), "").unwrap();
        for path in [deep.join("file"), deep.join("file/under")] {
            make_folders(&path).unwrap_err();
        }
    }
}
