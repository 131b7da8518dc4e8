//! Data sets in a store: an update leaves the objects that a preparation from nothing would, and of two at
//! once one alone becomes the newest version.

use std::{collections::BTreeMap, ops::ControlFlow, sync::Arc};

use futures_util::TryStreamExt;
use object_store::{ObjectStore, ObjectStoreExt, memory::InMemory, path::Path};
use tidemill_streaming_data::{
    DataSet, DataSettings,
    data_set::index::{Index, version_file_of},
    prepare::{
        ByteTokenizer, Dedup, DedupSettings, PrepareError, PrepareSettings, UpdateReport,
        UpdateSettings, prepare_to_store, prune_in_store, update_in_store,
    },
    store::{Location, RemoteFolder, StoreSettings},
};

use crate::{
    outcome::assert_line,
    support::{Bench, number, word},
};

struct Stored {
    bench: Bench,
    store: Arc<InMemory>,
}

impl Stored {
    /// A data set in the folder `set`.
    fn new() -> Stored {
        let mut bench = Bench::new();
        for at in 0..30_usize {
            bench.write(&format!("in/{at:02}.txt"), text(at));
        }
        let stored = Stored { bench, store: Arc::default() };
        stored.prepare("set");
        stored
    }

    fn folder(&self, name: &str) -> RemoteFolder {
        let location = Location::parse(&format!("memory://bucket/{name}")).unwrap();
        let store: Arc<dyn ObjectStore> = self.store.clone();
        RemoteFolder::of_store(store, Path::from(name), location, &StoreSettings::default())
    }

    fn prepare(&self, name: &str) {
        let settings = PrepareSettings {
            dedup: DedupSettings { dedup: Dedup::Near, ..DedupSettings::default() },
            workers: number(2),
            ..self.bench.settings("unused")
        };
        let go_on = &mut |_| ControlFlow::Continue(());
        prepare_to_store(&self.folder(name), &settings, &ByteTokenizer, go_on).unwrap();
    }

    fn update(&self) -> Result<UpdateReport, PrepareError> {
        self.update_while(&mut || {})
    }

    /// Updates, and does something else while it does.
    fn update_while(&self, meanwhile: &mut dyn FnMut()) -> Result<UpdateReport, PrepareError> {
        let settings = UpdateSettings::new("unused".into());
        update_in_store(&self.folder("set"), &settings, &ByteTokenizer, &mut |_| {
            meanwhile();
            ControlFlow::Continue(())
        })
    }

    /// All objects below a folder.
    fn objects(&self, name: &str) -> BTreeMap<String, Vec<u8>> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let prefix = Path::from(name);
            let listed: Vec<_> = self.store.list(Some(&prefix)).try_collect().await.unwrap();
            let mut objects = BTreeMap::new();
            for object in listed {
                let content = self.store.get(&object.location).await.unwrap();
                let below = object.location.as_ref()[name.len() + 1..].to_owned();
                objects.insert(below, content.bytes().await.unwrap().to_vec());
            }
            objects
        })
    }

    fn put(&self, name: &str, content: &'static [u8]) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(self.store.put(&Path::from(name), content.into())).unwrap();
    }

    /// Until the store tells another time than it does now.
    fn wait_for_the_clock(&self) {
        let now = || {
            self.put("clock", b"");
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(self.store.head(&Path::from("clock"))).unwrap().last_modified
        };
        let before = now();
        while now() == before {}
    }

    #[track_caller]
    fn assert_is_new(&self) {
        self.prepare("new");
        let (found, expected) = (self.objects("set"), self.objects("new"));
        for (name, content) in &expected {
            assert!(found.get(name) == Some(content), "{name}");
        }
        let store: Arc<dyn ObjectStore> = self.store.clone();
        let settings = DataSettings::default();
        let name = "memory://bucket/set";
        let data_set = DataSet::open_store(store, Path::from("set"), name, &settings).unwrap();
        assert!(data_set.samples() > 0);
        for name in expected.into_keys() {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(self.store.delete(&Path::from(format!("new/{name}")))).unwrap();
        }
    }
}

fn text(at: usize) -> String {
    (0..60).map(|place| word(at * 500 + place) + " ").collect()
}

#[test]
fn an_update_leaves_the_objects_of_a_preparation_from_nothing() {
    let mut stored = Stored::new();
    let before = stored.objects("set");
    assert_eq!(stored.update().unwrap().prepared.changes.inputs_read, 0);
    assert!(stored.objects("set") == before);
    stored.bench.remove("in/07.txt");
    stored.bench.write("in/50.txt", text(50));
    stored.bench.write("in/51.txt", text(9));
    let report = stored.update().unwrap();
    let changes = &report.prepared.changes;
    assert_eq!((changes.inputs_read, changes.texts_tokenized), (2, 1));
    assert!(changes.shards_kept > 0 && changes.shards_read > 0);
    stored.assert_is_new();
    // The version before is there too.
    let objects = stored.objects("set");
    for (name, content) in before.iter().filter(|(name, _)| *name != "index.json") {
        assert!(name == "state/seen" || objects.get(name) == Some(content), "{name}");
    }
    assert!(objects.contains_key(&version_file_of(report.former)));
    // The copy of the document that is gone comes back.
    stored.bench.remove("in/09.txt");
    assert_eq!(stored.update().unwrap().prepared.changes.texts_tokenized, 1);
    stored.assert_is_new();
}

