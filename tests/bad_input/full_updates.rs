//! Updates without enough room: one line that names the path, the old version unchanged, and no
//! other files beside it; with room the same update gives the bytes of a preparation from nothing.
//!
//! Seen red: indexes that are written beside those in place, files that are put in place before all have room, hidden folders that
//! stay, temporary files in another folder than the one that is asked for, and a note that comes twice.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use crate::support::outcome::files;
use crate::support::processes::wait_until;
use crate::support::{Finished, Running, Workbench};

/// Settings of a data set with short rows in small shards, so that a change creates several files.
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

const UPDATE: [&str; 4] = ["prepare", "--output", "kept", "--update"];

type Files = BTreeMap<String, Vec<u8>>;

/// A data set whose inputs have changed since it was prepared.
struct Outdated {
    bench: Workbench,
    before: Files,
    anew: Files,
}

impl Outdated {
    fn new() -> Outdated {
        let bench = Workbench::new();
        bench.tidemill(&PREPARE).expect(0);
        let before = files(&bench.path("kept"));
        for at in 0..4 {
            let new = format!("a text that is new, and another word: {at} ").repeat(40 + 9 * at);
            bench.write(&format!("data-text/new-{at}.txt"), new);
        }
        fs::remove_file(bench.path("data-text/3.txt")).unwrap();
        let anew = anew(&bench);
        Outdated { bench, before, anew }
    }

    /// A script of the shell that runs the program, as `"$@"`.
    fn run(&self, script: &str, arguments: &[&str]) -> Finished {
        Running::start_in_shell(self.bench.folder(), script, arguments).finish()
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.bench.path(name)).unwrap()
    }
}

/// The result of preparing the present inputs from nothing, without the record of file times.
fn anew(bench: &Workbench) -> Files {
    let mut anew = PREPARE;
    anew[9] = "anew";
    bench.tidemill(&anew).expect(0);
    let mut found = files(&bench.path("anew"));
    fs::remove_dir_all(bench.path("anew")).unwrap();
    found.remove("state/seen").unwrap();
    found
}

#[track_caller]
fn assert_holds(folder: &Path, expected: &Files, what: &str) {
    let found = files(folder);
    for (name, content) in expected {
        assert!(found.get(name) == Some(content), "{what}: {name}");
    }
}

/// All paths in a folder, those of folders too.
fn names(folder: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type().unwrap().is_dir() {
            names.extend(self::names(&entry.path()).iter().map(|inner| format!("{name}/{inner}")));
        }
        names.push(name);
    }
    names.sort();
    names
}

/// A limit on the size of files, larger each time: records of documents, shards, parts of the
/// state, and indexes exceed it one after the other.
#[test]
fn an_update_whose_files_may_not_grow() {
    let outdated = Outdated::new();
    let kept = outdated.bench.path("kept");
    let before = names(&kept);
    let mut places = BTreeSet::new();
    for blocks in 0.. {
        let what = format!("{blocks} blocks of 512 bytes");
        let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$@\"");
        let updated = outdated.run(&script, &UPDATE);
        if updated.status.success() {
            break;
        }
        let refused = updated.refused(75, &["tidemill: cannot ", "File too large"]);
        // The folder's name holds the number of a process.
        let path = refused.stderr.split(':').nth(1).unwrap();
        places.insert(path.rsplit('/').next().unwrap().to_owned());
        assert!(files(&kept) == outdated.before, "{what}");
        assert_eq!(names(&kept), before, "{what}");
    }
    assert!(places.len() > 2, "{places:?}");
    assert_holds(&kept, &outdated.anew, "with room");
}

