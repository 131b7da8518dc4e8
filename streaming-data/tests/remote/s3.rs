//! Data sets of a real S3 server, read in this process.

use std::{fs, path::Path};

use tidemill_streaming_data::{
    DataSet, DataSettings,
    data_set::index::INDEX_FILE,
    order::{SampleId, ShuffleOrder},
    store::{Location, RemoteFolder},
};

use crate::{
    ORDERS, ROW_TOKENS, SAMPLES, assert_line, files, read_and_compare,
    s3_server::S3Server,
    settings,
    support::{Form, example_row, indexed_example, write_example},
};

/// A server with a bucket whose folder `a set` holds a data set.
fn serve(folder: &Path) -> (tempfile::TempDir, S3Server) {
    let root = tempfile::tempdir().unwrap();
    let set = root.path().join("bucket").join("a set");
    fs::create_dir_all(&set).unwrap();
    for (name, _) in files(folder) {
        fs::copy(folder.join(&name), set.join(&name)).unwrap();
    }
    let server = S3Server::start(root.path());
    (root, server)
}

fn settings_of(server: &S3Server, cache: &Path) -> DataSettings {
    let mut settings = settings(cache, None);
    settings.store.options = server.options();
    settings
}

#[test]
fn epochs_from_s3_with_and_without_an_index() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let plain = tempfile::tempdir().unwrap();
    write_example(plain.path(), &SAMPLES, ROW_TOKENS, &Form::plain());
    for folder in [folder.path(), plain.path()] {
        let (_root, server) = serve(folder);
        let cache = tempfile::tempdir().unwrap();
        let settings = settings_of(&server, cache.path());
        let data_set = DataSet::open_with("s3://bucket/a set", &settings).unwrap();
        let local = DataSet::open(folder).unwrap();
        assert_eq!(data_set.fingerprint(), local.fingerprint());
        if folder.join(INDEX_FILE).exists() {
            assert_eq!(server.count(""), 1);
        }
        let id = SampleId { epoch: 0, shard: 2, row: 3 };
        assert_eq!(data_set.sample(id).unwrap(), example_row(2, 3, ROW_TOKENS));
        for order in ORDERS {
            read_and_compare(&data_set, order, 30..130, false).unwrap();
            // Ranges.
            read_and_compare(&data_set, order, 30..36, true).unwrap();
        }
        assert_eq!(server.count("GET /bucket/a%20set/shard-00002.parquet?x"), 0);
    }
}

#[test]
fn what_is_written_is_read_back() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let (_root, server) = serve(folder.path());
    let cache = tempfile::tempdir().unwrap();
    let settings = settings_of(&server, cache.path());
    let location = Location::parse("s3://bucket/new/place").unwrap();
    let remote = RemoteFolder::open(location, &settings.store).unwrap();
    for (name, _) in files(folder.path()) {
        remote.put(&name, fs::read(folder.path().join(&name)).unwrap().into()).unwrap();
    }
    // More than a part, and not a multiple of one.
    let large: Vec<u8> = (0..20_000_001_u32).map(|at| (at % 251) as u8).collect();
    let file = cache.path().join("large");
    fs::write(&file, &large).unwrap();
    remote.put_file("deeper/large", &file).unwrap();
    let puts = server.count("PUT /bucket/new/place/deeper/large?partNumber");
    let puts = puts.max(server.count("PUT /bucket/new/place/deeper/large?"));
    assert_eq!(puts, 3);
    assert!(remote.get("deeper/large").unwrap() == large);
    assert_eq!(remote.list_folders().unwrap(), ["deeper"]);
    remote.delete("deeper/large").unwrap();
    remote.delete("deeper/large").unwrap();
    assert_eq!(remote.get_if_there("deeper/large").unwrap(), None);
    remote.put_file("small", &folder.path().join("index.json")).unwrap();
    assert_eq!(remote.get("small").unwrap(), remote.get("index.json").unwrap());
    remote.delete("small").unwrap();

    let data_set = DataSet::open_with("s3://bucket/new/place", &settings).unwrap();
    read_and_compare(&data_set, ShuffleOrder::Window, 0..82, false).unwrap();
}

#[test]
fn what_s3_refuses_is_one_line_at_once() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let (root, server) = serve(folder.path());
    let cache = tempfile::tempdir().unwrap();
    let settings = settings_of(&server, cache.path());
    let open = |url: &str, settings: &DataSettings| DataSet::open_with(url, settings);

    for wrong in ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"] {
        let mut settings = settings.clone();
        settings.store.options.push((wrong.to_owned(), "something-else".to_owned()));
        let error = open("s3://bucket/a set", &settings).unwrap_err();
        let url = "cannot read s3://bucket/a%20set/index.json (1 attempt)";
        assert_line(&error, &[url, "access was refused, expected credentials"]);
        assert!(!format!("{error:?} {settings:?}").contains("something-else"), "{error:?}");
    }
    let error = open("s3://no-bucket/set", &settings).unwrap_err();
    assert_line(&error, &["s3://no-bucket/set", "there is no such object or bucket"]);
    let error = open("s3://bucket/nothing", &settings).unwrap_err();
    assert_line(&error, &["data set s3://bucket/nothing has no samples"]);

    let set = root.path().join("bucket").join("a set");
    let data_set = open("s3://bucket/a set", &settings).unwrap();
    let read = || read_and_compare(&data_set, ShuffleOrder::None, 0..82, false).unwrap_err();
    let (first, third) = (set.join("shard-00000.parquet"), set.join("shard-00002.parquet"));
    let bytes = fs::read(&third).unwrap();
    fs::copy(&first, &third).unwrap();
    assert_line(&read(), &["s3://bucket/a%20set/shard-00002.parquet has", "expected", "replaced"]);
    let mut other = bytes.clone();
    other[100] ^= 1;
    fs::write(&third, &other).unwrap();
    assert_line(&read(), &["s3://bucket/a%20set/shard-00002.parquet is damaged: its hash is"]);
    fs::remove_file(&third).unwrap();
    assert_line(&read(), &["s3://bucket/a%20set/shard-00002.parquet is missing"]);
    fs::write(&third, bytes).unwrap();
    read_and_compare(&data_set, ShuffleOrder::None, 0..82, false).unwrap();
}
