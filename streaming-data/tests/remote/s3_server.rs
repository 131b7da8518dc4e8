//! A server that speaks S3, in this process, on a free port.

use std::{
    net::SocketAddr,
    path::Path,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use hyper::{Request, Response, StatusCode, body::Incoming, header, service::Service};
use s3s::{
    Body,
    auth::SimpleAuth,
    service::{S3Service, S3ServiceBuilder},
};
use s3s_fs::FileSystem;
use tokio::sync::{oneshot, watch};

use crate::listen::listen;

pub const KEY: &str = "an-access-key";
pub const SECRET: &str = "a-secret-key";

/// Serves the folders of `root` as buckets until it is dropped.
pub struct S3Server {
    address: SocketAddr,
    /// Method and path of every request.
    asked: Arc<Mutex<Vec<String>>>,
    /// Requests that begin so are not answered for now.
    held: Arc<watch::Sender<Option<String>>>,
    /// Whether it answers to conditions that it lacks them.
    is_unconditional: Arc<AtomicBool>,
    _stop: oneshot::Sender<()>,
}

impl S3Server {
    pub fn start(root: &Path) -> S3Server {
        let mut builder = S3ServiceBuilder::new(FileSystem::new(root).unwrap());
        builder.set_auth(SimpleAuth::from_single(KEY, SECRET));
        S3Server::of(builder, true)
    }

    /// One that asks for no signatures: Google's store speaks so too.
    #[allow(dead_code, reason = "not every program with this server needs it")]
    pub fn start_unsigned(root: &Path) -> S3Server {
        S3Server::of(S3ServiceBuilder::new(FileSystem::new(root).unwrap()), false)
    }

    fn of(builder: S3ServiceBuilder, is_signed: bool) -> S3Server {
        let (asked, held) = (Arc::default(), Arc::new(watch::Sender::new(None)));
        let is_unconditional = Arc::default();
        let service = Recorded {
            inner: builder.build(),
            is_signed,
            asked: Arc::clone(&asked),
            held: Arc::clone(&held),
            is_unconditional: Arc::clone(&is_unconditional),
        };
        let (address, stop) = listen(service);
        S3Server { address, asked, held, is_unconditional, _stop: stop }
    }

    /// Where it listens.
    #[allow(dead_code, reason = "not every program with this server needs it")]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The environment, or the options, of a client.
    pub fn options(&self) -> Vec<(String, String)> {
        let endpoint = format!("http://{}", self.address);
        [
            ("AWS_ENDPOINT", endpoint.as_str()),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ACCESS_KEY_ID", KEY),
            ("AWS_SECRET_ACCESS_KEY", SECRET),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .to_vec()
    }

    /// Leaves requests unanswered that begin with this method and path, of which `*` is any part, or answers them
    /// from now on.
    #[allow(dead_code, reason = "not every program with this server needs it")]
    pub fn hold(&self, request: Option<&str>) {
        self.held.send_replace(request.map(str::to_owned));
    }

    /// From now on answers to conditions that it lacks them.
    #[allow(dead_code, reason = "not every program with this server needs it")]
    pub fn refuse_conditions(&self) {
        self.is_unconditional.store(true, Ordering::SeqCst);
    }

    /// How many requests began with this method and path, of which `*` is any part.
    pub fn count(&self, request: &str) -> usize {
        self.asked(request).len()
    }

    /// The requests that began with this method and path.
    pub fn asked(&self, request: &str) -> Vec<String> {
        let asked = self.asked.lock().unwrap();
        asked.iter().filter(|asked| begins(asked, request)).cloned().collect()
    }
}

/// Whether a request begins so; `*` is any part.
fn begins(asked: &str, request: &str) -> bool {
    match request.split_once('*') {
        None => asked.starts_with(request),
        Some((beginning, rest)) => {
            asked.strip_prefix(beginning).is_some_and(|asked| asked.contains(rest))
        }
    }
}

#[derive(Clone)]
struct Recorded {
    inner: S3Service,
    is_signed: bool,
    asked: Arc<Mutex<Vec<String>>>,
    held: Arc<watch::Sender<Option<String>>>,
    is_unconditional: Arc<AtomicBool>,
}

impl Service<Request<Incoming>> for Recorded {
    type Response = <S3Service as Service<Request<Incoming>>>::Response;
    type Error = <S3Service as Service<Request<Incoming>>>::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        if !self.is_signed {
            // Empty tokens of clients that have none.
            request.headers_mut().remove(header::AUTHORIZATION);
        }
        let asked = format!("{} {}", request.method(), request.uri());
        self.asked.lock().unwrap().push(asked.clone());
        let (inner, mut held) = (self.inner.clone(), self.held.subscribe());
        let is_conditional = [header::IF_MATCH, header::IF_NONE_MATCH]
            .iter()
            .any(|condition| request.headers().contains_key(condition));
        if is_conditional && self.is_unconditional.load(Ordering::SeqCst) {
            let answer = Response::builder().status(StatusCode::NOT_IMPLEMENTED);
            return Box::pin(async move { Ok(answer.body(Body::empty()).unwrap()) });
        }
        Box::pin(async move {
            let goes_on = |held: &Option<String>| {
                held.as_ref().is_none_or(|beginning| !begins(&asked, beginning))
            };
            // The server may end meanwhile.
            let _ = held.wait_for(goes_on).await;
            Service::call(&inner, request).await
        })
    }
}
