//! Optimizers: the `[optimizer]` table, and the update rules that it names.
//!
//! A [`rule`] is an update over named states. [`AdamW`] is the default; the others are [`Lion`],
//! [`Adafactor`] and [`Muon`]. An embedder may give the training graph a rule of its own.

mod adafactor;
mod adamw;
mod groups;
mod lion;
mod muon;
mod on_host;
pub mod rule;
mod state_arena;
mod terms;

use std::sync::Arc;

use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};
use tidemill_kernels::{Backend, Cpu};

pub use self::adafactor::{Adafactor, AdafactorSettings, StepSize};
pub use self::adamw::AdamW;
pub use self::groups::{GroupSettings, update_terms};
pub use self::lion::Lion;
pub use self::muon::{Lookahead, Muon, MuonSettings, MuonStepSize};
pub use self::on_host::on_host;
pub use self::rule::{
    HostViews, MOST_STATES, StateExtent, StateSpec, StateTensors, UpdateRule, UpdateScalars,
    UpdateUnit, UpdateViews, check_states,
};
pub use self::state_arena::StateArena;
pub use self::terms::{UpdateTerms, WeightDecay};

use crate::error::{ModelError, Result};
use crate::layout::Layout;

/// Added to the norm before dividing by it, as PyTorch's `clip_grad_norm_` does.
const CLIP_EPSILON: f64 = 1e-6;

/// The optimizer, and how its weight decay scales with the learning rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerName {
    /// `p *= 1 - learning_rate_t * weight_decay` (Loshchilov and Hutter, 2019, as PyTorch does).
    #[default]
    Adamw,
    /// `p *= 1 - (learning_rate_t / learning_rate) * weight_decay`: the decay is absolute and follows the
    /// schedule alone (Composer's `DecoupledAdamW`).
    DecoupledAdamw,
    /// [`Lion`]: one state instead of two, and updates that have the size of the learning rate.
    Lion,
    /// [`Adafactor`]: states of rows and columns instead of elements.
    Adafactor,
    /// [`Muon`]: orthogonalized momenta for hidden matrices, and AdamW for all other tensors.
    Muon,
}

impl OptimizerName {
    /// The name in configs.
    pub fn word(self) -> &'static str {
        match self {
            Self::Adamw => "adamw",
            Self::DecoupledAdamw => "decoupled_adamw",
            Self::Lion => "lion",
            Self::Adafactor => "adafactor",
            Self::Muon => "muon",
        }
    }
}

/// The `[optimizer]` table. The defaults of absent keys depend on the name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Written")]
pub struct OptimizerSettings {
    /// Which optimizer.
    pub name: OptimizerName,
    /// The base learning rate, which the schedule multiplies. Default 1e-3; Lion 1e-4, Adafactor
    /// 1e-2.
    pub learning_rate: f64,
    /// The decays of the first and the second moment. Default 0.9 and 0.95. For Lion the share of
    /// the average in an update, and the average's decay: 0.9 and 0.99. Adafactor has none. Muon
    /// uses them for tensors that AdamW updates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub betas: Option<[f64; 2]>,
    /// Added to the root of the second moment: 1e-8. Adafactor adds it to the square of a gradient:
    /// 1e-30. Lion has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eps: Option<f64>,
    /// Weight decay of every tensor of two or more dimensions except `A_log`. Default 0.1; Lion
    /// 1.0, because its smaller learning rate multiplies it; Adafactor 0.
    pub weight_decay: f64,
    /// The norm that the mean gradient is clipped to: 1. Clipping is always on, since a run whose
    /// gradient explodes once is lost; a large number has the effect of none.
    pub clip_norm: f64,
    /// `[optimizer.adafactor]`, for that name only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adafactor: Option<AdafactorSettings>,
    /// `[optimizer.muon]`, for that name only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub muon: Option<MuonSettings>,
    /// `[[optimizer.groups]]`: tensors, by name, with a learning rate or a weight decay of their
    /// own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GroupSettings>,
}

/// The `[optimizer]` table as a user writes it.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Written {
    name: OptimizerName,
    learning_rate: Option<f64>,
    #[serde(deserialize_with = "two_numbers")]
    betas: Option<[f64; 2]>,
    eps: Option<f64>,
    weight_decay: Option<f64>,
    clip_norm: Option<f64>,
    adafactor: Option<AdafactorSettings>,
    muon: Option<MuonSettings>,
    groups: Vec<GroupSettings>,
}

/// A list of two numbers: of a longer one, serde would read the first two.
fn two_numbers<'de, D: Deserializer<'de>>(
    written: D,
) -> std::result::Result<Option<[f64; 2]>, D::Error> {
    let numbers = Vec::<f64>::deserialize(written)?;
    let wrong = |numbers: Vec<f64>| D::Error::invalid_length(numbers.len(), &"two numbers");
    <[f64; 2]>::try_from(numbers).map(Some).map_err(wrong)
}

