//! The resolved form of a `RUN.toml`, once its data set and its model are known.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tidemill_kernels::{DeviceKind, FloatEnvironment};
use tidemill_model::hugging_face::FILE_BYTES;
use tidemill_model::{Blueprint, Family, ModelConfig, ModelSettings, ResolvedModel, SpecialTokens};
use tidemill_streaming_data::Mixture;
use tidemill_streaming_data::order::cursor::Cursor;
use tidemill_streaming_data::order::{ShuffleOrder, ShuffleSettings};
use tidemill_streaming_data::store::{Cancel, Location};

use super::config::RunConfig;
use super::data::{DataFollow, DataSettings, DocumentBoundaries};
use super::memory::PlanMemory;
use super::questions::Questions;
use super::remarks;
use super::resume::flatten;
use crate::batch::{BatchPlan, MicrobatchGrains, MicrobatchMemory};
use crate::checkpoint::{LocalCopy, TrainerState, Wanted, device_keys, model_folder};
use crate::device::{DeviceChoice, LocalWorkers, kind_in_words};
use crate::error::{JobError, Result};

/// A checked run: its data, its model and its numbers.
#[derive(Debug)]
pub struct ResolvedRun {
    /// The config, every default filled in.
    pub config: RunConfig,
    /// The device that computes.
    pub device: DeviceChoice,
    /// The data that is trained on: at first, if the run follows the newest version.
    pub data: Mixture,
    /// The position of the run's latest checkpoint in data that is kept up to date.
    pub(super) saved_cursor: Option<Cursor>,
    /// The data set of evaluations, and how many of its samples are read.
    pub evaluation: Option<(Mixture, u64)>,
    /// The requests of each evaluation: the questions of `evaluation.tasks`, in tokens.
    pub questions: Option<Arc<dyn Questions>>,
    /// The model that is trained.
    pub model: Arc<Blueprint>,
    /// The folder or URL that the initial parameters come from; they are drawn where there is none.
    pub weights_from: Option<PathBuf>,
    /// The token that ends a document, where documents see nothing of each other.
    pub document_end: Option<u32>,
    /// How a step is cut.
    pub batch: BatchPlan,
    /// Updates of the whole run.
    pub steps: u64,
    /// Settings that are allowed and may surprise, a sentence each.
    pub remarks: Vec<String>,
    /// Bytes of a model from which on its checkpoints are several files: [`FILE_BYTES`], unless it is said otherwise before
    /// the run begins, in every process.
    pub file_bytes: u64,
}

impl ResolvedRun {
    /// Opens the data sets and checks everything that can be checked before a worker starts, for `threads` workers of the only
    /// process of its machine.
    ///
    /// # Errors
    /// The first thing that is wrong, by key or file.
    pub fn new(config: RunConfig, threads: usize) -> Result<Self> {
        Self::for_workers(config, LocalWorkers::alone(threads))
    }

