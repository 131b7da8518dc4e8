//! The control connections: heartbeats, goodbyes, and the first error of a worker that fails.
//!
//! One connection for each pair of processes, beside timely's. A reader thread for each peer
//! listens; one monitor thread does all the writing, so that frames never mix:
//!
//! - it sends a heartbeat every fifth of the peer deadline (or of the step deadline, where that is
//!   shorter), which names the phase and the step of this process, and aborts the run when a peer has been silent for
//!   the peer deadline;
//! - when the run is aborted, here or elsewhere, it tells every peer the first error, and only
//!   then cuts the data connections: so every process ends with the same message;
//! - a peer that closes its connection without having said goodbye has died.
//!
//! A process that was stopped as a whole (Ctrl-Z, a sleeping laptop) does not accuse its peers
//! when it wakes: the monitor notices that it overslept and gives them another deadline.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::abort::Abort;
use super::channel::Channel;
use super::error::{ClusterError, Peer};
use super::exit_class::ExitClass;
use super::progress::Standing;
use super::watch::{PeerStanding, PeerStandings};
use crate::printable::printable;

/// How long a control connection may take to swallow a frame of a few bytes.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long we keep reading after our last word, so that closing does not cut it off.
const CLOSE_GRACE: Duration = Duration::from_secs(1);
/// The monitor looks for unexplained suspicions at least this often.
const LONGEST_TICK: Duration = Duration::from_millis(500);
/// Longer messages are cut off, on their way to the peers and when they come from one.
const MESSAGE_LIMIT_BYTES: usize = 1 << 14;

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Message {
    Beat(Standing),
    Goodbye,
    /// As an abort, for which nothing has failed.
    StoppedEarly,
    Abort {
        origin: usize,
        exit_class: ExitClass,
        message: String,
    },
}

enum Order {
    SayGoodbye,
    TellAbort,
    Close,
}

pub(super) struct Control {
    shared: Arc<Shared>,
    orders: Sender<Order>,
    monitor: Option<JoinHandle<()>>,
}

struct Shared {
    abort: Abort,
    process: usize,
    addresses: Vec<String>,
    beat_interval: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    links: Vec<Link>,
    data: Vec<Arc<TcpStream>>,
    data_cut: bool,
    closing: bool,
}

struct Link {
    peer: Peer,
    channel: Arc<Channel>,
    /// How long it may be silent: the deadline that the two processes have agreed on.
    deadline: Duration,
    heard: Instant,
    /// The peer's last report about itself.
    standing: Standing,
    /// The peer has said its last word: a goodbye, or why it aborts.
    farewell: bool,
    told_abort: bool,
    open: bool,
    reader: Option<JoinHandle<()>>,
}

