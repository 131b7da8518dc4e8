//! A folder for each test: data sets made from fixed text, configs, and runs of them.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use tidemill::JobError;
use tidemill::job::{ResolvedRun, RunConfig, TrainOptions, TrainSummary, train};
use tidemill::streaming_data::prepare::{ByteTokenizer, PrepareSettings, prepare};

use super::device::{backend, precision};
use super::outcome::Outcome;
use super::program::{Finished, Running};

/// Predicted tokens of a sample.
pub const SEQ_LEN: usize = 17;

/// A run of odd sizes: lanes of five or six samples, which grains of two do not divide evenly, and
/// a tied embedding. Paths are relative to the workbench.
pub const CONFIG: &str = r#"
[run]
dir = "run"
steps = 5

[model]
kind = "mamba"
d_model = 20
n_layers = 2
d_state = 5
d_conv = 3
expand = 3

[data]
dataset = "data"
window_samples = 100

[batch]
samples_per_step = 45
lanes = 8
grain_samples = 2
microbatch_grains = 2

[optimizer]
learning_rate = 3e-3

[schedule]
warmup_steps = 2

[checkpoint]
every_steps = 2
"#;

/// [`CONFIG`], on the device that these tests run on.
pub fn config() -> String {
    format!("{CONFIG}\n[device]\nbackend = {:?}\nprecision = {:?}\n", backend(), precision())
}

/// splitmix64.
pub fn random(seed: u64) -> u64 {
    let mut x = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// `words` words, a function of the seed.
pub fn text(seed: u64, words: u64) -> String {
    const WORDS: [&str; 12] = [
        "tide", "mill", "stone", "turns", "the", "water", "grain", "wheel", "und", "of", "größer",
        "a",
    ];
    let word = |index| WORDS[(random(seed << 32 | index) % WORDS.len() as u64) as usize];
    (0..words).map(word).collect::<Vec<_>>().join(" ")
}

/// A folder with `data` and `validation`, and the files of a test.
pub struct Workbench {
    folder: TempDir,
}

/// One call of the library's `train`: [`config`] with overrides, on a number of workers.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// The run folder.
    pub dir: &'a str,
    /// Workers of this process.
    pub workers: usize,
    /// `key=value`, as `--set` takes them.
    pub set: &'a [&'a str],
}

impl Workbench {
    pub fn new() -> Self {
        let bench = Self { folder: tempfile::tempdir().unwrap() };
        bench.write("run.toml", config());
        for (name, seed, documents) in [("data", 1, 9), ("validation", 2, 2)] {
            let texts = bench.path(&format!("{name}-text"));
            std::fs::create_dir(&texts).unwrap();
            for index in 0..documents {
                let words = 40 + 31 * index;
                std::fs::write(texts.join(format!("{index}.txt")), text(seed + 10 * index, words))
                    .unwrap();
            }
            bench.prepare(&texts, name);
        }
        bench
    }

    /// Makes the data set `name` from `input`, a file or folder.
    pub fn prepare(&self, input: &Path, name: &str) {
        let seq_len = NonZeroUsize::new(SEQ_LEN).unwrap();
        let mut settings = PrepareSettings::new(vec![input.to_owned()], self.path(name), seq_len);
        settings.shard_samples = NonZeroUsize::new(97);
        prepare(&settings, &ByteTokenizer, &mut |_| ControlFlow::Continue(())).unwrap();
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a file, and creates the folders above it.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        path
    }

    /// Trains with the library.
    pub fn try_train(&self, job: Job<'_>) -> Result<TrainSummary, JobError> {
        self.try_train_with(&config(), job)
    }

    /// Trains with the library by another config.
    pub fn try_train_with(&self, config: &str, job: Job<'_>) -> Result<TrainSummary, JobError> {
        let mut set = vec![format!("run.dir={:?}", self.path(job.dir))];
        if !config.contains("data.streams") {
            set.push(format!("data.dataset={:?}", self.path("data")));
        }
        set.extend(job.set.iter().map(|&assignment| assignment.to_owned()));
        let config = RunConfig::parse(config, "run.toml", &set)?;
        train(ResolvedRun::new(config, job.workers)?, TrainOptions::threads(job.workers))
    }

    /// Trains with the library and collects the contents of the run folder.
    pub fn train(&self, job: Job<'_>) -> Outcome {
        self.try_train(job).unwrap_or_else(|error| panic!("{job:?}: {}", causes(&error)));
        self.outcome(job.dir)
    }

    /// The contents of the run folder `dir`.
    pub fn outcome(&self, dir: &str) -> Outcome {
        Outcome::read(&self.path(dir))
    }

    /// Runs the program in this folder until it ends.
    pub fn tidemill(&self, arguments: &[&str]) -> Finished {
        Running::start(self.folder(), arguments).finish()
    }

    /// Starts the program in this folder.
    pub fn start(&self, arguments: &[&str]) -> Running {
        Running::start(self.folder(), arguments)
    }
}

/// An error with all of its causes.
pub fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}
