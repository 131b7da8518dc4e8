//! Servers that are not what they should be: what they say takes no memory, and leads no secret away.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::mpsc,
    thread,
};

use tidemill_streaming_data::{
    DataError, DataSet,
    store::{Location, RemoteFolder, StoreFailure, StoreSettings},
};

use crate::{assert_line, settings, store_settings};

/// An answer of a server.
struct Answer {
    head: String,
    body: &'static [u8],
    /// Whether the body is repeated until the client closes the connection.
    is_endless: bool,
}

impl Answer {
    fn ok(body: &'static [u8]) -> Answer {
        let head = format!("200 OK\r\nContent-Length: {}", body.len());
        Answer { head, body, is_endless: false }
    }

    fn elsewhere(location: &str) -> Answer {
        let head = format!("302 Found\r\nContent-Length: 0\r\nLocation: {location}");
        Answer { head, body: b"", is_endless: false }
    }
}

/// A server that gives every request the same answer, and the heads of the requests that it gets. It ends
/// with the program.
fn server(answer: Answer) -> (SocketAddr, mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, told) = mpsc::channel();
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            // The client may close the connection at any moment.
            let _ = serve(stream, &answer, &sender);
        }
    });
    (address, told)
}

fn serve(
    mut stream: TcpStream,
    answer: &Answer,
    told: &mpsc::Sender<String>,
) -> std::io::Result<()> {
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        request.push(byte[0]);
    }
    let _ = told.send(String::from_utf8_lossy(&request).to_ascii_lowercase());
    let date = "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nConnection: close";
    write!(stream, "HTTP/1.1 {}\r\n{date}\r\n\r\n", answer.head)?;
    loop {
        stream.write_all(answer.body)?;
        if !answer.is_endless {
            return stream.flush();
        }
    }
}

fn folder(address: SocketAddr) -> RemoteFolder {
    let location = Location::parse(&format!("http://{address}/set")).unwrap();
    RemoteFolder::open(location, &store_settings()).unwrap()
}

/// The settings of an S3 that is at this address.
fn s3_settings(endpoint: &str) -> StoreSettings {
    let options = [
        ("AWS_ENDPOINT", endpoint),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_ACCESS_KEY_ID", "key-of-ours"),
        ("AWS_SECRET_ACCESS_KEY", "secret-of-ours"),
        ("AWS_SESSION_TOKEN", "token-of-ours"),
        ("AWS_REGION", "us-east-1"),
    ];
    let options = options.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
    StoreSettings { options, ..store_settings() }
}

#[test]
fn files_of_five_gigabytes_are_refused_before_they_are_read() {
    let head = "200 OK\r\nContent-Length: 5000000000".to_owned();
    let (address, _) = server(Answer { head, body: &[b' '; 4096], is_endless: true });
    let folder = folder(address);
    for (name, most) in [
        ("index.json", "268435456 for an index"),
        ("config.json", "16777216 for a config"),
        ("trainer.json", "16777216 for the state of a run"),
        ("tokenizer.json", "268435456 for a tokenizer"),
        ("anything", "1073741824 for a file that is read whole"),
    ] {
        let error = folder.get(name).unwrap_err();
        let size = format!("it has 5000000000 bytes, expected at most {most}");
        assert_line(&error, &["cannot read http://", name, "(1 attempt)", &size]);
        assert!(matches!(error, DataError::Store { source: StoreFailure::TooLarge(_), .. }));
    }
    // Neither does one that is copied to a file take all of the disk.
    let copies = tempfile::tempdir().unwrap();
    let error = folder.get_file("config.json", &copies.path().join("config.json")).unwrap_err();
    assert_line(&error, &["16777216 for a config"]);
    let cache = tempfile::tempdir().unwrap();
    let url = format!("http://{address}/set");
    let error = DataSet::open_with(url, &settings(cache.path(), None)).unwrap_err();
    assert_line(&error, &["set/index.json", "268435456 for an index"]);
}

#[test]
fn of_an_error_without_end_the_beginning_is_read() {
    let endless =
        |head: &str| Answer { head: head.to_owned(), body: &[b'x'; 4096], is_endless: true };
    let (address, _) = server(endless("404 Not Found"));
    assert!(folder(address).get_if_there("index.json").unwrap().is_none());
    let (address, _) = server(endless("403 Forbidden"));
    let error = folder(address).get("index.json").unwrap_err();
    assert!(
        matches!(error, DataError::Store { source: StoreFailure::Refused { .. }, .. }),
        "{error}"
    );
}

#[test]
fn a_session_token_does_not_follow_a_redirect_to_another_port() {
    let (other, told_other) = server(Answer::ok(b"{}"));
    let (store, told) = server(Answer::elsewhere(&format!("http://{other}/elsewhere?signed=1")));
    let location = Location::parse("s3://bucket/set").unwrap();
    let folder = RemoteFolder::open(location, &s3_settings(&format!("http://{store}"))).unwrap();
    assert_eq!(&folder.get("x").unwrap()[..], b"{}");
    let asked = told.recv().unwrap();
    assert!(asked.contains("token-of-ours") && asked.contains("authorization: "), "{asked}");
    let asked = told_other.recv().unwrap();
    assert!(asked.starts_with("get /elsewhere?signed=1 "), "{asked}");
    for secret in ["of-ours", "authorization", "x-amz", "referer", "bucket"] {
        assert!(!asked.contains(secret), "{secret}: {asked}");
    }
    // Writes never follow a redirect.
    let error = folder.put("x", bytes::Bytes::from_static(b"{}")).unwrap_err();
    assert_line(&error, &["PUT was redirected to http://127.0.0.1, another server"]);
    assert!(told_other.try_recv().is_err());
}

#[test]
fn a_server_that_redirects_for_ever_is_an_error() {
    let (address, told) = server(Answer::elsewhere("/set/index.json"));
    let error = folder(address).get("index.json").unwrap_err();
    assert_line(&error, &["(1 attempt)", "redirected more than 10 times"]);
    assert_eq!(told.try_iter().count(), 11);
}

#[test]
fn an_endpoint_that_holds_a_password_is_refused_without_it() {
    let location = Location::parse("s3://bucket/set").unwrap();
    let settings = s3_settings("http://user:secret-of-ours@127.0.0.1:1");
    let error = RemoteFolder::open(location.clone(), &settings).unwrap_err();
    assert_line(&error, &["cannot use s3://bucket/set", "AWS_ENDPOINT holds a user or password"]);
    assert!(!format!("{error:?}").contains("of-ours"), "{error:?}");
    // That of a proxy may: there is no other place for it.
    let mut settings = s3_settings("http://127.0.0.1:1");
    settings.options.push(("AWS_PROXY_URL".to_owned(), "http://user:pw@127.0.0.1:1".to_owned()));
    RemoteFolder::open(location, &settings).unwrap();
}
