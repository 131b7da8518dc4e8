//! A server that speaks S3, in this process, on a free port.

use std::{
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex},
    thread,
};

use hyper::{Request, body::Incoming, service::Service};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto::Builder,
};
use s3s::{
    auth::SimpleAuth,
    service::{S3Service, S3ServiceBuilder},
};
use s3s_fs::FileSystem;
use tokio::{net::TcpListener, sync::oneshot};

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
        let (stop, stopped) = oneshot::channel();
        let (sender, address) = std::sync::mpsc::channel();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async move {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                sender.send(listener.local_addr().unwrap()).unwrap();
                let serve = async {
                    while let Ok((socket, _)) = listener.accept().await {
                        let builder = Builder::new(TokioExecutor::new());
                        let service = service.clone();
                        tokio::spawn(async move {
                            // A client may go at any moment.
                            let _ = builder.serve_connection(TokioIo::new(socket), service).await;
                        });
                    }
                };
                futures_util::future::select(std::pin::pin!(serve), stopped).await;
            });
        });
        S3Server { address: address.recv().unwrap(), asked, _stop: stop }
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

    /// Requests that began with this method and path.
    pub fn count(&self, request: &str) -> usize {
        self.asked.lock().unwrap().iter().filter(|asked| asked.starts_with(request)).count()
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
