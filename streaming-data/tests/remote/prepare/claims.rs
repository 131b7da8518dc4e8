//! What is not complete in a store is no data set, whatever ended its `prepare`.
//!
//! Seen red: with claims that readers take for broken indexes, shards of an earlier attempt or the
//! own shards that stay, objects of others that go, a claim that is not looked at before a shard or
//! before the index, sizes that are not compared, shards that land behind what removes them, temporary
//! files with names, and stores without conditions that are believed to have them.

use std::{
    num::NonZeroUsize,
    ops::ControlFlow,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use tidemill_streaming_data::{
    DataSet, DataSettings,
    data_set::index::INDEX_FILE,
    prepare::{ByteTokenizer, PrepareError, PrepareSettings, prepare, prepare_to_store},
    store::{Location, RemoteFolder},
};

use super::{
    SEQ_LEN, SHARD_SAMPLES, Watched, assert_only_claimed, bucket, data_set, disturbed, empty_store,
    local, names, of_server, run, run_in, settings_of, stored, texts, undisturbed,
};
use crate::{
    assert_line,
    faulty::{Conditions, Fault, Faulty},
    files, settings, store_settings, wait_until,
};

/// Puts the claim of a `prepare` that was killed.
fn put_claim(folder: &RemoteFolder) {
    folder.put(INDEX_FILE, bytes::Bytes::from("{\"preparing\": \"by another\"}")).unwrap();
}

/// The name that the killed `prepare` gave to a file.
fn of_killed(name: &str) -> String {
    let at = name.find(['-', '.']).unwrap();
    format!("{}-0123456789abcdef{}", &name[..at], &name[at..])
}

/// A data set that is being prepared is not opened, with or without its shards; the next `prepare` takes it
/// over, and removes only files that a `prepare` could have written.
#[test]
fn a_claim_is_an_error_to_readers_and_is_taken_over() {
    let (many, few) = (texts(5), texts(2));
    let expected = local(&few);
    let store = Arc::new(empty_store(0, &[], 0));
    let folder = disturbed(&store, &store_settings());
    for (name, content) in local(&many) {
        if name != INDEX_FILE {
            folder.put(&of_killed(&name), bytes::Bytes::from(content)).unwrap();
        }
    }
    put_claim(&folder);
    let others = ["notes.txt", "shard-1.parquet", "shard-00001.parquet.sha"];
    for name in others {
        folder.put(name, bytes::Bytes::from(name)).unwrap();
    }
    let cache = tempfile::tempdir().unwrap();
    let open = || crate::open(Arc::clone(&store) as _, &settings(cache.path(), None));
    let words =
        "data set memory://store/set is still being prepared, or its `prepare` ended before";
    assert_line(&open().unwrap_err(), &[words]);

    run_in(&folder, &few, 2).unwrap();
    let mut found = stored(&undisturbed(&store));
    found
        .retain(|(name, content)| !(others.contains(&name.as_str()) && name.as_bytes() == content));
    let found = data_set(found);
    assert!(found == expected, "{:?}", names(&found));
    assert_eq!(folder.list().unwrap().len(), expected.len() + others.len());
    assert_eq!(open().unwrap().shards().len(), 2);
}

/// The failure that ends a `prepare` is its error, and nothing of it stays but the claim. Objects of an earlier
/// `prepare` stay, as that one may still be running.
#[test]
fn errors_and_interruptions_leave_nothing() {
    let texts = texts(6);
    for is_claimed in [false, true] {
        let begin = |store: Faulty| {
            let store = Arc::new(store);
            if is_claimed {
                let folder = undisturbed(&store);
                put_claim(&folder);
                folder.put(&of_killed("shard-00017.parquet"), bytes::Bytes::from("PAR1")).unwrap();
            }
            store
        };
        let assert_nothing_more = |store: &Faulty| {
            let mut stored = stored(&undisturbed(store));
            stored.retain(|(name, _)| !is_claimed || *name != of_killed("shard-00017.parquet"));
            assert_only_claimed(&stored);
        };
        let nothing = tempfile::tempdir().unwrap();
        let store = begin(Faulty::always(nothing.path(), "-00002.parquet", Fault::Break));
        let error = run_in(&disturbed(&store, &store_settings()), &texts, 2).unwrap_err();
        let words = ["cannot write memory://store/set/shard-", "-00002.parquet (8 attempts)"];
        assert_line(&error, &[words[0], words[1], "the connection broke"]);
        assert_nothing_more(&store);

        let store = begin(empty_store(0, &[], 0));
        let folder = disturbed(&store, &store_settings());
        let settings = settings_of(&texts, "nowhere", 2);
        let result =
            prepare_to_store(&folder, &settings, &ByteTokenizer, &mut |now| match undisturbed(
                &store,
            )
            .list()
            .unwrap()
            .len()
                > 1
                && now.samples > 0
            {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            });
        assert!(matches!(result, Err(PrepareError::Interrupted)), "{result:?}");
        assert_nothing_more(&store);

        let store = begin(empty_store(0, &[], 0));
        let folder = disturbed(&store, &store_settings());
        let mut settings = settings_of(&texts, "nowhere", 2);
        settings.seq_len = NonZeroUsize::new(1 << 20);
        let progress = &mut |_| ControlFlow::Continue(());
        let error = prepare_to_store(&folder, &settings, &ByteTokenizer, progress).unwrap_err();
        assert_line(&error, &["expected at least 1048577"]);
        assert_nothing_more(&store);
    }
}

/// Files that are being sent when a `prepare` is broken off arrive before all are removed.
#[test]
fn what_is_on_its_way_is_removed_too() {
    let texts = texts(2);
    let store = Arc::new(empty_store(0, &[], 0));
    store.gate.send_replace(false);
    let folder = disturbed(&store, &store_settings());
    let settings = settings_of(&texts, "nowhere", 1);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            wait_until(|| is_over.load(Ordering::SeqCst));
            // Time for what must not happen.
            let over = Instant::now();
            wait_until(|| over.elapsed() > Duration::from_millis(100));
            store.gate.send_replace(true);
        });
        let result = prepare_to_store(&folder, &settings, &ByteTokenizer, &mut |_| match store
            .asked
            .at_once
            .load(Ordering::SeqCst)
        {
            0 => ControlFlow::Continue(()),
            _ => {
                is_over.store(true, Ordering::SeqCst);
                ControlFlow::Break(())
            }
        });
        assert!(matches!(result, Err(PrepareError::Interrupted)), "{result:?}");
    });
    wait_until(|| store.asked.at_once.load(Ordering::SeqCst) == 0);
    assert_only_claimed(&stored(&undisturbed(&store)));
}

