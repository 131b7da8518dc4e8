//! How the processes of a cluster find each other.
//!
//! Every process listens at its own address, connects to the processes of lower index and accepts
//! those of higher index: one control and one data connection for each pair. Both sides say who
//! they are, how they were started and what their identity is, and compare. Whoever greets
//! differently is a stranger and is dropped; it can delay nobody, as each greeting has its own
//! thread and a time limit. Everything ends at one deadline, with an error that names who is
//! missing.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::ClusterSettings;
use super::abort::Abort;
use super::acceptor::Acceptor;
use super::control::Control;
use super::error::{ClusterError, Peer};
use super::frame::{UntilDeadline, read_frame, read_magic, write_frame, write_magic};

const PROTOCOL: u32 = 1;
/// How long a caller has to say who it is.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// How long one attempt to connect may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const SHORTEST_BACKOFF: Duration = Duration::from_millis(20);
const LONGEST_BACKOFF: Duration = Duration::from_millis(500);
/// How long a process that has failed waits for those that do not know yet.
const LINGER: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Purpose {
    Control,
    Data,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Hello {
    process: usize,
    purpose: Purpose,
    /// How this process was started and what it holds: must be equal everywhere.
    identity: BTreeMap<String, String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Reply {
    Welcome(Hello),
    Refused(String),
}

enum Event {
    Connected {
        process: usize,
        purpose: Purpose,
        stream: TcpStream,
    },
    NotYet(io::Error),
    /// With the process that knows of it too, if one does.
    Failed(ClusterError, Option<usize>),
    Aborted,
}

/// What the greeting threads share.
struct Meeting {
    process: usize,
    addresses: Vec<String>,
    identity: BTreeMap<String, String>,
    deadline: Instant,
    events: Sender<Event>,
    state: Mutex<State>,
    over: Condvar,
    next_greeting: AtomicU64,
}

#[derive(Default)]
struct State {
    over: bool,
    taken: BTreeSet<(usize, Purpose)>,
    /// Sockets on which a thread may be waiting.
    greeting: BTreeMap<u64, TcpStream>,
}

/// Connects this process with all others. Control connections go to `control`; the data
/// connections are returned by process index, `None` at our own.
pub(super) fn meet(
    settings: &mut ClusterSettings,
    abort: &Abort,
    control: &Control,
) -> Result<Vec<Option<TcpStream>>, ClusterError> {
    let (process, processes) = (settings.process, settings.addresses.len());
    let listener = match settings.listener.take() {
        Some(listener) => listener,
        None => bind(&settings.addresses[process])?,
    };
    let (events, received) = mpsc::channel();
    let wake = events.clone();
    abort.on_abort(move || {
        let _ = wake.send(Event::Aborted);
    });
    let mut identity = settings.identity.clone();
    identity.insert("cluster protocol".into(), PROTOCOL.to_string());
    identity.insert("number of processes".into(), processes.to_string());
    identity.insert("workers per process".into(), settings.threads.to_string());
    let meeting = Arc::new(Meeting {
        process,
        addresses: settings.addresses.clone(),
        identity,
        deadline: Instant::now() + settings.connect_deadline,
        events,
        state: Mutex::default(),
        over: Condvar::new(),
        next_greeting: AtomicU64::new(0),
    });
    let greeter = Arc::clone(&meeting);
    let acceptor = Acceptor::start(listener, move |connection| greeter.accepted(connection))?;
    let mut unaware: BTreeSet<usize> = (0..processes).filter(|&other| other != process).collect();
    let deadline = settings.connect_deadline;
    let result = meeting
        .start_connecting()
        .and_then(|()| meeting.gather(deadline, abort, control, &received, &mut unaware));
    if let Err(error) = &result {
        abort.abort(error.clone());
        // After the whole deadline there is nobody left to wait for.
        if !matches!(error, ClusterError::Unreachable { .. }) {
            meeting.linger(control, &received, unaware);
        }
    }
    meeting.end();
    acceptor.stop();
    result
}

fn bind(address: &str) -> Result<TcpListener, ClusterError> {
    TcpListener::bind(address).map_err(|source| ClusterError::Bind {
        address: address.to_string(),
        source: Arc::new(source),
    })
}

impl Meeting {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn peer(&self, process: usize) -> Peer {
        Peer { process, address: self.addresses[process].clone() }
    }

    fn hello(&self, purpose: Purpose) -> Hello {
        Hello { process: self.process, purpose, identity: self.identity.clone() }
    }

    fn report(&self, event: Event) {
        // Nobody listens any more once the meeting is over.
        let _ = self.events.send(event);
    }

    fn gather(
        &self,
        deadline: Duration,
        abort: &Abort,
        control: &Control,
        received: &Receiver<Event>,
        unaware: &mut BTreeSet<usize>,
    ) -> Result<Vec<Option<TcpStream>>, ClusterError> {
        let both = |other: &usize| [(*other, Purpose::Control), (*other, Purpose::Data)];
        let mut missing: BTreeSet<(usize, Purpose)> = unaware.iter().flat_map(both).collect();
        let mut data: Vec<_> = self.addresses.iter().map(|_| None).collect();
        let mut last_failure = None;
        while !missing.is_empty() {
            let left = self.deadline.saturating_duration_since(Instant::now());
            match received.recv_timeout(left) {
                Ok(Event::Connected { process, purpose, stream }) => {
                    missing.remove(&(process, purpose));
                    match purpose {
                        Purpose::Control => {
                            unaware.remove(&process);
                            control.attach(self.peer(process), stream)?;
                        }
                        Purpose::Data => data[process] = Some(stream),
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
    /// error. Whoever is not met would look for us until its own deadline.
    fn linger(&self, control: &Control, received: &Receiver<Event>, mut unaware: BTreeSet<usize>) {
        let end = Instant::now() + LINGER;
        while !unaware.is_empty() {
            match received.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(Event::Connected { process, purpose: Purpose::Control, stream }) => {
                    unaware.remove(&process);
                    // The first error is what counts: this one would be a second.
                    let _ = control.attach(self.peer(process), stream);
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
        let mut state = self.lock();
        state.over = true;
        for stream in state.greeting.values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.over.notify_all();
    }

    /// Runs a greeting on a socket that [`Meeting::end`] can cut.
    fn cuttable<R>(
        &self,
        stream: &TcpStream,
        greet: impl FnOnce() -> io::Result<R>,
    ) -> io::Result<R> {
        let id = self.next_greeting.fetch_add(1, Ordering::Relaxed);
        {
            let mut state = self.lock();
            if state.over {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            state.greeting.insert(id, stream.try_clone()?);
        }
        let result = greet();
        self.lock().greeting.remove(&id);
        result
    }

    fn accepted(self: &Arc<Self>, connection: io::Result<TcpStream>) {
        let stream = match connection {
            Ok(stream) => stream,
            Err(error) => {
                let error = ClusterError::socket("accept connections")(error);
                return self.report(Event::Failed(error, None));
            }
        };
        let meeting = Arc::clone(self);
        let spawned =
            std::thread::Builder::new().name("cluster:greet".to_string()).spawn(move || {
                match meeting.greet(&stream) {
                    Ok((process, purpose)) => {
                        meeting.report(Event::Connected { process, purpose, stream });
                    }
                    Err(error) => {
                        let caller = stream.peer_addr().map_or("?".into(), |from| from.to_string());
                        tracing::debug!(caller, %error, "dropped a caller");
                    }
                }
            });
        if let Err(error) = spawned {
            self.report(Event::Failed(ClusterError::spawn("cluster:greet")(error), None));
        }
    }

    /// The side that accepts. An error drops the caller without further consequence.
    fn greet(&self, stream: &TcpStream) -> io::Result<(usize, Purpose)> {
        let deadline = self.deadline.min(Instant::now() + GREETING_TIMEOUT);
        self.cuttable(stream, || {
            stream.set_nodelay(true)?;
            stream.set_write_timeout(Some(GREETING_TIMEOUT))?;
            read_magic(UntilDeadline::new(stream, deadline))?;
            let theirs: Hello = read_frame(UntilDeadline::new(stream, deadline))?;
            write_magic(stream)?;
            let ours = self.hello(theirs.purpose);
            if let Some(disagreement) = compare(&ours, &theirs) {
                write_frame(stream, &Reply::Welcome(ours))?;
                self.report(Event::Failed(disagreement, Some(theirs.process)));
                return Err(io::Error::other("peers disagree"));
            }
            if let Err(reason) = self.admit(&theirs) {
                write_frame(stream, &Reply::Refused(reason))?;
                return Err(io::Error::other("refused"));
            }
            write_frame(stream, &Reply::Welcome(ours))?;
            stream.set_read_timeout(None)?;
            stream.set_write_timeout(None)?;
            Ok((theirs.process, theirs.purpose))
        })
    }

    fn admit(&self, theirs: &Hello) -> Result<(), String> {
        if theirs.process <= self.process || theirs.process >= self.addresses.len() {
            let found = self.process;
            return Err(format!("process {found} answers at an address of another process"));
        }
        if !self.lock().taken.insert((theirs.process, theirs.purpose)) {
            return Err("a process with this index has joined before".to_string());
        }
        Ok(())
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
                Ok(Ok(stream)) => {
                    self.report(Event::Connected { process, purpose, stream });
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
    fn call(
        &self,
        process: usize,
        purpose: Purpose,
    ) -> io::Result<Result<TcpStream, ClusterError>> {
        let stream = dial(&self.addresses[process], self.deadline)?;
        let ours = self.hello(purpose);
        let reply = self.cuttable(&stream, || {
            stream.set_nodelay(true)?;
            write_magic(&stream)?;
            write_frame(&stream, &ours)?;
            // The peer may be busy before it answers: it has until the deadline.
            read_magic(UntilDeadline::new(&stream, self.deadline))?;
            let reply = read_frame(UntilDeadline::new(&stream, self.deadline))?;
            stream.set_read_timeout(None)?;
            Ok(reply)
        })?;
        Ok(match reply {
            Reply::Refused(reason) => Err(ClusterError::Refused {
                peer: self.peer(process),
                process: self.process,
                reason,
            }),
            Reply::Welcome(theirs) if theirs.process != process => {
                Err(ClusterError::WrongPeer { peer: self.peer(process), found: theirs.process })
            }
            Reply::Welcome(theirs) => match compare(&ours, &theirs) {
                Some(disagreement) => Err(disagreement),
                None => Ok(stream),
            },
        })
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

/// The first key, in byte order, on which two processes disagree: the same error on both sides.
fn compare(ours: &Hello, theirs: &Hello) -> Option<ClusterError> {
    let (low, high) = if ours.process <= theirs.process { (ours, theirs) } else { (theirs, ours) };
    let keys: BTreeSet<&String> = low.identity.keys().chain(high.identity.keys()).collect();
    let key = keys.into_iter().find(|key| low.identity.get(*key) != high.identity.get(*key))?;
    let value =
        |hello: &Hello| hello.identity.get(key).map_or("nothing", String::as_str).to_string();
    Some(ClusterError::Disagreement {
        key: key.clone(),
        process: low.process,
        value: value(low),
        other: high.process,
        other_value: value(high),
    })
}
