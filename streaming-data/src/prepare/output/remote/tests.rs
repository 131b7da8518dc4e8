//! Two that prepare the same data set at the same time, interleaved at every request.
//!
//! Seen red: with claims that are put without a condition, with an index that is put so, with a refusal
//! that is believed where an answer was lost, with shards that are removed while their index may still
//! arrive, and with names that do not hold the token.

use std::{
    collections::BTreeMap,
    io::Write,
    ops::{ControlFlow, Range},
    sync::Arc,
};

use object_store::{ObjectStore, ObjectStoreExt, memory::InMemory, path::Path};

use super::*;
use crate::{
    data_set::index::{Column, FORMAT_VERSION, ShardEntry, TOKENS_COLUMN},
    hash::{ContentHash, HASH_ALGORITHM},
    prepare::output::shard::shard_file,
    store::{Location, StoreSettings},
};

#[path = "../../../../tests/support/interleaved.rs"]
mod interleaved;

use interleaved::{Change, folder, is_calm, killed, now, seeds, two_writers};

/// For each fault that the test was seen to find, one of these seeds shows it.
const SEEDS: Range<u64> = 0..130;
const SHARDS: usize = 3;

/// How a `prepare` ends where nothing ends it before.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Published,
    /// Killed after this many shards were written.
    Killed(usize),
}

/// As `prepare` does, with one request at a time: the index where it is published, none where it was killed.
fn prepare(
    store: Arc<dyn ObjectStore>,
    label: &str,
    end: End,
) -> Result<Option<Index>, PrepareError> {
    let mut output = RemoteOutput::begin(folder(store, "set"))?;
    let mut shards = Vec::new();
    for number in 0..SHARDS {
        if end == End::Killed(number) {
            return Ok(None);
        }
        match write_shard(&mut output, label, number) {
            Ok(shard) => shards.push(shard),
            Err(error) => {
                Box::new(output).abandon();
                return Err(error);
            }
        }
    }
    let tokens = TOKENS_COLUMN.to_owned();
    let (kind, element) = ("fixed_size_list".to_owned(), "int32".to_owned());
    let index = Index {
        format_version: FORMAT_VERSION,
        seq_len: 7,
        vocab_size: 9,
        bos_token_id: None,
        eos_token_id: None,
        pad_token_id: None,
        tokenizer_file: Some(output.name_of(TOKENIZER_FILE)),
        hash_algorithm: HASH_ALGORITHM.to_owned(),
        row_group_samples: 1,
        columns: vec![Column { name: tokens, kind, element, length: 8 }],
        selection: None,
        state: None,
        shards,
    };
    Box::new(output).publish(&index, Some(label))?;
    Ok(Some(index))
}

fn write_shard(
    output: &mut RemoteOutput,
    label: &str,
    number: usize,
) -> Result<ShardEntry, PrepareError> {
    let file = output.name_of(&shard_file(number));
    let content = format!("{label}, shard {number}");
    let mut written = output.create(&file)?;
    written.write_all(content.as_bytes()).unwrap();
    output.take(&file, &file, written)?;
    while !output.has_at_most(0)? {}
    let (bytes, hash) = (content.len() as u64, ContentHash::of(content.as_bytes()));
    Ok(ShardEntry { file, samples: 1, bytes, hash, footer: None })
}

fn objects(store: &InMemory) -> BTreeMap<String, Vec<u8>> {
    let listed = now(store.list_with_delimiter(Some(&Path::from("set")))).unwrap().objects;
    let get = |path: &Path| now(async { store.get(path).await?.bytes().await }).unwrap().to_vec();
    listed
        .iter()
        .map(|object| (object.location.filename().unwrap().to_owned(), get(&object.location)))
        .collect()
}

/// Violations of the rules of writers, collected as each change of the store happens.
#[derive(Default)]
struct Witness {
    /// The writer that put each object first.
    owners: BTreeMap<String, usize>,
    /// The index, and the writer of it.
    published: Option<(usize, Vec<u8>)>,
    wrong: Vec<String>,
}

impl Witness {
    fn see(&mut self, writer: usize, change: &Change, store: &InMemory) {
        let (Change::Put(path, ..) | Change::Remove(path)) = change;
        let name = path.filename().unwrap().to_owned();
        match change {
            Change::Put(..) if name == INDEX_FILE => {
                let index = objects(store)[INDEX_FILE].clone();
                if self.published.is_some() {
                    self.wrong.push(format!("{writer} put an index or claim over an index"));
                } else if !is_claim(&index) {
                    self.published = Some((writer, index));
                }
            }
            Change::Put(..) => {
                let owner = *self.owners.entry(name.clone()).or_insert(writer);
                if owner != writer {
                    self.wrong.push(format!("{writer} and {owner} both put {name}"));
                }
            }
            Change::Remove(_) if name == INDEX_FILE => {
                self.wrong.push(format!("{writer} removed the index or a claim"));
            }
            Change::Remove(_) => {
                let is_own = self.owners.get(&name) == Some(&writer);
                let has_published = self.published.as_ref().is_some_and(|(by, _)| *by == writer);
                if !is_own && !has_published {
                    self.wrong.push(format!("{writer} removed {name} of another"));
                }
            }
        }
        if let Some((_, index)) = &self.published {
            self.wrong.extend(what_is_wrong(index, &objects(store)));
        }
    }
}