    /// As [`new`](Self::new), for workers that share the memory of their machine with those of its other processes.
    ///
    /// # Errors
    /// The first thing that is wrong, by key or file.
    pub fn for_workers(mut config: RunConfig, workers: LocalWorkers) -> Result<Self> {
        let _standard = FloatEnvironment::standard();
        let device = DeviceChoice::new(&config.device)?;
        let (data, saved_cursor) = config.data.open_for(config.run.seed, &config.run.dir)?;
        let document_end = document_end(&config, &data)?;
        let evaluation = open_evaluation(&config, &data)?;
        let (model_config, weights_from) = resolve_model(&config.model, &config.data, &data)?;
        let recompute = config.model.recompute.unwrap_or_default();
        let model = Arc::new(Blueprint::new(&model_config)?.with_recompute(recompute));
        config.optimizer.terms(model.layout())?;
        let memory = match config.batch.microbatch_grains {
            MicrobatchGrains::Grains(_) => MicrobatchMemory::default(),
            MicrobatchGrains::Auto => {
                let plan = PlanMemory {
                    model: &model,
                    batch: &config.batch,
                    optimizer: &config.optimizer,
                    sharding: config.parallel.shard,
                    positions: data.seq_len(),
                    workers: workers.here,
                    workers_of_process: workers.count,
                    workers_per_device: workers.here.div_ceil(device.places()),
                };
                // Each device of this process once; how many workers there are is not checked yet.
                let count = workers.count.clamp(1, device.places());
                device.open(LocalWorkers { count, ..workers }, plan)??
            }
        };
        let batch = config.batch.plan(memory)?.sharded(config.parallel.shard);
        // Epochs are those of the version that the run began with, wherever it has moved since.
        let began = saved_cursor.as_ref().map_or(data.samples(), |cursor| cursor.stream.samples);
        let parameters = model.layout().parameters();
        let steps = steps(&config, (began, data.seq_len()), parameters, &batch)?;
        let tokens_per_step = (batch.samples_per_step() * data.seq_len()) as u64;
        config.schedule.tokens_per_step = NonZeroU64::new(tokens_per_step);
        if let Some(horizon) = config.schedule.steps {
            config.schedule.check(horizon)?;
        }
        let written = config.model.max_seq_len;
        let of_positions = match weights_from {
            None => remarks::of_positions(&model_config, written, data.seq_len()),
            Some(_) => None,
        };
        let of_order = remarks::of_order(&data, batch.samples_per_step());
        let preset = config.model.preset.take();
        if weights_from.is_none() {
            let recompute = config.model.recompute;
            let sizes = ModelSettings { recompute, ..ModelSettings::from(&model_config) };
            config.model = match preset {
                Some(_) => ModelSettings { preset, kind: None, ..sizes },
                None => sizes,
            };
        }
        config.batch.samples_per_step = Some(batch.samples_per_step());
        config.batch.lanes = Some(batch.lanes());
        config.batch.microbatch_grains = MicrobatchGrains::Grains(batch.microbatch_grains());
        config.run.steps = Some(steps);
        (config.run.tokens, config.run.epochs, config.run.chinchilla) = (None, None, None);
        Ok(Self {
            config,
            device,
            data,
            saved_cursor,
            evaluation,
            questions: None,
            model,
            weights_from,
            document_end,
            batch,
            steps,
            remarks: of_positions.into_iter().chain(of_order).collect(),
            file_bytes: FILE_BYTES,
        })
    }

    /// The rules that hold for a run that begins; one that goes on was checked then.
    ///
    /// # Errors
    /// A schedule that does not fit the run's steps, by key.
    pub fn check_beginning(&self) -> Result<()> {
        Ok(self.config.schedule.check(self.horizon())?)
    }

    /// The state before the first update, with every setting that may not change on resume.
    pub fn initial_state(&self, kind: &DeviceKind) -> TrainerState {
        let mut state = TrainerState::new(0, 0, Cursor::start(self.data.identity()));
        state.device = device_keys(kind);
        let settings = &mut state.settings;
        let config = &self.config;
        flatten("run.seed", &config.run.seed, settings);
        flatten("model", &self.model_json(), settings);
        name_as_in_table(settings);
        flatten(DOCUMENTS_KEY, &config.data.document_boundaries, settings);
        flatten("batch.samples_per_step", &self.batch.samples_per_step(), settings);
        flatten("batch.lanes", &self.batch.lanes(), settings);
        flatten("batch.grain_samples", &config.batch.grain_samples, settings);
        flatten("optimizer", &config.optimizer, settings);
        flatten("schedule", &config.schedule.in_steps(self.horizon()), settings);
        flatten("device.precision", &config.device.precision, settings);
        self.set_horizon(&mut state, self.horizon());
        state
    }

    /// The position of the run in its data, as far as it is known.
    pub(super) fn cursor(&self) -> Cursor {
        let begins = || Cursor::start(self.data.identity());
        self.saved_cursor.clone().unwrap_or_else(begins)
    }

    /// Whether the run's data has several versions, or may get them.
    fn has_moves(&self, saved: Option<&Cursor>) -> bool {
        let has_moved = |cursor: &Cursor| !cursor.moves.is_empty();
        self.config.data.follow == DataFollow::Latest
            || saved.is_some_and(has_moved)
            || self.saved_cursor.as_ref().is_some_and(has_moved)
    }