impl From<Written> for OptimizerSettings {
    fn from(written: Written) -> Self {
        let default = Self::of(written.name);
        Self {
            name: written.name,
            learning_rate: written.learning_rate.unwrap_or(default.learning_rate),
            betas: written.betas.or(default.betas),
            eps: written.eps.or(default.eps),
            weight_decay: written.weight_decay.unwrap_or(default.weight_decay),
            clip_norm: written.clip_norm.unwrap_or(default.clip_norm),
            adafactor: written.adafactor.or(default.adafactor),
            muon: written.muon.or(default.muon),
            groups: written.groups,
        }
    }
}

impl Default for OptimizerSettings {
    fn default() -> Self {
        Self::of(OptimizerName::default())
    }
}

/// `min(1, clip_norm / (norm + 1e-6))`, as PyTorch's `clip_grad_norm_` has it.
pub fn clip_coefficient(norm: f64, clip_norm: f64) -> f64 {
    (clip_norm / (norm + CLIP_EPSILON)).min(1.0)
}

impl OptimizerSettings {
    /// The settings of an optimizer where a table gives only its name.
    pub fn of(name: OptimizerName) -> Self {
        let adamw = Self {
            name,
            learning_rate: 1e-3,
            betas: Some([0.9, 0.95]),
            eps: Some(1e-8),
            weight_decay: 0.1,
            clip_norm: 1.0,
            adafactor: None,
            muon: None,
            groups: Vec::new(),
        };
        match name {
            OptimizerName::Adamw | OptimizerName::DecoupledAdamw => adamw,
            // The paper's betas. Lion's updates are larger than AdamW's, so the rate is a tenth,
            // and the decay ten times as large to keep their product.
            OptimizerName::Lion => Self {
                learning_rate: 1e-4,
                betas: Some([0.9, 0.99]),
                eps: None,
                weight_decay: 1.0,
                ..adamw
            },
            // The paper's constants; the learning rate is the maximum of the paper's own schedule.
            OptimizerName::Adafactor => Self {
                learning_rate: 1e-2,
                betas: None,
                eps: Some(1e-30),
                weight_decay: 0.0,
                adafactor: Some(AdafactorSettings::default()),
                ..adamw
            },
            OptimizerName::Muon => Self { muon: Some(MuonSettings::default()), ..adamw },
        }
    }

    /// Checks every value. Whether groups match any tensor is checked [with a model](update_terms).
    ///
    /// # Errors
    /// A value that no update can use, named by its key.
    pub fn check(&self) -> Result<()> {
        let finite = |key, value: f64, allowed: fn(f64) -> bool, expected| {
            if value.is_finite() && allowed(value) {
                Ok(())
            } else {
                Err(ModelError::config(format!("optimizer.{key}"), expected, value))
            }
        };
        // Updates compute in fp32, where a large number is infinite, one close to 1 is 1, and a small one is 0, which would divide 0 by 0
        // wherever a gradient is zero.
        let at_least_zero: fn(f64) -> bool = |x| x >= 0.0 && (x as f32).is_finite();
        let below_one: fn(f64) -> bool = |x| x >= 0.0 && (x as f32) < 1.0;
        let above_zero: fn(f64) -> bool = |x| x as f32 > 0.0 && (x as f32).is_finite();
        let expected = "a finite number of at least 0, in fp32";
        finite("learning_rate", self.learning_rate, at_least_zero, expected)?;
        let none = |key: &str, found: String| {
            let expected = format!("no value, as {} has no such setting", self.name.word());
            Err(ModelError::config(format!("optimizer.{key}"), expected, found))
        };
        match (self.name, self.betas) {
            (OptimizerName::Adafactor, None) => {}
            (OptimizerName::Adafactor, Some(betas)) => return none("betas", format!("{betas:?}")),
            (_, betas) => {
                for beta in betas.unwrap_or([f64::NAN; 2]) {
                    let expected = "two numbers of at least 0 and below 1, in fp32";
                    finite("betas", beta, below_one, expected)?;
                }
            }
        }
        match (self.name, self.eps) {
            (OptimizerName::Lion, None) => {}
            (OptimizerName::Lion, Some(eps)) => return none("eps", eps.to_string()),
            (_, eps) => {
                let eps = eps.unwrap_or(f64::NAN);
                finite("eps", eps, above_zero, "a finite number above 0, in fp32")?;
            }
        }
        match (self.name, &self.adafactor) {
            (OptimizerName::Adafactor, own) => own.unwrap_or_default().check()?,
            (_, Some(_)) => return none("adafactor", "a table".to_owned()),
            (_, None) => {}
        }
        match (self.name, &self.muon) {
            (OptimizerName::Muon, own) => own.unwrap_or_default().check()?,
            (_, Some(_)) => return none("muon", "a table".to_owned()),
            (_, None) => {}
        }
        finite("weight_decay", self.weight_decay, at_least_zero, expected)?;
        finite("clip_norm", self.clip_norm, above_zero, "a finite number above 0, in fp32")?;
        self.groups.iter().enumerate().try_for_each(|(place, group)| group.check(place))
    }

