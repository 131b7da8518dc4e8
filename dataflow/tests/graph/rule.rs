//! What an update is in these tests.

use std::sync::Arc;

use tidemill::kernels::Backend;
use tidemill::kernels::backend::AdamWStep;
use tidemill::model::optimizer::{
    OptimizerName, OptimizerSettings, StateArena, StateSpec, UpdateRule, UpdateScalars, UpdateUnit,
    UpdateViews, WeightDecay,
};
use tidemill::model::{Device, Layout};
use tidemill::operators::{ScheduledRule, UpdatePace};

/// The rule of updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// [`OwnAdamW`], of elements.
    AdamW,
    /// Adafactor, of tensors, on the host.
    Adafactor,
    /// Muon, of tensors, on the device.
    Muon,
    /// Adafactor where tensors have several owners.
    AdafactorOfElements,
}

/// AdamW about as the model crate would have it.
struct OwnAdamW;

const STATES: [StateSpec; 2] =
    [StateSpec::of_elements("exp_avg"), StateSpec::of_elements("exp_avg_sq")];

impl<B: Backend> UpdateRule<B> for OwnAdamW {
    fn states(&self) -> &[StateSpec] {
        &STATES
    }

    fn update(
        &self,
        Device { backend, stream }: &mut Device<'_, B>,
        views: UpdateViews<'_, B>,
        UpdateScalars { update, gradient_scale, weight_decay, .. }: UpdateScalars,
    ) -> tidemill::model::Result<()> {
        let (master, [exp_avg, exp_avg_sq], gradient) = views.split()?;
        let step = AdamWStep {
            learning_rate: 0.02 / update as f32,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            decay_factor: if weight_decay == WeightDecay::OfRule { 0.998 } else { 1.0 },
            bias_correction1: 1.0 - 0.9_f32.powi(update as i32),
            bias_correction2: 1.0 - 0.95_f32.powi(update as i32),
            gradient_scale,
        };
        Ok(backend.adamw_master(stream, master, [exp_avg, exp_avg_sq], gradient, step)?)
    }
}

impl Rule {
    pub fn scheduled<B: Backend>(self) -> ScheduledRule<B> {
        let learning_rate = Arc::new(|update| 0.02 / update as f64);
        let pace = UpdatePace { clip_norm: Some(0.5), learning_rate };
        let rule: Arc<dyn UpdateRule<B>> = match self {
            Self::AdamW => Arc::new(OwnAdamW),
            Self::Adafactor | Self::AdafactorOfElements => {
                OptimizerSettings::of(OptimizerName::Adafactor).rule()
            }
            Self::Muon => OptimizerSettings::of(OptimizerName::Muon).rule(),
        };
        ScheduledRule { pace, rule, groups: Vec::new() }
    }

    /// The unit that owners are cut by.
    pub fn planned_unit(self) -> UpdateUnit {
        match self {
            Self::AdamW | Self::AdafactorOfElements => UpdateUnit::Element,
            Self::Adafactor | Self::Muon => UpdateUnit::Tensor,
        }
    }

    /// The arenas of its states.
    pub fn arenas<B: Backend>(self, layout: &Layout) -> Vec<StateArena> {
        let rule = self.scheduled::<B>().rule;
        rule.states().iter().map(|spec| StateArena::new(layout, spec)).collect()
    }
}
