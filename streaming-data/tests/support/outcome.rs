//! What came of it: an error as the program prints it, and the files of a folder.

#![allow(dead_code, reason = "each test program uses its part of it")]

use std::{error::Error, fs, path::Path};

/// An error and its causes, which are one line.
pub fn line(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line += &format!(": {error}");
        cause = error.source();
    }
    assert!(!line.contains('\n'), "more than one line: {line}");
    line
}

/// The error is one line that holds these words.
#[track_caller]
pub fn assert_line(error: &dyn Error, words: &[&str]) {
    let line = line(error);
    for word in words {
        assert!(line.contains(word), "expected {word:?} in: {line}");
    }
}

/// Names in the folder, hidden ones included.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Every file of the folder with its content.
pub fn content(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let read = |name: String| (name.clone(), fs::read(folder.join(name)).unwrap());
    names(folder).into_iter().map(read).collect()
}
