//! A web server of one folder, in this process, on a free port: it answers for any path by its last
//! part, as plain web servers, Google's and Azure's do where nothing is signed.

use std::{convert::Infallible, fs, net::SocketAddr, path::Path, sync::mpsc, thread};

use hyper::{
    Method, Request, Response, StatusCode,
    body::Incoming,
    header,
    service::{Service, service_fn},
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto::Builder,
};
use s3s::Body;
use tokio::{net::TcpListener, sync::oneshot};

/// Serves until what comes with the address is dropped.
pub fn listen<S>(service: S) -> (SocketAddr, oneshot::Sender<()>)
where
    S: Service<Request<Incoming>, Response = Response<Body>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let (stop, stopped) = oneshot::channel();
    let (sender, address) = mpsc::channel();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(async move {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            sender.send(listener.local_addr().unwrap()).unwrap();
            let serve = async {
                while let Ok((socket, _)) = listener.accept().await {
                    let service = service.clone();
                    tokio::spawn(async move {
                        let builder = Builder::new(TokioExecutor::new());
                        // A client may go at any moment.
                        let _ = builder.serve_connection(TokioIo::new(socket), service).await;
                    });
                }
            };
            futures_util::future::select(std::pin::pin!(serve), stopped).await;
        });
    });
    (address.recv().unwrap(), stop)
}

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
