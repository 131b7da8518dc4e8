//! Whether the same command may succeed another time.

use serde::{Deserialize, Serialize};

/// The change that another attempt needs to succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitClass {
    /// The configuration, the data or a flag is wrong: the same run would fail again.
    FixInput,
    /// A peer or the environment failed, or the code did, or nothing is known: restart from the last checkpoint.
    Restart,
}

impl ExitClass {
    /// The exit code with which the program reports this class: 1 or 75.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::FixInput => 1,
            Self::Restart => 75,
        }
    }
}
