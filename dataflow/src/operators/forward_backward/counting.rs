//! Tokens that the lanes of a step will count, told as soon as their grains are there.
//!
//! The optimizer divides by the counted tokens of all lanes. Where it knows them before the step is computed, it forms mean
//! gradients while the backward pass still runs.

use std::collections::BTreeMap;
use std::sync::Arc;

use tidemill_kernels::Backend;
use tidemill_model::{Sample, Trainable};

use super::LaneTokens;
use super::device::microbatch;
use crate::operators::plan::TrainingPlan;
use crate::operators::samples::Grain;

/// The tokens that a grain counts, if the model tells it.
type Count<S> = Box<dyn Fn(&Grain<S>) -> Option<u64>>;

/// Counts the tokens of grains as they arrive.
pub(super) struct Counting<S> {
    count: Count<S>,
    plan: Arc<TrainingPlan>,
    /// The incomplete lanes by step and lane, each with the number of its grains that have come and their counted tokens.
    lanes: BTreeMap<(u64, usize), (usize, u64)>,
}

impl<S: Sample> Counting<S> {
    pub(super) fn new<B: Backend, M: Trainable<B, Sample = S>>(
        model: &Arc<M>,
        plan: &Arc<TrainingPlan>,
    ) -> Self {
        let (model, of_run) = (Arc::clone(model), Arc::clone(plan));
        let count = move |grain: &Grain<S>| {
            let size = of_run.batch.grain_samples();
            model.counted_tokens(microbatch(&of_run, &grain.samples, size))
        };
        Self { count: Box::new(count), plan: Arc::clone(plan), lanes: BTreeMap::new() }
    }

    /// The tokens that the lane of `grain` counts, if this was the last grain that it lacked and the model tells the counts.
    pub(super) fn grain(&mut self, grain: &Grain<S>) -> Option<LaneTokens> {
        let Grain { step, lane, .. } = *grain;
        let counted = (self.count)(grain)?;
        let (grains, tokens) = self.lanes.entry((step, lane)).or_default();
        (*grains, *tokens) = (*grains + 1, *tokens + counted);
        if *grains < self.plan.batch.lane_grains(lane) {
            return None;
        }
        let (_, tokens) = self.lanes.remove(&(step, lane))?;
        Some(LaneTokens { step, lane: lane as u32, tokens })
    }
}
