//! What cannot be written to a store is refused before anything is tokenized.
//!
//! Seen red: with an index or shards that are written over, a first request whose error is passed
//! over, and a claim that need not be written.

use std::{
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use tidemill_streaming_data::{
    data_set::index::INDEX_FILE,
    prepare::{PrepareError, PrepareSettings, TOKENIZER_FILE, prepare},
    store::{Location, RemoteFolder},
};

use super::{
    Watched, bucket, disturbed, empty_store, of_server, run_in, settings_of, stored, texts,
};
use crate::{assert_line, faulty::Fault, store_settings, web_server::serve};

/// The error of a `prepare` that must end before it tokenizes.
fn refused(settings: &PrepareSettings) -> PrepareError {
    let asked = AtomicUsize::new(0);
    let encode = || _ = asked.fetch_add(1, Ordering::SeqCst);
    let tokenizer = Watched { encode: &encode, end: &|| () };
    let result = prepare(settings, &tokenizer, &mut |_| ControlFlow::Continue(()));
    assert_eq!(asked.load(Ordering::SeqCst), 0, "it was tokenized");
    result.unwrap_err()
}

#[test]
fn what_is_there_is_refused_at_once_and_stays() {
    let texts = texts(1);
    for (url, name, content, words) in [
        ("memory://there/index", INDEX_FILE, "{", "found a data set, expected nothing"),
        ("memory://there/shard", "mine.parquet", "PAR1", "found files of a data set, expected"),
        ("memory://there/words", TOKENIZER_FILE, "{}", "found files of a data set, expected"),
    ] {
        let folder = RemoteFolder::open(Location::parse(url).unwrap(), &store_settings()).unwrap();
        folder.put(name, bytes::Bytes::from(content)).unwrap();
        assert_line(&refused(&settings_of(&texts, url, 1)), &["cannot write data set", url, words]);
        assert_eq!(stored(&folder), [(name.to_owned(), content.as_bytes().to_vec())]);
    }
}

#[test]
fn what_a_store_refuses_is_one_line_before_anything_is_tokenized() {
    let texts = texts(1);
    let (_root, server) = bucket();
    let refused = |url: &str, option: Option<(&str, &str)>, words: &[&str]| {
        let mut settings = settings_of(&texts, url, 1);
        settings.store = of_server(&server);
        let option = option.map(|(name, value)| (name.to_owned(), value.to_owned()));
        settings.store.options.extend(option);
        assert_line(&refused(&settings), words);
    };
    let secret = Some(("AWS_SECRET_ACCESS_KEY", "wrong"));
    let words = ["cannot read s3://bucket/out/index.json (1 attempt)", "access was refused"];
    refused("s3://bucket/out", secret, &words);
    let words = ["s3://no-bucket/out", "(1 attempt)", "there is no such object or bucket"];
    refused("s3://no-bucket/out", None, &words);
    refused("s3://bucket/out?secret", None, &["s3://bucket/out: found a query"]);
    refused("ftp://host/out", None, &["ftp://host/out: found scheme \"ftp\""]);
    // A web server that is read alone.
    let (address, _stop) = serve(texts.path());
    let url = format!("http://{address}/out");
    refused(&url, None, &[&url, "cannot list", "(1 attempt)", "405"]);
    assert_eq!(server.asked("PUT "), Vec::<String>::new());
}

/// Rights to read are not rights to write: the claim is refused, and is what is named.
#[test]
fn a_store_that_cannot_be_written_is_named_with_the_claim() {
    let texts = texts(1);
    let store = Arc::new(empty_store(0, &[Fault::Break], 100).only(INDEX_FILE).only_puts());
    let error = run_in(&disturbed(&store, &store_settings()), &texts, 1).unwrap_err();
    assert_line(&error, &["cannot write memory://store/set/index.json (8 attempts)"]);
    assert_eq!(store.asked.puts.load(Ordering::SeqCst), 8);
}
