//! Several processes end together, with one error.

use std::{
    fs,
    ops::ControlFlow,
    sync::{Condvar, Mutex},
    time::Duration,
};

use tidemill_streaming_data::prepare::{
    ByteTokenizer, Dedup, Layout, Pieces, PrepareError, PrepareSettings, Strictness, Tokenize,
    TokenizeError, prepare, prepare_together,
};

use crate::{
    Chance,
    bench::{Before, Bench, Encodes, NO_ROOM, ROOM, number},
    dedup, mixed,
    outcome::{assert_line, line},
    peers::in_processes,
};

#[test]
fn what_is_wrong_in_one_process_is_the_error_of_all() {
    let bench = Bench::new();
    let mut chance = Chance(3);
    let good = |chance: &mut Chance| format!("{}\n", serde_json::json!({ "text": chance.text() }));
    for name in ["a", "b", "c", "d"] {
        let mut lines: String = (0..200).map(|_| good(&mut chance)).collect();
        if name == "c" {
            lines += "{broken\n";
        }
        lines += &good(&mut chance);
        bench.write(&format!("in/{name}.jsonl"), lines);
    }
    for dedup in [dedup(Dedup::None, 0), dedup(Dedup::Near, 0)] {
        for layout in [Layout::Stream, Layout::Updatable] {
            let strictness = Strictness::Strict;
            let settings = PrepareSettings { strictness, dedup, layout, ..bench.settings() };
            let expected = prepare(&settings, &ByteTokenizer, &mut |_| ControlFlow::Continue(()));
            let expected = line(&expected.unwrap_err());
            for (processes, window) in [(2, ROOM), (3, NO_ROOM), (4, ROOM)] {
                let error = bench.together(&settings, processes, window).err().unwrap();
                assert_line(&error, &["c.jsonl", "line 201"]);
                assert_eq!(line(&error), expected);
            }
        }
    }
    // Errors that process 0 finds before it has sent anything, and after all have done their part.
    for (settings, words) in [
        (PrepareSettings { inputs: vec![bench.path("none")], ..bench.settings() }, "none"),
        (PrepareSettings { seq_len: Some(number(1 << 30)), ..bench.settings() }, "at least"),
    ] {
        let error = bench.together(&settings, 3, ROOM).err().unwrap();
        assert_line(&error, &[words]);
    }
}

/// One text waits until another has failed.
#[derive(Default)]
struct Waits {
    has_failed: Mutex<bool>,
    changed: Condvar,
}

impl Waits {
    fn before(&self, text: &str) -> Result<(), TokenizeError> {
        if text.starts_with("fails") {
            return Err("it failed".into());
        }
        if text.starts_with("waits") {
            let has_failed = self.has_failed.lock().unwrap();
            let not_yet = |has_failed: &mut bool| !*has_failed;
            let waited = self.changed.wait_timeout_while(has_failed, A_WHILE, not_yet).unwrap();
            assert!(!waited.1.timed_out(), "the error came only when its turn came");
        }
        Ok(())
    }
}

/// Longer than anything here takes.
const A_WHILE: Duration = Duration::from_secs(20);

/// The process that fails has sent all that there is room for, and process 0 is not at its inputs yet.
#[test]
fn an_error_behind_what_was_not_taken_yet_ends_all() {
    let bench = Bench::new();
    let mut chance = Chance(4);
    // Process 0 has the first for long; process 1 has the others.
    bench.write("in/a.txt", format!("waits {}", chance.word(9).repeat(1 << 20)));
    for at in 0..60 {
        bench.write(&format!("in/b{at:02}.txt"), chance.text().repeat(90));
    }
    bench.write("in/c.txt", "fails");
    let (settings, waits) = (bench.settings(), Waits::default());
    let encoding = |text: &str| waits.before(text);
    let tokenizer = Encodes { encoding, pieces: Pieces::Whole };
    let failed = in_processes(2, NO_ROOM, |peers| {
        let go_on = &mut |_| ControlFlow::Continue(());
        let done = prepare_together(peers, &settings, &tokenizer, go_on);
        *waits.has_failed.lock().unwrap() = true;
        waits.changed.notify_all();
        done
    });
    assert_line(&failed.err().unwrap(), &["c.txt", "it failed"]);
    assert_eq!(bench.left(), ["in"]);
}

#[test]
fn another_tokenizer_or_list_in_one_process_is_an_error() {
    let bench = Bench::new();
    bench.write("in/a.txt", "a text that is long enough for a row");
    let list = bench.write("list.txt", "in/nowhere\n");
    let settings = PrepareSettings { exclude: Some(list.clone()), ..bench.settings() };
    let failed = in_processes(2, ROOM, |peers| {
        let before = |_from: usize, message: usize| {
            if peers.process() == 1 && message == 0 {
                fs::write(&list, "in/elsewhere\n").unwrap();
            }
        };
        let peers = Before::new(peers, &before);
        prepare_together(&peers, &settings, &ByteTokenizer, &mut |_| ControlFlow::Continue(()))
    });
    assert_line(&failed.err().unwrap(), &["process 1 has a list", "as process 0 has it"]);
    let settings = bench.settings();
    let failed = in_processes(2, ROOM, |peers| {
        let other = Other;
        let tokenizer: &dyn Tokenize = if peers.process() == 1 { &other } else { &ByteTokenizer };
        prepare_together(peers, &settings, tokenizer, &mut |_| ControlFlow::Continue(()))
    });
    assert_line(&failed.err().unwrap(), &["process 1 has a tokenizer", "as process 0 has it"]);
    assert_eq!(bench.left(), ["in"]);
}

/// A tokenizer with another end of documents.
struct Other;

impl Tokenize for Other {
    fn encode(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), TokenizeError> {
        ByteTokenizer.encode(text, tokens)
    }

    fn vocab_size(&self) -> u32 {
        ByteTokenizer.vocab_size()
    }

    fn bos_token_id(&self) -> Option<u32> {
        None
    }

    fn eos_token_id(&self) -> u32 {
        0
    }

    fn pad_token_id(&self) -> Option<u32> {
        None
    }

    fn tokenizer_json(&self) -> Option<String> {
        None
    }
}

#[test]
fn any_process_that_asks_to_stop_stops_all_at_any_moment() {
    let bench = Bench::new();
    mixed(&bench, &mut Chance(2));
    let near = dedup(Dedup::Near, 0);
    for layout in [Layout::Stream, Layout::Updatable] {
        let settings = PrepareSettings { dedup: near, layout, ..bench.settings() };
        for stopping in [0, 1] {
            for at in [0, 1, 5, 20, 60, 150] {
                let stopped = in_processes(2, ROOM, |peers| {
                    let mut asked = 0;
                    prepare_together(peers, &settings, &ByteTokenizer, &mut |_| {
                        asked += 1;
                        match peers.process() == stopping && asked > at {
                            true => ControlFlow::Break(()),
                            false => ControlFlow::Continue(()),
                        }
                    })
                });
                match stopped {
                    // It was done before.
                    Ok((report, _)) => _ = bench.take(&report),
                    Err(error) => {
                        assert!(matches!(error, PrepareError::Interrupted), "{error}");
                        assert_eq!(bench.left(), ["in"]);
                    }
                }
            }
        }
    }
}
