//! A model of a family before it is placed on a backend: everything that follows from its config
//! alone.

use serde_json::Value;
use tidemill_kernels::{Backend, Cpu};

use crate::error::Result;
use crate::family::Family;
use crate::language_model::{LanguageModel, Recompute};
use crate::layout::Layout;
use crate::model_config::ModelConfig;
use crate::parameter_list::ParameterList;

/// A config, the parameters that follow from it, and which activations are recomputed.
/// [`build`](Self::build) makes models from it, which have the same parameters on every backend.
#[derive(Debug)]
pub struct Blueprint {
    config: ModelConfig,
    recompute: Recompute,
    parameters: ParameterList,
    config_json: Value,
}

impl Blueprint {
    /// The blueprint of `config`.
    ///
    /// # Errors
    /// Sizes that no model can have.
    pub fn new(config: &ModelConfig) -> Result<Self> {
        // Parameters are the same on every backend; the CPU is the one that is always present.
        let (parameters, config_json) = LanguageModel::<Cpu>::new(config)?.into_parameters();
        let recompute = Recompute::default();
        Ok(Self { config: config.clone(), recompute, parameters, config_json })
    }

    /// The same blueprint, with `recompute` saying whether blocks keep or recompute the values that
    /// backward needs.
    pub fn with_recompute(mut self, recompute: Recompute) -> Self {
        self.recompute = recompute;
        self
    }

    /// The model on a backend.
    ///
    /// # Errors
    /// None that [`new`](Self::new) has not reported already.
    pub fn build<B: Backend>(&self) -> Result<LanguageModel<B>> {
        Ok(LanguageModel::new(&self.config)?.with_recompute(self.recompute))
    }

    /// The config.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The parameters, blocks and uses.
    pub fn layout(&self) -> &Layout {
        self.parameters.layout()
    }

    /// The initial parameter arena: a pure function of `seed`.
    pub fn initialize(&self, seed: u64) -> Vec<f32> {
        self.parameters.initialize(seed)
    }

    /// The Hugging Face `config.json`.
    pub fn config_json(&self) -> &Value {
        &self.config_json
    }

    /// v, the tokens of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.config.vocab_size()
    }
}
