//! Answers requests over HTTP, on a thread of its own and a free port.

use std::{net::SocketAddr, sync::mpsc, thread};

use hyper::{Request, Response, body::Incoming, service::Service};
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
