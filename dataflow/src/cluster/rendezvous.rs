//! How the processes of a cluster find each other.
//!
//! Every process listens at its own address, connects to the processes of lower index and accepts
//! those of higher index: one control and one data connection for each pair. A connection begins
//! with a handshake that proves that both ends know the secret of the cluster
//! ([`Channel`]); then both sides say which process they are, how they were started and what their identity
//! is, and compare ([`Hello`]). A stranger is dropped without an answer; it delays no process, as
//! each greeting has its own thread and a time limit, and there are never many
//! ([`Greetings`]). Everything ends at one deadline, with an error that names the processes that are missing.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::abort::Abort;
use super::acceptor::Acceptor;
use super::channel::{Between, Channel};
use super::ciphers::{DataKey, random};
use super::control::Control;
use super::error::{ClusterError, Peer};
use super::greetings::{Greeting, Greetings};
use super::hello::{CallerSays, Hello, Purpose, Reply, compare};
use super::hosts::by_host_in_words;
use super::reach::listen;
use super::sealed::DataKeys;
use super::secret::Secret;
use super::{Admission, ClusterSettings};
use crate::printable::printable;

/// How long a caller has to say which process it is.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// How long one attempt to connect may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const SHORTEST_BACKOFF: Duration = Duration::from_millis(20);
const LONGEST_BACKOFF: Duration = Duration::from_millis(500);
/// How long a process that has failed waits for those that do not know yet.
const LINGER: Duration = Duration::from_secs(1);
/// Longer reasons of a peer are cut.
const REASON_LIMIT_BYTES: usize = 1 << 10;

/// A data connection whose ends have met.
pub(super) struct DataLink {
    pub stream: Arc<TcpStream>,
    pub keys: DataKeys,
}

/// A connection whose ends have met.
enum Link {
    /// With the deadline that both ends have agreed on.
    Control(Channel, Duration),
    Data(DataLink),
}

impl Link {
    fn purpose(&self) -> Purpose {
        match self {
            Self::Control(..) => Purpose::Control,
            Self::Data(_) => Purpose::Data,
        }
    }
}

enum Event {
    Connected {
        process: usize,
        link: Link,
    },
    NotYet(io::Error),
    /// With the process that knows of it too, if one does.
    Failed(ClusterError, Option<usize>),
    Aborted,
}

/// The state that greeting threads share.
struct Meeting {
    process: usize,
    addresses: Vec<String>,
    identity: BTreeMap<String, String>,
    secret: Secret,
    instance: u64,
    peer_deadline: Duration,
    deadline: Instant,
    events: Sender<Event>,
    greetings: Arc<Greetings>,
    state: Mutex<State>,
    over: Condvar,
}

#[derive(Default)]
struct State {
    over: bool,
    /// Connections that have been welcomed, by the process at their other end.
    taken: BTreeMap<(usize, Purpose), Seat>,
}

/// Which process has taken a place in the cluster.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Seat {
    instance: u64,
    /// It may not call again.
    confirmed: bool,
}

