//! Inputs that a process cannot read: process 0 tries to read them. An input that it cannot read either is treated as with one
//! process; otherwise the processes do not have the same inputs.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use super::{
    packet::{Packet, Unpacked},
    setup::{path_of_bytes, path_to_bytes},
};
use crate::prepare::{PrepareError, SkipReason, input::find::Input};

/// The first byte of a message or page, or of an item of one, that is an [`Unseen`].
pub(super) const UNSEEN: u8 = 4;

/// An input that a process cannot read, and why.
#[derive(Debug)]
pub(super) struct Unseen {
    path: PathBuf,
    words: String,
    need: Need,
}

/// The consequence where process 0 cannot read it either.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    /// It is not found, and skipped.
    None,
    /// It is not found, and an error: nothing is read before it is opened.
    Opened,
    /// An error: nothing may be skipped.
    Strict,
    /// An error: a document of it is wanted that was left out before.
    Wanted,
}

impl Unseen {
    /// The first of some inputs that this process does not find.
    pub(super) fn first_of(inputs: &[Input]) -> Option<Unseen> {
        inputs.iter().find_map(|Input { path, .. }| {
            let words = fs::metadata(path).err()?.to_string();
            Some(Unseen { path: path.clone(), words, need: Need::None })
        })
    }

    /// The same of one without which nothing can be done.
    pub(super) fn needed(&self) -> Unseen {
        Unseen { path: self.path.clone(), words: self.words.clone(), need: Need::Opened }
    }

    /// The input that an error is about which says that it cannot be read.
    ///
    /// # Errors
    /// Any other error.
    pub(super) fn of_error(error: PrepareError) -> Result<Unseen, PrepareError> {
        match error {
            PrepareError::Document { path, reason: reason @ SkipReason::Unreadable { .. } } => {
                Ok(Unseen { path, words: reason.line(), need: Need::Strict })
            }
            PrepareError::Readmitted { path, reason: reason @ SkipReason::Unreadable { .. } } => {
                Ok(Unseen { path, words: reason.line(), need: Need::Wanted })
            }
            error => Err(error),
        }
    }

    /// Appends it to a message.
    pub(super) fn write(&self, packet: &mut Packet) {
        packet.byte(UNSEEN);
        packet.byte(match self.need {
            Need::None => 0,
            Need::Strict => 1,
            Need::Wanted => 2,
            Need::Opened => 3,
        });
        packet.bytes(path_to_bytes(&self.path));
        packet.bytes(self.words.as_bytes());
    }

    /// A message that is this alone.
    pub(super) fn message(&self) -> Vec<u8> {
        let mut packet = Packet::default();
        self.write(&mut packet);
        packet.take()
    }

    /// Reads the bytes after the first.
    ///
    /// # Errors
    /// [`PrepareError::Message`].
    pub(super) fn read(unpacked: &mut Unpacked<'_>) -> Result<Unseen, PrepareError> {
        let need = match unpacked.byte()? {
            0 => Need::None,
            1 => Need::Strict,
            2 => Need::Wanted,
            3 => Need::Opened,
            _ => return Err(unpacked.wrong()),
        };
        let path = path_of_bytes(unpacked.bytes()?);
        Ok(Unseen { path, words: unpacked.text()?.to_owned(), need })
    }

    /// Looks on process 0 whether that can read what `process` cannot.
    ///
    /// # Errors
    /// [`PrepareError::InputUnseen`] where it can; otherwise the error of one process which cannot read it, unless it is skipped.
    pub(super) fn look(self, process: usize) -> Result<(), PrepareError> {
        let Unseen { path, words, need } = self;
        match need {
            Need::None | Need::Opened if fs::metadata(&path).is_err() => {}
            Need::None | Need::Opened => return Err(unseen(path, process, words)),
            Need::Strict | Need::Wanted => look_at(&path, process, &words)?,
        }
        let reason = SkipReason::Told { words };
        match need {
            Need::None => Ok(()),
            Need::Opened | Need::Strict => Err(PrepareError::Document { path, reason }),
            Need::Wanted => Err(PrepareError::Readmitted { path, reason }),
        }
    }
}

/// Whether process 0 cannot read an input either, which `process` could not for a reason of these words.
///
/// # Errors
/// [`PrepareError::InputUnseen`] where it can.
pub(super) fn look_at(path: &Path, process: usize, words: &str) -> Result<(), PrepareError> {
    // Only files can be compared: where the path is a folder, the process failed to read one of the files in it.
    match File::open(path).and_then(|file| file.metadata()) {
        Ok(metadata) if metadata.is_file() => {
            Err(unseen(path.to_owned(), process, words.to_owned()))
        }
        _ => Ok(()),
    }
}

fn unseen(path: PathBuf, process: usize, words: String) -> PrepareError {
    PrepareError::InputUnseen { path, process, source: io::Error::other(words) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unreadable() -> SkipReason {
        SkipReason::Unreadable { source: io::ErrorKind::PermissionDenied.into() }
    }

    #[test]
    fn what_no_process_can_read_is_what_it_is_to_one_process() {
        let folder = tempfile::tempdir().unwrap();
        let path = || folder.path().join("a.txt");
        let look = |unseen: &Unseen| {
            let message = unseen.message();
            let mut unpacked = Unpacked::new(&message, 3);
            assert_eq!(unpacked.byte().unwrap(), UNSEEN);
            for length in 1..message.len() {
                Unseen::read(&mut Unpacked::new(&message[1..length], 3)).unwrap_err();
            }
            Unseen::read(&mut unpacked).unwrap().look(3)
        };
        let skipped = || Unseen { path: path(), words: "it is away".to_owned(), need: Need::None };
        let strict = || {
            let error = PrepareError::Document { path: path(), reason: unreadable() };
            Unseen::of_error(error).unwrap()
        };
        let wanted = || {
            let error = PrepareError::Readmitted { path: path(), reason: unreadable() };
            Unseen::of_error(error).unwrap()
        };
        look(&skipped()).unwrap();
        let error = look(&skipped().needed()).unwrap_err();
        assert!(matches!(&error, PrepareError::Document { .. }), "{error}");
        let error = look(&strict()).unwrap_err();
        assert!(matches!(&error, PrepareError::Document { .. }), "{error}");
        let error = look(&wanted()).unwrap_err();
        assert!(matches!(&error, PrepareError::Readmitted { .. }), "{error}");
        std::fs::write(path(), "").unwrap();
        for unseen in [skipped(), skipped().needed(), strict(), wanted()] {
            let error = look(&unseen).unwrap_err();
            assert!(matches!(&error, PrepareError::InputUnseen { process: 3, .. }), "{error}");
        }
        let not_utf8 = SkipReason::NotUtf8 { offset: 0 };
        let other = PrepareError::Document { path: path(), reason: not_utf8 };
        assert!(matches!(Unseen::of_error(other), Err(PrepareError::Document { .. })));
    }
}