impl Control {
    pub(super) fn start(
        process: usize,
        addresses: Vec<String>,
        deadline: Duration,
        step_deadline: Option<Duration>,
        abort: &Abort,
    ) -> Result<Self, ClusterError> {
        let shared = Arc::new(Shared {
            abort: abort.clone(),
            process,
            addresses,
            beat_interval: step_deadline.unwrap_or(deadline).min(deadline) / 5,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let (orders, received) = mpsc::channel();
        let (order, waiting) = (orders.clone(), Arc::downgrade(&shared));
        abort.on_abort(move || {
            // The monitor may be gone already: then there is nothing left to tell.
            let _ = order.send(Order::TellAbort);
            if let Some(shared) = waiting.upgrade() {
                // Under the lock, so that `finish` cannot miss it between its check and its wait.
                let _state = shared.lock();
                shared.changed.notify_all();
            }
        });
        let name = "cluster:monitor";
        let monitor = {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new()
                .name(name.to_string())
                .spawn(move || shared.monitor(&received))
                .map_err(ClusterError::spawn(name))?
        };
        Ok(Self { shared, orders, monitor: Some(monitor) })
    }

    /// Takes over an established control connection.
    pub(super) fn attach(
        &self,
        peer: Peer,
        channel: Channel,
        deadline: Duration,
    ) -> Result<(), ClusterError> {
        channel
            .stream()
            .set_write_timeout(Some(WRITE_TIMEOUT))
            .map_err(ClusterError::socket("set the timeout of a control connection"))?;
        let channel = Arc::new(channel);
        let name = format!("cluster:peer-{}", peer.process);
        let mut state = self.shared.lock();
        let index = state.links.len();
        let reader = {
            let (shared, channel) = (Arc::clone(&self.shared), Arc::clone(&channel));
            std::thread::Builder::new()
                .name(name.clone())
                .spawn(move || shared.read(index, &channel))
                .map_err(ClusterError::spawn(&name))?
        };
        state.links.push(Link {
            peer,
            channel,
            deadline,
            heard: Instant::now(),
            standing: Standing::default(),
            farewell: false,
            told_abort: false,
            open: true,
            reader: Some(reader),
        });
        drop(state);
        if self.shared.abort.is_aborted() {
            let _ = self.orders.send(Order::TellAbort);
        }
        Ok(())
    }

    /// Cuts these connections when the run is aborted, once the peers have been told why.
    pub(super) fn cut_on_abort(&self, data: Vec<Arc<TcpStream>>) {
        let mut state = self.shared.lock();
        if state.data_cut {
            cut(&data);
        }
        state.data.extend(data);
    }

    /// The peers' last reports about themselves, a goodbye included.
    pub(super) fn peer_standings(&self) -> PeerStandings {
        let shared = Arc::clone(&self.shared);
        Box::new(move || {
            let said = |link: &Link| PeerStanding {
                peer: link.peer.clone(),
                standing: link.standing,
                heard: link.heard,
                has_left: link.farewell,
                delay: 2 * shared.beat_interval,
            };
            shared.lock().links.iter().map(said).collect()
        })
    }

    /// Tells every peer that this process has nothing left to do.
    pub(super) fn say_goodbye(&self) {
        let _ = self.orders.send(Order::SayGoodbye);
    }

    /// Waits until every peer has said goodbye or the run is aborted, then closes the connections.
    pub(super) fn finish(mut self) {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        while state.links.iter().any(|link| link.open && !link.farewell)
            && shared.abort.first_error().is_none()
        {
            state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.closing = true;
        drop(state);
        let _ = self.orders.send(Order::Close);
        if let Some(monitor) = self.monitor.take() {
            let _ = monitor.join();
        }
        let state = shared.lock();
        let open = |state: &mut State| state.links.iter().any(|link| link.open);
        let waited = shared.changed.wait_timeout_while(state, CLOSE_GRACE, open);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let mut readers = Vec::new();
        for link in &mut state.links {
            link.channel.shutdown(Shutdown::Both);
            readers.extend(link.reader.take());
        }
        drop(state);
        for reader in readers {
            let _ = reader.join();
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = self.orders.send(Order::Close);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn monitor(&self, orders: &Receiver<Order>) {
        let interval = self.beat_interval;
        let tick = interval.min(LONGEST_TICK);
        let mut next_beat = Instant::now() + interval;
        loop {
            let wait = next_beat.saturating_duration_since(Instant::now()).min(tick);
            match orders.recv_timeout(wait) {
                Ok(Order::SayGoodbye) => self.tell_all(&Message::Goodbye),
                Ok(Order::TellAbort) => self.tell_abort(),
                Ok(Order::Close) | Err(RecvTimeoutError::Disconnected) => {
                    // The run may be aborted and our order to tell it still on its way.
                    self.tell_abort();
                    break;
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            let now = Instant::now();
            if now >= next_beat {
                self.tell_all(&Message::Beat(self.abort.board().standing()));
                self.abort_on_silent_peer(now, now - next_beat > interval);
                next_beat = now + interval;
            }
            // The question turns an unexplained suspicion into an error.
            self.abort.is_aborted();
        }
        for link in &self.lock().links {
            link.channel.shutdown(Shutdown::Write);
        }
    }

    /// Sends `message` to all peers. Failed writes are ignored: the thread that reads from the same connection reports a broken one,
    /// and the deadline for silence a dead one.
    fn tell_all(&self, message: &Message) {
        let channels: Vec<_> =
            self.lock().links.iter().map(|link| Arc::clone(&link.channel)).collect();
        for channel in channels {
            let _ = channel.send(message);
        }
    }

    fn tell_abort(&self) {
        let Some(error) = self.abort.first_error() else { return };
        let exit_class = error.exit_class();
        let abort = |origin, text: &str| {
            let message = printable(text, MESSAGE_LIMIT_BYTES);
            Message::Abort { origin, exit_class, message }
        };
        let message = match &error {
            ClusterError::StoppedEarly => Message::StoppedEarly,
            ClusterError::Reported { peer, message, .. } => abort(peer.process, message),
            own => abort(self.process, &own.with_causes()),
        };
        let mut untold = Vec::new();
        for link in &mut self.lock().links {
            if !std::mem::replace(&mut link.told_abort, true) {
                untold.push(Arc::clone(&link.channel));
            }
        }
        for channel in untold {
            let _ = channel.send(&message);
        }
        let mut state = self.lock();
        state.data_cut = true;
        cut(&state.data);
    }

    fn abort_on_silent_peer(&self, now: Instant, overslept: bool) {
        let mut silent = None;
        for link in &mut self.lock().links {
            if overslept {
                link.heard = now;
            } else if link.open && !link.farewell && now - link.heard >= link.deadline {
                silent.get_or_insert_with(|| (link.peer.clone(), link.deadline));
            }
        }
        if let Some((peer, deadline)) = silent {
            self.abort.abort(ClusterError::PeerSilent { peer, deadline });
        }
    }

    fn read(&self, index: usize, channel: &Channel) {
        loop {
            let message = channel.receive::<Message>();
            let mut state = self.lock();
            let closing = state.closing;
            let link = &mut state.links[index];
            link.heard = Instant::now();
            let error = match message {
                Ok(Message::Beat(standing)) => {
                    link.standing = standing;
                    None
                }
                Ok(Message::Goodbye) => {
                    link.farewell = true;
                    None
                }
                Ok(Message::StoppedEarly) => {
                    link.farewell = true;
                    Some(ClusterError::StoppedEarly)
                }
                Ok(Message::Abort { origin, exit_class, message }) => {
                    link.farewell = true;
                    let peer = match self.addresses.get(origin) {
                        Some(address) => Peer { process: origin, address: address.clone() },
                        None => link.peer.clone(),
                    };
                    let message = printable(&message, MESSAGE_LIMIT_BYTES);
                    Some(ClusterError::Reported { peer, exit_class, message })
                }
                Err(error) => {
                    link.open = false;
                    let peer = link.peer.clone();
                    if error.kind() == io::ErrorKind::InvalidData {
                        Some(ClusterError::Protocol { peer, found: error.to_string() })
                    } else {
                        let expected = link.farewell || closing;
                        (!expected).then_some(ClusterError::PeerEnded { peer })
                    }
                }
            };
            let open = link.open;
            self.changed.notify_all();
            drop(state);
            if let Some(error) = error {
                self.abort.abort(error);
            }
            if !open {
                return;
            }
        }
    }
}

fn cut(data: &[Arc<TcpStream>]) {
    for stream in data {
        let _ = stream.shutdown(Shutdown::Both);
    }
}
