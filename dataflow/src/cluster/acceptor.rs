//! A thread that accepts connections until it is stopped.
//!
//! Every caller is handed on at once to the [`Greetings`], which bound how many there are. No
//! error of accepting ends the thread: where the system is out of descriptors or memory, a
//! stranger is hung up on and the thread waits a moment.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::error::ClusterError;
use super::greetings::{Greeting, Greetings};

const STOP_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) struct Acceptor {
    address: SocketAddr,
    /// The listener's own socket: shutting it down wakes the thread, and needs no descriptor.
    socket: TcpStream,
    stopping: Arc<AtomicBool>,
    greetings: Arc<Greetings>,
    thread: JoinHandle<()>,
}

impl Acceptor {
    /// Has `greet` called with every connection, each on a thread of `greetings`.
    pub(super) fn start<F>(
        listener: TcpListener,
        greetings: &Arc<Greetings>,
        greet: F,
    ) -> Result<Self, ClusterError>
    where
        F: Fn(Arc<TcpStream>, Greeting) + Clone + Send + 'static,
    {
        let address = listener.local_addr().map_err(ClusterError::socket("read our address"))?;
        listener
            .set_nonblocking(false)
            .map_err(ClusterError::socket("make our listener blocking"))?;
        let socket = listener.try_clone().map_err(ClusterError::socket("share our listener"))?;
        let stopping = Arc::new(AtomicBool::new(false));
        let (stop, greeted) = (Arc::clone(&stopping), Arc::clone(greetings));
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
                        Ok((stream, _)) => greeted.greet(stream, greet.clone()),
                        Err(error) if is_of_one_connection(&error) => {}
                        Err(error) => {
                            tracing::debug!(%error, "cannot accept a connection");
                            greeted.make_room();
                        }
                    }
                }
            })
            .map_err(ClusterError::spawn(name))?;
        let greetings = Arc::clone(greetings);
        Ok(Self { address, socket: of_listener(socket), stopping, greetings, thread })
    }

    /// Ends the thread, closes the listener and cuts the greetings that are not over.
    pub(super) fn stop(self) {
        self.stopping.store(true, Ordering::Release);
        self.greetings.close();
        // On Linux this ends the thread's wait; elsewhere a connection does.
        if self.socket.shutdown(Shutdown::Both).is_ok()
            || TcpStream::connect_timeout(&self.reachable(), STOP_TIMEOUT).is_ok()
            || self.thread.is_finished()
        {
            let _ = self.thread.join();
        }
    }

    fn reachable(&self) -> SocketAddr {
        let mut address = self.address;
        match address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
            IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
            _ => {}
        }
        address
    }
}

/// A listener has no `shutdown` of its own.
#[cfg(unix)]
fn of_listener(listener: TcpListener) -> TcpStream {
    std::os::fd::OwnedFd::from(listener).into()
}

#[cfg(windows)]
fn of_listener(listener: TcpListener) -> TcpStream {
    std::os::windows::io::OwnedSocket::from(listener).into()
}

/// Errors that say nothing about the next connection.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted)
}