/// If two write to the same place, the one that began last continues, and the other removes the files that it
/// wrote and nothing else, whether the later one is done or still running.
#[test]
fn one_that_was_overtaken_ends_and_touches_nothing_of_the_other() {
    let (ours, others) = (texts(6), texts(3));
    for is_done in [true, false] {
        let store = Arc::new(empty_store(0, &[], 0));
        let folder = disturbed(&store, &store_settings());
        let settings = settings_of(&ours, "nowhere", 1);
        let mut left = None;
        let result = prepare_to_store(&folder, &settings, &ByteTokenizer, &mut |now| {
            if now.samples > 0 && left.is_none() {
                if is_done {
                    // An upload in flight would land in between.
                    wait_until(|| store.asked.at_once.load(Ordering::SeqCst) == 0);
                    run_in(&folder, &others, 1).unwrap();
                } else {
                    put_claim(&folder);
                }
                left = Some(stored(&undisturbed(&store)));
            }
            ControlFlow::Continue(())
        });
        let words =
            "cannot write data set memory://store/set: found the claim of another `prepare`";
        assert_line(&result.unwrap_err(), &[words]);
        let stored = stored(&undisturbed(&store));
        if is_done {
            assert!(Some(&stored) == left.as_ref(), "{:?}", names(&stored));
            assert!(data_set(stored) == local(&others));
        } else {
            assert_only_claimed(&stored);
            assert!(left.is_some_and(|left| left.contains(&stored[0])));
        }
    }
}

/// The index is put only over the own claim, and only where the shards are there.
#[test]
fn the_index_is_put_over_what_it_says() {
    let texts = texts(3);
    let second = |folder: &RemoteFolder| {
        let entries = folder.list().unwrap().into_iter();
        entries.map(|entry| entry.name).find(|name| name.ends_with("-00001.parquet")).unwrap()
    };
    let between = |act: &(dyn Fn(&RemoteFolder) + Sync)| {
        let store = Arc::new(empty_store(0, &[], 0));
        let folder = undisturbed(&store);
        let tokenizer = Watched { encode: &|| (), end: &|| act(&folder) };
        let settings = settings_of(&texts, "nowhere", 1);
        let progress = &mut |_| ControlFlow::Continue(());
        let error = prepare_to_store(&folder, &settings, &tokenizer, progress).unwrap_err();
        assert_only_claimed(&stored(&folder));
        error
    };
    let error = between(&put_claim);
    assert_line(&error, &["memory://store/set: found the claim of another `prepare`"]);
    let error = between(&|folder| folder.delete(&second(folder)).unwrap());
    assert_line(&error, &["memory://store/set/shard-", "-00001.parquet is missing"]);
    let error = between(&|folder| folder.put(&second(folder), bytes::Bytes::from("PAR1")).unwrap());
    assert_line(&error, &["memory://store/set/shard-", "-00001.parquet has 4 bytes, expected"]);
}

