//! A power cut at any moment leaves what was promised: data is on the disk before the name that
//! relies on it.
//!
//! A recorder between the program and the C library records the operations on files, in order. From
//! the record these tests derive what a disk is sure to hold: bytes up to the last sync of their
//! file, names up to the last sync of their folder.
//!
//! Seen red: logs that are not synced before a checkpoint's rename, a checkpoint whose tensors are not synced, folders of a
//! checkpoint, of checkpoints and of a run whose names are not synced, a run.toml that is renamed before it is synced, a
//! prepared data set whose shards, or whose folder's name, are not synced, an update whose files, or whose names, are not
//! synced before an index lists them, and files of a shared checkpoint that process 0 writes alone.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use tempfile::TempDir;
use tidemill::streaming_data::data_set::index::{INDEX_FILE, Index, version_file};

use crate::support::{Running, Workbench};

/// The library that is loaded before the C library.
static RECORDER: LazyLock<TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/durability/recorder.cpp");
    let compiled = Command::new("g++")
        .args(["-O1", "-shared", "-fPIC", "-o", LIBRARY, source, "-ldl"])
        .current_dir(folder.path())
        .output()
        .expect("these tests need g++");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    folder
});

const LIBRARY: &str = "recorder.so";

/// One operation.
#[derive(Clone, Debug, PartialEq)]
enum Operation {
    Make(PathBuf),
    Write(PathBuf),
    Sync(PathBuf, u64),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
}

impl Operation {
    /// The operation in a line of the record, and its process.
    fn parse(line: &str) -> (u32, Self) {
        let words: Vec<&str> = line.split('\t').collect();
        let (process, words) = words.split_first().unwrap();
        let operation = match *words {
            ["make", path] => Self::Make(path.into()),
            ["write", path] => Self::Write(path.into()),
            ["sync", path, bytes] => Self::Sync(path.into(), bytes.parse().unwrap()),
            ["rename", from, to] => Self::Rename(from.into(), to.into()),
            ["remove", path] => Self::Remove(path.into()),
            _ => panic!("a line of the recorder: {line}"),
        };
        (process.parse().unwrap(), operation)
    }
}

/// The environment in which the recorder records the operations in a folder.
pub fn recording(folder: &Path, record: &Path) -> [(String, String); 3] {
    // The folder for temporary folders may be a link; the record has resolved paths.
    let folder = folder.canonicalize().unwrap();
    let path_of = |path: &Path| path.to_str().unwrap().to_owned();
    let environment = [
        ("LD_PRELOAD", path_of(&RECORDER.path().join(LIBRARY))),
        ("RECORDED_FOLDER", path_of(&folder)),
        ("RECORD", path_of(record)),
    ];
    environment.map(|(name, value)| (name.to_owned(), value))
}

/// Runs the program in the workbench's folder; returns the operations of its processes on files
/// there.
fn recorded(bench: &Workbench, arguments: &[&str]) -> Vec<(u32, Operation)> {
    let folder = bench.folder().canonicalize().unwrap();
    let record = tempfile::NamedTempFile::new().unwrap();
    let environment = recording(&folder, record.path());
    Running::start_with(&environment, &folder, arguments).finish().expect(0);
    std::fs::read_to_string(record.path()).unwrap().lines().map(Operation::parse).collect()
}

/// The state of a file or folder, changed or created, that a disk is sure to hold.
#[derive(Clone, Copy, Debug, Default)]
struct Kept {
    /// Its name is durable.
    name: bool,
    /// Nothing was written since the last sync.
    content: bool,
    /// Bytes that the last sync kept.
    bytes: u64,
}

/// What a disk is sure to hold; files that are not listed existed before.
#[derive(Default)]
struct Disk(BTreeMap<PathBuf, Kept>);

