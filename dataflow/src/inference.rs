//! A trained model, opened to generate and to score.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tidemill_kernels::{Backend, Cpu};
use tidemill_model::generation::{GenerationSettings, Recurrence, generate};
use tidemill_model::hugging_face::{MambaHuggingFaceConfig, load};
use tidemill_model::score::Scorer;
use tidemill_model::{Device, Mamba, ModelError, Parameters};

use crate::checkpoint;
use crate::error::Result;

/// A model on a device, from a checkpoint, a run folder or a Hugging Face folder.
pub struct LoadedModel<B: Backend = Cpu> {
    folder: PathBuf,
    eos_token: Option<u32>,
    model: Mamba,
    parameters: Parameters<B>,
    backend: Arc<B>,
    stream: B::DeviceStream,
}

impl<B: Backend> LoadedModel<B> {
    /// Opens `path` on `backend`, such as [`Cpu::new`]: a checkpoint, a run folder (its latest checkpoint), or a Hugging
    /// Face folder.
    ///
    /// # Errors
    /// A folder that holds no model, files that are missing or damaged, or a device without room.
    pub fn open(path: &Path, backend: Arc<B>) -> Result<Self> {
        let folder = checkpoint::model_folder(path)?;
        if folder.join(checkpoint::TRAINER_FILE).exists() {
            // One of our own: its checksums say whether it is whole.
            checkpoint::Checkpoint::open(&folder)?;
        }
        let config = MambaHuggingFaceConfig::read(&folder)?;
        let (model, arena) = load(&folder)?;
        let mut stream = backend.device_stream().map_err(ModelError::from)?;
        let mut device = Device { backend: backend.as_ref(), stream: &mut stream };
        let parameters = Parameters::from_host(&mut device, model.layout(), &arena)?;
        Ok(Self { folder, eos_token: config.eos_token_id, model, parameters, backend, stream })
    }

    /// The folder that the model was read from.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The token that ends a document, where the model names one.
    pub fn eos_token(&self) -> Option<u32> {
        self.eos_token
    }

    /// Continues `prompt`; `on_token` sees each new token as it is chosen. Returns the new tokens.
    ///
    /// # Errors
    /// An empty prompt, a token outside the vocabulary, or a setting that chooses nothing.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        settings: &GenerationSettings,
        on_token: impl FnMut(u32),
    ) -> Result<Vec<u32>> {
        let mut device = Device { backend: self.backend.as_ref(), stream: &mut self.stream };
        let mut recurrence = Recurrence::new(&mut device, &self.model, &self.parameters, 1)?;
        Ok(generate(&mut device, &mut recurrence, prompt, settings, on_token)?)
    }

    /// Opens a scorer, which scores one sequence after the other.
    ///
    /// # Errors
    /// A device without room.
    pub fn scorer(&mut self) -> Result<ModelScorer<'_, B>> {
        let mut device = Device { backend: self.backend.as_ref(), stream: &mut self.stream };
        let scorer = Scorer::new(&mut device, &self.model, &self.parameters)?;
        Ok(ModelScorer { scorer, backend: self.backend.as_ref(), stream: &mut self.stream })
    }
}

/// Scores sequences with a [`LoadedModel`].
pub struct ModelScorer<'m, B: Backend = Cpu> {
    scorer: Scorer<'m, B>,
    backend: &'m B,
    stream: &'m mut B::DeviceStream,
}

impl<B: Backend> ModelScorer<'_, B> {
    /// `log p(tokens[i + 1] | tokens[..= i])` in nats: one number fewer than tokens.
    ///
    /// # Errors
    /// Fewer than two tokens, or a token outside the vocabulary.
    pub fn log_probabilities(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let mut device = Device { backend: self.backend, stream: self.stream };
        Ok(self.scorer.log_probabilities(&mut device, tokens)?)
    }
}