/// Connects this process with all others. Control connections go to `control`; the data
/// connections are returned by process index, `None` at our own.
pub(super) fn meet(
    settings: &mut ClusterSettings,
    abort: &Abort,
    control: &Control,
) -> Result<Vec<Option<DataLink>>, ClusterError> {
    let (process, processes) = (settings.process, settings.addresses.len());
    let listener = match settings.listener.take() {
        Some(listener) => listener,
        None => listen(&settings.addresses, process)?,
    };
    let (events, received) = mpsc::channel();
    let wake = events.clone();
    abort.on_abort(move || {
        let _ = wake.send(Event::Aborted);
    });
    let mut identity = settings.identity.clone();
    identity.insert("number of processes".into(), processes.to_string());
    // Each process goes by its own list of addresses: the sums that cross the network together have to be the same everywhere.
    let by_host = by_host_in_words(&settings.addresses);
    identity.insert("processes on hosts".into(), by_host);
    identity.insert("workers per process".into(), settings.workers.to_string());
    let secret = match &settings.admission {
        Admission::Secret(secret) => secret.clone(),
        Admission::LoopbackOnly | Admission::Anyone => Secret::well_known(),
    };
    let mut instance = [0; 8];
    random(&mut instance)?;
    let meeting = Arc::new(Meeting {
        process,
        addresses: settings.addresses.clone(),
        identity,
        secret,
        instance: u64::from_be_bytes(instance),
        peer_deadline: settings.peer_deadline,
        deadline: Instant::now() + settings.connect_deadline,
        events,
        greetings: Arc::default(),
        state: Mutex::default(),
        over: Condvar::new(),
    });
    let greeter = Arc::clone(&meeting);
    let acceptor = Acceptor::start(listener, &meeting.greetings, move |stream, greeting| {
        greeter.accepted(stream, greeting);
    })?;
    let mut unaware: BTreeSet<usize> = (0..processes).filter(|&other| other != process).collect();
    let deadline = settings.connect_deadline;
    let result = meeting
        .start_connecting()
        .and_then(|()| meeting.gather(deadline, abort, control, &received, &mut unaware));
    if let Err(error) = &result {
        abort.abort(error.clone());
        // After the whole deadline there is no process left to wait for.
        if !matches!(error, ClusterError::Unreachable { .. }) {
            meeting.linger(control, &received, unaware);
        }
    }
    meeting.end();
    acceptor.stop();
    result
}

impl Meeting {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn peer(&self, process: usize) -> Peer {
        Peer { process, address: self.addresses[process].clone() }
    }

    fn hello(&self, purpose: Purpose) -> io::Result<Hello> {
        Ok(Hello {
            process: self.process,
            purpose,
            instance: self.instance,
            peer_deadline: self.peer_deadline,
            identity: self.identity.clone(),
            data_key: DataKey::generate().map_err(io::Error::other)?,
        })
    }

    /// The connection that two hellos have agreed on.
    fn link(&self, channel: Channel, ours: Hello, theirs: &Hello) -> io::Result<Link> {
        channel.stream().set_read_timeout(None)?;
        channel.stream().set_write_timeout(None)?;
        Ok(match ours.purpose {
            Purpose::Control => {
                Link::Control(channel, self.peer_deadline.max(theirs.peer_deadline))
            }
            Purpose::Data => Link::Data(DataLink {
                stream: Arc::clone(channel.stream()),
                keys: DataKeys { sending: ours.data_key, receiving: theirs.data_key.clone() },
            }),
        })
    }

    fn report(&self, event: Event) {
        // No thread listens any more once the meeting is over.
        let _ = self.events.send(event);
    }

    fn gather(
        &self,
        deadline: Duration,
        abort: &Abort,
        control: &Control,
        received: &Receiver<Event>,
        unaware: &mut BTreeSet<usize>,
    ) -> Result<Vec<Option<DataLink>>, ClusterError> {
        let both = |other: &usize| [(*other, Purpose::Control), (*other, Purpose::Data)];
        let mut missing: BTreeSet<(usize, Purpose)> = unaware.iter().flat_map(both).collect();
        let mut data: Vec<_> = self.addresses.iter().map(|_| None).collect();
        let mut last_failure = None;
        while !missing.is_empty() {
            let left = self.deadline.saturating_duration_since(Instant::now());
            match received.recv_timeout(left) {
                Ok(Event::Connected { process, link }) => {
                    missing.remove(&(process, link.purpose()));
                    match link {
                        Link::Control(channel, deadline) => {
                            unaware.remove(&process);
                            control.attach(self.peer(process), channel, deadline)?;
                        }
                        Link::Data(link) => data[process] = Some(link),
                    }
                }
                Ok(Event::NotYet(error)) => last_failure = Some(Arc::new(error)),
                Ok(Event::Failed(error, aware)) => {
                    aware.map(|process| unaware.remove(&process));
                    return Err(error);
                }
                Ok(Event::Aborted) => {}
                Err(_) => {
                    let missing: BTreeSet<usize> = missing.iter().map(|(peer, _)| *peer).collect();
                    return Err(ClusterError::Unreachable {
                        missing: missing.into_iter().map(|peer| self.peer(peer)).collect(),
                        deadline,
                        source: last_failure,
                    });
                }
            }
            if let Some(error) = abort.first_error() {
                return Err(error);
            }
        }
        Ok(data)
    }

