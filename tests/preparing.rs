//! `prepare` in several processes and hosts gives the bytes of one process, and ends as training
//! does.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use crate::support::processes::{is_gone, signal, wait_until};
use crate::support::workbench::random;
use crate::support::{Finished, Running, Workbench, program};

/// A text with few different words, so that there are copies and near copies.
fn document(number: u64) -> String {
    let kind = random(number) % 40;
    let word = |at: u64| format!("{:x}", random(kind * 1000 + at) % 5000);
    let mut words: Vec<String> = (0..40).map(word).collect();
    for change in 0..random(number + 7) % 3 {
        let at = random(number * 3 + change) as usize % words.len();
        words[at] = format!("new{:x}", random(number + change) % 90);
    }
    if random(number + 9).is_multiple_of(12) {
        words.truncate(3);
    }
    words.join(" ")
}

fn lines(from: u64, count: u64) -> String {
    let line = |number: u64| match random(number + 5) % 30 {
        0 => "{broken\n".to_owned(),
        1 => "{\"text\": null}\n".to_owned(),
        _ => format!("{{\"text\": \"{}\"}}\n", document(number)),
    };
    (from..from + count).map(line).collect()
}

/// Inputs: one larger than all others, small ones, empty ones, and one that cannot be read.
fn inputs(bench: &Workbench) {
    bench.write("in/huge.jsonl", lines(0, 400));
    bench.write("in/empty.jsonl", "");
    bench.write("in/a/empty.txt", "");
    bench.write("in/z.txt", b"caf\xe9");
    for number in 0..9 {
        bench.write(
            &format!("in/{}{number}.txt", if number % 2 == 0 { "a/" } else { "s" }),
            document(number),
        );
    }
    bench.write("in/t.jsonl", lines(1000, 50));
    bench.write("mine.toml", "[gopher]\nmin_words = 5\n");
    bench.write("list.txt", "in/s1.txt\nin/t.jsonl\t9\nin/none\n");
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = crate::support::outcome::files(folder);
    // It says when inputs were last changed.
    files.remove("state/seen");
    files
}

const PREPARE: [&str; 9] =
    ["prepare", "--input", "in", "--seq-len", "17", "--shard-samples", "90", "--format", "json"];

fn prepare(bench: &Workbench, more: &[&str]) -> Finished {
    bench.tidemill(&[&PREPARE[..], more].concat())
}

/// Only the files from before are left.
fn left(bench: &Workbench) -> Vec<String> {
    let entries = std::fs::read_dir(bench.folder()).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name.starts_with('.') || name.starts_with("out"));
    names.sort();
    names
}

#[test]
fn any_number_of_processes_and_workers_leaves_the_same_data_set_and_report() {
    let bench = Workbench::new();
    inputs(&bench);
    let asked: [&[&str]; 4] = [
        &[],
        &["--dedup", "exact", "--exclude", "list.txt"],
        &["--dedup", "near", "--filter", "mine.toml", "--updatable"],
        &["--dedup", "near", "--dedup-memory-mib", "1"],
    ];
    for (at, asked) in asked.into_iter().enumerate() {
        let expected = prepare(&bench, &[asked, &["--output", "one", "-w", "1"]].concat());
        let (expected, stderr) = (expected.json(), expected.expect(0).stderr);
        assert!(stderr.contains("in/huge.jsonl, line"), "{stderr}");
        if at > 0 {
            assert!(expected["copies"].as_u64() > Some(9), "{expected}");
        }
        for (processes, workers) in [("2", "1"), ("2", "2"), ("3", "1"), ("3", "2")] {
            let name = format!("out-{processes}-{workers}");
            let more = ["--output", &name, "-n", processes, "-w", workers];
            let found = prepare(&bench, &[asked, &more].concat());
            assert_eq!(found.json(), expected, "{asked:?} {more:?}");
            assert_eq!(found.expect(0).stderr, stderr);
            assert!(files(&bench.path(&name)) == files(&bench.path("one")), "{asked:?} {more:?}");
            std::fs::remove_dir_all(bench.path(&name)).unwrap();
        }
        std::fs::remove_dir_all(bench.path("one")).unwrap();
        assert!(left(&bench).is_empty());
    }
}

