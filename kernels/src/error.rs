//! Errors of kernel calls.

/// The result of a call on a device.
pub type Result<T> = std::result::Result<T, KernelError>;

/// Why a device call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A shape, a buffer or a view does not fit the kernel: fix the caller.
    #[error("{kernel}: {what}: expected {expected}, found {found}")]
    Shape {
        /// The kernel or shape that refused.
        kernel: &'static str,
        /// The quantity that does not fit.
        what: &'static str,
        /// The value that the kernel expects, or a condition on it such as `at least 1`.
        expected: String,
        /// The value that was given.
        found: String,
    },
    /// A token or a target lies outside the vocabulary: fix the input.
    #[error("{kernel}: row {row} holds token {token}, but the vocabulary has {vocab_size} tokens")]
    TokenOutOfRange {
        /// The kernel that refused.
        kernel: &'static str,
        /// The row of the microbatch.
        row: usize,
        /// The token found there.
        token: u32,
        /// The number of tokens in the vocabulary.
        vocab_size: usize,
    },
    /// The device has no room for a buffer: use a smaller microbatch or model.
    #[error("allocating {bytes} bytes on {device} failed: out of memory")]
    OutOfMemory {
        /// The size asked for.
        bytes: usize,
        /// The device asked.
        device: String,
    },
    /// Something that a graph cannot hold was asked for while one is recorded: do it before.
    #[error("{attempted} cannot be recorded into a graph")]
    NotRecordable {
        /// The operation that was refused.
        attempted: &'static str,
    },
    /// The device or one of its libraries has no way to do this, and will have none the next time: change sizes, or use
    /// another backend.
    #[error("{device} has no way to {what}: {answer}")]
    Unsupported {
        /// The operation, such as a matrix product of some sizes.
        what: String,
        /// The device's name.
        device: String,
        /// The answer of the driver or library.
        answer: String,
    },
    /// There is no such device here, or nothing to reach it with: install a driver, or choose another backend.
    #[error("no {backend} device: {reason}")]
    Unavailable {
        /// The backend asked for.
        backend: &'static str,
        /// The reason, such as the library that is missing.
        reason: String,
    },
    /// The device is of a kind that no kernel is written for: use another device.
    #[error("{device} is {found}, expected {expected}")]
    UnsupportedArchitecture {
        /// The device's name.
        device: String,
        /// Its architecture.
        found: String,
        /// The architectures that kernels are written for.
        expected: String,
    },
    /// A kernel's source was refused by the device's compiler: report it.
    #[error("compiling {source_name} for {architecture} failed: {}", first_error(log))]
    Compile {
        /// The file of kernels.
        source_name: &'static str,
        /// The architecture that it was compiled for.
        architecture: String,
        /// All that the compiler said; the message has its first error.
        log: String,
    },
    /// The device, its driver or one of its libraries failed: start again from a checkpoint.
    #[error("{attempted} on {device} failed: {answer}")]
    Device {
        /// The operation that failed.
        attempted: &'static str,
        /// The device's name.
        device: String,
        /// The answer of the driver or library.
        answer: String,
    },
    /// The processor lacks an instruction set that was asked for: use another.
    #[error("this processor lacks the instruction set {name}")]
    InstructionSet {
        /// The instruction set asked for.
        name: &'static str,
    },
    /// The host could not provide what the backend needs, such as its compute threads.
    #[error("starting {threads} compute threads failed")]
    Threads {
        /// The number of threads asked for.
        threads: usize,
        /// The error of the operating system or of the thread pool.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl KernelError {
    /// Whether the same call may succeed another time though nothing is changed: the device or the host failed, or this code
    /// did. A device that refuses (no room, an architecture, a shape, a kernel that does not compile) will refuse again.
    pub fn may_succeed_later(&self) -> bool {
        match self {
            Self::Device { .. } | Self::Threads { .. } | Self::NotRecordable { .. } => true,
            Self::Shape { .. }
            | Self::TokenOutOfRange { .. }
            | Self::OutOfMemory { .. }
            | Self::Unsupported { .. }
            | Self::Unavailable { .. }
            | Self::UnsupportedArchitecture { .. }
            | Self::Compile { .. }
            | Self::InstructionSet { .. } => false,
        }
    }

    /// The time of a point that was recorded without it was asked for.
    pub(crate) fn untimed(device: &str) -> Self {
        let (device, answer) = (device.to_owned(), "of a point the time was not noted".to_owned());
        Self::Device { attempted: "timing", device, answer }
    }

    /// A shape error; `expected` and `found` are formatted.
    pub fn shape(
        kernel: &'static str,
        what: &'static str,
        expected: impl ToString,
        found: impl ToString,
    ) -> Self {
        Self::Shape { kernel, what, expected: expected.to_string(), found: found.to_string() }
    }
}

/// The message of the system's library loader, which is the error's source: the error itself says only that it failed.
pub(crate) fn loader_answer(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// The first line of a compiler's log that says "error"; the first that says anything where none does.
fn first_error(log: &str) -> &str {
    let mut lines = log.lines().map(str::trim).filter(|line| !line.is_empty());
    let first = lines.clone().next().unwrap_or("the compiler does not say why");
    lines.find(|line| line.contains("error")).unwrap_or(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_compilers_log_the_first_error_is_told() {
        let said = |log: &str| {
            let (source_name, architecture) = ("scan.cu", "sm_90a".to_owned());
            KernelError::Compile { source_name, architecture, log: log.to_owned() }.to_string()
        };
        let log = "\nIn file included from scan.cu:3:\n  scan.cu(7): error: no such type\n1 error detected\n";
        let failed = "compiling scan.cu for sm_90a failed: ";
        assert_eq!(said(log), format!("{failed}scan.cu(7): error: no such type"));
        assert_eq!(said("\n warning: old\n"), format!("{failed}warning: old"));
        assert_eq!(said(" \n"), format!("{failed}the compiler does not say why"));
    }
}
