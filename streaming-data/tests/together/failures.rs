//! How the work of several processes ends where something fails in one of them, and what it leaves. The processes are threads.

use std::{
    fs,
    ops::ControlFlow,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::channel,
    },
    thread,
    time::Duration,
};

use tidemill_streaming_data::prepare::{
    ByteTokenizer, Dedup, DedupSettings, FilterSettings, Layout, Peers, Phase, Pieces,
    PrepareError, PrepareSettings, Strictness, TokenizeError, UpdateSettings, Verify, prepare,
    prepare_together, update, update_together,
};

use crate::{
    bench::{Before, Bench, Encodes, ROOM},
    outcome::assert_line,
    peers::in_processes,
};

/// Longer than anything here takes.
const A_WHILE: Duration = Duration::from_secs(60);

const LAYOUTS: [Layout; 2] = [Layout::Stream, Layout::Updatable];

/// Settings of which nothing but these two differs from one test to the next.
fn settings(bench: &Bench, dedup: Dedup, layout: Layout) -> PrepareSettings {
    let dedup = DedupSettings { dedup, memory_bytes: 1 << 20 };
    PrepareSettings { dedup, layout, ..bench.settings() }
}

/// A text of its own for a number, of so many words.
fn text(number: usize, words: usize) -> String {
    let letter = |number: usize| char::from(b'a' + (number % 26) as u8);
    let word = |at: usize| {
        let number = number * 7919 + at * 104_729;
        [number, number / 26, number / 676, at].map(letter).iter().collect::<String>()
    };
    (0..words).map(word).collect::<Vec<_>>().join(" ")
}

fn lines(texts: impl Iterator<Item = String>) -> String {
    texts.map(|text| format!("{}\n", serde_json::json!({ "text": text }))).collect()
}

/// Fails at one text, and at another waits for the end of all.
fn fails(peers: &dyn Peers, text: &str) -> Result<(), TokenizeError> {
    if text.starts_with("fails") {
        return Err("it failed".into());
    }
    if text.starts_with("waits") {
        assert!(peers.receive(&[], A_WHILE).is_err(), "the work was not ended");
    }
    Ok(())
}

/// Process 0 has a large file, and sends and receives nothing for long; process 1 fails meanwhile.
#[test]
fn process_0_ends_with_the_others_while_it_reads_a_file_of_its_own() {
    let bench = Bench::new();
    bench.write("in/a.txt", format!("waits {}", text(1, 40).repeat(4 << 20 >> 8)));
    bench.write("in/b.txt", "fails");
    let settings = settings(&bench, Dedup::None, Layout::Stream);
    let after_the_end = AtomicUsize::new(0);
    let failed = in_processes(2, ROOM, |peers| {
        let go_on = &mut |_| {
            if peers.process() == 0 && peers.receive(&[], Duration::ZERO).is_err() {
                after_the_end.fetch_add(1, Ordering::Relaxed);
            }
            ControlFlow::Continue(())
        };
        let encoding = |text: &str| fails(peers, text);
        let tokenizer = Encodes { encoding, pieces: Pieces::AtCharacters };
        prepare_together(peers, &settings, &tokenizer, go_on)
    });
    assert_line(&failed.err().unwrap(), &["b.txt", "it failed"]);
    // It may have ended between the two questions.
    let after_the_end = after_the_end.into_inner();
    assert!(after_the_end <= 1, "it went on {after_the_end} times");
    assert_eq!(bench.left(), ["in"]);
}

/// All messages have come, and all shards are written.
#[test]
fn what_ends_at_the_last_moment_is_not_put_in_place() {
    for layout in LAYOUTS {
        for dedup in [Dedup::None, Dedup::Near] {
            let bench = Bench::new();
            for file in 0..3 {
                let texts = (0..30).map(|at| text(at * 3 + file, 20));
                bench.write(&format!("in/{file}.jsonl"), lines(texts));
            }
            let settings = settings(&bench, dedup, layout);
            let alone = prepare(&settings, &ByteTokenizer, &mut |_| ControlFlow::Continue(()));
            let samples = alone.unwrap().samples;
            fs::remove_dir_all(bench.path("out")).unwrap();
            let is_written = AtomicBool::new(false);
            let ended = in_processes(2, ROOM, |peers| {
                prepare_together(peers, &settings, &ByteTokenizer, &mut |now| {
                    if peers.process() == 0 && now.samples == samples {
                        is_written.store(true, Ordering::SeqCst);
                        assert!(peers.receive(&[], A_WHILE).is_err(), "the work was not ended");
                    }
                    match peers.process() == 1 && is_written.load(Ordering::SeqCst) {
                        true => ControlFlow::Break(()),
                        false => ControlFlow::Continue(()),
                    }
                })
            });
            assert!(matches!(ended, Err(PrepareError::Interrupted)), "{layout:?}, {dedup:?}");
            assert!(is_written.into_inner(), "{layout:?}, {dedup:?}");
            assert_eq!(bench.left(), ["in"], "{layout:?}, {dedup:?}");
        }
    }
}