/// Each process of the hosts is started separately, in any order, and finds the others by the file.
#[test]
fn processes_of_hosts_prepare_together_and_update() {
    let bench = Workbench::new();
    inputs(&bench);
    let asked = ["--dedup", "near", "--updatable", "--output", "out", "-w", "1"];
    bench.write("hosts", program::free_hosts(3));
    let member = |index: &str, first: &[&str], more: &[&str]| {
        let hosts = ["-p", index, "--hosts", "hosts"];
        bench.start(&[first, more, &hosts].concat())
    };
    let started: Vec<Running> = ["2", "0", "1"].map(|index| member(index, &PREPARE, &asked)).into();
    let finished: Vec<Finished> = started.into_iter().map(|it| it.finish().expect(0)).collect();
    assert_eq!((finished[0].stdout.as_str(), finished[2].stdout.as_str()), ("", ""));
    let expected = prepare(&bench, &[&asked[..3], &["--output", "one", "-w", "2"]].concat());
    assert_eq!(finished[1].json(), expected.json());
    assert!(files(&bench.path("out")) == files(&bench.path("one")));

    // Inputs were added and removed, and a copy returns because the first of its kind is gone.
    bench.write("in/t.jsonl", lines(1000, 30));
    bench.write("in/u.txt", document(5000));
    std::fs::remove_file(bench.path("in/a/0.txt")).unwrap();
    let update = ["prepare", "--update", "--format", "json", "-w", "1"];
    let one = bench.tidemill(&[&update[..], &["--output", "one"]].concat());
    bench.write("hosts", program::free_hosts(2));
    let started: Vec<Running> =
        ["0", "1"].map(|index| member(index, &update, &["--output", "out"])).into();
    let finished: Vec<Finished> = started.into_iter().map(|it| it.finish().expect(0)).collect();
    assert_eq!(finished[0].json(), one.json());
    assert!(files(&bench.path("out")) == files(&bench.path("one")));
    let again = bench.tidemill(&[&update[..], &["--output", "out", "-n", "3"]].concat());
    // Inputs that were just written are read again; none of their documents is tokenized.
    assert_eq!(again.json()["changes"]["texts_tokenized"], 0);
    assert!(left(&bench) == ["out"]);
}

#[test]
fn a_line_that_is_wrong_is_one_line_and_exit_code_1_of_all() {
    let bench = Workbench::new();
    for name in ["a", "b", "c", "d"] {
        let line = |number| format!("{{\"text\": \"{}\"}}\n", document(number));
        let mut lines: String = (0..300).map(line).collect();
        if name == "c" {
            lines += "{broken\n";
        }
        bench.write(&format!("in/{name}.jsonl"), lines);
    }
    for processes in ["1", "2", "3"] {
        for dedup in ["none", "near"] {
            let more =
                ["--strict", "--dedup", dedup, "--output", "out", "-w", "1", "-n", processes];
            prepare(&bench, &more).refused(1, &["in/c.jsonl", "line 301", "not JSON"]);
            assert!(left(&bench).is_empty());
        }
    }
    // Errors in flags and files are found before anything is started.
    for (wrong, parts) in [
        (["--filter", "none"], ["found filter", "none"]),
        (["--tokenizer", "no/such.json"], ["no/such.json", ""]),
        (["--eos-token", "x"], ["--tokenizer", ""]),
    ] {
        let refused = prepare(&bench, &[&wrong[..], &["--output", "out", "-n", "2"]].concat());
        let code = if wrong[0] == "--eos-token" { 2 } else { 1 };
        refused.refused(code, &parts);
    }
    let refused = prepare(&bench, &["--output", "out", "-n", "2", "--glob", "*.none"]);
    refused.refused(1, &["found no document"]);
    prepare(&bench, &["--output", "out", "-n", "0"]).refused(1, &["-n", "at least 1 process"]);
    assert!(left(&bench).is_empty());
}

