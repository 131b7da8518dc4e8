//! Which worker sums which lanes of a step, and when.
//!
//! A step goes through its lanes in *rounds*. In each the workers have consecutive lanes, in their order, and all rounds together
//! have every lane once. In one round all lanes are summed where they are computed, and leave as the few nodes of the
//! tree that a worker's lanes make up. In as many rounds as a worker has lanes, each lane leaves as soon as it is computed and is
//! added where it is owned, so that no worker holds more than the lane at hand. Neither changes a bit: sums are formed along the
//! canonical tree.

use std::ops::Range;

use crate::error::{CollectiveError, Result};
use crate::node::Node;
use crate::tree::{Tree, lane_cut};

/// The lanes of a step by round and worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneSchedule {
    tree: Tree,
    /// For each round the first lane of each worker, and the end of the last worker's lanes.
    starts: Vec<Vec<usize>>,
}

impl LaneSchedule {
    /// One round, in which each of `workers` has the lanes that [`lane_cut`] gives it.
    ///
    /// # Errors
    /// As [`lane_cut`].
    pub fn at_once(lanes: usize, workers: usize) -> Result<Self> {
        let cut = lane_cut(lanes, workers)?;
        let starts = cut.iter().map(|of_worker| of_worker.start).chain([lanes]).collect();
        Ok(Self { tree: Tree::new(lanes)?, starts: vec![starts] })
    }

    /// As many rounds as a worker has lanes at most; in each a worker has one lane, and in the last perhaps none.
    ///
    /// # Errors
    /// As [`lane_cut`].
    pub fn one_by_one(lanes: usize, workers: usize) -> Result<Self> {
        lane_cut(lanes, workers)?;
        let rounds = (0..lanes).step_by(workers);
        let starts =
            rounds.map(|first| (first..=first + workers).map(|lane| lane.min(lanes)).collect());
        Ok(Self { tree: Tree::new(lanes)?, starts: starts.collect() })
    }

    /// The tree over the lanes.
    pub fn tree(&self) -> Tree {
        self.tree
    }

    /// The number of rounds, at least 1.
    pub fn rounds(&self) -> usize {
        self.starts.len()
    }

    /// The number of workers.
    pub fn workers(&self) -> usize {
        self.starts[0].len() - 1
    }

    /// Whether it is of so many workers.
    ///
    /// # Errors
    /// Another number.
    pub fn check_workers(&self, workers: usize) -> Result<()> {
        let expected = self.workers();
        match expected == workers {
            true => Ok(()),
            false => Err(CollectiveError::ForeignSchedule { expected, found: workers }),
        }
    }

    /// The lanes of `workers`, which follow each other, in round `round`; there may be none.
    ///
    /// # Panics
    /// A round or workers that there are not.
    pub fn lanes(&self, round: usize, workers: Range<usize>) -> Range<usize> {
        let starts = &self.starts[round];
        starts[workers.start]..starts[workers.end]
    }

    /// The lanes of `worker` in all rounds, in order.
    ///
    /// # Panics
    /// A worker that there is not.
    pub fn of_worker(&self, worker: usize) -> Vec<usize> {
        (0..self.rounds()).flat_map(|round| self.lanes(round, worker..worker + 1)).collect()
    }

    /// The fewest nodes that make up the lanes of `workers`, which follow each other, in round `round`.
    ///
    /// # Errors
    /// A round or workers that there are not.
    pub fn nodes(&self, round: usize, workers: Range<usize>) -> Result<Vec<Node>> {
        let (rounds, of) = (self.rounds(), self.workers());
        if round >= rounds || workers.end > of || workers.start > workers.end {
            return Err(CollectiveError::Unscheduled { round, rounds });
        }
        Ok(self.tree.cover(&self.lanes(round, workers)))
    }

    /// The round in which lane `lane` is computed; `None` where there is no such lane.
    pub fn round_of(&self, lane: usize) -> Option<usize> {
        self.starts.iter().position(|starts| starts.last().is_some_and(|&end| lane < end))
    }

    /// The fewest nodes that make up all lanes of round `round`: its sums are over these nodes.
    ///
    /// # Errors
    /// A round that there is not.
    pub fn sums(&self, round: usize) -> Result<Vec<Node>> {
        self.nodes(round, 0..self.workers())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_lane_is_in_one_round_of_one_worker() {
        for lanes in [1, 2, 4, 8, 32] {
            for workers in 1..=lanes {
                let at_once = LaneSchedule::at_once(lanes, workers).unwrap();
                let one_by_one = LaneSchedule::one_by_one(lanes, workers).unwrap();
                assert_eq!(at_once.rounds(), 1);
                assert_eq!(one_by_one.rounds(), lanes.div_ceil(workers));
                for schedule in [at_once, one_by_one] {
                    assert_eq!((schedule.workers(), schedule.tree().lanes()), (workers, lanes));
                    let mut all: Vec<usize> =
                        (0..workers).flat_map(|worker| schedule.of_worker(worker)).collect();
                    all.sort_unstable();
                    assert_eq!(all, (0..lanes).collect::<Vec<_>>(), "{schedule:?}");
                    let rounds = 0..schedule.rounds();
                    let nodes: Vec<Node> =
                        rounds.flat_map(|round| schedule.sums(round).unwrap()).collect();
                    let covered: usize = nodes.iter().map(|node| node.lanes() as usize).sum();
                    assert_eq!(covered, lanes);
                    assert!(schedule.tree().joins(&nodes).is_ok(), "rounds follow each other");
                }
            }
        }
    }

    #[test]
    fn workers_take_turns_lane_by_lane() {
        let schedule = LaneSchedule::one_by_one(8, 3).unwrap();
        assert_eq!(schedule.of_worker(0), [0, 3, 6]);
        assert_eq!(schedule.of_worker(2), [2, 5]);
        assert_eq!(schedule.lanes(2, 2..3), 8..8, "the last round has fewer");
        let node = |lo, hi| Node { lo, hi };
        assert_eq!(schedule.sums(0), Ok(vec![node(0, 2), node(2, 3)]));
        assert_eq!(schedule.nodes(1, 1..3), Ok(vec![node(4, 6)]));
        let missing = CollectiveError::Unscheduled { round: 3, rounds: 3 };
        assert_eq!(schedule.sums(3), Err(missing));
        assert!(LaneSchedule::one_by_one(4, 5).is_err() && LaneSchedule::at_once(3, 1).is_err());
    }
}
