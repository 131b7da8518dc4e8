//! Sums and copies between the devices of workers, where the bytes do not pass through the host.
//!
//! The parameter arena is cut into *buckets*, and each rank owns one contiguous part of every bucket ([`Cut`]). A step goes
//! through the buckets twice, in one order that all ranks have in common: gradients become sums where they are owned, and
//! what was updated there is brought to every rank. What a rank has to tell the others (that its sums are final, that its
//! part was updated) are a few bytes and an event; the bytes themselves are moved by whoever needs them, when the events say so.
//! The host waits for no device.
//!
//! | communicator | whose ranks | how bytes move |
//! |---|---|---|
//! | [`Threads`] | the workers of a process | an owner's kernel reads the memory of its peers and adds in tree order |

mod threads;

use std::ops::Range;

use tidemill_kernels::KernelError;

pub use self::threads::{Abort, OwnPart, Part, Post, Threads, Update};
use crate::error::CollectiveError;

/// The result of a communicator's call.
pub type Result<T> = std::result::Result<T, CommunicatorError>;

/// Why bytes do not come.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommunicatorError {
    /// A device failed.
    #[error(transparent)]
    Device(#[from] KernelError),
    /// What ranks have posted is no sum.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// Devices of one process that do not reach each other's memory.
    #[error("the device of rank {rank} cannot read the memory of that of rank {peer}")]
    OutOfReach {
        /// The rank that reads.
        rank: usize,
        /// The rank whose memory it is.
        peer: usize,
    },
    /// A rank has told something twice, or what the plan does not hold.
    #[error("rank {rank} posted {what} of bucket {bucket} at step {step} {wrong}", step = .step + 1)]
    Posted {
        /// The rank.
        rank: usize,
        /// What it posted.
        what: &'static str,
        /// The bucket.
        bucket: u32,
        /// The step, from 0.
        step: u64,
        /// What is wrong with it.
        wrong: &'static str,
    },
    /// The run is over: a rank is gone, or was told to end.
    #[error("the other ranks are gone")]
    Closed,
}

/// How a bucket is cut over ranks: one range each, in order, of the elements from the bucket's beginning. It is speed, never
/// numerics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    ends: Vec<usize>,
}

impl Cut {
    /// `elements` cut over `ranks` at multiples of `granule`, as evenly as that allows. Granules that are left over go to the ranks
    /// from `first` on, so that over many buckets every rank owns as much.
    ///
    /// # Panics
    /// No ranks, or a granule of 0.
    pub fn new(elements: usize, ranks: usize, granule: usize, first: usize) -> Self {
        assert!(ranks > 0 && granule > 0, "a cut is over ranks, at granules");
        let granules = elements.div_ceil(granule);
        let (share, extra) = (granules / ranks, granules % ranks);
        let more = |rank: usize| usize::from((rank + ranks - first % ranks) % ranks < extra);
        let mut end = 0;
        let ends = (0..ranks).map(|rank| {
            end += share + more(rank);
            (end * granule).min(elements)
        });
        Self { ends: ends.collect() }
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.ends.len()
    }

    /// The cut whose ranges end at `ends`, which do not decrease.
    ///
    /// # Panics
    /// No ranks.
    pub fn at(ends: Vec<usize>) -> Self {
        assert!(!ends.is_empty(), "a cut is over ranks");
        debug_assert!(ends.is_sorted(), "{ends:?}");
        Self { ends }
    }

    /// What `rank` owns.
    pub fn of_rank(&self, rank: usize) -> Range<usize> {
        let start = rank.checked_sub(1).map_or(0, |before| self.ends[before]);
        start..self.ends[rank]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_are_complete_and_balanced_over_buckets() {
        for (elements, granule) in [(0, 1), (1, 4), (1000, 64), (1024, 64), (100, 1000)] {
            for ranks in 1..9 {
                let mut loads = vec![0; ranks];
                for first in 0..ranks {
                    let cut = Cut::new(elements, ranks, granule, first);
                    assert_eq!((cut.ranks(), cut.of_rank(0).start), (ranks, 0));
                    assert_eq!(cut.of_rank(ranks - 1).end, elements);
                    for (rank, load) in loads.iter_mut().enumerate() {
                        let range = cut.of_rank(rank);
                        assert!(range.start.is_multiple_of(granule) || range.is_empty());
                        assert!(rank == 0 || cut.of_rank(rank - 1).end == range.start);
                        *load += range.len();
                    }
                }
                let (least, most) = (loads.iter().min().unwrap(), loads.iter().max().unwrap());
                // The last granule of a bucket may be short, and the same rank may have it always.
                assert!(most - least <= ranks * granule, "{elements} over {ranks}: {loads:?}");
            }
        }
    }
}
