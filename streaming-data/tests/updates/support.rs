//! A folder of documents that change, and data sets of it.

use std::{
    collections::BTreeMap,
    fs,
    num::NonZeroUsize,
    ops::ControlFlow,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use tempfile::TempDir;
use tidemill_streaming_data::prepare::{
    ByteTokenizer, Layout, PrepareError, PrepareReport, PrepareSettings, UpdateReport,
    UpdateSettings, prepare, update,
};

/// Every file of a folder and those in it, by its path below.
pub type Files = BTreeMap<String, Vec<u8>>;

/// A folder to work in, whose inputs are in `in`.
pub struct Bench {
    folder: TempDir,
    /// Seconds that changes are apart in the times of files; all are long ago.
    clock: u64,
}

impl Bench {
    pub fn new() -> Bench {
        // Data sets are synced to the disk, which takes most of the time where there is one.
        let memory = Path::new("/dev/shm");
        let folder = match memory.is_dir() {
            true => tempfile::tempdir_in(memory).unwrap(),
            false => tempfile::tempdir().unwrap(),
        };
        fs::create_dir(folder.path().join("in")).unwrap();
        Bench { folder, clock: 0 }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a file, at a time of its own.
    pub fn write(&mut self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        self.touch(name);
        path
    }

    /// Gives a file a time of its own.
    pub fn touch(&mut self, name: &str) {
        self.clock += 1;
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_600_000_000 + self.clock);
        let file = fs::File::options().append(true).open(self.path(name)).unwrap();
        file.set_modified(time).unwrap();
    }

    pub fn remove(&self, name: &str) {
        fs::remove_file(self.path(name)).unwrap();
    }

    /// Settings for rows of 17 tokens and shards of about 700.
    pub fn settings(&self, output: &str) -> PrepareSettings {
        let settings = PrepareSettings::new(vec![self.path("in")], self.path(output), number(16));
        PrepareSettings { shard_samples: Some(number(44)), layout: Layout::Updatable, ..settings }
    }

    pub fn update(&self, output: &str) -> Result<UpdateReport, PrepareError> {
        self.update_with(&UpdateSettings::new(self.path(output)))
    }

    pub fn update_with(&self, settings: &UpdateSettings) -> Result<UpdateReport, PrepareError> {
        update(settings, &ByteTokenizer, &mut |_| ControlFlow::Continue(()))
    }
}

pub fn prepared(settings: &PrepareSettings) -> PrepareReport {
    prepare(settings, &ByteTokenizer, &mut |_| ControlFlow::Continue(())).unwrap()
}

/// A word for a number, in letters: digits are all alike where near copies are looked for.
pub fn word(number: usize) -> String {
    let letter = |power: u32| char::from(b'a' + (number / 26_usize.pow(power) % 26) as u8);
    (0..4).map(letter).collect()
}

pub fn number(number: usize) -> NonZeroUsize {
    NonZeroUsize::new(number).unwrap()
}

/// Every file of a folder and those in it.
pub fn files(folder: &Path) -> Files {
    let mut files = Files::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(inner) = folders.pop() {
        for entry in fs::read_dir(&inner).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned();
                files.insert(name, fs::read(&path).unwrap());
            }
        }
    }
    files
}

/// All files of a data set that was prepared now are in an updated one, the same to the byte.
#[track_caller]
pub fn assert_holds(updated: &Files, from_nothing: &Files) {
    for (name, content) in from_nothing {
        match updated.get(name) {
            Some(found) => assert!(found == content, "{name} is another"),
            None => panic!("{name} is missing of {:?}", updated.keys()),
        }
    }
}
