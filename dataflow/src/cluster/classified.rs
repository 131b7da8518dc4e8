//! Errors that say whether a restart would help.

use std::io;

use super::exit_class::ExitClass;

/// An error that says whether a restart would help. A failure that is not known to be the fault of the input is
/// [`ExitClass::Restart`].
///
/// ```
/// use tidemill::cluster::{Classified, ExitClass, Failure};
///
/// #[derive(Debug, thiserror::Error)]
/// enum TapeError {
///     #[error("the robot dropped the tape")]
///     Dropped,
///     #[error("there is no tape {0}")]
///     Unknown(String),
/// }
///
/// impl Classified for TapeError {
///     fn exit_class(&self) -> ExitClass {
///         match self {
///             TapeError::Dropped => ExitClass::Restart,
///             TapeError::Unknown(_) => ExitClass::FixInput,
///         }
///     }
/// }
///
/// fn read(tape: &str) -> Result<(), Failure> {
///     Err(TapeError::Unknown(tape.to_owned()))?
/// }
/// assert_eq!(read("seven").unwrap_err().exit_class(), ExitClass::FixInput);
/// ```
pub trait Classified {
    /// Whether a restart would help.
    fn exit_class(&self) -> ExitClass;
}

/// `ELOOP` of Linux.
const TOO_MANY_LINKS: i32 = 40;

/// The class of the operating system's answer about a path that a user named. The input is at fault if the answer says that the
/// path is not there, may not be used or is not of the kind that is needed; else a disk, a file system or the machine is.
///
/// About a file that the run itself made, no answer is the input's fault: a failure there is [`Failure::restart`].
///
/// [`Failure::restart`]: super::Failure::restart
impl Classified for io::Error {
    fn exit_class(&self) -> ExitClass {
        use io::ErrorKind as Kind;
        match self.kind() {
            // Links in a circle have no kind of their own in the stable library.
            _ if self.raw_os_error() == Some(TOO_MANY_LINKS) => ExitClass::FixInput,
            Kind::NotFound
            | Kind::PermissionDenied
            | Kind::NotADirectory
            | Kind::IsADirectory
            | Kind::AlreadyExists
            | Kind::DirectoryNotEmpty
            | Kind::InvalidFilename
            | Kind::InvalidInput
            | Kind::InvalidData
            | Kind::UnexpectedEof
            | Kind::NotSeekable
            | Kind::Unsupported => ExitClass::FixInput,
            _ => ExitClass::Restart,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_the_user_named_wrongly_is_the_inputs_fault_and_a_disk_that_fails_is_not() {
        use io::ErrorKind as Kind;
        let of_kind = |kind: Kind| io::Error::from(kind).exit_class();
        for kind in [
            Kind::NotFound,
            Kind::PermissionDenied,
            Kind::NotADirectory,
            Kind::IsADirectory,
            Kind::AlreadyExists,
            Kind::DirectoryNotEmpty,
            Kind::InvalidFilename,
            Kind::InvalidInput,
            Kind::InvalidData,
            Kind::UnexpectedEof,
            Kind::NotSeekable,
            Kind::Unsupported,
        ] {
            assert_eq!(of_kind(kind), ExitClass::FixInput, "{kind}");
        }
        for kind in [
            Kind::StorageFull,
            Kind::QuotaExceeded,
            Kind::ReadOnlyFilesystem,
            Kind::StaleNetworkFileHandle,
            Kind::FileTooLarge,
            Kind::ResourceBusy,
            Kind::WriteZero,
            Kind::TimedOut,
            Kind::WouldBlock,
            Kind::Interrupted,
            Kind::OutOfMemory,
            Kind::Other,
        ] {
            assert_eq!(of_kind(kind), ExitClass::Restart, "{kind}");
        }
        // As Linux numbers them: those that have a kind of their own, and those that have none.
        const NUMBERS: [(i32, &str, ExitClass); 15] = [
            (1, "EPERM", ExitClass::FixInput),
            (2, "ENOENT", ExitClass::FixInput),
            (13, "EACCES", ExitClass::FixInput),
            (20, "ENOTDIR", ExitClass::FixInput),
            (40, "ELOOP", ExitClass::FixInput),
            (5, "EIO", ExitClass::Restart),
            (12, "ENOMEM", ExitClass::Restart),
            (16, "EBUSY", ExitClass::Restart),
            (23, "ENFILE", ExitClass::Restart),
            (24, "EMFILE", ExitClass::Restart),
            (27, "EFBIG", ExitClass::Restart),
            (28, "ENOSPC: no bytes or no inodes", ExitClass::Restart),
            (30, "EROFS", ExitClass::Restart),
            (116, "ESTALE", ExitClass::Restart),
            (122, "EDQUOT", ExitClass::Restart),
        ];
        for (number, name, expected) in NUMBERS {
            assert_eq!(io::Error::from_raw_os_error(number).exit_class(), expected, "{name}");
        }
    }
}
