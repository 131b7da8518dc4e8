//! Data sets of web servers, and of Google's and Azure's stores where nothing is signed.

use std::{fs, net::SocketAddr};

use tidemill_streaming_data::{
    DataSet,
    data_set::index::INDEX_FILE,
    store::{Claimed, Location, RemoteFolder, StoreSettings},
};

use crate::{
    ORDERS, ROW_TOKENS, SAMPLES, assert_line, blob_server::BlobServer, read_and_compare,
    s3_server::S3Server, settings, store_settings, support::indexed_example, web_server::serve,
};

fn owned(options: &[(&str, &str)]) -> Vec<(String, String)> {
    options.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// The options of a client of Google's store at this address, where nothing is signed.
fn google(address: SocketAddr) -> Vec<(String, String)> {
    let key = format!(
        "{{\"gcs_base_url\": \"http://{address}\", \"disable_oauth\": true, \
        \"client_email\": \"\", \"private_key\": \"\", \"private_key_id\": \"\"}}"
    );
    owned(&[
        ("GOOGLE_SERVICE_ACCOUNT_KEY", &key),
        ("GOOGLE_ALLOW_HTTP", "true"),
        ("GOOGLE_SKIP_SIGNATURE", "true"),
    ])
}

/// The options of a client of Azure's store at this address, where nothing is signed.
fn azure(address: SocketAddr) -> Vec<(String, String)> {
    owned(&[
        ("AZURE_STORAGE_ACCOUNT_NAME", "account"),
        ("AZURE_STORAGE_ENDPOINT", &format!("http://{address}/account")),
        ("AZURE_SKIP_SIGNATURE", "true"),
        ("AZURE_ALLOW_HTTP", "true"),
    ])
}

#[test]
fn http_gs_and_az_are_read_too() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let (address, _stop) = serve(folder.path());
    for (url, options) in [
        (format!("http://{address}/set/"), Vec::new()),
        ("gs://bucket/set".to_owned(), google(address)),
        ("az://container/set".to_owned(), azure(address)),
        ("abfs://container/set".to_owned(), azure(address)),
    ] {
        let cache = tempfile::tempdir().unwrap();
        let mut settings = settings(cache.path(), None);
        settings.store.options = options;
        let data_set = DataSet::open_with(&url, &settings).unwrap();
        for order in ORDERS {
            read_and_compare(&data_set, order, 20..110, false).unwrap();
            read_and_compare(&data_set, order, 3..6, true).unwrap();
        }
    }
}

/// Objects in Google's and Azure's stores can be written, listed, read and removed.
#[test]
fn gs_and_az_are_written_too() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("bucket")).unwrap();
    let server = S3Server::start_unsigned(root.path());
    let blobs = BlobServer::start();
    let local = tempfile::tempdir().unwrap();
    let large = local.path().join("large");
    let bytes: Vec<u8> = (0..(17 << 20) + 3_u32).map(|at| (at / 5) as u8).collect();
    fs::write(&large, &bytes).unwrap();
    for (url, options) in [
        ("gs://bucket/a set", google(server.address())),
        ("az://container/a set", azure(blobs.address())),
    ] {
        let settings = StoreSettings { options, ..store_settings() };
        let folder = RemoteFolder::open(Location::parse(url).unwrap(), &settings).unwrap();
        assert_eq!(folder.list().unwrap(), [], "{url}");
        folder.put("small", b"small".to_vec().into()).unwrap();
        folder.put_file("large", &large).unwrap();
        folder.folder("inner").put("b", b"b".to_vec().into()).unwrap();
        let entries = folder.list().unwrap();
        let found: Vec<_> = entries.iter().map(|it| (it.name.as_str(), it.bytes)).collect();
        assert_eq!(found, [("large", bytes.len() as u64), ("small", 5)], "{url}");
        assert_eq!(folder.list_folders().unwrap(), ["inner"], "{url}");
        assert!(folder.get("large").unwrap() == bytes, "{url}");
        assert_eq!(folder.get_if_there("nothing").unwrap(), None, "{url}");
        folder.delete("small").unwrap();
        assert_eq!(folder.get_if_there("small").unwrap(), None, "{url}");
    }
}

/// The stores compare different tokens: an etag here, a generation there.
#[test]
fn of_two_that_claim_a_folder_of_gs_az_or_memory_the_later_has_it() {
    let blobs = BlobServer::start();
    for (url, options) in [
        ("gs://bucket/claimed", google(blobs.address())),
        ("az://container/claimed", azure(blobs.address())),
        ("memory://web/claimed", Vec::new()),
    ] {
        let settings = StoreSettings { options, ..store_settings() };
        let folder = RemoteFolder::open(Location::parse(url).unwrap(), &settings).unwrap();
        let claim = |content: &'static str, found| folder.claim("it", content.into(), found);
        assert!(folder.find("it").unwrap().is_none(), "{url}");
        let mut first = claim("first", None).unwrap().unwrap();
        let found = folder.find("it").unwrap().unwrap();
        assert_eq!(found.content, "first", "{url}");
        assert!(claim("second", None).unwrap().is_none(), "{url}: over one that was not seen");
        assert_eq!(folder.put_claimed(&first, "log", "1".into()).unwrap(), Claimed::Ours);
        let mut second = claim("second", Some(&found)).unwrap().unwrap();
        assert!(claim("third", Some(&found)).unwrap().is_none(), "{url}: over one that is gone");
        assert!(!folder.is_claimed_by(&first).unwrap(), "{url}");
        assert_eq!(folder.replace_claim(&mut first, "done".into()).unwrap(), Claimed::Others);
        assert_eq!(folder.put_claimed(&first, "log", "1 2".into()).unwrap(), Claimed::Others);
        assert_eq!(folder.put_claimed(&second, "log", "1 2 3".into()).unwrap(), Claimed::Ours);
        assert_eq!(folder.replace_claim(&mut second, "on".into()).unwrap(), Claimed::Ours);
        assert_eq!(folder.replace_claim(&mut second, "done".into()).unwrap(), Claimed::Ours);
        let there = ["it", "log"].map(|name| folder.get(name).unwrap());
        assert_eq!(there, ["done", "1 2 3"], "{url}");
    }
}

/// A plain web server cannot list a folder: what it needs is said.
#[test]
fn a_web_server_without_an_index() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    fs::remove_file(folder.path().join(INDEX_FILE)).unwrap();
    let (address, _stop) = serve(folder.path());
    let cache = tempfile::tempdir().unwrap();
    let url = format!("http://{address}/set");
    let error = DataSet::open_with(&url, &settings(cache.path(), None)).unwrap_err();
    assert_line(&error, &[&url, "cannot list", "1 attempt", "there is no index.json"]);
}
