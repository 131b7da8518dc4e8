//! Which workers of a dataflow train.
//!
//! Timely wants the same operators on every worker. Those that do not train have them without a device, parameters or threads, and
//! nothing reaches them there: what else they do is up to the program.

use std::sync::Arc;

use timely::dataflow::Scope;

use crate::cluster::{Abort, Actor};
use crate::error::{JobError, Result};

/// The workers of a dataflow that train: all of them, unless it is said otherwise. Never numerics: K of N workers train to the weights
/// of K workers alone.
///
/// Workers that train are counted by *rank*, in the order of their indices. Lanes, owners of state, ends of communicators and
/// [`StateWriters`](super::checkpoint::StateWriters) go by rank.
///
/// ```
/// use tidemill::operators::Trainers;
///
/// let trainers = Trainers::these([3, 1])?;
/// let place = trainers.place(3, 5)?;
/// assert_eq!((place.rank(), place.ranks(), place.worker(0)), (Some(1), 2, 1));
/// assert_eq!(trainers.place(4, 5)?.rank(), None);
/// assert_eq!(Trainers::all().place(4, 5)?.rank(), Some(4));
/// # Ok::<(), tidemill::JobError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trainers {
    /// In order; none where all workers train.
    workers: Option<Arc<[usize]>>,
}

impl Trainers {
    /// All workers of the dataflow.
    pub fn all() -> Self {
        Self::default()
    }

    /// The workers with these indices, in any order.
    ///
    /// # Errors
    /// No worker, or one that comes twice.
    pub fn these(workers: impl IntoIterator<Item = usize>) -> Result<Self> {
        let mut workers: Vec<usize> = workers.into_iter().collect();
        workers.sort_unstable();
        if workers.is_empty() {
            return Err(JobError::value("trainers", "at least one worker", "none"));
        }
        if let Some([twice, _]) = workers.array_windows().find(|[one, next]| one == next) {
            return Err(JobError::value("trainers", "each worker once", format!("{twice} twice")));
        }
        Ok(Self { workers: Some(workers.into()) })
    }

    /// Whether every worker of the dataflow trains, however many there are.
    pub(crate) fn are_all(&self) -> bool {
        self.workers.is_none()
    }

    /// The place of worker `worker` of a dataflow of `workers`.
    ///
    /// # Errors
    /// A trainer that the dataflow does not have.
    pub fn place(&self, worker: usize, workers: usize) -> Result<Place> {
        let trainers = match &self.workers {
            None => (0..workers.max(1)).collect(),
            Some(trainers) => Arc::clone(trainers),
        };
        match trainers.last() {
            Some(&last) if last >= workers => {
                let expected = format!("indices of the dataflow's workers, below {workers}");
                Err(JobError::value("trainers", expected, last))
            }
            _ => Ok(Place { rank: trainers.binary_search(&worker).ok(), trainers }),
        }
    }

    /// The place of the worker of `scope`. Trainers that the dataflow does not have end the run, and have no place.
    pub(super) fn place_in(&self, scope: Scope<'_, u64>, abort: &Abort) -> Place {
        self.place(scope.index(), scope.peers()).unwrap_or_else(|error| {
            abort.fail(Actor::Worker(scope.index()), error);
            Place { rank: None, trainers: [0].into() }
        })
    }
}

/// The workers of a dataflow that train, and which of them this worker is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    rank: Option<usize>,
    /// Never empty.
    trainers: Arc<[usize]>,
}

impl Place {
    /// Its rank among those that train; none where it does not.
    pub fn rank(&self) -> Option<usize> {
        self.rank
    }

    /// How many workers train.
    pub fn ranks(&self) -> usize {
        self.trainers.len()
    }

    /// The worker that has rank `rank`; ranks beyond the last count from 0 again.
    pub fn worker(&self, rank: usize) -> usize {
        self.trainers[rank % self.trainers.len()]
    }

    /// The workers that train, by rank.
    pub fn trainers(&self) -> &[usize] {
        &self.trainers
    }

    /// Its rank, and how many there are; none where it does not train.
    pub(super) fn among(&self) -> Option<(usize, usize)> {
        Some((self.rank?, self.ranks()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trainers_that_cannot_be_are_refused_in_words() {
        let refused = |workers: &[usize]| Trainers::these(workers.iter().copied()).unwrap_err();
        let said = refused(&[]).to_string();
        assert_eq!(said, "trainers: expected at least one worker, found none");
        let said = refused(&[2, 0, 2]).to_string();
        assert_eq!(said, "trainers: expected each worker once, found 2 twice");
        let said = Trainers::these([5, 1]).unwrap().place(1, 5).unwrap_err().to_string();
        let expected = "trainers: expected indices of the dataflow's workers, below 5, found 5";
        assert_eq!(said, expected);
    }
}