/// Following continues without room, and reports that once; another change of the inputs, or more
/// room, ends it.
#[test]
fn following_whose_files_may_not_grow() {
    let bench = Workbench::new();
    bench.tidemill(&PREPARE).expect(0);
    let first = anew(&bench);
    // In blocks of 512 bytes: room for the largest file that is there, and not for an index of many more shards.
    let largest = first.values().map(Vec::len).max().unwrap();
    let script = format!(
        "trap '' XFSZ; ulimit -f {}; exec \"$@\" >printed 2>told",
        largest.div_ceil(512) + 4
    );
    let arguments =
        ["prepare", "--output", "kept", "--follow", "--look-seconds", "1", "--format", "json"];
    let mut follow = Running::start_in_shell(bench.folder(), &script, &arguments);
    let read = |name: &str| fs::read_to_string(bench.path(name)).unwrap_or_default();
    wait_until("a version", || follow.has_ended() || read("printed").contains('\n'));
    let large = bench.write("large", "a text that is new, of many words ".repeat(2000));
    fs::rename(large, bench.path("data-text/large.txt")).unwrap();
    wait_until("a note", || follow.has_ended() || read("told").contains('\n'));
    assert_holds(&bench.path("kept"), &first, "without room");
    fs::remove_file(bench.path("data-text/large.txt")).unwrap();
    let small = bench.write("small", "a text that is new ".repeat(30));
    fs::rename(small, bench.path("data-text/small.txt")).unwrap();
    wait_until("another version", || follow.has_ended() || read("printed").lines().count() > 1);
    follow.signal("TERM");
    follow.finish().expect(0);
    let told = read("told");
    let words =
        ["the version before stays for now: cannot write ", "kept/.updating-", "File too large"];
    assert!(words.iter().all(|word| told.contains(word)) && told.lines().count() == 1, "{told}");
    assert_holds(&bench.path("kept"), &anew(&bench), "with room");
    let is_hidden = |name: &String| name.starts_with('.') || name == "state/lock";
    assert_eq!(names(&bench.path("kept")).into_iter().find(is_hidden), None);
}

/// A line of shell: mounts a disk on a folder, for the lifetime of the process.
const ON_DISK: &str = "exec unshare --map-root-user --mount sh -c \"$SCRIPT\" sh \"$@\"";

/// Pages of 4 KiB of a disk that are in use.
const USED: &str = "used() { df -B4096 --output=used \"$1\" | tail -1; }";

/// A disk with the data set on which this many pages are free: each file of an update takes one or
/// two.
#[test]
#[ignore = "mounts a tmpfs, which not every machine allows; .ci/run runs it where it does"]
fn an_update_on_a_full_disk() {
    let outdated = Outdated::new();
    let bench = &outdated.bench;
    let arguments = ["prepare", "--output", "disk/kept", "--update"];
    let mut failed = 0;
    for free in 0.. {
        for name in ["disk", "after", "later"] {
            let _ = fs::remove_dir_all(bench.path(name));
        }
        fs::create_dir(bench.path("disk")).unwrap();
        let script = format!(
            "{USED}; mount -t tmpfs -o size=64m none disk && cp -a kept disk/kept || exit 9
            mount -o remount,size=$((($(used disk) + {free}) * 4096)) disk || exit 9
            \"$@\" >printed 2>said; echo $? >code; cp -a disk/kept after
            mount -o remount,size=64m disk || exit 9
            \"$@\" >printed 2>later-said; echo $? >later-code; cp -a disk/kept later"
        );
        outdated.run(&format!("SCRIPT='{script}'; {ON_DISK}"), &arguments).expect(0);
        let (code, said) = (outdated.read("code"), outdated.read("said"));
        let what = format!("{free} pages: {said}");
        assert_eq!(
            outdated.read("later-code").trim(),
            "0",
            "{what}{}",
            outdated.read("later-said")
        );
        assert_holds(&bench.path("later"), &outdated.anew, &what);
        if code.trim() == "0" {
            break;
        }
        assert_eq!((code.trim(), said.lines().count()), ("75", 1), "{what}");
        let words = ["tidemill: cannot ", "disk/kept", "No space left on device"];
        assert!(words.iter().all(|word| said.contains(word)), "{what}");
        assert!(files(&bench.path("after")) == outdated.before, "{what}");
        assert_eq!(names(&bench.path("after")), names(&bench.path("kept")), "{what}");
        failed += 1;
    }
    assert!(failed > 5, "{failed} disks were full");
}

