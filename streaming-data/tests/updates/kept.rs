//! What an update takes over of the version before: only what is verified, and only what this program would make.

use std::{
    fs,
    ops::ControlFlow,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use tidemill_streaming_data::{
    data_set::index::{INDEX_FILE, Index, StateEntry, version_file},
    hash::ContentHash,
    prepare::{
        ByteTokenizer, Dedup, DedupSettings, Phase, PrepareError, PrepareSettings, UpdateSettings,
        update,
    },
};

use crate::{
    outcome::assert_line,
    support::{Bench, assert_holds, files, prepared, word},
};

fn text(seed: usize, words: usize) -> String {
    (0..words).map(|at| word(seed * 1000 + at * 7 % 50) + " ").collect()
}

fn settings(bench: &Bench, output: &str) -> PrepareSettings {
    let dedup = DedupSettings { dedup: Dedup::None, ..DedupSettings::default() };
    PrepareSettings { dedup, ..bench.settings(output) }
}

#[track_caller]
fn assert_is_new(bench: &Bench) {
    prepared(&settings(bench, "new"));
    assert_holds(&files(&bench.path("out")), &files(&bench.path("new")));
    fs::remove_dir_all(bench.path("new")).unwrap();
}

/// Texts that fill a shard each, so that equal ones are equal shards.
fn equal_shards() -> Bench {
    let mut bench = Bench::new();
    for name in ["a", "b"] {
        bench.write(&format!("in/{name}.txt"), text(1, 400));
    }
    bench.write("in/z.txt", text(2, 400));
    prepared(&settings(&bench, "out"));
    bench
}

#[test]
fn a_shard_that_stands_more_often_than_before_is_copied() {
    let mut bench = equal_shards();
    // In front of those that are equal: the last of them gets a name that is new.
    bench.write("in/0.txt", text(1, 400));
    let report = bench.update("out").unwrap().prepared;
    assert_eq!((report.changes.texts_tokenized, report.changes.shards_kept), (1, 3));
    let index = Index::read(&bench.path("out")).unwrap();
    let third = index.shards.iter().find(|shard| shard.file.ends_with("-2.parquet")).unwrap();
    let content = fs::read(bench.path("out").join(&third.file)).unwrap();
    assert_eq!(ContentHash::of(&content), third.hash);
    assert_is_new(&bench);
    // One that goes and one that comes in another place, of which nothing is tokenized.
    fs::rename(bench.path("in/a.txt"), bench.path("in/y.txt")).unwrap();
    let changes = bench.update("out").unwrap().prepared.changes;
    assert_eq!(changes.texts_tokenized, 0);
    assert_is_new(&bench);
}

/// Shards that are copied or taken apart match the index, or the update fails.
#[test]
fn a_shard_that_is_damaged_is_not_built_on() {
    for (front, what) in [(text(1, 400), "copied"), (text(3, 5), "packed with others")] {
        let mut bench = equal_shards();
        bench.write("in/0.txt", front);
        for shard in Index::read(&bench.path("out")).unwrap().shards {
            let path = bench.path("out").join(&shard.file);
            let mut bytes = fs::read(&path).unwrap();
            // Among the rows.
            let place = bytes.len() / 3;
            bytes[place] ^= 4;
            fs::write(&path, bytes).unwrap();
        }
        let before = files(&bench.path("out"));
        let error = bench.update("out").expect_err(what);
        assert_line(&error, &["out/shard-", "expected"]);
        assert!(files(&bench.path("out")) == before, "{what}");
    }
}

/// Rewrites the state as if by another program, which calls one of its methods so.
fn made_by_another(out: &Path, method: &str) {
    let index = Index::read(out).unwrap();
    let file = &index.state.as_ref().unwrap().file;
    let mut state: serde_json::Value =
        serde_json::from_slice(&fs::read(out.join(file)).unwrap()).unwrap();
    assert!(state["methods"][method].is_string());
    state["methods"][method] = "another".into();
    let bytes = serde_json::to_vec_pretty(&state).unwrap();
    let hash = ContentHash::of(&bytes);
    let file = format!("state/{}.json", hash.to_string().split_once(':').unwrap().1);
    fs::write(out.join(&file), bytes).unwrap();
    let index = Index { state: Some(StateEntry { file, hash }), ..index };
    for name in [version_file(&index), INDEX_FILE.to_owned()] {
        fs::write(out.join(name), index.to_bytes()).unwrap();
    }
}

#[test]
fn what_another_program_made_is_used_as_far_as_this_one_would_make_it() {
    let mut bench = Bench::new();
    for at in 0..30 {
        bench.write(&format!("in/{at:02}.txt"), text(at, 40));
    }
    prepared(&settings(&bench, "out"));
    for method in ["encoder", "words", "signatures"] {
        made_by_another(&bench.path("out"), method);
        let report = bench.update("out").unwrap().prepared;
        let changes = report.changes;
        // Tokens are those of any program; what is known of texts is not.
        let is_known = method == "encoder";
        assert_eq!(changes.inputs_read, if is_known { 0 } else { 30 }, "{method}");
        assert_eq!((changes.shards_kept, changes.shards_read > 0), (0, is_known), "{method}");
        assert_is_new(&bench);
    }
    // Other ends of shards are no shards of this program.
    made_by_another(&bench.path("out"), "cut");
    bench.update("out").unwrap();
    assert_is_new(&bench);
}

/// A part is whole by its own hash, and still another than the one that the state names.
#[test]
fn a_part_in_the_place_of_another_is_not_believed() {
    let mut bench = equal_shards();
    let state = Index::read(&bench.path("out")).unwrap().state.unwrap().file;
    let state: serde_json::Value =
        serde_json::from_slice(&fs::read(bench.path("out").join(state)).unwrap()).unwrap();
    let part = |at: usize| state["parts"][at]["file"].as_str().unwrap();
    fs::copy(bench.path("out").join(part(0)), bench.path("out").join(part(2))).unwrap();
    let before = files(&bench.path("out"));
    bench.write("in/0.txt", text(3, 5));
    let error = bench.update("out").unwrap_err();
    assert!(matches!(&error, PrepareError::StateDamaged { .. }), "{error}");
    assert_line(&error, &[part(2), "found hash", "as the state says"]);
    assert!(files(&bench.path("out")) == before);
}

/// How inputs look is noted before the index is there: where a kill comes in between, that is no look of the version before.
#[test]
fn a_look_of_a_version_that_was_not_published_tells_nothing() {
    let mut bench = Bench::new();
    for at in 0..30 {
        bench.write(&format!("in/{at:02}.txt"), text(at, 40));
    }
    prepared(&settings(&bench, "out"));
    let before = files(&bench.path("out"));
    bench.write("in/07.txt", text(107, 40));
    bench.update("out").unwrap();
    let seen = fs::read(bench.path("out/state/seen")).unwrap();
    fs::remove_dir_all(bench.path("out")).unwrap();
    for (name, content) in before {
        let path = bench.path("out").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    fs::write(bench.path("out/state/seen"), seen).unwrap();
    let changes = bench.update("out").unwrap().prepared.changes;
    assert_eq!((changes.inputs_read, changes.texts_tokenized), (1, 1));
    assert_is_new(&bench);
}

/// Between the pass that records and the one that reads tokens, what was new is gone again.
#[test]
fn an_input_that_changes_under_an_update_is_named() {
    let mut bench = Bench::new();
    for at in 0..30 {
        bench.write(&format!("in/{at:02}.txt"), text(at, 40));
    }
    prepared(&settings(&bench, "out"));
    let before = files(&bench.path("out"));
    let line = |seed| format!("{}\n", serde_json::json!({"text": text(seed, 40)}));
    let lines = bench.write("in/lines.jsonl", (100..140).map(line).collect::<String>());
    let was_cut = AtomicBool::new(false);
    let settings = UpdateSettings::new(bench.path("out"));
    let updated = update(&settings, &ByteTokenizer, &mut |progress| {
        // All is recorded, and nothing is read for its tokens yet.
        let is_recorded = progress.bytes_total > 0 && progress.bytes_done == progress.bytes_total;
        if progress.phase == Phase::Comparing && is_recorded {
            fs::write(&lines, (100..103).map(line).collect::<String>()).unwrap();
            was_cut.store(true, Ordering::SeqCst);
        }
        ControlFlow::Continue(())
    });
    assert!(was_cut.load(Ordering::SeqCst));
    let error = updated.unwrap_err();
    let is_told = matches!(error, PrepareError::InputChanged { .. });
    assert!(is_told, "{error}");
    assert_line(&error, &["in/lines.jsonl", "changed while it was prepared"]);
    assert!(files(&bench.path("out")) == before);
    bench.touch("in/lines.jsonl");
    bench.update("out").unwrap();
    assert_is_new(&bench);
}
