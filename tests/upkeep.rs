//! A data set that follows its inputs, with kills of the program at any moment: the newest version
//! is complete each time, and the next start needs no help.
//!
//! The recorder of [`durability`](crate::durability) kills the program at a numbered operation on
//! the data set's files: the same moment each time, however busy the machine is.
//!
//! Seen red: an index that is replaced before its shards are in place, and hidden folders that stay behind a kill where `prune`
//! comes next.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use tidemill::streaming_data::DataSet;

use crate::durability::recording;
use crate::support::outcome::files;
use crate::support::processes::wait_until;
use crate::support::{Running, Workbench};

/// Of a data set of short rows in small shards, so that a change makes several files new.
const PREPARE: [&str; 10] = [
    "prepare",
    "--input",
    "data-text",
    "--seq-len",
    "17",
    "--shard-samples",
    "40",
    "--updatable",
    "--output",
    "kept",
];

const INDEX: &str = "index.json";

/// The record of the inputs' times and sizes, which is no part of a data set.
const SEEN: &str = "state/seen";

type Files = BTreeMap<String, Vec<u8>>;

/// A data set, and the files of a preparation from nothing for each state of its inputs, by the
/// index.
struct Followed {
    bench: Workbench,
    history: BTreeMap<Vec<u8>, Files>,
    changes: usize,
}

impl Followed {
    fn new() -> Followed {
        let bench = Workbench::new();
        bench.tidemill(&PREPARE).expect(0);
        let mut followed = Followed { bench, history: BTreeMap::new(), changes: 0 };
        followed.note();
        followed
    }

    /// The files of a preparation of the present inputs.
    fn anew(&self) -> Files {
        let mut anew = PREPARE;
        anew[9] = "anew";
        self.bench.tidemill(&anew).expect(0);
        let mut found = files(&self.bench.path("anew"));
        fs::remove_dir_all(self.bench.path("anew")).unwrap();
        found.remove(SEEN).unwrap();
        found
    }

    fn note(&mut self) {
        let anew = self.anew();
        self.history.insert(anew[INDEX].clone(), anew);
    }

    /// Changes the inputs, differently each time.
    fn change(&mut self) {
        let at = self.changes;
        self.changes += 1;
        // In one step, so that no update sees half of a change.
        let new = self.bench.write("new", format!("change {at} of a text ").repeat(40 + at));
        fs::rename(new, self.bench.path(&format!("data-text/new-{}.txt", at % 5))).unwrap();
        self.note();
    }

    /// The newest version is one of those, with all of its files; other files belong to another
    /// version or to a killed update.
    #[track_caller]
    fn assert_is_whole(&self, what: &str) {
        DataSet::open(self.bench.path("kept")).unwrap();
        let found = files(&self.bench.path("kept"));
        let version = self.history.get(&found[INDEX]);
        let version =
            version.unwrap_or_else(|| panic!("{what}: an index of no state of the inputs"));
        for (name, content) in version {
            assert!(found.get(name) == Some(content), "{what}: {name}");
        }
        let known: BTreeSet<&String> = self.history.values().flat_map(BTreeMap::keys).collect();
        let unknown: Vec<_> = found.keys().filter(|name| !known.contains(name)).collect();
        let is_of_killed =
            |name: &str| [SEEN, "state/lock"].contains(&name) || name.starts_with(".updating-");
        assert!(unknown.iter().all(|name| is_of_killed(name)), "{what}: {unknown:?}");
    }

    /// Starts to follow, and is killed by the recorder at its line `killed_at`.
    fn follow(&self, record: &Path, killed_at: usize) -> Running {
        let _ = fs::remove_file(self.bench.path("printed"));
        let environment = recording(&self.bench.path("kept"), record);
        let killed_at = [("KILLED_AT".to_owned(), killed_at.to_string())];
        let variables = environment.iter().chain(&killed_at);
        let variables: Vec<_> =
            variables.map(|(name, value)| format!("{name}='{value}'")).collect();
        let line = format!("export {}; exec \"$@\" >printed 2>told", variables.join(" "));
        let arguments =
            ["prepare", "--output", "kept", "--follow", "--look-seconds", "1", "--format", "json"];
        Running::start_in_shell(self.bench.folder(), &line, &arguments)
    }