/// If the folder for temporary files has no room, the line names that folder.
#[test]
#[ignore = "mounts a tmpfs, which not every machine allows; .ci/run runs it where it does"]
fn an_update_without_room_for_temporary_files() {
    let outdated = Outdated::new();
    let bench = &outdated.bench;
    fs::create_dir(bench.path("disk")).unwrap();
    let script = format!(
        "{USED}; mount -t tmpfs -o size=4096 none disk && head -c 4096 /dev/zero >disk/full || exit 9
        export TMPDIR=$PWD/disk
        \"$@\" >printed 2>said; echo $? >code; ls -A disk >left; cp -a kept after
        mount -o remount,size=64m disk || exit 9
        \"$@\" >printed 2>later-said; echo $? >later-code; ls -A disk >>left"
    );
    outdated.run(&format!("SCRIPT='{script}'; {ON_DISK}"), &UPDATE).expect(0);
    let said = outdated.read("said");
    assert_eq!((outdated.read("code").trim(), said.lines().count()), ("75", 1), "{said}");
    let temporary = bench.path("disk").to_string_lossy().into_owned();
    let words = ["tidemill: cannot ", &temporary, "No space left on device"];
    assert!(words.iter().all(|word| said.contains(word)), "{said}");
    assert!(files(&bench.path("after")) == outdated.before);
    assert_eq!(outdated.read("later-code").trim(), "0", "{}", outdated.read("later-said"));
    assert_eq!(outdated.read("left"), "full\nfull\n");
    assert_holds(&bench.path("kept"), &outdated.anew, "with room");
}

/// Following reports it once, keeps the old version, and continues by itself as soon as there is
/// room.
#[test]
#[ignore = "mounts a tmpfs, which not every machine allows; .ci/run runs it where it does"]
fn following_on_a_full_disk() {
    let outdated = Outdated::new();
    let bench = &outdated.bench;
    bench.tidemill(&UPDATE).expect(0);
    let first = anew(bench);
    fs::create_dir(bench.path("disk")).unwrap();
    // The shell waits for files by which this test controls it.
    let script = format!(
        "{USED}; wait_for() {{ while [ ! -e $1 ]; do read -t 1 <>wake || true; done; }}
        mount -t tmpfs -o size=64m none disk && cp -a kept disk/kept || exit 9
        \"$@\" >printed 2>told & follow=$!
        wait_for fill
        mount -o remount,size=$((($(used disk) + 3) * 4096)) disk || exit 9
        touch filled; wait_for copy; cp -a disk/kept after; touch copied; wait_for room
        mount -o remount,size=64m disk || exit 9
        wait_for stop; kill -s TERM $follow; wait $follow; echo $? >code; cp -a disk/kept later"
    );
    let arguments =
        ["prepare", "--output", "disk/kept", "--follow", "--look-seconds", "1", "--format", "json"];
    let line = format!("mkfifo wake; SCRIPT='{script}'; {}", ON_DISK.replace(" sh ", " bash "));
    let mut follow = Running::start_in_shell(bench.folder(), &line, &arguments);
    let read = |name: &str| fs::read_to_string(bench.path(name)).unwrap_or_default();
    let is_there = |name: &str| bench.path(name).exists();
    wait_until("a version", || follow.has_ended() || read("printed").contains('\n'));
    bench.write("fill", "");
    wait_until("a full disk", || follow.has_ended() || is_there("filled"));
    let new = bench.write("new", "a text that is new, once more ".repeat(300));
    fs::rename(new, bench.path("data-text/9.txt")).unwrap();
    wait_until("a note", || follow.has_ended() || read("told").contains('\n'));
    bench.write("copy", "");
    wait_until("a copy", || follow.has_ended() || is_there("copied"));
    assert_holds(&bench.path("after"), &first, "without room");
    bench.write("room", "");
    wait_until("another version", || follow.has_ended() || read("printed").lines().count() > 1);
    bench.write("stop", "");
    follow.finish().expect(0);
    assert_eq!(read("code").trim(), "0", "{}", read("told"));
    let told = read("told");
    let words =
        ["the version before stays for now: cannot ", "disk/kept", "No space left on device"];
    assert!(words.iter().all(|word| told.contains(word)) && told.lines().count() == 1, "{told}");
    assert_holds(&bench.path("later"), &anew(bench), "with room");
    let is_hidden = |name: &String| name.starts_with('.') || name == "state/lock";
    assert_eq!(names(&bench.path("later")).into_iter().find(is_hidden), None);
}
