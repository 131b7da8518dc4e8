//! Standard output and standard error, which may be a full disk or a pipe without a reader.
//!
//! `println!` and `eprintln!` panic there. Results that cannot be printed are an error of the program; words beside
//! them are not worth one.

use std::fmt::{Arguments, Display};
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use anyhow::Context;

use crate::error::{JobError, Result};

/// A line of results, as `println!` takes it.
macro_rules! result_line {
    ($($text:tt)*) => { $crate::cli::output::print(format_args!($($text)*)) };
}

/// A line of progress or of trouble, as `eprintln!` takes it.
macro_rules! note_line {
    ($($text:tt)*) => { $crate::cli::output::note(format_args!($($text)*)) };
}

pub(super) use {note_line, result_line};

/// The message of every failure to print results; its cause follows.
pub(super) const OUTPUT_FAILED: &str = "writing to standard output failed";

/// A count with its noun, such as `1 shard` and `2 shards`.
pub(super) fn counted<N: Display + PartialEq + From<u8>>(
    count: N,
    one: &str,
    several: &str,
) -> String {
    let noun = if count == N::from(1) { one } else { several };
    format!("{count} {noun}")
}

/// Checks that a file at `path`, if there is one, is of the kind that is to be written there, by how it begins: no slip of a name costs a
/// config, a log or a shard.
///
/// # Errors
/// A file that begins otherwise, and is not empty.
pub(super) fn check_replaceable(path: &Path, beginnings: &[&[u8]], kind: &str) -> Result<()> {
    // Devices and pipes hold nothing that could be lost.
    if !path.metadata().is_ok_and(|found| found.is_file() && found.len() > 0) {
        return Ok(());
    }
    let longest = beginnings.iter().map(|beginning| beginning.len() as u64).max().unwrap_or(0);
    let mut found = Vec::new();
    let read = File::open(path).and_then(|file| file.take(longest).read_to_end(&mut found));
    read.map_err(|source| JobError::file("reading", path, source))?;
    if beginnings.iter().any(|&beginning| found.starts_with(beginning)) {
        return Ok(());
    }
    let expected = format!("no file, or {kind} that is replaced");
    Err(JobError::value(path.display().to_string(), expected, "another file"))
}

pub(super) fn print(line: Arguments<'_>) -> anyhow::Result<()> {
    writeln!(std::io::stdout().lock(), "{line}").context(OUTPUT_FAILED)
}

pub(super) fn note(line: Arguments<'_>) {
    // One write, so that lines of several processes do not run into each other.
    let _ = std::io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}
