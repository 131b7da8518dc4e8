//! Failures of a cluster, and whether a restart would help.
//!
//! [`ClusterError`] is `Clone`: the first error of a run is kept by the [`Abort`](super::Abort)
//! handle, sent to the peers, and returned to every caller.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::classified::Classified;
use super::exit_class::ExitClass;
use super::progress::Phase;

/// An error as it is shared between threads.
pub type SharedError = Arc<dyn Error + Send + Sync + 'static>;

/// The error itself where `error` is a shared one: the type of the pointer would otherwise hide the type of the error.
pub(crate) fn unshared<'a>(error: &'a (dyn Error + 'static)) -> &'a (dyn Error + 'static) {
    match error.downcast_ref::<SharedError>() {
        Some(shared) => shared.as_ref(),
        None => error,
    }
}

/// Another process of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    /// Its index.
    pub process: usize,
    /// Its `host:port`.
    pub address: String,
}

impl fmt::Display for Peer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "process {} ({})", self.process, self.address)
    }
}

/// Which part of this process failed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Actor {
    /// A timely worker, by its index in the whole cluster.
    Worker(usize),
    /// A thread started by [`Abort::guard_thread`](super::Abort::guard_thread), by its name.
    Thread(String),
}

impl fmt::Display for Actor {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Worker(index) => write!(formatter, "worker {index}"),
            Self::Thread(name) => write!(formatter, "thread {name}"),
        }
    }
}