impl Disk {
    fn apply(&mut self, operation: &Operation) {
        match operation {
            Operation::Make(path) => {
                self.0.insert(path.clone(), Kept { content: true, ..Kept::default() });
            }
            Operation::Write(path) => self.0.entry(path.clone()).or_default().content = false,
            Operation::Sync(path, bytes) => {
                for (_, kept) in self.0.iter_mut().filter(|(name, _)| name.parent() == Some(path)) {
                    kept.name = true;
                }
                if let Some(kept) = self.0.get_mut(path) {
                    (kept.content, kept.bytes) = (true, *bytes);
                }
            }
            Operation::Rename(from, to) => {
                self.0.retain(|path, _| !path.starts_with(to));
                let moved: Vec<_> =
                    self.0.extract_if(.., |path, _| path.starts_with(from)).collect();
                for (path, mut kept) in moved {
                    let below = path.strip_prefix(from).unwrap();
                    kept.name &= below != Path::new("");
                    let path = if below == Path::new("") { to.clone() } else { to.join(below) };
                    self.0.insert(path, kept);
                }
            }
            Operation::Remove(path) => {
                self.0.remove(path);
            }
        }
    }

    /// The entries below `folder`, itself included.
    fn below(&self, folder: &Path) -> impl Iterator<Item = (&Path, &Kept)> {
        let below = self.0.iter().filter(move |(path, _)| path.starts_with(folder));
        below.map(|(path, kept)| (path.as_path(), kept))
    }

    /// Everything below `folder` is durable, with its contents; its own name need not be.
    fn assert_whole(&self, folder: &Path) {
        assert!(self.0.contains_key(folder), "{} was never made", folder.display());
        for (path, kept) in self.below(folder) {
            assert!(kept.content, "{} is not synced", path.display());
            assert!(kept.name || path == folder, "the name of {} is not synced", path.display());
        }
    }

    /// The names of `path` and of the folders above it are durable.
    fn assert_named(&self, path: &Path) {
        for path in path.ancestors() {
            let is_named = self.0.get(path).is_none_or(|kept| kept.name);
            assert!(is_named, "the name of {} is not synced", path.display());
        }
    }
}

/// The step of a complete checkpoint's path.
fn step(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()
}

/// Bytes of a log up to the end of the line of `step`.
fn log_bytes(log: &Path, step: u64) -> u64 {
    let text = std::fs::read_to_string(log).unwrap();
    let lines = text.split_inclusive('\n').filter(|line| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        line["step"].as_u64().unwrap() <= step
    });
    lines.map(|line| line.len() as u64).sum()
}

#[test]
fn what_a_checkpoint_relies_on_is_kept_before_it_has_its_name() {
    let writers = kept_before_named(&["-w", "2"]);
    assert_eq!(writers["model.safetensors"], writers["optimizer.safetensors"]);
}

#[test]
fn what_several_processes_write_is_kept_before_it_has_its_name() {
    let writers = kept_before_named(&["-n", "2", "-w", "1"]);
    let [model, optimizer] =
        ["model.safetensors", "optimizer.safetensors"].map(|name| &writers[name]);
    assert!(model.is_disjoint(optimizer), "each is written by a process: {writers:?}");
    assert_eq!(&writers["trainer.json"], model, "process 0 completes what both have written");
}

/// Follows a run and the run that resumes it; returns which processes wrote the files of each name.
fn kept_before_named(world: &[&str]) -> BTreeMap<String, BTreeSet<u32>> {
    let bench = Workbench::new();
    let mut writers: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
    let run = bench.folder().canonicalize().unwrap().join("new/run");
    let set = ["run.dir=new/run", "evaluation.dataset=validation", "evaluation.every_steps=2"];
    let set = [&set[..], &["checkpoint.keep=1"]].concat();
    let mut disk = Disk::default();
    let mut checkpoints = Vec::new();
    // The second run starts with a log that is longer than its checkpoint.
    for steps in ["run.steps=4", "run.steps=7"] {
        let set = [&set[..], &[steps]].concat();
        let set: Vec<_> = set.iter().flat_map(|key| ["--set", key]).collect();
        let operations = recorded(&bench, &[&["train", "run.toml"], world, &set[..]].concat());
        for (process, operation) in &operations {
            match operation {
                Operation::Write(path) => {
                    let name = path.file_name().unwrap().to_string_lossy().into_owned();
                    writers.entry(name).or_default().insert(*process);
                }
                Operation::Rename(from, to) => {
                    disk.assert_whole(from);
                    if let Some(step) = step(to) {
                        disk.assert_named(to.parent().unwrap());
                        for name in ["run.toml", "devices.json"] {
                            let kept = disk.0[&run.join(name)];
                            assert!(kept.name && kept.content, "{name} at step {step}");
                        }
                        for name in ["metrics.jsonl", "evaluation.jsonl"] {
                            let (kept, path) = (disk.0[&run.join(name)], run.join(name));
                            let needed = log_bytes(&path, step);
                            assert!(kept.name && kept.bytes >= needed, "{name} at step {step}");
                        }
                        checkpoints.push(to.clone());
                    }
                }
                // An older checkpoint is removed only once the newer one is durable.
                Operation::Remove(path)
                    if path.ancestors().any(|folder| step(folder).is_some()) =>
                {
                    disk.assert_named(checkpoints.last().unwrap());
                }
                _ => {}
            }
            disk.apply(operation);
        }
        disk.assert_named(checkpoints.last().unwrap());
    }
    let steps: Vec<_> = checkpoints.iter().filter_map(|path| step(path)).collect();
    assert_eq!(steps, [2, 4, 6, 7]);
    writers
}

