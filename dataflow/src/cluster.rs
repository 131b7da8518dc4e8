//! Running timely workers over threads, local processes and hosts, with every failure reported.
//!
//! [`execute`] runs a closure on each worker. Whatever fails, wherever it does (an operator, a
//! compute thread, a process, a host), every worker of every process ends within seconds and each
//! process gets the same first error. No call hangs, none ends the process.
//!
//! Panics are caught, which needs a profile that unwinds, as Cargo's profiles do. Where a program is built with
//! `panic = "abort"`, a panic of an operator, a guarded thread or a decoder of damaged data ends the whole process at once, with the
//! message that Rust prints. Its peers find it gone, as one that was killed, and a restart goes on from the last
//! checkpoint; but the program's own clean-up does not run.
//!
//! Several processes need the feature `processes`, whose encryption protects the messages between them. Without it workers are threads
//! of one process, and [`ClusterError::ThreadsAlone`] refuses more.
//!
//! Start here:
//! - [`ClusterSettings`], [`execute`] and [`WorkerContext`]: run something;
//! - [`EmbeddedRun`]: the same for workers of a `timely::execute` of one's own;
//! - [`Abort`]: end a run from a thread, and guard threads of one's own;
//! - [`progress`]: the phase of each thread, so that one that stands still is noticed and named;
//! - [`ClusterError`], [`Failure`], [`Classified`] and [`ExitClass`]: failures, and whether to restart;
//! - [`read_hosts`]: the addresses of a cluster from a file;
//! - [`Admission`] and [`Secret`]: which processes may join;
//! - [`Supervisor`], [`join_supervised`] and [`Lifeline`]: local processes that live and die
//!   together.
//!
//! ```
//! use tidemill::cluster::{ClusterSettings, execute};
//! use timely::dataflow::operators::{ToStream, vec::Map};
//!
//! let squares = execute(ClusterSettings::workers(2), |context| {
//!     let (sender, receiver) = std::sync::mpsc::channel();
//!     let index = context.index() as u64;
//!     context.dataflow::<u64, _, _>(|scope| {
//!         vec![index].to_stream(scope).container::<Vec<_>>().map(move |x| sender.send(x * x));
//!     });
//!     context.run_until_done()?;
//!     Ok(receiver.iter().sum::<u64>())
//! })?;
//! assert_eq!(squares, [0, 1]);
//! # Ok::<(), tidemill::cluster::ClusterError>(())
//! ```

mod abort;
mod acceptor;
mod channel;
#[cfg(feature = "processes")]
mod ciphers;
#[cfg(not(feature = "processes"))]
#[path = "cluster/no_ciphers.rs"]
mod ciphers;
mod classified;
mod control;
mod data_socket;
mod embedded;
mod error;
mod execute;
mod exit_class;
mod failure;
mod greetings;
mod hello;
mod hosts;
mod lifeline;
pub mod progress;
mod reach;
mod received;
mod rendezvous;
mod sealed;
mod secret;
mod supervisor;
mod timely_messages;
pub mod trace;
mod watch;

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

pub use abort::Abort;
pub use classified::Classified;
pub use embedded::EmbeddedRun;
pub(crate) use error::unshared;
pub use error::{Actor, ClusterError, Peer, SharedError};
pub use execute::{Cluster, WorkerContext, execute};
pub use exit_class::ExitClass;
pub use failure::{Aborted, Failure};
pub use hosts::read_hosts;
pub(crate) use hosts::{by_host, host};
pub use lifeline::{Invitation, Lifeline, Siblings, join_supervised};
pub use secret::Secret;
pub use supervisor::{
    ChildOutcome, Killed, StopHandle, Supervisor, SupervisorOutcome, SupervisorSettings,
};

/// Which processes may join a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Admission {
    /// Processes that know the same secret.
    Secret(Secret),
    /// Any process of this machine: every address must be a loopback address.
    #[default]
    LoopbackOnly,
    /// Any process that can reach the ports.
    Anyone,
}