/// The result of `work`, which runs on a thread that is left behind if it hangs.
fn within_a_while<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, is_done) = channel();
    thread::spawn(move || done.send(work()));
    is_done.recv_timeout(A_WHILE).expect("the processes wait for each other")
}

#[test]
fn a_panic_in_one_process_ends_all() {
    for layout in LAYOUTS {
        for panicking in [0, 1] {
            let bench = Bench::new();
            for name in ["a", "b", "c", "d"] {
                bench.write(&format!("in/{name}.jsonl"), lines((0..40).map(|at| text(at, 20))));
            }
            let settings = settings(&bench, Dedup::Near, layout);
            let ended = within_a_while(move || {
                let ended = in_processes(2, ROOM, |peers| {
                    let prepared = catch_unwind(AssertUnwindSafe(|| {
                        prepare_together(peers, &settings, &ByteTokenizer, &mut |now| {
                            let is_reading = now.phase == Phase::Comparing && now.bytes_done > 0;
                            let panics = peers.process() == panicking && is_reading;
                            assert!(!panics, "this is to end all processes");
                            ControlFlow::Continue(())
                        })
                    }));
                    // A worker of timely that panics ends the others too.
                    prepared.unwrap_or(Err(PrepareError::Interrupted))
                });
                ended.err()
            });
            let is_of_panic = matches!(ended, Some(PrepareError::Interrupted));
            assert!(is_of_panic, "{layout:?}, process {panicking}: {ended:?}");
            assert_eq!(bench.left(), ["in"], "{layout:?}, process {panicking}");
        }
    }
}

/// The message with which process 1 hears of its inputs; the first says how they are read.
const INPUTS: usize = 1;

/// How an input is kept from a process.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kept {
    /// It is not found.
    Away,
    /// It is found, and cannot be read.
    Folder,
}

/// Everything that inputs may be read for first.
fn first_passes(bench: &Bench) -> Vec<PrepareSettings> {
    let mut all = Vec::new();
    for layout in LAYOUTS {
        for dedup in [Dedup::None, Dedup::Near] {
            for strictness in [Strictness::Lenient, Strictness::Strict] {
                all.push(PrepareSettings { strictness, ..settings(bench, dedup, layout) });
            }
        }
    }
    all
}

#[test]
fn an_input_that_one_process_cannot_read_is_named_with_the_process() {
    let bench = Bench::new();
    bench.write("in/a.txt", "a text that is long enough for a row");
    let path = bench.write("in/b.txt", "there for process 0");
    let aside = tempfile::tempdir_in(bench.folder.path().parent().unwrap()).unwrap();
    let kept_at = aside.path().join("b.txt");
    for kept in [Kept::Away, Kept::Folder] {
        for settings in first_passes(&bench) {
            let failed = in_processes(2, ROOM, |peers| {
                // It is back before process 0 looks.
                let before = |from: usize, number: usize| match (peers.process(), from, number) {
                    (1, 0, INPUTS) => {
                        fs::rename(&path, &kept_at).unwrap();
                        if kept == Kept::Folder {
                            fs::create_dir(&path).unwrap();
                        }
                    }
                    (0, 1, 0) => {
                        if kept == Kept::Folder {
                            fs::remove_dir(&path).unwrap();
                        }
                        fs::rename(&kept_at, &path).unwrap();
                    }
                    _ => {}
                };
                let peers = Before::new(peers, &before);
                let go_on = &mut |_| ControlFlow::Continue(());
                prepare_together(&peers, &settings, &ByteTokenizer, go_on)
            });
            let error = failed.err().unwrap();
            let is_unseen = matches!(error, PrepareError::InputUnseen { process: 1, .. });
            assert!(is_unseen, "{kept:?}, {settings:?}: {error}");
            assert_line(&error, &["process 1", "b.txt", "process 0 can", "same path"]);
            assert!(!error.may_succeed_later());
            assert_eq!(bench.left(), ["in"]);
        }
    }
}

