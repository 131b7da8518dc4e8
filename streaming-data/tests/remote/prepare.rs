//! `prepare` to a store: the bytes of a local one, or nothing that could be taken for a data set.
//!
//! Seen red: without the claim, with shards that are sent without a bound, without further attempts,
//! with an interruption that waits for parts or leaves objects, and with web servers that are sent
//! parts.

use std::{
    fs,
    num::NonZeroUsize,
    ops::ControlFlow,
    path::PathBuf,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use object_store::path::Path;
use tempfile::TempDir;
use tidemill_streaming_data::{
    DataSet,
    data_set::index::INDEX_FILE,
    prepare::{
        ByteTokenizer, PrepareError, PrepareReport, PrepareSettings, Tokenize, TokenizeError,
        prepare, prepare_to_store,
    },
    store::{Location, RemoteFolder, StoreSettings},
};

use crate::{
    assert_line,
    faulty::{Fault, Faulty, PASSING},
    files, hasty,
    s3_server::S3Server,
    store_settings,
    support::outcome::content,
    wait_until,
    web_server::serve_writable,
};

mod claims;
mod refusals;

const SEQ_LEN: usize = 63;
const SHARD_SAMPLES: usize = 20;

/// A folder of texts that fill so many shards, the last one not quite.
fn texts(shards: usize) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for shard in 0..shards {
        let letter = |at: usize| char::from(b'a' + (at * at / 7 + at * shard) as u8 % 26);
        let text: String = (0..SHARD_SAMPLES * SEQ_LEN - 10).map(letter).collect();
        fs::write(folder.path().join(format!("{shard:03}.txt")), text).unwrap();
    }
    folder
}

fn settings_of(texts: &TempDir, output: impl Into<PathBuf>, workers: usize) -> PrepareSettings {
    let number = |number| NonZeroUsize::new(number).unwrap();
    let inputs = vec![texts.path().to_owned()];
    PrepareSettings {
        workers: number(workers),
        shard_samples: Some(number(SHARD_SAMPLES)),
        store: store_settings(),
        ..PrepareSettings::new(inputs, output.into(), number(SEQ_LEN))
    }
}

fn run(settings: &PrepareSettings) -> Result<PrepareReport, PrepareError> {
    prepare(settings, &ByteTokenizer, &mut |_| ControlFlow::Continue(()))
}

/// The files that a local `prepare` writes, with their bytes.
fn local(texts: &TempDir) -> Vec<(String, Vec<u8>)> {
    let folder = tempfile::tempdir().unwrap();
    run(&settings_of(texts, folder.path().join("out"), 1)).unwrap();
    content(&folder.path().join("out"))
}

/// The objects of a folder, with their bytes.
fn stored(folder: &RemoteFolder) -> Vec<(String, Vec<u8>)> {
    let entries = folder.list().unwrap();
    entries
        .into_iter()
        .map(|entry| (entry.name.clone(), folder.get(&entry.name).unwrap().to_vec()))
        .collect()
}

/// The stored files as a folder would have them: without the token that names have in a store.
fn data_set(objects: Vec<(String, Vec<u8>)>) -> Vec<(String, Vec<u8>)> {
    let shard = |(name, _): &(String, Vec<u8>)| {
        let token = name.strip_prefix("shard-")?.strip_suffix("-00000.parquet")?;
        (token.len() == 16).then(|| format!("-{token}"))
    };
    let token = objects.iter().find_map(shard).expect("a shard with a token in its name");
    let without_token = |(name, content): (String, Vec<u8>)| match name == INDEX_FILE {
        true => {
            let index = String::from_utf8(content).unwrap().replace(&token, "");
            (name, index.into_bytes())
        }
        false => (name.replace(&token, ""), content),
    };
    let mut objects: Vec<_> = objects.into_iter().map(without_token).collect();
    objects.sort();
    objects
}

/// Fails unless there is nothing but the claim of a `prepare` that has ended.
fn assert_only_claimed(objects: &[(String, Vec<u8>)]) {
    assert_eq!(names(objects), [INDEX_FILE]);
    assert!(objects[0].1.starts_with(b"{\"preparing\":"), "{objects:?}");
}

fn names(objects: &[(String, Vec<u8>)]) -> Vec<&str> {
    objects.iter().map(|(name, _)| name.as_str()).collect()
}