    /// Checks that the run resumes from the checkpoint by which the data was opened, if it resumes.
    ///
    /// # Errors
    /// Another, where that matters.
    pub(super) fn check_cursor(&self, saved: Option<&Cursor>) -> Result<()> {
        let (opened, found) = (self.cursor().position, saved.map_or(0, |it| it.position));
        let is_same =
            opened == found && saved.is_none_or(|saved| self.cursor().moves == saved.moves);
        if is_same || !self.has_moves(saved) {
            return Ok(());
        }
        let expected = format!("position {opened} in the data, as when it was opened");
        Err(JobError::value("the latest checkpoint of run.dir", expected, found))
    }

    /// The horizon of the schedule of a run that begins.
    pub(super) fn horizon(&self) -> u64 {
        self.config.schedule.steps.unwrap_or(self.steps)
    }

    /// Makes `horizon` the horizon of the schedule, with the settings that depend on it.
    pub(super) fn set_horizon(&self, state: &mut TrainerState, horizon: u64) {
        let warmup_steps = self.config.schedule.resolved_warmup_steps(horizon);
        for (key, steps) in [(HORIZON_KEY, horizon), (WARMUP_KEY, warmup_steps)] {
            state.settings.insert(key.to_owned(), Value::from(steps));
        }
    }

    /// Settings that must be equal in all processes for them to train together.
    pub fn identity(&self, kind: &DeviceKind) -> BTreeMap<String, String> {
        let state = self.initial_state(kind);
        let mut identity: BTreeMap<String, String> =
            state.settings.iter().map(|(key, value)| (key.clone(), value.to_string())).collect();
        let mut insert = |key: &str, value: String| identity.insert(key.to_owned(), value);
        insert("device.backend (its kind)", kind_in_words(kind));
        insert("data.dataset (its samples)", self.data.fingerprint().to_string());
        if self.has_moves(None) {
            let Cursor { position, moves, .. } = self.cursor();
            let moves: Vec<String> = moves
                .iter()
                .map(|it| format!("{} from {}", it.stream.fingerprint, it.position))
                .collect();
            let place = format!("position {position}, versions [{}]", moves.join(", "));
            insert("run.dir (where it stands in its data)", place);
            insert("data.follow", format!("{:?}", self.config.data.follow).to_lowercase());
        }
        insert("data.shuffle", self.config.data.shuffle.to_string());
        insert("data.window_samples", self.config.data.window_samples.to_string());
        insert("parallel.shard", self.config.parallel.shard.word().to_owned());
        insert("run.steps", self.steps.to_string());
        insert("bytes of a checkpoint's files", self.file_bytes.to_string());
        insert("checkpoint.every_steps", self.config.checkpoint.every_steps.to_string());
        if let (Some((data, samples)), Some(settings)) = (&self.evaluation, &self.config.evaluation)
        {
            insert("evaluation.dataset (its samples)", data.fingerprint().to_string());
            insert("evaluation.samples", samples.to_string());
            insert("evaluation.every_steps", settings.every_steps.to_string());
        }
        if let Some(questions) = &self.questions {
            insert("evaluation.tasks (their requests)", questions.fingerprint());
        }
        identity
    }

    /// How long a peer may be silent.
    pub fn peer_deadline(&self) -> Duration {
        Duration::from_secs_f64(self.config.run.peer_deadline_seconds)
    }

    /// How long the processes may take to meet.
    pub fn connect_deadline(&self) -> Duration {
        Duration::from_secs_f64(self.config.run.connect_deadline_seconds)
    }

    /// How long anything in the run may stand still.
    pub fn step_deadline(&self) -> Duration {
        Duration::from_secs_f64(self.config.run.step_deadline_seconds)
    }

    /// Whether samples come from a store, of the data sets or of the evaluation.
    pub(super) fn reads_store(&self) -> bool {
        let data = &self.config.data;
        let evaluation = self.config.evaluation.as_ref().map(|evaluation| &evaluation.dataset);
        let streams = data.streams.iter().map(|stream| &stream.dataset);
        streams.chain(&data.dataset).chain(evaluation).any(|path| is_in_store(path))
    }

    /// Whether the run keeps its state in a store, or begins with weights from one.
    pub(super) fn keeps_state_in_store(&self) -> bool {
        is_in_store(&self.config.run.dir) || self.weights_from.as_deref().is_some_and(is_in_store)
    }

