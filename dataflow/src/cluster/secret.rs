//! The secret that the processes of a cluster share, and where it comes from.
//!
//! It is text; both ends of a connection derive the key of their handshake from it
//! ([`Channel`](super::channel::Channel)). The program reads it from the environment or from a
//! file that only its owner can read; a supervisor makes one for its processes. It is never part of
//! a command line, a log or an error.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::ciphers::random;
use super::error::ClusterError;

/// The environment variable that holds the secret.
const VARIABLE: &str = "TIDEMILL_CLUSTER_SECRET";
/// The environment variable that names the file of the secret.
const FILE_VARIABLE: &str = "TIDEMILL_CLUSTER_SECRET_FILE";
/// Fewer characters can be guessed.
const SHORTEST_BYTES: usize = 16;
/// A file that is longer is not one with a secret.
const LONGEST_BYTES: usize = 4096;
const GENERATED_BYTES: usize = 32;

/// The secret that the processes of one cluster share.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<str>);

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Secret(..)")
    }
}

impl Secret {
    /// A secret given as text; white space around it is left out. `origin` names its place in errors.
    ///
    /// # Errors
    /// If it has fewer than 16 bytes or more than 4096.
    pub fn new(text: &str, origin: &str) -> Result<Self, ClusterError> {
        let text = text.trim();
        if !(SHORTEST_BYTES..=LONGEST_BYTES).contains(&text.len()) {
            let (origin, found) = (origin.to_string(), text.len());
            return Err(ClusterError::SecretLength { origin, found });
        }
        Ok(Self(text.into()))
    }

    /// A new secret, from the system's random numbers.
    ///
    /// # Errors
    /// If the system has none.
    pub fn generate() -> Result<Self, ClusterError> {
        let mut bytes = [0; GENERATED_BYTES];
        random(&mut bytes)?;
        let digits: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self(digits.concat().into()))
    }

    /// The secret in `TIDEMILL_CLUSTER_SECRET`, or in the file that `TIDEMILL_CLUSTER_SECRET_FILE`
    /// names; none where neither is set.
    ///
    /// # Errors
    /// If both are set, the file is not one that only its owner can read, or the length is wrong.
    pub fn from_environment() -> Result<Option<Self>, ClusterError> {
        let text = std::env::var_os(VARIABLE);
        let file = std::env::var_os(FILE_VARIABLE);
        match (text, file) {
            (None, None) => Ok(None),
            (Some(text), None) => Self::new(&text.to_string_lossy(), VARIABLE).map(Some),
            (None, Some(path)) => Self::from_file(&PathBuf::from(path)).map(Some),
            (Some(_), Some(_)) => {
                Err(ClusterError::SecretTwice { variable: VARIABLE, other: FILE_VARIABLE })
            }
        }
    }

    /// The secret in a file.
    ///
    /// # Errors
    /// If the file cannot be read, is not a regular file, others than its owner may read or write
    /// it, or the length is wrong.
    pub fn from_file(path: &Path) -> Result<Self, ClusterError> {
        let unreadable = |source| ClusterError::SecretUnreadable {
            path: path.to_path_buf(),
            source: Arc::new(source),
        };
        // Opening a pipe would wait for its writer.
        if !std::fs::metadata(path).map_err(unreadable)?.is_file() {
            return Err(unreadable(io::Error::new(io::ErrorKind::InvalidInput, "expected a file")));
        }
        let file = File::open(path).map_err(unreadable)?;
        // The permissions of the open file, since another file could have taken its name meanwhile.
        let mode = permissions(&file.metadata().map_err(unreadable)?);
        if mode & 0o077 != 0 {
            return Err(ClusterError::SecretExposed { path: path.to_path_buf(), mode });
        }
        let mut bytes = Vec::new();
        // One byte more than is allowed, and the end of the line.
        let limit = LONGEST_BYTES as u64 + 2;
        file.take(limit).read_to_end(&mut bytes).map_err(unreadable)?;
        Self::new(&String::from_utf8_lossy(&bytes), &path.display().to_string())
    }

    /// The public constant that replaces the secret where there is none.
    pub(super) fn well_known() -> Self {
        Self("".into())
    }

    /// The text, for the environment of a process of the same cluster.
    pub(super) fn text(&self) -> &str {
        &self.0
    }
}

#[cfg(unix)]
fn permissions(metadata: &std::fs::Metadata) -> u32 {
    use std::os::unix::fs::PermissionsExt;
    metadata.permissions().mode() & 0o7777
}

/// Where files have no modes, the owner answers for them.
#[cfg(not(unix))]
fn permissions(_metadata: &std::fs::Metadata) -> u32 {
    0o600
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn file(text: &[u8], mode: u32) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        (folder, path)
    }

    #[test]
    fn the_end_of_the_line_is_no_part_of_a_secret() {
        let (_folder, path) = file(b"0123456789abcdef\n", 0o600);
        let read = Secret::from_file(&path).unwrap();
        assert_eq!(read, Secret::new("0123456789abcdef", "a test").unwrap());
        assert_eq!(read, Secret::new("0123456789abcdef\r\n", "a test").unwrap());
        assert_ne!(read, Secret::well_known());
        assert_eq!(format!("{read:?}"), "Secret(..)");
    }

    #[test]
    fn a_file_that_others_may_read_says_how_to_close_it() {
        for mode in [0o640, 0o604, 0o602, 0o666] {
            let (_folder, path) = file(b"0123456789abcdef\n", mode);
            let text = Secret::from_file(&path).unwrap_err().to_string();
            assert!(text.contains(&format!("chmod 600 {}", path.display())), "{text}");
            assert!(text.contains(&format!("{mode:o}")), "{text}");
        }
        let (_folder, path) = file(b"0123456789abcdef\n", 0o400);
        Secret::from_file(&path).unwrap();
    }

    #[test]
    fn short_long_and_strange_files_are_refused_without_their_content() {
        for text in [&b"hunter2\n"[..], b"", &[b'x'; 5000]] {
            let (_folder, path) = file(text, 0o600);
            let message = Secret::from_file(&path).unwrap_err().to_string();
            assert!(message.contains("16 to 4096") && !message.contains("hunter2"), "{message}");
        }
        let folder = tempfile::tempdir().unwrap();
        let error = Secret::from_file(folder.path()).unwrap_err();
        assert!(error.with_causes().ends_with("expected a file"), "{error}");
        let error = Secret::from_file(&folder.path().join("absent")).unwrap_err();
        assert!(matches!(error, ClusterError::SecretUnreadable { .. }), "{error}");
    }

    #[test]
    fn generated_secrets_differ() {
        let (one, other) = (Secret::generate().unwrap(), Secret::generate().unwrap());
        assert_eq!(one.text().len(), 2 * GENERATED_BYTES);
        assert_ne!(one, other);
    }
}
