//! Sums and copies between workers, along the canonical tree, over any kind of connection.
//!
//! The parameter arena is cut into *buckets*, and each rank owns one contiguous part of every bucket ([`Cut`]). A step goes
//! through the buckets twice, in one order that all ranks have in common: gradients become sums at their owners, and updated
//! parameters are copied from there to every rank. A rank announces that its sums are final, or its part updated, with a few bytes
//! and an event. Devices wait for the events before bytes move: the host waits for other hosts, and for no device.
//!
//! | communicator | whose ranks | how bytes move |
//! |---|---|---|
//! | [`Threads`] | the workers of a process | an owner's kernel reads the memory of its peers and adds in tree order |
//! | [`Nccl`] | workers of several processes | those of a process sum first as [`Threads`] do; between processes the vendor's library moves parts, and a kernel of the owner adds in tree order |
//! | [`Host`] | workers of several processes | groups of workers that read each other's memory sum before anything leaves them, and the groups of a host before anything leaves it ([`Topology`]); timely carries chunks |

mod along_tree;
mod cost;
mod holders;
mod host;
mod nccl;
mod post;
mod threads;
mod topology;
mod values;

use std::ops::Range;

use tidemill_kernels::{Backend, KernelError, SliceMut};

pub use self::cost::{CommunicationCost, Interval, Traffic};
pub use self::holders::Holders;
pub use self::host::Host;
pub use self::nccl::{LocalRank, Nccl};
pub use self::post::{Key, Post, Reading};
pub use self::threads::{Threads, check_reach};
pub use self::topology::Topology;
pub use self::values::{Values, ValuesMut};
use crate::carry::Courier;
use crate::error::CollectiveError;
use crate::lane_schedule::LaneSchedule;

/// The result of a communicator's call.
pub type Result<T> = std::result::Result<T, CommunicatorError>;

/// The end of one rank between all ranks of a run.
///
/// A call waits until the ranks that it concerns have told of the bucket, which they do when they enqueue: so the host waits for
/// other hosts, and devices wait for devices. All ranks must go through the same buckets in the same order.
pub trait Communicator<B: Backend>: Send {
    /// This rank.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn ranks(&self) -> usize;

    /// Which rank sums which lanes, and in which rounds.
    fn schedule(&self) -> &LaneSchedule;

    /// The post with which the computing thread announces sums.
    fn post(&self) -> Post<B>;

    /// Ends every present and later wait of all ranks that this one can reach, on its host and its device.
    fn abort_handle(&self) -> Abort;

    /// The bytes and times of communication since the last call: to be called once a step, as events are kept until then.
    fn take_cost(&mut self) -> CommunicationCost<B>;

    /// The courier that timely has to [carry](crate::carry::Carry) for this rank: given once, and only where bytes go that way.
    fn courier(&mut self) -> Option<Courier> {
        None
    }

    /// The sums of this rank's part of a bucket over the lanes of a round, in `out`: for each node that
    /// [`LaneSchedule::sums`](crate::LaneSchedule::sums) says, one use after the other. Where a step has one round, these are the sums
    /// over all lanes. `cut` says which rank owns which part of the bucket.
    ///
    /// # Errors
    /// Parts that are not all lanes once, [`CommunicatorError::Closed`], or a device that fails.
    fn reduce_scatter(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        key: Key,
        cut: &Cut,
        out: SliceMut<'_, B, f32>,
    ) -> Result<()>;

    /// [`reduce_scatter`](Self::reduce_scatter) of several buckets, in order; ranks that read each other's memory sum them with few
    /// launches, between which the links would idle.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter).
    fn reduce_scatter_each(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        buckets: Vec<ReduceScatter<'_, B>>,
    ) -> Result<()> {
        buckets.into_iter().try_for_each(|ReduceScatter { key, cut, out }| {
            self.reduce_scatter(backend, stream, key, cut, out)
        })
    }

    /// Whether [`reduce_scatter_each`](Self::reduce_scatter_each) would sum the bucket of `key` together with others and not wait
    /// for a rank. Never waits.
    ///
    /// # Errors
    /// [`CommunicatorError::Closed`].
    fn can_join(&mut self, _key: Key) -> Result<bool> {
        Ok(false)
    }

    /// Announces that this rank's part of a bucket is updated: the values that others read are in `values` once `stream` has run, and
    /// stay there until every rank has posted its sums of the next step. `cut` says which part of the bucket each of this rank's
    /// [counterparts](Holders) owns, by its place among them.
    ///
    /// # Errors
    /// [`CommunicatorError::Closed`], or a device that fails.
    fn updated(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        key: Key,
        cut: &Cut,
        values: Values<'_, B>,
    ) -> Result<()>;

    /// Copies the parts of a bucket that this rank's [counterparts](Holders) have updated to `out`, which is all that they hold of the
    /// bucket, and has this rank's part already. `cut` is that of [`updated`](Self::updated).
    ///
    /// # Errors
    /// [`CommunicatorError::Closed`], or a device that fails.
    fn gather(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        key: Key,
        cut: &Cut,
        out: ValuesMut<'_, B>,
    ) -> Result<()>;
}

/// A bucket of [`Communicator::reduce_scatter_each`].
pub struct ReduceScatter<'a, B: Backend> {
    /// Which.
    pub key: Key,
    /// Which rank owns which part of it.
    pub cut: &'a Cut,
    /// Where the sums of this rank's part go.
    pub out: SliceMut<'a, B, f32>,
}

/// A buffer of at least `elements` elements, which is kept in `held`.
fn reserve<'a, B: Backend>(
    held: &'a mut Option<B::Buffer<f32>>,
    (backend, stream): (&B, &mut B::DeviceStream),
    elements: usize,
) -> Result<&'a mut B::Buffer<f32>> {
    let has = |buffer: &B::Buffer<f32>| B::elements(buffer) >= elements;
    match held.take().filter(has) {
        Some(buffer) => Ok(held.insert(buffer)),
        None => Ok(held.insert(backend.allocate(stream, elements)?)),
    }
}

/// Ends the waits of ranks; from any thread.
pub type Abort = Box<dyn FnOnce() + Send>;

/// Why a call of a communicator failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommunicatorError {
    /// A device failed.
    #[error(transparent)]
    Device(#[from] KernelError),
    /// The posts of ranks make no sum.
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
    /// A rank has posted something twice, or something that is not in the plan.
    #[error("rank {rank} posted {what} of bucket {bucket} at step {step} {wrong}", step = .step + 1)]
    Posted {
        /// The rank.
        rank: usize,
        /// The kind of the post.
        what: &'static str,
        /// The bucket.
        bucket: u32,
        /// The step, from 0.
        step: u64,
        /// The defect.
        wrong: &'static str,
    },
    /// Values of another precision than those to be gathered: the ranks run something else.
    #[error("what another rank has updated is of another precision")]
    OtherKind,
    /// The run is over: a rank is gone, or was asked to end.
    #[error("the other ranks are gone")]
    Closed,
}

/// How a bucket is cut over ranks: one range each, in order, of the elements from the bucket's beginning. It changes the speed, never
/// the numerics.
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

    /// The range that `rank` owns.
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
