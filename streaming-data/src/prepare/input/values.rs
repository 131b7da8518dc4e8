//! Consecutive values of a column, as parts of Parquet and MDS carry them.

use super::{Documents, Entry, Limits, Take};
use crate::prepare::{
    PrepareError,
    input::skip::{BrokenReason, Place},
};

/// Consecutive values of a column.
pub(crate) struct Values {
    first: u64,
    place: fn(u64) -> Place,
    bytes: Vec<u8>,
    rows: Vec<Row>,
}

/// A row: where the bytes of its value end.
#[derive(Clone, Copy)]
enum Row {
    Value { end: usize },
    Null,
    TooLong { limit_bytes: usize },
}

/// A value of a column.
pub(crate) enum Value<'a> {
    Bytes(&'a [u8]),
    Null,
    Broken(BrokenReason),
}

impl Values {
    /// No values yet; the first will be at the place of this number.
    pub(crate) fn new(first: u64, place: fn(u64) -> Place) -> Values {
        Values { first, place, bytes: Vec::new(), rows: Vec::new() }
    }

    /// Appends a value, if a document may be so long.
    pub(crate) fn push(&mut self, value: &[u8], limits: Limits) {
        if value.len() > limits.document_bytes {
            return self.push_too_long(limits);
        }
        self.bytes.extend_from_slice(value);
        self.rows.push(Row::Value { end: self.bytes.len() });
    }

    /// Appends a value that was not read since it is too long.
    pub(crate) fn push_too_long(&mut self, limits: Limits) {
        self.rows.push(Row::TooLong { limit_bytes: limits.document_bytes });
    }

    /// Appends a null.
    pub(crate) fn push_null(&mut self) {
        self.rows.push(Row::Null);
    }

    /// Keeps the first rows only; the bytes of the others stay in memory, and are not read.
    pub(crate) fn truncate(&mut self, rows: usize) {
        self.rows.truncate(rows);
    }

    /// Number of values, nulls and others included.
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Bytes of all values.
    pub(crate) fn value_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Their bytes in memory.
    pub(crate) fn held_bytes(&self) -> u64 {
        (self.bytes.len() + size_of_val(&self.rows[..])) as u64
    }

    /// The values in order, each with its place.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Place, Value<'_>)> {
        let mut start = 0;
        (self.first..).map(self.place).zip(&self.rows).map(move |(place, row)| {
            let value = match *row {
                Row::Value { end } => {
                    let bytes = &self.bytes[start..end];
                    start = end;
                    Value::Bytes(bytes)
                }
                Row::Null => Value::Null,
                Row::TooLong { limit_bytes } => {
                    Value::Broken(BrokenReason::TooLong { limit_bytes: limit_bytes as u64 })
                }
            };
            (place, value)
        })
    }
}

/// Values that are texts.
pub(crate) struct Texts(pub Values);

impl Documents for Texts {
    fn visit(&self, take: &mut Take<'_>) -> Result<(), PrepareError> {
        self.0.iter().try_for_each(|(place, value)| {
            let entry = match value {
                Value::Null => Entry::Null,
                Value::Broken(reason) => Entry::Broken(reason),
                Value::Bytes(bytes) => match std::str::from_utf8(bytes) {
                    Ok(text) => Entry::Text(text),
                    Err(error) => {
                        Entry::Broken(BrokenReason::NotUtf8 { offset: error.valid_up_to() })
                    }
                },
            };
            take(place, entry)
        })
    }
}
