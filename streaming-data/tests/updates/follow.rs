//! Following: an update for each change of what inputs look like, and none otherwise.

use std::{
    fs,
    ops::ControlFlow,
    time::{Duration, SystemTime},
};

use tidemill_streaming_data::prepare::{
    ByteTokenizer, Follow, PrepareError, PrepareSettings, UpdateReport, UpdateSettings, Verify,
};

use crate::support::{Bench, assert_holds, files, prepared, word};

fn text(seed: usize) -> String {
    (0..60).map(|at| word(seed * 1000 + at * 7 % 50) + " ").collect()
}

/// A data set whose list excludes its first text.
fn bench() -> Bench {
    let mut bench = Bench::new();
    for at in 0..20 {
        bench.write(&format!("in/{at:02}.txt"), text(at));
    }
    let first = bench.path("in/00.txt");
    bench.write("list", first.to_str().unwrap());
    prepared(&settings(&bench, "out"));
    bench
}

fn settings(bench: &Bench, output: &str) -> PrepareSettings {
    PrepareSettings { exclude: Some(bench.path("list")), ..bench.settings(output) }
}

fn catch_up(follow: &mut Follow) -> Result<Option<UpdateReport>, PrepareError> {
    follow.catch_up(&ByteTokenizer, &mut |_| ControlFlow::Continue(()))
}

#[track_caller]
fn assert_is_new(bench: &Bench) {
    prepared(&settings(bench, "new"));
    assert_holds(&files(&bench.path("out")), &files(&bench.path("new")));
    fs::remove_dir_all(bench.path("new")).unwrap();
}

#[test]
fn what_looks_as_before_is_not_worked_on() {
    let mut bench = bench();
    let mut follow = Follow::new(UpdateSettings::new(bench.path("out")));
    let first = catch_up(&mut follow).unwrap().expect("the first time, always");
    assert_eq!(first.former, first.prepared.fingerprint);
    assert!(catch_up(&mut follow).unwrap().is_none());

    let changes: [&dyn Fn(&mut Bench); 4] = [
        &|bench| _ = bench.write("in/50.txt", text(50)),
        &|bench| bench.remove("in/07.txt"),
        &|bench| {
            let second = bench.path("in/01.txt");
            bench.write("list", second.to_str().unwrap());
        },
        &|bench| fs::rename(bench.path("in/02.txt"), bench.path("in/60.txt")).unwrap(),
    ];
    for (at, change) in changes.into_iter().enumerate() {
        change(&mut bench);
        let updated = catch_up(&mut follow).unwrap().unwrap_or_else(|| panic!("change {at}"));
        assert_ne!(updated.former, updated.prepared.fingerprint, "change {at}");
        assert_is_new(&bench);
        assert!(catch_up(&mut follow).unwrap().is_none(), "change {at}");
    }
}

/// A file that is written now could be written again in the same step of the clock.
#[test]
fn what_was_changed_just_now_is_read_again() {
    let bench = bench();
    let mut follow = Follow::new(UpdateSettings::new(bench.path("out")));
    fs::write(bench.path("in/50.txt"), text(50)).unwrap();
    // However slow this machine is.
    let file = fs::File::options().append(true).open(bench.path("in/50.txt")).unwrap();
    file.set_modified(SystemTime::now() + Duration::from_secs(3600)).unwrap();
    for _ in 0..3 {
        let updated = catch_up(&mut follow).unwrap().expect("an update");
        assert_eq!(updated.prepared.changes.inputs_read, 1);
    }
    let verify = UpdateSettings { verify: Verify::All, ..UpdateSettings::new(bench.path("out")) };
    let mut follow = Follow::new(verify);
    for _ in 0..2 {
        let updated = catch_up(&mut follow).unwrap().expect("an update");
        assert_eq!(updated.prepared.changes.inputs_read, 21);
    }
}

#[test]
fn after_an_error_it_updates_in_any_case() {
    let bench = bench();
    let mut follow = Follow::new(UpdateSettings::new(bench.path("out")));
    catch_up(&mut follow).unwrap();
    let before = files(&bench.path("out"));
    fs::rename(bench.path("in"), bench.path("elsewhere")).unwrap();
    let error = catch_up(&mut follow).unwrap_err();
    assert!(error.to_string().contains("read input"), "{error}");
    assert!(files(&bench.path("out")) == before);
    fs::rename(bench.path("elsewhere"), bench.path("in")).unwrap();
    let updated = catch_up(&mut follow).unwrap().expect("an update");
    assert_eq!(updated.former, updated.prepared.fingerprint);
    assert!(catch_up(&mut follow).unwrap().is_none());

    // One that is found, and fails then.
    let mut bench = bench;
    bench.write("in/50.txt", text(50));
    let broken_off = follow.catch_up(&ByteTokenizer, &mut |_| ControlFlow::Break(()));
    assert!(matches!(broken_off, Err(PrepareError::Interrupted)));
    assert!(files(&bench.path("out")) == before);
    let updated = catch_up(&mut follow).unwrap().expect("an update");
    assert_ne!(updated.former, updated.prepared.fingerprint);
    assert_is_new(&bench);
}

/// A file that cannot be an input is no change; one that could not be read is tried again for as long as it can be opened.
#[cfg(target_os = "linux")]
#[test]
fn pipes_are_no_change_and_what_could_not_be_read_is_tried_again() {
    use std::os::unix::fs::symlink;

    let bench = bench();
    let (pipe, memory) = (bench.path("in/pipe.txt"), bench.path("in/memory.txt"));
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    symlink(bench.path("nothing"), bench.path("in/nowhere.txt")).unwrap();
    let mut follow = Follow::new(UpdateSettings::new(bench.path("out")));
    let first = catch_up(&mut follow).unwrap().expect("the first time, always");
    assert_eq!(first.prepared.skipped.len(), 2);
    assert!(catch_up(&mut follow).unwrap().is_none());
    fs::remove_file(&pipe).unwrap();
    assert!(catch_up(&mut follow).unwrap().is_some());
    assert!(catch_up(&mut follow).unwrap().is_none());
    // It can be opened, and nothing is mapped at its beginning.
    symlink("/proc/self/mem", &memory).unwrap();
    for _ in 0..2 {
        let updated = catch_up(&mut follow).unwrap().expect("another try");
        assert_eq!(updated.prepared.skipped.len(), 2);
    }
    fs::remove_file(&memory).unwrap();
    assert!(catch_up(&mut follow).unwrap().is_some());
    assert!(catch_up(&mut follow).unwrap().is_none());
    assert_is_new(&bench);
}