#[test]
fn hosts_that_were_asked_for_something_else_do_not_begin() {
    let bench = Workbench::new();
    inputs(&bench);
    bench.write("hosts", program::free_hosts(2));
    let member = |index: &str, dedup: &str| {
        let more = ["--dedup", dedup, "--output", "out", "-p", index, "--hosts", "hosts"];
        bench.start(&[&PREPARE[..], &more].concat())
    };
    let (one, other) = (member("0", "near"), member("1", "exact"));
    for process in [one, other] {
        let finished = process.finish().expect(1);
        assert!(finished.stderr.contains("--dedup"), "{finished:?}");
        assert!(finished.stderr.contains("disagree"), "{finished:?}");
    }
    assert!(left(&bench).is_empty());
    bench.write("hosts", "127.0.0.1:2101\n192.0.2.1:2101\n");
    let line = "unset TIDEMILL_CLUSTER_SECRET; exec \"$@\"";
    let arguments = [&PREPARE[..], &["--output", "out", "-p", "0", "--hosts", "hosts"]].concat();
    let refused = Running::start_in_shell(bench.folder(), line, &arguments).finish();
    refused.refused(1, &["192.0.2.1", "TIDEMILL_CLUSTER_SECRET", "--insecure"]);
}

/// Enough input that it is not finished before the kill.
fn long(bench: &Workbench) {
    for file in 0..4 {
        bench.write(&format!("in/{file}.jsonl"), lines(file * 100_000, 4000));
    }
}

const LONG: [&str; 6] = ["--dedup", "near", "--output", "out", "-n", "2"];

/// A preparation in two processes that has begun to read.
fn begun(bench: &Workbench) -> (Running, Vec<u32>) {
    let running = bench.start(&[&PREPARE[..], &LONG, &["-w", "1"]].concat());
    let children = running.children(2);
    wait_until("the preparation to begin", || {
        left(bench)
            .iter()
            .any(|name| name.starts_with(".out.preparing") && !name.ends_with(".lock"))
    });
    (running, children)
}

#[test]
fn a_process_that_is_killed_ends_all_and_the_next_attempt_succeeds() {
    let bench = Workbench::new();
    long(&bench);
    for victim in [1, 0] {
        let (running, children) = begun(&bench);
        signal("KILL", &children[victim].to_string());
        let finished = running.finish().expect(75);
        assert_eq!(finished.stdout, "");
        assert!(finished.stderr.contains("ended unexpectedly"), "{finished:?}");
        wait_until("all to end", || children.iter().all(|&child| is_gone(child)));
        assert!(!bench.path("out").exists(), "half a data set");
    }
    let found = prepare(&bench, &LONG).expect(0).json();
    let expected = prepare(&bench, &["--dedup", "near", "--output", "out-one"]).expect(0).json();
    assert_eq!(found, expected);
    assert!(files(&bench.path("out")) == files(&bench.path("out-one")));
    assert_eq!(left(&bench), ["out", "out-one"], "what was left is removed");
}

#[test]
fn a_signal_ends_all_with_one_line_and_nothing_left() {
    let bench = Workbench::new();
    long(&bench);
    for (name, to_all) in [("TERM", false), ("INT", true)] {
        let (running, children) = begun(&bench);
        match to_all {
            true => running.signal_group(name),
            false => running.signal(name),
        }
        running.finish().refused(75, &["preparing was interrupted"]);
        wait_until("all to end", || children.iter().all(|&child| is_gone(child)));
        assert!(left(&bench).is_empty(), "{:?}", left(&bench));
    }
    // Before they have met, or when all is done: nothing is left, and the end is reported.
    for delay in [0, 3, 10, 30] {
        let running = bench.start(&[&PREPARE[..], &LONG].concat());
        running.children(2);
        std::thread::park_timeout(Duration::from_millis(delay));
        running.signal_group("INT");
        running.finish().refused(75, &["tidemill: "]);
        assert!(left(&bench).is_empty(), "{:?}", left(&bench));
    }
}