/// Everything that ends or prevents a run on a cluster.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// A worker's closure or a guarded thread returned an error.
    #[error("{actor} failed")]
    Failed {
        /// The worker or thread that returned it.
        actor: Actor,
        /// Whether a restart would help.
        exit_class: ExitClass,
        /// The error itself.
        #[source]
        cause: SharedError,
    },
    /// A worker (its closure or an operator) or a guarded thread panicked.
    #[error("{actor} panicked: {message}")]
    Panicked {
        /// The worker or thread that panicked.
        actor: Actor,
        /// The panic's message.
        message: String,
    },
    /// Another process ended the run and said why.
    #[error("{peer} ended the run: {message}")]
    Reported {
        /// The process in which the first error occurred.
        peer: Peer,
        /// Whether a restart would help.
        exit_class: ExitClass,
        /// That process's first error, with its causes.
        message: String,
    },
    /// A peer's control connection closed before the run was over.
    #[error("{peer} ended unexpectedly")]
    PeerEnded {
        /// The process that is gone.
        peer: Peer,
    },
    /// A peer has sent no heartbeat within the deadline.
    #[error("{peer} has been silent for {} s", deadline.as_secs_f64())]
    PeerSilent {
        /// The process that is silent.
        peer: Peer,
        /// `peer_deadline` of the settings.
        deadline: Duration,
    },
    /// Something has not moved for longer than the step deadline.
    #[error(
        "{} has stood still for {} s, the step deadline, {}: {phase}",
        named(actor.as_ref(), peer.as_ref()),
        deadline.as_secs_f64(),
        in_step(*step)
    )]
    StoodStill {
        /// The worker or thread, where that is known.
        actor: Option<Actor>,
        /// The process in which it is, where that is another.
        peer: Option<Peer>,
        /// The step in hand, from 1; 0 before the first.
        step: u64,
        /// The phase that the worker is in.
        phase: Phase,
        /// `step_deadline` of the settings.
        deadline: Duration,
    },
    /// The run is over, but some of its threads are not: their memory is not free.
    #[error("{} did not end within {} s of the end of the run", list(left), deadline.as_secs_f64())]
    LeftBehind {
        /// The threads that are left.
        left: Vec<Actor>,
        /// `ending_deadline` of the settings.
        deadline: Duration,
        /// The error that ended the run, if there was one.
        #[source]
        cause: Option<Arc<ClusterError>>,
    },
    /// A data connection broke and nothing explained it.
    #[error("the data connection to {peer} broke")]
    DataConnection {
        /// The process at the other end.
        peer: Peer,
        /// The error that the socket reported.
        #[source]
        source: Arc<io::Error>,
    },
    /// A peer sent bytes that no process of this cluster sends: it, or something on the way, is not to be
    /// trusted.
    #[error("{peer} sent {found}")]
    Protocol {
        /// The process at the other end.
        peer: Peer,
        /// The message that came.
        found: String,
    },
    /// Two processes were started with different settings or data.
    #[error(
        "peers disagree on {key}: process {process} has {value}, process {other} has {other_value}"
    )]
    Disagreement {
        /// The key that differs.
        key: String,
        /// The lower process index.
        process: usize,
        /// Its value.
        value: String,
        /// The higher process index.
        other: usize,
        /// Its value.
        other_value: String,
    },
    /// A peer did not accept this process.
    #[error("{peer} refused process {process}: {reason}")]
    Refused {
        /// The process that refused.
        peer: Peer,
        /// The index of this process.
        process: usize,
        /// Why.
        reason: String,
    },
    /// Another process than expected listens at an address.
    #[error("{peer} was expected, but process {found} answers there")]
    WrongPeer {
        /// The process that the addresses name.
        peer: Peer,
        /// The index with which it answered.
        found: usize,
    },
    /// Not all processes met within the connect deadline.
    #[error("no connection within {} s to {}", deadline.as_secs_f64(), list(missing))]
    Unreachable {
        /// The processes that are missing.
        missing: Vec<Peer>,
        /// `connect_deadline` of the settings.
        deadline: Duration,
        /// The last error of an attempt to connect, where this process made one.
        #[source]
        source: Option<Arc<io::Error>>,
    },
    /// This process cannot listen at its own address.
    #[error("cannot listen at {address}")]
    Bind {
        /// The address.
        address: String,
        /// Why not.
        #[source]
        source: Arc<io::Error>,
    },
    /// The address of this process means this machine, to every machine.
    #[error(
        "cannot listen at {address} for processes on other machines ({other}): it is a loopback \
         address, so give the hosts file one that they can reach"
    )]
    LoopbackAmongMachines {
        /// This process's address.
        address: String,
        /// The address of a process elsewhere.
        other: String,
    },
    /// A cluster over several machines has no secret.
    #[error(
        "{address} is on a network, and without a secret any caller that reaches its ports can \
         join it: set TIDEMILL_CLUSTER_SECRET to the same text on every machine (openssl rand -hex \
         32 makes one), or TIDEMILL_CLUSTER_SECRET_FILE to a file with it, or give --insecure"
    )]
    NoSecret {
        /// The first address that is not on this machine alone.
        address: String,
    },
    /// The secret is given twice.
    #[error("both {variable} and {other} are set: expected one of them")]
    SecretTwice {
        /// A variable that gives it.
        variable: &'static str,
        /// Another.
        other: &'static str,
    },
    /// The file of the secret cannot be read.
    #[error("cannot read the cluster's secret from {}", path.display())]
    SecretUnreadable {
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: Arc<io::Error>,
    },
    /// Others may read or write the file of the secret.
    #[error(
        "the cluster's secret in {path} can be read or changed by other users (mode {mode:o}): \
         chmod 600 {path}", path = path.display()
    )]
    SecretExposed {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// The secret is too short to be one, or too long.
    #[error(
        "the cluster's secret in {origin} must have 16 to 4096 bytes, found {found} (openssl rand \
         -hex 32 makes one)"
    )]
    SecretLength {
        /// Where it comes from.
        origin: String,
        /// How many bytes it has.
        found: usize,
    },
    /// Several processes, in a build that has no encryption for their messages.
    #[error(
        "several processes need encryption between them, which this build leaves out: expected the feature `processes` of \
         tidemill, or threads alone"
    )]
    ThreadsAlone,
    /// The system gives no random numbers.
    #[error("the system gives no random numbers for keys")]
    NoRandomNumbers,
    /// An operation on one of our own sockets failed.
    #[error("cannot {action}")]
    Socket {
        /// The attempted action.
        action: &'static str,
        /// The error that the system reported.
        #[source]
        source: Arc<io::Error>,
    },
    /// A thread could not be started.
    #[error("cannot start thread {name}")]
    Spawn {
        /// The thread's name.
        name: String,
        /// The error that the system reported.
        #[source]
        source: Arc<io::Error>,
    },
    /// Timely could not start its workers.
    #[error("cannot start the workers: {message}")]
    Workers {
        /// The error that timely reported.
        message: String,
    },
    /// The process index is not one of the cluster's.
    #[error(
        "process index {process} is out of range: the cluster has {processes} processes, from 0"
    )]
    ProcessIndex {
        /// The index asked for.
        process: usize,
        /// How many processes there are.
        processes: usize,
    },
    /// A setting that must not be zero is zero.
    #[error("{setting} must be at least 1, found 0")]
    Zero {
        /// The setting's name.
        setting: &'static str,
    },
    /// The hosts file cannot be read.
    #[error("cannot read the hosts file {}", path.display())]
    HostsUnreadable {
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: Arc<io::Error>,
    },
    /// A line of the hosts file is wrong.
    #[error("{}, line {line}: expected {expected}, found {found:?}", path.display())]
    HostsLine {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The form that a line must have.
        expected: String,
        /// The line's text.
        found: String,
    },
    /// The hosts file names no host.
    #[error("the hosts file {} names no host: expected one host:port a line", path.display())]
    HostsEmpty {
        /// The file.
        path: PathBuf,
    },
    /// The text that invites a process to its supervisor is wrong.
    #[error("expected an invitation as the supervisor writes it (address/process/secret)")]
    Invitation,
    /// A process was asked to stop before all had met. Nothing has begun, and nothing is lost.
    #[error("stopped before all processes had met")]
    StoppedEarly,
    /// Another process of the supervisor ended before all had joined.
    #[error("process {process} ended before all processes had joined")]
    SiblingEnded {
        /// Its index.
        process: usize,
    },
    /// The supervisor cannot be reached, or ended before this process was placed in its cluster.
    #[error("lost the supervisor at {address}")]
    SupervisorLost {
        /// Its address.
        address: String,
        /// The error that the connection reported.
        #[source]
        source: Arc<io::Error>,
    },
    /// The supervisor could not start a process.
    #[error("cannot start process {process} ({program})")]
    StartProcess {
        /// The index it would have had.
        process: usize,
        /// The program.
        program: String,
        /// The error that the system reported.
        #[source]
        source: Arc<io::Error>,
    },
}

