//! Files that others made: opened without blocking, and read up to a limit.
//!
//! A data set, a model or a checkpoint may come from anywhere, and with it files that are not what
//! their names suggest: a pipe that never ends, a link to a device, a config of five gigabytes.
//!
//! - [`open`] opens a regular file, and refuses everything else before it could block;
//! - [`read`] reads a whole file, if it has at most the bytes that its [`Kind`] allows.
//!
//! [`Kind`] is the one place that sets the limit of each kind of file, on disk and in a store
//! ([`Kind::of_name`]). The limits leave room for files many times larger than any known one: they
//! protect memory.
//!
//! Contract: errors are [`io::Error`]s of kind [`InvalidData`](io::ErrorKind::InvalidData) if the
//! file itself is at fault, with a [`Refused`] inside that says what was found and what was
//! expected.

use std::{
    fs::{self, File, FileType, OpenOptions},
    io::{self, Read},
    path::Path,
};

/// Kinds of files that are read whole, each with a limit on its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// `index.json` of a data set, of this project or of MosaicML: a million shards take 250 MB.
    Index,
    /// `config.json` of a model and the files of its tokenizer: a few kilobytes.
    Config,
    /// `model.safetensors.index.json`: a hundred bytes a tensor.
    TensorIndex,
    /// `trainer.json` of a checkpoint: a few kilobytes.
    TrainerState,
    /// `tokenizer.json`: the largest known ones have 40 MB.
    Tokenizer,
    /// `RUN.toml`: a few kilobytes.
    RunConfig,
    /// The hosts of a cluster, one a line.
    Hosts,
    /// Any other file.
    Other,
}

impl Kind {
    /// The most bytes of such a file.
    pub const fn most_bytes(self) -> u64 {
        match self {
            Kind::RunConfig | Kind::Hosts => 1 << 20,
            Kind::Config | Kind::TrainerState => 16 << 20,
            Kind::TensorIndex => 64 << 20,
            Kind::Index | Kind::Tokenizer => 256 << 20,
            Kind::Other => 1 << 30,
        }
    }

    /// The kind of a file with this name; folders before the name do not matter.
    pub fn of_name(name: &str) -> Kind {
        match name.rsplit('/').next().unwrap_or(name) {
            "index.json" => Kind::Index,
            "trainer.json" => Kind::TrainerState,
            "tokenizer.json" => Kind::Tokenizer,
            name if name.ends_with(".safetensors.index.json") => Kind::TensorIndex,
            "config.json" | "tokenizer_config.json" | "special_tokens_map.json" => Kind::Config,
            _ => Kind::Other,
        }
    }

    /// Its name in errors.
    fn called(self) -> &'static str {
        match self {
            Kind::Index => "an index",
            Kind::Config => "a config",
            Kind::TensorIndex => "an index of tensors",
            Kind::TrainerState => "the state of a run",
            Kind::Tokenizer => "a tokenizer",
            Kind::RunConfig => "the config of a run",
            Kind::Hosts => "a file of hosts",
            Kind::Other => "a file that is read whole",
        }
    }

    /// Checks the size of such a file.
    ///
    /// # Errors
    /// [`Refused::TooLarge`].
    pub fn check(self, bytes: u64) -> Result<(), Refused> {
        match bytes <= self.most_bytes() {
            true => Ok(()),
            false => Err(Refused::TooLarge { found: bytes, kind: self }),
        }
    }
}

/// Why a file is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    /// It is a pipe, a device or a folder.
    #[error("it is {found}, expected a regular file")]
    NotAFile {
        /// Its type.
        found: &'static str,
    },
    /// It has more bytes than its kind allows.
    #[error("it has {found} bytes, expected at most {most} for {called}", most = .kind.most_bytes(), called = .kind.called())]
    TooLarge {
        /// Its bytes; for a file that grows while it is read, a lower bound.
        found: u64,
        /// The kind of file that was expected.
        kind: Kind,
    },
}

impl From<Refused> for io::Error {
    fn from(refused: Refused) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, refused)
    }
}

/// Opens a regular file for reading.
///
/// # Errors [`Refused::NotAFile`] at once for everything else, also where opening it would block (a
/// pipe without a writer); else the error of the operating system.
pub fn open(path: &Path) -> io::Result<File> {
    // A socket cannot be opened at all, and opening a device may have an effect.
    check_type(fs::metadata(path)?.file_type())?;
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        // Another process may have put a pipe in its place since. For a regular file the flag
        // changes nothing.
        use std::os::unix::fs::OpenOptionsExt;
        options.custom_flags(libc::O_NONBLOCK);
    }
    let file = options.open(path)?;
    check_type(file.metadata()?.file_type())?;
    Ok(file)
}