    /// Waits until this many versions are printed, or the program has ended; returns whether they
    /// are.
    fn has_printed(&self, follow: &mut Running, versions: usize) -> bool {
        let lines = || {
            let printed = fs::read(self.bench.path("printed")).unwrap_or_default();
            printed.iter().filter(|&&byte| byte == b'\n').count()
        };
        wait_until("a version", || lines() >= versions || follow.has_ended());
        lines() >= versions
    }

    fn told(&self) -> String {
        fs::read_to_string(self.bench.path("told")).unwrap()
    }
}

/// Moments are spread over all operations on files in two consecutive updates, the first and the
/// last among them, and are dense where the first update puts files in place. The program is also
/// killed while it waits.
#[test]
fn following_that_is_killed_at_any_moment_leaves_a_version_and_goes_on() {
    const SPREAD: usize = 14;
    const CLOSE: usize = 24;
    let mut followed = Followed::new();
    let record = tempfile::NamedTempFile::new().unwrap();
    let lines = || fs::read_to_string(record.path()).unwrap().lines().count();
    // The operations without a kill.
    followed.change();
    let mut follow = followed.follow(record.path(), usize::MAX >> 1);
    assert!(followed.has_printed(&mut follow, 1), "{}", followed.told());
    let first = lines();
    followed.change();
    assert!(followed.has_printed(&mut follow, 2), "{}", followed.told());
    follow.signal("KILL");
    assert_eq!(follow.finish().status.code(), None);
    followed.assert_is_whole("while it waited");
    let both = lines();
    assert!(first > 30 && both > first + 30, "{first} and {both} operations");

    let spread = (0..=SPREAD).map(|moment| (both * moment / SPREAD).max(1));
    let mut killed = 0;
    for killed_at in spread.chain(first - CLOSE..first) {
        let what = format!("operation {killed_at} of {both}");
        followed.change();
        let mut follow = followed.follow(record.path(), killed_at);
        if followed.has_printed(&mut follow, 1) {
            followed.change();
            if followed.has_printed(&mut follow, 2) {
                // It had less to do than before.
                follow.signal("KILL");
            }
        }
        killed += usize::from(follow.finish().status.code().is_none());
        assert_eq!(followed.told(), "", "{what}");
        followed.assert_is_whole(&what);
    }
    assert_eq!(killed, SPREAD + 1 + CLOSE);

    // The last change needs only another start, which removes the files of killed updates.
    let mut follow = followed.follow(record.path(), usize::MAX >> 1);
    assert!(followed.has_printed(&mut follow, 1), "{}", followed.told());
    follow.signal("TERM");
    follow.finish().expect(0);
    followed.assert_is_whole("at last");
    let (found, anew) = (files(&followed.bench.path("kept")), followed.anew());
    assert!(found[INDEX] == anew[INDEX], "the last change is in it");
    let hidden = |name: &&String| name.starts_with('.') || *name == "state/lock";
    assert_eq!(found.keys().find(hidden), None);
    followed.bench.tidemill(&["inspect", "kept"]).expect(0);
    followed.bench.tidemill(&["prune", "kept"]).expect(0);
    let mut left = files(&followed.bench.path("kept"));
    assert!(left.remove(SEEN).is_some());
    assert!(left == anew, "{:?}", left.keys());
}

/// The next `prune` also removes the files of a killed update, if no other update comes before.
#[test]
fn prune_removes_what_a_killed_update_left() {
    let mut followed = Followed::new();
    let record = tempfile::NamedTempFile::new().unwrap();
    let before = followed.anew();
    followed.change();
    let is_hidden = |name: &String| name.starts_with(".updating-");
    let follow = followed.follow(record.path(), 12);
    assert_eq!(follow.finish().status.code(), None);
    let killed = files(&followed.bench.path("kept"));
    assert!(killed.keys().any(is_hidden), "{:?}", killed.keys());
    followed.bench.tidemill(&["prune", "kept"]).expect(0);
    let mut left = files(&followed.bench.path("kept"));
    assert!(left.remove(SEEN).is_some());
    assert!(left == before, "{:?}", left.keys());
    let folders = fs::read_dir(followed.bench.path("kept")).unwrap();
    let folders = folders.filter(|entry| entry.as_ref().unwrap().file_type().unwrap().is_dir());
    assert_eq!(folders.count(), 2, "the state and the indexes");
}