/// A folder of a store that nothing goes wrong with.
fn undisturbed(store: &Faulty) -> RemoteFolder {
    let location = Location::parse("memory://store/set").unwrap();
    let inner = Arc::clone(&store.inner) as _;
    RemoteFolder::of_store(inner, Path::from("set"), location, &store_settings())
}

/// The same folder, with what goes wrong.
fn disturbed(store: &Arc<Faulty>, settings: &StoreSettings) -> RemoteFolder {
    let location = Location::parse("memory://store/set").unwrap();
    RemoteFolder::of_store(Arc::clone(store) as _, Path::from("set"), location, settings)
}

fn empty_store(seed: u64, faults: &[Fault], percent: u64) -> Faulty {
    Faulty::of_folder(tempfile::tempdir().unwrap().path(), seed, faults, percent)
}

fn run_in(
    folder: &RemoteFolder,
    texts: &TempDir,
    workers: usize,
) -> Result<PrepareReport, PrepareError> {
    let settings = settings_of(texts, "nowhere", workers);
    prepare_to_store(folder, &settings, &ByteTokenizer, &mut |_| ControlFlow::Continue(()))
}

fn bucket() -> (TempDir, S3Server) {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("bucket")).unwrap();
    let server = S3Server::start(root.path());
    (root, server)
}

fn of_server(server: &S3Server) -> StoreSettings {
    StoreSettings { options: server.options(), ..store_settings() }
}

/// The tokenizer of bytes, which says what it is asked.
struct Watched<'a> {
    /// For each text.
    encode: &'a (dyn Fn() + Sync),
    /// When the shards are stored, and the index is not.
    end: &'a (dyn Fn() + Sync),
}

impl Tokenize for Watched<'_> {
    fn encode(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), TokenizeError> {
        (self.encode)();
        ByteTokenizer.encode(text, tokens)
    }
    fn vocab_size(&self) -> u32 {
        ByteTokenizer.vocab_size()
    }
    fn bos_token_id(&self) -> Option<u32> {
        None
    }
    fn eos_token_id(&self) -> u32 {
        ByteTokenizer.eos_token_id()
    }
    fn pad_token_id(&self) -> Option<u32> {
        None
    }
    fn tokenizer_json(&self) -> Option<String> {
        (self.end)();
        None
    }
}

#[test]
fn s3_gets_the_bytes_of_a_local_folder_for_any_number_of_workers() {
    let texts = texts(7);
    let expected = local(&texts);
    assert_eq!(expected.len(), 7 + 2, "{:?}", names(&expected));
    let (_root, server) = bucket();
    for workers in [1, 4] {
        let url = format!("s3://bucket/some where/{workers}");
        let mut settings = settings_of(&texts, &url, workers);
        settings.store = of_server(&server);
        let report = run(&settings).unwrap();
        assert_eq!(report.shards, 7);
        let folder = RemoteFolder::open(Location::parse(&url).unwrap(), &settings.store).unwrap();
        assert!(data_set(stored(&folder)) == expected, "{:?}", names(&stored(&folder)));
    }
    // The index is what comes last.
    let puts = server.asked("PUT ");
    let index = format!("/{INDEX_FILE}");
    assert!(puts[0].contains(&index) && puts[puts.len() - 1].contains(&index), "{puts:?}");
    // The claim is put twice: to see that the store keeps to conditions.
    assert_eq!(puts.len(), 2 * (2 + 7 + 2), "{puts:?}");
}

#[test]
fn a_url_of_memory_is_a_data_set_afterwards_and_is_not_written_again() {
    let texts = texts(2);
    let settings = settings_of(&texts, "memory://prepared/a/set", 2);
    let report = run(&settings).unwrap();
    let data_set = DataSet::open("memory://prepared/a/set").unwrap();
    assert_eq!((data_set.samples(), data_set.seq_len()), (report.samples, SEQ_LEN));
    let error = run(&settings).unwrap_err();
    assert_line(&error, &["cannot write data set memory://prepared/a/set: found a data set"]);
}

