//! AdamW (Loshchilov and Hutter, 2019), in PyTorch's form and in that of Composer's
//! `DecoupledAdamW`.

use tidemill_kernels::Backend;
use tidemill_kernels::backend::AdamWStep;

use super::OptimizerSettings;
use super::rule::{StateSpec, UpdateRule, UpdateScalars, UpdateViews};
use crate::error::Result;
use crate::trainable::Device;

/// The first and the second moment, as PyTorch names them.
pub(super) const STATES: [StateSpec; 2] =
    [StateSpec::of_elements("exp_avg"), StateSpec::of_elements("exp_avg_sq")];

/// The update rule of AdamW. The update itself is a kernel, [`AdamW::adamw_master`](tidemill_kernels::backend::AdamW::adamw_master); this
/// type supplies its scalars, which are computed in f64 and rounded once, so that every worker has the
/// same bits.
#[derive(Clone, Debug)]
pub struct AdamW {
    settings: OptimizerSettings,
}

impl AdamW {
    /// The rule of `settings`.
    pub fn new(settings: OptimizerSettings) -> Self {
        Self { settings }
    }

    /// The scalars of an update.
    pub fn step(&self, scalars: UpdateScalars) -> AdamWStep {
        let UpdateScalars { update, learning_rate, gradient_scale, .. } = scalars;
        // The check of a run's settings ensures that there are betas and an eps.
        let [beta1, beta2] = self.settings.betas.unwrap_or_default();
        let bias_correction = |beta: f64| (1.0 - libm::pow(beta, update as f64)) as f32;
        AdamWStep {
            learning_rate: learning_rate as f32,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            eps: self.settings.eps.unwrap_or_default() as f32,
            decay_factor: self.settings.decay_factor(&scalars) as f32,
            bias_correction1: bias_correction(beta1),
            bias_correction2: bias_correction(beta2),
            gradient_scale,
        }
    }
}

impl<B: Backend> UpdateRule<B> for AdamW {
    fn states(&self) -> &[StateSpec] {
        &STATES
    }

    fn update(
        &self,
        Device { backend, stream }: &mut Device<'_, B>,
        views: UpdateViews<'_, B>,
        scalars: UpdateScalars,
    ) -> Result<()> {
        let (master, [exp_avg, exp_avg_sq], gradient) = views.split()?;
        let step = self.step(scalars);
        Ok(backend.adamw_master(stream, master, [exp_avg, exp_avg_sq], gradient, step)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Decay;
    use crate::optimizer::UpdateTerms;

    #[test]
    fn bias_corrections_count_steps_from_one() {
        let rule = AdamW::new(OptimizerSettings::default());
        let terms = UpdateTerms::of(Decay::Exempt);
        let step = |update| rule.step(UpdateScalars::new(update, 1.0, 0.5, terms));
        assert_eq!(step(1).bias_correction1, 0.1);
        assert_eq!(step(1).bias_correction2, 0.05);
        assert_eq!(step(2).bias_correction1, 0.19);
        assert_eq!(step(2).gradient_scale, 0.5);
        assert_eq!(step(1_000_000).bias_correction2, 1.0);
    }
}
