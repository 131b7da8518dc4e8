//! What the tests of several processes share.

use std::{
    fs,
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use tempfile::TempDir;
use tidemill_streaming_data::prepare::PrepareSettings;

use crate::outcome::names;

/// What two processes usually have on their way, and next to nothing.
pub const ROOM: usize = 4 << 20;
pub const NO_ROOM: usize = 1;

/// A folder to work in, in memory where there is one.
pub struct Bench {
    pub folder: TempDir,
}

impl Bench {
    pub fn new() -> Bench {
        let memory = Path::new("/dev/shm");
        let folder = match memory.is_dir() {
            true => tempfile::tempdir_in(memory).unwrap(),
            false => tempfile::tempdir().unwrap(),
        };
        fs::create_dir(folder.path().join("in")).unwrap();
        Bench { folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    pub fn settings(&self) -> PrepareSettings {
        let settings = PrepareSettings::new(vec![self.path("in")], self.path("out"), number(16));
        PrepareSettings { shard_samples: Some(number(60)), ..settings }
    }

    /// What is left in the folder but for lists.
    pub fn left(&self) -> Vec<String> {
        names(self.folder.path()).into_iter().filter(|name| !name.ends_with(".txt")).collect()
    }
}

pub fn number(number: usize) -> NonZeroUsize {
    NonZeroUsize::new(number).unwrap()
}
