//! Lion (Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms").

use tidemill_kernels::Backend;
use tidemill_kernels::backend::LionStep;

use super::OptimizerSettings;
use super::rule::{StateSpec, UpdateRule, UpdateScalars, UpdateViews};
use crate::error::Result;
use crate::trainable::Device;

/// The average of gradients.
pub(super) const STATES: [StateSpec; 1] = [StateSpec::of_elements("exp_avg")];

/// The update rule of Lion: one state, where AdamW has two. The update itself is the kernel
/// [`Lion::lion`](tidemill_kernels::backend::Lion::lion).
#[derive(Clone, Debug)]
pub struct Lion {
    settings: OptimizerSettings,
}

impl Lion {
    /// The rule of `settings`.
    pub fn new(settings: OptimizerSettings) -> Self {
        Self { settings }
    }

    /// The scalars of an update, computed in f64 and rounded once.
    pub fn step(&self, scalars: UpdateScalars) -> LionStep {
        let UpdateScalars { learning_rate, gradient_scale, .. } = scalars;
        // The check of a run's settings ensures that there are betas.
        let [beta1, beta2] = self.settings.betas.unwrap_or_default();
        LionStep {
            learning_rate: learning_rate as f32,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            decay_factor: self.settings.decay_factor(&scalars) as f32,
            gradient_scale,
        }
    }
}

impl<B: Backend> UpdateRule<B> for Lion {
    fn states(&self) -> &[StateSpec] {
        &STATES
    }

    fn update(
        &self,
        Device { backend, stream }: &mut Device<'_, B>,
        views: UpdateViews<'_, B>,
        scalars: UpdateScalars,
    ) -> Result<()> {
        let (master, [exp_avg], gradient) = views.split()?;
        Ok(backend.lion(stream, master, exp_avg, gradient, self.step(scalars))?)
    }
}
