//! Terms of an update that differ between tensors: the factor on the learning rate, and the weight
//! decay.

use crate::layout::Decay;

/// The weight decay of some elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WeightDecay {
    /// None: for vectors, and Mamba's `A_log`, unless a group says otherwise.
    Exempt,
    /// The decay of the update rule.
    OfRule,
    /// The decay of the tensor's group, in place of either.
    OfGroup(f64),
}

impl WeightDecay {
    /// The number, given that the rule's decay is `of_rule`.
    pub fn or_of_rule(self, of_rule: f64) -> f64 {
        match self {
            Self::Exempt => 0.0,
            Self::OfRule => of_rule,
            Self::OfGroup(weight_decay) => weight_decay,
        }
    }
}

impl From<Decay> for WeightDecay {
    fn from(decay: Decay) -> Self {
        match decay {
            Decay::Decayed => Self::OfRule,
            Decay::Exempt => Self::Exempt,
        }
    }
}

/// The terms of a tensor's updates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateTerms {
    /// The factor on the schedule's learning rate.
    pub learning_rate_factor: f64,
    /// The weight decay.
    pub weight_decay: WeightDecay,
}

impl UpdateTerms {
    /// The terms of a tensor in no group.
    pub fn of(decay: Decay) -> Self {
        Self { learning_rate_factor: 1.0, weight_decay: decay.into() }
    }

    /// Whether updates change nothing under any rule: neither a learning rate nor a decay.
    pub fn is_frozen(&self) -> bool {
        let has_no_decay =
            matches!(self.weight_decay, WeightDecay::Exempt | WeightDecay::OfGroup(0.0));
        self.learning_rate_factor == 0.0 && has_no_decay
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_has_neither_rate_nor_decay_is_frozen() {
        let is_frozen = |learning_rate_factor, weight_decay| {
            UpdateTerms { learning_rate_factor, weight_decay }.is_frozen()
        };
        assert!(is_frozen(0.0, WeightDecay::Exempt));
        assert!(is_frozen(0.0, WeightDecay::OfGroup(0.0)));
        assert!(!is_frozen(0.0, WeightDecay::OfGroup(0.1)));
        // A decay that follows the schedule alone continues where the learning rate is 0.
        assert!(!is_frozen(0.0, WeightDecay::OfRule));
        assert!(!is_frozen(1e-9, WeightDecay::Exempt));
        assert!(!UpdateTerms::of(Decay::Exempt).is_frozen());
    }
}