/// How this process takes part in a cluster.
#[derive(Debug)]
pub struct ClusterSettings {
    /// Workers in each process.
    pub workers: usize,
    /// The index of this process.
    pub process: usize,
    /// `host:port` of every process, by index. One or none: there are no other processes.
    pub addresses: Vec<String>,
    /// The socket that listens at this process's address, where it is open already.
    pub listener: Option<TcpListener>,
    /// Which processes may join.
    pub admission: Admission,
    /// The news of its siblings, where a supervisor has started this process.
    pub siblings: Option<Siblings>,
    /// Settings that must be equal in all processes, compared when they meet: fingerprints of the
    /// configuration and of the data set, the kind of device.
    pub identity: BTreeMap<String, String>,
    /// How long the processes may take to meet.
    pub connect_deadline: Duration,
    /// How long a peer may be silent before it is taken for dead. Of two processes with different
    /// deadlines the longer one counts for both.
    pub peer_deadline: Duration,
    /// How much a peer may have sent that waits here to be consumed. A training run has a few
    /// megabytes on the way to each worker; beyond the limit the run ends.
    pub received_limit_bytes: usize,
    /// How long something may stand still, in this process or in a peer, before it is named and the run ends; without
    /// one nothing is watched. Threads say in [`progress`] that they move: those of a training graph do, within a step
    /// too.
    pub step_deadline: Option<Duration>,
    /// How long workers and guarded threads may take to end once the run is over, or aborted. Those that are left then are
    /// named by [`ClusterError::LeftBehind`].
    pub ending_deadline: Duration,
}

impl ClusterSettings {
    /// Workers in this process alone.
    pub fn workers(workers: usize) -> Self {
        Self {
            workers,
            process: 0,
            addresses: Vec::new(),
            listener: None,
            admission: Admission::default(),
            siblings: None,
            identity: BTreeMap::new(),
            connect_deadline: Duration::from_secs(60),
            peer_deadline: Duration::from_secs(30),
            received_limit_bytes: 2 << 30,
            step_deadline: None,
            // Longer than a device computes between two looks at the flag that ends a run, in all but the largest models.
            ending_deadline: Duration::from_secs(30),
        }
    }

    /// One process of a cluster: `workers` workers in each process, and the addresses of all
    /// processes.
    pub fn process(workers: usize, process: usize, addresses: Vec<String>) -> Self {
        Self { process, addresses, ..Self::workers(workers) }
    }

    /// One process of the cluster whose addresses are in a hosts file.
    ///
    /// # Errors
    /// If the file is wrong (see [`read_hosts`]) or the index is not one of its lines'.
    pub fn from_hosts(workers: usize, process: usize, hosts: &Path) -> Result<Self, ClusterError> {
        let settings = Self::process(workers, process, read_hosts(hosts)?);
        settings.check()?;
        Ok(settings)
    }

    /// Adds something that must be equal in all processes.
    pub fn with_identity(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.identity.insert(key.into(), value.into());
        self
    }

    /// How many processes there are.
    pub fn processes(&self) -> usize {
        self.addresses.len().max(1)
    }

    /// Whether the cluster may run with its [`Admission`]; looks its addresses up.
    ///
    /// # Errors
    /// [`ClusterError::NoSecret`] if any process is on a network, and there is no secret.
    pub fn check_admission(&self) -> Result<(), ClusterError> {
        if self.processes() == 1 || self.admission != Admission::LoopbackOnly {
            return Ok(());
        }
        match self.addresses.iter().find(|address| !reach::is_loopback(address)) {
            Some(address) => Err(ClusterError::NoSecret { address: address.clone() }),
            None => Ok(()),
        }
    }

    fn check(&self) -> Result<(), ClusterError> {
        if self.workers == 0 {
            return Err(ClusterError::Zero { setting: "the number of workers" });
        }
        if self.peer_deadline.is_zero() {
            return Err(ClusterError::Zero { setting: "the peer deadline" });
        }
        if self.step_deadline.is_some_and(|deadline| deadline.is_zero()) {
            return Err(ClusterError::Zero { setting: "the step deadline" });
        }
        if self.process >= self.processes() {
            let (process, processes) = (self.process, self.processes());
            return Err(ClusterError::ProcessIndex { process, processes });
        }
        if self.processes() > 1 && cfg!(not(feature = "processes")) {
            return Err(ClusterError::ThreadsAlone);
        }
        Ok(())
    }
}
