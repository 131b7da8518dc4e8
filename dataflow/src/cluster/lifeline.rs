//! A supervised process's end of the connection to its supervisor.
//!
//! The process is given an [`Invitation`] (by a flag or an environment variable). It opens its own
//! listener, tells the supervisor the port and is told the addresses of all. The
//! connection stays open for as long as the process lives: when it closes, the supervisor is gone,
//! however it ended, and the program ends itself ([`Lifeline::on_lost`]). The supervisor's wish to
//! stop arrives the same way, and so does the news that another of its processes has failed.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::abort::Abort;
use super::channel::{Between, Channel};
use super::error::{ClusterError, Peer};
use super::secret::Secret;
use super::{Admission, ClusterSettings};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const CALL_ATTEMPTS: usize = 100;
/// How long the siblings may take to join. The supervisor gives up earlier.
const ASSIGNMENT_TIMEOUT: Duration = Duration::from_secs(600);

/// A message of the supervisor to a child.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ToChild {
    Assignment {
        addresses: Vec<String>,
        beat_milliseconds: u64,
    },
    Stop,
    /// Another process has failed.
    Ended {
        process: usize,
    },
}

/// A message of a child to its supervisor.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromChild {
    Join { process: usize, port: u16 },
    Beat,
}

/// Where a process finds its supervisor, its index, and the secret by which it is known there and
/// to its siblings.
///
/// Its text form (`address/process/secret`) is meant for an environment variable, which other users
/// cannot read, as they can a command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invitation {
    pub(super) address: SocketAddr,
    pub(super) process: usize,
    pub(super) secret: Secret,
}

impl fmt::Display for Invitation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}/{}", self.address, self.process, self.secret.text())
    }
}

impl FromStr for Invitation {
    type Err = ClusterError;

    fn from_str(text: &str) -> Result<Self, ClusterError> {
        let parsed = || {
            let (address, rest) = text.split_once('/')?;
            let (process, secret) = rest.split_once('/')?;
            let secret = Secret::new(secret, "the invitation").ok()?;
            Some(Self { address: address.parse().ok()?, process: process.parse().ok()?, secret })
        };
        parsed().ok_or(ClusterError::Invitation)
    }
}

type Callback = Box<dyn FnOnce() + Send>;

/// The connection of a supervised process to its supervisor. Keep it until the process ends:
/// dropping it closes the connection, and the supervisor no longer hears that we are alive.
pub struct Lifeline {
    shared: Arc<Shared>,
}

struct Shared {
    channel: Channel,
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
    /// Processes that have failed.
    ended: Vec<usize>,
    on_ended: Option<Box<dyn Fn(usize) + Send>>,
}

/// The news of the other processes of a supervisor.
#[derive(Clone)]
pub struct Siblings {
    shared: Arc<Shared>,
}

impl fmt::Debug for Siblings {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Siblings(..)")
    }
}

impl Siblings {
    /// Ends the run when one has failed, unless that one has said itself why. Processes that have
    /// not met yet learn it from nowhere else.
    pub(super) fn end_with_the_first(&self, abort: &Abort, addresses: &[String]) {
        let (abort, addresses) = (abort.clone(), addresses.to_vec());
        let ended = move |process: usize| {
            if let Some(address) = addresses.get(process) {
                let peer = Peer { process, address: address.clone() };
                abort.suspect(ClusterError::PeerEnded { peer });
            }
        };
        let mut state = self.shared.lock();
        state.ended.iter().for_each(|&process| ended(process));
        state.on_ended = Some(Box::new(ended));
    }
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
        self.shared.channel.shutdown(Shutdown::Both);
    }
}