    /// The resolved config as TOML, with the schedule of a run that begins.
    pub fn to_toml(&self) -> String {
        self.to_toml_with(self.horizon())
    }

    /// The resolved config as TOML, with a schedule of this horizon.
    pub(super) fn to_toml_with(&self, horizon: u64) -> String {
        let mut config = self.config.clone();
        config.schedule = config.schedule.in_steps(horizon);
        config.schedule.steps = Some(horizon);
        config.to_toml()
    }

    /// `config.json` of the model.
    pub fn model_json(&self) -> Value {
        self.model.config_json().clone()
    }

    /// `tokenizer.json` of the data set, where it has one.
    ///
    /// # Errors
    /// A file or object that cannot be read.
    pub fn tokenizer(&self) -> Result<Option<Arc<[u8]>>> {
        for part in self.data.parts() {
            if let Some(bytes) = part.data_set.read_tokenizer()? {
                return Ok(Some(bytes.as_ref().into()));
            }
        }
        Ok(None)
    }
}

/// Names of sizes in the `config.json` of families, and their keys in `[model]`, which are those that a user knows.
const MODEL_KEYS: [(&str, &str); 19] = [
    ("hidden_size", "d_model"),
    ("num_hidden_layers", "n_layers"),
    ("num_layers", "n_layers"),
    ("state_size", "d_state"),
    ("conv_kernel", "d_conv"),
    ("time_step_rank", "dt_rank"),
    ("num_heads", "n_heads"),
    ("num_attention_heads", "n_heads"),
    ("num_key_value_heads", "n_kv_heads"),
    ("head_dim", "head_width"),
    ("mamba2_head_dim", "mamba2_head_width"),
    ("sliding_window", "window_size"),
    ("expansion_ratio", "expansion"),
    ("max_position_embeddings", "max_seq_len"),
    ("attn_config.alibi", "alibi"),
    ("attn_config.alibi_bias_max", "alibi_bias_max"),
    ("attn_config.clip_qkv", "clip_qkv"),
    ("attn_config.qk_ln", "qk_ln"),
    ("attn_config.softmax_scale", "softmax_scale"),
];

/// Names the settings of a model as its `[model]` table does.
pub(super) fn name_as_in_table(settings: &mut BTreeMap<String, Value>) {
    // In models without Llama blocks, this width follows from another size of the table.
    let of_llama = settings
        .contains_key("model.num_key_value_heads")
        .then_some(("intermediate_size", "mlp_width"));
    for (name, key) in MODEL_KEYS.into_iter().chain(of_llama) {
        if let Some(value) = settings.remove(&format!("model.{name}")) {
            settings.insert(format!("model.{key}"), value);
        }
    }
}

/// The key of the boundaries of documents.
pub(super) const DOCUMENTS_KEY: &str = "data.document_boundaries";

/// The key of the schedule's horizon among the settings of a checkpoint.
pub(super) const HORIZON_KEY: &str = "schedule.steps";

/// The key of its warm-up.
const WARMUP_KEY: &str = "schedule.warmup_steps";

/// The order in which evaluation samples are taken: as stored.
fn evaluation_shuffle() -> ShuffleSettings {
    ShuffleSettings {
        order: ShuffleOrder::None,
        window_samples: ShuffleSettings::DEFAULT_WINDOW_SAMPLES,
        seed: 0,
    }
}

fn document_end(config: &RunConfig, data: &Mixture) -> Result<Option<u32>> {
    match (config.data.document_boundaries, data.eos_token_id()) {
        (DocumentBoundaries::Ignore, _) => Ok(None),
        (DocumentBoundaries::Reset, Some(end)) => Ok(Some(end)),
        (DocumentBoundaries::Reset, None) => {
            let expected = "\"ignore\", as data.dataset does not tell its eos_token_id";
            Err(JobError::value(DOCUMENTS_KEY, expected, "\"reset\""))
        }
    }
}

fn is_in_store(path: &Path) -> bool {
    Location::of_path(path).is_ok_and(|location| location.local().is_none())
}

