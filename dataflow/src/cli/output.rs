//! Standard output and standard error, which may be a full disk or a pipe without a reader.
//!
//! `println!` and `eprintln!` panic there. Results that cannot be printed are an error of the program; words beside
//! them are not worth one.

use std::fmt::{Arguments, Display};
use std::io::Write;

use anyhow::Context;

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

pub(super) fn print(line: Arguments<'_>) -> anyhow::Result<()> {
    writeln!(std::io::stdout().lock(), "{line}").context(OUTPUT_FAILED)
}

pub(super) fn note(line: Arguments<'_>) {
    // One write, so that lines of several processes do not run into each other.
    let _ = std::io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}