#[test]
fn a_prepared_data_set_is_kept_before_it_has_its_name() {
    let bench = Workbench::new();
    let output = bench.folder().canonicalize().unwrap().join("deep/er/set");
    let arguments = ["prepare", "--input", "data-text", "--tokenizer", "bytes", "--seq-len", "16"];
    let operations = recorded(&bench, &[&arguments[..], &["--output", "deep/er/set"]].concat());
    let mut disk = Disk::default();
    let mut renames = 0;
    for (_, operation) in &operations {
        if let Operation::Rename(from, to) = operation {
            assert_eq!(*to, output);
            disk.assert_whole(from);
            renames += 1;
        }
        disk.apply(operation);
    }
    assert_eq!(renames, 1);
    assert!(disk.below(&output).count() > 2, "the recorder saw the shards and their index");
    disk.assert_named(&output);
}

/// A power cut leaves the old version or the new one, with all files that its index lists: an index
/// gets its name only once all shards and state that it lists are durable.
#[test]
fn what_an_update_writes_is_kept_before_an_index_lists_it() {
    let bench = Workbench::new();
    let kept = bench.folder().canonicalize().unwrap().join("kept");
    let arguments = ["prepare", "--input", "data-text", "--output", "kept", "--updatable"];
    let small = ["--seq-len", "16", "--shard-samples", "40"];
    bench.tidemill(&[&arguments[..], &small].concat()).expect(0);
    let before = Index::read(&kept).unwrap();
    bench.write("data-text/new.txt", "a text that is new ".repeat(90));
    let operations = recorded(&bench, &["prepare", "--output", "kept", "--update"]);
    let index = Index::read(&kept).unwrap();
    let (state, version) = (index.state.clone().unwrap(), kept.join(version_file(&index)));
    let parts: serde_json::Value =
        serde_json::from_slice(&std::fs::read(kept.join(&state.file)).unwrap()).unwrap();
    let parts =
        parts["parts"].as_array().unwrap().iter().map(|part| part["file"].as_str().unwrap());
    let files = index.shards.iter().map(|shard| shard.file.as_str());
    let files: Vec<_> =
        files.chain(parts).chain([state.file.as_str()]).map(|file| kept.join(file)).collect();

    let (mut disk, mut named) = (Disk::default(), Vec::new());
    for (_, operation) in &operations {
        if let Operation::Rename(from, to) = operation
            && (*to == version || *to == kept.join(INDEX_FILE))
        {
            assert!(disk.0[from].content, "{} is not synced", from.display());
            let own = (*to != version).then_some(&version);
            for path in files.iter().chain(own) {
                disk.assert_named(path);
                assert!(
                    disk.0.get(path).is_none_or(|kept| kept.content),
                    "{} is not synced",
                    path.display()
                );
            }
            named.push(to.clone());
        }
        disk.apply(operation);
    }
    assert_eq!(named, [version, kept.join(INDEX_FILE)]);
    named.iter().for_each(|path| disk.assert_named(path));
    assert_ne!(index.fingerprint(), before.fingerprint());
    let is_new = |path: &&PathBuf| disk.0.contains_key(*path);
    assert!(files.iter().filter(is_new).count() > 2, "the recorder saw new shards and their state");
}
