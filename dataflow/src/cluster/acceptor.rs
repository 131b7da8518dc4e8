//! A thread that accepts connections until it is stopped.
//!
//! `TcpListener::accept` cannot be given a deadline, so that the thread is stopped by connecting to
//! it. Whoever calls, friend or stranger, is handed on at once: greeting happens elsewhere.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::error::ClusterError;

const STOP_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) struct Acceptor {
    address: SocketAddr,
    stopping: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Acceptor {
    /// Hands every connection to `on_connection`. An error of the listener itself is handed over
    /// too, and ends the thread.
    pub(super) fn start(
        listener: TcpListener,
        mut on_connection: impl FnMut(io::Result<TcpStream>) + Send + 'static,
    ) -> Result<Self, ClusterError> {
        let address = listener.local_addr().map_err(ClusterError::socket("read our address"))?;
        listener
            .set_nonblocking(false)
            .map_err(ClusterError::socket("make our listener blocking"))?;
        let stopping = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&stopping);
        let name = "cluster:accept";
        let thread = std::thread::Builder::new()
            .name(name.to_string())
            .spawn(move || {
                loop {
                    let connection = listener.accept();
                    if stop.load(Ordering::Acquire) {
                        return;
                    }
                    match connection {
                        Ok((stream, _)) => on_connection(Ok(stream)),
                        Err(error) if is_passing(&error) => {}
                        Err(error) => return on_connection(Err(error)),
                    }
                }
            })
            .map_err(ClusterError::spawn(name))?;
        Ok(Self { address, stopping, thread })
    }

    /// Ends the thread and closes the listener.
    pub(super) fn stop(self) {
        self.stopping.store(true, Ordering::Release);
        let mut address = self.address;
        match address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
            IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
            _ => {}
        }
        // If not even we can connect, the thread ends at the next connection of somebody else.
        if TcpStream::connect_timeout(&address, STOP_TIMEOUT).is_ok() || self.thread.is_finished() {
            let _ = self.thread.join();
        }
    }
}

/// Errors that concern one connection, not the listener.
fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted)
}
