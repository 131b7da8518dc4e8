//! The state that workers share out, as flags name it.

use clap::ValueEnum;

use crate::parallel::Sharding;

/// The state of which each worker holds its part only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ShardChoice {
    /// The optimizer's state.
    Optimizer,
    /// The optimizer's state and sums of gradients.
    Gradients,
    /// The optimizer's state, sums of gradients and parameters.
    Parameters,
}

impl From<ShardChoice> for Sharding {
    fn from(choice: ShardChoice) -> Self {
        match choice {
            ShardChoice::Optimizer => Self::Optimizer,
            ShardChoice::Gradients => Self::Gradients,
            ShardChoice::Parameters => Self::Parameters,
        }
    }
}
