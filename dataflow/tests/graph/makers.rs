//! Grains that the program around the graph makes: which worker makes those of a lane, and which trains on them.

use tidemill::batch::BatchPlan;
use tidemill::operators::Place;

/// The workers of a dataflow by what they do for training.
#[derive(Clone)]
pub struct Makers {
    /// For each lane the worker that trains on it.
    trainers: Vec<usize>,
    /// The workers that do not train, which then make all grains.
    others: Vec<usize>,
}

impl Makers {
    pub fn new(batch: &BatchPlan, place: &Place, workers: usize) -> Self {
        let mut trainers = vec![0; batch.lanes()];
        for (rank, &worker) in place.trainers().iter().enumerate() {
            let lanes = batch.worker_lanes(rank, place.ranks()).unwrap_or_default();
            lanes.into_iter().for_each(|lane| trainers[lane] = worker);
        }
        let others = (0..workers).filter(|worker| !place.trainers().contains(worker)).collect();
        Self { trainers, others }
    }

    /// The worker that trains on a lane.
    pub fn trainer(&self, lane: usize) -> usize {
        self.trainers[lane]
    }

    /// The lanes whose grains `worker` makes.
    pub fn made_by(&self, worker: usize) -> Vec<usize> {
        let maker = |lane: usize| match self.others.len() {
            0 => self.trainer(lane),
            others => self.others[lane % others],
        };
        (0..self.trainers.len()).filter(|&lane| maker(lane) == worker).collect()
    }
}
