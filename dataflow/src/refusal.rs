//! Refusals of a device, in one line that says which setting to change.
//!
//! The setting to change depends on the command, so each command gives its own [`Advice`] to a [`Refusal`].

use std::error::Error;

use tidemill_kernels::KernelError;

use crate::cluster::{ClusterError, SharedError, unshared};
use crate::error::JobError;

/// The settings to change, in the words of the command that was given.
pub(crate) struct Advice {
    /// The subject that has no room on a device, such as "the run".
    pub what: &'static str,
    /// Ways to make room, or the devices that would have room.
    pub room: String,
    /// The setting that makes the CPU compute.
    pub cpu: &'static str,
}

/// Why a device will refuse again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It has no room.
    OutOfMemory,
    /// Its compiler did not take a kernel.
    Compile {
        /// Which kernel, and the first error.
        message: String,
    },
}

impl Refusal {
    /// The refusal behind `error`, if there is one. A compiler's whole log goes to the debug log.
    pub(crate) fn of(error: &(dyn Error + 'static)) -> Option<Self> {
        let mut link = Some(error);
        while let Some(error) = link.map(unshared) {
            match error.downcast_ref() {
                Some(KernelError::OutOfMemory { .. }) => return Some(Self::OutOfMemory),
                Some(KernelError::Compile { log, .. }) => {
                    tracing::debug!("the compiler's log:\n{log}");
                    return Some(Self::Compile { message: error.to_string() });
                }
                _ => link = error.source(),
            }
        }
        None
    }

    /// The error that names the setting to change.
    pub(crate) fn advised(self, advice: Advice, cause: SharedError) -> JobError {
        let Advice { what, room, cpu } = advice;
        match self {
            Self::OutOfMemory => JobError::OutOfMemory { what, advice: room, cause },
            Self::Compile { message } => JobError::Compile { message, cpu },
        }
    }
}

/// `error` without the worker that noticed it, which is no help in choosing the setting to change.
pub(crate) fn cause_alone(error: ClusterError) -> SharedError {
    match error {
        ClusterError::Failed { cause, .. } => cause,
        other => std::sync::Arc::new(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Actor, ExitClass};
    use std::sync::Arc;
    use tidemill_model::ModelError;

    const LOG: &str =
        "\nIn file included from scan.cu:3:\n  scan.cu(7): error: no such type\n1 error detected\n";

    fn compile() -> KernelError {
        let (source_name, architecture) = ("scan.cu", "sm_90a".to_owned());
        KernelError::Compile { source_name, architecture, log: LOG.to_owned() }
    }

    #[test]
    fn a_peer_is_told_the_first_error_of_a_compiler() {
        let told = "compiling scan.cu for sm_90a failed: scan.cu(7): error: no such type";
        let causes: [(&str, SharedError); 2] = [
            ("a kernel failed: ", Arc::new(ModelError::from(compile()))),
            ("", Arc::new(compile())),
        ];
        for (between, cause) in causes {
            let (actor, exit_class) = (Actor::Thread("device-0".to_owned()), ExitClass::FixInput);
            let error = ClusterError::Failed { actor, exit_class, cause };
            let expected = format!("thread device-0 failed: {between}{told}");
            assert_eq!(error.with_causes(), expected);
            assert!(Refusal::of(&error).is_some());
        }
    }

    #[test]
    fn a_refusal_says_what_to_change() {
        let advice = || Advice { what: "the model", room: "use less".to_owned(), cpu: "--cpu" };
        let said = |error: KernelError| {
            let error = JobError::from(ModelError::from(error));
            Refusal::of(&error)
                .map(|refusal| refusal.advised(advice(), Arc::new(error)).to_string())
        };
        let full = KernelError::OutOfMemory { bytes: 7, device: "NVIDIA H200".to_owned() };
        let expected = "the model does not fit into the device's memory: use less";
        assert_eq!(said(full).unwrap(), expected);
        let text = said(compile()).unwrap();
        assert!(text.ends_with("no such type; please report it; --cpu avoids it"), "{text}");
        assert_eq!(said(KernelError::shape("scan", "states", 1, 2)), None);
    }
}