/// Reads a whole file of a kind.
///
/// # Errors
/// As [`open`], and [`Refused::TooLarge`] before more is read than the kind allows.
pub fn read(path: &Path, kind: Kind) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let bytes = file.metadata()?.len();
    kind.check(bytes)?;
    read_at_most(file, bytes, kind)
}

/// Reads the rest, given the expected number of bytes.
fn read_at_most(file: impl Read, expected_bytes: u64, kind: Kind) -> io::Result<Vec<u8>> {
    let mut content = Vec::with_capacity(usize::try_from(expected_bytes).unwrap_or(0));
    // One byte more than allowed, to distinguish a file that is too long from one that just fits.
    file.take(kind.most_bytes() + 1).read_to_end(&mut content)?;
    kind.check(content.len() as u64)?;
    Ok(content)
}

fn check_type(found: FileType) -> Result<(), Refused> {
    match found.is_file() {
        true => Ok(()),
        false => Err(Refused::NotAFile { found: name_of(found) }),
    }
}

#[cfg(unix)]
fn name_of(found: FileType) -> &'static str {
    use std::os::unix::fs::FileTypeExt;
    match found {
        found if found.is_dir() => "a folder",
        found if found.is_fifo() => "a pipe",
        found if found.is_socket() => "a socket",
        _ => "a device",
    }
}

#[cfg(not(unix))]
fn name_of(found: FileType) -> &'static str {
    if found.is_dir() { "a folder" } else { "a device" }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts the bytes that are read of an endless file.
    struct Endless(u64);

    impl Read for Endless {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            self.0 += bytes.len() as u64;
            Ok(bytes.len())
        }
    }

    #[test]
    fn a_sparse_file_of_gigabytes_is_refused_before_it_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("index.json");
        let file = File::create(&path).unwrap();
        file.set_len(5_000_000_000).unwrap();
        let error = read(&path, Kind::Index).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let expected = "it has 5000000000 bytes, expected at most 268435456 for an index";
        assert_eq!(error.to_string(), expected);
        file.set_len(3).unwrap();
        assert_eq!(read(&path, Kind::Index).unwrap(), [0; 3]);
    }

    #[test]
    fn a_file_that_grows_without_end_is_read_up_to_its_bound() {
        let mut endless = Endless(0);
        let error = read_at_most(&mut endless, 7, Kind::Config).unwrap_err();
        assert!(error.to_string().ends_with("for a config"), "{error}");
        assert_eq!(endless.0, Kind::Config.most_bytes() + 1);
    }

    #[cfg(unix)]
    #[test]
    fn pipes_sockets_devices_and_folders_are_refused_without_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let made = std::process::Command::new("mkfifo").arg(at("pipe")).status().unwrap();
        assert!(made.success());
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", at("link")).unwrap();
        std::os::unix::fs::symlink("pipe", at("linked")).unwrap();
        fs::create_dir(at("folder")).unwrap();
        for (name, found) in [
            ("pipe", "a pipe"),
            ("linked", "a pipe"),
            ("socket", "a socket"),
            ("link", "a device"),
            ("folder", "a folder"),
        ] {
            for error in [open(&at(name)).unwrap_err(), read(&at(name), Kind::Config).unwrap_err()]
            {
                assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{name}");
                assert_eq!(error.to_string(), format!("it is {found}, expected a regular file"));
            }
        }
        assert_eq!(open(&at("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::write(at("file"), "ab").unwrap();
        std::os::unix::fs::symlink("file", at("good")).unwrap();
        assert_eq!(read(&at("good"), Kind::Other).unwrap(), b"ab");
    }

    #[test]
    fn names_tell_the_kind() {
        for (name, kind) in [
            ("index.json", Kind::Index),
            ("a/b/index.json", Kind::Index),
            ("model.safetensors.index.json", Kind::TensorIndex),
            ("trainer.json", Kind::TrainerState),
            ("step-00000100/config.json", Kind::Config),
            ("tokenizer.json", Kind::Tokenizer),
            ("model.safetensors", Kind::Other),
        ] {
            assert_eq!(Kind::of_name(name), kind, "{name}");
        }
    }
}
