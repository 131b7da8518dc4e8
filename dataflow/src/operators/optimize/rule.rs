//! The update rule, and its pace: clipping and the learning rate.

use std::sync::Arc;

use tidemill_kernels::Backend;
use tidemill_model::optimizer::{
    GroupSettings, OptimizerSettings, UpdateRule, UpdateScalars, UpdateTerms, clip_coefficient,
};
use tidemill_model::schedule::ScheduleSettings;

/// The learning rate of an update (from 1).
pub type LearningRate = Arc<dyn Fn(u64) -> f64 + Send + Sync>;

/// How far updates go: pure functions of the update, the same on every worker.
#[derive(Clone)]
pub struct UpdatePace {
    /// The largest L2 norm of the mean gradient; without it gradients are not clipped.
    pub clip_norm: Option<f64>,
    /// The learning rate.
    pub learning_rate: LearningRate,
}

impl UpdatePace {
    /// The factor of the mean gradient, given its norm.
    pub fn coefficient(&self, norm: f64) -> f32 {
        self.clip_norm.map_or(1.0, |clip_norm| clip_coefficient(norm, clip_norm) as f32)
    }
}

/// The optimizer and its schedule.
pub struct ScheduledRule<B: Backend> {
    /// How far updates go.
    pub pace: UpdatePace,
    /// The rule of an update. Anything that implements [`UpdateRule`] will do.
    pub rule: Arc<dyn UpdateRule<B>>,
    /// Tensors, by name, whose updates have a learning rate or a decay of their own. Those of a factor of 0 and no decay are not
    /// updated at all, and neither are their states.
    pub groups: Vec<GroupSettings>,
}

impl<B: Backend> Clone for ScheduledRule<B> {
    fn clone(&self) -> Self {
        Self { pace: self.pace.clone(), rule: Arc::clone(&self.rule), groups: self.groups.clone() }
    }
}

impl<B: Backend> ScheduledRule<B> {
    /// The rule of a run's `[optimizer]` and `[schedule]`, whose curve ends after `horizon` updates.
    pub fn new(optimizer: &OptimizerSettings, schedule: ScheduleSettings, horizon: u64) -> Self {
        Self::with_rule(optimizer.rule(), optimizer, schedule, horizon)
    }

    /// The same with another `rule`: of `optimizer` it has the base learning rate, the norm that gradients are
    /// clipped to, and the groups.
    pub fn with_rule(
        rule: Arc<dyn UpdateRule<B>>,
        optimizer: &OptimizerSettings,
        schedule: ScheduleSettings,
        horizon: u64,
    ) -> Self {
        let (clip_norm, base) = (optimizer.clip_norm, optimizer.learning_rate);
        let learning_rate: LearningRate =
            Arc::new(move |update| schedule.learning_rate(base, update, horizon));
        let groups = optimizer.groups.clone();
        Self { pace: UpdatePace { clip_norm: Some(clip_norm), learning_rate }, rule, groups }
    }

    /// The numbers of `update` (from 1), given the clipping coefficient, for elements of `terms`.
    pub(in crate::operators) fn scalars(
        &self,
        update: u64,
        coefficient: f32,
        terms: UpdateTerms,
    ) -> UpdateScalars {
        UpdateScalars::new(update, (self.pace.learning_rate)(update), coefficient, terms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clipping_scales_only_what_is_too_long() {
        let mut pace = UpdatePace { clip_norm: Some(1.0), learning_rate: Arc::new(|_| 0.1) };
        assert_eq!(pace.coefficient(0.5), 1.0);
        assert_eq!(pace.coefficient(4.0), (1.0 / 4.000_001) as f32);
        assert_eq!(pace.coefficient(0.0), 1.0);
        pace.clip_norm = None;
        assert_eq!(pace.coefficient(1e9), 1.0);
    }
}
