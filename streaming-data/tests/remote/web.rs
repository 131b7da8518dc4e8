//! Data sets of web servers, and of Google's and Azure's stores where nothing is signed.

use std::fs;

use tidemill_streaming_data::{DataSet, index::INDEX_FILE};

use crate::{
    ORDERS, ROW_TOKENS, SAMPLES, assert_line, read_and_compare, settings, support::indexed_example,
    web_server::serve,
};

#[test]
fn http_gs_and_az_are_read_too() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let (address, _stop) = serve(folder.path());
    let key = format!(
        "{{\"gcs_base_url\": \"http://{address}\", \"disable_oauth\": true, \
        \"client_email\": \"\", \"private_key\": \"\", \"private_key_id\": \"\"}}"
    );
    let google = [("GOOGLE_SERVICE_ACCOUNT_KEY", key.as_str()), ("GOOGLE_ALLOW_HTTP", "true")];
    let endpoint = format!("http://{address}/account");
    let azure = [
        ("AZURE_STORAGE_ACCOUNT_NAME", "account"),
        ("AZURE_STORAGE_ENDPOINT", endpoint.as_str()),
        ("AZURE_SKIP_SIGNATURE", "true"),
        ("AZURE_ALLOW_HTTP", "true"),
    ];
    for (url, options) in [
        (format!("http://{address}/set/"), &[][..]),
        ("gs://bucket/set".to_owned(), &google),
        ("az://container/set".to_owned(), &azure),
        ("abfs://container/set".to_owned(), &azure),
    ] {
        let cache = tempfile::tempdir().unwrap();
        let mut settings = settings(cache.path(), None);
        let owned = |&(name, value): &(&str, &str)| (name.to_owned(), value.to_owned());
        settings.store.options = options.iter().map(owned).collect();
        let data_set = DataSet::open_with(&url, &settings).unwrap();
        for order in ORDERS {
            read_and_compare(&data_set, order, 20..110, false).unwrap();
            read_and_compare(&data_set, order, 3..6, true).unwrap();
        }
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
