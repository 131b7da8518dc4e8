//! A trained model, opened to generate and to score.

use std::path::Path;
use std::sync::Arc;

use tidemill_kernels::{Backend, Cpu, MemoryPlace};
use tidemill_model::generation::{
    Capacity, GenerationSettings, Prompt, Sequences, Written, generate_batch,
};
use tidemill_model::hugging_face::load;
use tidemill_model::score::{Continuation, ContinuationScore, PendingScores, Scorer};
use tidemill_model::{
    Device, Family, LanguageModel, ModelConfig, ModelError, Parameters, SpecialTokens,
};

use crate::checkpoint::{Checkpoint, LocalCopy, TRAINER_FILE, Wanted, model_folder};
use crate::error::Result;

/// Sequences at once where memory bounds nothing: more gain little on a CPU.
const MOST_SEQUENCES: usize = 32;

/// Texts that a device of its own scores at once: as many short ones as fill it.
const MOST_TEXTS: usize = 128;

/// The host memory that sequences may take by default.
const HOST_BYTES: usize = 1 << 30;

/// The files of a model on this machine, and its `config.json`: all that is known of it before a device is open.
pub struct ModelFiles {
    copy: LocalCopy,
    config: ModelConfig,
}

impl ModelFiles {
    /// The files of `path`: the folder or URL of a checkpoint, of a run (its latest checkpoint), or of a model as Hugging Face lays it out.
    ///
    /// # Errors
    /// A folder that holds no model, or a config that is damaged or of a model that is not known here.
    pub fn open(path: &Path) -> Result<Self> {
        let copy = LocalCopy::of(&model_folder(path)?, Wanted::Model)?;
        let config = copy.read(|folder| {
            ModelConfig::read(folder).or_else(|error| {
                verify(&copy, folder)?;
                Err(error.into())
            })
        })?;
        Ok(Self { copy, config })
    }

    /// The folder of the files; a copy where the model is in a store.
    pub fn folder(&self) -> &Path {
        self.copy.path()
    }

    /// Tokens with a meaning of their own.
    pub fn special_tokens(&self) -> SpecialTokens {
        self.config.special_tokens()
    }

    /// How many positions the model has learned, where it has learned some.
    pub fn learned_positions(&self) -> Option<usize> {
        self.config.learned_positions()
    }
}

/// Compares a checkpoint of our own with its checksums, which say whether it is whole. (Those of a copy were compared.)
fn verify(copy: &LocalCopy, folder: &Path) -> Result<()> {
    if !copy.is_fetched() && folder.join(TRAINER_FILE).exists() {
        Checkpoint::open_for(folder, Wanted::Model)?;
    }
    Ok(())
}

/// A model on a device, from a checkpoint, a run folder or a Hugging Face folder.
pub struct LoadedModel<B: Backend = Cpu> {
    files: Arc<ModelFiles>,
    special_tokens: SpecialTokens,
    model: LanguageModel<B>,
    parameters: Parameters<B>,
    backend: Arc<B>,
    stream: B::DeviceStream,
}

impl<B: Backend> LoadedModel<B> {
    /// Opens `path` on `backend`, such as [`Cpu::new`]: the folder or URL of a checkpoint, of a run (its latest
    /// checkpoint), or of a model as Hugging Face lays it out.
    ///
    /// # Errors
    /// A folder that holds no model, files that are missing or damaged, or a device without room.
    pub fn open(path: &Path, backend: Arc<B>) -> Result<Self> {
        Self::of_files(&Arc::new(ModelFiles::open(path)?), backend)
    }

    /// Opens the model of `files` on `backend`.
    ///
    /// # Errors
    /// Files that are missing or damaged, or a device without room.
    pub fn of_files(files: &Arc<ModelFiles>, backend: Arc<B>) -> Result<Self> {
        let (model, arena) = files.copy.read(|folder| {
            std::thread::scope(|scope| {
                let verified = scope.spawn(|| verify(&files.copy, folder));
                let loaded = load(folder);
                // The checksums decide first: an error about the content of a damaged file would mislead.
                verified.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                Ok(loaded?)
            })
        })?;
        let mut stream = backend.device_stream().map_err(ModelError::from)?;
        let mut device = Device { backend: backend.as_ref(), stream: &mut stream };
        let parameters = Parameters::from_host(&mut device, model.layout(), &arena)?;
        let (files, special_tokens) = (Arc::clone(files), files.special_tokens());
        Ok(Self { files, special_tokens, model, parameters, backend, stream })
    }

    /// The folder that the model was read from; a copy where that is in a store.
    pub fn folder(&self) -> &Path {
        self.files.folder()
    }

    /// The token that ends a document, where the model names one.
    pub fn eos_token(&self) -> Option<u32> {
        self.special_tokens.eos
    }

    /// The token that begins a document, where the model names one.
    pub fn bos_token(&self) -> Option<u32> {
        self.special_tokens.bos
    }

    /// How many positions the model has learned, where it has learned some: prompt and answer are no longer.
    pub fn learned_positions(&self) -> Option<usize> {
        self.model.positions().map(|learned| learned.count)
    }

    /// How many sequences of up to `positions` tokens are best worked on at once: as many as take half of what memory of the
    /// device is free, and few enough that none wait long for the others.
    ///
    /// # Errors
    /// A device that fails.
    pub fn sequences_at_once(&self, positions: usize) -> Result<usize> {
        self.fitting(positions, MOST_SEQUENCES)
    }

    /// How many texts of up to `positions` tokens are best scored at once, where they are short: nothing waits for them.
    ///
    /// # Errors
    /// A device that fails.
    pub fn texts_at_once(&self, positions: usize) -> Result<usize> {
        let most = match self.backend.memory() {
            MemoryPlace::Host => MOST_SEQUENCES,
            MemoryPlace::Device => MOST_TEXTS,
        };
        self.fitting(positions, most)
    }

