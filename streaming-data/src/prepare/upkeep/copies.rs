//! Copies of the parts of a state that is in a store: one after the other, in a file without a name.

use std::{
    env,
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    ops::Range,
};

use tidemill_files::Kind;

use crate::{
    error::DataError,
    prepare::PrepareError,
    store::{RemoteFolder, Version},
};

/// See the [module](self).
pub(super) struct Copies {
    file: File,
    /// Where each part is.
    parts: Vec<Range<u64>>,
}

impl Copies {
    /// # Errors
    /// Errors of a temporary file.
    pub(super) fn new() -> Result<Copies, PrepareError> {
        Ok(Copies { file: tempfile::tempfile().map_err(failed)?, parts: Vec::new() })
    }

    /// Copies the next part, which has this name.
    ///
    /// # Errors
    /// The errors of the store, and of the temporary file.
    pub(super) fn add(&mut self, remote: &RemoteFolder, name: &str) -> Result<(), PrepareError> {
        let start = self.parts.last().map_or(0, |part| part.end);
        let mut end = start;
        let mut file = &self.file;
        remote.download(name, &Version::default(), Some(Kind::Other), |bytes| {
            end += bytes.len() as u64;
            file.write_all(bytes).map_err(failed)
        })?;
        self.parts.push(start..end);
        Ok(())
    }

    /// The bytes of a part.
    ///
    /// # Errors
    /// Errors of the temporary file.
    pub(super) fn read(&self, part: usize) -> Result<Vec<u8>, PrepareError> {
        let Range { start, end } = self.parts[part];
        let read = || -> io::Result<Vec<u8>> {
            let mut file = &self.file;
            file.seek(SeekFrom::Start(start))?;
            let mut bytes = Vec::new();
            file.take(end - start).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        Ok(read().map_err(failed)?)
    }
}

fn failed(error: io::Error) -> DataError {
    DataError::io("keep the state of a data set in", env::temp_dir())(error)
}
