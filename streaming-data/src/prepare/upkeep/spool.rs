//! Records between the two passes: in a file without a name, so that memory does not grow with the documents.

use std::{
    env,
    fs::File,
    io::{self, BufReader, BufWriter, Seek, Write},
};

use super::record::{Record, RecordReader, RecordWriter, number};
use crate::prepare::PrepareError;

/// Where the tokens of a document are in the previous version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Origin {
    /// The part, and the shard of it.
    pub part: usize,
    /// The number of tokens that precede the document in the part.
    pub offset: u64,
    pub tokens: u64,
}

/// Bytes that are held until they are written.
const BUFFER_BYTES: usize = 256 << 10;

/// Takes records in order.
pub(crate) struct SpoolWriter {
    file: BufWriter<File>,
    records: RecordWriter,
}

/// Records in order.
pub(crate) struct Spool {
    file: File,
}

/// Reads a spool from its beginning.
pub(crate) struct SpoolReader<'a> {
    bytes: BufReader<&'a File>,
    records: RecordReader,
}

impl SpoolWriter {
    /// # Errors
    /// Errors of a temporary file.
    pub(crate) fn new() -> Result<SpoolWriter, PrepareError> {
        let file = tempfile::tempfile().map_err(failed)?;
        let file = BufWriter::with_capacity(BUFFER_BYTES, file);
        Ok(SpoolWriter { file, records: RecordWriter::default() })
    }

    /// # Errors
    /// Errors of the temporary file.
    pub(crate) fn push(
        &mut self,
        record: &Record,
        origin: Option<Origin>,
    ) -> Result<(), PrepareError> {
        self.records.write(record);
        if let Record::Document(_) = record {
            self.records.number(origin.map_or(0, |origin| origin.part as u64 + 1));
            if let Some(origin) = origin {
                self.records.number(origin.offset);
                self.records.number(origin.tokens);
            }
        }
        self.file.write_all(&self.records.take_bytes()).map_err(failed)
    }

    /// # Errors
    /// Errors of the temporary file.
    pub(crate) fn finish(self) -> Result<Spool, PrepareError> {
        let file = self.file.into_inner().map_err(|error| failed(error.into_error()))?;
        Ok(Spool { file })
    }
}

impl Spool {
    /// # Errors
    /// Errors of the temporary file.
    pub(crate) fn read(&mut self) -> Result<SpoolReader<'_>, PrepareError> {
        self.file.rewind().map_err(failed)?;
        let bytes = BufReader::with_capacity(BUFFER_BYTES, &self.file);
        Ok(SpoolReader { bytes, records: RecordReader::default() })
    }
}

impl SpoolReader<'_> {
    /// The next record; none at the end.
    ///
    /// # Errors
    /// Errors of the temporary file.
    pub(crate) fn next(&mut self) -> Result<Option<(Record, Option<Origin>)>, PrepareError> {
        self.next_record().map_err(failed)
    }

    fn next_record(&mut self) -> io::Result<Option<(Record, Option<Origin>)>> {
        let Some(record) = self.records.read(&mut self.bytes)? else { return Ok(None) };
        let mut origin = None;
        if let Record::Document(_) = record {
            let part = number(&mut self.bytes)?;
            if part > 0 {
                let part = part as usize - 1;
                let (offset, tokens) = (number(&mut self.bytes)?, number(&mut self.bytes)?);
                origin = Some(Origin { part, offset, tokens });
            }
        }
        Ok(Some((record, origin)))
    }
}

fn failed(error: io::Error) -> PrepareError {
    PrepareError::io("keep records of documents in", env::temp_dir())(error)
}
