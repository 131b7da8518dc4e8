//! What an update does: clipping, the learning rate and the optimizer's coefficients, by update.

use std::sync::Arc;

use tidemill_kernels::backend::AdamWStep;
use tidemill_model::Decay;
use tidemill_model::optimizer::{OptimizerSettings, clip_coefficient};
use tidemill_model::schedule::ScheduleSettings;

/// The learning rate of an update (from 1).
pub type LearningRate = Arc<dyn Fn(u64) -> f64 + Send + Sync>;

/// The coefficients of an update (from 1) with a clipping coefficient, for decayed or exempt tensors.
pub type AdamW = Arc<dyn Fn(u64, f32, Decay) -> AdamWStep + Send + Sync>;

/// The optimizer and its schedule, as functions of the update: pure, the same on every worker.
#[derive(Clone)]
pub struct UpdateRule {
    /// The largest L2 norm of the mean gradient; without it gradients are not clipped.
    pub clip_norm: Option<f64>,
    /// For the report.
    pub learning_rate: LearningRate,
    /// For the update.
    pub adamw: AdamW,
}

impl UpdateRule {
    /// The rule of a run's `[optimizer]` and `[schedule]`, whose curve ends after `horizon` updates.
    pub fn new(optimizer: OptimizerSettings, schedule: ScheduleSettings, horizon: u64) -> Self {
        let (clip_norm, base) = (optimizer.clip_norm, optimizer.learning_rate);
        let learning_rate: LearningRate =
            Arc::new(move |update| schedule.learning_rate(base, update, horizon));
        let rate = Arc::clone(&learning_rate);
        Self {
            clip_norm: Some(clip_norm),
            learning_rate,
            adamw: Arc::new(move |update, coefficient, decay| {
                optimizer.adamw_step(update, rate(update), f64::from(coefficient), decay)
            }),
        }
    }

    /// What the mean gradient is multiplied by, given its norm.
    pub fn coefficient(&self, norm: f64) -> f32 {
        self.clip_norm.map_or(1.0, |clip_norm| clip_coefficient(norm, clip_norm) as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clipping_scales_only_what_is_too_long() {
        let mut rule = UpdateRule {
            clip_norm: Some(1.0),
            learning_rate: Arc::new(|_| 0.1),
            adamw: Arc::new(|_, _, _| unreachable!()),
        };
        assert_eq!(rule.coefficient(0.5), 1.0);
        assert_eq!(rule.coefficient(4.0), (1.0 / 4.000_001) as f32);
        assert_eq!(rule.coefficient(0.0), 1.0);
        rule.clip_norm = None;
        assert_eq!(rule.coefficient(1e9), 1.0);
    }
}
