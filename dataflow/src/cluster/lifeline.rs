//! A supervised process's end of the connection to its supervisor.
//!
//! The process is given an [`Invitation`] (by a flag or an environment variable). It opens its own
//! listener, tells the supervisor the port and is told its index and everyone's addresses. The
//! connection stays open for as long as the process lives: when it closes, the supervisor is gone,
//! however it ended, and the program ends itself ([`Lifeline::on_lost`]). The supervisor's wish to
//! stop arrives the same way.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::ClusterSettings;
use super::error::ClusterError;
use super::frame::{UntilDeadline, read_frame, write_frame, write_magic};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the siblings may take to join. The supervisor gives up earlier.
const ASSIGNMENT_TIMEOUT: Duration = Duration::from_secs(600);

/// What the supervisor tells a child.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ToChild {
    Assignment { process: usize, addresses: Vec<String>, beat_milliseconds: u64 },
    Stop,
}

/// What a child tells its supervisor.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromChild {
    Join { token: String, port: u16 },
    Beat,
}

/// Where a process finds its supervisor, and the secret by which it is known there.
///
/// Its text form (`address/token`) is meant for a hidden flag or an environment variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invitation {
    pub(super) address: SocketAddr,
    pub(super) token: String,
}

impl fmt::Display for Invitation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.address, self.token)
    }
}

impl FromStr for Invitation {
    type Err = ClusterError;

    fn from_str(text: &str) -> Result<Self, ClusterError> {
        text.split_once('/')
            .and_then(|(address, token)| Some((address.parse().ok()?, token)))
            .filter(|(_, token)| !token.is_empty())
            .map(|(address, token)| Self { address, token: token.to_string() })
            .ok_or_else(|| ClusterError::Invitation { found: text.to_string() })
    }
}

type Callback = Box<dyn FnOnce() + Send>;

/// The connection of a supervised process to its supervisor. Keep it until the process ends:
/// dropping it closes the connection, and the supervisor no longer hears that we are alive.
pub struct Lifeline {
    shared: Arc<Shared>,
}

struct Shared {
    stream: TcpStream,
    stop: Arc<AtomicBool>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The reader has ended: the supervisor is gone, or the handle was dropped.
    closed: bool,
    dropped: bool,
    on_lost: Vec<Callback>,
    on_stop: Vec<Callback>,
}

impl Lifeline {
    /// Calls `callback` once when the supervisor is gone; at once if it already is. The program
    /// ends itself there, with exit code 75.
    pub fn on_lost(&self, callback: impl FnOnce() + Send + 'static) {
        {
            let mut state = self.shared.lock();
            if !state.closed {
                state.on_lost.push(Box::new(callback));
                return;
            }
        }
        callback();
    }

    /// Calls `callback` once when the supervisor asks to stop; at once if it already has.
    pub fn on_stop(&self, callback: impl FnOnce() + Send + 'static) {
        {
            let mut state = self.shared.lock();
            if !self.shared.stop.load(Ordering::Acquire) {
                state.on_stop.push(Box::new(callback));
                return;
            }
        }
        callback();
    }

    /// A flag that is true once the supervisor has asked to stop.
    pub fn stop_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.shared.stop)
    }
}

impl Drop for Lifeline {
    fn drop(&mut self) {
        self.shared.lock().dropped = true;
        let _ = self.shared.stream.shutdown(Shutdown::Both);
    }
}

/// Joins the supervisor that has started this process. Returns when all its siblings have joined:
/// the settings of the cluster, with our listener open, and the lifeline.
///
/// # Errors
/// [`ClusterError::SupervisorLost`] if the supervisor cannot be reached or ends first.
pub fn join_supervised(
    invitation: &Invitation,
    threads: usize,
) -> Result<(ClusterSettings, Lifeline), ClusterError> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|source| {
        ClusterError::Bind { address: "127.0.0.1:0".into(), source: Arc::new(source) }
    })?;
    let port = listener.local_addr().map_err(ClusterError::socket("read our address"))?.port();
    let lost = |source: io::Error| ClusterError::SupervisorLost {
        address: invitation.address.to_string(),
        source: Arc::new(source),
    };
    let (stream, assignment) = announce(invitation, port).map_err(lost)?;
    let ToChild::Assignment { process, addresses, beat_milliseconds } = assignment else {
        return Err(lost(io::Error::new(io::ErrorKind::InvalidData, "no assignment came first")));
    };
    let lifeline = Lifeline {
        shared: Arc::new(Shared {
            stream,
            stop: Arc::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
        }),
    };
    let interval = Duration::from_millis(beat_milliseconds);
    let (reader, beater) = (Arc::clone(&lifeline.shared), Arc::clone(&lifeline.shared));
    spawn("cluster:lifeline", move || reader.listen())?;
    spawn("cluster:lifebeat", move || beater.beat(interval))?;
    let mut settings = ClusterSettings::process(threads, process, addresses);
    settings.listener = Some(listener);
    Ok((settings, lifeline))
}

fn announce(invitation: &Invitation, port: u16) -> io::Result<(TcpStream, ToChild)> {
    let stream = TcpStream::connect_timeout(&invitation.address, CONNECT_TIMEOUT)?;
    stream.set_nodelay(true)?;
    write_magic(&stream)?;
    write_frame(&stream, &FromChild::Join { token: invitation.token.clone(), port })?;
    let deadline = Instant::now() + ASSIGNMENT_TIMEOUT;
    let assignment = read_frame(UntilDeadline::new(&stream, deadline))?;
    stream.set_read_timeout(None)?;
    Ok((stream, assignment))
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), ClusterError> {
    let builder = std::thread::Builder::new().name(name.to_string());
    builder.spawn(work).map(|_| ()).map_err(ClusterError::spawn(name))
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listen(&self) {
        while let Ok(message) = read_frame::<ToChild>(&self.stream) {
            if let ToChild::Stop = message {
                let callbacks = {
                    let mut state = self.lock();
                    self.stop.store(true, Ordering::Release);
                    std::mem::take(&mut state.on_stop)
                };
                callbacks.into_iter().for_each(|callback| callback());
            }
        }
        let callbacks = {
            let mut state = self.lock();
            state.closed = true;
            self.changed.notify_all();
            if state.dropped { Vec::new() } else { std::mem::take(&mut state.on_lost) }
        };
        callbacks.into_iter().for_each(|callback| callback());
    }

    fn beat(&self, interval: Duration) {
        loop {
            let open = |state: &mut State| !state.closed;
            let waited = self.changed.wait_timeout_while(self.lock(), interval, open);
            if waited.unwrap_or_else(PoisonError::into_inner).0.closed {
                return;
            }
            // The listening thread notices when the other end is gone.
            let _ = write_frame(&self.stream, &FromChild::Beat);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invitations_survive_their_text() {
        let invitation =
            Invitation { address: "127.0.0.1:99".parse().unwrap(), token: "ab".into() };
        assert_eq!(invitation.to_string().parse::<Invitation>().unwrap(), invitation);
        for wrong in ["", "127.0.0.1:99", "127.0.0.1:99/", "host/ab", "/ab"] {
            assert!(wrong.parse::<Invitation>().is_err(), "{wrong:?}");
        }
    }
}