impl ClusterError {
    /// Whether a restart would help.
    pub fn exit_class(&self) -> ExitClass {
        match self {
            Self::Failed { exit_class, .. } | Self::Reported { exit_class, .. } => *exit_class,
            Self::LeftBehind { cause: Some(cause), .. } => cause.exit_class(),
            // An address that is not this machine's, or a port that it may not have.
            Self::Bind { source, .. } if source.kind() == io::ErrorKind::AddrNotAvailable => {
                ExitClass::FixInput
            }
            Self::Bind { source, .. }
            | Self::HostsUnreadable { source, .. }
            | Self::SecretUnreadable { source, .. } => source.exit_class(),
            Self::Disagreement { .. }
            | Self::Refused { .. }
            | Self::WrongPeer { .. }
            | Self::LoopbackAmongMachines { .. }
            | Self::NoSecret { .. }
            | Self::ThreadsAlone
            | Self::SecretTwice { .. }
            | Self::SecretExposed { .. }
            | Self::SecretLength { .. }
            | Self::ProcessIndex { .. }
            | Self::Zero { .. }
            | Self::HostsLine { .. }
            | Self::HostsEmpty { .. }
            | Self::Invitation => ExitClass::FixInput,
            Self::Panicked { .. }
            | Self::PeerEnded { .. }
            | Self::PeerSilent { .. }
            | Self::StoodStill { .. }
            | Self::LeftBehind { .. }
            | Self::DataConnection { .. }
            | Self::Protocol { .. }
            | Self::StoppedEarly
            | Self::SiblingEnded { .. }
            | Self::NoRandomNumbers
            | Self::Unreachable { .. }
            | Self::Socket { .. }
            | Self::Spawn { .. }
            | Self::Workers { .. }
            | Self::StartProcess { .. }
            | Self::SupervisorLost { .. } => ExitClass::Restart,
        }
    }

    /// The message and the messages of its sources, each after a colon: the text for the peers.
    pub fn with_causes(&self) -> String {
        let mut text = self.to_string();
        let mut link = self.source();
        while let Some(error) = link {
            text.push_str(": ");
            text.push_str(&error.to_string());
            link = error.source();
        }
        text
    }

    pub(super) fn socket(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Socket { action, source: Arc::new(source) }
    }

    pub(super) fn spawn(name: &str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Spawn { name: name.to_string(), source: Arc::new(source) }
    }
}

impl Classified for ClusterError {
    fn exit_class(&self) -> ExitClass {
        Self::exit_class(self)
    }
}

/// The text of a caught panic.
pub(super) fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    if let Some(text) = payload.downcast_ref::<&str>() {
        (*text).to_string()
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.clone()
    } else {
        "a panic without a message".to_string()
    }
}

fn list(things: &[impl fmt::Display]) -> String {
    things.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn named(actor: Option<&Actor>, peer: Option<&Peer>) -> String {
    match (actor, peer) {
        (Some(actor), Some(peer)) => format!("{actor} of {peer}"),
        (Some(actor), None) => actor.to_string(),
        (None, Some(peer)) => peer.to_string(),
        (None, None) => "this process".into(),
    }
}

fn in_step(step: u64) -> String {
    if step == 0 { "before its first step".into() } else { format!("in step {step}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hosts_file_on_a_failing_disk_is_not_the_inputs_fault() {
        let unreadable = |number| ClusterError::HostsUnreadable {
            path: "hosts".into(),
            source: Arc::new(io::Error::from_raw_os_error(number)),
        };
        let (no_such_file, input_output) = (2, 5);
        assert_eq!(unreadable(no_such_file).exit_class(), ExitClass::FixInput);
        assert_eq!(unreadable(input_output).exit_class(), ExitClass::Restart);
    }
}
