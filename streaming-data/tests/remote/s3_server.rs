//! A server that speaks S3, in this process, on a free port.

use std::{
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex},
};

use hyper::{Request, body::Incoming, service::Service};
use s3s::{
    auth::SimpleAuth,
    service::{S3Service, S3ServiceBuilder},
};
use s3s_fs::FileSystem;
use tokio::sync::oneshot;

use crate::listen::listen;

pub const KEY: &str = "an-access-key";
pub const SECRET: &str = "a-secret-key";

/// Serves the folders of `root` as buckets until it is dropped.
pub struct S3Server {
    address: SocketAddr,
    /// Method and path of every request.
    asked: Arc<Mutex<Vec<String>>>,
    _stop: oneshot::Sender<()>,
}

impl S3Server {
    pub fn start(root: &Path) -> S3Server {
        let mut builder = S3ServiceBuilder::new(FileSystem::new(root).unwrap());
        builder.set_auth(SimpleAuth::from_single(KEY, SECRET));
        let asked = Arc::default();
        let service = Recorded { inner: builder.build(), asked: Arc::clone(&asked) };
        let (address, stop) = listen(service);
        S3Server { address, asked, _stop: stop }
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

    /// How many requests began with this method and path.
    pub fn count(&self, request: &str) -> usize {
        self.asked(request).len()
    }

    /// The requests that began with this method and path.
    pub fn asked(&self, request: &str) -> Vec<String> {
        let asked = self.asked.lock().unwrap();
        asked.iter().filter(|asked| asked.starts_with(request)).cloned().collect()
    }
}

#[derive(Clone)]
struct Recorded {
    inner: S3Service,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Service<Request<Incoming>> for Recorded {
    type Response = <S3Service as Service<Request<Incoming>>>::Response;
    type Error = <S3Service as Service<Request<Incoming>>>::Error;
    type Future = <S3Service as Service<Request<Incoming>>>::Future;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let asked = format!("{} {}", request.method(), request.uri());
        self.asked.lock().unwrap().push(asked);
        Service::call(&self.inner, request)
    }
}
