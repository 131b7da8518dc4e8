//! The errors of closures that run on workers and guarded threads.
//!
//! [`Failure`] is built by `?` from any error that says whether a restart could help ([`Classified`]), and keeps what that
//! says.

use std::error::Error;

use super::classified::Classified;
use super::error::{Actor, ClusterError};
use super::exit_class::ExitClass;

/// The run was aborted; the first error is in the [`Abort`](super::Abort) handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the run was aborted")]
pub struct Aborted;

impl Classified for Aborted {
    /// The class of a consequence: the first error has a class of its own.
    fn exit_class(&self) -> ExitClass {
        ExitClass::Restart
    }
}

/// An error with which a worker or a guarded thread ends, and whether a restart would help.
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

    /// Whether a restart would help.
    pub fn exit_class(&self) -> ExitClass {
        self.exit_class
    }

    /// The error itself.
    pub fn cause(&self) -> &(dyn Error + Send + Sync + 'static) {
        self.cause.as_ref()
    }

    /// The same failure as the error of `actor`.
    pub(super) fn into_error(self, actor: Actor) -> ClusterError {
        ClusterError::Failed { actor, exit_class: self.exit_class, cause: self.cause.into() }
    }
}

impl<E: Classified + Error + Send + Sync + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        Self { exit_class: error.exit_class(), cause: Box::new(error) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::error::Peer;
    use super::*;
    use std::io;

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
    fn causes_are_listed_once_each() {
        let inner = io::Error::other("disk on fire");
        let error = Failure::from(inner).into_error(Actor::Worker(3));
        assert_eq!(error.with_causes(), "worker 3 failed: disk on fire");
        assert_eq!(error.exit_class().exit_code(), 75);
    }
}