/// The first defect of a data set, if it has one.
fn what_is_wrong(index: &[u8], objects: &BTreeMap<String, Vec<u8>>) -> Option<String> {
    if objects.get(INDEX_FILE).map(Vec::as_slice) != Some(index) {
        return Some("the index is gone".to_owned());
    }
    let index = match Index::from_bytes(index, INDEX_FILE.as_ref()) {
        Ok(index) => index,
        Err(error) => return Some(error.to_string()),
    };
    let tokenizer = index.tokenizer_file.as_ref().unwrap();
    if !objects.contains_key(tokenizer) {
        return Some(format!("{tokenizer} is gone"));
    }
    let damaged = index.shards.iter().find(|shard| {
        objects.get(&shard.file).is_none_or(|content| ContentHash::of(content) != shard.hash)
    });
    damaged.map(|shard| format!("{} is gone, or another", shard.file))
}

#[test]
fn two_that_prepare_the_same_data_set_never_lose_a_shard_of_the_one_that_is_published() {
    let (mut taken, mut unanswered) = (0, 0);
    for seed in seeds(SEEDS) {
        // One that fails is started again once, as its user would.
        let (results, store, witness) = two_writers(seed, 2, Witness::see, |store, attempt| {
            let end = attempt.killed.map_or(End::Published, |at| End::Killed(at as usize % SHARDS));
            match prepare(store, &attempt.label(), end) {
                Ok(Some(index)) => ControlFlow::Break(Ok(Some(index))),
                result => ControlFlow::Continue(result),
            }
        });
        let objects = objects(&store);
        assert_eq!(witness.wrong, Vec::<String>::new(), "seed {seed}: {results:?}");
        let attempts = || results.iter().flatten();
        let published: Vec<&Index> =
            attempts().filter_map(|result| result.as_ref().ok()?.as_ref()).collect();
        let is_in_doubt =
            |error: &PrepareError| matches!(error, PrepareError::Data(DataError::Store { .. }));
        match (&published[..], &witness.published) {
            ([index], Some((_, there))) => assert_eq!(&index.to_bytes(), there, "seed {seed}"),
            ([], there) => {
                // The writer of an index that arrived without an answer cannot know of it.
                let errors = || attempts().filter_map(|result| result.as_ref().err());
                assert!(errors().any(is_in_doubt), "seed {seed}: {results:?}");
                unanswered += usize::from(there.is_some());
            }
            _ => panic!("seed {seed}: {results:?}"),
        }
        for error in attempts().filter_map(|result| result.as_ref().err()) {
            let said = error.to_string();
            match error {
                PrepareError::OutputTaken { .. } => {
                    taken += 1;
                    assert!(
                        said.contains("memory://store/set: found the claim of another"),
                        "{said}"
                    );
                }
                PrepareError::OutputExists { .. } => assert!(said.contains("a data set"), "{said}"),
                error => assert!(is_in_doubt(error) && !is_calm(seed), "seed {seed}: {said}"),
            }
        }
        if is_calm(seed) && killed(seed).is_none() {
            // Nothing is left of the one that lost.
            assert_eq!(objects.len(), 1 + 1 + SHARDS, "seed {seed}: {:?}", objects.keys());
        }
    }
    assert!(taken > 30 && unanswered > 0, "{taken} were taken, {unanswered} without an answer");
}

#[test]
fn names_in_stores_hold_the_token_and_nothing_else_is_taken_for_one() {
    let token = new_token();
    assert_eq!(token.len(), TOKEN_DIGITS);
    for (name, found) in [
        (format!("shard-{token}-00012.parquet"), Some(&*token)),
        (format!("tokenizer-{token}.json"), Some(&token)),
        (format!("shard-{token}-12.parquet"), None),
        (format!("tokenizer-{token}.json.bak"), None),
        (format!("other-{token}-00012.parquet"), None),
        ("shard-00012.parquet".to_owned(), None),
        ("shard-not-sixteen-di-00012.parquet".to_owned(), None),
        ("tokenizer.json".to_owned(), None),
        ("shard-ääääääääääääääää-00012.parquet".to_owned(), None),
    ] {
        assert_eq!(token_of(&name), found, "{name}");
    }
}
