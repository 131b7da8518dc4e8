//! Single changes: what is read for them, what comes back, and what cannot be updated.

use std::{fs, ops::ControlFlow};

use tidemill_streaming_data::{
    DataSet,
    data_set::index::Index,
    prepare::{
        ByteTokenizer, Dedup, DedupSettings, Layout, Phase, PrepareError, PrepareSettings,
        Strictness, Tokenize, TokenizeError, UpdateSettings, Verify, prepare, prune, update,
    },
};

use crate::{
    outcome::assert_line,
    support::{Bench, Files, assert_holds, files, number, prepared, word},
};

/// A text of its own of so many words.
fn text(seed: usize, words: usize) -> String {
    (0..words).map(|at| word(seed * 1000 + at * 7 % 50) + " ").collect()
}

fn lines(seeds: impl Iterator<Item = usize>) -> String {
    let line = |seed| format!("{}\n", serde_json::json!({"text": text(seed, 30)}));
    seeds.map(line).collect()
}

fn near(bench: &Bench, output: &str) -> PrepareSettings {
    let dedup = DedupSettings { dedup: Dedup::Near, ..DedupSettings::default() };
    PrepareSettings { dedup, ..bench.settings(output) }
}

/// A data set of texts, of lines and of copies of some of them.
fn bench() -> Bench {
    let mut bench = Bench::new();
    for at in 0..30 {
        bench.write(&format!("in/{at:02}.txt"), text(at, 40));
    }
    bench.write("in/lines.jsonl", lines(100..160));
    bench.write("in/more/copies.jsonl", lines(100..120));
    prepared(&near(&bench, "out"));
    bench
}

/// The data set is what a preparation of the inputs gives now.
#[track_caller]
fn assert_is_new(bench: &Bench) -> Files {
    prepared(&near(bench, "new"));
    let found = files(&bench.path("out"));
    assert_holds(&found, &files(&bench.path("new")));
    fs::remove_dir_all(bench.path("new")).unwrap();
    found
}

#[test]
fn what_did_not_change_is_not_read() {
    let mut bench = bench();
    let before = files(&bench.path("out"));
    let report = bench.update("out").unwrap();
    let changes = report.prepared.changes;
    assert_eq!((changes.inputs_read, changes.inputs_kept, changes.inputs_gone), (0, 32, 0));
    assert_eq!((changes.texts_read, changes.texts_tokenized, changes.shards_read), (0, 0, 0));
    assert_eq!(changes.shards_kept, report.prepared.shards);
    assert_eq!(report.former, report.prepared.fingerprint);
    assert!(files(&bench.path("out")) == before);

    // A file of which only the time changed is read, but nothing of it is new.
    bench.touch("in/lines.jsonl");
    let changes = bench.update("out").unwrap().prepared.changes;
    assert_eq!((changes.inputs_read, changes.texts_read, changes.texts_tokenized), (1, 60, 0));
    assert_is_new(&bench);

    // Lines that are appended are the only new ones; a text that has another name is not new.
    bench.write("in/lines.jsonl", lines(100..165));
    bench.remove("in/03.txt");
    bench.write("in/99.txt", text(3, 40));
    let changes = bench.update("out").unwrap().prepared.changes;
    assert_eq!((changes.inputs_read, changes.inputs_kept, changes.inputs_gone), (2, 30, 1));
    assert_eq!((changes.texts_read, changes.texts_tokenized), (66, 5));
    assert!(changes.shards_kept > 0);
    assert_is_new(&bench);
}

#[test]
fn verdicts_come_back_when_the_first_of_copies_is_gone() {
    let bench = bench();
    let first = bench.update("out").unwrap().prepared;
    assert_eq!((first.documents, first.dedup.copies), (90, 20));
    bench.remove("in/lines.jsonl");
    let report = bench.update("out").unwrap().prepared;
    assert_eq!((report.documents, report.dedup.copies), (50, 0));
    let changes = report.changes;
    assert_eq!((changes.inputs_read, changes.inputs_gone), (0, 1));
    assert_eq!((changes.texts_read, changes.texts_tokenized), (0, 20));
    assert_is_new(&bench);
}