#[test]
fn an_input_that_is_gone_for_all_processes_is_what_it_is_to_one() {
    let bench = Bench::new();
    bench.write("in/a.txt", "a text that is long enough for a row");
    for settings in first_passes(&bench) {
        let path = bench.write("in/b.txt", "there when it is listed");
        let prepared = in_processes(2, ROOM, |peers| {
            let before = |from: usize, number: usize| {
                if (peers.process(), from, number) == (1, 0, INPUTS) {
                    fs::remove_file(&path).unwrap();
                }
            };
            let peers = Before::new(peers, &before);
            let go_on = &mut |_| ControlFlow::Continue(());
            prepare_together(&peers, &settings, &ByteTokenizer, go_on)
        });
        match (prepared, settings.strictness) {
            (Ok((report, _)), Strictness::Lenient) => {
                assert_eq!(report.documents, 1);
                let [skipped] = &report.skipped[..] else { panic!("{:?}", report.skipped) };
                assert_eq!(skipped.path, path);
                assert_line(&skipped.reason, &["it cannot be read", "No such file"]);
                fs::remove_dir_all(bench.path("out")).unwrap();
            }
            (Err(error), Strictness::Strict) => {
                assert!(matches!(error, PrepareError::Document { .. }), "{error}");
                assert_line(&error, &["cannot take document", "b.txt", "it cannot be read"]);
            }
            (prepared, _) => panic!("{settings:?}: {prepared:?}"),
        }
        assert_eq!(bench.left(), ["in"]);
    }
}

/// Copies a folder with all that is in it.
fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        match path.is_dir() {
            true => copy(&path, &to),
            false => _ = fs::copy(&path, &to).unwrap(),
        }
    }
}

/// Process 0 alone knows texts of the version before: what the others find out about these anew is not counted.
#[test]
fn an_update_counts_what_filters_do_to_new_texts_in_any_number_of_processes() {
    let bench = Bench::new();
    // Every third has too few words.
    let mixed = |numbers: std::ops::Range<usize>| {
        lines(numbers.map(|at| text(at, if at % 3 == 0 { 3 } else { 20 })))
    };
    for (at, name) in ["a", "b", "c", "d"].into_iter().enumerate() {
        bench.write(&format!("in/{name}.jsonl"), mixed(at * 30..at * 30 + 30));
    }
    let mut filters = FilterSettings::default();
    filters.append_toml("[gopher]\nmin_words = 5\n", "test.toml".as_ref()).unwrap();
    let settings = settings(&bench, Dedup::Near, Layout::Updatable);
    let settings = PrepareSettings { filters, ..settings };
    let first = prepare(&settings, &ByteTokenizer, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(first.filtered.rejected_documents(), 40);
    // Some texts are new, some stand elsewhere, and all inputs are read.
    bench.write("in/d.jsonl", mixed(75..105));
    bench.write("in/e.jsonl", mixed(110..140));

    let of_copy = |name: &str| {
        copy(&bench.path("out"), &bench.path(name));
        UpdateSettings { verify: Verify::All, ..UpdateSettings::new(bench.path(name)) }
    };
    let go_on = &mut |_| ControlFlow::Continue(());
    let expected = update(&of_copy("alone"), &ByteTokenizer, go_on).unwrap().prepared;
    let counted = expected.filtered.rejected_documents();
    let all: u64 = expected.changes.rejected.values().sum();
    assert!(0 < counted && counted < all, "{counted} of {all}");
    for processes in [2, 3] {
        let settings = of_copy(&format!("by-{processes}"));
        let updated = in_processes(processes, ROOM, |peers| {
            let go_on = &mut |_| ControlFlow::Continue(());
            update_together(peers, &settings, &ByteTokenizer, go_on)
        });
        let found = updated.unwrap().0.prepared;
        assert_eq!(found.filtered, expected.filtered, "{processes}");
        assert_eq!(found.changes, expected.changes, "{processes}");
        assert_eq!(found.fingerprint, expected.fingerprint, "{processes}");
        assert_eq!((found.dedup, found.excluded), (expected.dedup, expected.excluded));
    }
}