    /// `min(1, clip_norm / (norm + 1e-6))`, where `norm` is that of the mean gradient before clipping.
    pub fn clip_coefficient(&self, norm: f64) -> f64 {
        clip_coefficient(norm, self.clip_norm)
    }

    /// The factor on parameters before an update with these scalars: 1 where their decay is 0.
    pub fn decay_factor(&self, scalars: &UpdateScalars) -> f64 {
        let weight_decay = scalars.weight_decay.or_of_rule(self.weight_decay);
        match self.name {
            OptimizerName::Adamw
            | OptimizerName::Lion
            | OptimizerName::Adafactor
            | OptimizerName::Muon => 1.0 - scalars.learning_rate * weight_decay,
            OptimizerName::DecoupledAdamw => {
                let factor = match self.learning_rate {
                    0.0 => 1.0,
                    base => scalars.scheduled_rate / base,
                };
                1.0 - factor * weight_decay
            }
        }
    }

    /// The terms of each tensor of `layout`.
    ///
    /// # Errors
    /// As [`update_terms`].
    pub fn terms(&self, layout: &Layout) -> Result<Vec<UpdateTerms>> {
        update_terms(&self.groups, layout)
    }

    /// The states of [`rule`](Self::rule).
    pub fn states(&self) -> &'static [StateSpec] {
        match self.name {
            OptimizerName::Adamw | OptimizerName::DecoupledAdamw => &adamw::STATES,
            OptimizerName::Lion => &lion::STATES,
            OptimizerName::Adafactor => &adafactor::STATES,
            OptimizerName::Muon => &muon::STATES,
        }
    }

    /// Bytes of device memory that an update needs, as [`rule`](Self::rule) reports them.
    pub fn scratch_bytes<B: Backend>(&self, layout: &Layout) -> usize {
        self.rule::<B>().scratch_bytes(layout)
    }

    /// The smallest unit that one worker updates by itself, as [`rule`](Self::rule) reports it.
    pub fn unit(&self) -> UpdateUnit {
        UpdateRule::<Cpu>::unit(&*self.rule())
    }

    /// The update rule.
    pub fn rule<B: Backend>(&self) -> Arc<dyn UpdateRule<B>> {
        match self.name {
            OptimizerName::Adamw | OptimizerName::DecoupledAdamw => {
                Arc::new(AdamW::new(self.clone()))
            }
            OptimizerName::Lion => Arc::new(Lion::new(self.clone())),
            OptimizerName::Adafactor => Arc::new(Adafactor::new(self.clone())),
            OptimizerName::Muon => Arc::new(Muon::new(self.clone())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scalars(scheduled_rate: f64, factor: f64, weight_decay: WeightDecay) -> UpdateScalars {
        let terms = UpdateTerms { learning_rate_factor: factor, weight_decay };
        UpdateScalars::new(1, scheduled_rate, 1.0, terms)
    }

    #[test]
    fn decay_follows_the_learning_rate_or_the_schedule_alone() {
        let adamw = OptimizerSettings::default();
        let decoupled = OptimizerSettings { name: OptimizerName::DecoupledAdamw, ..adamw.clone() };
        let of = |rate_factor, weight_decay, settings: &OptimizerSettings| {
            settings.decay_factor(&scalars(5e-4, rate_factor, weight_decay))
        };
        assert_eq!(of(1.0, WeightDecay::OfRule, &adamw), 1.0 - 5e-4 * 0.1);
        assert_eq!(of(1.0, WeightDecay::OfRule, &decoupled), 1.0 - 0.5 * 0.1);
        assert_eq!(of(1.0, WeightDecay::Exempt, &adamw), 1.0);
        assert_eq!(of(1.0, WeightDecay::Exempt, &decoupled), 1.0);
        // The decay of a group, and the learning rate of a group, which does not change a decay
        // that follows the schedule alone.
        assert_eq!(of(0.5, WeightDecay::OfGroup(0.2), &adamw), 1.0 - 2.5e-4 * 0.2);
        assert_eq!(of(0.5, WeightDecay::OfGroup(0.2), &decoupled), 1.0 - 0.5 * 0.2);
        assert_eq!(of(0.0, WeightDecay::OfRule, &decoupled), 1.0 - 0.5 * 0.1);
        let without_rate = OptimizerSettings { learning_rate: 0.0, ..decoupled };
        assert_eq!(of(1.0, WeightDecay::OfRule, &without_rate), 0.9);
    }

    #[test]
    fn clipping_shortens_and_never_lengthens() {
        let settings = OptimizerSettings { clip_norm: 2.0, ..OptimizerSettings::default() };
        assert_eq!(settings.clip_coefficient(0.0), 1.0);
        assert_eq!(settings.clip_coefficient(1.0), 1.0);
        assert_eq!(settings.clip_coefficient(4.0), 2.0 / 4.000_001);
    }

    #[test]
    fn wrong_values_are_named() {
        let bad = |change: fn(&mut OptimizerSettings)| {
            let mut settings = OptimizerSettings::default();
            change(&mut settings);
            settings.check().expect_err("refused").to_string()
        };
        assert!(bad(|s| s.learning_rate = -1.0).starts_with("optimizer.learning_rate:"));
        assert!(bad(|s| s.betas = Some([0.9, 1.0])).starts_with("optimizer.betas:"));
        assert!(bad(|s| s.eps = Some(1e-60)).starts_with("optimizer.eps:"));
        assert!(bad(|s| s.weight_decay = f64::NAN).starts_with("optimizer.weight_decay:"));
        assert!(bad(|s| s.clip_norm = 0.0).starts_with("optimizer.clip_norm:"));
        OptimizerSettings::default().check().expect("the defaults are allowed");
        let json = r#"{"name": "decoupled_adamw", "betas": [0.9, 0.99]}"#;
        let settings: OptimizerSettings = serde_json::from_str(json).expect("keys as documented");
        assert_eq!(settings.name, OptimizerName::DecoupledAdamw);
        assert_eq!(settings.clip_norm, 1.0);
        assert!(serde_json::from_str::<OptimizerSettings>(r#"{"lr": 1}"#).is_err());
    }

    #[test]
    fn what_is_not_written_depends_on_the_name() {
        let read = |json: &str| serde_json::from_str::<OptimizerSettings>(json).expect("read");
        let lion = read(r#"{"name": "lion", "weight_decay": 0.3}"#);
        let expected = OptimizerSettings { weight_decay: 0.3, ..OptimizerSettings::of(lion.name) };
        assert_eq!(lion, expected);
        assert_eq!((lion.betas, lion.eps, lion.learning_rate), (Some([0.9, 0.99]), None, 1e-4));
        lion.check().expect("allowed");
        assert_eq!(lion.decay_factor(&scalars(1e-4, 1.0, WeightDecay::OfRule)), 1.0 - 1e-4 * 0.3);
        // The settings that a run saves are read again.
        let groups = read(r#"{"groups": [{"match": ["*.norm.*", "x"], "weight_decay": 0.0}]}"#);
        assert_eq!(groups.groups[0].patterns, ["*.norm.*", "x"]);
        assert_eq!(groups.groups[0].learning_rate_factor, None);
        let adafactor = read(r#"{"name": "adafactor", "adafactor": {"step_size": "absolute"}}"#);
        adafactor.check().expect("allowed");
        let own = AdafactorSettings { step_size: StepSize::Absolute, ..Default::default() };
        let expected = OptimizerSettings::of(OptimizerName::Adafactor);
        assert_eq!(adafactor, OptimizerSettings { adafactor: Some(own), ..expected });
        for settings in [lion, groups, adafactor, OptimizerSettings::default()] {
            let name = serde_json::to_value(settings.name).expect("written");
            assert_eq!(name, settings.name.word());
            let written = serde_json::to_string(&settings).expect("written");
            assert_eq!(read(&written), settings, "{written}");
        }
        for (json, said) in [
            (
                r#"{"name": "lion", "eps": 1e-8}"#,
                "optimizer.eps: expected no value, as lion has no",
            ),
            (
                r#"{"name": "adafactor", "betas": [0.9, 0.9]}"#,
                "optimizer.betas: expected no value, as adafactor has no",
            ),
            (
                r#"{"adafactor": {}}"#,
                "optimizer.adafactor: expected no value, as adamw has no such setting",
            ),
            (
                r#"{"name": "adafactor", "adafactor": {"clip_threshold": 0.0}}"#,
                "optimizer.adafactor.clip_threshold: expected a finite number above 0",
            ),
        ] {
            let error = read(json).check().expect_err(json).to_string();
            assert!(error.starts_with(said), "{error}");
        }
    }
}