    /// Keeps meeting processes for a moment after a failure: `control` tells each of them the
    /// error. A process that is not met would look for this one until its own deadline.
    fn linger(&self, control: &Control, received: &Receiver<Event>, mut unaware: BTreeSet<usize>) {
        let end = Instant::now() + LINGER;
        while !unaware.is_empty() {
            match received.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(Event::Connected { process, link: Link::Control(channel, deadline) }) => {
                    unaware.remove(&process);
                    // The first error counts: this one would be a second.
                    let _ = control.attach(self.peer(process), channel, deadline);
                }
                Ok(Event::Failed(_, Some(process))) => {
                    unaware.remove(&process);
                }
                Ok(_) => {}
                Err(_) => return,
            }
        }
    }

    /// Wakes and ends every thread of the meeting.
    fn end(&self) {
        self.lock().over = true;
        self.greetings.close();
        self.over.notify_all();
    }

    fn accepted(&self, stream: Arc<TcpStream>, mut greeting: Greeting) {
        let caller = stream.peer_addr().map_or("?".into(), |from| from.to_string());
        let greeted = self.greet(stream, &mut greeting);
        // Before the meeting can end: it cuts every greeting that goes on.
        drop(greeting);
        match greeted {
            Ok(Some((process, link))) => self.report(Event::Connected { process, link }),
            Ok(None) => {}
            Err(error) => {
                tracing::debug!(caller, %error, "dropped a caller");
                if error.kind() == io::ErrorKind::PermissionDenied {
                    let what = format!("the last caller, {caller}, was dropped: {error}");
                    self.report(Event::NotYet(io::Error::new(error.kind(), what)));
                }
            }
        }
    }

    /// The side that accepts. An error drops the caller without further consequence.
    fn greet(
        &self,
        stream: Arc<TcpStream>,
        greeting: &mut Greeting,
    ) -> io::Result<Option<(usize, Link)>> {
        let deadline = self.deadline.min(Instant::now() + GREETING_TIMEOUT);
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(GREETING_TIMEOUT))?;
        let channel = Channel::answer(stream, &self.secret, Between::Peers, deadline)?;
        let CallerSays::Hello(theirs) = channel.receive_until(deadline)? else {
            return Err(io::Error::other("no hello came first"));
        };
        // Only now: the handshake may have been recorded, the messages after it cannot be.
        greeting.known();
        let ours = self.hello(theirs.purpose)?;
        if let Some(disagreement) = compare(&ours, &theirs) {
            channel.send(&Reply::Welcome(ours))?;
            self.report(Event::Failed(disagreement, Some(theirs.process)));
            return Ok(None);
        }
        if let Err(reason) = self.admit(&theirs) {
            channel.send(&Reply::Refused(reason))?;
            return Ok(None);
        }
        let confirmed = channel
            .send(&Reply::Welcome(ours.clone()))
            .and_then(|()| channel.receive_until::<CallerSays>(deadline));
        if !self.settle(&theirs, matches!(confirmed, Ok(CallerSays::Confirm))) {
            confirmed?;
            return Err(io::Error::other("it called again meanwhile"));
        }
        Ok(Some((theirs.process, self.link(channel, ours, &theirs)?)))
    }

    fn admit(&self, theirs: &Hello) -> Result<(), String> {
        if theirs.process <= self.process || theirs.process >= self.addresses.len() {
            let found = self.process;
            return Err(format!("process {found} answers at an address of another process"));
        }
        let seat = Seat { instance: theirs.instance, confirmed: false };
        let mut state = self.lock();
        // A caller whose welcome was lost calls again.
        if *state.taken.entry((theirs.process, theirs.purpose)).or_insert(seat) == seat {
            return Ok(());
        }
        Err("a process with this index has joined before".to_string())
    }

    /// The end of a welcome: the caller has the place, or leaves it to another. Whether it has it.
    fn settle(&self, theirs: &Hello, confirmed: bool) -> bool {
        let waiting = Seat { instance: theirs.instance, confirmed: false };
        let mut state = self.lock();
        let place = (theirs.process, theirs.purpose);
        // An earlier call of the same process may have left it meanwhile.
        if state.taken.get(&place).is_some_and(|seat| *seat != waiting) {
            return false;
        }
        if confirmed {
            state.taken.insert(place, Seat { confirmed, ..waiting });
        } else {
            state.taken.remove(&place);
        }
        confirmed
    }

    fn start_connecting(self: &Arc<Self>) -> Result<(), ClusterError> {
        for process in 0..self.process {
            let meeting = Arc::clone(self);
            let name = format!("cluster:connect-{process}");
            std::thread::Builder::new()
                .name(name.clone())
                .spawn(move || {
                    for purpose in [Purpose::Control, Purpose::Data] {
                        if !meeting.connect(process, purpose) {
                            return;
                        }
                    }
                })
                .map_err(ClusterError::spawn(&name))?;
        }
        Ok(())
    }

    /// The side that connects: tries until it is answered, or the meeting is over.
    fn connect(&self, process: usize, purpose: Purpose) -> bool {
        let mut backoff = SHORTEST_BACKOFF;
        loop {
            match self.call(process, purpose) {
                Ok(Ok(link)) => {
                    self.report(Event::Connected { process, link });
                    return true;
                }
                Ok(Err(error)) => {
                    self.report(Event::Failed(error, Some(process)));
                    return false;
                }
                Err(error) => self.report(Event::NotYet(error)),
            }
            let not_over = |state: &mut State| !state.over;
            let waited = self.over.wait_timeout_while(self.lock(), backoff, not_over);
            if waited.unwrap_or_else(PoisonError::into_inner).0.over {
                return false;
            }
            backoff = (backoff * 2).min(LONGEST_BACKOFF);
        }
    }

    /// One attempt. The outer error is worth another one.
    fn call(&self, process: usize, purpose: Purpose) -> io::Result<Result<Link, ClusterError>> {
        let stream = Arc::new(dial(&self.addresses[process], self.deadline)?);
        let held = self.greetings.hold(&stream);
        let _held = held.ok_or(io::ErrorKind::ConnectionAborted)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(GREETING_TIMEOUT))?;
        // The peer may be busy before it answers: it has until the deadline.
        let channel = Channel::call(stream, &self.secret, Between::Peers, self.deadline)?;
        let ours = self.hello(purpose)?;
        channel.send(&CallerSays::Hello(ours.clone()))?;
        let theirs = match channel.receive_until(self.deadline)? {
            Reply::Welcome(theirs) => theirs,
            Reply::Refused(reason) => {
                return Ok(Err(ClusterError::Refused {
                    peer: self.peer(process),
                    process: self.process,
                    reason: printable(&reason, REASON_LIMIT_BYTES),
                }));
            }
        };
        if theirs.process != process {
            let (peer, found) = (self.peer(process), theirs.process);
            return Ok(Err(ClusterError::WrongPeer { peer, found }));
        }
        if let Some(disagreement) = compare(&ours, &theirs) {
            return Ok(Err(disagreement));
        }
        channel.send(&CallerSays::Confirm)?;
        Ok(Ok(self.link(channel, ours, &theirs)?))
    }
}

fn dial(address: &str, deadline: Instant) -> io::Result<TcpStream> {
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for candidate in address.to_socket_addrs()? {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match TcpStream::connect_timeout(&candidate, left.min(CONNECT_TIMEOUT)) {
            Ok(stream) => return Ok(stream),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}
