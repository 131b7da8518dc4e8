//! What can go wrong in a cluster, and what a restart would do about it.
//!
//! [`ClusterError`] is `Clone`: the first error of a run is kept by the [`Abort`](super::Abort)
//! handle, sent to the peers, and returned to every caller. [`Failure`] is the error type of the
//! closures that run on workers and guarded threads. It is built by `?` from any error that says whether a restart could
//! help ([`Classified`]), and keeps what that says.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::classified::Classified;
use super::exit_class::ExitClass;

/// An error as it is shared between threads.
pub type SharedError = Arc<dyn Error + Send + Sync + 'static>;

/// The error itself where `error` is a shared one, whose type would otherwise be hidden by that of the pointer.
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

/// The run was aborted; the first error is in the [`Abort`](super::Abort) handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the run was aborted")]
pub struct Aborted;

impl Classified for Aborted {
    /// That of a consequence: the first error has one of its own.
    fn exit_class(&self) -> ExitClass {
        ExitClass::Restart
    }
}

/// An error with which a worker or a guarded thread ends, and what a restart would do about it.
///
/// An error that is [`Classified`] becomes a `Failure` of its class by `?`. Any other (also `anyhow::Error`, `String` and
/// `&str`) becomes one by [`Failure::restart`] or [`Failure::fix_input`].
#[derive(Debug)]
pub struct Failure {
    exit_class: ExitClass,
    cause: Box<dyn Error + Send + Sync>,
}

impl Failure {
    /// A failure of the given class.
    pub fn new(exit_class: ExitClass, cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { exit_class, cause: cause.into() }
    }

    /// A failure that would come again: something that the run was given is wrong.
    pub fn fix_input(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::new(ExitClass::FixInput, cause)
    }

    /// A failure that a restart from the last checkpoint may cure.
    pub fn restart(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::new(ExitClass::Restart, cause)
    }

    /// What a restart would do about it.
    pub fn exit_class(&self) -> ExitClass {
        self.exit_class
    }

    /// The error itself.
    pub fn cause(&self) -> &(dyn Error + Send + Sync + 'static) {
        self.cause.as_ref()
    }

    /// The same failure as the error of `who`.
    pub(super) fn into_error(self, who: Actor) -> ClusterError {
        ClusterError::Failed { who, exit_class: self.exit_class, cause: self.cause.into() }
    }
}

impl<E: Classified + Error + Send + Sync + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        Self { exit_class: error.exit_class(), cause: Box::new(error) }
    }
}

/// Everything that ends or prevents a run on a cluster.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// A worker's closure or a guarded thread returned an error.
    #[error("{who} failed")]
    Failed {
        /// Who returned it.
        who: Actor,
        /// What a restart would do about it.
        exit_class: ExitClass,
        /// The error itself.
        #[source]
        cause: SharedError,
    },
    /// A worker (its closure or an operator) or a guarded thread panicked.
    #[error("{who} panicked: {message}")]
    Panicked {
        /// Who panicked.
        who: Actor,
        /// The panic's message.
        message: String,
    },
    /// Another process ended the run and said why.
    #[error("{peer} ended the run: {message}")]
    Reported {
        /// The process in which the first error occurred.
        peer: Peer,
        /// What a restart would do about it.
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
    /// A data connection broke and nothing explained it.
    #[error("the data connection to {peer} broke")]
    DataConnection {
        /// The process at the other end.
        peer: Peer,
        /// What the socket reported.
        #[source]
        source: Arc<io::Error>,
    },
    /// Two processes were started with different settings or data.
    #[error(
        "peers disagree on {key}: process {process} has {value}, process {other} has {other_value}"
    )]
    Disagreement {
        /// What differs.
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
    /// An operation on one of our own sockets failed.
    #[error("cannot {action}")]
    Socket {
        /// What was attempted.
        action: &'static str,
        /// What the system reported.
        #[source]
        source: Arc<io::Error>,
    },
    /// A thread could not be started.
    #[error("cannot start thread {name}")]
    Spawn {
        /// The thread's name.
        name: String,
        /// What the system reported.
        #[source]
        source: Arc<io::Error>,
    },
    /// Timely could not start its workers.
    #[error("cannot start the workers: {message}")]
    Workers {
        /// What timely reported.
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
        /// What a line must be.
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
    #[error("expected an invitation as the supervisor writes it (address/token), found {found:?}")]
    Invitation {
        /// The text.
        found: String,
    },
    /// The supervisor cannot be reached, or ended before this process was placed in its cluster.
    #[error("lost the supervisor at {address}")]
    SupervisorLost {
        /// Its address.
        address: String,
        /// What the connection reported.
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
        /// What the system reported.
        #[source]
        source: Arc<io::Error>,
    },
}

impl ClusterError {
    /// What a restart would do about it.
    pub fn exit_class(&self) -> ExitClass {
        match self {
            Self::Failed { exit_class, .. } | Self::Reported { exit_class, .. } => *exit_class,
            // An address that is not this machine's, or a port that it may not have.
            Self::Bind { source, .. } if source.kind() == io::ErrorKind::AddrNotAvailable => {
                ExitClass::FixInput
            }
            Self::Bind { source, .. } | Self::HostsUnreadable { source, .. } => source.exit_class(),
            Self::Disagreement { .. }
            | Self::Refused { .. }
            | Self::WrongPeer { .. }
            | Self::ProcessIndex { .. }
            | Self::Zero { .. }
            | Self::HostsLine { .. }
            | Self::HostsEmpty { .. }
            | Self::Invitation { .. } => ExitClass::FixInput,
            Self::Panicked { .. }
            | Self::PeerEnded { .. }
            | Self::PeerSilent { .. }
            | Self::DataConnection { .. }
            | Self::Unreachable { .. }
            | Self::Socket { .. }
            | Self::Spawn { .. }
            | Self::Workers { .. }
            | Self::StartProcess { .. }
            | Self::SupervisorLost { .. } => ExitClass::Restart,
        }
    }

    /// The message followed by those of its sources, each after a colon: what the peers are told.
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

fn list(peers: &[Peer]) -> String {
    peers.iter().map(Peer::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_takes_the_class_of_its_error() {
        let peer = Peer { process: 1, address: "host:1".into() };
        let restart = Failure::from(ClusterError::PeerEnded { peer });
        assert_eq!(restart.exit_class(), ExitClass::Restart);
        let input = Failure::from(ClusterError::Zero { setting: "threads" });
        assert_eq!(input.exit_class(), ExitClass::FixInput);
        assert_eq!(Failure::from(Aborted).exit_class(), ExitClass::Restart);
        assert_eq!(Failure::fix_input("text").exit_class(), ExitClass::FixInput);
        assert_eq!(Failure::restart("text").exit_class(), ExitClass::Restart);
    }

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

    #[test]
    fn causes_are_listed_once_each() {
        let inner = io::Error::other("disk on fire");
        let error = Failure::from(inner).into_error(Actor::Worker(3));
        assert_eq!(error.with_causes(), "worker 3 failed: disk on fire");
        assert_eq!(error.exit_class().exit_code(), 75);
    }
}
