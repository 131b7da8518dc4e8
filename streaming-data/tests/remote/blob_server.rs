//! A server that speaks as much of Azure's blob service as writing, listing and removing take, in this process, on a
//! free port. It keeps blobs in memory and asks for no signatures.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use hyper::{Request, Response, StatusCode, body::Incoming, header, service::service_fn};
use s3s::Body;
use tokio::sync::oneshot;

use crate::listen::listen;

/// Serves until it is dropped.
pub struct BlobServer {
    address: SocketAddr,
    _stop: oneshot::Sender<()>,
}

/// What it keeps, by path behind the account's name.
#[derive(Default)]
struct Kept {
    blobs: BTreeMap<String, Bytes>,
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
                let answer = kept.lock().unwrap().answer(head.method.as_str(), path, &query, body);
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
            ("GET", "list") => whole(self.list(&path, of("prefix")).into()),
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
                self.blobs.insert(path, blob.into());
                status(StatusCode::CREATED)
            }
            ("PUT", _) => {
                self.blobs.insert(path, body);
                status(StatusCode::CREATED)
            }
            ("GET", _) => match self.blobs.get(&path) {
                Some(bytes) => whole(bytes.clone()),
                None => status(StatusCode::NOT_FOUND),
            },
            ("POST", "batch") => self.remove(&body),
            _ => status(StatusCode::NOT_FOUND),
        }
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
        for (path, bytes) in &self.blobs {
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

fn whole(bytes: Bytes) -> Response<Body> {
    Response::builder()
        .header(header::LAST_MODIFIED, "Thu, 01 Jan 2026 00:00:00 GMT")
        .header(header::ETAG, "1")
        .body(Body::from(bytes))
        .unwrap()
}

fn status(status: StatusCode) -> Response<Body> {
    let etag = (header::ETAG, "1");
    Response::builder().status(status).header(etag.0, etag.1).body(Body::empty()).unwrap()
}