#[test]
fn an_input_whose_documents_come_back_must_be_there_and_be_the_same() {
    // It goes away when it is known already that it is wanted.
    let bench = bench();
    let before = files(&bench.path("out"));
    bench.remove("in/lines.jsonl");
    let copies = bench.path("in/more/copies.jsonl");
    let settings = UpdateSettings::new(bench.path("out"));
    let updated = update(&settings, &ByteTokenizer, &mut |progress| {
        if progress.phase == Phase::Sorting && copies.exists() {
            fs::remove_file(&copies).unwrap();
        }
        ControlFlow::Continue(())
    });
    let error = updated.unwrap_err();
    assert!(matches!(&error, PrepareError::Readmitted { .. }), "{error}");
    assert_line(&error, &["more/copies.jsonl", "wanted now", "cannot be read"]);
    assert!(files(&bench.path("out")) == before);

    // It has another text, though it looks the same.
    let mut bench = self::bench();
    bench.write("in/more/copies.jsonl", lines(100..120));
    bench.update("out").unwrap();
    let path = bench.path("in/more/copies.jsonl");
    let time = fs::metadata(&path).unwrap().modified().unwrap();
    let content = fs::read_to_string(&path).unwrap().replace(&word(101_007), "some");
    fs::write(&path, content).unwrap();
    fs::File::options().append(true).open(&path).unwrap().set_modified(time).unwrap();
    bench.remove("in/lines.jsonl");
    let error = bench.update("out").unwrap_err();
    assert!(matches!(&error, PrepareError::OtherText { number: 2, .. }), "{error}");
    assert_line(&error, &["copies.jsonl", "document 2", "--verify"]);
    let verify = UpdateSettings { verify: Verify::All, ..UpdateSettings::new(bench.path("out")) };
    let changes = bench.update_with(&verify).unwrap().prepared.changes;
    assert_eq!(changes.unnoticed, [path]);
    assert_eq!((changes.inputs_read, changes.inputs_kept), (31, 0));
    assert_is_new(&bench);
}

#[test]
fn of_two_that_update_at_once_one_does() {
    let mut bench = bench();
    bench.write("in/50.txt", text(500, 60));
    let mut second = None;
    let settings = UpdateSettings::new(bench.path("out"));
    update(&settings, &ByteTokenizer, &mut |_| {
        if second.is_none() {
            second = Some(bench.update("out"));
            let pruned = prune(&bench.path("out"), number(1));
            assert!(matches!(pruned, Err(PrepareError::UpdateRunning { .. })));
        }
        ControlFlow::Continue(())
    })
    .unwrap();
    let error = second.unwrap().unwrap_err();
    assert!(matches!(&error, PrepareError::UpdateRunning { .. }), "{error}");
    assert_line(&error, &["out", "another process"]);
    assert_is_new(&bench);
    bench.update("out").unwrap();
}

