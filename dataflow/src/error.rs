//! Errors that end a job, and what the caller should do about each of them.

use std::error::Error;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use tidemill_collective::CollectiveError;
use tidemill_collective::communicator::CommunicatorError;
#[cfg(feature = "cli")]
use tidemill_evaluation::EvaluationError;
use tidemill_kernels::KernelError;
use tidemill_model::ModelError;
use tidemill_streaming_data::DataError;
#[cfg(feature = "prepare")]
use tidemill_streaming_data::prepare::PrepareError;

use crate::cluster::{Classified, ClusterError, ExitClass, SharedError};

/// The result of a call on a job.
pub type Result<T> = std::result::Result<T, JobError>;

/// Why a job could not start or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// A config that is not one: fix the input.
    #[error("{origin}: {what}")]
    Config {
        /// The file, or the source of the text.
        origin: String,
        /// The key, the expected value and the one found.
        what: String,
    },
    /// One key or flag with a value that it cannot have: fix the input.
    #[error("{key}: expected {expected}, found {found}")]
    Value {
        /// The key or flag.
        key: String,
        /// The value that it must have.
        expected: String,
        /// The value that it has.
        found: String,
    },
    /// A run cannot be resumed with other settings: fix the input.
    #[error(
        "{key} is {saved} in {}, but {found} now: a run cannot change it on resume; for a new run, name another \
         `run.dir`", checkpoint.display()
    )]
    Resume {
        /// The key that changed.
        key: String,
        /// Its value in the checkpoint.
        saved: String,
        /// Its value now.
        found: String,
        /// The checkpoint.
        checkpoint: PathBuf,
    },
    /// A checkpoint that is damaged or not one: restore it, or remove it to go on from the one
    /// before.
    #[error("checkpoint {}: {what}", path.display())]
    Checkpoint {
        /// The folder or file.
        path: PathBuf,
        /// The expected and the found.
        what: String,
    },
    /// Something is wrong with files that were fetched from a store.
    #[error("the copy of {} that was fetched", url.display())]
    Copied {
        /// Where they were fetched from.
        url: PathBuf,
        /// The error in it.
        #[source]
        cause: Box<JobError>,
    },
    /// A file that could not be read or written.
    #[error("{action} {} failed", path.display())]
    File {
        /// The attempted action, such as `writing`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A run folder that another process is working in.
    #[error("{} is in use by another run ({holder})", path.display())]
    RunFolderInUse {
        /// The folder.
        path: PathBuf,
        /// Which process on which host, as far as it has said so.
        holder: String,
    },
    /// A run folder that was removed or renamed while a run worked in it: whatever is there now is not this run's.
    #[error("{} was removed or renamed, or another run has its place, while this run worked in it", path.display())]
    RunFolderGone {
        /// Where it was.
        path: PathBuf,
    },
    /// A run folder in a store in which another run has started since: end that one, or leave this one ended.
    #[error("{} was taken over by a run that started later", path.display())]
    RunFolderTaken {
        /// The folder's URL.
        path: PathBuf,
    },
    /// A run that another process's run folder holds more of than process 0's, the only one that counts.
    #[error(
        "run.dir {} of process 0 has {step}, but {} of process {process} has step {other_step}: copy that to \
         process 0, or name a run.dir that is new to all",
        path.display(),
        other_path.display()
    )]
    RunElsewhere {
        /// Process 0's run folder.
        path: PathBuf,
        /// The step that it has, in words.
        step: String,
        /// The other process.
        process: usize,
        /// Its run folder.
        other_path: PathBuf,
        /// Its latest checkpoint.
        other_step: u64,
    },
    /// A device that this build or machine does not have: fix the input.
    #[error("{key}: {backend} is not available: {why}")]
    Device {
        /// The key or flag.
        key: &'static str,
        /// The backend asked for.
        backend: &'static str,
        /// The reason, and the remedy.
        why: String,
    },
    /// Devices in one process whose bits would not agree: leave one out, with `CUDA_VISIBLE_DEVICES` or
    /// `HIP_VISIBLE_DEVICES` say.
    #[error(
        "all workers need one kind of device, but {first} and {other} are here: leave one out \
         (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES) or use fewer workers"
    )]
    MixedDevices {
        /// The first worker's device and its kind.
        first: String,
        /// Another's.
        other: String,
    },
    /// A device without room: lower the memory that it is asked for.
    #[error("{what} does not fit into the device's memory: {advice}")]
    OutOfMemory {
        /// The thing that does not fit, such as "the run".
        what: &'static str,
        /// Advice with the keys as they are now.
        advice: String,
        /// Which allocation failed.
        #[source]
        cause: SharedError,
    },
    /// A kernel that the device's compiler refuses: report it.
    #[error("{message}; please report it; {cpu} avoids it")]
    Compile {
        /// Which kernel, and the first error of the compiler.
        message: String,
        /// The key or flag that makes the CPU compute.
        cpu: &'static str,
    },
    /// A sample with a token that the model does not have: fix the data set or `model.vocab_size`.
    #[error("{} row {row}: token {token} is outside the model's vocabulary of {vocab_size}", path.display())]
    Token {
        /// The shard.
        path: PathBuf,
        /// The row in the shard.
        row: u64,
        /// The token.
        token: u32,
        /// The size of the vocabulary.
        vocab_size: usize,
    },
    /// A step that has no loss: the data or the settings are at fault.
    #[error("step {step}: {what}")]
    Step {
        /// The update, from 1.
        step: u64,
        /// The fault.
        what: String,
    },
    /// A step whose loss is not finite: a sample is at fault where few lanes have no loss, and parameters that have grown out of
    /// bounds where all have none.
    #[error(
        "step {step}: the loss is {loss} in {lanes} of {of} lanes{}, first in grain {grain} of lane {lane}, at {samples}",
        if lanes == of { ", as of parameters that have grown out of bounds" } else { "" }
    )]
    Loss {
        /// The update, from 1.
        step: u64,
        /// The mean loss.
        loss: f64,
        /// How many lanes have no finite loss.
        lanes: usize,
        /// Number of lanes.
        of: usize,
        /// The first lane without one.
        lane: usize,
        /// Its first grain without one.
        grain: usize,
        /// The positions of that grain's samples in the canonical order.
        positions: Range<u64>,
        /// The same in words, with the rows and the files.
        samples: String,
    },
    /// An evaluation whose loss is not finite.
    #[error("step {step}: the loss of the evaluation is {loss}, first at {samples}")]
    EvaluationLoss {
        /// Updates done.
        step: u64,
        /// The mean loss.
        loss: f64,
        /// The positions of the first samples without a finite loss.
        positions: Range<u64>,
        /// The same in words, with the rows and the files.
        samples: String,
    },
    /// A measurement gave wrong numbers: a device, a link between devices, or this program is at fault.
    #[error(
        "{what} of worker {worker} is wrong at element {element}, in buckets of {bucket_mebibytes} MiB: expected {expected:?} \
         ({:#010x}), found {found:?} ({:#010x})",
        expected.to_bits(),
        found.to_bits()
    )]
    Exchanged {
        /// Such as "the sum".
        what: &'static str,
        /// The worker that has it.
        worker: usize,
        /// The element of the arena.
        element: usize,
        /// The size of the buckets.
        bucket_mebibytes: usize,
        /// The value that it has to be.
        expected: f32,
        /// The value that it is.
        found: f32,
    },
    /// The model or its files.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The data set.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A failure of the messages between workers.
    #[error(transparent)]
    Communicator(#[from] CommunicatorError),
    /// The workers or their processes.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
}