fn open_evaluation(config: &RunConfig, data: &Mixture) -> Result<Option<(Mixture, u64)>> {
    let Some(settings) = &config.evaluation else { return Ok(None) };
    let found = Mixture::of(config.data.open_one(&settings.dataset)?, evaluation_shuffle())?;
    if found.seq_len() != data.seq_len() {
        let expected = format!("samples of seq_len {}, as data.dataset has", data.seq_len());
        return Err(JobError::value("evaluation.dataset", expected, found.seq_len()));
    }
    if let (Some(size), Some(vocab_size)) = (found.vocab_size(), data.vocab_size())
        && size > vocab_size
    {
        let expected = format!("a vocabulary of at most {vocab_size}, as data.dataset has");
        return Err(JobError::value("evaluation.dataset", expected, size));
    }
    let (eos, end) = (found.eos_token_id(), data.eos_token_id());
    if config.data.document_boundaries == DocumentBoundaries::Reset && eos != end {
        let in_words = |token: Option<u32>| token.map_or("none".to_owned(), |id| id.to_string());
        let expected = format!("an eos_token_id of {}, as data.dataset has", in_words(end));
        return Err(JobError::value("evaluation.dataset", expected, in_words(eos)));
    }
    let samples = settings.samples.min(found.samples());
    Ok(Some((found, samples)))
}

fn resolve_model(
    settings: &ModelSettings,
    places: &DataSettings,
    data: &Mixture,
) -> Result<(ModelConfig, Option<PathBuf>)> {
    let (mut config, folder) = match settings.resolve(data.vocab_size())? {
        ResolvedModel::New(mut config) => {
            *config.special_tokens_mut() = SpecialTokens {
                bos: data.bos_token_id(),
                eos: data.eos_token_id(),
                pad: data.pad_token_id(),
            };
            (config, None)
        }
        ResolvedModel::From(folder) => {
            let folder = model_folder(&folder)?;
            let settings = places.remote();
            let config = LocalCopy::of_with(&folder, Wanted::Config, &settings, Cancel::default())?
                .read(|folder| Ok(ModelConfig::read(folder)?))?;
            if let Some(size) = data.vocab_size()
                && size as usize > config.vocab_size()
            {
                let expected = format!("a model with the data set's {size} tokens at least");
                return Err(JobError::value("model.from", expected, config.vocab_size()));
            }
            (config, Some(folder))
        }
    };
    if settings.max_seq_len.is_none() && folder.is_none() {
        // A preset's number is a default.
        config.extend_positions(data.seq_len());
    }
    if let Some(most) = config.learned_positions()
        && data.seq_len() > most
    {
        let expected = format!("at least {}, the data set's seq_len", data.seq_len());
        return Err(JobError::value("model.max_seq_len", expected, most));
    }
    Ok((config, folder))
}

/// Tokens for each parameter of a model where only compute is short (Hoffmann et al., 2022).
const CHINCHILLA_TOKENS: f64 = 20.0;

/// The steps of a run by samples of an epoch, each of so many predicted tokens, and by the model's parameters.
fn steps(
    config: &RunConfig,
    (epoch_samples, seq_len): (u64, usize),
    parameters: usize,
    batch: &BatchPlan,
) -> Result<u64> {
    let samples_per_step = batch.samples_per_step() as u64;
    let of_tokens = |tokens: u64| tokens.div_ceil(samples_per_step * seq_len as u64).max(1);
    let run = &config.run;
    let (key, found, steps) = if let Some(steps) = run.steps {
        ("run.steps", steps.to_string(), steps)
    } else if let Some(tokens) = run.tokens {
        ("run.tokens", tokens.to_string(), of_tokens(tokens))
    } else if let Some(multiple) = run.chinchilla {
        let tokens = (multiple * CHINCHILLA_TOKENS * parameters as f64).ceil() as u64;
        ("run.chinchilla", multiple.to_string(), of_tokens(tokens))
    } else {
        let epochs = run.epochs.unwrap_or(1.0);
        let samples = (epochs * epoch_samples as f64).ceil() as u64;
        ("run.epochs", epochs.to_string(), samples.div_ceil(samples_per_step).max(1))
    };
    // TOML has no larger numbers, and positions are counted in as many bits.
    let most = i64::MAX as u64 / samples_per_step;
    if steps > most {
        let expected = format!("no more than {most} steps of {samples_per_step} samples");
        return Err(JobError::value(key, expected, found));
    }
    Ok(steps)
}