#[test]
fn an_update_that_is_broken_off_leaves_what_was() {
    for phase in [Phase::Comparing, Phase::Sorting, Phase::Tokenizing] {
        let mut bench = bench();
        let before = files(&bench.path("out"));
        bench.write("in/50.txt", text(500, 60));
        let settings = UpdateSettings::new(bench.path("out"));
        let updated = update(&settings, &ByteTokenizer, &mut |progress| {
            if progress.phase == phase { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert!(matches!(updated, Err(PrepareError::Interrupted)), "{phase:?}");
        assert!(files(&bench.path("out")) == before, "{phase:?}");
    }
}

#[test]
fn broken_lines_are_counted_once_and_strictness_stays() {
    let mut bench = bench();
    let broken = lines(100..103) + "{\n" + &lines(103..160) + "[7]\n";
    bench.write("in/lines.jsonl", &broken);
    let report = bench.update("out").unwrap().prepared;
    assert_eq!((report.broken, report.named_broken.len()), (2, 2));
    assert_eq!(report.documents, 90);
    assert_is_new(&bench);
    // Broken lines of files that are not read again are counted, and not named again.
    let report = bench.update("out").unwrap().prepared;
    assert_eq!((report.broken, report.named_broken.len()), (2, 0));

    let strict = PrepareSettings { strictness: Strictness::Strict, ..near(&bench, "strict") };
    bench.write("in/lines.jsonl", lines(100..160));
    prepared(&strict);
    let before = files(&bench.path("strict"));
    bench.write("in/lines.jsonl", &broken);
    let error = bench.update("strict").unwrap_err();
    assert!(matches!(&error, PrepareError::BrokenDocument { .. }), "{error}");
    assert!(files(&bench.path("strict")) == before);
}

#[test]
fn what_cannot_be_read_to_its_end_is_read_again() {
    let mut bench = bench();
    bench.write("in/bad.txt", [b'a', 0xff]);
    let report = bench.update("out").unwrap().prepared;
    assert_eq!((report.skipped.len(), report.changes.inputs_read), (1, 1));
    assert_is_new(&bench);
    let report = bench.update("out").unwrap().prepared;
    assert_eq!((report.skipped.len(), report.changes.inputs_read), (1, 1));
    bench.write("in/bad.txt", "good");
    let report = bench.update("out").unwrap().prepared;
    assert_eq!((report.skipped.len(), report.documents), (0, 91));
    assert_is_new(&bench);
}

#[test]
fn a_state_that_is_damaged_or_of_another_version_is_named() {
    let bench = bench();
    let out = bench.path("out");
    let state = out.join(Index::read(&out).unwrap().state.unwrap().file);
    let state: serde_json::Value = serde_json::from_slice(&fs::read(state).unwrap()).unwrap();
    let part = state["parts"][1]["file"].as_str().unwrap().to_owned();
    let state = Index::read(&out).unwrap().state.unwrap().file;
    type Change = fn(&mut Vec<u8>);
    let other: Change = |bytes| {
        let text = String::from_utf8(std::mem::take(bytes)).unwrap();
        *bytes = text.replacen("\"format_version\": 1", "\"format_version\": 2", 1).into_bytes();
    };
    let cases: [(&str, Change, &[&str]); 7] = [
        (&state, other, &["found version 2, expected 1", "prepare the data set anew"]),
        (&state, |bytes| bytes.truncate(900), &["is damaged", "expected JSON"]),
        (&state, |bytes| *bytes.last_mut().unwrap() = b' ', &["is damaged", "as the index says"]),
        (&part, |bytes| bytes[8] = 9, &["found version 9, expected 1"]),
        (&part, |bytes| bytes.truncate(100), &["is damaged: found hash"]),
        (&part, |bytes| *bytes.last_mut().unwrap() ^= 1, &["is damaged: found hash"]),
        (&part, Vec::clear, &["is damaged: found 0 bytes"]),
    ];
    for (file, change, words) in cases {
        let path = out.join(file);
        let whole = fs::read(&path).unwrap();
        let mut bytes = whole.clone();
        change(&mut bytes);
        assert_ne!(bytes, whole);
        fs::write(&path, bytes).unwrap();
        let before = files(&out);
        let error = bench.update("out").unwrap_err();
        assert_line(&error, words);
        assert_line(&error, &[file]);
        assert!(files(&out) == before);
        DataSet::open(&out).unwrap();
        fs::remove_file(&path).unwrap();
        assert_line(&bench.update("out").unwrap_err(), &[file, "found nothing"]);
        fs::write(&path, whole).unwrap();
    }
    bench.update("out").unwrap();
}

#[test]
fn what_a_data_set_was_made_of_must_be_the_same() {
    struct Other;
    impl Tokenize for Other {
        fn encode(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), TokenizeError> {
            ByteTokenizer.encode(text, tokens)
        }
        fn vocab_size(&self) -> u32 {
            300
        }
        fn bos_token_id(&self) -> Option<u32> {
            None
        }
        fn eos_token_id(&self) -> u32 {
            299
        }
        fn pad_token_id(&self) -> Option<u32> {
            None
        }
        fn tokenizer_json(&self) -> Option<String> {
            None
        }
    }
    let bench = bench();
    let go_on = &mut |_| ControlFlow::Continue(());
    let error = update(&UpdateSettings::new(bench.path("out")), &Other, go_on).unwrap_err();
    assert!(matches!(&error, PrepareError::OtherTokenizer { .. }), "{error}");

    let plain = PrepareSettings { layout: Layout::Stream, ..near(&bench, "plain") };
    prepared(&plain);
    let before = files(&plain.output);
    for error in [bench.update("plain").unwrap_err(), prune(&plain.output, number(1)).unwrap_err()]
    {
        assert!(matches!(&error, PrepareError::NotUpdatable { .. }), "{error}");
        assert_line(&error, &["plain", "--updatable"]);
    }
    assert!(files(&plain.output) == before);
    assert!(bench.update("nothing").is_err());

    // Nothing is left where all documents are gone.
    fs::remove_dir_all(bench.path("in")).unwrap();
    fs::create_dir(bench.path("in")).unwrap();
    let error = bench.update("out").unwrap_err();
    assert!(matches!(&error, PrepareError::NoDocuments { .. }), "{error}");
    DataSet::open(bench.path("out")).unwrap();
}

#[test]
fn versions_stay_until_they_are_pruned() {
    let mut bench = bench();
    let out = bench.path("out");
    let mut fingerprints = vec![DataSet::open(&out).unwrap().fingerprint()];
    for at in 0..3 {
        bench.write(&format!("in/1{at}.txt"), text(700 + at, 90));
        fingerprints.insert(0, bench.update("out").unwrap().prepared.fingerprint);
        // The times of files tell which is newer, in steps that are not stated.
        let version = out.join(format!("index/{}.json", digits(fingerprints[0].to_string())));
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000 + at as u64);
        fs::File::options().append(true).open(version).unwrap().set_modified(time).unwrap();
    }
    let first = out.join(format!("index/{}.json", digits(fingerprints[3].to_string())));
    fs::File::options()
        .append(true)
        .open(first)
        .unwrap()
        .set_modified(std::time::UNIX_EPOCH)
        .unwrap();
    let open =
        |at: usize| DataSet::open_version(&out, fingerprints[at], &Default::default()).unwrap();
    for (at, fingerprint) in fingerprints.iter().enumerate() {
        assert_eq!(open(at).unwrap().fingerprint(), *fingerprint);
    }
    let mine = ["shard-mine.parquet", "notes.txt", "state/mine", "index/mine.json"];
    mine.iter().for_each(|name| fs::write(out.join(name), "mine").unwrap());
    // Its name is that of content, which is another.
    let like = format!("shard-{:032x}.parquet", 7);
    fs::write(out.join(&like), "mine").unwrap();
    let report = prune(&out, number(2)).unwrap();
    assert_eq!((&report.kept[..], &report.removed[..]), (&fingerprints[..2], &fingerprints[2..]));
    assert!(report.files > 4 && report.bytes > 0);
    assert!(open(0).is_some() && open(1).is_some() && open(2).is_none() && open(3).is_none());
    let kept = open(1).unwrap();
    for shard in kept.shards() {
        assert_eq!(fs::read(shard.path()).unwrap().len() as u64, shard.bytes());
    }
    assert_eq!(prune(&out, number(2)).unwrap().files, 0);
    prune(&out, number(1)).unwrap();
    for name in mine.into_iter().chain([&like[..]]) {
        assert_eq!(fs::read(out.join(name)).unwrap(), b"mine");
        fs::remove_file(out.join(name)).unwrap();
    }
    let left = assert_is_new(&bench);
    prepared(&near(&bench, "new"));
    assert!(left == files(&bench.path("new")));
    // An update goes on from there.
    bench.remove("in/11.txt");
    bench.update("out").unwrap();
    assert_eq!(open(0).unwrap().fingerprint(), fingerprints[0]);
}

fn digits(fingerprint: String) -> String {
    fingerprint.split_once(':').unwrap().1.to_owned()
}

#[test]
fn inputs_are_found_again_from_another_folder_and_lists_begin_where_they_began() {
    // The state has absolute paths: it does not depend on the current folder.
    let mut bench = bench();
    let list = bench.write("keys.txt", format!("{}\n", bench.path("in/05.txt").display()));
    let settings = PrepareSettings { exclude: Some(list), ..near(&bench, "listed") };
    let report = prepared(&settings);
    assert_eq!((report.excluded, report.documents), (1, 89));
    // The list changes: the one comes back, another goes.
    bench.write("keys.txt", format!("{}\n", bench.path("in/06.txt").display()));
    let report = bench.update("listed").unwrap().prepared;
    assert_eq!((report.excluded, report.documents), (1, 89));
    assert_eq!((report.changes.inputs_read, report.changes.texts_tokenized), (1, 1));
    let new = PrepareSettings { output: bench.path("new"), ..settings };
    prepared(&new);
    assert_holds(&files(&bench.path("listed")), &files(&new.output));
}

#[test]
fn a_data_set_that_lies_in_its_input_is_none() {
    let mut bench = Bench::new();
    for at in 0..30 {
        bench.write(&format!("in/{at:02}.txt"), text(at, 40));
    }
    let inside = near(&bench, "in/deep/out");
    let first = prepared(&inside);
    bench.write("in/30.txt", text(30, 40));
    let report = bench.update("in/deep/out").unwrap().prepared;
    assert_eq!((report.documents, report.skipped.len()), (first.documents + 1, 0));
    assert_eq!(report.changes.inputs_kept, 30);
    let plain = PrepareSettings { layout: Layout::Stream, ..near(&bench, "plain") };
    let glob = "*.txt".to_owned();
    assert_eq!(prepared(&PrepareSettings { glob, ..plain }).documents, report.documents);
}

#[test]
fn folders_of_mds_cannot_be_kept_up_to_date() {
    let mut bench = Bench::new();
    bench.write("in/a.txt", text(1, 90));
    let set = r#"{"version": 2, "shards": [{"format": "mds", "version": 2, "column_names": ["text"],
        "column_encodings": ["str"], "column_sizes": [null], "compression": null, "hashes": [],
        "samples": 0, "size_limit": 1000, "raw_data": {"basename": "shard.00000.mds", "bytes": 0,
        "hashes": {}}, "zip_data": null}]}"#;
    bench.write("in/set/index.json", set);
    bench.write("in/set/shard.00000.mds", "");
    let go_on = &mut |_| ControlFlow::Continue(());
    let error = prepare(&near(&bench, "out"), &ByteTokenizer, go_on).unwrap_err();
    assert_line(&error, &["in/set", "MDS"]);
    assert!(!bench.path("out").exists());
}