/// Requests that fail or fall silent change no byte.
#[test]
fn a_faulty_store_gets_the_same_bytes() {
    let texts = texts(6);
    let expected = local(&texts);
    let cache = tempfile::tempdir().unwrap();
    for seed in 0..4 {
        let store = Arc::new(empty_store(seed, &PASSING, 40));
        let folder = disturbed(&store, &hasty(cache.path(), None).store);
        run_in(&folder, &texts, 1 + seed as usize % 2).unwrap();
        assert!(store.asked.puts.load(Ordering::SeqCst) > expected.len() + 1, "no request failed");
        let stored = data_set(stored(&undisturbed(&store)));
        assert!(stored == expected, "{:?}", names(&stored));
    }
}

/// While nothing arrives at the store, three shards are being uploaded, another waits, and no further
/// one is written.
#[test]
fn shards_are_sent_side_by_side_and_few_wait() {
    let texts = texts(12);
    let store = Arc::new(empty_store(0, &[], 0));
    store.gate.send_replace(false);
    let folder = disturbed(&store, &store_settings());
    let settings = settings_of(&texts, "nowhere", 2);
    let (mut last, mut in_a_row) = (None, 0);
    let report = prepare_to_store(&folder, &settings, &ByteTokenizer, &mut |now| {
        in_a_row = if last == Some(now) { in_a_row + 1 } else { 0 };
        last = Some(now);
        if in_a_row == 3 {
            // It is the store that is waited for.
            assert_eq!(now.samples, 4 * SHARD_SAMPLES as u64);
            wait_until(|| store.asked.at_once.load(Ordering::SeqCst) == 3);
            store.gate.send_replace(true);
        }
        ControlFlow::Continue(())
    });
    assert_eq!(report.unwrap().shards, 12);
    assert_eq!(data_set(stored(&undisturbed(&store))), local(&texts));
}

/// Text that is hardly compressed, for one shard of more than the 8 MiB that are sent at once.
fn large_text() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut state = 1_u64;
    let character = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 57) as u8
    };
    let text: Vec<u8> = (0..12 << 20).map(character).collect();
    fs::write(folder.path().join("large.txt"), text).unwrap();
    folder
}

fn large_settings(texts: &TempDir, output: &str) -> PrepareSettings {
    let settings = settings_of(texts, output, 2);
    PrepareSettings { seq_len: NonZeroUsize::new(1023), shard_samples: None, ..settings }
}

/// No part of a shard that was half sent stays, and no thread waits for the rest of it.
#[test]
fn an_interruption_gives_up_what_is_half_sent() {
    let texts = large_text();
    let store = Arc::new(empty_store(0, &[], 0));
    store.gate.send_replace(false);
    let folder = disturbed(&store, &store_settings());
    let settings = large_settings(&texts, "nowhere");
    let mut broken_off = None;
    let result = prepare_to_store(&folder, &settings, &ByteTokenizer, &mut |_| {
        if store.asked.parts.load(Ordering::SeqCst) == 0 {
            return ControlFlow::Continue(());
        }
        broken_off = Some(Instant::now());
        ControlFlow::Break(())
    });
    let waited = broken_off.unwrap().elapsed();
    assert!(matches!(result, Err(PrepareError::Interrupted)), "{result:?}");
    assert_eq!(store.asked.aborted.load(Ordering::SeqCst), 1);
    assert_only_claimed(&stored(&undisturbed(&store)));
    assert!(waited < store_settings().progress_deadline, "it waited for the store: {waited:?}");
}

/// A web server that can be written and listed takes shards as a whole only.
#[test]
fn webdav_gets_the_same_bytes() {
    let texts = large_text();
    let (local, served) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (address, _stop) = serve_writable(served.path());
    let out = local.path().join("out");
    run(&large_settings(&texts, out.to_str().unwrap())).unwrap();
    let (stays, goes) = (
        served.path().join("notes.txt"),
        served.path().join("shard-0123456789abcdef-00007.parquet"),
    );
    fs::write(&stays, "").unwrap();
    fs::write(goes, "").unwrap();
    fs::write(served.path().join(INDEX_FILE), "{\"preparing\": \"by another\"}").unwrap();
    run(&large_settings(&texts, &format!("http://{address}/a/set"))).unwrap();
    fs::remove_file(stays).unwrap();
    let (written, expected) = (data_set(content(served.path())), content(&out));
    assert!(written == expected, "{:?} and {:?}", names(&written), names(&expected));
    assert!(expected.iter().any(|(_, bytes)| bytes.len() > 8 << 20), "{:?}", files(&out));
}
