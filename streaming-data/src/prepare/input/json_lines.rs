//! JSON lines: a document a line, its text at a key of the object that the line is.
//!
//! The reader only looks for ends of lines; lines are parsed with the part. Lines of
//! white space alone are no documents and no fault.

use std::{
    io::{self, ErrorKind, Read},
    mem,
    path::Path,
    sync::Arc,
};

use memchr::{memchr, memchr_iter, memrchr};

use super::{
    Documents, Entry, Limits, More, Next, Part, ReadFailure, ReadParts, Refused, Take,
    json_text::text_of, stream::Stream,
};
use crate::prepare::{
    PrepareError,
    input::{
        format::Compression,
        skip::{BrokenReason, Place, SkipReason},
    },
};

/// How much is read before ends of lines are looked for again.
const CHUNK_BYTES: usize = 128 << 10;

/// Some editors put this before the first line.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// A file of lines being read.
pub(crate) struct JsonLines {
    path: Arc<Path>,
    key: Arc<str>,
    stream: Stream,
    /// The bytes read that are in no part.
    pending: Vec<u8>,
    /// Number of the line with which it begins, from 1.
    line: u64,
    /// Whether the rest of a line that was refused is still to come, and is left out.
    within_refused: bool,
    /// Why nothing more can be read.
    failure: Option<io::Error>,
}

impl JsonLines {
    /// Opens the file.
    ///
    /// # Errors
    /// [`SkipReason::Unreadable`].
    pub(crate) fn open(
        path: &Path,
        compression: Compression,
        key: &Arc<str>,
    ) -> Result<JsonLines, ReadFailure> {
        let stream =
            Stream::open(path, compression).map_err(|error| ReadFailure::Skip(error.into()))?;
        Ok(JsonLines {
            path: path.into(),
            key: Arc::clone(key),
            stream,
            pending: Vec::new(),
            line: 1,
            within_refused: false,
            failure: None,
        })
    }

    /// Appends some bytes to the pending bytes; none at the end.
    fn read_chunk(&mut self) -> io::Result<usize> {
        let before = self.pending.len();
        self.pending.resize(before + CHUNK_BYTES, 0);
        let read = loop {
            match self.stream.read(&mut self.pending[before..]) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                read => break read,
            }
        };
        self.pending.truncate(before + *read.as_ref().unwrap_or(&0));
        read
    }

    fn part(&self, bytes: u64, documents: Box<dyn Documents>) -> Part {
        Part { path: Arc::clone(&self.path), bytes, documents }
    }

    /// Makes a part of the first of the pending bytes, which end a line or the file.
    fn cut_off(&mut self, bytes: usize, limits: Limits) -> Option<Part> {
        let rest = self.pending.split_off(bytes);
        let lines = mem::replace(&mut self.pending, rest);
        if lines.is_empty() {
            return None;
        }
        let first_line = self.line;
        self.line += memchr_iter(b'\n', &lines).count() as u64;
        let bytes = lines.len() as u64;
        let (key, limit) = (Arc::clone(&self.key), limits.document_bytes);
        Some(self.part(bytes, Box::new(Lines { first_line, lines, key, limit })))
    }

    fn next(&self, part: Option<Part>, more: More) -> Next {
        Next { part, read_bytes: self.stream.count().bytes(), more }
    }
}

impl ReadParts for JsonLines {
    fn next_part(&mut self, limits: Limits) -> Result<Next, ReadFailure> {
        if let Some(error) = self.failure.take() {
            return Err(ReadFailure::Skip(unreadable_from(Place::Line(self.line), error)));
        }
        // Behind the last end of a line among them there is nothing before the next chunk.
        loop {
            let before = self.pending.len();
            match self.read_chunk() {
                Ok(0) => {
                    let part = self.cut_off(self.pending.len(), limits);
                    return Ok(self.next(part, More::No));
                }
                Ok(_) => {}
                Err(error) => {
                    self.failure = Some(error);
                    let whole_lines = memrchr(b'\n', &self.pending).map_or(0, |end| end + 1);
                    let part = self.cut_off(whole_lines, limits);
                    return Ok(self.next(part, More::Yes));
                }
            }
            if self.within_refused {
                match memchr(b'\n', &self.pending) {
                    Some(end) => {
                        self.pending.drain(..=end);
                        self.line += 1;
                        self.within_refused = false;
                    }
                    None => {
                        self.pending.clear();
                        continue;
                    }
                }
            }
            if self.pending.len() < limits.part_bytes {
                continue;
            }
            // Earlier chunks had none, or the part would have been cut off.
            let from = if before < limits.part_bytes { 0 } else { before };
            if let Some(end) = memrchr(b'\n', &self.pending[from..]) {
                let part = self.cut_off(from + end + 1, limits);
                return Ok(self.next(part, More::Yes));
            }
            if self.pending.len() > limits.document_bytes {
                self.pending.clear();
                self.within_refused = true;
                let reason = too_long(limits.document_bytes);
                let place = Place::Line(self.line);
                let part = self.part(0, Box::new(Refused { place, reason }));
                return Ok(self.next(Some(part), More::Yes));
            }
        }
    }
}

/// Why a stream could not be read from a place on. A checksum follows the bytes that it covers, so those have been taken; the readers of
/// gzip and Zstandard name it in their messages alone.
fn unreadable_from(from: Place, error: io::Error) -> SkipReason {
    let source = Box::new(error);
    match source.to_string().contains("checksum") {
        true => SkipReason::Checksum { to: from, source },
        false => SkipReason::Damaged { from, source },
    }
}

fn too_long(limit: usize) -> BrokenReason {
    BrokenReason::TooLong { limit_bytes: limit as u64 }
}

/// Consecutive lines.
struct Lines {
    first_line: u64,
    lines: Vec<u8>,
    key: Arc<str>,
    limit: usize,
}

impl Documents for Lines {
    fn visit(&self, take: &mut Take<'_>) -> Result<(), PrepareError> {
        let mut rest = &self.lines[..];
        if self.first_line == 1 {
            rest = rest.strip_prefix(BYTE_ORDER_MARK).unwrap_or(rest);
        }
        let mut number = self.first_line;
        while !rest.is_empty() {
            let end = memchr(b'\n', rest).unwrap_or(rest.len());
            let line = &rest[..end];
            rest = rest.get(end + 1..).unwrap_or_default();
            let place = Place::Line(number);
            number += 1;
            if line.len() > self.limit {
                take(place, Entry::Broken(too_long(self.limit)))?;
            } else if !line.trim_ascii().is_empty() {
                let text = std::str::from_utf8(line)
                    .map_err(|error| BrokenReason::NotUtf8 { offset: error.valid_up_to() })
                    .and_then(|line| text_of(line, &self.key));
                match text {
                    Ok(text) => take(place, Entry::Text(&text))?,
                    Err(reason) => take(place, Entry::Broken(reason))?,
                }
            }
        }
        Ok(())
    }
}
