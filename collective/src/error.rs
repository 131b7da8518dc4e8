//! Errors between workers.

use crate::node::Node;

/// The result of a collective call.
pub type Result<T> = std::result::Result<T, CollectiveError>;

/// Why a sum between workers cannot be formed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// A number of lanes that is no power of two: fix the input.
    #[error("the number of lanes must be a power of two up to 2^31, found {found}")]
    Lanes {
        /// The number given.
        found: usize,
    },
    /// No worker, or more workers than lanes: fix the input.
    #[error("the number of workers must be 1 to {lanes}, the number of lanes, found {workers}")]
    Workers {
        /// The number of workers.
        workers: usize,
        /// The number of lanes.
        lanes: usize,
    },
    /// Lanes that are no node of the canonical tree: a peer runs something else.
    #[error("{node} is no node of the tree over {lanes} lanes")]
    ForeignNode {
        /// The node that arrived.
        node: Node,
        /// Lanes of the tree.
        lanes: usize,
    },
    /// Lanes that were summed already: a peer sent them twice, or two peers own them.
    #[error("{node} arrived, but {present} was there already")]
    DuplicateNode {
        /// The node that arrived.
        node: Node,
        /// A node that shares lanes with it.
        present: Node,
    },
    /// Lanes that no worker has summed: a peer runs something else.
    #[error("lanes {lo}..{hi} are missing")]
    MissingLanes {
        /// The first lane.
        lo: u32,
        /// One past the last lane.
        hi: u32,
    },
    /// A schedule of lanes for another number of workers: fix the input.
    #[error("the schedule of lanes is one for {expected} workers, found {found}")]
    ForeignSchedule {
        /// The workers of the schedule.
        expected: usize,
        /// The number of workers.
        found: usize,
    },
    /// Ranks or groups that do not follow each other from the first on: fix the input.
    #[error("{what} must be ranges that are not empty and follow each other from 0 to the last")]
    Topology {
        /// The name of the ranks or groups.
        what: &'static str,
    },
    /// Processes of unequal numbers of ranks: fix the input.
    #[error(
        "expected as many ranks in every process, found {ranks} ranks and one process of {of_process}"
    )]
    Uneven {
        /// All ranks.
        ranks: usize,
        /// The number of ranks of this process.
        of_process: usize,
    },
    /// A round that the schedule of lanes does not have: a peer runs something else.
    #[error("round {round} of a step of {rounds}", round = .round + 1)]
    Unscheduled {
        /// The round, from 0.
        round: usize,
        /// Rounds of a step.
        rounds: usize,
    },
    /// A message that is no chunk: the connection or a peer is damaged.
    #[error("a message is no chunk: {what}")]
    Malformed {
        /// The defect.
        what: &'static str,
    },
    /// A chunk that another worker should have received.
    #[error("a chunk for worker {destination} arrived at worker {worker}")]
    Misrouted {
        /// The worker it was for.
        destination: usize,
        /// The worker it came to.
        worker: usize,
    },
}

impl CollectiveError {
    /// Whether the same run may succeed another time though nothing is changed: all but numbers that no run can have is the
    /// doing of a damaged connection, of a peer that runs something else, or of this code.
    pub fn may_succeed_later(&self) -> bool {
        !matches!(
            self,
            Self::Lanes { .. }
                | Self::Workers { .. }
                | Self::ForeignSchedule { .. }
                | Self::Topology { .. }
                | Self::Uneven { .. }
        )
    }
}
