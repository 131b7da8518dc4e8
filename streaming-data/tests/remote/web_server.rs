//! A web server of one folder, in this process, on a free port: it answers for any path by its last
//! part, as plain web servers, Google's and Azure's do where nothing is signed.

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

fn answer(folder: &Path, request: &Request<Incoming>) -> Response<Body> {
    let status = |status| Response::builder().status(status).body(Body::empty()).unwrap();
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