impl JobError {
    /// A [`JobError::Value`].
    pub fn value(key: impl Into<String>, expected: impl ToString, found: impl ToString) -> Self {
        Self::Value { key: key.into(), expected: expected.to_string(), found: found.to_string() }
    }

    /// A [`JobError::File`].
    pub fn file(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::File { action, path: path.to_owned(), source }
    }

    /// A [`JobError::Checkpoint`].
    pub fn checkpoint(path: &Path, what: impl Into<String>) -> Self {
        Self::Checkpoint { path: path.to_owned(), what: what.into() }
    }
}

impl Classified for JobError {
    fn exit_class(&self) -> ExitClass {
        match self {
            Self::Copied { cause, .. } => cause.exit_class(),
            Self::File { source, .. } => source.exit_class(),
            Self::Model(error) => error.exit_class(),
            Self::Data(error) => error.exit_class(),
            Self::Communicator(error) => error.exit_class(),
            Self::Cluster(error) => error.exit_class(),
            Self::RunFolderGone { .. } => ExitClass::Restart,
            Self::Config { .. }
            | Self::Value { .. }
            | Self::Resume { .. }
            | Self::Checkpoint { .. }
            | Self::RunFolderInUse { .. }
            | Self::RunFolderTaken { .. }
            | Self::RunElsewhere { .. }
            | Self::Device { .. }
            | Self::MixedDevices { .. }
            | Self::OutOfMemory { .. }
            | Self::Compile { .. }
            | Self::Token { .. }
            | Self::Step { .. }
            | Self::Loss { .. }
            | Self::EvaluationLoss { .. }
            | Self::Exchanged { .. } => ExitClass::FixInput,
        }
    }
}

