//! A server that speaks as much of Azure's blob service as writing, listing and removing take, and of Google's as
//! conditions take, in this process, on a free port. It keeps blobs in memory and asks for no signatures.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use hyper::{
    HeaderMap, Request, Response, StatusCode, body::Incoming, header, http::response::Builder,
    service::service_fn,
};
use s3s::Body;
use tokio::sync::oneshot;

use crate::listen::listen;

/// Serves until it is dropped.
pub struct BlobServer {
    address: SocketAddr,
    _stop: oneshot::Sender<()>,
}

/// The stored objects, by path behind the account's name.
#[derive(Default)]
struct Kept {
    blobs: BTreeMap<String, (Bytes, u64)>,
    /// How many blobs were written: the generation of the last one.
    written: u64,
    /// Blocks that belong to no blob yet, by path and number.
    blocks: HashMap<(String, String), Bytes>,
}

impl BlobServer {
    pub fn start() -> BlobServer {
        let kept = Arc::new(Mutex::new(Kept::default()));
        let (address, stop) = listen(service_fn(move |request: Request<Incoming>| {
            let kept = Arc::clone(&kept);
            async move {
                let (head, body) = request.into_parts();
                let body = Body::from(body).store_all_limited(1 << 30).await.unwrap();
                let uri = head.uri;
                let path = object_store::path::Path::from_url_path(uri.path()).unwrap();
                let path = path.as_ref().trim_start_matches("account/").to_owned();
                let query: HashMap<String, String> =
                    url::form_urlencoded::parse(uri.query().unwrap_or("").as_bytes())
                        .into_owned()
                        .collect();
                let mut kept = kept.lock().unwrap();
                let answer = match kept.refuses(&path, &head.headers) {
                    Some(code) => status(code),
                    None => kept.answer(head.method.as_str(), path, &query, body),
                };
                Ok::<_, Infallible>(answer)
            }
        }));
        BlobServer { address, _stop: stop }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Kept {
    fn answer(
        &mut self,
        method: &str,
        path: String,
        query: &HashMap<String, String>,
        body: Bytes,
    ) -> Response<Body> {
        let of = |key: &str| query.get(key).map_or("", String::as_str);
        match (method, of("comp")) {
            ("GET", "list") => whole(self.list(&path, of("prefix")).into(), 0),
            ("PUT", "block") => {
                self.blocks.insert((path, of("blockid").to_owned()), body);
                status(StatusCode::CREATED)
            }
            ("PUT", "blocklist") => {
                let text = String::from_utf8_lossy(&body).into_owned();
                let numbers = text.split('<').filter_map(|part| {
                    let (tag, number) = part.split_once('>')?;
                    ["Uncommitted", "Latest"].contains(&tag).then(|| number.to_owned())
                });
                let mut blob = Vec::new();
                for number in numbers {
                    blob.extend_from_slice(&self.blocks.remove(&(path.clone(), number)).unwrap());
                }
                self.put(path, blob.into())
            }
            ("PUT", _) => self.put(path, body),
            ("GET" | "HEAD", _) => match self.blobs.get(&path) {
                Some((bytes, generation)) => whole(bytes.clone(), *generation),
                None => status(StatusCode::NOT_FOUND),
            },
            ("POST", "batch") => self.remove(&body),
            _ => status(StatusCode::NOT_FOUND),
        }
    }

    fn put(&mut self, path: String, blob: Bytes) -> Response<Body> {
        self.written += 1;
        self.blobs.insert(path, (blob, self.written));
        let answer = Response::builder().status(StatusCode::CREATED);
        of_generation(answer, self.written).body(Body::empty()).unwrap()
    }

    /// The status with which a condition of Azure's or Google's refuses a request.
    fn refuses(&self, path: &str, headers: &HeaderMap) -> Option<StatusCode> {
        let generation = self.blobs.get(path).map_or(0, |(_, generation)| *generation);
        let of = |name: &str| headers.get(name).map(|value| value.to_str().unwrap());
        if of("if-none-match").is_some() && generation > 0 {
            return Some(StatusCode::CONFLICT);
        }
        let is_other = of("if-match").is_some_and(|e_tag| e_tag != e_tag_of(generation))
            || of("x-goog-if-generation-match").is_some_and(|it| it != generation.to_string());
        is_other.then_some(StatusCode::PRECONDITION_FAILED)
    }

    /// Removes what requests within a request ask for.
    fn remove(&mut self, requests: &[u8]) -> Response<Body> {
        let text = String::from_utf8_lossy(requests).into_owned();
        let asked = text.lines().filter_map(|line| line.strip_prefix("DELETE /"));
        let mut answers = String::new();
        for (number, line) in asked.enumerate() {
            let path = line.split(' ').next().unwrap_or("");
            let path = object_store::path::Path::from_url_path(path).unwrap();
            let path = path.as_ref().trim_start_matches("account/");
            let said = if self.blobs.remove(path).is_some() { "202 Accepted" } else { "404 None" };
            answers += &format!(
                "--part\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n\
                 HTTP/1.1 {said}\r\n\r\n\r\n"
            );
        }
        Response::builder()
            .status(StatusCode::ACCEPTED)
            .header(header::CONTENT_TYPE, "multipart/mixed; boundary=part")
            .body(Body::from(Bytes::from(format!("{answers}--part--\r\n"))))
            .unwrap()
    }

    /// The blobs and folders directly behind a prefix.
    fn list(&self, container: &str, prefix: &str) -> String {
        let (mut blobs, mut folders) = (String::new(), BTreeSet::new());
        for (path, (bytes, _)) in &self.blobs {
            let Some(name) = path.strip_prefix(&format!("{container}/")) else { continue };
            let Some(rest) = name.strip_prefix(prefix) else { continue };
            match rest.split_once('/') {
                Some((folder, _)) => {
                    folders.insert(format!("{prefix}{folder}/"));
                }
                None => {
                    blobs += &format!(
                        "<Blob><Name>{name}</Name><Properties>\
                         <Last-Modified>Thu, 01 Jan 2026 00:00:00 GMT</Last-Modified>\
                         <Content-Length>{}</Content-Length><Content-Type>x</Content-Type><Etag>1</Etag>\
                         </Properties></Blob>",
                        bytes.len()
                    );
                }
            }
        }
        for folder in folders {
            blobs += &format!("<BlobPrefix><Name>{folder}</Name></BlobPrefix>");
        }
        format!(
            "<?xml version=\"1.0\"?><EnumerationResults><Prefix>{prefix}</Prefix>\
             <Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>"
        )
    }
}

fn e_tag_of(generation: u64) -> String {
    format!("\"{generation}\"")
}

fn of_generation(answer: Builder, generation: u64) -> Builder {
    answer
        .header(header::ETAG, e_tag_of(generation))
        .header("x-goog-generation", generation.to_string())
}

fn whole(bytes: Bytes, generation: u64) -> Response<Body> {
    of_generation(Response::builder(), generation)
        .header(header::LAST_MODIFIED, "Thu, 01 Jan 2026 00:00:00 GMT")
        .header(header::CONTENT_LENGTH, bytes.len())
        .body(Body::from(bytes))
        .unwrap()
}

fn status(status: StatusCode) -> Response<Body> {
    let etag = (header::ETAG, "1");
    Response::builder().status(status).header(etag.0, etag.1).body(Body::empty()).unwrap()
}