/// A server that speaks like S3 and lacks conditions: its answer says so, or the settings do.
#[test]
fn an_s3_server_that_lacks_conditions_is_written_all_the_same() {
    let texts = texts(3);
    let (_root, server) = bucket();
    let expected = local(&texts);
    let write = |url: &str, option: Option<(&str, &str)>| {
        let mut settings = settings_of(&texts, url, 2);
        settings.store = of_server(&server);
        let option = option.map(|(name, value)| (name.to_owned(), value.to_owned()));
        settings.store.options.extend(option);
        let before = server.count("PUT ");
        run(&settings).unwrap();
        let folder = RemoteFolder::open(Location::parse(url).unwrap(), &settings.store).unwrap();
        assert!(data_set(stored(&folder)) == expected, "{url}");
        server.count("PUT ") - before
    };
    // A refused claim and one that is not compared; a claim alone.
    server.refuse_conditions();
    assert_eq!(write("s3://bucket/said", None), 2 + 3 + 2);
    let known = Some(("AWS_CONDITIONAL_PUT", "disabled"));
    assert_eq!(write("s3://bucket/known", known), 1 + 3 + 2);
}

/// Where a store does not compare what it writes over, the claim is looked at before; and it is removed in
/// the end, since there nothing depends on what was in its place.
#[test]
fn stores_without_conditions_are_written_all_the_same() {
    let texts = texts(3);
    for conditions in [Conditions::PassedOver, Conditions::Refused] {
        let begin = || Arc::new(empty_store(0, &[], 0).conditions(conditions));
        let store = begin();
        put_claim(&undisturbed(&store));
        run_in(&disturbed(&store, &store_settings()), &texts, 2).unwrap();
        assert!(data_set(stored(&undisturbed(&store))) == local(&texts), "{conditions:?}");

        let ended_by = |act: &(dyn Fn(&RemoteFolder) + Sync)| {
            let store = begin();
            let folder = undisturbed(&store);
            let tokenizer = Watched { encode: &|| (), end: &|| act(&folder) };
            let settings = settings_of(&texts, "nowhere", 1);
            let progress = &mut |_| ControlFlow::Continue(());
            let disturbed = disturbed(&store, &store_settings());
            let error = prepare_to_store(&disturbed, &settings, &tokenizer, progress).unwrap_err();
            (error, stored(&folder))
        };
        let remove_all = |folder: &RemoteFolder| {
            for entry in folder.list().unwrap().iter().filter(|entry| entry.name != INDEX_FILE) {
                folder.delete(&entry.name).unwrap();
            }
        };
        let (error, left) = ended_by(&remove_all);
        assert_line(&error, &["-00000.parquet is missing"]);
        assert_eq!(left, [], "{conditions:?}");
        let (error, left) = ended_by(&put_claim);
        assert_line(&error, &["memory://store/set: found the claim of another `prepare`"]);
        assert_only_claimed(&left);
    }
}

const TEXTS: &str = "TIDEMILL_TEST_TEXTS";
const SAMPLES: &str = "TIDEMILL_TEST_SAMPLES";

/// The program of the next test's processes: they write some shards, and wait to be killed.
#[test]
#[ignore = "another test starts it, with an environment of its own"]
fn child() {
    let variable = |name| std::env::var(name).unwrap();
    let samples: u64 = variable(SAMPLES).parse().unwrap();
    let number = |number| NonZeroUsize::new(number).unwrap();
    let settings = PrepareSettings {
        shard_samples: Some(number(SHARD_SAMPLES)),
        ..PrepareSettings::new(
            vec![variable(TEXTS).into()],
            "s3://bucket/out".into(),
            number(SEQ_LEN),
        )
    };
    let _ = prepare(&settings, &ByteTokenizer, &mut |now| {
        if now.samples < samples {
            return ControlFlow::Continue(());
        }
        loop {
            thread::park();
        }
    });
}

/// Killed in the middle of uploads, it leaves a claim and nothing on this machine; the next one
/// begins anew, and ends with the bytes of an undisturbed one.
#[test]
fn kills_in_the_middle_of_uploads_leave_nothing_to_clean() {
    let (many, few) = (texts(13), texts(3));
    let (_root, server) = bucket();
    let store = of_server(&server);
    let location = Location::parse("s3://bucket/out").unwrap();
    let folder = RemoteFolder::open(location, &store).unwrap();
    let temporary = tempfile::tempdir().unwrap();
    for kill_after in [0, 2, 9] {
        let before = server.count("PUT /bucket/out/shard-");
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "prepare::claims::child", "--ignored", "--nocapture"])
            .envs(server.options())
            .env(TEXTS, many.path())
            .env(SAMPLES, ((kill_after + 2) * SHARD_SAMPLES).to_string())
            .env("TMPDIR", temporary.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        wait_until(|| server.count("PUT /bucket/out/shard-") > before + kill_after);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(files(temporary.path()), []);
        let store = store.clone();
        let reading = DataSettings { store, ..settings(temporary.path(), None) };
        let error = DataSet::open_with("s3://bucket/out", &reading);
        assert_line(&error.unwrap_err(), &["data set s3://bucket/out is still being prepared"]);
    }
    let left = folder.list().unwrap().len();
    assert!(left > 3 + 2, "{left} objects: none is left to be removed");
    let settings = PrepareSettings { store, ..settings_of(&few, "s3://bucket/out", 2) };
    run(&settings).unwrap();
    let (stored, expected) = (data_set(stored(&folder)), local(&few));
    assert!(stored == expected, "{:?}", names(&stored));
}