impl Classified for KernelError {
    fn exit_class(&self) -> ExitClass {
        class(self, self.may_succeed_later())
    }
}

impl Classified for ModelError {
    fn exit_class(&self) -> ExitClass {
        class(self, self.may_succeed_later())
    }
}

impl Classified for CollectiveError {
    fn exit_class(&self) -> ExitClass {
        class(self, self.may_succeed_later())
    }
}

impl Classified for CommunicatorError {
    fn exit_class(&self) -> ExitClass {
        match self {
            Self::Device(error) => error.exit_class(),
            Self::Collective(error) => error.exit_class(),
            // Messages between ranks are this program's own.
            _ => ExitClass::Restart,
        }
    }
}

impl Classified for DataError {
    fn exit_class(&self) -> ExitClass {
        class(self, self.may_succeed_later())
    }
}

#[cfg(feature = "prepare")]
impl Classified for PrepareError {
    fn exit_class(&self) -> ExitClass {
        class(self, self.may_succeed_later())
    }
}

#[cfg(feature = "cli")]
impl Classified for EvaluationError {
    fn exit_class(&self) -> ExitClass {
        class(self, self.may_succeed_later())
    }
}

/// The exit class of a library's error: an answer of the operating system decides, if it caused the error, since the paths given to
/// libraries are paths that a user names.
fn class(error: &(dyn Error + 'static), may_succeed_later: bool) -> ExitClass {
    let mut causes = std::iter::successors(error.source(), |cause| (*cause).source());
    match causes.find_map(|cause| cause.downcast_ref::<io::Error>()) {
        Some(answer) => answer.exit_class(),
        None if may_succeed_later => ExitClass::Restart,
        None => ExitClass::FixInput,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Failure, Peer};
    use tidemill_streaming_data::store::StoreFailure;

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
        assert_eq!(outside_a_worker.exit_class(), ExitClass::Restart);
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
            assert_eq!(error.exit_class(), ExitClass::FixInput, "{text}");
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
        assert_eq!(silent.exit_class(), ExitClass::Restart);
        let in_a_worker = Failure::from(of(StoreFailure::Other { said: said() }));
        assert_eq!(in_a_worker.exit_class(), ExitClass::Restart);
        let preparing = PrepareError::from(of(StoreFailure::Other { said: said() }));
        assert_eq!(preparing.exit_class(), ExitClass::Restart);
        let refused = JobError::from(of(StoreFailure::Refused { said: said() }));
        assert_eq!(refused.exit_class(), ExitClass::FixInput);
    }

    #[test]
    fn an_error_of_the_cluster_has_its_own_class_wherever_it_stands() {
        let peer = Peer { process: 1, address: "host:1".into() };
        let error = JobError::from(ClusterError::PeerEnded { peer });
        assert_eq!(error.exit_class(), ExitClass::Restart);
        let error = JobError::from(ClusterError::Zero { setting: "threads" });
        assert_eq!(error.exit_class(), ExitClass::FixInput);
    }

    #[test]
    fn a_message_that_is_damaged_is_never_the_inputs_fault() {
        let damaged = Failure::from(CollectiveError::Malformed { what: "it is too short" });
        assert_eq!(damaged.exit_class(), ExitClass::Restart);
        let lanes = Failure::from(CollectiveError::Lanes { found: 3 });
        assert_eq!(lanes.exit_class(), ExitClass::FixInput);
    }

    #[test]
    fn a_disk_that_fails_under_a_library_is_worth_a_restart() {
        // As Linux numbers them.
        let (no_such_file, input_output, no_space) = (2, 5, 28);
        let answer = io::Error::from_raw_os_error;
        for (number, expected) in [
            (no_such_file, ExitClass::FixInput),
            (input_output, ExitClass::Restart),
            (no_space, ExitClass::Restart),
        ] {
            let path = || PathBuf::from("some/file");
            let file = JobError::file("writing", &path(), answer(number));
            assert_eq!(file.exit_class(), expected, "{file}");
            let copied = JobError::Copied { url: path(), cause: Box::new(file) };
            assert_eq!(copied.exit_class(), expected, "{copied}");
            let source = answer(number);
            let model = ModelError::File { action: "reading", path: path(), source };
            assert_eq!(JobError::from(model).exit_class(), expected, "{number}");
            let data = || DataError::Io { action: "read", path: path(), source: answer(number) };
            assert_eq!(JobError::from(data()).exit_class(), expected, "{number}");
            assert_eq!(PrepareError::from(data()).exit_class(), expected, "{number}");
        }
    }
}