#[test]
fn of_two_that_update_at_once_one_alone_becomes_the_newest() {
    let mut stored = Stored::new();
    stored.bench.write("in/60.txt", text(60));
    let mut other = None;
    let folder = stored.bench.path("in/61.txt");
    let first = stored.update_while(&mut || {
        if other.is_none() {
            // It finds one more document, and is done while the first still works.
            std::fs::write(&folder, text(61)).unwrap();
            other = Some(stored.update().unwrap());
        }
    });
    let error = first.unwrap_err();
    assert!(matches!(&error, PrepareError::UpdateOvertaken { .. }), "{error}");
    assert_line(&error, &["memory://bucket/set", "another update was faster", "update again"]);
    let newest = other.unwrap().prepared.fingerprint;
    let index = stored.objects("set")["index.json"].clone();
    assert_eq!(Index::from_bytes(&index, "index.json".as_ref()).unwrap().fingerprint(), newest);
    stored.update().unwrap();
    stored.assert_is_new();
}

/// Files of an unfinished update are safe from `prune`, or the update is refused.
#[test]
fn what_is_pruned_is_of_no_version() {
    let mut stored = Stored::new();
    let first = Index::from_bytes(&stored.objects("set")["index.json"], "index.json".as_ref());
    let first = first.unwrap().fingerprint();
    stored.bench.remove("in/07.txt");
    let second = stored.update().unwrap().prepared.fingerprint;
    // Its name is that of content, which is another.
    let like = format!("set/shard-{:032x}.parquet", 7);
    stored.put(&like, b"mine");
    stored.put("set/notes", b"mine");
    // Names of the store's clock may be equal: versions that are no older than the newest stay.
    stored.wait_for_the_clock();
    stored.bench.write("in/07.txt", text(107));
    let third = stored.update().unwrap().prepared.fingerprint;
    stored.wait_for_the_clock();
    let report = prune_in_store(&stored.folder("set"), number(2)).unwrap();
    assert_eq!((&report.kept[..], &report.removed[..]), (&[third, second][..], &[first][..]));
    assert!(report.files > 2 && report.bytes > 0);
    assert_eq!(prune_in_store(&stored.folder("set"), number(2)).unwrap().files, 0);
    prune_in_store(&stored.folder("set"), number(1)).unwrap();
    let mut left = stored.objects("set");
    for mine in ["notes", &like["set/".len()..]] {
        assert_eq!(left.remove(mine).unwrap(), b"mine");
    }
    assert!(left.remove("state/pruned").unwrap().starts_with(b"pruned "));
    stored.assert_is_new();
    stored.prepare("new");
    let expected = stored.objects("new");
    assert_eq!(left.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
}

/// An update puts the index of its version, and then the one of the data set: what it has stays where `prune` comes in between.
#[test]
fn a_version_that_is_about_to_be_published_is_not_pruned() {
    let stored = Stored::new();
    let first = stored.objects("set")["index.json"].clone();
    // The store's clock says that it is later.
    stored.wait_for_the_clock();
    stored.bench.remove("in/07.txt");
    let second = stored.update().unwrap().prepared.fingerprint;
    let put = |content: Vec<u8>| stored.folder("set").put("index.json", content.into()).unwrap();
    let published = stored.objects("set");
    put(first);
    let report = prune_in_store(&stored.folder("set"), number(1)).unwrap();
    assert!(!report.kept.contains(&second) && report.removed.is_empty(), "{report:?}");
    put(published["index.json"].clone());
    stored.assert_is_new();
}

#[test]
fn an_update_that_is_pruned_meanwhile_is_refused_and_one_behind_it_is_whole() {
    let mut stored = Stored::new();
    stored.bench.write("in/60.txt", text(60));
    let mut pruned = false;
    let error = stored
        .update_while(&mut || {
            if !std::mem::replace(&mut pruned, true) {
                prune_in_store(&stored.folder("set"), number(1)).unwrap();
            }
        })
        .unwrap_err();
    assert!(matches!(&error, PrepareError::UpdateOvertaken { .. }), "{error}");
    stored.update().unwrap();
    // Its objects, as of one that is killed before it is published, are of no version.
    stored.assert_is_new();
    // One that was killed.
    stored.put("set/state/pruned", b"prune at work 0123456789abcdef\n");
    stored.bench.write("in/61.txt", text(61));
    let error = stored.update().unwrap_err();
    assert_line(&error, &["memory://bucket/set", "`prune`", "prune again"]);
    prune_in_store(&stored.folder("set"), number(1)).unwrap();
    stored.update().unwrap();
    stored.assert_is_new();
}
