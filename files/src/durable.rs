//! Durable files: after a power cut, a file is complete or absent.
//!
//! A file system may keep the last write and lose an earlier one. So the data that a file relies on
//! is synced before the file gets its name, and a name is durable once the folder that contains it
//! is synced.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind, Write},
    path::Path,
};

/// Writes a new file with durable bytes; its name is durable once the folder is synced.
///
/// # Errors The error of the operating system.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Replaces the file `path` by one with `bytes`. After a failure at any point the file has either
/// these bytes or the old ones.
///
/// # Errors The error of the operating system.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut aside = OsString::from(path);
    aside.push(".partial");
    write(aside.as_ref(), bytes)?;
    fs::rename(&aside, path)?;
    sync_parent(path)
}

/// Makes the bytes of a file durable that other code wrote.
///
/// # Errors The error of the operating system.
pub fn sync(path: &Path) -> io::Result<()> {
    // Not every system syncs a file that is open for reading only.
    OpenOptions::new().append(true).open(path)?.sync_all()
}

/// As [`sync`]; a file that does not exist needs no sync.
///
/// # Errors The error of the operating system.
pub fn sync_if_there(path: &Path) -> io::Result<()> {
    match sync(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// Makes the names in a folder durable; only Unix lets a folder be opened for that.
///
/// # Errors The error of the operating system.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) }
}

/// Makes the name of a file or folder durable.
///
/// # Errors The error of the operating system.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        // The parent of a relative path of one part.
        Some(parent) if parent.as_os_str().is_empty() => sync_folder(Path::new(".")),
        Some(parent) => sync_folder(parent),
        None => Ok(()),
    }
}

/// Creates a folder, and missing folders above it, and makes their names durable.
///
/// # Errors The error of the operating system.
pub fn make_folders(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    match fs::create_dir(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            path.parent().map_or(Err(error), make_folders)?;
            return make_folders(path);
        }
        // Another process has just created it.
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
