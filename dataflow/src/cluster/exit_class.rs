//! Whether the same command may succeed another time: the one place that says it of an error.

use std::error::Error;

use serde::{Deserialize, Serialize};
use tidemill_kernels::KernelError;
use tidemill_streaming_data::DataError;
use tidemill_streaming_data::prepare::PrepareError;
use tidemill_streaming_data::store::StoreFailure;

use super::error::{ClusterError, unshared};
use crate::error::JobError;

/// What would have to change for another attempt to succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitClass {
    /// The configuration, the data or a flag is wrong: the same run would fail again.
    FixInput,
    /// A peer or the environment failed, or the code panicked: restart from the last checkpoint.
    Restart,
}

impl ExitClass {
    /// The class of an error: that of the first in its chain of sources that has one, else
    /// [`FixInput`](Self::FixInput).
    ///
    /// Errors of a cluster have one ([`ClusterError::exit_class`]), and those of a device: one that has failed is worth
    /// another attempt, one that refuses (no room, an architecture or a shape that it cannot have, a kernel that does not
    /// compile) will refuse again. So it is with stores of data and checkpoints: one that did not answer may another time.
    pub fn of(error: &(dyn Error + 'static)) -> Self {
        let mut link = Some(error);
        while let Some(error) = link.map(unshared) {
            // As a source of its own it is passed over: it is transparent.
            if let Some(JobError::Cluster(error)) = error.downcast_ref() {
                return error.exit_class();
            }
            if let Some(error) = error.downcast_ref::<ClusterError>() {
                return error.exit_class();
            }
            if let Some(JobError::Data(error)) = error.downcast_ref() {
                return Self::of_data(error);
            }
            if let Some(PrepareError::Data(error)) = error.downcast_ref() {
                return Self::of_data(error);
            }
            if let Some(error) = error.downcast_ref() {
                return Self::of_data(error);
            }
            if let Some(error) = error.downcast_ref() {
                return Self::of_device(error);
            }
            link = error.source();
        }
        Self::FixInput
    }

    fn of_data(error: &DataError) -> Self {
        match error {
            DataError::Store { source: StoreFailure::TooSlow(_), .. } => Self::Restart,
            DataError::Store { source, .. } if !source.is_final() => Self::Restart,
            _ => Self::FixInput,
        }
    }

    fn of_device(error: &KernelError) -> Self {
        match error {
            KernelError::Device { .. } => Self::Restart,
            _ => Self::FixInput,
        }
    }

    /// The exit code with which the program reports this class: 1 or 75.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::FixInput => 1,
            Self::Restart => 75,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::error::{Failure, Peer};
    use super::*;
    use tidemill_model::ModelError;

    #[test]
    fn a_failed_device_is_worth_a_restart_and_one_that_refuses_is_not() {
        let device = || "NVIDIA H200".to_owned();
        let failed = || KernelError::Device {
            attempted: "waiting for the device",
            device: device(),
            answer: "uncorrectable ECC error encountered".to_owned(),
        };
        assert_eq!(Failure::from(ModelError::from(failed())).exit_class(), ExitClass::Restart);
        let outside_a_worker = JobError::from(ModelError::from(failed()));
        assert_eq!(ExitClass::of(&outside_a_worker), ExitClass::Restart);
        let architecture = || "sm_35".to_owned();
        let refusals = [
            KernelError::OutOfMemory { bytes: 7, device: device() },
            KernelError::shape("scan", "states", 1, 2),
            KernelError::Unavailable { backend: "cuda", reason: "no driver".to_owned() },
            KernelError::Compile {
                source_name: "scan.cu",
                architecture: architecture(),
                log: "error".to_owned(),
            },
            KernelError::UnsupportedArchitecture {
                device: device(),
                found: architecture(),
                expected: "sm_70 or later".to_owned(),
            },
        ];
        for refusal in refusals {
            let text = refusal.to_string();
            let error = JobError::from(ModelError::from(refusal));
            assert_eq!(ExitClass::of(&error), ExitClass::FixInput, "{text}");
        }
    }

    #[test]
    fn a_store_that_does_not_answer_may_another_time() {
        let of = |source| DataError::Store {
            action: "read",
            url: "s3://bucket/set".to_owned(),
            attempts: 6,
            source,
        };
        let said = || "503 Slow Down".to_owned();
        let silent = JobError::from(of(StoreFailure::Other { said: said() }));
        assert_eq!(ExitClass::of(&silent), ExitClass::Restart);
        let in_a_worker = Failure::from(of(StoreFailure::Other { said: said() }));
        assert_eq!(in_a_worker.exit_class(), ExitClass::Restart);
        let preparing = PrepareError::from(of(StoreFailure::Other { said: said() }));
        assert_eq!(ExitClass::of(&preparing), ExitClass::Restart);
        let refused = JobError::from(of(StoreFailure::Refused { said: said() }));
        assert_eq!(ExitClass::of(&refused), ExitClass::FixInput);
    }

    #[test]
    fn an_error_of_the_cluster_has_its_own_class_wherever_it_stands() {
        let peer = Peer { process: 1, address: "host:1".into() };
        let error = JobError::from(ClusterError::PeerEnded { peer });
        assert_eq!(ExitClass::of(&error), ExitClass::Restart);
        let error = JobError::from(ClusterError::Zero { setting: "threads" });
        assert_eq!(ExitClass::of(&error), ExitClass::FixInput);
    }
}
