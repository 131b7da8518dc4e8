//! How a run is spread over its workers: memory and speed, never numerics.

use serde::{Deserialize, Serialize};

/// `[parallel]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ParallelSettings {
    /// The state of which each worker holds only its own part. May change when a run goes on.
    pub shard: Sharding,
}

/// The state that workers share out instead of holding all of it each (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training
/// Trillion Parameter Models"). Each takes less memory than the one before, and more copies between workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sharding {
    /// The optimizer's state (stage 1): a worker sums gradients over its lanes, and holds them and the parameters whole.
    #[default]
    Optimizer,
    /// And the sums of gradients (stage 2): a lane's gradients go to their owners at once.
    Gradients,
    /// And the parameters (stage 3): those of a block are gathered before it runs, and let go behind it. The workers of a process hold them
    /// together, and each process holds them once: the parameters that blocks read cross no network.
    Parameters,
}

impl Sharding {
    /// Every one, the one that takes the most memory first.
    pub const ALL: [Self; 3] = [Self::Optimizer, Self::Gradients, Self::Parameters];

    /// As configs write it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Optimizer => "optimizer",
            Self::Gradients => "gradients",
            Self::Parameters => "parameters",
        }
    }
}
