//! A web server of one folder, in this process, on a free port: it answers for any path by its last
//! part, as plain web servers, Google's and Azure's do where nothing is signed. Where it may be
//! written, it speaks as much of WebDAV as that takes.

use std::{convert::Infallible, fs, net::SocketAddr, path::Path};

use hyper::{Method, Request, Response, StatusCode, body::Incoming, header, service::service_fn};
use s3s::Body;
use tokio::sync::oneshot;

use crate::listen::listen;

/// Serves the files of a folder.
pub fn serve(folder: &Path) -> (SocketAddr, oneshot::Sender<()>) {
    let folder = folder.to_owned();
    listen(service_fn(move |request| {
        let answer = answer(&folder, &request);
        async { Ok::<_, Infallible>(answer) }
    }))
}

/// Serves the files of a folder to read, write, list and remove.
pub fn serve_writable(folder: &Path) -> (SocketAddr, oneshot::Sender<()>) {
    let folder = folder.to_owned();
    listen(service_fn(move |request: Request<Incoming>| {
        let folder = folder.clone();
        async move {
            let name = request.uri().path().rsplit('/').next().unwrap_or("").to_owned();
            let file = folder.join(name);
            Ok::<_, Infallible>(match request.method().as_str() {
                "PUT" => {
                    let bytes = Body::from(request.into_body()).store_all_limited(1 << 30).await;
                    fs::write(file, bytes.unwrap()).unwrap();
                    status(StatusCode::CREATED)
                }
                "DELETE" if file.is_file() => {
                    fs::remove_file(file).unwrap();
                    status(StatusCode::NO_CONTENT)
                }
                "PROPFIND" => {
                    let mut answer =
                        Response::new(Body::from(listing(&folder, request.uri().path())));
                    *answer.status_mut() = StatusCode::MULTI_STATUS;
                    answer
                }
                _ => answer(&folder, &request),
            })
        }
    }))
}

/// A folder in the words of WebDAV.
fn listing(folder: &Path, path: &str) -> String {
    let response = |href: String, kind: &str, bytes: u64| {
        format!(
            "<response><href>{href}</href><propstat><prop>\
             <getlastmodified>Thu, 01 Jan 2026 00:00:00 GMT</getlastmodified>\
             <getcontentlength>{bytes}</getcontentlength><resourcetype>{kind}</resourcetype></prop>\
             <status>HTTP/1.1 200 OK</status></propstat></response>"
        )
    };
    let mut responses = response(format!("{path}/"), "<collection/>", 0);
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        responses += &response(format!("{path}/{name}"), "", entry.metadata().unwrap().len());
    }
    format!("<?xml version=\"1.0\"?><multistatus xmlns=\"DAV:\">{responses}</multistatus>")
}

fn status(status: StatusCode) -> Response<Body> {
    Response::builder().status(status).body(Body::empty()).unwrap()
}

fn answer(folder: &Path, request: &Request<Incoming>) -> Response<Body> {
    if request.method() != Method::GET {
        return status(StatusCode::METHOD_NOT_ALLOWED);
    }
    let path = object_store::path::Path::from_url_path(request.uri().path()).unwrap_or_default();
    let name = path.filename().unwrap_or("");
    let Ok(bytes) = fs::read(folder.join(name)) else { return status(StatusCode::NOT_FOUND) };
    let mut answer = Response::builder()
        .header(header::LAST_MODIFIED, "Thu, 01 Jan 2026 00:00:00 GMT")
        .header(header::ETAG, format!("\"{}\"", bytes.len()));
    // "bytes=first-last", where it is asked for.
    let asked = request.headers().get(header::RANGE).and_then(|range| range.to_str().ok());
    let range = asked.and_then(|range| {
        let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
        Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()?))
    });
    let all = bytes.len();
    let (bytes, code) = match range {
        Some((first, last)) if first <= last && last < all => {
            answer = answer.header(header::CONTENT_RANGE, format!("bytes {first}-{last}/{all}"));
            (bytes[first..=last].to_vec(), StatusCode::PARTIAL_CONTENT)
        }
        Some(_) => return status(StatusCode::RANGE_NOT_SATISFIABLE),
        None => (bytes, StatusCode::OK),
    };
    let answer = answer.status(code).header(header::CONTENT_LENGTH, bytes.len());
    answer.body(Body::from(bytes::Bytes::from(bytes))).unwrap()
}
