//! Which worker has what of a step.

use super::harness::Run;

/// The worker of `run` that computes sample `sample` of each step.
pub fn worker_of(run: &Run, sample: usize) -> usize {
    let batch = run.batch();
    let schedule = batch.lane_schedule(run.workers).unwrap();
    let has = |worker: &usize| {
        let mut lanes = schedule.of_worker(*worker).into_iter();
        lanes.any(|lane| batch.lane_samples(lane).contains(&sample))
    };
    (0..run.workers).find(has).expect("every sample is computed")
}