/// Joins the supervisor that has started this process. Returns when all its siblings have joined:
/// the settings of the cluster, with our listener open, and the lifeline.
///
/// # Errors
/// [`ClusterError::SupervisorLost`] if the supervisor cannot be reached or ends first,
/// [`ClusterError::SiblingEnded`] if one of the others does, and [`ClusterError::StoppedEarly`] if
/// it asks to stop first.
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
    let (channel, assignment) = announce(invitation, port).map_err(lost)?;
    let (addresses, beat_milliseconds) = match assignment {
        ToChild::Assignment { addresses, beat_milliseconds } => (addresses, beat_milliseconds),
        ToChild::Stop => return Err(ClusterError::StoppedEarly),
        ToChild::Ended { process } => return Err(ClusterError::SiblingEnded { process }),
    };
    let lifeline = Lifeline {
        shared: Arc::new(Shared {
            channel,
            stop: Arc::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
        }),
    };
    let interval = Duration::from_millis(beat_milliseconds);
    let (reader, beater) = (Arc::clone(&lifeline.shared), Arc::clone(&lifeline.shared));
    spawn("cluster:lifeline", move || reader.listen())?;
    spawn("cluster:lifebeat", move || beater.beat(interval))?;
    let mut settings = ClusterSettings::process(threads, invitation.process, addresses);
    settings.listener = Some(listener);
    settings.admission = Admission::Secret(invitation.secret.clone());
    settings.siblings = Some(Siblings { shared: Arc::clone(&lifeline.shared) });
    Ok((settings, lifeline))
}

fn announce(invitation: &Invitation, port: u16) -> io::Result<(Channel, ToChild)> {
    let deadline = Instant::now() + ASSIGNMENT_TIMEOUT;
    let Invitation { address, process, ref secret } = *invitation;
    let channel = call(&address, secret, deadline)?;
    channel.send(&FromChild::Join { process, port })?;
    let assignment = channel.receive_until(deadline)?;
    channel.stream().set_read_timeout(None)?;
    Ok((channel, assignment))
}

/// Strangers may have us hung up on before our first words are read: then we call again.
fn call(address: &SocketAddr, secret: &Secret, deadline: Instant) -> io::Result<Channel> {
    let mut attempts_left = CALL_ATTEMPTS;
    loop {
        let stream = Arc::new(TcpStream::connect_timeout(address, CONNECT_TIMEOUT)?);
        stream.set_nodelay(true)?;
        attempts_left -= 1;
        match Channel::call(stream, secret, Between::ChildAndSupervisor, deadline) {
            Err(error) if attempts_left > 0 && error.kind() == io::ErrorKind::PermissionDenied => {}
            called => return called,
        }
    }
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
        while let Ok(message) = self.channel.receive() {
            match message {
                ToChild::Stop => {
                    let callbacks = {
                        let mut state = self.lock();
                        self.stop.store(true, Ordering::Release);
                        std::mem::take(&mut state.on_stop)
                    };
                    callbacks.into_iter().for_each(|callback| callback());
                }
                ToChild::Ended { process } => {
                    let mut state = self.lock();
                    state.ended.push(process);
                    if let Some(ended) = &state.on_ended {
                        ended(process);
                    }
                }
                ToChild::Assignment { .. } => {}
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
            let _ = self.channel.send(&FromChild::Beat);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invitations_survive_their_text() {
        let invitation = Invitation {
            address: "127.0.0.1:99".parse().unwrap(),
            process: 3,
            secret: Secret::generate().unwrap(),
        };
        let text = invitation.to_string();
        assert_eq!(text.parse::<Invitation>().unwrap(), invitation);
        let secret = invitation.secret.text();
        for wrong in ["", "127.0.0.1:99", "127.0.0.1:99/3", "127.0.0.1:99/3/ab"] {
            assert!(wrong.parse::<Invitation>().is_err(), "{wrong:?}");
        }
        for wrong in [format!("host/3/{secret}"), format!("127.0.0.1:99/x/{secret}")] {
            let error = wrong.parse::<Invitation>().unwrap_err().to_string();
            assert!(!error.contains(secret), "{error}");
        }
    }
}