    fn fitting(&self, positions: usize, most: usize) -> Result<usize> {
        let free = self.backend.free_memory_bytes().map_err(ModelError::from)?;
        let bytes = free.map_or(HOST_BYTES, |free| free / 2);
        let positions = positions.min(self.learned_positions().unwrap_or(positions));
        let fits = |&sequences: &usize| {
            let capacity = Capacity::new(sequences, positions.max(1));
            let of_blocks = self.model.blocks().iter().map(|block| block.state_bytes(capacity));
            of_blocks.fold(0, usize::saturating_add) <= bytes
        };
        Ok((1..=most).rev().find(fits).unwrap_or(1))
    }

    /// Continues `prompt`; `on_token` sees each new token as it is chosen. Returns the new tokens, which end where the learned
    /// positions do.
    ///
    /// # Errors
    /// A prompt that [`check_prompt`](Self::check_prompt) refuses, or a setting that chooses nothing.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        settings: &GenerationSettings,
        mut on_token: impl FnMut(u32),
    ) -> Result<Vec<u32>> {
        let prompt = Prompt { tokens: prompt, index: 0 };
        let on_written = |_, written: Written<'_>| {
            if let Written::Token(token) = written {
                on_token(token);
            }
        };
        let written = self.generate_batch(&[prompt], 1, settings, on_written)?;
        Ok(written.into_iter().flatten().collect())
    }

    /// Continues all of `prompts`, `at_once` of them at a time: the next takes the place of one whose answer has ended. `on_written` is
    /// called as tokens are written, with the place of their prompt. Returns the new tokens of each prompt, which depend on nothing else.
    ///
    /// # Errors
    /// As [`generate`](Self::generate), or a device without room.
    pub fn generate_batch(
        &mut self,
        prompts: &[Prompt<'_>],
        at_once: usize,
        settings: &GenerationSettings,
        on_written: impl FnMut(usize, Written<'_>),
    ) -> Result<Vec<Vec<u32>>> {
        let longest = prompts.iter().map(|prompt| prompt.tokens.len()).max().unwrap_or(0);
        let positions = longest.saturating_add(settings.max_new_tokens).max(1);
        let (model, parameters) = (&self.model, &self.parameters);
        let mut device = Device { backend: self.backend.as_ref(), stream: &mut self.stream };
        let room = prompts.len().min(at_once).max(1);
        let sampling = &settings.sampling;
        let mut sequences =
            Sequences::for_sampling(&mut device, model, parameters, room, positions, sampling)?;
        Ok(generate_batch(&mut device, &mut sequences, prompts, settings, on_written)?)
    }

    /// The fault of a prompt, if it has one.
    ///
    /// # Errors
    /// An empty prompt, one longer than the learned positions, or a token outside the vocabulary.
    pub fn check_prompt(&self, prompt: &[u32]) -> Result<()> {
        Ok(self.model.check_prompt(prompt)?)
    }

    /// The fault of a text that is to be scored, if it has one.
    ///
    /// # Errors
    /// Fewer than two tokens, more than there are learned positions for, or a token outside the vocabulary.
    pub fn check_text(&self, tokens: &[u32]) -> Result<()> {
        Ok(self.model.check_text(tokens)?)
    }

    /// Opens a scorer of up to `sequences` texts at once, of up to `positions` tokens each.
    ///
    /// # Errors
    /// A device without room.
    pub fn scorer(&mut self, sequences: usize, positions: usize) -> Result<ModelScorer<'_, B>> {
        let (model, parameters) = (&self.model, &self.parameters);
        let mut device = Device { backend: self.backend.as_ref(), stream: &mut self.stream };
        let scorer = Scorer::new(&mut device, model, parameters, sequences, positions)?;
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
    /// `log p(tokens[i + 1] | tokens[..= i])` in nats, for each text: one number fewer than tokens.
    ///
    /// # Errors
    /// Fewer than two tokens, more tokens or texts than there is room for, or a token outside the vocabulary.
    pub fn log_probabilities(&mut self, texts: &[&[u32]]) -> Result<Vec<Vec<f32>>> {
        let mut device = Device { backend: self.backend, stream: self.stream };
        Ok(self.scorer.log_probabilities_of_each(&mut device, texts)?)
    }

    /// The scores of the ends of several texts, each equal to the bit to its score alone.
    ///
    /// # Errors
    /// As [`log_probabilities`](Self::log_probabilities); a continuation without tokens, or one without a context.
    pub fn continuations(&mut self, texts: &[Continuation<'_>]) -> Result<Vec<ContinuationScore>> {
        let mut device = Device { backend: self.backend, stream: self.stream };
        Ok(self.scorer.continuations(&mut device, texts)?)
    }

    /// Lets the device score the ends of several texts; [`finish`](Self::finish) waits for it.
    ///
    /// # Errors
    /// As [`continuations`](Self::continuations).
    pub fn enqueue(&mut self, texts: &[Continuation<'_>]) -> Result<PendingScores<B>> {
        let mut device = Device { backend: self.backend, stream: self.stream };
        Ok(self.scorer.enqueue(&mut device, texts)?)
    }

    /// The scores that were enqueued.
    ///
    /// # Errors
    /// A device that fails.
    pub fn finish(&mut self, pending: PendingScores<B>) -> Result<Vec<ContinuationScore>> {
        let mut device = Device { backend: self.backend, stream: self.stream };
        Ok(self.scorer.finish(&mut device, pending)?)
    }
}
